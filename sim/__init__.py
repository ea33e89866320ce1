"""Rehearse a cluster in virtual time: simulated engines, the real gateway, clients, faults, and what came of it.

Two levels share engines (`llmgw.simengine.core`), workloads (`sim.load`), faults (`sim.scenario`) and reports:

``decisions``  no sockets, no bytes: the engine cores and a function that chooses. A day of traffic takes seconds, so ladders
               and sweeps of routing and admission run here.
``http``       everything real but the clock: clients speak HTTP to the real `llmgw server`, which speaks HTTP to simulated
               engines, over AF_UNIX, in one process.

The decisions level, in full:

    from sim import EngineSpec, Load, rehearse

    engines = [EngineSpec(f"e{i}", Options(hardware="h100-8b")) for i in range(4)]
    load = Load(kind="poisson", rate=20.0, duration=60.0, prompt_tokens=500, output_tokens=200)

    def shortest(snapshot: Snapshot, request: InferenceRequest) -> str | Refusal | None:
        return min(zip(snapshot.views, snapshot.endpoints), key=lambda pair: pair[0].inflight)[1].id

    result = rehearse(engines, load.sessions(seed=1), shortest)
    print(result.summary()["ttft_p99"])

- A *policy* is called when a request arrives: it returns an endpoint's id, a `Refusal`, or None: ask again when
  something has been settled or reported (that is how an admission queue is put in: keep the request, answer None).
- A policy that is an object with methods ``sent first progress settled reported`` (any of them, see `decisions.Watcher`)
  is told what happens, at the virtual time that it happens, so it can keep a ledger and an index of its own. With a method
  ``release`` it says itself which of those that wait go next.
- `Snapshot` is what the harness itself knows: in-flight requests and tokens of each engine, and its last report.
- Same arguments, same result, to the last digit.
"""

from __future__ import annotations

from .decisions import EngineSpec, Policy, Watcher, rehearse
from .load import Load, Session, Turn
from .records import Record, Result

__all__ = ["EngineSpec", "Load", "Policy", "Record", "Result", "Session", "Turn", "Watcher", "rehearse"]
