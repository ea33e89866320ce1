"""Engines as processes of this machine: sessions of their own, output to files, found again after an agent's death."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec
import trio

from llmgw.agent.engine_host import Life
from llmgw.agent.enginelog import EngineLog
from llmgw.agent.files import Root
from llmgw.agent.host import listening_ports
from llmgw.agent.state import Record, State
from llmgw.engines.base import Command
from llmgw.engines.deaths import Exit

START_VARIABLE = "LLMGW_START"  # in the environment of every process of an engine: names its life
OOM_SCORE = 300  # of 1000: before the agent and the system's services
KILL_ROUNDS = 50  # times that survivors are looked for and killed, 0.1 s apart; forks can race with us
_TICK = os.sysconf("SC_CLK_TCK")
_LEFT: list[trio.Process] = []  # engines that stay when the agent goes; their objects must not be collected meanwhile


def start_time(root: Root, pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: with the boot id it names a process for good, whatever becomes of its pid."""
    fields = _stat(root, pid)
    return int(fields[19]) if fields else None


def _stat(root: Root, pid: int | str) -> list[str]:
    """The fields after the command's name, which may hold anything; none for a process that is no more."""
    text = root.text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split() if text else []
    return fields if fields and fields[0] not in ("Z", "X") else []


def session_members(root: Root, leader: int) -> frozenset[int]:
    """Processes of the session that *leader* began."""
    wanted = str(leader)
    return frozenset(
        int(name) for name in root.names("/proc") if name.isdigit() and (f := _stat(root, name)) and f[3] == wanted
    )


def marked(root: Root, start_id: str, folder: Path) -> frozenset[int]:
    """Processes of a life, also those that left its session: its name is in their environment. Programs that set their
    title, as vLLM's do, overwrite what can be read of that; they are known by working in the life's folder. A shell
    that somebody has there has an environment that can be read, without the name."""
    wanted, home = f"{START_VARIABLE}={start_id}".encode(), str(folder)
    found = set()
    for name in root.names("/proc"):
        if not name.isdigit() or not _stat(root, name):
            continue
        try:
            environment = root.at(f"/proc/{name}/environ").read_bytes().split(b"\0")
            overwritten = not any(variable.startswith(b"PATH=") for variable in environment)
            if wanted in environment or (overwritten and os.readlink(root.at(f"/proc/{name}/cwd")) == home):
                found.add(int(name))
        except OSError:
            continue
    return frozenset(found)


def oom_kills(root: Root) -> int | None:
    """How many processes the kernel has killed for memory in this cgroup."""
    line = next((t for t in (root.text("/proc/self/cgroup") or "").splitlines() if t.startswith("0::")), "0::/")
    own = line[3:].rstrip("/")
    for folder in (f"/sys/fs/cgroup{own}", "/sys/fs/cgroup"):
        for row in (root.text(f"{folder}/memory.events") or "").splitlines():
            if row.startswith("oom_kill "):
                return int(row.split()[1])
    return None


def raise_limits() -> None:
    """Engines inherit the agent's limits: files and locked memory as far as allowed, and no core dumps (of 100 GB)."""
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@attrs.define(eq=False)
class LocalLife:
    """A process and all that it began. *process* None: adopted."""

    record: Record
    log: EngineLog
    root: Root
    process: trio.Process | None
    oom_before: int | None

    @property
    def pid(self) -> int:
        assert self.record.pid is not None
        return self.record.pid

    async def wait(self) -> Exit:
        if self.process is None:
            await wait_pid(self.pid)
            return Exit(ready=self.record.ready)
        code = await self.process.wait()
        killed = oom_kills(self.root)
        return Exit(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            ready=self.record.ready,
            oom_killed=code == -signal.SIGKILL and (killed or 0) > (self.oom_before or 0),
        )

    def new_lines(self) -> list[str]:
        return self.log.read()

    def last_lines(self) -> tuple[str, ...]:
        self.log.read()
        return self.log.last()

    def lines_since(self, number: int) -> tuple[int, tuple[str, ...]]:
        return self.log.since(number)

    def work(self) -> tuple[int, float]:
        read, ticks = 0, 0
        for pid in self.pids():
            fields = _stat(self.root, pid)
            ticks += int(fields[11]) + int(fields[12]) if fields else 0
            for line in (self.root.text(f"/proc/{pid}/io") or "").splitlines():
                if line.startswith(("rchar:", "read_bytes:")):
                    read += int(line.split()[1])
        return read, ticks / _TICK

    def pids(self) -> frozenset[int]:
        return session_members(self.root, self.pid)


