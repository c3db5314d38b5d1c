"""The teacher of a run: a frozen model on the student's layout, in the student's precision.

Tensor and context parallel ranks share it as they share the student, and each has its own part of the same tokens.
Replicas hold it whole under every ZeRO stage: it has no optimizer state to share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import SOLO, WEIGHT, Checkpoint, Communicator, open_checkpoint
from megatron.checkpoint.format.fragment import MASTER, weight_fragments
from megatron.config import Config, resolve
from megatron.config.problems import UserError
from megatron.config.teacher import on_layout
from megatron.model.embedding_and_head import Taught
from megatron.model.stack import ModelPlan, make_model
from megatron.model.stream import StreamForm
from megatron.objectives.named import objective_of
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh

from ..base import BaseEngine
from ..micro_batches import MicroBatch, inputs_of
from ..part import EnginePart, Update
from ..protocol import Arriving

DIVERGENCE = "teacher_divergence"


class Teacher(EnginePart):
    """The model that a run learns from. It has memory for its weights, and `load` fills it."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str = "cpu"):
        assert config.objective.teacher is not None
        self.path = config.objective.teacher
        self.config = resolve(on_layout(config), ranks=mesh.layout.world_size)
        self.model = make_model(ModelPlan(self.config, mesh, device, values=False)).eval().requires_grad_(False)
        self.form = self.model.form
        self.ready, self._replicas = False, mesh.replicas
        self._divergence: Tensor | None = None  # weighted, of this rank's labels. None before the first

    @classmethod
    def of(cls, config: Config, mesh: Mesh, device: torch.device | str = "cpu") -> "Teacher | None":
        """The teacher of a run, without its weights. None where the objective has none.

        Raises:
            UserError: its checkpoint cannot be read, or its model does not fit the run.
        """
        if objective_of(config).teacher is None:
            if config.objective.teacher is not None:
                raise UserError(f"objective.teacher is given, and {config.objective.type} learns from none")
            return None
        if config.objective.teacher is None:
            raise UserError(f"objective.teacher must be given: {config.objective.type} learns from one")
        return cls(config, mesh, device)

    def load(self, communicator: Communicator = SOLO) -> Checkpoint:
        """Read the weights from its checkpoint, of any layout. Every rank calls it.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: on every rank, if it is damaged or does not fit.
        """
        checkpoint = open_checkpoint(self.path, communicator=communicator)
        targets = weight_fragments(self.model)
        checkpoint.check([each.spec for each in targets], communicator=communicator, states={MASTER, WEIGHT})
        checkpoint.read_into(targets, cast={WEIGHT}, communicator=communicator)
        self.ready = True
        return checkpoint

    def attach(self, engine: BaseEngine) -> None:
        engine.batch_form = self._widened(engine.form)

    def before_step(self, step: int, micro_batches: int) -> None:
        self._divergence = None

    @torch.no_grad()
    def forward_inputs(self, micro: MicroBatch) -> Mapping[str, Any]:
        """The teacher's result for a micro-batch.

        Raises:
            RuntimeError: its weights were not loaded.
        """
        if not self.ready:
            raise RuntimeError("the teacher has no weights: load them first")
        stream = self.model.stream(micro.tokens, **inputs_of(micro, self.form))
        return {"teacher": Taught(self.model.head, self.model.head.read(stream))}

    def after_micro_batch(self, ce_BS: Tensor, weights_BS: Tensor, *more: Tensor) -> None:
        own = (more[0] * weights_BS).sum(dtype=torch.float64)
        self._divergence = own if self._divergence is None else self._divergence + own

    def after_update(self, update: Update) -> Mapping[str, Any]:
        """The mean divergence over the labels of all ranks, by weight."""
        assert self._divergence is not None
        both = all_reduce(torch.stack([self._divergence, update.weight]), self._replicas)
        return {DIVERGENCE: Arriving(both[0] / both[1])}

    def _widened(self, form: StreamForm) -> StreamForm:
        own = self.form
        return replace(
            form,
            positions=form.positions or own.positions,
            documents=form.documents or own.documents,
            samples=form.samples or own.samples,
        )
