"""Whom engines run as."""

from __future__ import annotations

import grp
import os
import pwd
import sys
from pathlib import Path

import attrs

from llmgw.errors import ConfigError, Problem


@attrs.frozen
class Account:
    """*switch*: the agent must change to it, which only root can."""

    name: str
    uid: int
    gid: int
    groups: frozenset[int]
    home: str
    switch: bool = False

    def reads(self, path: Path) -> bool:
        """By mode bits, of the file and of every folder above it. Root reads all."""
        if self.uid == 0:
            return True
        return self._may(path, 4) and all(self._may(folder, 1) for folder in path.resolve().parents)

    def _may(self, path: Path, bit: int) -> bool:
        try:
            stat = path.stat()
        except OSError:
            return False
        shift = 6 if stat.st_uid == self.uid else 3 if stat.st_gid in self.groups else 0
        return bool(stat.st_mode >> shift & bit)

    def environment(self, program: str = "") -> dict[str, str]:
        """What a process of this account gets before anything else: by list, never the agent's whole environment."""
        kept = {key: os.environ[key] for key in KEPT if key in os.environ}
        if program == sys.executable and "PYTHONPATH" in os.environ:  # llmgw itself, run from a checkout
            kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return {"PATH": os.defpath, **kept, "HOME": self.home, "USER": self.name, "PYTHONUNBUFFERED": "1"}


KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "ROCM_PATH",
    "HF_HOME",
    "XDG_CACHE_HOME",
)
"""Variables of the agent's own environment that engines get too: the operator sets them in the agent's unit."""


def account(name: str) -> Account:
    """The account called *name*; "" = the agent's own. Raises ConfigError where it cannot be used."""
    own = os.getuid()
    try:
        entry = pwd.getpwnam(name) if name else pwd.getpwuid(own)
    except KeyError:
        if not name:  # a container without an entry for its user
            return Account(str(own), own, os.getgid(), frozenset(os.getgroups()), "/")
        raise ConfigError([Problem(f"there is no user {name!r}: make it (useradd --system {name})", "user")]) from None
    if own not in (entry.pw_uid, 0):
        text = f"engines cannot run as {name!r}: the agent runs as uid {own}, and only root can change the user"
        raise ConfigError([Problem(text, "user")])
    groups = {g.gr_gid for g in grp.getgrall() if entry.pw_name in g.gr_mem} | {entry.pw_gid}
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, frozenset(groups), entry.pw_dir, entry.pw_uid != own)
