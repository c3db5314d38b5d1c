"""Communicators give every rank all values, in order, round after round."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron.checkpoint import SOLO, GroupCommunicator, StoreCommunicator
from tests.workers import run

ROUNDS = 20


def value(rank: int, turn: int) -> object:
    return {"rank": rank, "words": ["ä" * rank, None, turn / 3]}


def talk(communicator) -> list:
    said = []
    for turn in range(ROUNDS):
        time.sleep(random.random() * 0.002)
        mine = value(communicator.rank, turn)
        said.append([communicator.gather(mine), communicator.broadcast(mine), communicator.collect(mine)])
        communicator.barrier()
    return said


def expected(rank: int, size: int) -> list:
    everything = [[value(each, turn) for each in range(size)] for turn in range(ROUNDS)]
    return [[values, values[0], None if rank else values] for values in everything]


def test_the_store_carries_every_round_between_threads() -> None:
    store, size = dist.HashStore(), 5

    def rank(number: int) -> tuple[list, list]:
        return tuple(talk(StoreCommunicator(store, number, size, name)) for name in ("one", "two"))

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(rank, range(size)))
    assert said == [(expected(rank, size), expected(rank, size)) for rank in range(size)]
    assert store.num_keys() <= 2 * 2  # only the last rounds' results are left


def test_a_rank_that_does_not_come_is_noticed() -> None:
    with pytest.raises(dist.DistStoreError):
        StoreCommunicator(dist.HashStore(), 0, 2, "lonely", timeout=0.2).gather(1)


def over_gloo() -> list:
    return talk(GroupCommunicator())


def test_a_group_carries_every_round() -> None:
    assert run(2, over_gloo) == [expected(0, 2), expected(1, 2)]


def test_one_process_talks_to_itself() -> None:
    assert SOLO.gather({"a": 1}) == SOLO.collect({"a": 1}) == [{"a": 1}]
    assert SOLO.broadcast({"a": 1}) == {"a": 1}


class Counting:
    """A store that counts the bytes that are read from it."""

    def __init__(self) -> None:
        self.store, self.read = dist.HashStore(), 0

    def get(self, key: str) -> bytes:
        found = self.store.get(key)
        self.read += len(found)
        return found

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def test_what_is_collected_goes_to_rank_0_alone() -> None:
    """10,000 ranks that tell of a file each must not hear of 10,000 files each."""
    size, text = 20, "x" * 1000
    counting = Counting()

    def rank(number: int) -> None:
        communicator = StoreCommunicator(dist.HashStore(), number, size, "count")
        communicator._store = counting
        communicator.collect(text)
        communicator.broadcast(text)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(rank, range(size)))
    assert counting.read < 2.5 * size * len(text)
