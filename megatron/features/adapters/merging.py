"""A checkpoint of adapters and its base as one checkpoint of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.checkpoint import (
    SOLO,
    WEIGHT,
    Checkpoint,
    CheckpointError,
    FragmentSpec,
    Meta,
    open_checkpoint,
    write_tensors,
)
from megatron.checkpoint.read.reader import ADAPTERS, config_of
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import Config, Resolved, to_yaml
from megatron.config.schema import using_extensions
from megatron.config.tree import thaw
from megatron.model.stack import ModelPlan, build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors
from megatron.parallel.layout.mesh import Mesh
from megatron.training.start.fetch import local_path

from .options import AdapterSection, adapter_of
from .part import adapt, adapted_layers, hash_of, is_adapter, merged, refuse_other_base, whole

if TYPE_CHECKING:
    from megatron.checkpoint.hf.export import Proof


def base_of(adapters: Checkpoint, named: str | None) -> tuple[Checkpoint, Config]:
    """The weights that a checkpoint's adapters belong to, and the configuration of the run that trained these.

    Args:
        named: where the weights are. None: where the run has found them.

    Raises:
        CheckpointError: it has no adapters, or the weights are missing or others.
    """
    kept = adapters.meta.extra.get(ADAPTERS)
    if not isinstance(kept, dict):
        raise CheckpointError(adapters.path, "it has no adapters, but weights themselves: use it as it is")
    config = config_of(adapters, whole=False)
    where = named or config.checkpoint.initialize_from
    if where is None:
        raise CheckpointError(adapters.path, "it does not say where its base is: use --base")
    path = Path(local_path(where, Path(config.checkpoint.dir), SOLO, config))
    base = open_checkpoint(find_checkpoint(path), verify="checksums")
    refuse_other_base(kept.get("base"), hash_of(base, SOLO), base)
    return base, config


def with_adapters(config: Config, adapter: AdapterSection, base: str | None) -> str:
    """The resolved configuration, as text, of a run with the same model, this section and these first weights."""
    values = thaw(config.model_dump())
    values["adapter"] = adapter.model_dump()
    values["checkpoint"]["initialize_from"] = base
    with using_extensions(tuple(config.model.extensions)):
        return to_yaml(Resolved(type(config).model_validate(values), {}))


def merge(
    adapters: Checkpoint,
    base: Checkpoint,
    config: Config,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the sum of base and adapters as a checkpoint of weights, with one tensor in memory at a time.

    The sum is computed in fp32 and then rounded.

    Args:
        dtype: of the weights. None is the type of each tensor of the base.

    Raises:
        CheckpointError: the adapters do not fit the base, or the checkpoint cannot be written.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    layers = {f"{layer}.weight" for layer in adapted_layers(adapters)}
    foreign = sorted(layers - base.tensors.keys())
    if foreign:
        raise CheckpointError(base.path, [f"it has no {name}, which the adapters are for" for name in foreign])
    names = sorted(name for name in base.tensors if base.has_weights(name))
    types = {name: dtype or _stored(base, name) for name in names}
    names.sort(key=lambda name: -types[name].itemsize)

    def values(number: int) -> Iterable[torch.Tensor]:
        name = names[number]
        progress(name)
        if name in layers:
            total = merged(base, adapters, name.removesuffix(".weight"), adapter_of(config))
        else:
            total = whole(base, base.tensors[name])
        yield total.to(types[name]).flatten()

    extra = {name: value for name, value in adapters.meta.extra.items() if name != ADAPTERS}
    text = with_adapters(config, AdapterSection(), None)
    meta = Meta(step=adapters.step, config=text, resumable=False, data=adapters.meta.data, extra=extra)
    return write_tensors(
        out, [(FragmentSpec.whole(base.tensors[name], WEIGHT), types[name]) for name in names], values, meta
    )


def _stored(checkpoint: Checkpoint, name: str) -> torch.dtype:
    source = checkpoint.source(FragmentSpec.whole(checkpoint.tensors[name], WEIGHT))
    assert source is not None  # it has weights of this name
    return checkpoint.stored[name, source]


def prove(adapters: Checkpoint, base: Checkpoint, config: Config, out: Path) -> Proof:
    """Compare the logits of the model with adapters and of the merged checkpoint, both in fp32.

    Rounding of the merged weights to their type is allowed for, as that of each weight once more."""
    from megatron.checkpoint.hf.export import Proof  # transformers is slow to import

    plain = config_of(open_checkpoint(out))
    found = [build_model(plain, dtype=torch.float32, values=False) for _ in range(2)]
    ids = torch.randint(plain.model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    ids = ids[:, : plain.training.sequence_length]
    adapt(found[0], ModelPlan(config, Mesh.single(), dtype=torch.float32))
    with torch.no_grad():
        merged_weights = open_checkpoint(out)
        for tensor in stored_tensors(found[1]):
            tensor.copy_(_read(merged_weights, logical_of(tensor).name))
        for tensor in stored_tensors(found[0]):
            name = logical_of(tensor).name
            tensor.copy_(_read(adapters if is_adapter(name) else base, name))
        own, theirs = (model.eval().logits(ids) for model in found)
        generator, kinds = torch.Generator().manual_seed(0), {_stored(merged_weights, name) for name in base.tensors}
        size = max(torch.finfo(each).eps for each in kinds)
        for tensor in stored_tensors(found[1]):
            tensor.mul_(1 + size * (2 * torch.randint(2, tensor.shape, generator=generator) - 1))
        rounding = (found[1].logits(ids) - theirs).abs().max().item()
    same = own.argmax(-1).equal(theirs.argmax(-1))
    return Proof((own - theirs).abs().max().item(), own.abs().max().item(), rounding, same)


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return whole(checkpoint, checkpoint.tensors[name], torch.float32)
