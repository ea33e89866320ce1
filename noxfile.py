"""Everything that checks this project, as sessions.

`nox -s lint types tests` is what `.ci/run` runs; `full`, `bench` and `engines` take longer and are run by hand.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_external_run = False

ASYNC_RULES = "ASYNC1,ASYNC2,ASYNC3,ASYNC900"


def install(session: nox.Session) -> None:
    if session.virtualenv.is_sandboxed:
        session.install("-e", ".[dev,kv-events]")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, its formatter, and the async rules."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = [
        str(path)
        for folder in ("llmgw", "sim", "tests")
        for path in Path(folder).rglob("*.py")
        if "async " in path.read_text()  # the rules take seconds a file
    ]

    def check(some: list[str]) -> None:
        # ASYNC114 asks that every name of a starter is listed on the command line
        session.run("flake8-async", "--enable", ASYNC_RULES, "--disable", "ASYNC114", *some, silent=True)

    with ThreadPoolExecutor(2) as pool:  # it takes a second of processor time a file, and uses one processor
        list(pool.map(check, (sources[::2], sources[1::2])))


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    install(session)
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The fast tests: unit, property, conformance, simulation, integration over loopback."""
    install(session)
    session.run("pytest", "-q", "-n", "2", "-m", "not full and not engines", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """The long forms as well."""
    install(session)
    session.run("pytest", "-q", "-n", "2", "-m", "not engines", *session.posargs)


@nox.session
def engines(session: nox.Session) -> None:
    """Real engines on the CPU, where LLMGW_LLAMA_SERVER or LLMGW_VLLM_PYTHON names one; skipped visibly elsewhere."""
    install(session)
    session.run("pytest", "-q", "-m", "engines", *session.posargs)


@nox.session
def sim(session: nox.Session) -> None:
    """Scenarios through the real gateway in virtual time: two short ones, or those named after `--`."""
    install(session)
    for name in session.posargs or ["smoke", "pd"]:
        session.run("python", "-m", "sim", "run", name)


@nox.session
def pipeline(session: nox.Session) -> None:
    """Gateway mode with real processes: `nox -s pipeline -- single|3epp [--keep-on-failure] [--print-logs]`."""
    install(session)
    for topology in ["single", "3epp"] if not session.posargs else [None]:
        session.run("python", "-m", "tests.pipeline.topology", *([topology] if topology else session.posargs))


@nox.session
def bench(session: nox.Session) -> None:
    """What the gateway costs, beside HAProxy; writes docs/performance.md. Needs gcc, haproxy and a quiet machine."""
    install(session)
    session.run("python", "-m", "tests.bench", *session.posargs)
