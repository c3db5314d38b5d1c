"""Collectives that are noted in the beacon, each once: the group, the operation and the number of elements."""

from __future__ import annotations

import mmap
import warnings

import torch
import torch.distributed as dist

from megatron.parallel.messages.watched import watched_collectives
from megatron.worker.beacon import SIZE, Beacon, GroupCall, read
from tests.workers import run

Told = tuple[str, str, int, int]  # group, operation, elements, how many calls of the group there were
WHOLE, PAIR = "the group of all ranks", "the group of ranks 0-1"
EXPECTED = [
    (WHOLE, "all_reduce", 3, 1),
    (WHOLE, "all_reduce", 4, 2),
    (PAIR, "all_reduce", 6, 1),
    (PAIR, "all_reduce", 5, 2),
    (WHOLE, "all_gather", 6, 3),
    (WHOLE, "barrier", 0, 4),
    (WHOLE, "all_reduce", 7, 5),
]


class Heard(Beacon):
    """Notes what the agent reads when a call has begun."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self.memory, self.found = memory, list[Told]()

    def newest(self) -> GroupCall:
        place = read(self.memory)
        assert place is not None
        return max(place.calls, key=lambda call: call.at)

    def enter(
        self, slot: int, operation: bytes, elements: int, peer: int = -1, *, sized: bool = True, form: bytes = b""
    ):
        super().enter(slot, operation, elements, peer, sized=sized, form=form)
        call = self.newest()
        assert call.inside
        self.found.append((call.name, call.operation, call.elements, call.number))


def told() -> list[Told]:
    """The beacon while the rank is in each of these calls."""
    beacon, pair, own = Heard(mmap.mmap(-1, SIZE)), dist.new_group([0, 1]), torch.zeros(2)
    beacon.begin(0)
    with watched_collectives(beacon), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 2 is not in the pair
        for call in (
            lambda: dist.all_reduce(torch.zeros(3)),
            lambda: dist.all_reduce(torch.zeros(4), group=dist.group.WORLD),
            lambda: dist.all_reduce(tensor=torch.zeros(2, 3), group=pair),
            lambda: dist.all_reduce(torch.zeros(5), dist.ReduceOp.SUM, pair),
            lambda: dist.all_gather([torch.zeros(2) for _ in range(3)], own),
            lambda: dist.barrier(),
            lambda: dist.all_reduce(torch.zeros(7), async_op=True).wait(),
        ):
            call()
            assert not beacon.newest().inside
    dist.all_reduce(torch.zeros(9))
    return beacon.found


def forms() -> list[str]:
    """Types and roots in the beacon."""
    beacon, found = Beacon(memory := mmap.mmap(-1, SIZE)), []
    beacon.begin(0)
    with watched_collectives(beacon):
        for call in (
            lambda: dist.all_reduce(torch.zeros(3, dtype=torch.bfloat16)),
            lambda: dist.all_gather([torch.zeros(2) for _ in range(2)], torch.zeros(2)),
            lambda: dist.broadcast(torch.zeros(1), 1),
            lambda: dist.broadcast(torch.zeros(1), group_src=0),
            lambda: dist.reduce(torch.zeros(1, dtype=torch.int64), dst=1),
            lambda: dist.barrier(),
        ):
            call()
            place = read(memory)
            assert place is not None
            found.append(place.calls[0].form)
    beacon._words.release()
    return found


def test_types_and_roots_of_calls_are_noted() -> None:
    expected = ["bfloat16", "float32", "float32 from rank 1", "float32 from rank 0", "int64 to rank 1", ""]
    assert run(2, forms) == [expected, expected]


def test_each_call_is_noted_once_and_in_its_group() -> None:
    """With a group that is not named, or has no member rank 2."""
    first, second, third = run(3, told)
    assert first == second == EXPECTED
    assert third == [each for each in EXPECTED if each[0] == WHOLE]
