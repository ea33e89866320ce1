"""`llmgw ctl`: what an operator asks a running server, and tells it.

Exit codes: 0 done · 1 the server cannot be reached, or failed · 2 wrong usage · 3 what was named does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import click

from llmgw.ctl.client import DEFAULT, AdminClient, Failed
from llmgw.ctl.tables import show
from llmgw.errors import Unavailable
from llmgw.units import format_duration

MISSING = ("unknown_path", "model_not_found")

P = ParamSpec("P")


def failing_well(function: Callable[P, None]) -> Callable[P, None]:
    """One line on standard error, and the exit code that goes with it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Failed as error:
            click.echo(f"llmgw ctl: {error}", err=True)
            raise SystemExit(3 if error.code in MISSING else 1) from None
        except Unavailable as error:
            click.echo(f"llmgw ctl: {error}", err=True)
            raise SystemExit(1) from None

    return run


as_json = click.option("--json", "plain", is_flag=True, help="The server's own JSON.")


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

    Exit codes: 0 done, 1 the server cannot be reached or failed, 2 wrong usage, 3 what was named does not exist.
    """
    context.obj = server


def _json(found: dict[str, Any]) -> None:
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


def _fetch(server: str, kind: str, name: str | None, plain: bool) -> list[dict[str, Any]] | None:
    """All objects of *kind*, or the one of that *name*; None: they are printed already, as JSON."""
    with AdminClient(server) as client:
        found = client.get(kind, name) if name else client.get(kind)
    if plain:
        _json(found)
        return None
    return [found] if name else list(found["items"])


def _model_names(endpoint: dict[str, Any]) -> str:
    return ", ".join(m["name"] for m in endpoint["models"])


@ctl.command()
@click.argument("name", required=False)
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
        ("NAME", "HEALTH", "SINCE", "INFLIGHT", "REQUESTS", "FAILURES", "ENGINE", "MODELS", "PHASES", "URL", "WHY"),
        rows,
        empty="There are no endpoints: give `llmgw server` some with --endpoint or --config.",
    )


@ctl.command()
@click.argument("name", required=False)
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
            str(m["max_model_len"] or "?"),
            ", ".join(m["aliases"]),
            ", ".join(m["loras"]),
            ", ".join(m["endpoints"]),
        )
        for m in found
    ]
    show(
        ("NAME", "SERVING", "CONTEXT", "ALIASES", "ADAPTERS", "ENDPOINTS"),
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
        _json(found)
    else:
        click.echo(f"{name} is {found['health']['state']}, with {found['inflight']} requests under way")
