"""Whether an engine starts on this node: rows ENG-1 to ENG-3, CUDA-1, CUDA-2.

`--version` alone proves little: libraries are checked with `ldd` (whose exit code says nothing), the program is run,
Python engines import what they need, and a GPU build must list the GPU.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw.agent.account import Account
from llmgw.agent.command import Ran, capture
from llmgw.agent.rows import result
from llmgw.engines import ENGINES
from llmgw.engines.base import Engine
from llmgw.engines.deaths import package_of
from llmgw.placement.inventory import Check, Device, EngineInstall

MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243}
"""Machine → ELF's number for it."""

DRIVER_FLOOR = {11: 450, 12: 525, 13: 580}
"""CUDA major → first driver branch that runs it (minor version compatibility)."""

LDD_SECONDS = 20.0
DEVICES_SECONDS = 60.0
LIBRARIES_CHECKED = 64  # *.so beside the program; llama.cpp has some ten


@attrs.frozen
class Found:
    """An engine as it was found. *install* None = it is not here at all."""

    install: EngineInstall | None
    checks: tuple[Check, ...]
    stamp: tuple[float, ...] = ()  # of the files that decide; another stamp = look again


def stamp(program: Sequence[str]) -> tuple[float, ...]:
    """Changes when the program is replaced."""
    found = []
    for word in program[:2]:
        where = shutil.which(word)
        if where is not None:
            stat = os.stat(where)
            found += [float(stat.st_ino), stat.st_mtime, float(stat.st_size)]
    return tuple(found)


async def check_engine(
    kind: str, program: tuple[str, ...], user: Account, devices: Sequence[Device], driver: str, wall: float
) -> Found:
    """All rows of one engine, tried as an engine would be started."""
    env = user.environment(program[0])
    scope = f"engine:{kind}"
    engine = ENGINES.make(kind, {})
    problem = executable_problem(program[0], user)
    checks = [result("ENG-1", scope, f"{kind}: {problem}" if problem else "", at=wall)]
    if problem:
        return Found(EngineInstall(name=kind, path=program[0]), tuple(checks), stamp(program))
    missing = await _missing_libraries(program[0], user, env)
    fix = package_of(missing[0][1]) if missing else ""
    text = "; ".join(f"{Path(binary).name} needs {library}, which is missing" for binary, library in missing)
    ldd_row = result("ENG-3", scope, f"{kind}: {text}" if text else "", at=wall, fix=fix)
    probe = engine.probe(program)
    ran = await capture(probe.argv, probe.seconds, env, user)
    checks.append(_started(kind, engine, ran, probe.seconds, scope, wall))
    facts = _facts(ran.output) if ran.ok else {}
    install = EngineInstall(
        name=kind,
        version=str(facts.get("version", "")) or _version(ran.output if ran.ok else ""),
        path=program[0],
        cuda=str(facts.get("cuda") or ""),
        gpu_arches=tuple(map(str, facts.get("arch") or ())),
        architectures=tuple(map(str, facts.get("models") or ())),
        gpu=kind != "sim" and not (facts and not facts.get("cuda")),
    )
    if ldd_row.ok and ran.ok and kind == "llama-server":
        seen, problem = await _lists_gpu(program, user, env, bool(devices))
        ldd_row = result("ENG-3", scope, problem, at=wall)
        install = EngineInstall(name=kind, version=install.version, path=program[0], gpu=seen)
    checks.append(ldd_row)
    checks += _cuda_rows(kind, install, devices, driver, scope, wall)
    return Found(install, tuple(checks), stamp(program))


def executable_problem(program: str, user: Account) -> str:
    """What keeps *program* from being executed, before it is tried; "" = nothing seen."""
    where = shutil.which(program) if "/" not in program else program
    if where is None:
        return f"{program} is not on PATH: set `engines` in the agent's settings"
    path = Path(where)
    if not path.exists():
        return f"{where} does not exist"
    if not os.access(path, os.X_OK):
        return f"{where} is not executable (its mode, or a noexec mount)"
    if not user.reads(path):
        return f"{where} cannot be read by the engines' user {user.name}"
    with path.open("rb") as stream:
        head = stream.read(256)
    if head.startswith(b"\x7fELF"):
        machine = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])[0]
        if machine != MACHINES.get(platform.machine(), machine):
            name = next((n for n, number in MACHINES.items() if number == machine), f"machine {machine}")
            return f"{where} is a binary for {name} on {platform.machine()}"
    elif head.startswith(b"#!"):
        interpreter = head[2:].split(b"\n")[0].strip().split(b" ")[0].decode(errors="replace")
        if not Path(interpreter).exists():
            return f"{where} needs {interpreter}, which does not exist"
    return ""


def _is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"\x7fELF"
    except OSError:
        return False


def _binaries(program: str) -> list[Path]:
    """What `ldd` is asked about: the program, and the libraries in a folder of its own."""
    path = Path(os.path.realpath(shutil.which(program) or program))
    if not _is_elf(path) or path.name.startswith("python") or shutil.which("ldd") is None:
        return []
    if path.parent in {Path("/usr/bin"), Path("/bin"), Path("/usr/local/bin")}:
        return [path]
    return [path, *sorted(p for p in path.parent.glob("lib*.so*") if not p.is_symlink())[:LIBRARIES_CHECKED]]


