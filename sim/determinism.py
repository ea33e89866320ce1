"""The same seed, the same story: trio's scheduler made a function of the seed.

trio shuffles the tasks that can run, on purpose. Two private names of `trio._core._run` make it deterministic: a switch, and
the generator that shuffles. They are used here and nowhere else; a test fails when trio renames them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
SHUFFLER = "_r"


def _scheduler() -> Any:
    return trio._core._run


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """While it lasts, tasks are scheduled in an order that *seed* decides."""
    scheduler = _scheduler()
    before = getattr(scheduler, SWITCH), getattr(scheduler, SHUFFLER)
    setattr(scheduler, SWITCH, True)
    setattr(scheduler, SHUFFLER, random.Random(seed))
    try:
        yield
    finally:
        setattr(scheduler, SWITCH, before[0])
        setattr(scheduler, SHUFFLER, before[1])
