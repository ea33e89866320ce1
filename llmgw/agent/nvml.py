"""NVIDIA GPUs by NVML, in a process of its own: `python -m llmgw.agent.nvml`.

NVML is the driver's ioctls; with a dying GPU a call can block for ever, and then only the process that made it is lost.
The protocol: a line on stdin asks, one line of JSON (`Report`) on stdout answers. End of file ends the helper. Xid
events are collected in between. `llmgw.agent.gpus` is the other end; it gives the helper a deadline and replaces it.

What a GPU does not have (`NotSupported`), or the driver does not know yet (`FunctionNotFound`), is None, not an error.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any, Literal

import msgspec

EVENT_TICK = 1.0  # seconds between two looks for Xid events
EVENTS_KEPT = 64  # between two questions; an Xid storm repeats itself


class Link(msgspec.Struct, frozen=True, gc=False):
    """One active NVLink."""

    kind: Literal["gpu", "switch", "other"]
    bdf: str = ""  # of the other end


class Mig(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A MIG instance."""

    uuid: str
    name: str  # "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    memory: int
    memory_free: int | None = None


class Holder(msgspec.Struct, frozen=True, gc=False):
    """A process with memory on a GPU; the pid is the host's."""

    pid: int
    memory: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says of one GPU. *errors*: call → NVML's number, for what failed other than for being absent."""

    index: int
    uuid: str = ""
    name: str = ""
    memory: int | None = None
    memory_free: int | None = None
    capability: tuple[int, int] | None = None
    bdf: str = ""  # as sysfs spells it
    numa: int | None = None
    minor: int | None = None
    serial: str = ""
    mig_current: int | None = None
    mig_pending: int | None = None
    migs: tuple[Mig, ...] = ()
    ecc_uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: int | None = None  # field 230
    fabric_state: int | None = None
    fabric_status: int | None = None
    fabric_cluster: str = ""
    fabric_clique: int | None = None
    temperature: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    clock_reasons: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    utilisation: int | None = None
    compute_mode: int | None = None
    links: tuple[Link, ...] = ()
    holders: tuple[Holder, ...] = ()
    errors: dict[str, int] = {}


class Pair(msgspec.Struct, frozen=True, gc=False):
    """How two GPUs (by index) reach each other: PCIe level (10 one switch … 50 across sockets) and NVLink peer access."""

    a: int
    b: int
    level: int | None = None
    nvlink: bool | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An Xid, at wall clock time."""

    uuid: str
    xid: int
    at: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. *code* is NVML's error number of the initialisation, 0 = it worked."""

    code: int = 0
    error: str = ""
    library: str = ""  # real path of the loaded library
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    events: tuple[Event, ...] = ()


QUIET = frozenset({2, 3, 6, 13})
"""InvalidArgument, NotSupported, NotFound, FunctionNotFound: this GPU or driver does not have it."""


def text(value: Any) -> str:
    """Old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def sysfs_bdf(bus_id: str) -> str:
    """NVML's `00000000:17:00.0` → `0000:17:00.0`; domains above 0xffff keep their digits."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return bus_id.lower()


