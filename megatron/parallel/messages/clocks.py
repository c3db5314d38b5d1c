"""One clock for all ranks, and the time when the last rank started each message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .timing import Message, Timed

ROUNDS = 16  # collectives that bound a clock's offset


@dataclass(frozen=True)
class Offset:
    """Offset of this rank's clock to that of rank 0.

    Attributes:
        nanoseconds: to subtract from this rank's times.
        error: bound of its error in nanoseconds.
    """

    nanoseconds: int = 0
    error: int = 0


def bounded(starts: Sequence[int], ends: Sequence[int], first: Sequence[int], last: Sequence[int]) -> Offset:
    """The offset from sums over all ranks. Each sum ends on every rank after it has begun on every rank.

    So the offset is not above (end here - start there) and not below (start here - end there), for each of the sums.
    It is 0 where these bounds allow it.

    Args:
        starts, ends: of this rank.
        first, last: starts and ends of rank 0.
    """
    low = max(here - there for here, there in zip(starts, last))
    high = min(here - there for here, there in zip(ends, first))
    if low <= 0 <= high:
        return Offset(0, max(high, -low))
    return Offset((low + high) // 2, (high - low + 1) // 2)


def measure_offset(now: Callable[[], int], device: torch.device | str = "cpu") -> Offset:
    """This rank's offset. All ranks call it together.

    Args:
        now: this host's time in nanoseconds.
        device: of the tensors that are sent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Offset()
    one, starts, ends = torch.zeros(1, device=device), [], []
    for _ in range(ROUNDS):
        starts.append(now())
        dist.all_reduce(one)
        one.item()  # waits also where the operation is only queued
        ends.append(now())
    theirs = torch.tensor([starts, ends], dtype=torch.int64, device=device)
    dist.broadcast(theirs, 0)
    return bounded(starts, ends, *theirs.tolist())


def find_latest(timed: Sequence[Timed], device: torch.device | str = "cpu") -> None:
    """Set `latest` of each message of a step. All ranks call it after the same step.

    The n-th collective of a group is the same on all its members, and the n-th message that one rank sends is the n-th
    that the other receives. Where the numbers differ, `latest` stays None. Every rank visits its groups, and then its
    pairs, in the same order, so no ranks wait for each other in a circle.
    """
    groups: dict[tuple, list[Timed]] = {}
    pairs: dict[tuple, list[Timed]] = {}
    for each in timed:
        message = each.message
        if message.group is None:
            continue
        if message.call.operation not in ("send", "recv"):
            groups.setdefault((message.ranks, message.group.group_name), []).append(each)
        elif message.peer is not None:
            pairs.setdefault((message.ranks, message.group.group_name), []).append(each)
    for _, found in sorted(groups.items(), key=lambda item: item[0]):
        _of_group(found, device)
    for _, found in sorted(pairs.items(), key=lambda item: item[0]):
        _of_pair(found, device)


def _of_group(timed: list[Timed], device: torch.device | str) -> None:
    group = timed[0].message.group
    counts = torch.tensor([len(timed), -len(timed)], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    if counts[0] != -counts[1]:
        return
    latest = torch.tensor([each.start for each in timed], dtype=torch.int64, device=device)
    dist.all_reduce(latest, dist.ReduceOp.MAX, group)
    for each, value in zip(timed, latest.tolist()):
        each.latest = value


def _of_pair(timed: list[Timed], device: torch.device | str) -> None:
    """Sends of one rank and receives of the other, and the reverse."""
    message = timed[0].message
    first = dist.get_rank() == min(message.ranks)
    ours, theirs = ([each for each in timed if each.message.call.operation == kind] for kind in ("send", "recv"))
    counts = torch.tensor([len(ours), len(theirs)], device=device)
    found = _swapped(message, counts, first)
    if found.tolist() != [len(theirs), len(ours)]:
        return
    starts = torch.tensor([each.start for each in (*ours, *theirs)], dtype=torch.int64, device=device)
    other = _swapped(message, starts, first).tolist()
    for each, start in zip((*theirs, *ours), other):
        each.latest = max(each.start, start)


def _swapped(message: Message, mine: torch.Tensor, first: bool) -> torch.Tensor:
    other = torch.empty_like(mine)
    for sends in (first, not first):
        if sends:
            dist.send(mine, group=message.group, group_dst=message.peer)
        else:
            dist.recv(other, group=message.group, group_src=message.peer)
    return other
