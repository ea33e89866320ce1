"""`llmgw ctl`: what an operator asks a running server, and tells it.

Exit codes: 0 done · 1 the server cannot be reached, failed, or said no · 2 wrong usage, or a file that cannot be used ·
3 what was named does not exist, or there is no place for a model (`plan`, `explain-placement`).
"""

from __future__ import annotations

import json
import time
from typing import Any

import click

from llmgw.ctl import models as catalogue
from llmgw.ctl import nodes, upkeep
from llmgw.ctl.client import DEFAULT, AdminClient
from llmgw.ctl.common import as_json, failing_well, names_of, print_json
from llmgw.ctl.tables import show
from llmgw.pipeline import explain as phases
from llmgw.routing import explain
from llmgw.units import format_duration


@click.group()
@click.option(
    "--server",
    envvar="LLMGW_SERVER",
    default=DEFAULT,
    show_default=True,
    help="Admin port: http://HOST:PORT or unix:/path. Environment: LLMGW_SERVER.",
)
@click.pass_context
def ctl(context: click.Context, server: str) -> None:
    """Ask and operate a running server.

    Exit codes: 0 done, 1 the server cannot be reached, failed or said no, 2 wrong usage or a file that cannot be used,
    3 what was named does not exist, or a model has no place. Names complete themselves: llmgw ctl completion --help.
    """
    context.obj = server


def _fetch(server: str, kind: str, name: str | None, plain: bool) -> list[dict[str, Any]] | None:
    """All objects of *kind*, or the one of that *name*; None: they are printed already, as JSON."""
    with AdminClient(server) as client:
        found = client.get(kind, name) if name else client.get(kind)
    if plain:
        print_json(found)
        return None
    return [found] if name else list(found["items"])


COLUMNS = (
    "NAME", "HEALTH", "SINCE", "INFLIGHT", "AHEAD ms", "PREFILL tok/s", "DECODE tok/s", "KV", "REPORT", "REQUESTS",
    "FAILURES", "ENGINE", "MODELS", "PHASES", "URL", "WHY",
)  # fmt: skip


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def share(report: dict[str, Any] | None) -> str:
    return "?" if report is None or report["kv_usage"] is None else f"{report['kv_usage']:.0%}"


def age(report: dict[str, Any] | None) -> str:
    return "none" if report is None else f"{report['seconds']:.0f}s"


def _model_names(endpoint: dict[str, Any]) -> str:
    return ", ".join(m["name"] for m in endpoint["models"])


@ctl.command()
@click.argument("name", required=False, shell_complete=names_of("endpoints"))
@as_json
@click.pass_obj
@failing_well
def endpoints(server: str, name: str | None, plain: bool) -> None:
    """Engines that the gateway sends requests to, and how they are; one of them, or all."""
    found = _fetch(server, "endpoints", name, plain)
    if found is None:
        return
    rows = [
        (
            e["name"],
            e["health"]["state"],
            format_duration(int(e["health"]["seconds"])),
            str(e["inflight"]),
            number(e["ahead_ms"]),
            number(e["prefill_rate"]),
            number(e["decode_rate"]),
            share(e["report"]),
            age(e["report"]),
            str(e["requests"]),
            str(e["failures"]),
            e["engine"],
            _model_names(e) or "?",
            "+".join(e["phases"]),
            e["url"],
            e["health"]["why"],
        )
        for e in found
    ]
    show(
        COLUMNS,
        rows,
        empty="There are no endpoints: give `llmgw server` some with --endpoint or --config.",
    )


@ctl.command()
@click.argument("name", required=False, shell_complete=names_of("models"))
@as_json
@click.pass_obj
@failing_well
def models(server: str, name: str | None, plain: bool) -> None:
    """Models that clients can ask for, and who serves them; one of them, or all."""
    found = _fetch(server, "models", name, plain)
    if found is None:
        return
    rows = [
        (
            m["name"],
            f"{m['serving']}/{len(m['endpoints'])}",
            f"{m['replicas']['ready']}/{m['replicas']['wanted']}" if "replicas" in m else "-",
            str(m["max_model_len"] or "?"),
            ", ".join(m["aliases"]),
            ", ".join(m["loras"]),
            ", ".join(m["endpoints"]),
            m.get("reason", ""),
        )
        for m in found
    ]
    show(
        ("NAME", "SERVING", "REPLICAS", "CONTEXT", "ALIASES", "ADAPTERS", "ENDPOINTS", "REASON"),
        rows,
        empty="No endpoint has said yet which models it serves.",
    )


@ctl.command("drain-endpoint")
@click.argument("name")
@click.option("--undo", is_flag=True, help="Let it serve again, once a probe says that it can.")
@as_json
@click.pass_obj
@failing_well
def drain_endpoint(server: str, name: str, undo: bool, plain: bool) -> None:
    """Send endpoint NAME no more requests; those that it has go on. Holds until undone or restarted."""
    with AdminClient(server) as client:
        found = client.post("endpoints", name, "undrain" if undo else "drain")
    if plain:
        print_json(found)
    else:
        click.echo(f"{name} is {found['health']['state']}, with {found['inflight']} requests under way")


