"""The rows of preflight: what each proves, how bad a failure is, and what to do. The table in docs/node-onboarding.md
is made from here (`python -m llmgw.agent.reference`).

A node's state is the worst of its rows of scope `node`. A row of another scope (`gpu:UUID`, `engine:KIND`,
`weights:REF`, `fabric:DEVICE/PORT`) keeps only that GPU, engine, model or port from being used.
"""

from __future__ import annotations

import attrs

from llmgw.placement.inventory import Check, CheckLevel


@attrs.frozen
class Row:
    id: str
    scope: str  # node, gpu, engine, weights, fabric, replica
    level: CheckLevel
    proves: str
    remedy: str
    ttl: float = 900.0  # seconds that the result may be relied on


ROWS: tuple[Row, ...] = (
    Row("DRV-1", "node", "block", "NVML answers wherever PCI shows an NVIDIA GPU.", "Install the NVIDIA driver, or load it (`modprobe nvidia`); start a container with GPU access."),
    Row("DRV-2", "node", "block", "The loaded kernel module and the driver's libraries have the same version.", "Reboot, or unload and load the nvidia modules (an upgrade replaced the libraries only)."),
    Row("DRV-3", "node", "degrade", "NVML answers for as many GPUs as PCI shows.", "Look for Xid lines in `dmesg`; reseat or replace the card, reboot."),
    Row("GPU-1", "gpu", "block", "The GPU has no error that keeps it from computing (Xid, row remapping, recovery action, compute mode).", "As the message says: reset the GPU, reboot the node, or `nvidia-smi -c DEFAULT`."),
    Row("GPU-2", "gpu", "degrade", "PCIe at full width, no lasting hardware slowdown, no uncorrected ECC errors.", "Reseat the card; check cooling and power; plan a reset."),
    Row("GPU-3", "gpu", "block", "A program can open the GPU, allocate 64 MiB, write them and wait for the result (CUDA probe).", "By CUDA's number: 802 start `nvidia-fabricmanager` in the driver's version; 803 reboot; 804 remove cuda-compat; 999 `modprobe nvidia_uvm`.", 600.0),
    Row("GPU-4", "gpu", "degrade", "No process that llmgw did not start holds the GPU's memory.", "End that process, or keep the GPU out of llmgw's hands."),
    Row("GPU-5", "gpu", "block", "MIG is off, or has instances and no pending change.", "`nvidia-smi mig -cgi PROFILE -C`, or `nvidia-smi -mig 0` and a reset."),
    Row("GPU-6", "node", "degrade", "On NVSwitch machines the fabric manager has finished its work.", "`systemctl enable --now nvidia-fabricmanager`, in exactly the driver's version."),
    Row("CUDA-1", "engine", "block", "The driver is new enough for the CUDA that the engine was built for.", "Upgrade the driver (CUDA 13: 580, CUDA 12: 525), or install an engine built for an older CUDA."),
    Row("CUDA-2", "engine", "degrade", "The engine has code for the compute capability of every GPU here.", "Install a build whose architecture list has this GPU."),
    Row("ENG-1", "engine", "block", "The engine's program exists, is executable and of this machine's architecture.", "Correct `engines` in the agent's settings, or install the engine."),
    Row("ENG-2", "engine", "block", "The engine's program really starts.", "Install what the message names (`apt install libgomp1`), or the engine anew."),
    Row("ENG-3", "engine", "block", "No shared library is missing, and a GPU build sees the GPU (else it would run on the CPU without a word).", "Install the library that the message names; CUDA libraries come with the engine's CUDA runtime."),
    Row("WGT-1", "weights", "block", "The weights are there and readable by the engines' user.", "Put them into a folder of `weights`; `chmod`/`chown`; fetch again what a link points to."),
    Row("WGT-2", "weights", "block", "Every shard that the index names is there, and sizes add up.", "Fetch the missing files."),
    Row("WGT-3", "weights", "block", "Every safetensors file is whole (and not a git-lfs pointer).", "Fetch the file again (`git lfs pull`)."),
    Row("WGT-4", "weights", "block", "Every GGUF file is whole, and all its parts are there.", "Fetch the file again."),
    Row("WGT-5", "weights", "block", "Files have the checksums that their names or SHA256SUMS say; nothing is half downloaded.", "Fetch the file again; delete `*.incomplete`."),
    Row("WGT-6", "weights", "block", "config.json can be read, and a tokenizer is there.", "Fetch the small files too, not only the weights."),
    Row("NET-1", "replica", "block", "Every port of the replica's block is free.", "End what listens there, or move `ports` in the agent's settings."),
    Row("NET-2", "node", "degrade", "The node's name and address lead to it from outside.", "Set `address` in the agent's settings; take the host's name off 127.0.1.1 in /etc/hosts."),
    Row("NET-3", "node", "degrade", "The kernel does not give out ports of the engines' span by itself.", "Move `ports` below 32768, or add the span to net.ipv4.ip_local_reserved_ports."),
    Row("DSK-1", "node", "degrade", "Every folder for weights exists, is writable and has 5 GiB free.", "Make it, mount it read-write, or free space."),
    Row("CPU-1", "node", "degrade", "The CPU has AVX2, FMA and F16C (x86-64-v3).", "Virtual machine: set the CPU type to `host` (Proxmox: `qm set ID --cpu host`, then power-cycle)."),
    Row("CPU-2", "node", "degrade", "At least two cores a GPU.", "Raise the container's or the machine's CPU limit."),
    Row("MEM-1", "replica", "block", "Host memory suffices to load the weights.", "Stop something else, or give the machine more memory."),
    Row("LIM-1", "fabric", "block", "Engines may lock memory for RDMA.", "`LimitMEMLOCK=infinity` in the agent's unit (docker: `--ulimit memlock=-1`)."),
    Row("LIM-2", "node", "degrade", "/dev/shm has 1 GiB, which tensor parallel engines need.", "docker: `--shm-size 10g` or `--ipc=host`; else remount /dev/shm larger."),
    Row("LIM-3", "node", "degrade", "Engines may open 65,536 files.", "`LimitNOFILE=1048576` in the agent's unit."),
    Row("IB-1", "fabric", "block", "The RDMA port is active at full rate.", "As the message says: cable, switch port, subnet manager, address."),
    Row("IB-2", "fabric", "degrade", "It is known which fabric the port is on.", "Name it under `fabrics` in the agent's settings, or set a distinct subnet_prefix in opensm.conf."),
    Row("IB-3", "fabric", "block", "The engines' user may open the RDMA device.", "Read and write access to /dev/infiniband/uverbs* (group rdma; docker: `--device /dev/infiniband`)."),
    Row("IB-4", "node", "degrade", "GPUs and adapters can reach each other directly (GPUDirect).", "`modprobe nvidia_peermem`, or the open kernel module with dma-buf."),
    Row("CLK-1", "node", "degrade", "The clock is within 2 s of the server's.", "`systemctl enable --now chrony` (or systemd-timesyncd)."),
)  # fmt: skip

BY_ID = {row.id: row for row in ROWS}


def result(
    row: str, scope: str, problem: str = "", *, at: float, fix: str = "", level: CheckLevel | None = None,
    took: float = 0.0, skipped: bool = False, evidence: dict[str, str] | None = None,
) -> Check:  # fmt: skip
    """The row's outcome; *problem* "" = ok. *fix* where it can be said better than the table does."""
    spec = BY_ID[row]
    return Check(
        id=row,
        scope=scope,
        level=level or spec.level,
        ok=not problem or skipped,
        message=problem,
        fix="" if not problem or skipped else fix or spec.remedy,
        evidence=evidence or {},
        at=at,
        took=took,
        ttl=spec.ttl,
        skipped=skipped,
    )


def reference() -> str:
    """The table of docs/node-onboarding.md."""
    lines = ["| row | concerns | if it fails | it proves | what to do |", "|---|---|---|---|---|"]
    effect = {"block": "keeps it from serving", "degrade": "serves, with a warning", "info": "told only"}
    lines += [f"| {r.id} | {r.scope} | {effect[r.level]} | {r.proves} | {r.remedy} |" for r in ROWS]
    return "\n".join(lines) + "\n"
