"""The weights under adapters: their hash, the lengths of their rows, and their sum with the adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from megatron.checkpoint import WEIGHT, Checkpoint, CheckpointError, Communicator, Fragment, FragmentSpec
from megatron.checkpoint.read.logical import TensorStream
from megatron.parallel.layout.shard import LogicalTensor

from .layers import MAGNITUDE, A, B, delta_of, layer_of
from .options import AdapterSection


def hash_of(checkpoint: Checkpoint, communicator: Communicator) -> str:
    """SHA-256 of all weights, by name: the same for whatever layout wrote them. The ranks share the work."""
    names = sorted(name for name in checkpoint.tensors if checkpoint.has_weights(name))
    own: dict[str, str] = {}
    with TensorStream(checkpoint) as stream:
        for name in names[communicator.rank :: communicator.size]:
            own[name] = stream.sha256(name, WEIGHT)
    found = {name: digest for each in communicator.gather(own) for name, digest in each.items()}
    return hashlib.sha256("\n".join(f"{name} {found[name]}" for name in names).encode()).hexdigest()


def fill_lengths(magnitudes: Iterable[Fragment], base: Checkpoint, dtype: torch.dtype) -> None:
    """Set fragments of DoRA's magnitudes to the lengths of the base's rows.

    They are sums of the same numbers in the same order on every layout.

    Args:
        dtype: of the weights in the run, whose rows are meant.
    """
    for each in magnitudes:
        weight = base.tensors.get(f"{layer_of(each.tensor.name)}.weight")
        if weight is None:
            raise CheckpointError(base.path, f"it has no weights of {layer_of(each.tensor.name)}")
        rows = whole(base, weight).to(dtype).double()
        own = [rows[span.start : span.stop] for span in each.tensor.spans(each.tensor_rank, each.tensor_ranks)[0]]
        lengths = torch.cat(own)[each.start : each.start + each.data.numel()].square().sum(1).sqrt()
        each.data.copy_(lengths)


def whole(checkpoint: Checkpoint, tensor: LogicalTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A whole logical tensor, in the type that it is stored in, or another."""
    return checkpoint.read(FragmentSpec.whole(tensor, WEIGHT), dtype).data.view(tensor.shape)


def adapted_layers(adapters: Checkpoint) -> Iterator[str]:
    """Names of the linear layers that a checkpoint has adapters for."""
    yield from (layer_of(name) for name in adapters.tensors if name.endswith(A) and adapters.has_weights(name))


def merged(base: Checkpoint, adapters: Checkpoint, layer: str, options: AdapterSection) -> torch.Tensor:
    """The weight of a layer with its adapter, [N, K] in fp32: W + s B A, with its rows of DoRA's lengths."""
    tensor = base.tensors[f"{layer}.weight"]
    a, b = (whole(adapters, adapters.tensors[f"{layer}.{end}"], torch.float32) for end in (A, B))
    total = whole(base, tensor).float() + delta_of(a, b, tensor.matrices or (tensor.shape[0],), options.scale)
    name = f"{layer}.{MAGNITUDE}"
    if name not in adapters.tensors:
        return total
    lengths = whole(adapters, adapters.tensors[name], torch.float32)
    return total * (lengths / total.square().sum(1).sqrt()).unsqueeze(1)
