"""Whatever happens in whatever order, the gate keeps its promises."""

from __future__ import annotations

from collections import Counter

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmgw.admission.bands import DEFAULTS, Bands
from llmgw.admission.gate import AHEAD, Gate, State, Ticket
from llmgw.units import Duration
from tests.admission.driver import Driver, Engine

BANDS = tuple(attrs.evolve(b, deadline=Duration(20.0), max_queue=30) for b in DEFAULTS)


class Machine(RuleBasedStateMachine):
    """Engines with caps; a bounded band; rooms shared by two models."""

    @initialize(caps=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def start(self, caps: list[int]) -> None:
        self.d = Driver(BANDS, {f"e{i}": Engine(cap=cap, rate=2_000.0) for i, cap in enumerate(caps)})
        self.inverted: Counter[int] = Counter()  # tokens granted past a higher band that could have gone, by rank
        self.total = 0
        self.largest = 0
        gate = self.d.gate
        inner = gate.next

        def watched(now: float) -> object:
            before = {t for t in self.d.tickets if t.state is State.QUEUED}
            open_rooms = [r for r in gate.rooms.values() if not r.full]
            effect = inner(now)
            ticket = getattr(effect, "ticket", None)
            if ticket is not None and ticket.state is State.GRANTED:
                self.total += ticket.cost
                self.largest = max(self.largest, ticket.cost)
                if open_rooms and any(t.rank == 0 and t in before for t in before) and ticket.rank > 0:
                    self.inverted[ticket.rank] += ticket.cost
            return effect

        gate.next = watched  # type: ignore[method-assign,assignment]

    @rule(
        band=st.sampled_from([b.name for b in DEFAULTS]),
        flow=st.sampled_from("abc"),
        prompt=st.integers(1, 3000),
        decode=st.integers(1, 300),
    )
    def offer(self, band: str, flow: str, prompt: int, decode: int) -> None:
        self.d.offer(band, flow, prompt, decode, stream=bool(prompt % 2))

    @precondition(lambda self: self.d.those(State.RUNNING))
    @rule(data=st.data())
    def first(self, data: st.DataObject) -> None:
        self.d.first(data.draw(st.sampled_from(self.d.those(State.RUNNING))))

    @precondition(lambda self: self.d.those(State.RUNNING))
    @rule(data=st.data(), tokens=st.integers(0, 300))
    def release(self, data: st.DataObject, tokens: int) -> None:
        ticket = data.draw(st.sampled_from(self.d.those(State.RUNNING)))
        if tokens > 1:
            now = self.d.now
            self.d.gate.release(ticket, now, first=ticket.placed + 0.1, last=now + 0.2, tokens=tokens)
            self.d.ended[ticket.id] += 1
            self.d.pump()
        else:
            self.d.release(ticket)

    @precondition(lambda self: self.d.those(State.QUEUED))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.d.cancel(data.draw(st.sampled_from(self.d.those(State.QUEUED))))

    @precondition(lambda self: self.d.those(State.RUNNING))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        self.d.gate.requeue(data.draw(st.sampled_from(self.d.those(State.RUNNING))), self.d.now)
        self.d.pump()

    @rule(seconds=st.floats(0.001, 8.0))
    def wait(self, seconds: float) -> None:
        self.d.run(seconds)

    @rule(data=st.data())
    def health(self, data: st.DataObject) -> None:
        engine = self.d.engines[data.draw(st.sampled_from(sorted(self.d.engines)))]
        engine.health = not engine.health
        self.d.tell()

    @rule(gone=st.booleans())
    def set_changes(self, gone: bool) -> None:
        engines = self.d.engines
        if gone and len(engines) > 1:
            engines.pop(min(engines))
        else:
            engines.setdefault("late", Engine(cap=2, rate=2_000.0))
        self.d.tell()

    @rule(names=st.permutations([b.name for b in DEFAULTS]))
    def reload(self, names: list[str]) -> None:
        """The same bands in another order: who waits keeps waiting, under its own name."""
        gate = self.d.gate
        old = [b.name for b in gate.bands.order]
        waiting = {t.id: old[t.rank] for t in self.d.those(State.QUEUED)}
        by_name = {b.name: b for b in BANDS}
        gate.reconfigure(Bands(by_name[n] for n in names))
        assert {t.id: names[t.rank] for t in self.d.those(State.QUEUED)} == waiting
        self.inverted.clear()
        self.d.pump()

    @invariant()
    def permits_are_conserved(self) -> None:
        gate: Gate = self.d.gate
        on = Counter(t.room.id for t in self.d.those(State.RUNNING) if t.room)
        for name, room in gate.rooms.items():
            assert room.used == on[name] == sum(room.counts) == len(room.running)
            assert room.tokens == sum(t.cost for t in room.running)
            assert room.unstarted_tokens == sum(t.prefill for t in room.unstarted)
            cap = room.limit.cap
            assert cap is None or room.used <= cap

    @invariant()
    def each_ends_once(self) -> None:
        assert all(count == 1 for count in self.d.ended.values())
        ended = {t.id for t in self.d.those(State.ENDED)}
        assert ended == set(self.d.ended)
        assert not self.d.those(State.GRANTED)

    @invariant()
    def counters_are_of_those_who_wait(self) -> None:
        gate = self.d.gate
        waiting = Counter(gate.bands.order[t.rank].name for t in self.d.those(State.QUEUED))
        assert {name: count for name, count, _ in gate.depth if count} == dict(waiting)
        assert sum(int(str(row["waiting"])) for row in gate.queue(self.d.now)) == sum(waiting.values())

    @invariant()
    def nobody_waits_past_its_deadline(self) -> None:
        for ticket in self.d.those(State.QUEUED):
            assert self.d.now < ticket.until <= self.d.now + 20.0

    @invariant()
    def work_conserving(self) -> None:
        """Where nothing bounded is at home, and prompts keep up, a free permit means that nobody waits."""
        gate = self.d.gate
        waiting = self.d.those(State.QUEUED)
        for room in gate.rooms.values():
            if not room.serving or room.used >= room.limit.seqs:
                continue
            assert not any(t.rank == 0 for t in waiting), "the highest band waits beside a free permit"
            bounded = [r for r, b in enumerate(gate.bands.order) if b.max_slowdown is not None]
            home = room.protected < len(gate.bands.order) or any(room.counts[r] for r in bounded)
            if not home and room.unstarted_tokens <= AHEAD * room.rate:
                assert not waiting, [self.says(t) for t in waiting]

    @invariant()
    def no_inversion_beyond_the_guarantee(self) -> None:
        for rank, tokens in self.inverted.items():
            share = self.d.gate.bands.order[rank].share
            assert tokens <= share * self.total + self.largest

    def says(self, ticket: Ticket) -> object:
        return self.d.gate.explain(ticket, self.d.now)


TestGate = Machine.TestCase
TestGate.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
