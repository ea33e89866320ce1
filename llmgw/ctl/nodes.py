"""`llmgw ctl` about machines: nodes, cordon, drain, join tokens."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping
from typing import Any

import click

from llmgw.ctl.client import AdminClient, Failed
from llmgw.ctl.common import as_json, end, failing_well, names_of, print_json, print_line
from llmgw.ctl.tables import show
from llmgw.units import format_duration, parse_duration

POLL = 1.0  # seconds between two looks at a drain

a_node = click.argument("name", metavar="NODE", shell_complete=names_of("nodes"))


@click.command()
@click.argument("name", required=False, metavar="[NODE]", shell_complete=names_of("nodes"))
@as_json
@click.pass_obj
@failing_well
def nodes(server: str, name: str | None, plain: bool) -> None:
    """Machines, their GPUs and fabrics, and what keeps them from serving; one of them, or all."""
    with AdminClient(server) as client:
        found = client.get("nodes", name) if name else client.get("nodes")
    if plain:
        print_json(found)
        return
    if name:
        _details(found)
        return
    rows = [
        (
            n["name"],
            _state(n),
            _gpus(n),
            ", ".join(f"{f['fabric']} x{f['rails']}" if f["fabric"] else "unresolved" for f in n["fabrics"]) or "-",
            ", ".join(n["replicas"]) or "-",
            n["address"],
            "-" if n["heard_seconds"] is None else format_duration(int(n["heard_seconds"])),
            "; ".join(_problem(p) for p in n["problems"] if p["level"] != "info") or "-",
        )
        for n in found["items"]
    ]
    show(
        ("NAME", "STATE", "GPUS", "FABRICS", "REPLICAS", "ADDRESS", "HEARD", "PROBLEMS"),
        rows,
        empty="No node has joined. On this server: llmgw ctl token create; on the node: llmgw agent --server HOST:9443.",
    )


def _state(node: Mapping[str, Any]) -> str:
    marks = [node["state"]]
    if node["draining"]:
        marks.append("draining")
    elif node["cordon"]:
        marks.append(f"cordoned by {node['cordon']['by']}")
    return ", ".join(marks)


def _gpus(node: Mapping[str, Any]) -> str:
    types: dict[str, list[bool]] = {}
    for gpu in node["gpus"]:
        types.setdefault(gpu["name"], []).append(gpu["replica"] is None and gpu["health"] != "blocked")
    return ", ".join(f"{sum(free)}/{len(free)} {name} free" for name, free in types.items()) or "none"


def _problem(problem: Mapping[str, Any]) -> str:
    return f"{problem['id']} {problem['message']}".strip()


def _details(node: Mapping[str, Any]) -> None:
    click.echo(f"{node['name']}  {_state(node)}  {node['address']}")
    if node["cordon"]:
        click.echo(f"cordoned: {node['cordon']['why'] or 'no reason given'}")
    if node["driver"]:
        click.echo(f"driver {node['driver']}")
    if node["engines"]:
        click.echo("engines: " + ", ".join(f"{e['name']} {e['version']}".strip() for e in node["engines"]))
    if node["labels"]:
        click.echo("labels: " + ", ".join(f"{k}={v}" for k, v in node["labels"].items()))
    show(
        ("GPU", "TYPE", "MEMORY", "FREE", "ISLAND", "HEALTH", "REPLICA", "UUID"),
        [
            (
                str(g["index"]),
                g["name"],
                f"{g['memory_gib']:g} GiB",
                "?" if g["free_gib"] is None else f"{g['free_gib']:g} GiB",
                g["island"] or "-",
                g["health"] + (f": {g['reason']}" if g["reason"] else ""),
                g["replica"] or "-",
                g["uuid"],
            )
            for g in node["gpus"]
        ],
        empty="This node has no GPUs.",
    )
    for fabric in node["fabrics"]:
        name = fabric["fabric"] or "unresolved"
        click.echo(f"fabric {name}: {fabric['rails']} rails" + "".join(f"; {t}" for t in fabric["troubles"]))
    for problem in node["problems"]:
        fix = f" -> {problem['fix']}" if problem["fix"] else ""
        click.echo(f"{problem['level']}: {_problem(problem)} ({problem['scope']}){fix}")


def _order(server: str, name: str, action: str, **body: Any) -> dict[str, Any]:
    with AdminClient(server) as client:
        return client.post("nodes", name, action, body={"by": getpass.getuser(), **body})


@click.command()
@a_node
@click.option("--why", default="", help="Shown to whoever asks why nothing is placed there.")
@as_json
@click.pass_obj
@failing_well
def cordon(server: str, name: str, why: str, plain: bool) -> None:
    """Place no new replicas on NODE; what runs there goes on."""
    _say(_order(server, name, "cordon", why=why), f"{name} gets no new replicas", plain)


@click.command()
@a_node
@as_json
@click.pass_obj
@failing_well
def uncordon(server: str, name: str, plain: bool) -> None:
    """Open NODE for replicas again."""
    _say(_order(server, name, "uncordon"), f"{name} is open for replicas", plain)


def _say(found: dict[str, Any], text: str, plain: bool) -> None:
    if plain:
        print_json(found)
    else:
        click.echo(text)


@click.command()
@a_node
@click.option("--abort", is_flag=True, help="Stop emptying it. What has left stays away.")
@click.option(
    "--no-surge", is_flag=True, help="Stop replicas before their copies run: for full clusters. Costs downtime."
)
@click.option("--parallel", default=1, show_default=True, help="Replicas at once, each of another model.")
@click.option("--why", default="", help="Shown with the cordon.")
@click.option("--no-wait", is_flag=True, help="Return at once; the drain goes on.")
@as_json
@click.pass_obj
@failing_well
def drain(
    server: str, name: str, abort: bool, no_surge: bool, parallel: int, why: str, no_wait: bool, plain: bool
) -> None:
    """Empty NODE: a copy of each replica first, then its requests end, then it stops. Nobody notices.

    Asked again, it shows the drain that is under way. With --json a line whenever something has changed.
    """
    if abort:
        _say(_order(server, name, "abort"), f"{name} is not drained any more", plain)
        return
    found = _order(server, name, "drain", surge=not no_surge, parallel=parallel, why=why)
    shown: object = None
    with AdminClient(server) as client:
        while True:
            key = (found["progress"], str(found["moving"])) if plain else _progress(found)
            if key != shown:
                shown = key
                if plain:
                    print_line(found)
                else:
                    click.echo(key)
            if found["finished"] or no_wait:
                break
            time.sleep(POLL)
            try:
                found = client.get("drains", name)
            except Failed as error:
                end(f"the drain was ended by somebody else: {error}", 1)
    if not plain and found["finished"]:
        click.echo(f"{name} stays cordoned; `llmgw ctl uncordon {name}` opens it again")


def _progress(drain_: Mapping[str, Any]) -> str:
    moving = []
    for one in drain_["moving"]:
        copy = f", {one['copy']} {one['copy_state']}" if one["copy"] else ""
        moving.append(f"{one['replica']} {one['state']} ({one['inflight']} in flight{copy})")
    return f"{drain_['node']}: {drain_['progress']}" + (f" [{'; '.join(moving)}]" if moving else "")


@click.group()
def node() -> None:
    """Membership of machines."""


@node.command()
@a_node
@click.confirmation_option(prompt="It can report no more, and its replicas are made elsewhere. Revoke it?")
@as_json
@click.pass_obj
@failing_well
def revoke(server: str, name: str, plain: bool) -> None:
    """Refuse NODE's certificates from now on; its connections are cut within a second. Engines there go on running."""
    found = _order(server, name, "revoke")
    _say(found, f"{name} is revoked; to let it in again: llmgw ctl token create --node {name}", plain)


