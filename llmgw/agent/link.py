"""The way to the server: join once, say what is seen and hear what shall run, renew the certificate.

A server that cannot be reached changes nothing on the node: engines go on, and what is seen is told when it is back.
Several servers are tried in order; whoever answers last is asked first.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import msgspec
import trio

from llmgw import __version__
from llmgw.control.observed import Answer, LogLines, Observed, Sync, digest
from llmgw.errors import ConfigError, LlmgwError, Problem, Unavailable
from llmgw.net.client import Client
from llmgw.net.world import Tcp, World
from llmgw.pki.join import JoinFailed, join, member_context, renew, renewal
from llmgw.pki.names import valid_node_id
from llmgw.pki.tokens import parse_token
from llmgw.request import Target

JOIN_DEADLINE = 30.0  # seconds for both connections
SYNC_DEADLINE = 15.0
ANSWER_LIMIT = 8 << 20  # bytes; one replica is below 2 KiB
RETRY = (1.0, 15.0)  # seconds, drawn evenly: all agents of a server that comes back must not come at once
HEARTBEAT = (0.5, 60.0)  # bounds of what a server may ask for
SOONEST = 0.2  # seconds between two syncs, however much changes
RENEW_AGAIN = 600.0  # seconds after a renewal that failed
CLOCK_SAMPLES = 5  # of these the one with the shortest way counts


class Agent(Protocol):
    """The other end of the link, on the node."""

    @property
    def changed(self) -> trio.Event: ...

    def observe(self) -> Observed: ...

    @property
    def term(self) -> int: ...

    @property
    def refused(self) -> tuple[str, ...]: ...

    def logs(self, wanted: Mapping[str, int]) -> tuple[LogLines, ...]: ...

    def obey(self, answer: Answer) -> bool:
        """False: it came from a server that was replaced, and is refused."""
        ...

    def told(self, observed: Observed) -> None:
        """The server has heard of this."""
        ...

    def clock(self, offset: float) -> None:
        """This clock minus the server's."""
        ...


