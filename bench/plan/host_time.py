"""Time of a CPU's steps in addition to their FLOPs: microseconds of an operation, a message, a gathered tensor.

Small models of configs/test make steps that differ in the number of each. They have several micro-batches, matrix
products and scans, tensor and expert parallel ranks, pipeline stages, and ZeRO 3. The rest of their measured times
after the FLOPs is divided among the counts of rehearsals, by least squares of relative errors and without negative
figures. Take it on a quiet machine with a core for each of the two ranks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import numpy as np

from bench.plan.step_times import round_of, seconds
from bench.runner import ROOT
from megatron.config import Config, load
from megatron.plan.devices import Device, HostTime
from megatron.rehearsal.command import in_own_process
from megatron.rehearsal.report import HostWork, whole, works

COMMON = ["data.synthetic=copy", "data.train=null", "schedule.warmup_steps=1", "training.steps=64"]
SMALL = ["training.sequence_length=64", "training.global_batch_size=8"]
RUNS: tuple[tuple[str, int, list[str]], ...] = (
    ("tiny_neox", 1, ["model.layers=(attention/mlp) x4"]),
    ("tiny_neox", 1, ["model.layers=(attention/mlp) x2", "training.micro_batch_size=1"]),
    ("tiny_llama", 1, ["model.hidden_size=256", "training.sequence_length=256"]),
    ("tiny_mamba2", 1, []),
    ("tiny_rwkv7", 1, []),
    ("tiny_llama", 2, ["parallel.tensor=2"]),
    ("tiny_neox", 2, ["parallel.tensor=2", "parallel.sequence=true", "training.micro_batch_size=2"]),
    ("tiny_mixtral", 2, ["parallel.expert=2"]),
    ("tiny_llama", 2, ["parallel.context=2"]),
    ("tiny_llama", 2, ["parallel.context=2", "parallel.context_method=ring"]),
    ("tiny_neox", 2, ["parallel.folded=2"]),
    ("tiny_llama", 2, ["parallel.folded=2", "zero.stage=1"]),
    ("tiny_llama", 2, ["parallel.pipeline=2", "training.micro_batch_size=1"]),
    ("tiny_mamba2", 2, ["parallel.pipeline=2"]),
    ("tiny_neox", 2, ["parallel.pipeline=2", "training.activation_checkpointing.mode=full"]),
    ("tiny_llama", 2, ["zero.stage=1"]),
    ("tiny_neox", 1, ["zero.stage=3", "zero.persistent_size=0"]),
    ("tiny_neox", 2, ["zero.stage=3", "zero.persistent_size=0", "training.activation_checkpointing.mode=full"]),
    ("tiny_llama", 2, ["zero.stage=3", "zero.persistent_size=0"]),
    ("tiny_mamba2", 2, ["zero.stage=3", "zero.persistent_size=0", "training.micro_batch_size=1"]),
)


def configurations() -> list[tuple[Config, int]]:
    """All runs, with their numbers of ranks."""
    folder = ROOT / "configs" / "test"
    return [
        (load([folder / f"{name}.yml"], [*COMMON, *SMALL, *own], ranks=ranks, check_inputs=False).config, ranks)
        for name, ranks, own in RUNS
    ]


def measure(device: Device, rounds: int, steps: int = 8) -> HostTime:
    """Figures of this machine's host. `device` has its rates.

    Raises:
        ConfigError: the device has no rate in fp32.
        RuntimeError, TimeoutError: a run failed, or was faster than the FLOPs at the device's rate.
    """
    runs, taken = configurations(), list[tuple[HostWork, float]]()
    rate = device.peak("fp32") * device.efficiency.matrix
    times: list[list[dict[str, float]]] = [[] for _ in runs]
    for _ in range(rounds):
        for each, (config, ranks) in zip(times, runs):
            each.append(round_of(config, ranks, steps))
    for each, (config, ranks) in zip(times, runs):
        counted = works(config, ranks, {rank: in_own_process(config, ranks, rank) for rank in range(ranks)})
        work = whole(config, ranks, counted)
        taken.append((work, seconds(each, "wall") - work.flops / rate))
    return fitted(taken)


def fitted(taken: Sequence[tuple[HostWork, float]]) -> HostTime:
    """From pairs of what was counted and the seconds that it took: least squares of relative errors."""
    counts = np.array([work.counts for work, _ in taken], dtype=float)
    times = np.array([time for _, time in taken])
    if times.min() <= 0:
        raise RuntimeError("a step was faster than its FLOPs at the rate of products: measure both on an idle machine")
    weighed, wanted = counts / times[:, None], np.ones(len(times))
    kept = np.ones(counts.shape[1], dtype=bool)
    found = np.zeros(counts.shape[1])
    while kept.any():
        found[:] = 0.0
        found[kept] = np.linalg.lstsq(weighed[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept[found.argmin()] = False  # it explains nothing that others do not
        found[:] = 0.0
    error = statistics.median(abs(weighed @ found - 1))
    print(f"figures of the host explain these runs within {error:.0%} in the median", file=sys.stderr)
    return HostTime(**dict(zip(HostTime.model_fields, (float(f"{1e6 * each:.4g}") for each in found))))
