"""The published RWKV files (`.pth`): a dict of tensors with the names of the authors' code.

RWKV-5 (x052), RWKV-6 (x060) and RWKV-7 (x070). The links are the Hugging Face tables'. Vectors have the shapes
[1, 1, C] and [heads, head_dim] there, and matrices of low rank are [inputs, outputs]."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config, resolve
from megatron.config.file_access import replacing
from megatron.config.resolution import Resolved, combine
from megatron.config.source.layers import ConfigSource as Values
from megatron.kinds.common.links import Link
from megatron.kinds.rwkv import hf as rwkv
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of

from ..format.container import load_tensors
from ..format.errors import CheckpointError
from ..read.reader import Checkpoint
from .architecture import Architecture, uniform
from .config import differences
from .convert import ConversionStep, plan, to_hf
from .export import TYPES, config_of, tensor_reader, type_of
from .importer import write

_OURS, _THEIRS = "layers.{n}", rwkv.PUBLISHED
_OUTSIDE = (
    Link("embedding.tokens", "emb"),
    Link("embedding.norm", "blocks.0.ln0"),
    Link(f"{_OURS}.mixer_norm", f"{_THEIRS}.ln1"),
    Link(f"{_OURS}.ffn_norm", f"{_THEIRS}.ln2"),
    Link("final_norm", "ln_out"),
    Link("head", "head"),
)
LINKS = {"rwkv5": rwkv.published_rwkv5(), "rwkv6": rwkv.published_rwkv6(), "rwkv7": rwkv.published_rwkv7()}


def kind_of(config: Config) -> str:
    """The mixer of all layers, with the channel mix of the same name.

    Raises:
        CheckpointError: the layers have other kinds.
    """
    blocks = {str(block) for block in config.model.blocks}
    for kind in LINKS:
        if blocks == {f"{kind}/{kind}_ffn"}:
            return kind
    known = " or ".join(f"{kind}/{kind}_ffn" for kind in LINKS)
    raise CheckpointError(config.model.layers, f"a published RWKV file has {known} in every layer")


def architecture_of(config: Config) -> Architecture:
    """The tables of the published file of a model."""
    kind = kind_of(config)
    return Architecture(
        kind,
        (*_OUTSIDE, *LINKS[kind]),
        uniform(f"{kind}/{kind}_ffn"),
        prefix="",
        buffers=(r"blocks\.0\.att\.v[012]",),  # unused tensors of the first layer
        own_class=f"a published {kind} file",
    )


def steps_of(config: Config) -> list[ConversionStep]:
    """The steps that convert a model with this configuration, in either direction.

    Raises:
        CheckpointError: a tensor has no counterpart in published files.
    """
    names = [logical_of(parameter).name for parameter in build_model(config, device="meta").parameters()]
    return plan(architecture_of(config), names, config.model)


class Published:
    """The tensors of a published file.

    Raises:
        CheckpointError: it cannot be read, or has other objects than tensors. No code in it is run.
    """

    def __init__(self, path: Path):
        tensors = load_tensors(path)
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise CheckpointError(path, "it contains objects that are not tensors")
        self.path, self.tensors = path, tensors
        self.types = {name: tensor.dtype for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.places = dict.fromkeys(tensors, path)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def size(self, name: str, dim: int) -> int:
        """Size of a dimension. CheckpointError without such a tensor or dimension."""
        shape = self.shapes.get(name, ())
        if len(shape) <= dim:
            raise CheckpointError(self.path, f"{name} of {dim + 1} dimensions or more is missing")
        return shape[dim]

    def model(self) -> dict[str, Any]:
        """Our `model` section: the kind from names, sizes from shapes."""
        kinds = {"rwkv7": "r_k", "rwkv6": "time_maa_x", "rwkv5": "time_mix_g"}
        kind = next((kind for kind, name in kinds.items() if f"blocks.0.att.{name}" in self.shapes), None)
        if kind is None:
            raise CheckpointError(
                self.path, f"it is none of {', '.join(kinds)}: block 0 has no att.{', att.'.join(kinds.values())}"
            )
        layers = 1 + max(int(match[1]) for name in self.shapes if (match := re.match(r"blocks\.(\d+)\.", name)))
        att, heads = "blocks.0.att", "r_k" if kind == "rwkv7" else "time_faaaa"
        options: dict[str, Any] = {"head_dim": self.size(f"{att}.{heads}", 1)}
        if kind == "rwkv7":
            ranks = {"decay": "w1", "rate": "a1", "gate": "g1"}
            options |= {f"{ours}_rank": self.size(f"{att}.{theirs}", 1) for ours, theirs in ranks.items()}
            if layers > 1:
                options["value_rank"] = self.size("blocks.1.att.v1", 1)
        if kind == "rwkv6":
            options |= {
                "mix_rank": self.size(f"{att}.time_maa_w2", 1),
                "decay_rank": self.size(f"{att}.time_decay_w1", 1),
            }
        return {
            "layers": f"({kind}/{kind}_ffn) x{layers}",
            "hidden_size": self.size("emb.weight", 1),
            "vocab_size": self.size("emb.weight", 0),
            "embedding": {"norm": True},
            "init": {"embedding": "tiny_uniform", "head": "half_orthogonal"},
            kind: options,
            f"{kind}_ffn": {"hidden_size": self.size("blocks.0.ffn.key.weight", 0)},
        }


def import_published(
    path: Path, out: Path, *, sequence_length: int, progress: Callable[[str], None] = lambda text: None
) -> Resolved:
    """Write a published file as a checkpoint of step 0, as `import_model` does with a Hugging Face folder."""
    if out.exists():
        raise CheckpointError(out, "it exists already")
    source = Published(path)
    values = {
        "model": source.model(),
        "training": {"steps": 0, "sequence_length": sequence_length},
        "tokenizer": {"type": "none"},
    }
    resolved = combine([Values(values)], ranks=1, check_inputs=False, name=path.stem)
    write(source, architecture_of(resolved.config), resolved, out, progress)
    return resolved


def export_published(checkpoint: Checkpoint, out: Path, *, dtype: str | None = None) -> torch.dtype:
    """Write a checkpoint of any layout as a published file. All of it is in memory at once.

    Args:
        dtype: one of `export.TYPES`. None keeps the type of the weights.

    Raises:
        CheckpointError: published files do not have the model's layers or options, or `out` exists.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    config = config_of(checkpoint)
    if problems := _differences(config):
        raise CheckpointError(out, problems)
    wanted = TYPES[dtype] if dtype else type_of(checkpoint)
    tensors = {name: tensor.clone() for name, tensor in to_hf(steps_of(config), tensor_reader(checkpoint, wanted))}
    with replacing(out) as file:
        torch.save(tensors, file)
    return wanted


def _differences(config: Config) -> list[str]:
    kind = kind_of(config)
    blocks = config.model.blocks
    values = {
        "model": {
            "layers": f"({kind}/{kind}_ffn) x{len(blocks)}",
            "hidden_size": config.model.hidden_size,
            "vocab_size": config.model.vocab_size,
            "embedding": {"norm": True},
            kind: {**getattr(config.model, kind).model_dump(), "norm_epsilon": 64e-5},
            f"{kind}_ffn": getattr(config.model, f"{kind}_ffn").model_dump(),
        },
        "training": {"steps": 0, "sequence_length": config.training.sequence_length},
    }
    return differences(config.model, resolve(values).model)
