"""The hard conditions. Each is evaluated for every candidate, whatever the others found.

A constraint looks at one node's part (`Candidate.place`, `Candidate.pick`); what it finds for a group is what it found
for the members. Only those with `groups = True` look at the whole group as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from llmgw.placement.candidates import Candidate
from llmgw.placement.verdict import Code, Verdict
from llmgw.placement.world import World


class Constraint(Protocol):
    """A plug-in of kind ``constraint``. *column* orders the table of explain."""

    name: ClassVar[str]
    column: ClassVar[int]
    groups: ClassVar[bool]
    codes: ClassVar[tuple[Code, ...]]

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        """One verdict a candidate, in their order. Pure; never raises; never looks at other constraints' verdicts."""
        ...