@attrs.define
class Link:
    """*folder*: identity of the node."""

    servers: Sequence[Tcp]
    folder: Path
    node: str
    boot_id: str
    world: World
    log: Callable[[str], None]
    start: str = attrs.field(factory=lambda: secrets.token_hex(8))  # names this life of the agent
    reached: bool = False
    last_answer: float | None = None
    _first: int = 0  # which server is asked first
    _clocks: deque[tuple[float, float]] = attrs.field(factory=lambda: deque(maxlen=CLOCK_SAMPLES))
    _renewed: bool = False
    _followed: dict[str, int] = attrs.field(factory=dict)

    @property
    def member(self) -> bool:
        return (self.folder / "node.pem").exists()

    async def become_member(self, token: str) -> None:
        """With the join token. Raises ConfigError, JoinFailed; waits for a server that cannot be reached."""
        if not valid_node_id(self.node):
            text = f"{self.node!r} cannot be a node's name (lower-case letters, digits, dots and dashes): give --node"
            raise ConfigError([Problem(text)])
        if not token:
            text = (
                "this node has not joined: give --join-token-file FILE (or - for standard input), or LLMGW_JOIN_TOKEN"
            )
            raise ConfigError([Problem(text)])
        parsed = parse_token(token)
        while True:
            for server in self.servers:
                try:
                    with trio.fail_after(JOIN_DEADLINE):
                        await join(self.world, server, parsed, self.node, self.folder, __version__)
                except (Unavailable, trio.TooSlowError) as error:
                    self.log(f"cannot join at {server}: {_why(error)}")
                    continue
                self.log(f"joined {server} as {self.node}")
                return
            await trio.sleep(self.world.rng.uniform(*RETRY))

    async def run(self, agent: Agent) -> None:
        """Syncs and renews until cancelled. Raises ConfigError if the identity cannot be used at all."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._renewing)
            nursery.start_soon(self._syncing, agent)

    # -- sync --------------------------------------------------------------------------------------------------------

    async def _syncing(self, agent: Agent) -> None:
        client, confirmed, pause = None, "", 0.0
        while True:
            if client is None or self._renewed:
                if client is not None:
                    client.close()
                self._renewed = False
                client = Client(self.world, tls=member_context(self.folder, self.world.wall()))
            changed = agent.changed
            try:
                answer = await self._sync(client, agent, confirmed)
            except LlmgwError as error:
                if self.reached:
                    self.log(f"no server can be reached, engines go on: {error}")
                self.reached, confirmed = False, ""
                pause = self.world.rng.uniform(*RETRY)
            else:
                if not self.reached:
                    self.log("a server is reached")
                self.reached, self.last_answer = True, trio.current_time()
                confirmed = answer.digest
                low, high = HEARTBEAT
                pause = low if answer.logs else min(max(answer.heartbeat, low), high)
            await trio.sleep(SOONEST)
            if self.reached:
                with trio.move_on_after(pause):
                    await changed.wait()
            else:
                await trio.sleep(pause)

    async def _sync(self, client: Client, agent: Agent, confirmed: str) -> Answer:
        """One exchange with the first server that answers; two where it wants the body."""
        observed = agent.observe()
        name = digest(observed)
        answer = await self._post(client, agent, name, None if name == confirmed else observed)
        if answer.digest != name:
            answer = await self._post(client, agent, name, observed)
        if not agent.obey(answer):
            raise Unavailable(
                f"the server speaks for term {answer.term}, and a later one has been heard: it was replaced"
            )
        if answer.digest == name:
            agent.told(observed)
        return answer

    async def _post(self, client: Client, agent: Agent, name: str, observed: Observed | None) -> Answer:
        failed: LlmgwError = Unavailable("there is no server")
        for turn in range(len(self.servers)):
            index = (self._first + turn) % len(self.servers)
            server, sent = self.servers[index], self.world.wall()
            sync = Sync(
                node=self.node, boot=self.boot_id, agent=self.start, term=agent.term, digest=name, observed=observed,
                refused=agent.refused, sent=sent, logs=agent.logs(self._followed),
            )  # fmt: skip
            target = Target(endpoint="", name=f"server {server}", address=str(server), host=str(server), tls=True)
            try:
                with trio.fail_after(SYNC_DEADLINE):
                    reply = await client.request(
                        target,
                        "POST",
                        "/agent/v1/sync",
                        headers=[("content-type", "application/json")],
                        body=msgspec.json.encode(sync),
                        limit=ANSWER_LIMIT,
                    )
                if reply.status != 200:
                    raise Unavailable(
                        f"server {server} answers {reply.status}: {reply.body[:200].decode(errors='replace')}"
                    )
                answer = msgspec.json.decode(reply.body, type=Answer)
            except trio.TooSlowError:
                failed = Unavailable(f"server {server} does not answer in {SYNC_DEADLINE:g} s")
            except msgspec.MsgspecError as error:
                failed = Unavailable(f"server {server} says what this agent does not understand: {error}")
            except Unavailable as error:
                failed = error
            else:
                self._first, self._followed = index, answer.logs
                self._compare(agent, sent, answer)
                return answer
        raise failed

    def _compare(self, agent: Agent, sent: float, answer: Answer) -> None:
        """Half of the way there and back; of the last few the shortest is the best measured."""
        if not answer.received or not answer.sent:
            return
        now = self.world.wall()
        way = (now - sent) - (answer.sent - answer.received)
        self._clocks.append((way, ((sent - answer.received) + (now - answer.sent)) / 2))
        agent.clock(min(self._clocks)[1])

    # -- renewal -----------------------------------------------------------------------------------------------------

    async def _renewing(self) -> None:
        due = renewal(self.folder, self.world.rng)
        while True:
            left = due - self.world.wall()
            if left > 0:
                await trio.sleep(min(left, RENEW_AGAIN))  # wall time can jump: looked at anew
            elif await self._renew():
                self._renewed = True
                self.log("certificate renewed")
                due = renewal(self.folder, self.world.rng)
            else:
                await trio.sleep(RENEW_AGAIN)

    async def _renew(self) -> bool:
        for server in self.servers:
            try:
                with trio.fail_after(JOIN_DEADLINE):
                    await renew(self.world, server, self.folder)
            except (Unavailable, JoinFailed, trio.TooSlowError) as error:
                self.log(f"the node's certificate could not be renewed at {server}: {_why(error)}")
                continue
            return True
        return False


def _why(error: Exception) -> str:
    return "no answer in time" if isinstance(error, trio.TooSlowError) else str(error)
