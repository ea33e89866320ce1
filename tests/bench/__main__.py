"""What the gateway costs: `nox -s bench`, or `python -m tests.bench`.

Prints tables; a full run (all loads, five rounds or more) also writes them into docs/performance.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime

from tests.bench import loads, micro, page, streams
from tests.bench.programs import bench, machine, revision

PARTS = ("loads", "micro", "memory", "leaving", "gc")

ENOUGH = 5
"""Rounds from which on a median means something: single rounds move by a third."""


def listed(known: tuple[str, ...]) -> object:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {', '.join(known)}")
        return names

    return read


def main() -> None:
    every = tuple(loads.LOADS)
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ENOUGH)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--loads", type=listed(every), default=list(every), help=",".join(every))  # type: ignore[arg-type]
    parser.add_argument("--parts", type=listed(PARTS), default=list(PARTS), help=",".join(PARTS))  # type: ignore[arg-type]
    parser.add_argument("--write", action="store_true", help="write the tables even if this is no full run")
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    command = shlex.join(["nox", "-s", "bench", *(["--", *sys.argv[1:]] if sys.argv[1:] else [])])
    made = revision()
    where = f"{datetime.now(UTC):%Y-%m-%d}, `{command}`" + (f", commit {made}" if made else "") + f"; {machine()}."
    print(where)
    few = args.rounds < ENOUGH
    found: dict[str, str] = {}
    with bench() as programs:
        for part in args.parts:
            print(f"\n{part}", flush=True)
            if part == "loads":
                found[part] = loads.measure(programs, args.loads, args.rounds, args.seconds)
            elif part == "micro":
                found[part] = micro.measure(max(args.rounds, 3))
            elif part == "memory":
                found[part] = streams.memory(programs, (200,) if few else (500, 1000), min(args.rounds, 3))
            elif part == "leaving":
                found[part] = streams.leaving(programs, 50 if few else 500)
            else:
                found[part] = loads.collector(programs, args.rounds, args.seconds)
            print(found[part], flush=True)
    short = few or args.seconds < 5 or set(args.loads) != set(every)
    if short and not args.write:
        print("\nNot written to docs/performance.md: this is no full run (--write does it all the same).")
        return
    for part, text in found.items():
        page.put(part, f"{where}\n\n{text}")
    print(f"\nWritten to {page.PAGE}.")


if __name__ == "__main__":
    main()
