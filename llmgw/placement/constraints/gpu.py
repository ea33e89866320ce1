"""What kind of GPU: type, capability, driver, partitioning, all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.demand import GGUF_ENGINES, SIM
from llmgw.placement.inventory import type_tokens
from llmgw.placement.rules import NO_HALF, capability, driver_branch, driver_floor, runs_on
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed
from llmgw.placement.world import World

ON_CPU = Verdict(True, (), "runs without a GPU")


class GpuConstraint:
    """GPUs are of a wanted type, able to run the data type and the engine's build, whole or partitioned as asked."""

    api = 1
    name: ClassVar[str] = "gpu"
    column: ClassVar[int] = 2
    groups: ClassVar[bool] = False
    codes: ClassVar[tuple[Code, ...]] = (
        Code("gpu.none", "The node shows no GPU.", "If it has some, `llmgw ctl nodes NODE` says why they cannot be read."),
        Code("gpu.type", "No GPU of the node is of a type that the shape names.", "Add the type to the shape's `gpus`."),
        Code("gpu.capability", "The GPU is too old for the data type, the quantisation or the engine's build.",
             "Use another `dtype` or quantisation, another build of the engine, or newer GPUs."),
        Code("gpu.driver", "The driver is too old for the CUDA that the engine was built for.",
             "Upgrade the driver, or install a build for an older CUDA."),
        Code("gpu.mig", "The GPU is a partition, and the shape does not ask for that profile (or wants several).",
             "Name the profile in the shape (`H100 1g.10gb`), or take the partitions away."),
        Code("gpu.mixed", "There are enough GPUs of the wanted types, but not of one type.",
             "A replica's GPUs must be alike: use a smaller shape, or other nodes."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        seen: dict[tuple[object, ...], Verdict] = {}
        asks: dict[int, tuple[str, int]] = {}  # by shape: the engine, GPUs on a node
        found = []
        for candidate in candidates:
            if candidate.shape.cpu:
                found.append(ON_CPU)
                continue
            index, pick, place = candidate.index, candidate.pick, candidate.place
            if index not in asks:
                asks[index] = (candidate.demand.engine_of(candidate.shape), candidate.shape.share)
            engine, share = asks[index]
            several = len(place.isles) > 1
            mixed = several and not pick.complete and pick.total >= share
            key = (
                index, pick.kind, pick.rank, place.inventory.driver, place.inventory.gpu_problem,
                place.engines.get(engine), place.name if mixed or (several and pick.rank is None) else "",
            )  # fmt: skip
            verdict = seen.get(key)
            if verdict is None:
                findings = self._findings(world, candidate, mixed)
                verdict = seen[key] = failed(*findings) if findings else OK
            found.append(verdict)
        return found

    def _findings(self, world: World, candidate: Candidate, mixed: bool) -> list[Finding]:
        place, pick, shape, demand = candidate.place, candidate.pick, candidate.shape, candidate.demand
        if pick.kind is None:
            return [Finding(code="gpu.none", text=place.inventory.gpu_problem)]
        name, _, cc, mig = pick.kind
        found = []
        if pick.rank is None:
            has = ", ".join(sorted({k[0] for k in place.isles}))
            found.append(Finding(code="gpu.type", text=f"want {' or '.join(shape.gpus)}, has {has}"))
        if mixed:
            most = max(
                sum(len(i.devices) for i in isles)
                for kind, isles in place.isles.items()
                if world.type_rank(shape.gpus, kind) is not None
            )
            if most < shape.share:
                text = f"{pick.total} GPUs of wanted types, at most {most} alike"
                found.append(Finding(code="gpu.mixed", text=text, need=shape.share, have=most, unit="GPUs"))
        if mig and (shape.share > 1 or not any(type_tokens(mig) <= type_tokens(w) for w in shape.gpus)):
            found.append(Finding(code="gpu.mig", text=f"{mig} of {name}"))
        engine = demand.engine_of(shape)
        install = place.engines.get(engine)
        if cc is not None and engine not in GGUF_ENGINES and engine != SIM:
            geometry = world.sizing(demand, shape, name).geometry
            dtype = demand.dtype_of(shape) or (geometry.dtype if geometry else "")
            quant = demand.quantisation_of(shape) or (geometry.quantisation if geometry else "")
            least, asker = capability(dtype, quant)
            if cc[0] * 10 + cc[1] < least:
                half = asker == "bfloat16" and not (geometry and geometry.architecture.lower().startswith(NO_HALF))
                text = f"{asker} needs capability {least / 10}, {name} has {cc[0]}.{cc[1]}"
                found.append(Finding(code="gpu.capability", text=text + ("; dtype float16 would do" if half else "")))
        if install is not None:
            if cc is not None and not runs_on(install.gpu_arches, cc):
                text = (
                    f"{engine} {install.version} has code for {' '.join(install.gpu_arches)}, {name} is {cc[0]}.{cc[1]}"
                )
                found.append(Finding(code="gpu.capability", text=text))
            floor, driver = driver_floor(install.cuda), place.inventory.driver
            if driver and driver_branch(driver) < floor:
                text = f"{engine} {install.version} was built for CUDA {install.cuda}: needs driver >= {floor}, has {driver}"
                found.append(Finding(code="gpu.driver", text=text))
        return found
