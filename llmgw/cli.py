"""The `llmgw` command: four subcommands, flags, exit codes. Composes the shells; one `trio.run` each.

Exit codes: 0 done · 1 failed (the message says what) · 2 what the operator wrote cannot be used (all problems listed).
`llmgw ctl` adds 3: what was named does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from llmgw import __version__
from llmgw.agent.options import agent_options
from llmgw.ctl.commands import ctl
from llmgw.errors import ConfigError, LlmgwError
from llmgw.server.options import server_options
from llmgw.simengine.options import flags as engine_options

if TYPE_CHECKING:
    from llmgw.config import Server
    from llmgw.net.world import World

P = ParamSpec("P")

DEMO_MODEL = "demo"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """LLM gateway and control plane for people who own their GPU servers."""


def exits(function: Callable[P, int | None]) -> Callable[P, None]:
    """What a subcommand returns is its exit code; what it raises on purpose is a message and 1 or 2."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except (LlmgwError, OSError, BaseExceptionGroup) as error:
            found = list(_leaves(error))
            wrong = [e for e in found if isinstance(e, ConfigError)]
            if not wrong and not all(isinstance(e, LlmgwError | OSError) for e in found):
                raise
            for each in wrong or found:
                click.echo(str(each), err=True)
            raise SystemExit(2 if wrong else 1) from None
        raise SystemExit(code or 0)

    return run


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@main.command()
@server_options
@click.option("--demo", is_flag=True, help="With two simulated engines in the same process: something to try at once.")
@click.option("--print-config", is_flag=True, help="Print the configuration that is in force, and leave.")
@exits
def server(demo: bool, print_config: bool, **flags: Any) -> None:
    """The gateway: client port, admin port. SIGTERM drains it, a second one ends it at once."""
    import trio

    from llmgw import config
    from llmgw.net.world import RealWorld
    from llmgw.server.gateway import serve
    from llmgw.server.options import configuration

    made = configuration(**flags)
    if print_config:
        click.echo(config.dump(made), nl=False)
    elif demo:
        trio.run(_demo, made, RealWorld())
    else:
        trio.run(partial(serve, made, RealWorld(), reread=partial(configuration, **flags)))


async def _demo(made: Server, world: World) -> None:
    """The server in front of two engines that need no GPU."""
    import trio

    from llmgw import config
    from llmgw.server.gateway import serve
    from llmgw.simengine.options import Options
    from llmgw.simengine.server import serve as serve_engine

    async with trio.open_nursery() as engines:
        flags = []
        for number in (1, 2):
            options = Options(listen=("127.0.0.1:0",), model=DEMO_MODEL, decode_tps=30.0, seed=number)
            (address,) = await engines.start(serve_engine, options, world)
            flags.append(f"sim-{number}=http://{address}={DEMO_MODEL},engine=sim")
        async with trio.open_nursery() as nursery:
            gateway = await nursery.start(serve, config.with_flags(made, endpoints=flags), world)
            with trio.move_on_after(5):  # simulated engines can serve at once
                await gateway.wait_serving()
            click.echo(_invitation(gateway.addresses[0]))
        engines.cancel_scope.cancel("the server has ended")


def _invitation(address: str) -> str:
    if address.startswith("unix:"):
        where = f"--unix-socket {address[5:]} http://localhost"
    else:
        host, _, port = address.rpartition(":")
        where = f"http://{host if host not in ('', '0.0.0.0', '[::]') else '127.0.0.1'}:{port}"
    body = f'{{"model": "{DEMO_MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        "\nThe gateway serves two simulated engines. In another terminal:\n\n"
        f"curl -N {where}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
    )


@main.command()
@agent_options
@exits
def agent(**flags: Any) -> int:
    """On every GPU node: discovers hardware, proves that it can serve, starts and watches engines."""
    from llmgw.agent.options import run

    return run(**flags)


@main.command("sim-engine")
@engine_options
@exits
def sim_engine(**flags: Any) -> None:
    """An inference engine without a GPU: batching, KV blocks, prefix cache, latency."""
    import trio

    from llmgw.net.world import RealWorld
    from llmgw.simengine.options import from_flags
    from llmgw.simengine.server import serve

    options = from_flags(flags)
    clock = None
    if options.speed != 1.0:
        import trio.testing

        clock = trio.testing.MockClock(rate=options.speed)
    trio.run(_until_signalled, partial(serve, options, RealWorld()), clock=clock)


async def _until_signalled(service: Callable[..., Any]) -> None:
    """Run *service*; SIGTERM and SIGINT end it, with exit code 0. Says where it listens."""
    import signal

    import trio

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            addresses: list[str] = await nursery.start(service)
            click.echo(f"listening on {', '.join(addresses)}")
            async for _ in signals:
                nursery.cancel_scope.cancel("signalled")
                break


main.add_command(ctl)
