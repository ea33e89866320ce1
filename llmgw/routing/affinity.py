"""What endpoints have cached of a prompt: the exact index where it is trusted, the estimated one elsewhere.

The estimated index counts in blocks of bytes, so tokens follow from the share of the prompt that matched. Capacities are
given in tokens, and `bytes_a_token` (which usage figures correct) turns them into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.endpoint import Endpoint
from llmgw.kvcache.blocks import BLOCK
from llmgw.kvcache.events import ExactIndex
from llmgw.kvcache.heat import Heat
from llmgw.kvcache.index import CAPACITY, ENTRIES, PrefixIndex
from llmgw.request import InferenceRequest

BYTES_A_TOKEN = 4.0  # English; corrected by what engines count
STEP = 0.02  # weight of one request in that correction
MEASURED = 16  # blocks of a prompt from which on the last, partial one does not matter to it

TELLING = 512  # tokens believed to be cached, from which on the engine's own figure says something of its cache
SHRINK = 0.98  # of the believed room, for a prompt that was not there any more
GROW = 1.002  # for one that was: room is lost in 35 misses and found again in 350 hits
LEAST = 0.05

NOTHING: Mapping[str, int] = {}


class Affinity:
    """Both indexes."""

    def __init__(self, entries: int = ENTRIES, block_tokens: float | None = None) -> None:
        """*block_tokens*: tokens a block of the requests has, where it is known (replayed traces)."""
        self.estimated = PrefixIndex(entries)
        self.exact = ExactIndex()
        self.heat = Heat()
        self.exact.on_cleared = self.estimated.clear
        self._fixed = block_tokens
        self.bytes_a_token = BYTES_A_TOKEN
        self._tokens: dict[str, int | None] = {}
        self._usable: dict[str, float] = {}  # share of an endpoint's cache that prompts stay in

    @property
    def block_tokens(self) -> float:
        return self._fixed or BLOCK / self.bytes_a_token

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """The full set. Who stays (same id) keeps its blocks."""
        ids = {e.id for e in endpoints}
        for gone in self._tokens.keys() - ids:
            self.estimated.forget(gone)
            self.exact.forget(gone)
            del self._tokens[gone]
            self._usable.pop(gone, None)
        for endpoint in endpoints:
            tokens = endpoint.blocks * endpoint.block_size if endpoint.blocks and endpoint.block_size else None
            self.resize(endpoint.id, tokens)

    def resize(self, endpoint: str, tokens: int | None) -> None:
        """Its cache has room for *tokens*; None = unknown."""
        self._tokens[endpoint] = tokens
        blocks = CAPACITY if tokens is None else tokens / self.block_tokens
        self.estimated.resize(endpoint, int(blocks * self._usable.get(endpoint, 1.0)))

    def _told(self, endpoint: str, believed: int, cached: int) -> None:
        """The engine had *cached* tokens where *believed* were expected: what runs takes room that was thought to be
        cache, so the part of it that prompts are kept in is found out."""
        if believed < TELLING:
            return
        before = self._usable.get(endpoint, 1.0)
        after = max(LEAST, before * SHRINK) if cached < believed / 2 else min(1.0, before * GROW)
        if after != before:
            self._usable[endpoint] = after
            self.resize(endpoint, self._tokens.get(endpoint))

    def matched(self, request: InferenceRequest, ids: Sequence[int] = ()) -> Mapping[str, int]:
        """Prompt tokens that each endpoint has, by its id. *ids*: the prompt's tokens, where a step rendered them."""
        blocks, ids = request.blocks, ids or request.ids
        if not blocks:
            return self.exact.match(ids, request.lora) if ids else NOTHING
        found = self.estimated.match(blocks)
        if found:
            share = request.prompt_tokens / max(len(blocks), 1)
            found = {name: int(depth * share) for name, depth in found.items()}
        if ids and self.exact.trusted:
            found = {n: t for n, t in found.items() if n not in self.exact.trusted}
            found.update(self.exact.match(ids, request.lora))
        return found

    def reuse(self, request: InferenceRequest, matched: Mapping[str, int], now: float) -> float:
        """Requests within ten seconds that a further copy of what is cached of the prompt would serve."""
        last = _last(request, matched)
        if last is None:
            return 0.0
        most = max(matched.values())
        return self.heat.uses(last, now) / (1 + sum(tokens > most / 2 for tokens in matched.values()))

    def sent(self, endpoint: str, request: InferenceRequest, now: float, matched: Mapping[str, int] = NOTHING) -> None:
        """*request* goes to *endpoint*, which will have its prompt. *matched*: as found before."""
        if request.blocks:
            last = _last(request, matched)
            if last is not None:
                self.heat.touch(last, now)
            self.estimated.record(endpoint, request.blocks)

    def ended(
        self,
        endpoint: str,
        request: InferenceRequest,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        cached_tokens: int | None = None,
        *,
        computed: bool,
        believed: int,
    ) -> None:
        """It is over. *computed*: its prompt was (an answer began); else the endpoint has only the *believed* tokens of
        it that it had before. *prompt_tokens*: as the engine counted them."""
        blocks = request.blocks
        if not blocks:
            return
        if not computed:
            had = int(believed * len(blocks) / max(request.prompt_tokens, 1))
            self.estimated.correct(endpoint, blocks, had)
            return
        if cached_tokens is not None:
            self._told(endpoint, believed, cached_tokens)
        if completion_tokens:
            self.estimated.fill(endpoint, int(completion_tokens / self.block_tokens))
        if prompt_tokens and not self._fixed and not request.media and len(blocks) >= MEASURED:
            ratio = BLOCK * len(blocks) / prompt_tokens
            if 1.0 <= ratio <= 16.0:
                self.bytes_a_token += STEP * (ratio - self.bytes_a_token)


def _last(request: InferenceRequest, matched: Mapping[str, int]) -> int | None:
    """The last block of the prompt that any endpoint has cached."""
    blocks = request.blocks
    if not blocks or not matched:
        return None
    depth = round(max(matched.values()) * len(blocks) / max(request.prompt_tokens, 1))
    return blocks[min(depth, len(blocks)) - 1] if depth else None
