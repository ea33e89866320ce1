"""The control plane against a random world: whatever happens, nothing runs twice on a GPU, and in the end all is as wanted."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmgw.control.drain import abort, begin, uncordon
from llmgw.control.observed import Failure
from tests.control.world import Sim, agents, model

OOM = Failure(cause="cuda_oom", message="CUDA out of memory")
NODES = 5
node_names = st.sampled_from([f"n{i}" for i in range(NODES)])
model_names = st.sampled_from(["a", "b"])


class ControlPlane(RuleBasedStateMachine):
    """Every instant is checked by `Sim.check`; here what needs a history."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim(agents(NODES), [model("a", 2, min_available=1), model("b", 1)])
        self.sim.run(120)
        self.broken = False  # something other than a drain has happened lately: the floor may not hold

    @rule(steps=st.integers(1, 12))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.sim.tick()

    @rule(node=node_names)
    def agent_restarts(self, node: str) -> None:
        self.sim.agents[node].life += "'"

    @rule(node=node_names)
    def reboot(self, node: str) -> None:
        self.broken = True
        agent = self.sim.agents[node]
        agent.boot += "'"
        agent.engines.clear()

    @rule(node=node_names)
    def crash(self, node: str) -> None:
        self.broken = True
        for engine in self.sim.agents[node].engines.values():
            if engine.state in ("starting", "ready"):
                engine.state, engine.failure = "failed", OOM

    @rule(node=node_names)
    def partition(self, node: str) -> None:
        self.broken = True
        self.sim.agents[node].connected = not self.sim.agents[node].connected

    @rule()
    def server_restarts(self) -> None:
        self.sim.restart()

    @rule(name=model_names, replicas=st.integers(0, 3))
    def scale(self, name: str, replicas: int) -> None:
        self.broken = True
        self.sim.specs[name] = model(name, replicas, flags=self.sim.specs[name].flags, min_available=min(1, replicas))

    @rule(name=model_names)
    def edit(self, name: str) -> None:
        old = self.sim.specs[name]
        self.sim.specs[name] = model(name, old.replicas, flags=(*old.flags, "--x"), min_available=old.min_available)

    @rule(node=node_names, surge=st.booleans())
    def drain(self, node: str, surge: bool) -> None:
        self.sim.cluster = begin(self.sim.cluster, node, "alice", self.sim.wall, surge=surge)

    @rule(node=node_names)
    def open_again(self, node: str) -> None:
        self.sim.cluster = uncordon(abort(self.sim.cluster, node), node)

    @invariant()
    def drains_and_edits_alone_never_break_the_floor(self) -> None:
        if self.broken:
            return
        for name, spec in self.sim.specs.items():
            assert self.sim.states(name).count("ready") >= spec.min_available

    def teardown(self) -> None:
        """Heal everything: it must converge, and then stay."""
        sim = self.sim
        for name, agent in sim.agents.items():
            agent.connected = True
            sim.cluster = uncordon(abort(sim.cluster, name), name)
        sim.run(1900)  # an exclusion lasts half an hour
        want = sum(s.replicas for s in sim.specs.values())
        assert sim.states().count("ready") == min(want, NODES)
        standing = [r for r in sim.cluster.replicas.values() if not r.replaces]  # a full cluster has no room for copies
        assert [r.state for r in standing].count("pending") == max(0, want - NODES)
        assert sim.quiet()
        before = sim.cluster.replicas
        sim.run(60)
        assert {r.id: r.epoch for r in sim.cluster.replicas.values()} == {r.id: r.epoch for r in before.values()}


ControlPlane.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking a history of hours takes minutes
)
TestControlPlane = ControlPlane.TestCase
