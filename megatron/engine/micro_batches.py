"""The micro-batches of a step on this rank, and sums over its labels.

A batch has whole samples. Where ranks share the tokens of a sample, only `micro_batches` cuts them. Shapes: B
samples, s positions of this rank, K groups of a label."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.model.multi_token import FurtherLabels, further_labels
from megatron.model.stream import StreamForm
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.precision import to_device


@dataclass
class LossAccumulator:
    """Sums over this rank's labels: weighted cross-entropy, and weight."""

    loss: Tensor
    weight: Tensor
    scale: Tensor | float = 1.0  # factor of the weights
    groups: Iterator[Tensor] | None = None  # groups of the labels of each further micro-batch, int64 [B, s, K]
    sums: Tensor | None = None  # by group, as `protocol.LabelGroups.sums`

    @classmethod
    def zero(cls, device: torch.device) -> "LossAccumulator":
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, zero.clone())

    def add(self, ce_BS: Tensor, weights_BS: Tensor) -> None:
        for name in ("mean", "labels"):
            vars(self).pop(name, None)
        losses_BS = ce_BS.detach() * weights_BS
        self.loss += losses_BS.sum()
        self.weight += weights_BS.sum()
        if self.groups is not None and self.sums is not None:
            both = torch.stack([losses_BS.flatten(), weights_BS.flatten()]).double()
            for ids_BS in next(self.groups).unbind(-1):
                self.sums.index_add_(1, ids_BS.flatten(), both)

    @cached_property
    def mean(self) -> Tensor:
        return self.loss / self.weight

    @cached_property
    def labels(self) -> Tensor:
        """Number of labels, or the sum of their own weights."""
        return self.weight / self.scale


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass, with the s positions that this rank has of each sample: tokens, labels int64 [B, s] and
    weights fp32 [B, s]. `extras` are the form's further inputs, `further` labels of further tokens if any are
    predicted, and `columns` further numbers per label, [B, s], by name."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    extras: dict[str, Tensor]
    further: FurtherLabels | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)


def inputs_of(micro: MicroBatch, form: StreamForm) -> dict[str, Tensor]:
    """Inputs of a micro-batch that the form has."""
    return {name: micro.extras[name] for name in form.optional}


def micro_batches(
    batch: StepBatch, form: StreamForm, scale: Tensor | float, device: torch.device, group: ContextGroup, depth: int = 0
) -> Iterator[MicroBatch]:
    """The micro-batches of a step on `device`: this rank's part of every sample, every label's weight times `scale`.

    Args:
        depth: number of further tokens that are predicted.
    """

    def own(whole: Tensor) -> Tensor:
        return group.cut(to_device(whole, device), 2)

    both = to_device(batch.tokens, device)
    tokens, labels = own(both[..., :-1]), own(both[..., 1:])
    mask = None if batch.loss_mask is None else own(batch.loss_mask)
    positions = batch.positions
    if form.positions and positions is None:  # the place in the sample, not in this rank's part
        positions = torch.arange(batch.inputs.shape[-1], dtype=torch.int32).expand(batch.inputs.shape)
    named = {"positions": positions, "documents": batch.documents}
    wanted = {name: named[name] for name in form.optional if name != "samples"}
    missing = [name for name, each in wanted.items() if each is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}, which the model reads")
    extras = {name: own(each) for name, each in wanted.items() if each is not None}
    if form.samples:
        extras["samples"] = to_device(batch.sample_ids, device)
    columns = {name: own(each) for name, each in batch.columns.items()}
    for index in range(tokens.shape[0]):
        weights = torch.ones(labels.shape[1:], device=device) if mask is None else mask[index]
        named_here = {name: extras[name][index] for name in extras}
        further = _further(batch, index, scale, device, group, depth) if depth else None
        numbers = {name: each[index] for name, each in columns.items()}
        yield MicroBatch(tokens[index], labels[index], weights * scale, named_here, further, numbers)


def _further(
    batch: StepBatch, index: int, scale: Tensor | float, device: torch.device, context: ContextGroup, depth: int
) -> FurtherLabels:
    """Labels of further tokens of a micro-batch: made from whole samples, then cut."""

    def there(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else to_device(whole[index], device)

    labels, mask = to_device(batch.labels[index], device), there(batch.loss_mask)
    weights = torch.ones(labels.shape, device=device) if mask is None else mask
    whole = further_labels(labels, weights * scale, there(batch.documents), depth)
    return FurtherLabels(*(context.cut(each, 2) for each in whole))
