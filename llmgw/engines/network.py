"""The environment that pins a group's ranks to the fabric that was chosen for it: the same on every rank, only the
device names may differ. `NCCL_NET` forbids the silent fall-back to sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["ib", "roce", "nvlink", "ethernet"]


def fabric_env(kind: Kind, hcas: Sequence[str], interface: str, address: str) -> dict[str, str]:
    """*hcas*: this node's ports on the fabric, ``mlx5_0:1``. *interface*, *address*: where ranks meet."""
    env = {
        "NCCL_IGNORE_NET_MISMATCH": "0",  # another number of adapters on a peer is an error, not to be hidden
        "NCCL_MNNVL_ENABLE": "1" if kind == "nvlink" else "0",
    }
    if interface:
        env |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    if kind == "ethernet":
        return env | {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": interface}
    if hcas:
        # "=": without it a name is a prefix, and mlx5_1 takes mlx5_10 too
        env |= {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=" + ",".join(hcas)}
        env |= {"UCX_NET_DEVICES": ",".join(hcas)}
    if kind == "roce":
        env |= {"NCCL_IB_ROCE_VERSION_NUM": "2", "NCCL_IB_ADDR_FAMILY": "AF_INET6" if ":" in address else "AF_INET"}
    return env