class Reader:
    """NVML, initialised. Raises `pynvml.NVMLError` from the constructor."""

    def __init__(self) -> None:
        import pynvml

        self.nv = pynvml
        pynvml.nvmlInit()
        self.events_set: Any = None
        self.watched: set[str] = set()
        self.events: list[Event] = []
        self._subscribe()

    def ask(self, errors: dict[str, int], call: str, *args: Any) -> Any:
        """The answer of `nvmlDevice…`, without its prefix ``nvml``; None if there is none."""
        try:
            return getattr(self.nv, "nvml" + call)(*args)
        except self.nv.NVMLError as error:
            if error.value not in QUIET:
                errors[call] = int(error.value)
        except (AttributeError, TypeError, UnicodeDecodeError):  # a binding without it, or with another signature
            pass
        return None

    def _subscribe(self) -> None:
        nv = self.nv
        try:
            self.events_set = nv.nvmlEventSetCreate()
        except nv.NVMLError:
            return
        for index in range(self.ask({}, "DeviceGetCount") or 0):
            handle = self.ask({}, "DeviceGetHandleByIndex", index)
            uuid = self.ask({}, "DeviceGetUUID", handle) if handle is not None else None
            if uuid is None:
                continue
            supported = self.ask({}, "DeviceGetSupportedEventTypes", handle) or 0
            mask = supported & (8 | 2 | 0x4000 | 0x8000)  # critical Xid, double-bit ECC, unavailable, recovery action
            failed: dict[str, int] = {}
            self.ask(failed, "DeviceRegisterEvents", handle, mask, self.events_set)
            if mask and not failed:
                self.watched.add(text(uuid))

    def drain_events(self) -> None:
        """Takes over the events that have come, without waiting for more."""
        nv = self.nv
        while self.events_set is not None and self.watched:
            try:
                data = nv.nvmlEventSetWait_v2(self.events_set, 0)
            except nv.NVMLError:  # a timeout (10) is "nothing came"
                return
            if data.eventType == 8 and len(self.events) < EVENTS_KEPT:
                uuid = self.ask({}, "DeviceGetUUID", data.device)
                self.events.append(Event(uuid=text(uuid or ""), xid=int(data.eventData), at=time.time()))

    def report(self) -> Report:
        errors: dict[str, int] = {}
        self.drain_events()
        driver = self.ask(errors, "SystemGetDriverVersion")
        cuda = self.ask(errors, "SystemGetCudaDriverVersion_v2") or self.ask(errors, "SystemGetCudaDriverVersion")
        count = self.ask(errors, "DeviceGetCount")
        gpus, handles = [], []
        for index in range(count or 0):
            failed: dict[str, int] = {}
            handle = self.ask(failed, "DeviceGetHandleByIndex", index)
            if handle is None:
                gpus.append(Gpu(index=index, errors=failed))
                continue
            gpus.append(self._gpu(index, handle))
            handles.append((index, handle))
        pairs = [
            Pair(
                a,
                b,
                self.ask({}, "DeviceGetTopologyCommonAncestor", ha, hb),
                None if (p2p := self.ask({}, "DeviceGetP2PStatus", ha, hb, 2)) is None else p2p == 0,
            )
            for n, (a, ha) in enumerate(handles)
            for b, hb in handles[n + 1 :]
        ]
        events, self.events = tuple(self.events), []
        return Report(
            code=errors.get("DeviceGetCount", 0),
            error="" if count is not None else "the GPUs cannot be counted",
            library=loaded_library(),
            driver=text(driver or ""),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            gpus=tuple(gpus),
            pairs=tuple(pairs),
            events=events,
        )

    def _gpu(self, index: int, handle: Any) -> Gpu:
        errors: dict[str, int] = {}

        def ask(call: str, *args: Any) -> Any:
            return self.ask(errors, call, handle, *args)

        memory = ask("DeviceGetMemoryInfo")
        mig = ask("DeviceGetMigMode")
        rows = ask("DeviceGetRemappedRows")
        pci = ask("DeviceGetPciInfo")
        power = ask("DeviceGetPowerUsage")
        fabric = self._fabric(handle)
        usage = ask("DeviceGetUtilizationRates")
        reasons = ask("DeviceGetCurrentClocksEventReasons")  # its name before driver 535: …ThrottleReasons
        if reasons is None:
            reasons = ask("DeviceGetCurrentClocksThrottleReasons")
        capability = ask("DeviceGetCudaComputeCapability")
        numa = ask("DeviceGetNumaNodeId")
        return Gpu(
            index=index,
            uuid=text(ask("DeviceGetUUID") or ""),
            name=text(ask("DeviceGetName") or ""),
            memory=None if memory is None else int(memory.total),
            memory_free=None if memory is None else int(memory.free),
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            bdf="" if pci is None else sysfs_bdf(text(pci.busId)),
            numa=numa,
            minor=ask("DeviceGetMinorNumber"),
            serial=text(ask("DeviceGetSerial") or ""),
            mig_current=None if mig is None else int(mig[0]),
            mig_pending=None if mig is None else int(mig[1]),
            migs=self._migs(handle) if mig is not None and mig[0] else (),
            ecc_uncorrected=ask("DeviceGetTotalEccErrors", 1, 0),
            remap_pending=bool(rows and rows[2]),
            remap_failed=bool(rows and rows[3]),
            recovery=self._recovery(handle),
            fabric_state=None if fabric is None else int(fabric.state),
            fabric_status=None if fabric is None else int(fabric.status),
            fabric_cluster="" if fabric is None else bytes(fabric.clusterUuid).hex(),
            fabric_clique=None if fabric is None else int(fabric.cliqueId),
            temperature=ask("DeviceGetTemperature", 0),
            power_mw=power,
            power_limit_mw=ask("DeviceGetEnforcedPowerLimit"),
            clock_reasons=reasons,
            pcie_width=ask("DeviceGetCurrPcieLinkWidth"),
            pcie_width_max=ask("DeviceGetMaxPcieLinkWidth"),
            utilisation=None if usage is None else int(usage.gpu),
            compute_mode=ask("DeviceGetComputeMode"),
            links=self._links(handle),
            holders=tuple(
                Holder(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory))
                for p in ask("DeviceGetComputeRunningProcesses") or []
            ),
            errors=errors,
        )

    def _migs(self, handle: Any) -> tuple[Mig, ...]:
        found = []
        for index in range(self.ask({}, "DeviceGetMaxMigDeviceCount", handle) or 0):
            part = self.ask({}, "DeviceGetMigDeviceHandleByIndex", handle, index)
            if part is None:
                continue
            memory = self.ask({}, "DeviceGetMemoryInfo", part)
            uuid, name = self.ask({}, "DeviceGetUUID", part), self.ask({}, "DeviceGetName", part)
            total, free = (0, None) if memory is None else (int(memory.total), int(memory.free))
            found.append(Mig(uuid=text(uuid or ""), name=text(name or ""), memory=total, memory_free=free))
        return tuple(found)

    def _links(self, handle: Any) -> tuple[Link, ...]:
        nv, found = self.nv, []
        for number in range(36):
            try:
                if not nv.nvmlDeviceGetNvLinkState(handle, number):
                    continue
            except nv.NVMLError:  # beyond the last link
                break
            kind = self.ask({}, "DeviceGetNvLinkRemoteDeviceType", handle, number)
            pci = self.ask({}, "DeviceGetNvLinkRemotePciInfo", handle, number)
            found.append(
                Link(
                    "gpu" if kind == 0 else "switch" if kind == 2 else "other",
                    "" if pci is None else sysfs_bdf(text(pci.busId)),
                )
            )
        return tuple(found)

    def _recovery(self, handle: Any) -> int | None:
        """Field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, …; no function of its own."""
        values = self.ask({}, "DeviceGetFieldValues", handle, [230])
        if not values or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _fabric(self, handle: Any) -> Any:
        nv = self.nv
        for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
            if not hasattr(nv, name):
                continue
            info = getattr(nv, name)()
            try:
                nv.nvmlDeviceGetGpuFabricInfoV(handle, nv.byref(info))
            except nv.NVMLError as error:
                if error.value == 25:  # the driver knows only an older form
                    continue
                return None
            except AttributeError:
                return None
            return info
        return None


def loaded_library() -> str:
    """The real path of the NVML that this process has loaded; a stand-in cannot hide."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "libnvidia-ml.so" in line:
                    return os.path.realpath(line.split(maxsplit=5)[5].strip())
    except OSError:
        pass
    return ""


def main() -> None:
    """Answers until stdin ends."""
    encoder = msgspec.json.Encoder()
    reader: Reader | None = None
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], EVENT_TICK)
        if not ready:
            if reader is not None:
                reader.drain_events()
            continue
        if not os.read(sys.stdin.fileno(), 64):
            return
        failure = Report()
        if reader is None:  # also after a failure: the driver may have been loaded meanwhile
            reader, failure = start()
        answer = failure if reader is None else reader.report()
        sys.stdout.buffer.write(encoder.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def start() -> tuple[Reader | None, Report]:
    """NVML, or why it does not start."""
    import pynvml

    try:
        return Reader(), Report()
    except pynvml.NVMLError as error:
        return None, Report(code=int(error.value), error=text(error), library=loaded_library())


if __name__ == "__main__":
    main()
