"""A tiny language model, its data and its engine in plain torch, for one process or for data parallel ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from megatron.checkpoint.save.saver import Saved
from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.engine.protocol import StepResult
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.report.sinks import open_run
from megatron.training.hook import HookContext, ValidationSet
from megatron.training.hooks import hooks_of
from megatron.training.trainer import Outcome, Trainer

VOCABULARY = 13


@dataclass
class ToyBatch:
    tokens: torch.Tensor
    loss_mask: torch.Tensor | None
    hash: int
    step: int


class ToyLoader:
    """Batches as a function of the step. Sample b goes to rank b mod ranks. Each token follows from the last."""

    def __init__(self, config, rank: int = 0, ranks: int = 1, seed: int = 0) -> None:
        self.batch, self.length = config.training.global_batch_size, config.training.sequence_length
        self.rank, self.ranks, self.seed = rank, ranks, seed

    def step(self, step: int) -> ToyBatch:
        generator = torch.Generator().manual_seed(10_000 * self.seed + step)
        first = torch.randint(0, VOCABULARY, (self.batch, 1), generator=generator)
        tokens = (first + 3 * torch.arange(self.length + 1)) % VOCABULARY
        mask = (torch.rand(self.batch, self.length, generator=generator) < 0.8).float()
        mine = slice(self.rank, None, self.ranks)
        code = sum(self._hash(index, row) for index, row in enumerate(tokens) if index % self.ranks == self.rank)
        return ToyBatch(tokens[mine][None], mask[mine][None], code % 2**64, step)

    @staticmethod
    def _hash(index: int, row: torch.Tensor) -> int:
        return int.from_bytes(hashlib.blake2b(bytes([index, *row.tolist()]), digest_size=8).digest(), "little")


class ToyEngine:
    """Embedding and head. Gradients are summed over ranks, so any number of ranks gives the same updates."""

    def __init__(self, config) -> None:
        generator = torch.Generator().manual_seed(config.training.seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, 8, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCABULARY, 8, generator=generator))
        self.table.logical = LogicalTensor("embedding", (VOCABULARY, 8), Role.EMBEDDING)
        self.head.logical = LogicalTensor("head", (VOCABULARY, 8), Role.HEAD)
        self.parameters = [self.table, self.head]
        self.optimizer = build_optimizer(config, self.parameters)
        self.poison: dict[int, float] = {}
        self.skip: set[int] = set()

    def losses(self, batch) -> torch.Tensor:
        logits = self.table[batch.tokens[..., :-1]] @ self.head.T
        return F.cross_entropy(logits.flatten(0, -2), batch.tokens[..., 1:].flatten(), reduction="none")

    def step(self, batch, lr: float, look=None) -> StepResult:
        set_learning_rate(self.optimizer, lr)
        mask = batch.loss_mask.flatten()
        count = mask.sum()
        if dist.is_initialized():
            dist.all_reduce(count)
        total = (self.losses(batch) * mask).sum() * self.poison.get(batch.step, 1.0)
        self.optimizer.zero_grad()
        (total / count).backward()
        if dist.is_initialized():
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad)
        norm = torch.cat([parameter.grad.flatten() for parameter in self.parameters]).norm()
        if batch.step not in self.skip:
            self.optimizer.step()
        return StepResult(
            total.detach() / mask.sum(),
            mask.sum(),
            norm,
            skipped=batch.step in self.skip,
            extras={"table_norm": float(self.table.detach().norm())},
        )

    @torch.no_grad()
    def evaluate(self, batch):
        mask = batch.loss_mask.flatten()
        return (self.losses(batch) * mask).sum(), mask.sum()

    def state(self) -> dict:
        return {"weights": [p.detach().clone() for p in self.parameters], "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["weights"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])


class ToySaver:
    """Checkpoints as torch files. A save counts as written at the next poll."""

    def __init__(self, folder: Path, engine: ToyEngine) -> None:
        self.folder, self.engine = folder, engine
        self.saved: list[int] = []
        self.written: list[Saved] = []
        self.closed = False

    def save(self, step: int, fragments, meta) -> float:
        assert (fragments, meta) == (["fragments"], step)
        path = self.folder / f"step_{step}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.engine.state(), path)
        self.saved.append(step)
        self.written.append(Saved(path, 0.5, 1.5, []))
        return 0.5

    def poll(self) -> list[Saved]:
        ended, self.written = self.written, []
        return ended

    wait = poll

    def close(self) -> list[Saved]:
        self.closed = True
        return self.poll()


def toy_trainer(config, *, start: int = 0, mesh: Mesh | None = None, more=(), **options) -> Trainer:
    """A trainer with all standard hooks and `more` after them. Resumes from the saver's file where start > 0."""
    mesh = mesh or Mesh.single()
    engine, folder = ToyEngine(config), Path(config.run.dir)
    saver = ToySaver(folder / "checkpoints", engine)
    if start:
        engine.load(torch.load(saver.folder / f"step_{start}.pt"))
    sinks, ledger = open_run(config, rank=mesh.rank, start=start)
    place = {"rank": mesh.at.data, "ranks": mesh.layout.data}
    held_out = [ValidationSet(name, ToyLoader(config, **place, seed=seed), 3) for name, seed in (("a", 1), ("b", 2))]
    hooks = hooks_of(
        HookContext(
            config,
            flops_per_token=lambda step: 1000.0,
            validation=held_out,
            saver=saver,
            contents=lambda step: (["fragments"], step),
            inspect=options.get("inspect", lambda _: []),
            generate=options.get("generate"),
            facts={"data": "toy"},
        )
    )
    trainer = Trainer(
        config,
        engine=engine,
        loader=ToyLoader(config, **place),
        mesh=mesh,
        hooks=[*hooks, *more],
        sinks=sinks,
        ledger=ledger,
        start=start,
        tokens=lambda steps: steps * config.training.global_batch_size * config.training.sequence_length,
    )
    trainer.saver = saver
    return trainer


class _Elsewhere:
    type = "accelerator"


def elsewhere(trainer: Trainer) -> None:
    """Make the trainer treat its numbers as an accelerator's, which are read a step later."""
    trainer.exchange.device = _Elsewhere()
    trainer.exchange._vector = lambda values: torch.tensor([float(value) for value in values], dtype=torch.float64)


def run(trainer: Trainer) -> Outcome:
    try:
        return trainer.run()
    finally:
        trainer.sinks.close()
        if trainer.ledger is not None:
            trainer.ledger.close()
