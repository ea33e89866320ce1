"""`llmgw ctl` about what is served: the catalogue, replicas and why they are where they are."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llmgw.ctl.client import AdminClient
from llmgw.ctl.common import as_json, end, failing_well, names_of, print_json, print_line
from llmgw.ctl.tables import show
from llmgw.units import format_duration

a_file = click.option(
    "-f", "--file", "file", required=True, metavar="FILE|-", help="The catalogue, YAML: examples/cluster.yaml."
)
a_model = click.argument("name", metavar="MODEL", shell_complete=names_of("models"))


def _read(file: str) -> dict[str, str]:
    """Raises OSError."""
    if file == "-":
        return {"text": sys.stdin.read(), "file": "standard input"}
    try:
        return {"text": Path(file).read_text(encoding="utf-8"), "file": file}
    except UnicodeDecodeError as error:
        raise OSError(f"{file} is not UTF-8") from error


def _show_changes(found: Mapping[str, Any], none: str) -> None:
    for change in found["changes"]:
        click.echo(change["text"])
    if not found["changes"]:
        click.echo(none)


@click.command()
@a_file
@click.option("--remove", is_flag=True, help="Models that FILE does not name are stopped and go.")
@as_json
@click.pass_obj
@failing_well
def apply(server: str, file: str, remove: bool, plain: bool) -> None:
    """Make FILE the catalogue. Replicas follow by themselves; `llmgw ctl events -f` shows them."""
    with AdminClient(server) as client:
        found = client.put("catalogue", body={**_read(file), "remove": remove})
    if plain:
        print_json(found)
    else:
        _show_changes(found, "nothing to change")


@click.command()
@a_file
@as_json
@click.pass_obj
@failing_well
def diff(server: str, file: str, plain: bool) -> None:
    """What applying FILE would change. Nothing is changed."""
    with AdminClient(server) as client:
        found = client.put("catalogue", body={**_read(file), "dry": "diff"})
    if plain:
        print_json(found)
    else:
        _show_changes(found, "no difference")


@click.command()
@a_file
@as_json
@click.pass_obj
@failing_well
def plan(server: str, file: str, plain: bool) -> None:
    """Where replicas would go if FILE were applied now. Nothing is changed.

    Exit code 3 if some replica would have no place.
    """
    with AdminClient(server) as client:
        found = client.put("catalogue", body={**_read(file), "dry": "plan"})
    if plain:
        print_json(found)
    else:
        _show_changes(found, "no difference")
        for placement, text in zip(found["placements"], found["text"], strict=True):
            click.echo(f"{placement['replica']}: {text}")
    if any(p["chosen"] is None for p in found["placements"]):
        raise SystemExit(3)


@click.group()
def model() -> None:
    """Single models of the catalogue."""


@model.command()
@click.argument("name", metavar="MODEL")
@click.option("--engine", required=True, help="vllm, sglang, llama-server or sim.")
@click.option("--weights", default="", help="Path on the nodes, or repository id.")
@click.option("--replicas", default=1, show_default=True)
@click.option("--max-model-len", type=int, help="Longest sequence, tokens.")
@click.option("--gpu", "gpus", multiple=True, metavar="TYPE", help="In order of preference; repeatable. Default: any.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel degree.")
@click.option("--cpu", is_flag=True, help="Without a GPU.")
@click.option("--alias", "aliases", multiple=True, help="Another name for clients; repeatable.")
@click.option("--flag", "flags", multiple=True, help="Appended to the engine's command line; repeatable.")
@as_json
@click.pass_obj
@failing_well
def add(
    server: str,
    name: str,
    engine: str,
    weights: str,
    replicas: int,
    max_model_len: int | None,
    gpus: tuple[str, ...],
    tp: int,
    cpu: bool,
    aliases: tuple[str, ...],
    flags: tuple[str, ...],
    plain: bool,
) -> None:
    """Add MODEL to the catalogue. All else is in files: `llmgw ctl apply`."""
    shape: dict[str, Any] = {"cpu": True} if cpu else {"tp": tp, "gpus": list(gpus)}
    made: dict[str, Any] = {"name": name, "engine": engine, "replicas": replicas, "shapes": [shape]}
    made |= {k: v for k, v in (("weights", weights), ("max_model_len", max_model_len), ("flags", list(flags))) if v}
    if aliases:
        made["routing"] = {"aliases": list(aliases)}
    with AdminClient(server) as client:
        before = client.get("catalogue")
        if any(m["name"] == name for m in before["models"]):
            end(f"{name} is in the catalogue already; change it in its file and `llmgw ctl apply -f FILE`", 1)
        _put(client, before, [*before["models"], made], plain)


@model.command()
@a_model
@as_json
@click.pass_obj
@failing_well
def remove(server: str, name: str, plain: bool) -> None:
    """Stop MODEL and take it out of the catalogue."""
    with AdminClient(server) as client:
        before = client.get("catalogue")
        left = [m for m in before["models"] if m["name"] != name]
        if len(left) == len(before["models"]):
            end(f"There is no model {name!r} in the catalogue.", 3)
        _put(client, before, left, plain)


def _put(client: AdminClient, before: Mapping[str, Any], models: list[Any], plain: bool) -> None:
    text = json.dumps({"version": 1, "models": models})
    found = client.put("catalogue", body={"text": text, "revision": before["revision"], "remove": True})
    if plain:
        print_json(found)
    else:
        _show_changes(found, "nothing to change")


@model.command("show")
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=names_of("models"))
@click.pass_obj
@failing_well
def show_model(server: str, name: str | None) -> None:
    """The catalogue as it is, as a file for `llmgw ctl apply`."""
    import yaml

    with AdminClient(server) as client:
        models = client.get("catalogue")["models"]
    if name:
        models = [m for m in models if m["name"] == name]
        if not models:
            end(f"There is no model {name!r} in the catalogue.", 3)
    click.echo(yaml.safe_dump({"version": 1, "models": models}, sort_keys=False, allow_unicode=True), nl=False)


@click.command()
@a_model
@click.argument("replicas", type=click.IntRange(min=0))
@as_json
@click.pass_obj
@failing_well
def scale(server: str, name: str, replicas: int, plain: bool) -> None:
    """Run REPLICAS replicas of MODEL. A later `apply` says so anew."""
    with AdminClient(server) as client:
        found = client.post("models", name, "scale", body={"replicas": replicas})
    if plain:
        print_json(found)
    else:
        click.echo(f"{name}: {found['replicas']['ready']} of {found['replicas']['wanted']} ready")


@click.command()
@a_model
@as_json
@click.pass_obj
@failing_well
def retry(server: str, name: str, plain: bool) -> None:
    """The cause of MODEL's failures is cured: forget them and start its replicas again."""
    with AdminClient(server) as client:
        found = client.post("models", name, "retry")
    if plain:
        print_json(found)
    else:
        click.echo(f"{name} is tried again")