async def wait_pid(pid: int) -> None:
    """Until a process that is nobody's child here has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(handle)
    finally:
        os.close(handle)


@attrs.define
class LocalHost:
    """Processes of this machine."""

    state: State
    log_size: int = 64 << 20
    log_files: int = 4
    root: Root = attrs.field(factory=Root)

    def _log(self, record: Record) -> EngineLog:
        return EngineLog(self.state.log(record.desired.replica), self.log_size, self.log_files)

    async def start(self, record: Record, command: Command) -> LocalLife:
        replica, user = record.desired.replica, self.state.user
        self.state.prepare(replica, command.files)
        self.state.keep(record)  # first: a process that no record tells of could not be found again
        env = {
            **user.environment(command.argv[0]),
            **command.env,
            START_VARIABLE: record.start_id,
            "LLMGW_REPLICA": replica,
            "LLMGW_EPOCH": str(record.desired.epoch),
        }
        log = self._log(record)
        handle = log.open()
        before = oom_kills(self.root)
        try:
            process = await trio.lowlevel.open_process(
                list(command.argv),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=env,
                cwd=self.state.folder(replica),
                start_new_session=True,
                user=user.uid if user.switch else None,
                group=user.gid if user.switch else None,
                extra_groups=sorted(user.groups) if user.switch else None,
            )
        finally:
            os.close(handle)
        self._offer_to_oom(process.pid)
        started = msgspec.structs.replace(record, pid=process.pid, start_time=start_time(self.root, process.pid) or 0)
        self.state.keep(started)
        return LocalLife(started, log, self.root, process, before)

    def _offer_to_oom(self, pid: int) -> None:
        """The agent's unit protects it from the kernel's OOM killer; engines must not inherit that."""
        try:
            self.root.at(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))
        except OSError:  # it has ended already
            pass

    async def adopt(self, record: Record) -> LocalLife | None:
        """The leader by pid, start time, boot and its environment; without a leader, survivors are ended."""
        if record.boot_id != self.root.text("/proc/sys/kernel/random/boot_id"):
            return None
        pid = record.pid
        if pid is None:  # the agent died between the start and writing it down
            ours = marked(self.root, record.start_id, self._home(record))
            pid = next((p for p in ours if (f := _stat(self.root, p)) and f[3] == str(p)), None)
        elif start_time(self.root, pid) != record.start_time:
            pid = None
        if pid is None:
            await self._kill(record, None)
            return None
        found = msgspec.structs.replace(record, pid=pid, start_time=start_time(self.root, pid) or 0)
        log = self._log(found)
        log.resume()
        return LocalLife(found, log, self.root, None, None)

    def terminate(self, life: Life) -> None:
        """To the leader only: engines pass it on in their own order."""
        pid = life.record.pid
        if pid is not None and start_time(self.root, pid) == life.record.start_time:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass

    async def clear(self, life: Life) -> None:
        await self._kill(life.record, life.record.pid)

    def _home(self, record: Record) -> Path:
        return Path(os.path.realpath(self.state.folder(record.desired.replica)))

    async def _kill(self, record: Record, leader: int | None) -> None:
        """Never only the parent: workers outlive it, and hold the GPUs."""
        for _ in range(KILL_ROUNDS):
            survivors = marked(self.root, record.start_id, self._home(record))
            if leader is not None and start_time(self.root, leader) == record.start_time:
                survivors |= session_members(self.root, leader)
            survivors -= {os.getpid()}
            if not survivors:
                return
            for pid in survivors:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            await trio.sleep(0.1)

    async def keep(self, life: Life) -> None:
        if isinstance(life, LocalLife):
            await trio.to_thread.run_sync(life.log.rotate)

    def note_ready(self, life: Life) -> None:
        if isinstance(life, LocalLife) and not life.record.ready:
            life.record = msgspec.structs.replace(life.record, ready=True)
            self.state.keep(life.record)

    def forget(self, life: Life) -> None:
        if self.state.records.get(life.record.desired.replica, life.record).start_id == life.record.start_id:
            self.state.forget(life.record.desired.replica)

    def leave(self, life: Life) -> None:
        if isinstance(life, LocalLife) and life.process is not None:
            _LEFT.append(life.process)

    def port_taken(self, host: str, base: int, count: int) -> str:
        """By the kernel's table, then by binding the API's port: who listens is named where it can be seen."""
        taken = listening_ports(self.root, base, base + count - 1)
        for port, inode in sorted(taken.items()):
            return f"port {port} in use{_holder(self.root, inode)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # only TIME_WAIT is in the way: engines set it too
            try:
                probe.bind((host, base))
            except OSError as error:
                return f"{host}:{base} cannot be bound: {error.strerror}"
        return ""


def _holder(root: Root, inode: int) -> str:
    """` by pid 881 (node_exporter)`, if it can be seen."""
    wanted = f"socket:[{inode}]"
    for name in root.names("/proc"):
        if name.isdigit() and wanted in _links(root.at(f"/proc/{name}/fd")):
            return f" by pid {name} ({root.text(f'/proc/{name}/comm')})"
    return ""


def _links(folder: Path) -> Iterable[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:  # closed meanwhile
            continue
