"""Ranks that do not run what rank 0 runs are named on every rank. Where all agree, none is notified of all."""

from __future__ import annotations

from megatron.training.world import agree
from megatron.worker.place import LaunchError, WorkerEnvironment
from tests.checkpoint.model import Together


def found(other: set[int], size: int = 5) -> tuple[list[object], int]:
    """Error of each rank if the ranks of `other` have another configuration, and the number of gathers."""
    together, told = Together(size), []

    def work(member) -> None:
        place = WorkerEnvironment(
            rank=member.rank, world_size=size, config_sha256=("b" if member.rank in other else "a") * 64
        )
        gather = member.gather
        member.any_rank = lambda flags: [any(each) for each in zip(*gather(list(flags)))]
        member.broadcast = lambda value: gather(value)[0]
        member.gather = lambda value: told.append(value) or gather(value)
        agree(place, member)

    return together.run(work), len(told)


def test_ranks_that_differ_are_named_on_all() -> None:
    for other, words in (({3}, "ranks [3] do"), ({0}, "ranks [1, 2, 3, 4] do"), ({1, 4}, "ranks [1, 4] do")):
        said, told = found(other)
        assert all(isinstance(each, LaunchError) and words in str(each) for each in said) and told == 5


def test_nobody_hears_of_all_where_they_agree() -> None:
    assert found(set()) == ([None] * 5, 0)
