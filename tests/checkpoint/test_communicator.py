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
        said.append(communicator.gather(value(communicator.rank, turn)))
        communicator.barrier()
    return said


def test_the_store_carries_every_round_between_threads() -> None:
    store, size = dist.HashStore(), 5

    def rank(number: int) -> tuple[list, list]:
        return tuple(talk(StoreCommunicator(store, number, size, name)) for name in ("one", "two"))

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(rank, range(size)))
    expected = [[value(rank, turn) for rank in range(size)] for turn in range(ROUNDS)]
    assert said == [(expected, expected)] * size
    assert store.num_keys() <= 2 * 2  # only the last rounds' results are left


def test_a_rank_that_does_not_come_is_noticed() -> None:
    with pytest.raises(dist.DistStoreError):
        StoreCommunicator(dist.HashStore(), 0, 2, "lonely", timeout=0.2).gather(1)


def over_gloo() -> list:
    return talk(GroupCommunicator())


def test_a_group_carries_every_round() -> None:
    expected = [[value(rank, turn) for rank in range(2)] for turn in range(ROUNDS)]
    assert run(2, over_gloo) == [expected, expected]


def test_one_process_talks_to_itself() -> None:
    assert SOLO.gather({"a": 1}) == [{"a": 1}]
