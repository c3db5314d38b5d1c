"""Measure the speed of n data parallel ranks as a share of n runs of one rank each, side by side on one host.

    OMP_NUM_THREADS=1 python -m bench replicas --shapes pythia-14m pythia-70m --precision bf16 --micro-batch 4

On a CPU ranks share caches and memory, so two of them are never twice as fast as one. They are therefore compared with
two independent runs at the same time. DistributedDataParallel around transformers' model (autocast in bf16) is the
peer. All are timed by the clock: a rank that waits for another uses no processor time. Shares are of the rate of matrix
products that the same number of processes reach together.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from typing import Any

from bench.processor import PRODUCTS, Products
from bench.runner import Result, add_shares, compare, comparison, share
from bench.step.contenders import Contender, Ours, Transformers
from bench.step.remote import CHECKED_STEPS, TOLERANCE, Remote, check_equal
from bench.step.setup import SHAPES, Setup, configuration, flops_per_token

OURS, APART, PEER = "ours", "ours, each by itself", "transformers, DistributedDataParallel"


class Replica(Ours):
    """A data parallel rank. All ranks train on the same samples, so losses and norms equal one rank's."""

    def __init__(self, setup: Setup, rank: int, ranks: int, store: str):
        from megatron.parallel.layout.layout import Layout
        from megatron.parallel.transport.shared_sums import SharedSums

        super().__init__(setup, functools.partial(_together, ranks=ranks), rank, Layout(data=ranks), store)
        self.shared = SharedSums(print).installed()
        self.shared.__enter__()  # as in a run, until the process ends


def _together(setup: Setup, ranks: int) -> Any:
    more = (("training.global_batch_size", ranks * setup.micro_batch),)
    return configuration(Setup(**{**vars(setup), "options": (*setup.options, *more)}))


class Distributed(Transformers):
    """A rank of the loop around transformers' model."""

    def __init__(self, setup: Setup, rank: int, ranks: int, store: str):
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
        super().__init__(setup, compiled=False, autocast=setup.compute == "bf16")
        self.forward = DistributedDataParallel(self.model)


def _alone(setup: Setup, rank: int, ranks: int, store: str) -> Contender:
    return Ours(setup)


def _products(setup: Setup, rank: int, ranks: int, store: str) -> Products:
    return Products(setup)


MAKERS = {OURS: Replica, APART: _alone, PEER: Distributed}


def steps_of(setup: Setup, ranks: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, of the slowest rank in each round.

    Raises:
        Mismatch: they do not compute the same thing.
    """
    teams: dict[str, list[Remote]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in (*MAKERS, PRODUCTS)}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (name, maker) in enumerate([*MAKERS.items(), (PRODUCTS, _products)]):
                makers = [
                    functools.partial(maker, rank=rank, ranks=ranks, store=f"{folder}/{number}")
                    for rank in range(ranks)
                ]
                teams[name] = [Remote(f"{name} {rank}", setup, make) for rank, make in enumerate(makers)]
                for remote in teams[name]:
                    remote.answer()
            first = {name: together(team, 0, CHECKED_STEPS) for name, team in teams.items()}
            check_equal({name: first[name][0] for name in MAKERS}, TOLERANCE[setup.compute])
            for number in range(rounds):
                for name, team in teams.items():
                    answers = together(team, CHECKED_STEPS + number * steps, steps)
                    seconds[name].append(max(each["seconds"] for each in answers) / steps)
                    peaks[name] = sum(each["peak"] for each in answers)
        finally:
            for remote in [each for team in teams.values() for each in team]:
                remote.close()
    what = f"{ranks} ranks, {setup.shape}, {setup.compute}, {setup.micro_batch} x {setup.sequence} tokens each"
    peak = ranks * Products.flops / statistics.median(seconds.pop(PRODUCTS))
    made = compare(what, "tokens/s", seconds, ranks * setup.tokens)
    add_shares(made, peak, dict.fromkeys(MAKERS, flops_per_token(configuration(setup))))
    for row in made:
        row["memory"] = peaks[OURS] / peaks[row["peer"]]
    return made


def together(team: list[Remote], first: int, steps: int) -> list[dict[str, Any]]:
    """All ranks at once."""
    for remote in team:
        remote.begin(first, steps)
    return [remote.answer() for remote in team]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m"])
    usual = {"micro_batch": 4, "rounds": 7}
    share(parser, "--ranks", "--sequence", "--micro-batch", "--precision", "--steps", "--rounds", **usual)


def measure(given: argparse.Namespace) -> Result:
    made = []
    for shape in given.shapes:
        setup = Setup(shape, given.sequence, given.micro_batch, precision=given.precision)
        made += steps_of(setup, given.ranks, given.steps, given.rounds)
    return comparison(made)
