"""What an agent keeps on disk, so that its death changes nothing: /var/lib/llmgw.

    state.json          highest term and epochs ever seen, GPU ailments of this boot          0600
    run/REPLICA.json    one running engine: process, start time, boot, epoch, key             0600
    replicas/REPLICA/   the engine's own folder: key file; owned by the engines' user         0700
    logs/REPLICA.log    its output, and REPLICA.log.1 … of earlier                            0640
    identity/           certificate and key of this node                                      0700

The folder itself is 0700, or 0711 where engines run as another user, who must get through to its own folder.
A damaged file, or one of a newer version, is refused with a clear error; nothing is killed and nothing overwritten.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

import attrs
import msgspec

from llmgw.agent.account import Account
from llmgw.control.observed import Desired
from llmgw.engines.base import Launch
from llmgw.errors import ConfigError, Problem
from llmgw.pki.files import write_atomic

VERSION = 1
REPLICA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
EPOCHS_KEPT = 4096  # replicas remembered; the least recent epoch goes first


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One life of an engine. *pid* None: it is about to be started."""

    version: int = VERSION
    desired: Desired
    launch: Launch  # with the replica's key
    start_id: str  # random; also in the engine's environment
    boot_id: str
    pid: int | None = None
    start_time: int = 0  # field 22 of /proc/PID/stat, clock ticks since boot
    ready: bool = False
    started: float = 0.0  # wall

    def __repr__(self) -> str:  # the key must not get into a log through a traceback
        return f"Record({self.desired.replica!r}, epoch {self.desired.epoch}, pid {self.pid})"


class Memory(msgspec.Struct, kw_only=True):
    """state.json."""

    version: int = VERSION
    node: str = ""
    boot_id: str = ""  # ailments are of this boot
    term: int = 0
    epochs: dict[str, int] = {}
    xids: dict[str, tuple[int, float]] = {}


class _Version(msgspec.Struct):
    version: int = 0


T = TypeVar("T")


def _read(path: Path, kind: type[T]) -> T:
    remedy = "restore it from a backup, or move it away if no engine of this node runs"
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Version).version
        if found > VERSION:
            text = f"it was written by a newer llmgw (version {found}, this one knows {VERSION}): upgrade this one"
            raise ConfigError([Problem(text, file=str(path))])
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError([Problem(f"it is damaged ({error}): {remedy}", file=str(path))]) from error
    except OSError as error:
        raise ConfigError([Problem(f"it cannot be read ({error.strerror}): {remedy}", file=str(path))]) from error


@attrs.define
class State:
    """The folder, opened. Raises ConfigError listing every file that cannot be used."""

    path: Path
    user: Account
    memory: Memory = attrs.field(factory=Memory)
    records: dict[str, Record] = attrs.field(factory=dict)

    @classmethod
    def open(cls, folder: str, user: Account) -> State:
        state = cls(Path(folder), user)
        state._make_folders()
        problems: list[Problem] = []
        memory = state.path / "state.json"
        if memory.exists():
            try:
                state.memory = _read(memory, Memory)
            except ConfigError as error:
                problems += error.problems
        for file in sorted((state.path / "run").glob("*.json")):
            try:
                record = _read(file, Record)
                state.records[record.desired.replica] = record
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return state

    def _make_folders(self) -> None:
        through = 0o711 if self.user.switch else 0o700
        try:
            for folder, mode in {
                self.path: through,
                self.path / "run": 0o700,
                self.path / "replicas": through,
                self.path / "logs": 0o700,
                self.path / "identity": 0o700,
            }.items():
                folder.mkdir(mode=mode, parents=folder == self.path, exist_ok=True)
                folder.chmod(mode)
        except OSError as error:
            text = f"the agent's state folder cannot be made: {error.strerror}; make it, owned by the agent's user, mode 0700"
            raise ConfigError([Problem(text, file=str(error.filename or self.path))]) from error

    def folder(self, replica: str) -> Path:
        return self.path / "replicas" / replica

    def log(self, replica: str) -> Path:
        return self.path / "logs" / f"{replica}.log"

    def prepare(self, replica: str, files: dict[str, str]) -> None:
        """The engine's own folder with its secret files. Raises OSError."""
        folder = self.folder(replica)
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.user.switch:
            os.chown(folder, self.user.uid, self.user.gid)
        for name, text in files.items():
            write_atomic(folder / name, text.encode())
            if self.user.switch:
                os.chown(folder / name, self.user.uid, self.user.gid)

    def keep(self, record: Record) -> None:
        """Raises OSError."""
        replica = record.desired.replica
        write_atomic(self.path / "run" / f"{replica}.json", msgspec.json.encode(record))
        self.records[replica] = record

    def forget(self, replica: str) -> None:
        """Its engine is gone: the record, the key file."""
        self.records.pop(replica, None)
        (self.path / "run" / f"{replica}.json").unlink(missing_ok=True)
        folder = self.folder(replica)
        if folder.is_dir() and not folder.is_symlink():
            for file in folder.iterdir():
                if file.is_file():
                    file.unlink(missing_ok=True)

    def save(self) -> None:
        """state.json. Raises OSError."""
        write_atomic(self.path / "state.json", msgspec.json.encode(self.memory))

    # -- fencing -----------------------------------------------------------------------------------------------------

    def accepts_term(self, term: int) -> bool:
        """Rule 1: an answer of a lower term than ever seen is refused. A higher one is written down first."""
        if term < self.memory.term:
            return False
        if term > self.memory.term:
            self.memory.term = term
            self.save()
        return True

    def accepts_epoch(self, desired: Desired) -> bool:
        """Rule 2: a lower epoch than ever seen of its replica is refused. A higher one is written down first."""
        seen = self.memory.epochs.get(desired.replica, 0)
        if desired.epoch < seen:
            return False
        if desired.epoch > seen:
            self.memory.epochs.pop(desired.replica, None)
            self.memory.epochs[desired.replica] = desired.epoch
            while len(self.memory.epochs) > EPOCHS_KEPT:
                del self.memory.epochs[min(self.memory.epochs, key=self.memory.epochs.__getitem__)]
            self.save()
        return True
