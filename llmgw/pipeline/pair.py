"""Prefill and decode, chosen together; or one endpoint for both, where that is quicker.

    cost of a pair  = prefill's queue and own prefill − what prefill has cached        (its decision's costs)
                    + the hand-over: KV bytes that decode lacks ÷ the link's speed      (`links`)
                    + decode's pressure: speed for one more, full cache                 (its decision's costs)
                    + a trifle for pairs on different hosts or rails
    cost of one     = queue, prefill, what it delays the answers running there, pressure − what it has cached

All in seconds, from the scorers of `llmgw.routing`. *Hard*: a pair has a fabric in common; no cost buys its way across. Endpoints
that name no fabric are taken to be on one network together.

A pair splits the work only if it is cheaper (`auto`). Every prefill × decode endpoint would be 10,000 pairs in a fleet of
200: only the `BEST` of each side a fabric are paired, which is exact up to that number and never worse than what their
own sides' costs differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.pipeline.links import Links
from llmgw.request import Refusal
from llmgw.routing.decide import decide
from llmgw.routing.decision import Decision
from llmgw.routing.field import Query
from llmgw.routing.profiles import make

BEST = 8

FAR = 0.002  # seconds: near each other is better, and never worth a queue

NO_FABRIC = ""
"""The network of endpoints that name none."""

PREFILL = make("prefill-leg", {"scorers": {"queue": 1, "prefill": 1, "prefix": 1, "health": 1}})
DECODE = make("decode-leg", {"scorers": {"queue": 1, "decode": 0.1, "inflight": 0.01, "kv": 0.5, "health": 1}})
WHOLE = make(
    "one-endpoint",
    {"scorers": {"queue": 1, "prefill": 1, "prefix": 1, "decode": 0.1, "inflight": 0.01, "kv": 0.5, "health": 1}},
)

Mode = Literal["auto", "always", "never"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a pipeline pairs. *kv_bytes*: of one token, all layers."""

    mode: Mode = "auto"
    kv_bytes: int = 128 << 10


class PairDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Which endpoints, and why: `llmgw ctl explain-route` prints it. Costs are seconds; None = was not possible.

    *prefill* is None where one endpoint does it all.
    """

    prefill: Endpoint | None
    decode: Endpoint
    fabric: str = NO_FABRIC
    why: str = ""
    size: int = 0  # bytes that the hand-over moves
    transfer: float = 0.0
    pair_cost: float | None = None
    local_cost: float | None = None
    cached_prefill: int = 0  # tokens of the prompt that each side is believed to have
    cached_decode: int = 0
    avoided: tuple[tuple[str, str], ...] = ()  # degraded links among those that were compared
    legs: tuple[Decision, ...] = ()  # by which it was made: prefill, decode (the chosen ones of the pair), one endpoint
    decode_leg: Decision  # as the ledger takes it: phases of what the decode endpoint does
    prefill_leg: Decision | None = None


class _Pair(msgspec.Struct, frozen=True, gc=False):
    cost: float
    prefill: int  # position in its decision's candidates
    decode: int
    fabric: str
    transfer: float
    size: int


def fabrics(endpoint: Endpoint) -> Iterable[str]:
    """The networks that KV blocks can take from or to it."""
    return endpoint.fabrics or (NO_FABRIC,)


def choose(
    snapshot: Snapshot,
    query: Query,
    policy: Policy,
    matched: Mapping[str, int],
    links: Links,
    random: Callable[[], float],
    now: float,
    *,
    split: bool = True,
    why: str = "",
    keep_prefill: str = "",
) -> PairDecision | Refusal:
    """Who does *query*. *split* False: it must not be split, and *why*. *keep_prefill*: who holds its blocks already."""

    def one(name: Sequence[Literal["prefill", "decode"]], profile: object) -> Decision | Refusal:
        leg = msgspec.structs.replace(query, phases=tuple(name))
        return decide(snapshot, leg, profile, matched, random, now, weigh=True)  # type: ignore[arg-type]

    decode = one(("decode",), DECODE)
    if isinstance(decode, Refusal):
        return decode
    local: Decision | None = None
    if not keep_prefill and (policy.mode != "always" or not split):
        found = one(("decode",), WHOLE)
        local = found if isinstance(found, Decision) else None
    if not split or policy.mode == "never":
        assert local is not None
        return _local(local, why or "never", None, (local,))
    prefill = one(("prefill",), PREFILL)
    if isinstance(prefill, Refusal):
        return (
            prefill if local is None else _local(local, f"no prefill endpoint: {prefill.filter}", None, (decode, local))
        )
    best, avoided = _best(prefill, decode, query, policy, matched, links, now, keep_prefill)
    legs = (prefill, decode) + ((local,) if local is not None else ())
    if best is None:
        if local is not None:
            return _local(local, "no pair with a fabric in common", None, legs)
        return Refusal(
            reason="no_endpoint",
            filter="fabric",
            message=f"No prefill and decode endpoint of {query.model[:100]!r} have a fabric in common.",
        )
    if local is not None and min(local.costs) <= best.cost:
        return _local(local, "one endpoint is quicker", best.cost, legs)
    prefill, decode = _at(prefill, best.prefill, matched), _at(decode, best.decode, matched)
    legs = (prefill, decode, *legs[2:])
    source, target = prefill.endpoint, decode.endpoint
    if source.id == target.id and local is not None:
        return _local(local, "the same endpoint is best for both", best.cost, legs)
    return PairDecision(
        prefill=source,
        decode=target,
        fabric=best.fabric,
        why="always" if policy.mode == "always" else "the pair is quicker",
        size=best.size,
        transfer=best.transfer,
        pair_cost=best.cost,
        local_cost=min(local.costs) if local is not None else None,
        cached_prefill=matched.get(source.id, 0),
        cached_decode=matched.get(target.id, 0),
        avoided=avoided,
        legs=legs,
        decode_leg=decode,
        prefill_leg=prefill,
    )


def _best(
    prefill: Decision,
    decode: Decision,
    query: Query,
    policy: Policy,
    matched: Mapping[str, int],
    links: Links,
    now: float,
    keep: str,
) -> tuple[_Pair | None, tuple[tuple[str, str], ...]]:
    """The cheapest pair, and the degraded links that were compared."""
    sides = [_by_fabric(decision, keep if decision is prefill else "") for decision in (prefill, decode)]
    prompt = query.request.prompt_tokens
    best: _Pair | None = None
    avoided = []
    for fabric, sources in sides[0].items():
        for source in sources:
            a = _endpoint(prefill, source)
            for target in sides[1].get(fabric, ()):
                b = _endpoint(decode, target)
                if a.id == b.id:
                    continue
                size = max(0, prompt - matched.get(b.id, 0)) * policy.kv_bytes
                transfer = links.seconds((a.id, b.id), fabric, size, now)
                cost = prefill.costs[source] + decode.costs[target] + transfer + _far(a, b)
                if links.degraded((a.id, b.id), now):
                    avoided.append((a.id, b.id))
                if best is None or cost < best.cost:
                    best = _Pair(cost, source, target, fabric, transfer, size)
    return best, tuple(avoided)


def _by_fabric(decision: Decision, keep: str) -> dict[str, list[int]]:
    """The `BEST` candidates (positions among them) on each fabric, cheapest first."""
    found: dict[str, list[int]] = {}
    for position in sorted(range(len(decision.candidates)), key=decision.costs.__getitem__):
        endpoint = _endpoint(decision, position)
        if keep and endpoint.id != keep:
            continue
        for fabric in fabrics(endpoint):
            on = found.setdefault(fabric, [])
            if len(on) < BEST:
                on.append(position)
    return found


def _at(decision: Decision, position: int, matched: Mapping[str, int]) -> Decision:
    """*decision* with another one of its candidates chosen."""
    endpoint = _endpoint(decision, position)
    cached = min(max(0, decision.prompt_tokens - 1), matched.get(endpoint.id, 0))
    return msgspec.structs.replace(decision, endpoint=endpoint, chosen=position, cached_tokens=cached)


def _endpoint(decision: Decision, position: int) -> Endpoint:
    return decision.endpoints[decision.candidates[position]]


def _far(a: Endpoint, b: Endpoint) -> float:
    """Nothing on one host or one rail."""
    rail = a.labels.get("rail")
    near = (a.host and a.host == b.host) or (rail is not None and rail == b.labels.get("rail"))
    return 0.0 if near else FAR


def _local(local: Decision, why: str, pair_cost: float | None, legs: tuple[Decision, ...]) -> PairDecision:
    return PairDecision(
        prefill=None,
        decode=local.endpoint,
        why=why,
        pair_cost=pair_cost,
        local_cost=local.costs[local.chosen],
        cached_decode=local.cached_tokens,
        legs=legs,
        decode_leg=msgspec.structs.replace(local, phases=("prefill", "decode")),
    )
