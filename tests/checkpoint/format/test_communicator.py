"""Communicators give every rank all values, in order, round after round."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.checkpoint import SOLO, GroupCommunicator, StoreCommunicator
from megatron.checkpoint.format.communicator import all_problems
from tests.workers import run

ROUNDS = 20


def value(rank: int, turn: int) -> object:
    return {"rank": rank, "words": ["ä" * rank, None, turn / 3]}


def flags(rank: int, turn: int) -> list[bool]:
    return [turn % 5 == rank, rank > 0, False, turn % 2 == 0]


def problems(rank: int, turn: int) -> list[str]:
    """Of every third round, and one of them twice. Not of rank 0."""
    return [f"of {rank}", "of all", f"of {rank}"] if rank and turn % 3 == 0 else []


def talk(communicator) -> list:
    said = []
    for turn in range(ROUNDS):
        time.sleep(random.random() * 0.002)
        mine = value(communicator.rank, turn)
        said.append([
            communicator.gather(mine),
            communicator.broadcast(mine),
            communicator.collect(mine),
            communicator.any_rank(flags(communicator.rank, turn)),
            all_problems(communicator, problems(communicator.rank, turn)),
        ])
        communicator.barrier()
    return said


def expected(rank: int, size: int) -> list:
    everything = [[value(each, turn) for each in range(size)] for turn in range(ROUNDS)]
    together = [[any(each) for each in zip(*(flags(other, turn) for other in range(size)))] for turn in range(ROUNDS)]
    told = [
        ["of 1", "of all", *(f"of {other}" for other in range(2, size))] if turn % 3 == 0 else []
        for turn in range(ROUNDS)
    ]
    return [
        [values, values[0], None if rank else values, any_of_them, all_of_them]
        for values, any_of_them, all_of_them in zip(everything, together, told)
    ]


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


def test_an_answer_stays_with_the_rank_after_rank_0_has_ended() -> None:
    """Where the answer is an error, rank 0 and its store end with it."""
    store, size = dist.HashStore(), 2
    first, second = (StoreCommunicator(store, rank, size, "ended") for rank in range(size))
    ended = mock.Mock(side_effect=dist.DistNetworkError("the connection is closed"))
    second._store.delete = ended  # type: ignore[method-assign]
    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(lambda each: each.broadcast(each.rank), (first, second))) == [0, 0]
    ended.assert_called_once_with("1/1")


def over_gloo() -> list:
    return talk(GroupCommunicator())


def test_a_group_carries_every_round() -> None:
    assert run(2, over_gloo) == [expected(0, 2), expected(1, 2)]


def test_one_process_talks_to_itself() -> None:
    assert SOLO.gather({"a": 1}) == SOLO.collect({"a": 1}) == [{"a": 1}]
    assert SOLO.broadcast({"a": 1}) == {"a": 1} and SOLO.any_rank([True, False]) == [True, False]
    assert all_problems(SOLO, ["a", "b", "a"]) == ["a", "b"]


class Counting:
    """A store that counts the bytes that are read from it."""

    def __init__(self) -> None:
        self.store, self.read = dist.HashStore(), 0

    def get(self, key: str) -> bytes:
        found = self.store.get(key)
        self.read += len(found)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def test_what_is_collected_goes_to_rank_0_alone() -> None:
    """10,000 ranks that each report a file must not receive 10,000 files each."""
    size, text = 20, "x" * 1000
    counting = Counting()

    def rank(number: int) -> None:
        communicator = StoreCommunicator(dist.HashStore(), number, size, "count")
        communicator._store.store = counting
        communicator.collect(text)
        communicator.broadcast(text)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(rank, range(size)))
    assert counting.read < 2.5 * size * len(text)


def test_rank_0_uses_the_store_as_often_for_many_ranks() -> None:
    """Round trips, which 10,000 ranks would make seconds. The others delete their own values meanwhile."""

    def trips(size: int) -> int:
        store, used = dist.HashStore(), list[str]()

        class Used:
            def __getattr__(self, name: str):
                used.append(name)
                return getattr(store, name)

        def rank(number: int) -> None:
            communicator = StoreCommunicator(store, number, size, "trips")
            if number == 0:
                communicator._store.store = Used()
            for _ in range(3):
                communicator.collect(number)

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(rank, range(size)))
        assert store.num_keys() <= 1
        return len(used)

    assert trips(3) == trips(30)


@pytest.mark.parametrize("size", [5, 20])
def test_ranks_that_find_nothing_wrong_hear_one_flag(size: int) -> None:
    """However many they are: the list of what all found would grow with each of them, for each of them."""
    counting = Counting()

    def rank(number: int) -> None:
        communicator = StoreCommunicator(dist.HashStore(), number, size, "count")
        communicator._store.store = counting
        all_problems(communicator, [])

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(rank, range(size)))
    seal = 64  # each gives a flag to rank 0, and receives one, both with a seal
    assert counting.read == 2 * size * (seal + len("[false]"))
