"""Settings of collectives on accelerators for the network of this host. Variables that are set already are kept.

InfiniBand and plain Ethernet need nothing: NCCL and RCCL (which reads the same NCCL_* variables) find them. On
Slingshot both go through libfabric's cxi provider, whose defaults are made for MPI. HPE and sites with it (OLCF, LUMI,
NERSC, CSCS) advise these values. The plugin that joins them (aws-ofi-nccl, aws-ofi-rccl) comes with the site.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from . import devices

SLINGSHOT = {
    "NCCL_SOCKET_IFNAME": "hsn",  # a prefix: hsn0, hsn1, ... (the management network is slow, or closed)
    "NCCL_NET_GDR_LEVEL": "PHB",  # the network card reads the memory of GPUs behind the same host bridge
    "NCCL_CROSS_NIC": "1",  # rings may leave by one card and return by another: all cards are in one network
    "FI_MR_CACHE_MONITOR": "userfaultfd",  # the default hooks into malloc, and deadlocks with torch's allocator
    "FI_CXI_DISABLE_HOST_REGISTER": "1",  # registering host memory calls the GPU's runtime, which may deadlock there
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",  # room for completions when thousands of ranks talk at once
    "FI_CXI_RX_MATCH_MODE": "software",  # the card's own matching has room for few messages, and fails when it is full
}
# GPU memory that kernels have borrowed for their stacks is kept: giving it back stalls RCCL's kernels (AMD's RCCL
# guide).
AMD = {"HSA_NO_SCRATCH_RECLAIM": "1"}


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this host's network and devices call for and `environment` does not have."""
    maker = devices.vendor()
    if maker is None:
        return {}
    wanted = dict(AMD) if maker == "amd" else {}
    if any(name.startswith("hsn") for _, name in socket.if_nameindex()):
        wanted |= SLINGSHOT
    return {name: value for name, value in wanted.items() if name not in environment}
