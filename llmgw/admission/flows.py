"""Whose turn it is within one band: deficit round robin over flows, counted in tokens.

    push ─► flow's queue ─► ring ─head()─► the ticket whose turn it is ─take()─► out
                                   discard ─────────────────────────────────────► out

Each visit gives the flow at the head of the ring a quantum of tokens to spend; it is served until its next ticket costs
more than it has left, then the next flow is visited. A flow that runs empty leaves the ring and forgets what it had left.

Invariants: a flow is in the ring exactly while it has a ticket · `count`, `tokens` are those of live tickets · between
two flows that both wait all the time, the tokens served differ by less than a quantum and the largest ticket.
The quantum is never less than the largest ticket that waits, so one visit always serves one: `head` costs the same
however many flows there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmgw.admission.gate import Ticket

QUANTUM = 4096
"""Tokens a turn: some ten ordinary chats, so that a flow's requests reach an engine together (they share prefixes)."""

SLACK = 32
"""Dead tickets that a flow may keep beside its live ones before they are swept out."""


class _Flow:
    __slots__ = ("credit", "dead", "name", "queue", "tokens")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Ticket] = deque()
        self.credit = 0
        self.dead = 0
        self.tokens = 0  # of live tickets


class Flows:
    """The tickets of one band that wait for one pool."""

    __slots__ = ("_by_name", "_largest", "_ring", "_visited", "count", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0  # that they cost together
        self._ring: deque[_Flow] = deque()
        self._by_name: dict[str, _Flow] = {}
        self._largest = QUANTUM
        self._visited = False  # the flow at the head has had its quantum

    def __iter__(self) -> Iterator[Ticket]:
        """All that wait, flow by flow."""
        for flow in self._ring:
            yield from (t for t in flow.queue if t.waiting)

    def push(self, ticket: Ticket, front: bool = False) -> None:
        """*front*: it was served before and comes back."""
        flow = self._by_name.get(ticket.flow)
        if flow is None:
            flow = self._by_name[ticket.flow] = _Flow(ticket.flow)
            self._ring.append(flow)
        (flow.queue.appendleft if front else flow.queue.append)(ticket)
        self.count += 1
        self.tokens += ticket.cost
        flow.tokens += ticket.cost
        self._largest = max(self._largest, ticket.cost)

    def head(self) -> Ticket | None:
        """Whose turn it is; None: nobody waits. The same until it is taken or discarded."""
        ring = self._ring
        while ring:
            flow = ring[0]
            queue = flow.queue
            while queue and not queue[0].waiting:
                queue.popleft()
                flow.dead -= 1
            if not queue:
                ring.popleft()
                del self._by_name[flow.name]
                self._visited = False
                continue
            if not self._visited:
                self._visited = True
                flow.credit += self._largest
            ticket = queue[0]
            if flow.credit >= ticket.cost:
                return ticket
            ring.rotate(-1)
            self._visited = False
        self._largest = QUANTUM
        return None

    def take(self, ticket: Ticket) -> None:
        """*ticket*, which `head` has just given, is served."""
        flow = self._ring[0]
        flow.queue.popleft()
        flow.credit -= ticket.cost
        self._less(flow, ticket)
        if not flow.queue:
            self._ring.popleft()
            del self._by_name[flow.name]
            self._visited = False

    def discard(self, ticket: Ticket) -> None:
        """*ticket* waits no longer (its `waiting` is False already)."""
        flow = self._by_name[ticket.flow]
        flow.dead += 1
        self._less(flow, ticket)
        if flow.dead > len(flow.queue) // 2 + SLACK:
            flow.queue = deque(t for t in flow.queue if t.waiting)
            flow.dead = 0

    def ahead(self, name: str) -> int:
        """At most so many tokens are served before one more ticket of flow *name* would be."""
        flow = self._by_name.get(name)
        own = flow.tokens if flow is not None else 0
        return min(self.tokens, len(self._ring) * (own + self._largest))

    def _less(self, flow: _Flow, ticket: Ticket) -> None:
        self.count -= 1
        self.tokens -= ticket.cost
        flow.tokens -= ticket.cost
