"""Bands: what priority classes there are, what each is promised, and who may use which.

Their order in the list is their rank: the first is served first. A band is promised two things whatever the others do, a
share of the tokens admitted while it has work, and an answer (a lease or a refusal) within its deadline.
"""

# ruff: noqa: RUF009 -- `_key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs

from llmgw.request import Refusal
from llmgw.units import Duration, Size

Preempt = Literal["never", "before_first_token", "requeue"]


def _key(meaning: str, default: Any = attrs.NOTHING, low: float | None = None, high: float | None = None) -> Any:
    """A key of the file: *low* and *high* bound it (both allowed)."""

    def check(value: float) -> str | None:
        if low is not None and value < low:
            return f"must be at least {low:g}"
        return f"must be at most {high:g}" if high is not None and value > high else None

    return attrs.field(default=default, metadata={"meaning": meaning, "check": check if low is not None else None})


@attrs.frozen(kw_only=True)
class Band:
    """One priority class. The first of the list is served first."""

    name: str = _key("As clients say it in `x-llmgw-band`.")
    default: bool = _key("Whether requests that name no band are of this one. Exactly one band is the default.", False)
    share: float = _key("Least share of the tokens admitted while it has work, whatever higher bands want.", 0.0, 0, 1)
    deadline: Duration = _key(
        "Longest wait for the first token; then 429 `queue_timeout`, or `deadline_unmeetable` at once where that is foreseen.",
        Duration(60.0),
        0.001,
    )
    max_queue: int = _key("Most requests that wait, over all models; 429 `queue_full`.", 4096, 0)
    max_queue_bytes: Size = _key(
        "Most bytes of bodies that wait, over all models; 429 `queue_full`.", Size(256 << 20), 0
    )
    principals: tuple[str, ...] = _key("Who may use it. Empty: everybody whose listener and key allow it.", ())
    max_slowdown: float | None = _key(
        "How much longer its requests may take beside lower bands than without them, as a factor. Lower bands get only as"
        " much of an engine as keeps it. Unset: lower bands are not held back.",
        None,
        1.01,
        100,
    )
    max_itl: Duration | None = _key("The same as an absolute bound: seconds between two tokens.", None, 0.0001)
    preempt: Preempt = _key(
        "Whether its running requests may be ended for higher bands: `before_first_token` those that gave nothing yet,"
        " `requeue` also those that nothing of reached the client. They wait again, at the head.",
        "never",
    )


DEFAULTS: tuple[Band, ...] = (
    Band(name="interactive", deadline=Duration(30.0), max_queue=1024, max_queue_bytes=Size(64 << 20), max_slowdown=1.2),
    Band(name="standard", default=True, share=0.2, deadline=Duration(120.0)),
    Band(name="batch", share=0.05, deadline=Duration(600.0), max_queue=20_000, max_queue_bytes=Size(1 << 30)),
)
"""Ten minutes is how long common client libraries wait for an answer: nobody is there to be served later."""


def problems(bands: Sequence[Band]) -> list[tuple[str, str]]:
    """(path below the list, what is wrong) of everything that a single band does not show."""
    found: list[tuple[str, str]] = []
    if not bands:
        return [("", "must name at least one band")]
    seen: set[str] = set()
    for at, band in enumerate(bands):
        if not band.name:
            found.append((f"[{at}].name", "must not be empty"))
        if band.name in seen:
            found.append((f"[{at}].name", f"another band is called {band.name!r}"))
        seen.add(band.name)
        if band.max_slowdown is not None and band.max_itl is not None:
            found.append((f"[{at}].max_itl", "max_slowdown is set too; one of them bounds the band"))
    total = sum(b.share for b in bands)
    if total > 1 + 1e-9:
        found.append(("", f"the shares add up to {total:g}, more than there is"))
    defaults = [b.name for b in bands if b.default]
    if len(defaults) != 1:
        found.append(
            ("", f"exactly one band must be the default, not {len(defaults)}: {', '.join(defaults) or 'none'}")
        )
    return found


class Bands:
    """The bands in force. *order*: highest first."""

    __slots__ = ("by_name", "default", "order", "shares")

    def __init__(self, order: Iterable[Band] = DEFAULTS) -> None:
        """Raises ValueError with everything that `problems` finds."""
        self.order = tuple(order)
        if wrong := problems(self.order):
            raise ValueError("; ".join(f"bands{path}: {text}" for path, text in wrong))
        self.by_name = {band.name: rank for rank, band in enumerate(self.order)}
        self.default = next(rank for rank, band in enumerate(self.order) if band.default)
        self.shares = any(band.share for band in self.order)

    def rank(self, asked: str, principal: str, *allowed: Sequence[str]) -> int | Refusal:
        """Which band a request is of: 0 is the highest. *asked* "" means the default, or the lowest that is allowed.

        *allowed*: lists of names, each of which bounds what may be claimed; an empty one does not.
        """
        rank = self.by_name.get(asked) if asked else self.default
        if rank is None:
            return Refusal(
                reason="unknown_band",
                param="x-llmgw-band",
                message=f"There is no band {asked[:100]!r}; there are: {', '.join(self.by_name)}.",
            )
        if self._may(rank, principal, allowed):
            return rank
        open_to = [name for name, r in self.by_name.items() if self._may(r, principal, allowed)]
        if not asked and open_to:
            return self.by_name[open_to[-1]]
        return Refusal(
            reason="forbidden_field",
            param="x-llmgw-band",
            message=f"Band {self.order[rank].name!r} is not open to this client; open are: {', '.join(open_to) or 'none'}.",
        )

    def _may(self, rank: int, principal: str, allowed: Sequence[Sequence[str]]) -> bool:
        band = self.order[rank]
        if band.principals and principal not in band.principals:
            return False
        return all(not names or band.name in names for names in allowed)
