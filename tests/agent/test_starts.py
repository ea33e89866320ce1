"""Engines that start, and engines that do not, with programs that are really run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmgw.agent import starts
from llmgw.agent.account import Account, account
from llmgw.agent.command import capture
from llmgw.agent.starts import Found, check_engine, executable_problem, supports
from llmgw.placement.inventory import Check, Device
from tests.agent.processes import gone

GPU = Device(uuid="GPU-1", index=0, name="NVIDIA H100", memory=1, capability=(9, 0))


@pytest.fixture
def user() -> Account:
    return account("")


def script(path: Path, text: str, interpreter: str = "/bin/sh") -> str:
    path.write_text(f"#!{interpreter}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def failed(found: Found) -> dict[str, Check]:
    return {c.id: c for c in found.checks if not c.ok}


async def test_a_program_that_starts(tmp_path: Path, user: Account) -> None:
    program = script(tmp_path / "llama-server", "echo 'version: 11434 (abc)' >&2")
    found = await check_engine("llama-server", (program,), user, (), "", 0.0)
    assert failed(found) == {}
    assert found.install is not None
    assert (found.install.version, found.install.gpu) == ("11434", False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("none", "does not exist"), ("mode", "not executable"), ("shebang", "/no/such/sh, which does not exist")],
)
async def test_what_cannot_be_executed(tmp_path: Path, user: Account, kind: str, words: str) -> None:
    path = tmp_path / "llama-server"
    if kind != "none":
        script(path, "exit 0", "/no/such/sh" if kind == "shebang" else "/bin/sh")
    if kind == "mode":
        path.chmod(0o644)
    found = await check_engine("llama-server", (str(path),), user, (), "", 0.0)
    assert words in failed(found)["ENG-1"].message


def test_a_binary_for_another_machine(tmp_path: Path, user: Account) -> None:
    path = tmp_path / "llama-server"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + b"\xb7\x00" + bytes(100))
    path.chmod(0o755)
    assert "is a binary for aarch64 on x86_64" in executable_problem(str(path), user)


def test_a_program_that_is_not_on_path(user: Account) -> None:
    assert "is not on PATH" in executable_problem("llama-server-of-nobody", user)


def needs_a_library_that_is_gone(folder: Path) -> Path:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler on this machine")
    (folder / "lib.c").write_text("int f(void) { return 0; }")
    (folder / "main.c").write_text("int f(void); int main(void) { return f(); }")
    library, program = folder / "libibgone.so.1", folder / "llama-server"
    subprocess.run([gcc, "-shared", "-Wl,-soname,libibgone.so.1", "-o", library, folder / "lib.c"], check=True)
    subprocess.run([gcc, "-o", program, folder / "main.c", library], check=True)
    library.unlink()
    return program


async def test_a_missing_library_is_named_by_ldd_and_by_the_start(tmp_path: Path, user: Account) -> None:
    program = needs_a_library_that_is_gone(tmp_path)

    rows = failed(await check_engine("llama-server", (str(program),), user, (), "", 0.0))

    assert rows["ENG-3"].message == "llama-server: llama-server needs libibgone.so.1, which is missing"
    assert rows["ENG-2"].message == "llama-server: cannot start: libibgone.so.1 is missing"
    assert "apt-file search libibgone.so.1" in rows["ENG-2"].fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill -ILL $$", "the CPU lacks instructions"),
        ("kill -KILL $$", "killed from outside"),
        ("echo 'llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file' >&2; exit 127", "libgomp.so.1 is missing"),
        ("exit 3", "exit code 3"),
    ],
)  # fmt: skip
async def test_why_it_does_not_start(tmp_path: Path, user: Account, text: str, words: str) -> None:
    program = script(tmp_path / "llama-server", text)
    rows = failed(await check_engine("llama-server", (program,), user, (), "", 0.0))
    assert words in rows["ENG-2"].message
    if "libgomp" in text:
        assert rows["ENG-2"].fix == "Debian/Ubuntu: apt install libgomp1"


async def test_a_slow_start_ends_with_its_children(tmp_path: Path, user: Account) -> None:
    ran = await capture([script(tmp_path / "x", f"sleep 60 & echo $! >{tmp_path}/pid; wait")], 0.3, None, user)
    assert ran.timed_out
    assert await gone(int((tmp_path / "pid").read_text()))


async def test_a_gpu_build_that_would_run_on_the_cpu(tmp_path: Path, user: Account) -> None:
    text = "echo 'load_backend: failed: libcudart.so.12: cannot open shared object file' >&2; echo 'Available devices:'"
    program = script(tmp_path / "llama-server", text)
    rows = failed(await check_engine("llama-server", (program,), user, (GPU,), "580.1", 0.0))
    assert rows["ENG-3"].message.endswith("does not load (libcudart.so.12 not found): it would run on the CPU")


async def test_a_gpu_build_that_sees_the_gpu(tmp_path: Path, user: Account) -> None:
    program = script(tmp_path / "llama-server", "echo 'Available devices:'; echo '  CUDA0: NVIDIA H100 (81559 MiB)'")
    found = await check_engine("llama-server", (program,), user, (GPU,), "580.1", 0.0)
    assert failed(found) == {}
    assert found.install is not None
    assert found.install.gpu


@pytest.mark.parametrize(
    ("cuda", "arch", "driver", "rows"),
    [
        ("13.0", ["sm_80", "sm_90"], "580.95.05", set()),
        ("13.0", ["sm_80", "sm_90"], "550.90.07", {"CUDA-1"}),
        ("12.8", ["sm_100a", "sm_120"], "550.90.07", {"CUDA-2"}),
        (None, [], "550.90.07", set()),
    ],
)
async def test_what_a_wheel_was_built_for(
    tmp_path: Path, user: Account, cuda: str | None, arch: list[str], driver: str, rows: set[str]
) -> None:
    said = {"version": "0.32.0", "cuda": cuda, "arch": arch}
    script(tmp_path / "python", f"echo 'INFO noise'; echo '{__import__('json').dumps(said)}'")
    program = script(tmp_path / "vllm", "exit 1")
    found = await check_engine("vllm", (program, "serve"), user, (GPU,), driver, 0.0)
    assert set(failed(found)) == rows
    assert found.install is not None
    assert (found.install.version, found.install.cuda, found.install.gpu) == ("0.32.0", cuda or "", cuda is not None)


@pytest.mark.parametrize(
    ("arches", "capability", "fits"),
    [
        (["sm_90"], (9, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["compute_80"], (9, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_120"], (12, 0), True),
        (["sm_75", "sm_80"], (6, 1), False),
    ],
)
def test_architectures(arches: list[str], capability: tuple[int, int], fits: bool) -> None:
    assert supports(arches, capability) == fits


def test_another_program_has_another_stamp(tmp_path: Path) -> None:
    program = script(tmp_path / "x", "exit 0")
    before = starts.stamp((program,))
    script(tmp_path / "x", "exit 00")
    assert starts.stamp((program,)) != before