@node.command("forget")
@a_node
@click.confirmation_option(prompt="Its replicas are made elsewhere at once. Will it never come back?")
@as_json
@click.pass_obj
@failing_well
def forget(server: str, name: str, plain: bool) -> None:
    """NODE is gone for good: what was there is given up. Only for one that is lost."""
    _say(_order(server, name, "forget"), f"{name} is forgotten", plain)


@click.group()
def token() -> None:
    """Join tokens: each lets one machine become a node, once."""


@token.command()
@click.option("--node", "name", default="", help="Only for the node of this name, also one that is known already.")
@click.option("--pool", default="", help="Kept with the node.")
@click.option("--ttl", default="15m", show_default=True, help="How long it is good; 24h at most.")
@as_json
@click.pass_obj
@failing_well
def create(server: str, name: str, pool: str, ttl: str, plain: bool) -> None:
    """A new token, on standard output, and how to use it, on standard error. It is shown this once."""
    try:
        seconds = parse_duration(ttl)
    except ValueError as error:
        end(f"--ttl: {error}", 2)
    with AdminClient(server) as client:
        found = client.post("tokens", body={"node": name, "pool": pool, "ttl": seconds})
    if plain:
        print_json(found)
        return
    click.echo(found["token"])
    which = f" --node {name}" if name else ""
    click.echo(
        f"Good once, for {format_duration(seconds)}. On the node, with the token in a file of mode 0600:\n"
        f"  llmgw agent --server {found['server']}{which} --join-token-file FILE",
        err=True,
    )


COMMANDS = (nodes, cordon, uncordon, drain, node, token)