async def _missing_libraries(program: str, user: Account, env: dict[str, str]) -> list[tuple[str, str]]:
    """(binary, library) of what `ldd` does not find, for the program and the libraries beside it."""
    found: list[tuple[str, str]] = []
    for binary in _binaries(program):
        ran = await capture(["ldd", str(binary)], LDD_SECONDS, env, user)
        found += [(str(binary), m) for m in re.findall(r"^\s*(\S+) => not found", ran.output, re.M)]
    return list({library: (binary, library) for binary, library in reversed(found)}.values())[::-1]


def _started(kind: str, engine: Engine, ran: Ran, seconds: float, scope: str, wall: float) -> Check:
    if ran.error is not None:
        text = ran.error.strerror or str(ran.error)
        if isinstance(ran.error, FileNotFoundError):
            text = "its ELF interpreter is missing: a binary for another system"
        return result("ENG-2", scope, f"{kind}: cannot be executed: {text}", at=wall, took=ran.seconds)
    if ran.timed_out:
        return result("ENG-2", scope, f"{kind}: did not start within {seconds:g} s", at=wall, took=ran.seconds)
    if ran.ok:
        return result("ENG-2", scope, at=wall, took=ran.seconds)
    verdict = engine.diagnose(ran.exit(), ran.output.splitlines()[-300:])
    evidence = {"line": verdict.line} if verdict.line else {}
    return result(
        "ENG-2", scope, f"{kind}: cannot start: {verdict.cause}", at=wall, fix=verdict.remedy, took=ran.seconds, evidence=evidence
    )  # fmt: skip


def _facts(output: str) -> dict[str, Any]:
    """The JSON object that a Python engine's probe prints last."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _version(output: str) -> str:
    found = re.search(r"version:? v?(\d[\w.+-]*)", output)
    return found[1] if found else ""


async def _lists_gpu(program: Sequence[str], user: Account, env: dict[str, str], wanted: bool) -> tuple[bool, str]:
    """llama-server: whether a GPU back end loads, and what is wrong if it does not on a node with GPUs."""
    ran = await capture([*program, "--list-devices"], DEVICES_SECONDS, env, user)
    listed = re.search(r"^\s*(CUDA|ROCm|Vulkan|SYCL)\d+:", ran.output, re.M) is not None
    if listed or not wanted:
        return listed, ""
    library = re.search(r"(lib\S+\.so[\d.]*): cannot open shared object", ran.output)
    why = f" ({library[1]} not found)" if library else ""
    return False, f"llama-server starts but its GPU back end does not load{why}: it would run on the CPU"


def _cuda_rows(
    kind: str, install: EngineInstall, devices: Sequence[Device], driver: str, scope: str, wall: float
) -> Iterable[Check]:
    gpus = [d for d in devices if d.vendor == "nvidia"]
    if not install.cuda or not gpus:
        return
    major = int(install.cuda.split(".", maxsplit=1)[0])
    branch = int(driver.split(".", maxsplit=1)[0]) if driver[:1].isdigit() else 0
    floor = DRIVER_FLOOR.get(major, 0)
    text = f"{kind} {install.version} was built for CUDA {install.cuda}; driver {driver} is too old: needs {floor} or newer"
    yield result("CUDA-1", scope, text if branch < floor else "", at=wall)
    if install.gpu_arches:
        unfit = {d.name: d.capability for d in gpus if d.capability and not supports(install.gpu_arches, d.capability)}
        text = "; ".join(f"{name} ({a}.{b})" for name, (a, b) in unfit.items())
        built = " ".join(install.gpu_arches)
        yield result("CUDA-2", scope, f"{kind} has no code for {text} (built for {built})" if unfit else "", at=wall)


def supports(arches: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a build with *arches* (sm_90, sm_90a, compute_120) has code for a GPU: same major and minor not above
    its own, "a" exact, or PTX that is not newer than the GPU."""
    major, minor = capability
    for arch in arches:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:
            continue
        a, b = int(found[2]), int(found[3])
        if found[4] == "a":
            fits = found[1] == "sm" and (a, b) == (major, minor)
        else:
            fits = (a, b) <= (major, minor) if found[1] == "compute" else a == major and b <= minor
        if fits:
            return True
    return False


async def all_engines(
    programs: dict[str, tuple[str, ...]], user: Account, devices: Sequence[Device], driver: str, wall: float
) -> dict[str, Found]:
    """Every engine of the node, side by side."""
    found: dict[str, Found] = {}

    async def one(kind: str, program: tuple[str, ...]) -> None:
        found[kind] = await check_engine(kind, program, user, devices, driver, wall)

    async with trio.open_nursery() as nursery:
        for kind, program in programs.items():
            nursery.start_soon(one, kind, program)
    return dict(sorted(found.items()))