@click.command()
@click.option("--model", "name", default="", help="Of this model only.", shell_complete=names_of("models"))
@as_json
@click.pass_obj
@failing_well
def replicas(server: str, name: str, plain: bool) -> None:
    """Replicas, a line for each node that one runs on: node, GPUs, ports, state and why."""
    with AdminClient(server) as client:
        found = client.get("replicas", **({"model": name} if name else {}))
    if plain:
        print_json(found)
        return
    now = datetime.datetime.now(datetime.UTC).timestamp()
    rows = []
    for one in found["items"]:
        for rank in one["ranks"] or [None]:
            first = rank is None or rank["rank"] == 0
            gpus = [str(g["index"]) if g["index"] is not None else g["uuid"] for g in rank["gpus"]] if rank else []
            ports = rank["ports"] if rank else None
            rows.append(
                (
                    one["id"] if first else "",
                    one["model"] if first else "",
                    one["state"] if first else (rank["state"] or "?" if rank else ""),
                    format_duration(int(max(0.0, now - one["since"]))) if first else "",
                    one["shape"] or "-",
                    str(rank["rank"]) if rank else "-",
                    rank["node"] if rank else "-",
                    ",".join(gpus) or "-",
                    f"{ports['base']}-{ports['base'] + ports['count'] - 1}" if ports else "-",
                    str(one["inflight"]) if first else "",
                    (one["reason"] + (f" (for {one['replaces']}: {one['why']})" if one["replaces"] else ""))
                    if first
                    else "",
                )
            )
    show(
        ("REPLICA", "MODEL", "STATE", "SINCE", "SHAPE", "RANK", "NODE", "GPUS", "PORTS", "INFLIGHT", "REASON"),
        rows,
        empty="There are no replicas: declare a model with llmgw ctl apply -f cluster.yaml.",
    )


