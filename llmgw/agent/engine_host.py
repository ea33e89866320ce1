"""Where engines run: processes on this machine (`llmgw.agent.local`), or sim-engines in a simulated world."""

from __future__ import annotations

from typing import Protocol

from llmgw.agent.state import Record
from llmgw.engines.base import Command
from llmgw.engines.deaths import Exit


class Life(Protocol):
    """One life of an engine: from its start to its end."""

    @property
    def record(self) -> Record: ...

    async def wait(self) -> Exit:
        """Until it ends. An adopted process leaves no exit code."""
        ...

    def new_lines(self) -> list[str]:
        """What it has written since the last call."""
        ...

    def last_lines(self) -> tuple[str, ...]:
        """Its last lines, oldest first."""
        ...

    def lines_since(self, number: int) -> tuple[int, tuple[str, ...]]:
        """(number of the first, lines) from *number* on, as far as they are kept; -1 = all that are kept."""
        ...

    def work(self) -> tuple[int, float]:
        """(bytes read, seconds of processor time) since its start, of all its processes."""
        ...

    def pids(self) -> frozenset[int]:
        """All its processes."""
        ...


class EngineHost(Protocol):
    """Starts, adopts and ends lives."""

    async def start(self, record: Record, command: Command) -> Life:
        """Starts the engine. Raises OSError: it cannot be executed, a file cannot be written."""
        ...

    async def adopt(self, record: Record) -> Life | None:
        """The life that *record* tells of, if it goes on. None: it does not; nothing of it is left then."""
        ...

    def terminate(self, life: Life) -> None:
        """Asks it to end (SIGTERM)."""
        ...

    async def clear(self, life: Life) -> None:
        """Ends all of it by force, and what it left behind."""
        ...

    async def keep(self, life: Life) -> None:
        """Housekeeping, once in a while: rotates its log."""
        ...

    def note_ready(self, life: Life) -> None:
        """It is ready: an agent that adopts it need not wait for that again."""
        ...

    def forget(self, life: Life) -> None:
        """Nothing is left of it."""
        ...

    def leave(self, life: Life) -> None:
        """The agent goes, the engine stays."""
        ...

    def port_taken(self, host: str, base: int, count: int) -> str:
        """Who is in the way of the block; "" = nobody."""
        ...
