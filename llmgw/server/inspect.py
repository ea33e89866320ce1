"""What the program is doing right now: its tree of tasks, and where its time goes."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

LONGEST = 60.0  # seconds a profile may take; it makes everything about twice as slow
LINES = 60
TASKS = 5_000  # lines of the tree; a gateway full of streams has more tasks than anybody reads


def task_tree() -> str:
    """All tasks, each below the one whose nursery it lives in, with the line where it waits."""
    root = trio.lowlevel.current_root_task()
    lines: list[str] = []
    for line in _branch(root, 0) if root is not None else ():
        if len(lines) == TASKS:
            lines.append("… and more")
            break
        lines.append(line)
    return "\n".join(lines) + "\n"


def _branch(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    stack: list[tuple[trio.lowlevel.Task, int]] = [(task, depth)]
    while stack:
        one, deep = stack.pop()
        yield f"{'  ' * deep}{one.name}  {_where(one.coro)}"
        for nursery in reversed(one.child_nurseries):
            stack.extend((child, deep + 1) for child in sorted(nursery.child_tasks, key=lambda t: t.name, reverse=True))


def _where(coro: Any) -> str:
    """File and line of ours where it waits: the innermost frame that is not a library's."""
    found = ""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if frame is not None and (not found or "/llmgw/" in frame.f_code.co_filename):
            found = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
    return found


class Profiler:
    """One profile at a time."""

    def __init__(self) -> None:
        self.busy = False

    async def run(self, seconds: float) -> str:
        """Profile this thread, the event loop with all of its tasks. The caller looks at `busy` first."""
        self.busy = True
        profile = cProfile.Profile()
        try:
            profile.enable()
            try:
                await trio.sleep(min(seconds, LONGEST))
            finally:
                profile.disable()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(LINES)
            return text.getvalue()
        finally:
            self.busy = False