@click.command("explain-placement")
@a_model
@click.option("--now", is_flag=True, help="Decide anew for one more replica, instead of showing the recorded decision.")
@as_json
@click.pass_obj
@failing_well
def explain_placement(server: str, name: str, now: bool, plain: bool) -> None:
    """Every place that MODEL could have, and all that is in its way there, with both numbers.

    Of a model that runs: the decision that placed its latest replica, as it was made. Exit code 3 if there is no place.
    """
    query = {"now": "1"} if now else {}
    with AdminClient(server) as client:
        if plain:
            found = client.get("placements", name, **query)
            print_json(found)
            code = 0 if found["chosen"] is not None else 3
        else:
            found = client.get("placements", name, format="text", **query)
            click.echo(found["text"])
            code = found["exit"]
    raise SystemExit(code)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen.")
@as_json
@click.pass_obj
@failing_well
def events(server: str, follow: bool, plain: bool) -> None:
    """What has happened to replicas, nodes and models since this server leads. With --json and -f an object a line."""
    with AdminClient(server) as client:
        if follow:
            for one in client.follow("events"):
                print_line(one) if plain else _event(one)
            return
        found = client.get("events")
    if plain:
        print_json(found)
        return
    for one in found["items"]:
        _event(one)


def _event(one: Mapping[str, Any]) -> None:
    when = datetime.datetime.fromtimestamp(one["at"], datetime.UTC)
    click.echo(f"{when:%Y-%m-%d %H:%M:%S}Z  {one['about']:<9}  {one['subject']}  {one['text']}")


@click.command()
@click.argument("name", metavar="REPLICA", shell_complete=names_of("replicas", "id"))
@as_json
@click.pass_obj
@failing_well
def logs(server: str, name: str, plain: bool) -> None:
    """The last lines of REPLICA's engine when it failed last, and where its whole log lies."""
    with AdminClient(server) as client:
        found = client.get("replicas", name, "log")
    if plain:
        print_json(found)
        return
    for failure in found["failures"]:
        click.echo(f"# {failure['node']}: {failure['cause']}: {failure['message']}")
        for line in failure["log"]:
            click.echo(line)
    if not found["failures"]:
        click.echo(f"{name} is {found['state']} and has no failure on record", err=True)
    for where in found["nodes"]:
        click.echo(f"# the whole log: on {where}, /var/lib/llmgw/logs/{name}.log (or the agent's --state)", err=True)


@click.command("release-brake")
@as_json
@click.pass_obj
@failing_well
def release_brake(server: str, plain: bool) -> None:
    """Many nodes were lost at once, and really are: make their replicas elsewhere."""
    with AdminClient(server) as client:
        found = client.post("brake", "release")
    if plain:
        print_json(found)
    else:
        click.echo("replicas of lost nodes are made elsewhere")


COMMANDS = (apply, diff, plan, model, scale, retry, replicas, explain_placement, events, logs, release_brake)
