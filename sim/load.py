"""What clients do: sessions of turns, made from a few parameters or from a recorded trace.

A *session* is one client's conversation: it starts at a time, asks, reads the answer, thinks, asks again. One turn without
history is a single request. Everything is drawn from the seed when the sessions are made, so both levels of rehearsal,
and every repetition, see the same load.

    poisson   sessions come independently at a mean rate
    bursts    the same mean rate, but `burst` at once
    closed    `clients` sessions that ask for ever, until the load ends
    trace     sessions at the times, and with the sizes, of a recorded trace
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import exp, inf, log, sqrt
from typing import Any, Literal

import attrs

from llmgw.errors import Problem
from llmgw.schema import Check, a_name, key, not_negative, positive
from llmgw.simengine.text import FIRST_OTHER, FIRST_WORD
from llmgw.units import Duration

from .traces import Row, read


def seconds(value: float) -> Duration:
    return Duration(value)


def maybe_seconds(value: float | None) -> Duration | None:
    return None if value is None else Duration(value)


def meaning(text: str, check: Check | None = None) -> dict[str, object]:
    """What `llmgw.config.key` notes of a field, for fields that take plain seconds in Python."""
    return {"meaning": text, "check": check}


WORDS = range(FIRST_WORD, FIRST_OTHER)
"""Tokens that prompts are made of: each is one word of the simulated engines' vocabulary, in text and back."""


@attrs.frozen
class Turn:
    """One request. *prompt*: the tokens that are new in it."""

    prompt: tuple[int, ...]
    output: int  # tokens wanted
    think: float = 0.0  # seconds from the end of the answer to the next turn


@attrs.frozen(eq=False)
class Session:
    """One client. *turns* may be endless; it stops at *until*."""

    id: str
    at: float
    turns: Iterator[Turn]
    prefix: tuple[int, ...] = ()  # shared start of every prompt, such as a system prompt
    history: bool = True  # each prompt repeats what was said before
    until: float = inf
    client: str = ""  # x-session-id; "" = the session's own id
    model: str = ""
    band: str = ""
    profile: str = ""
    stream: bool = True
    patience: float = inf  # seconds after which the client hangs up


