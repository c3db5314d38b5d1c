"""A signal within a slow step: it is dropped or finished, alike on all ranks, and a dropped one leaves no trace."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.checkpoint import open_checkpoint
from megatron.config import to_yaml
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.engine.protocol import StepDropped
from megatron.testing.ranks import PATIENCE
from megatron.training import trainer
from megatron.training.run import run_training as train
from megatron.training.run import status
from megatron.training.trainer import Looks
from megatron.training.world import World
from megatron.worker.place import WorkerEnvironment
from tests.selection import toured
from tests.workers import run

MODEL = {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 32, "attention": {"heads": 2}}
DEEP = {**MODEL, "layers": "(attention/mlp) x4"}
MOE = {**MODEL, "layers": "(attention/moe) x2", "moe": {"experts": 2, "hidden_size": 16}}
CASES = {
    "one process": (1, MODEL, {}, 0, "fp32"),
    "data, ZeRO 1": (2, MODEL, {}, 1, "fp32"),
    "data, ZeRO 2, bf16": (2, MODEL, {}, 2, "bf16"),
    "data, ZeRO 3": (2, MODEL, {}, 3, "fp32"),
    "tensor": (2, MODEL, {"tensor": 2}, 1, "fp32"),
    "pipeline": (2, MODEL, {"pipeline": 2}, 1, "fp32"),
    "pipeline and data": (4, MODEL, {"pipeline": 2}, 1, "fp32"),
    "two stages per rank": (2, DEEP, {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved"}, 1, "fp32"),
    "experts": (2, MOE, {"expert": 2}, 1, "fp32"),
}
STEP, AFTER = 2, 3  # the signal comes in this step, after this number of checks


def job(folder: str, case: str, stop_at: int | None, at: int | None, moment: int):
    """Train. Rank 1 (or the only one) gets a signal at a look of step `at`. Its end, and the number of checks."""
    import torch.distributed as dist

    from megatron.checkpoint import GroupCommunicator
    from megatron.checkpoint.format.communicator import SOLO
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    ranks, model, parallel, stage, precision = CASES[case]
    accumulation = 8
    values = {
        "run": {"dir": folder},
        "model": model,
        "parallel": parallel,
        "zero": {"stage": stage},
        "precision": precision,
        "training": {
            "steps": 6,
            "sequence_length": 8,
            "micro_batch_size": 1,
            "accumulation": accumulation,
            **({"stop_at_step": stop_at} if stop_at else {}),
        },
        "optimizer": {"lr": 1e-3},
        "data": {"synthetic": "copy"},
        "checkpoint": {"every": 100, "at_end": True},
        "logging": {"console": "quiet", "curve": False},
    }
    resolved = combine([ConfigSource(values)], ranks=ranks)
    mesh = Mesh.single() if ranks == 1 else Mesh.build(Layout.of(resolved.config, ranks))
    communicator = SOLO if ranks == 1 else GroupCommunicator(device="cpu")
    seen = []
    original, trainer.EVERY = Looks.__call__, 0.0

    def called(self, done: int, total: int) -> None:
        self._pace = None  # check at every chance: this model is too quick to be inspected
        if at == self._step and mesh.rank == (1 if ranks > 1 else 0) and done == moment:
            os.kill(os.getpid(), signal.SIGTERM)
        if at == self._step:
            seen.append((done, total))
        original(self, done, total)

    Looks.__call__ = called
    handler = signal.getsignal(signal.SIGTERM)
    try:
        import torch

        writer = SOLO if ranks == 1 else GroupCommunicator(dist.new_group(backend="gloo", timeout=PATIENCE))
        world = World(torch.device("cpu"), mesh, communicator, writer)
        outcome = train(
            resolved.config, WorkerEnvironment(config_text=to_yaml(resolved), rank=mesh.rank, world_size=ranks), world
        )
    finally:
        Looks.__call__, trainer.EVERY = original, 5.0
        signal.signal(signal.SIGTERM, handler)
    if ranks > 1:
        dist.barrier()
    return outcome.step, outcome.reason, status(outcome), seen[-1] if seen else None


def content(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of all tensors of a checkpoint, and where its data stand."""
    path = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint = open_checkpoint(path, verify="checksums")
    files = {each.path: (path / each.path).read_bytes() for each in checkpoint.records}
    return {**files, "data": repr(checkpoint.meta.data).encode(), "optimizer": repr(checkpoint.meta.optimizer).encode()}


@pytest.mark.parametrize("case", toured(CASES), ids=str)
def test_a_dropped_step_leaves_everything_as_it_was_before_it(tmp_path, case):
    ranks = CASES[case][0]
    for step, reason, code, last in run(ranks, job, str(tmp_path / "stopped"), case, None, STEP, AFTER):
        assert (step, reason, code) == (STEP, "signal SIGTERM", 143)
        assert last[0] == AFTER < last[1] / 2
    assert [each[0] for each in run(ranks, job, str(tmp_path / "plain"), case, STEP, None, 0)] == [STEP] * ranks
    assert content(tmp_path / "stopped", STEP) == content(tmp_path / "plain", STEP)


@pytest.mark.parametrize("case", toured(["data, ZeRO 1", "pipeline"]))
def test_a_step_that_is_nearly_done_is_finished(tmp_path, case):
    late = 6 if case != "pipeline" else 14
    for step, reason, code, _ in run(2, job, str(tmp_path / "stopped"), case, None, STEP, late):
        assert (step, reason, code) == (STEP + 1, "signal SIGTERM", 143)
    run(2, job, str(tmp_path / "plain"), case, STEP + 1, None, 0)
    assert content(tmp_path / "stopped", STEP + 1) == content(tmp_path / "plain", STEP + 1)


class Exchange:
    def __init__(self, elapsed: float, requests: set[str]) -> None:
        self.elapsed, self.wanted, self.count = elapsed, requests, 0

    def look(self, requests, elapsed):
        self.count += 1
        return self.wanted, self.elapsed


class Trainer:
    def __init__(self, elapsed: float = 0.0, requests=()) -> None:
        self.exchange, self.requests = Exchange(elapsed, set(requests)), set()
        self.config = SimpleNamespace(launch=SimpleNamespace(grace=60.0))

    def ask(self, step: int) -> None:
        pass


@pytest.mark.parametrize(("pace", "looks"), [(None, 31), (0.2, 0), (4.9, 0), (5.0, 1), (61.0, 12), (1e4, 31)])
def test_quick_steps_are_not_looked_into(pace, looks):
    trainer = Trainer()
    look = Looks(trainer, 0, pace)
    for done in range(1, 32):
        look(done, 32)
    assert trainer.exchange.count == looks


@pytest.mark.parametrize(
    ("elapsed", "done", "dropped"), [(1.0, 1, True), (30.0, 16, True), (12.0, 16, False), (60.0, 31, False)]
)
def test_what_is_cheaper_is_done(elapsed, done, dropped):
    trainer = Trainer(elapsed, {"SIGINT"})
    look = Looks(trainer, 0, None)
    if dropped:
        with pytest.raises(StepDropped) as caught:
            look(done, 32)
        assert caught.value.left == pytest.approx(elapsed * (32 - done) / done) and caught.value.requests == {"SIGINT"}
    else:
        look(done, 32)
        look(done + 1, 32)
        assert trainer.exchange.count == 1, "it is finished without asking again"
