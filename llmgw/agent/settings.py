"""What an operator tells an agent: `/etc/llmgw/agent.yaml` and a few flags.

A node without the file works: its name is the host's, engines are looked for on PATH, weights in /var/lib/llmgw/weights.
"""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Literal

import attrs

from llmgw.agent.rdma import FabricRule
from llmgw.config import Document
from llmgw.engines import ENGINES
from llmgw.engines.base import PORT_BLOCK
from llmgw.errors import ConfigError, Problem
from llmgw.schema import a_name, key
from llmgw.units import Duration, Size

STATE = "/var/lib/llmgw"


def a_span(value: str) -> str | None:
    found = re.fullmatch(r"(\d+)-(\d+)", value)
    if found is None or not 1024 <= int(found[1]) < int(found[2]) <= 65535:
        return f"{value!r} is not a span of ports like 20000-29999, above 1023"
    if int(found[2]) - int(found[1]) + 1 < PORT_BLOCK:
        return f"{value!r} has no room for one block of {PORT_BLOCK} ports"
    return None


def an_absolute_path(value: str) -> str | None:
    return None if value.startswith("/") else f"{value!r} is not an absolute path"


@attrs.frozen(kw_only=True)
class Fabric:
    """Which fabric ports are on. Every condition that is given must hold; the first rule that holds decides."""

    fabric: str = key("Name of the fabric.", check=a_name)
    device: str = key("`mlx5_0` or `mlx5_0/1`.", "")
    guid: str = key("GUID of the port.", "")
    prefix: str = key("Subnet prefix, 16 hex digits.", "")
    sm_guid: str = key("GUID of the master subnet manager.", "")
    network: str = key("The port's RoCE network lies in it (`10.20.0.0/16`).", "")
    vlan: int | None = key("VLAN of the port's RoCE network.", None)
    rail: int | None = key("Which rail of the fabric the port is.", None)

    def rule(self) -> FabricRule:
        return FabricRule(**attrs.asdict(self))


@attrs.frozen(kw_only=True)
class Program:
    """An engine on this node."""

    command: tuple[str, ...] = key("How to start it, without flags: `[/opt/vllm/bin/vllm, serve]`.")


@attrs.frozen(kw_only=True)
class Settings:
    """The agent's file."""

    version: Literal[1] = key("Of this schema: always 1, always there.", 1)
    node: str = key("Name of this node. Unset: the host's name.", "")
    address: str = key("Where the server and other nodes reach engines of this node. Unset: of the default route.", "")
    state: str = key("Folder of the agent's state, mode 0700.", STATE, check=an_absolute_path)
    user: str = key("User that engines run as. Unset: the agent's own.", "")
    labels: dict[str, str] = key("Labels of this node: rack, zone, …", attrs.Factory(dict))
    taints: tuple[str, ...] = key("Only models that tolerate these are placed here.", ())
    engines: dict[str, Program] = key("Engines, by kind. Those not named are looked for on PATH.", attrs.Factory(dict))
    weights: tuple[str, ...] = key("Folders that hold weights.", (STATE + "/weights",))
    fabrics: tuple[Fabric, ...] = key("Which fabric each RDMA port is on, first rule that holds.", ())
    interface: str = key("Network interface that ranks of a group meet over. Unset: of the default route.", "")
    ports: str = key("Ports that engines get their blocks from.", "20000-29999", check=a_span)
    accept: dict[str, str] = key(
        "Preflight rows that must not keep this node from serving: row id → why. Shown with the row.",
        attrs.Factory(dict),
    )
    stop_after: Duration | None = key("Stop engines when the server was not reached for so long. Unset: never.", None)
    log_size: Size = key("An engine's log is rotated at this size.", 64 << 20)
    log_files: int = key("Rotated logs kept of an engine.", 4)

    def span(self) -> tuple[int, int]:
        low, _, high = self.ports.partition("-")
        return int(low), int(high)

    def programs(self) -> dict[str, tuple[str, ...]]:
        """Kind → command, of all engines that this node seems to have."""
        found = {kind: program for kind in ENGINES.all() if (program := _on_path(kind))}
        return found | {kind: program.command for kind, program in self.engines.items()}


def _on_path(kind: str) -> tuple[str, ...]:
    if kind == "sim":
        return (sys.executable, "-m", "llmgw", "sim-engine")
    where = shutil.which(kind)
    if where is None:
        return ()
    if kind == "sglang":
        return (str(Path(where).with_name("python")), "-m", "sglang.launch_server")
    return (where, "serve") if kind == "vllm" else (where,)


def parse(text: str, file: str = "") -> Settings:
    """The settings in *text*. Raises ConfigError with every problem."""
    document = Document(text, file)
    if document.data is None:
        return Settings()
    settings, problems = document.structure(Settings)
    if settings is not None:
        known = ENGINES.all()
        for kind in settings.engines:
            if kind not in known:
                text = f"unknown engine {kind!r}; known: {', '.join(known)}"
                problems.append(document.problem(("engines", kind), text))
    if settings is None or problems:
        raise ConfigError(sorted(problems, key=lambda p: p.line))
    return settings


def load(path: str) -> Settings:
    """The settings in the file at *path*. Raises ConfigError, also for a file that cannot be read."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", "", path)]) from error
