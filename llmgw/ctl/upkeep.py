"""`llmgw ctl` about the server itself: its authority, copies of its store, completion of a shell.

`ca init` and `restore` work on the server's own files, on its machine and as its user; the server need not run for the
first, and must not for the second.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from llmgw.config import STATE
from llmgw.ctl.client import AdminClient
from llmgw.ctl.common import as_json, end, failing_well, print_json

a_state = click.option(
    "--state", default=STATE, show_default=True, metavar="DIR", help="The server's folder (`cluster.state`)."
)


@click.group()
def ca() -> None:
    """The certificate authority of the cluster."""


@ca.command("init")
@a_state
@click.option(
    "--root-key",
    metavar="FILE",
    help="Where the root's key goes; keep it away from this machine.  [default: root.key in DIR]",
)
@as_json
@failing_well
def init(state: str, root_key: str | None, plain: bool) -> None:
    """Make an authority. A server that runs opens its cluster port by itself within seconds. Replaces nothing."""
    from llmgw.pki.folder import init_authority

    folder = Path(state) / "identity"
    key = Path(root_key) if root_key else Path(state) / "root.key"
    made = init_authority(folder, key, time.time())
    if plain:
        print_json({"kind": "authority", "folder": str(folder), "root_key": str(key), "pin": made.pin.hex()})
        return
    click.echo(f"authority in {folder}, pin {made.pin.hex()}")
    click.echo(f"The root's key is in {key}: move it off this machine, it is needed once a year.", err=True)


@click.command()
@click.argument("file", metavar="FILE")
@as_json
@click.pass_obj
@failing_well
def backup(server: str, file: str, plain: bool) -> None:
    """Copy the server's store to FILE, while it runs. Replaces nothing. The identity folder is apart: copy it too."""
    size = 0
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as out, AdminClient(server) as client:
            for part in client.download("backup"):
                size += out.write(part)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        Path(file).unlink()
        raise
    if plain:
        print_json({"kind": "backup", "file": file, "bytes": size})
    else:
        click.echo(f"{file}: {size} bytes")


@click.command()
@click.argument("file", metavar="FILE")
@a_state
@click.option("--store", default="", metavar="PATH", help="The store, if not `store.db` in DIR (`store.path`).")
@as_json
@failing_well
def restore(file: str, state: str, store: str, plain: bool) -> None:
    """Put the copy FILE in the place of the store of a server that is stopped. The old one is kept beside it.

    Terms and epochs go on far above the old ones, so agents refuse whatever still runs on the old store.
    """
    from llmgw.stores.sqlite import restore as put_back

    path = Path(store) if store else Path(state) / "store.db"
    revision = put_back(Path(file), path)
    if plain:
        print_json({"kind": "restored", "store": str(path), "revision": revision})
    else:
        click.echo(f"{path} goes on from revision {revision}; start the server")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """What SHELL needs to complete commands and names: `eval "$(llmgw ctl completion bash)"`."""
    kind = get_completion_class(shell)
    root = context.find_root().command
    if kind is None:
        end(f"there is no completion for {shell}", 2)
    click.echo(kind(root, {}, "llmgw", "_LLMGW_COMPLETE").source())


COMMANDS = (ca, backup, restore, completion)
