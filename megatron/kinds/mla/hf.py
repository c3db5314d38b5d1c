"""The tensors of multi-head latent attention by the names of transformers' models (DeepSeek-V2 and V3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention.hf import halves, neighbours
from megatron.kinds.common.links import SAME, Form, Link, one


def _rotated(kept: int, turned: int, first: bool) -> Form:
    """Of each head their rows are `kept` channels, then `turned` ones, in pairs of neighbours.

    Ours are the same, with the two channels of a pair half of the turned ones apart.

    Args:
        first: whether the turned ones come first here.
    """
    widths = [turned, kept] if first else [kept, turned]

    def to_hf(ours: Tensor) -> Tensor:
        parts = ours.unflatten(0, (-1, kept + turned)).split(widths, 1)
        return torch.cat([parts[first], neighbours(parts[not first])], 1).flatten(0, 1)

    def from_hf(theirs: Tensor) -> Tensor:
        before, pairs = theirs.unflatten(0, (-1, kept + turned)).split([kept, turned], 1)
        return torch.cat([halves(pairs), before] if first else [before, halves(pairs)], 1).flatten(0, 1)

    return one(to_hf, from_hf)


def _channels(kind: str, kept: str) -> Callable[[ModelSection], Form]:
    """Queries, whose heads keep nope_dim channels, or the compressed vector, which keeps kv_rank."""

    def form(model: ModelSection) -> Form:
        own = getattr(model, kind)
        return _rotated(getattr(own, kept), own.rope_dim, first=kept == "nope_dim")

    return form


def queries(theirs: str, compressed: bool, kind: str = "mla") -> tuple[Link, ...]:
    """The queries of mixer `theirs`, whose matrix has another name where it reads the stream."""
    ours = f"layers.{{n}}.{kind}"
    if not compressed:
        return (Link(f"{ours}.query", f"{theirs}.q_proj", _channels(kind, "nope_dim")),)
    return (
        Link(f"{ours}.query_down", f"{theirs}.q_a_proj"),
        Link(f"{ours}.query_norm", f"{theirs}.q_a_layernorm"),
        Link(f"{ours}.query", f"{theirs}.q_b_proj", _channels(kind, "nope_dim")),
    )


def mixer(theirs: str, kind: str = "mla") -> tuple[Link, ...]:
    """The mixer of module `theirs`, without its queries. `kind` is ours."""
    ours = f"layers.{{n}}.{kind}"
    return (
        Link(f"{ours}.kv_down", f"{theirs}.kv_a_proj_with_mqa", _channels(kind, "kv_rank")),
        Link(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm"),
        Link(f"{ours}.key_value", f"{theirs}.kv_b_proj"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


def _index(model: ModelSection) -> Form:
    """The turned channels of a head come first. They are pairs of neighbours there, and half a turn apart here."""
    own = model.dsa

    def moved(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        first, kept = tensor.unflatten(0, (-1, own.index_dim)).split([own.rope_dim, own.index_dim - own.rope_dim], 1)
        return torch.cat([move(first), kept], 1).flatten(0, 1)

    return one(lambda ours: moved(ours, neighbours), lambda theirs: moved(theirs, halves))


def indexer(theirs: str, pairs: bool = False) -> tuple[Link, ...]:
    """The indexer of dsa, module `theirs`.

    Args:
        pairs: whether positions turn neighbours there.
    """
    ours, form = "layers.{n}.dsa.indexer", _index if pairs else SAME
    return (
        Link(f"{ours}.query", f"{theirs}.wq_b", form),
        Link(f"{ours}.key", f"{theirs}.wk", form),
        Link(f"{ours}.key_norm", f"{theirs}.k_norm", form),
        Link(f"{ours}.weigh", f"{theirs}.weights_proj"),
    )