@ctl.command("explain-route")
@click.argument("model", required=False)
@click.option("--request", "file", type=click.File("rb"), help="A client's body; `-` reads standard input.")
@click.option("--request-id", help="A request that was decided lately: what was predicted, and what came true.")
@click.option("--session", default="", help="As x-session-id.")
@click.option("--profile", default="", help="As x-llmgw-profile.")
@as_json
@click.pass_obj
@failing_well
def explain_route(
    server: str, model: str | None, file: Any, request_id: str | None, session: str, profile: str, plain: bool
) -> None:
    """Where a request for MODEL would go now, and why; nothing is sent. Or why --request-id went where it did."""
    if (model is None) == (request_id is None):
        raise click.UsageError("name a MODEL, or a request with --request-id")
    with AdminClient(server) as client:
        if request_id is not None:
            found = client.get("decisions", request_id)
        else:
            body: Any = {}
            if file is not None:
                try:
                    body = json.load(file)
                except ValueError as error:
                    raise click.UsageError(f"--request is not JSON: {error}") from None
            asked = {"model": model, "session": session, "profile": profile, "request": body}
            found = client.post("explain-route", body=asked)
    if plain:
        print_json(found)
        return
    if "pipeline" in found:
        click.echo(phases.text(found["pipeline"]), nl=False)
    if "winner" in found or "pipeline" not in found:
        click.echo(explain.text(found), nl=False)


@ctl.command()
@as_json
@click.pass_obj
@failing_well
def queue(server: str, plain: bool) -> None:
    """Who waits for admission, by model and band, and what each engine may have in hand."""
    with AdminClient(server) as client:
        found = client.get("queue")
    if plain:
        print_json(found)
        return
    rows = [
        (
            q["model"],
            q["band"],
            str(q["waiting"]),
            seconds(q["oldest"]),
            str(q["running"]),
            number(q["tokens_per_second"]),
            seconds(q["predicted_wait"]),
        )
        for q in found["items"]
    ]
    show(("MODEL", "BAND", "WAITING", "OLDEST", "RUNNING", "TOKENS/s", "PREDICTED"), rows, empty="No model is served.")
    engines = [
        (
            e["endpoint"],
            str(sum(e["running"].values())),
            f"{e['limit']}{'' if e['limit_known'] else '+'}",
            e["kept_for"] or "",
            "" if e["slowdown"] is None else f"{e['slowdown']:.2f}",
            f"{e['interference']:.2f}",
        )
        for e in found["engines"]
    ]
    click.echo()
    show(
        ("ENDPOINT", "RUNNING", "LIMIT", "KEPT FOR", "SLOWDOWN", "INTERFERENCE"),
        engines,
        empty="There are no endpoints.",
    )


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}s"


@ctl.command("explain-admission")
@click.option("--request-id", required=True, help="A request that came lately, or waits.")
@as_json
@click.pass_obj
@failing_well
def explain_admission(server: str, request_id: str, plain: bool) -> None:
    """How long a request waited or waits for admission, what is before it, and what each engine says."""
    with AdminClient(server) as client:
        found = client.get("admissions", request_id)
    if plain:
        print_json(found)
        return
    click.echo(
        f"Request {request_id}: {found['state']}, band {found['band']}, flow {found['flow']}, {found['tokens']} tokens"
    )
    if found["state"] == "queued":
        before = ", ".join(f"{count} of {band}" for band, count in found["before_it"].items())
        click.echo(
            f"  waits since {found['waited']:.1f} s, at most {found['until_deadline']:.0f} s more; in its queues: {before}"
        )
        for name, why in found["engines"].items():
            click.echo(f"  {name}: {why}")
    else:
        click.echo(
            f"  waited {found['waited']:.3f} s"
            + (f", made way {found['preempted']} times" if found["preempted"] else "")
        )


@ctl.command()
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.2, 60), help="Seconds.")
@click.option("--once", is_flag=True, help="One table, then the end.")
@click.pass_obj
@failing_well
def top(server: str, interval: float, once: bool) -> None:
    """Endpoints and their load, over and over. Ends with Ctrl-C."""
    with AdminClient(server) as client:
        while True:
            rows = [
                (
                    e["name"],
                    e["health"]["state"],
                    str(e["inflight"]),
                    str(e["queued"]),
                    number(e["ahead_ms"]),
                    str(e["decode_tokens"]),
                    number(e["prefill_rate"]),
                    number(e["decode_rate"]),
                    share(e["report"]),
                    age(e["report"]),
                )
                for e in client.get("endpoints")["items"]
            ]
            if not once:
                click.clear()
            show(
                (
                    "NAME",
                    "HEALTH",
                    "INFLIGHT",
                    "QUEUED",
                    "AHEAD ms",
                    "DUE tok",
                    "PREFILL tok/s",
                    "DECODE tok/s",
                    "KV",
                    "REPORT",
                ),
                rows,
                empty="There are no endpoints.",
            )
            if once:
                return
            time.sleep(interval)


for command in (*nodes.COMMANDS, *catalogue.COMMANDS, *upkeep.COMMANDS):
    ctl.add_command(command)
