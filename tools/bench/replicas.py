#!/usr/bin/env python
"""Measure what data parallel ranks keep of the speed of as many runs of one rank each, side by side on one host.

    OMP_NUM_THREADS=1 python tools/bench/replicas.py --shapes pythia-14m pythia-70m --precision bf16 --micro-batch 4

On a CPU ranks share caches and memory, so two of them are never twice as fast as one: what they are compared with is
two runs that have nothing to do with each other, at the same time. DistributedDataParallel around transformers' model
(autocast in bf16) is the peer. All are timed by the clock: a rank that waits for another uses no processor time. Shares
are of the rate of matrix products that as many processes reach together.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from typing import Any  # noqa: E402

from tools.bench.beside import add_shares, lines, markdown  # noqa: E402
from tools.bench.contenders import SHAPES, Contender, Ours, Setup, Transformers, configuration, flops_per_token  # noqa: E402
from tools.bench.processor import Products  # noqa: E402
from tools.bench.train_step import CHECKED_STEPS, TOLERANCE, Mismatch, Remote, check_equal  # noqa: E402

OURS, APART, PEER = "ours", "ours, each by itself", "transformers, DistributedDataParallel"


class Replica(Ours):
    """A data parallel rank. All ranks train on the same samples, so losses and norms are those of one rank."""

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
PRODUCTS = "products"


def measure(setup: Setup, ranks: int, steps: int, rounds: int) -> list[dict[str, Any]]:
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
                    remote.ready()
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
    made = lines(what, "tokens/s", seconds, ranks * setup.tokens)
    add_shares(made, peak, dict.fromkeys(MAKERS, flops_per_token(configuration(setup))))
    for line in made:
        line["memory"] = peaks[OURS] / peaks[line["peer"]]
    return made


def together(team: list[Remote], first: int, steps: int) -> list[dict[str, Any]]:
    """All ranks at once."""
    for remote in team:
        remote.begin(first, steps)
    return [remote.answer() for remote in team]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples per step and rank")
    parser.add_argument("--precision", choices=TOLERANCE, default="fp32")
    parser.add_argument("--steps", type=int, default=2, help="in one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given, made = parser.parse_args(arguments), []
    for shape in given.shapes:
        setup = Setup(shape, given.sequence, given.micro_batch, precision=given.precision)
        try:
            made += measure(setup, given.ranks, given.steps, given.rounds)
        except (Mismatch, RuntimeError) as error:
            print(f"{shape}: {error}", file=sys.stderr)
            return 1
    print(json.dumps(made) if given.json else markdown(made))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