@attrs.frozen(kw_only=True)
class Load:
    """One kind of traffic. Rates are a second, sizes tokens; a spread is the standard deviation as a share of the mean."""

    kind: Literal["poisson", "bursts", "closed", "trace"] = key("How sessions come.", "poisson")
    name: str = key("Prefix of its request ids.", "load", check=a_name)
    start: Duration = attrs.field(
        default=Duration(0.0), converter=seconds, metadata=meaning("When it begins.", check=not_negative)
    )
    duration: Duration = attrs.field(
        default=Duration(60.0), converter=seconds, metadata=meaning("How long new sessions come.", check=positive)
    )
    rate: float = key("poisson, bursts: sessions a second.", 1.0, check=positive)
    burst: int = key("bursts: sessions at once.", 10, check=positive)
    clients: int = key("closed: sessions that are always there.", 1, check=positive)
    prompt_tokens: int = key("New tokens a turn, mean.", 500, check=positive)
    prompt_spread: float = key("Their spread (log-normal); 0 = always the mean.", 0.0, check=not_negative)
    output_tokens: int = key("Tokens of an answer, mean.", 200, check=positive)
    output_spread: float = key("Their spread (log-normal); 0 = always the mean.", 0.0, check=not_negative)
    turns: int = key("Turns a session; closed: endless.", 1, check=positive)
    history: bool = key("Each prompt repeats the conversation before it.", True)
    think: Duration = attrs.field(
        default=Duration(0.0),
        converter=seconds,
        metadata=meaning("Seconds between an answer and the next turn, mean (exponential).", check=not_negative),
    )
    prefix_groups: int = key(
        "Sessions belong to one of so many groups, each with a prompt prefix of its own.", 0, check=not_negative
    )
    prefix_tokens: int = key("Tokens of that prefix.", 0, check=not_negative)
    prefix_of: str = key("Name of the load whose groups and prefixes these are, too; empty: its own.", "")
    users: int = key(
        "Each group has so many clients, who come again: x-session-id. 0: every session is a new one.",
        0,
        check=not_negative,
    )
    hot_share: float = key(
        "Share of the sessions that belong to the first group; the others share the rest.", 0.0, check=not_negative
    )
    model: str = key("Model that is asked for.", "")
    band: str = key("x-llmgw-band.", "")
    profile: str = key("x-llmgw-profile.", "")
    stream: bool = key("Answers are streamed.", True)
    patience: Duration | None = attrs.field(
        default=None, converter=maybe_seconds, metadata=meaning("A client hangs up after so long.")
    )
    file: str = key("trace: path of the file.", "")
    format: Literal["azure", "mooncake"] = key("trace: Azure's CSV or Mooncake's JSON lines.", "azure")
    limit: int = key("trace: at most so many rows; 0 = all.", 0, check=not_negative)
    speedup: float = key("trace: times between requests are divided by this.", 1.0, check=positive)

    def problems(self) -> list[Problem]:
        """What does not fit together."""
        found = []
        if self.kind == "trace" and not self.file:
            found.append(Problem("a trace needs its file", where="file"))
        if bool(self.prefix_groups) != bool(self.prefix_tokens):
            found.append(Problem("prefix_groups and prefix_tokens go together", where="prefix_groups"))
        return found

    def sessions(self, seed: int = 0) -> list[Session]:
        """All sessions, by time. Raises ConfigError for a trace that cannot be read."""
        rng = random.Random(f"{seed}/{self.name}/{self.kind}")
        shared = random.Random(f"{seed}/{self.prefix_of}/prefixes") if self.prefix_of else rng
        prefixes = [tuple(shared.choices(WORDS, k=self.prefix_tokens)) for _ in range(self.prefix_groups)]
        if self.kind == "trace":
            return self._traced(rng)
        return [self._session(number, at, rng, prefixes) for number, at in enumerate(self._times(rng))]

    def _times(self, rng: random.Random) -> Iterator[float]:
        end = self.start + self.duration
        if self.kind == "closed":
            yield from (self.start for _ in range(self.clients))
            return
        size = self.burst if self.kind == "bursts" else 1
        at = self.start + rng.expovariate(self.rate / size)
        while at < end:
            yield from (at for _ in range(size))
            at += rng.expovariate(self.rate / size)

    def _session(self, number: int, at: float, rng: random.Random, prefixes: list[tuple[int, ...]]) -> Session:
        own = random.Random(rng.getrandbits(64))
        group = self._group(rng, len(prefixes)) if prefixes else 0
        return Session(
            client=f"{self.prefix_of or self.name}-{group}-{rng.randrange(self.users)}" if self.users else "",
            id=f"{self.name}-{number}",
            at=at,
            turns=self._turns(own, None if self.kind == "closed" else self.turns),
            prefix=prefixes[group] if prefixes else (),
            history=self.history and self.kind != "closed",
            until=self.start + self.duration if self.kind == "closed" else inf,
            **self._common(),
        )

    def _group(self, rng: random.Random, count: int) -> int:
        if not self.hot_share or count == 1:
            return rng.randrange(count)
        return 0 if rng.random() < self.hot_share else 1 + rng.randrange(count - 1)

    def _turns(self, rng: random.Random, count: int | None) -> Iterator[Turn]:
        while count is None or count > 0:
            prompt = tuple(rng.choices(WORDS, k=draw(rng, self.prompt_tokens, self.prompt_spread)))
            output = draw(rng, self.output_tokens, self.output_spread)
            yield Turn(prompt, output, rng.expovariate(1 / self.think) if self.think else 0.0)
            count = None if count is None else count - 1

    def _traced(self, rng: random.Random) -> list[Session]:
        sessions = []
        for number, row in enumerate(read(self.file, self.format, self.limit)):
            at = self.start + row.at / self.speedup
            turn = Turn(_prompt_of(row, rng), row.output)
            sessions.append(
                Session(id=f"{self.name}-{number}", at=at, turns=iter((turn,)), history=False, **self._common())
            )
        return sessions

    def _common(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "band": self.band,
            "profile": self.profile,
            "stream": self.stream,
            "patience": inf if self.patience is None else self.patience,
        }


def draw(rng: random.Random, mean: int, spread: float) -> int:
    """A size of at least 1 with that mean."""
    if not spread:
        return mean
    sigma = sqrt(log(1 + spread * spread))
    return max(1, round(exp(rng.gauss(log(mean) - sigma * sigma / 2, sigma))))


def _prompt_of(row: Row, rng: random.Random) -> tuple[int, ...]:
    """Tokens of a traced prompt: equal block ids give equal tokens, the rest is its own."""
    tokens: list[int] = []
    for block in row.blocks:
        tokens += random.Random(block).choices(WORDS, k=row.block_size)
    del tokens[row.prompt :]
    tokens += rng.choices(WORDS, k=row.prompt - len(tokens))
    return tuple(tokens)
