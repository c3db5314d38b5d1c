"""Costs of a model of transformers, for plans: the class without embedding and head, and without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.transformers.options import TransformersOptions
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import LogicalTensor, Role

from .build import hf_model
from .facts import facts_of
from .probe import output_of

# Korthikanti et al. 2022: 34 bytes per token and channel of a layer in 16-bit training, attention without its scores.
ACTIVATIONS = 17


def mark(model: nn.Module, head: nn.Module, fp32: tuple[str, ...] = ()) -> None:
    """Give each parameter its logical tensor. Its name is that of transformers.

    Args:
        head: the output layer.
        fp32: parts of the names of parameters that stay in fp32.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            role = Role.EMBEDDING
        elif parameter is getattr(head, "weight", None):
            role = Role.HEAD
        elif parameter.ndim < 2:
            role = Role.BIAS if name.endswith("bias") else Role.NORM
        else:
            role = Role.HIDDEN if parameter.ndim < 4 and "conv" not in name else Role.CONVOLUTION
        shape = tuple(parameter.shape)
        stacked = (shape[1],) if role is Role.HIDDEN and parameter.ndim == 3 else None
        marks: Any = parameter
        wide = any(each in name for each in fp32)
        marks.logical, marks.cut = LogicalTensor(name, shape, role, keep_fp32=wide, matrices=stacked), (0, 1)


class Trunk(nn.Module):
    """The parameters of the class that are neither embedding nor head."""

    def __init__(
        self, make: ParameterFactory, model: ModelSection, options: TransformersOptions, init: Initialisation
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            whole = hf_model(options.model_dump(), values=False)
        head = output_of(whole)
        mark(whole, head)
        outside = {id(head.weight), id(getattr(whole.get_input_embeddings(), "weight", None))}
        self.parts = nn.ParameterList(each for each in whole.parameters() if id(each) not in outside)
        for each in self.parts:
            each.data = each.data.to(make.dtype)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        raise NotImplementedError("a plan has the sizes of these parameters, and the whole model computes with them")

    @staticmethod
    def counts(model: ModelSection, options: TransformersOptions, sequence_length: int) -> Counts:
        """Estimates but for the parameters: attention and activations as in a dense transformer of this width."""
        facts, H = facts_of(options.model_dump()), model.hidden_size
        outside = (1 if facts.tied else 2) * facts.vocab_size * H
        return Counts(
            parameters=facts.parameters - outside,
            flops=2 * facts.matrices + 4 * facts.layers * sequence_length * H,
            activations=ACTIVATIONS * facts.layers * H,
            products=facts.layers * 8 * H,
            idle=facts.idle,
        )
