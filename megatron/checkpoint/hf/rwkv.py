"""The layout of the published RWKV files (`.pth`): one dict of tensors, under the names of the authors' code.

RWKV-5 (x052), RWKV-6 (x060) and RWKV-7 (x070). Links are those of the Hugging Face tables; vectors have the shapes
[1, 1, C] and [heads, head_dim] there, and matrices of low rank are [inputs, outputs].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.pattern import parse
from megatron.model.stack import build_model

from ..errors import CheckpointError
from .architecture import Architecture
from .config import dims_of
from .convert import Step, plan
from .links import Dims, Link, Same, Transposed

_OURS, _THEIRS = "layers.{n}", "blocks.{n}"


@dataclass(frozen=True)
class Wide:
    """Our rows of vectors are their tensors [1, 1, C], one each; one row may be a vector of ours."""

    rows: bool = True

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [row.view(1, 1, -1) for row in (ours[0] if self.rows else ours)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        flat = [each.flatten() for each in theirs]
        return [torch.stack(flat)] if self.rows else flat


@dataclass(frozen=True)
class ByHead:
    """Our vector is their [heads, head_dim]."""

    head_dim: int

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [ours[0].view(-1, self.head_dim)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return [theirs[0].flatten()]


def _outside() -> tuple[Link, ...]:
    return (
        Link("embedding.tokens", "emb"),
        Link("embedding.norm", "blocks.0.ln0"),
        Link(f"{_OURS}.mixer_norm", f"{_THEIRS}.ln1"),
        Link(f"{_OURS}.ffn_norm", f"{_THEIRS}.ln2"),
        Link("final_norm", "ln_out"),
        Link("head", "head"),
    )


def _matrices(mixer: str, ffn: str, *names: str) -> tuple[Link, ...]:
    return (
        *(Link(f"{_OURS}.{mixer}.{name}", f"{_THEIRS}.att.{name}") for name in (*names, "output")),
        Link(f"{_OURS}.{mixer}.norm", f"{_THEIRS}.att.ln_x"),
        *(Link(f"{_OURS}.{ffn}.{name}", f"{_THEIRS}.ffn.{name}") for name in ("key", "value", "receptance")),
    )


def _tensor(ours: str, theirs: str | tuple[str, ...], form) -> Link:
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Link(f"{_OURS}.{ours}", tuple(f"{_THEIRS}.{name}" for name in names), form, suffixes=("",))


def rwkv7(head_dim: int) -> tuple[Link, ...]:
    """The tensors of RWKV-7."""
    low = {"decay": "w", "rate": "a", "blend": "v", "gate": "g"}
    vectors = {"decay_base": "w0", "rate_base": "a0", "blend_base": "v0", "key_scale": "k_k", "rate_scale": "k_a"}
    return (
        *_outside(),
        *_matrices("rwkv7", "rwkv7_ffn", "receptance", "key", "value"),
        _tensor("rwkv7.mix", tuple(f"att.x_{name}" for name in "rwkvag"), Wide()),
        _tensor("rwkv7_ffn.mix", ("ffn.x_k",), Wide()),
        *(_tensor(f"rwkv7.{ours}", f"att.{theirs}", Wide(rows=False)) for ours, theirs in vectors.items()),
        *(_tensor(f"rwkv7.{ours}.{part}.weight", f"att.{theirs}{number}", Transposed())
          for ours, theirs in low.items() for part, number in (("down", 1), ("up", 2))),
        _tensor("rwkv7.bonus", "att.r_k", ByHead(head_dim)),
    )



def rwkv6(head_dim: int) -> tuple[Link, ...]:
    """The tensors of RWKV-6."""
    return (
        *_outside(),
        *_matrices("rwkv6", "rwkv6_ffn", "receptance", "key", "value", "gate"),
        _tensor("rwkv6.mix_all", ("att.time_maa_x",), Wide()),
        _tensor("rwkv6.mix", tuple(f"att.time_maa_{name}" for name in "wkvrg"), Wide()),
        _tensor("rwkv6.mix_down.weight", "att.time_maa_w1", Transposed()),
        _tensor("rwkv6.mix_up", "att.time_maa_w2", Same()),
        _tensor("rwkv6.decay", "att.time_decay", Wide(rows=False)),
        _tensor("rwkv6.move.down.weight", "att.time_decay_w1", Transposed()),
        _tensor("rwkv6.move.up.weight", "att.time_decay_w2", Transposed()),
        _tensor("rwkv6.bonus", "att.time_faaaa", ByHead(head_dim)),
        _tensor("rwkv6_ffn.mix", ("ffn.time_maa_k", "ffn.time_maa_r"), Wide()),
    )


def rwkv5(head_dim: int) -> tuple[Link, ...]:
    """The tensors of RWKV-5."""
    return (
        *_outside(),
        *_matrices("rwkv5", "rwkv5_ffn", "receptance", "key", "value", "gate"),
        _tensor("rwkv5.mix", tuple(f"att.time_mix_{name}" for name in "kvrg"), Wide()),
        _tensor("rwkv5.decay", "att.time_decay", ByHead(head_dim)),
        _tensor("rwkv5.bonus", "att.time_faaaa", ByHead(head_dim)),
        _tensor("rwkv5_ffn.mix", ("ffn.time_mix_k", "ffn.time_mix_r"), Wide()),
    )


LINKS = {"rwkv5": rwkv5, "rwkv6": rwkv6, "rwkv7": rwkv7}


def kind_of(config: Config) -> str:
    """The mixer that all layers have, with the channel mix of the same name.

    Raises:
        CheckpointError: they have others.
    """
    blocks = {str(block) for block in parse(config.model.layers)}
    for kind in LINKS:
        if blocks == {f"{kind}/{kind}_ffn"}:
            return kind
    known = " or ".join(f"{kind}/{kind}_ffn" for kind in LINKS)
    raise CheckpointError(config.model.layers, f"a published RWKV file has {known} in every layer")


def architecture_of(config: Config) -> Architecture:
    """The tables of the published file of a model."""
    kind = kind_of(config)
    return Architecture(
        kind, f"a published {kind} file", LINKS[kind](getattr(config.model, kind).head_dim), fields=(), fixed={},
        prefix="", buffers=(r"blocks\.0\.att\.v[012]",))  # the authors' code makes them in the first layer, too: unused


def steps_of(config: Config) -> list[Step]:
    """The steps that convert a model with this configuration, in either direction.

    Raises:
        CheckpointError: it has something that the published files have not.
    """
    names = [parameter.logical.name for parameter in build_model(config, device="meta").parameters()]
    return plan(architecture_of(config), names, len(parse(config.model.layers)), dims_of(config.model))
