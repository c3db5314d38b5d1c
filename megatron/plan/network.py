"""Times of collectives: rings of latency and bandwidth, with the groups' real places on hosts. No torch.

S is the whole tensor (Thakur et al. 2005, nccl-tests' PERFORMANCE.md). A ring of n ranks takes 2 (n - 1) steps of S / n
for an all-reduce, and n - 1 steps for an all-gather, a reduce-scatter or an all-to-all. Small all-reduces use a tree.
If a group spans hosts, the slowest link of the ring is the network. The rings that leave a host at the same time, one
for each of its groups, share its adapters. A measured curve for the same numbers of ranks and hosts replaces the
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.curve import choose_curve

from .devices import Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, as a host sees them."""

    ranks: int  # of the group
    local: int  # ranks of the group on each host

    @property
    def hosts(self) -> int:
        return ceil(self.ranks / self.local)


def group(size: int, stride: int, per_host: int) -> Group:
    """A group of `size` ranks that are `stride` apart, ranks being numbered host by host."""
    return Group(size, max(1, min(size, per_host // stride if stride < per_host else 1)))


def groups(layout: Layout, per_host: int) -> dict[str, Group]:
    """The groups of a layout by axis."""
    tensor, replicas = layout.tensor, layout.replicas
    stride = 1 if layout.folded else tensor
    return {
        "tensor": group(tensor, 1, per_host),
        "context": group(layout.context, tensor, per_host),
        "replicas": group(replicas, tensor, per_host),
        "expert": group(layout.expert, stride, per_host),
        "expert_data": group(layout.expert_data, stride * layout.expert, per_host),
        "pipeline": group(layout.pipeline, tensor * replicas, per_host),
    }


def ring(operation: str, ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Seconds of one collective among ranks with equal links.

    Args:
        operation: as in `megatron.parallel.messages.traffic.Call`.
        size: bytes of the whole tensor, or of a send's message.
        latency: seconds of each step.
        bandwidth: bytes per second of a rank, in one direction.
    """
    if ranks == 1:
        return 0.0
    if operation == "all_reduce":
        around = 2 * (ranks - 1) * (latency + size / (ranks * bandwidth))
        return min(around, 2 * ceil(log2(ranks)) * latency + 2 * size / bandwidth)
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * (latency + size / (ranks * bandwidth))
    return latency + size / bandwidth  # a send, or a broadcast along a chain of pieces


def collective(at: Cluster, group: Group, operation: str, size: float, messages: float = 1) -> float:
    """Seconds of `messages` equal collectives of `size` bytes in total, one after the other."""
    if group.ranks == 1 or not messages:
        return 0.0
    curve = choose_curve(at.curves, operation, group.ranks, group.hosts)
    if curve is not None:
        return messages * curve.seconds(size / messages)
    link, network = at.device.link, at.network
    inside = ring(operation, group.ranks, size / messages, link.latency * 1e-6, link.bandwidth * 1e9)
    if group.hosts == 1:
        return messages * inside
    host = network.bandwidth * 1e9 * network.adapters
    between = min(host * group.local / at.per_host, link.bandwidth * 1e9)
    # A host has one hop less than ranks. Hops between hosts are slower and fewer.
    hops = (link.latency * (group.ranks - group.hosts) + network.latency * group.hosts) / group.ranks
    return messages * ring(operation, group.ranks, size / messages, hops * 1e-6, between)
