"""What an agent keeps on disk: private, fenced, and never trusted when damaged."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio

from llmgw.agent import local
from llmgw.agent.account import KEPT, account
from llmgw.agent.enginelog import LINE_LIMIT, EngineLog, Novelty, clean
from llmgw.agent.files import Root
from llmgw.agent.local import LocalHost
from llmgw.agent.state import Record, State
from llmgw.control.observed import Desired, Ports
from llmgw.engines.base import Command, Launch
from llmgw.errors import ConfigError

DESIRED = Desired(replica="r", model="m", epoch=3, generation=1, engine="sim", weights="w", ports=Ports(20000))
LAUNCH = Launch(program=("x",), model="m", names=("m",), host="h", first_port=1, folder="f", key="secret-key")
RECORD = Record(desired=DESIRED, launch=LAUNCH, start_id="s", boot_id="b", pid=1)


def opened(path: Path) -> State:
    return State.open(str(path / "state"), account(""))


def test_records_and_memory_come_back(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.keep(RECORD)
    assert state.accepts_term(5)
    again = opened(tmp_path)
    assert again.records == {"r": RECORD}
    assert again.memory.term == 5
    assert "secret-key" not in repr(again.records)
    assert (tmp_path / "state" / "run" / "r.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    again.forget("r")
    assert opened(tmp_path).records == {}


def test_lower_terms_and_epochs_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    state = opened(tmp_path)
    assert state.accepts_term(5)
    assert state.accepts_epoch(DESIRED)
    again = opened(tmp_path)
    assert not again.accepts_term(4)
    assert again.accepts_term(5)
    assert not again.accepts_epoch(msgspec.structs.replace(DESIRED, epoch=2))
    assert again.accepts_epoch(DESIRED)
    assert again.accepts_epoch(msgspec.structs.replace(DESIRED, epoch=4))
    assert not again.accepts_epoch(DESIRED)


def test_damaged_and_newer_files_are_all_named_and_stay(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.keep(RECORD)
    state.save()
    folder = tmp_path / "state"
    (folder / "state.json").write_text("{nonsense")
    (folder / "run" / "r.json").write_text('{"version": 9}')
    before = {p: p.read_text() for p in folder.rglob("*.json")}
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path)
    text = str(caught.value)
    assert "state.json: it is damaged" in text
    assert "r.json: it was written by a newer llmgw (version 9, this one knows 1): upgrade this one" in text
    assert {p: p.read_text() for p in folder.rglob("*.json")} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        State.open(str(tmp_path / "file" / "state"), account(""))


def test_a_log_is_followed_over_rotation(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "e.log", 100, 2)
    handle = log.open()
    os.write(handle, b"one\ntwo\nhalf")
    assert log.read() == ["one", "two"]
    assert log.last() == ("one", "two", "half")
    os.write(handle, b" line\n")
    assert log.read() == ["half line"]
    assert not log.rotate()
    os.write(handle, b"x" * 200 + b"\n")
    assert log.read() == ["x" * 200]
    assert log.rotate()
    os.write(handle, b"after\n")
    assert log.read() == ["after"]
    assert (tmp_path / "e.log").read_bytes() == b"after\n"
    assert (tmp_path / "e.log.1").stat().st_size > 200
    os.write(handle, b"y" * (LINE_LIMIT + 1))
    assert log.read() == ["y" * LINE_LIMIT]
    os.close(handle)
    adopted = EngineLog(tmp_path / "e.log", 100, 2)
    adopted.resume()
    assert adopted.last()[0] == "after"


def test_colours_and_progress_bars_are_cleaned() -> None:
    assert clean(b"\x1b[32mINFO\x1b[0m ok") == "INFO ok"
    assert clean(b"Loading:  10%\rLoading: 100%\r") == "Loading: 100%"


def test_the_same_line_with_other_numbers_is_no_news() -> None:
    novelty = Novelty()
    assert novelty.news(["loading shard 1"])
    assert not novelty.news(["loading shard 2", "", "loading shard 3"])
    assert novelty.news(["compiling"])


def open_folder() -> Path:
    """One that others can get through, as pytest's cannot."""
    folder = Path(tempfile.mkdtemp(prefix="llmgw-"))
    folder.chmod(0o711)
    return folder


def variables_of(pid: int) -> set[str]:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {item.split(b"=")[0].decode() for item in environment if item}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start engines as another user")
async def test_engines_run_as_their_own_user() -> None:
    folder = open_folder()
    try:
        state = State.open(str(folder / "state"), account("nobody"))
        assert (folder / "state").stat().st_mode & 0o777 == 0o711
        host = LocalHost(state)
        record = msgspec.structs.replace(RECORD, pid=None, boot_id="x")
        script = "id -u; cat api-key; pwd; sleep 60"
        command = Command(argv=("/bin/sh", "-c", script), env={"A": "b"}, files={"api-key": "the-key\n"})
        life = await host.start(record, command)
        with trio.fail_after(5):
            while len(lines := life.last_lines()) < 3:  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert lines[:3] == (str(state.user.uid), "the-key", str(folder / "state" / "replicas" / "r"))
        assert (folder / "state/replicas/r/api-key").stat().st_uid == state.user.uid
        assert (folder / "state/replicas/r").stat().st_mode & 0o777 == 0o700
        names = variables_of(life.pid)
        assert {"A", "LLMGW_START", "LLMGW_EPOCH", "LLMGW_REPLICA", "HOME", "PATH", "USER"} <= names
        assert names <= {"A", "LLMGW_START", "LLMGW_EPOCH", "LLMGW_REPLICA", "USER", "HOME", "PYTHONUNBUFFERED", *KEPT}
        await host.clear(life)
        await life.wait()
    finally:
        shutil.rmtree(folder)


async def test_a_shell_in_the_engines_folder_is_left_alone(tmp_path: Path) -> None:
    host = LocalHost(opened(tmp_path))
    record = msgspec.structs.replace(RECORD, pid=None, boot_id="x")
    renamed = "exec env -i sleep 60"  # no environment that could be read, like a program that set its title
    life = await host.start(record, Command(argv=("/bin/sh", "-c", f"({renamed}) & {renamed}"), env={}))
    folder = host.state.folder("r")
    shell = await trio.lowlevel.open_process(["sleep", "60"], cwd=folder, env={"PATH": "/usr/bin:/bin"})
    try:
        with trio.fail_after(5):
            while len(local.marked(Root(), "s", folder)) < 2:  # noqa: ASYNC110
                await trio.sleep(0.02)
        await host.clear(life)
        assert (await life.wait()).signal == 9
        assert local.marked(Root(), "s", folder) == frozenset()
        assert shell.poll() is None
    finally:
        shell.kill()
        with trio.move_on_after(1, shield=True):
            await shell.wait()


def test_a_user_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no user 'nobody-of-that-name'"):
        account("nobody-of-that-name")
