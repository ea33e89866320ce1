"""What all commands of `llmgw ctl` have in common: exit codes, JSON, names that complete themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec

import click

from llmgw.ctl.client import DEFAULT, AdminClient, Failed
from llmgw.errors import ConfigError, LlmgwError

MISSING = ("unknown_path", "model_not_found")
UNUSABLE = ("bad_field",)

P = ParamSpec("P")


def failing_well(function: Callable[P, None]) -> Callable[P, None]:
    """What is wrong on standard error, and the exit code that goes with it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Failed as error:
            end(str(error), 3 if error.code in MISSING else 2 if error.code in UNUSABLE else 1)
        except ConfigError as error:
            end(str(error), 2)
        except (LlmgwError, OSError) as error:
            end(str(error), 1)

    return run


def end(message: str, code: int) -> NoReturn:
    """Say it on standard error, and leave."""
    click.echo(f"llmgw ctl: {message}", err=True)
    raise SystemExit(code)


as_json = click.option("--json", "plain", is_flag=True, help="The server's own JSON.")


def print_json(found: dict[str, Any]) -> None:
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


def print_line(found: dict[str, Any]) -> None:
    """One object a line, for programs that read as it comes."""
    click.echo(json.dumps(found, ensure_ascii=False))


def names_of(kind: str, key: str = "name") -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completes names that the server knows; none if it does not answer."""

    def complete(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        server = context.obj
        for outer in (context, context.parent, context.parent.parent if context.parent else None):
            server = server or (outer.params.get("server") if outer else None)
        try:
            with AdminClient(server or DEFAULT) as client:
                return [i[key] for i in client.get(kind)["items"] if i[key].startswith(typed)]
        except LlmgwError:
            return []

    return complete
