"""Running a program to see what it does: bounded in time and output, in a session of its own, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import attrs
import trio

from llmgw.agent.account import Account
from llmgw.engines.deaths import Exit

OUTPUT_LIMIT = 1 << 20  # bytes kept; `--help` of vLLM is 100 KB
REAP = 5.0  # seconds to wait for a killed process


@attrs.frozen
class Ran:
    """*error*: it could not be executed. *seconds*: how long it took."""

    code: int | None = None
    signal: int | None = None
    output: str = ""
    timed_out: bool = False
    error: OSError | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out

    def exit(self) -> Exit:
        return Exit(code=self.code, signal=self.signal)


def kill_session(pid: int) -> None:
    """SIGKILL to the process group of a session leader; nothing if it is gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


async def capture(
    argv: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, user: Account | None = None
) -> Ran:
    """Runs *argv* with stdout and stderr together, at most *seconds*, as *user* if that is another."""
    start = trio.current_time()
    other = user if user is not None and user.switch else None
    try:
        process = await trio.lowlevel.open_process(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
            user=None if other is None else other.uid,
            group=None if other is None else other.gid,
            extra_groups=None if other is None else sorted(other.groups),
        )
    except OSError as error:
        return Ran(error=error, seconds=trio.current_time() - start)
    assert process.stdout is not None
    output, timed_out = bytearray(), True
    try:
        with trio.move_on_after(seconds):
            while len(output) < OUTPUT_LIMIT and (chunk := await process.stdout.receive_some(1 << 16)):
                output += chunk
            await process.wait()
            timed_out = False
    finally:
        kill_session(process.pid)
        with trio.move_on_after(REAP, shield=True):
            await process.wait()
        with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
            await process.stdout.aclose()
    code = process.returncode
    return Ran(
        code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        output=output.decode(errors="replace"),
        timed_out=timed_out,
        seconds=trio.current_time() - start,
    )
