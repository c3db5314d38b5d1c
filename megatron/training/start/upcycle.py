"""Weights of one architecture for another, tensor by tensor: a dense model's MLP as each of a mixture's experts.

`checkpoint.initialize_map` names the checkpoint's tensor for tensors that the checkpoint does not have ("sparse
upcycling", Komatsuzaki et al. 2023):
* of the same shape: it is copied.
* [E, ...] from one without the experts' dimension: every expert starts equal.
* [E, ...] from one that is g times as wide: expert e starts as the slice e mod g of its width. So g consecutive experts
are together the dense layer.
* `new`: the tensor keeps its initial values.

`checkpoint.initialize_layers` names the checkpoint's block that each of ours starts as, for deeper models (stacked:
Gong et al. 2019 and Du et al. 2024, arXiv 2405.15319). A block that starts as `identity` keeps its initial values,
but the matrices that write to the stream are 0. The model then computes the same as without the block, and learns
from there (Shen et al. 2022, arXiv 2203.06211)."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor

from megatron.checkpoint import Checkpoint, Fragment, FragmentSpec
from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.format.fragment import WEIGHT
from megatron.checkpoint.read.reader import config_of
from megatron.config import Config
from megatron.config.sections.data import TokenizerSection
from megatron.data.errors import DataError
from megatron.data.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron.parallel.layout.shard import LogicalTensor, Role

NEW, IDENTITY = "new", "identity"


def origin_of(name: str, mapping: Mapping[str, str]) -> str | None:
    """The stored tensor that one of ours is made from, `new`, or None where the map has no entry.

    Args:
        mapping: patterns of our names -> patterns of stored ones. The n-th `*` of both (a word between dots) is the
            same.
    """
    for ours, theirs in mapping.items():
        match = re.fullmatch(re.escape(ours).replace(r"\*", r"([^.]+)"), name)
        if match:
            words = (*match.groups(), "")
            return "".join(piece + word for piece, word in zip(theirs.split("*"), words)) if "*" in theirs else theirs
    return None


def of_layer(tensor: LogicalTensor, layers: Sequence[int | str]) -> str | None:
    """The stored tensor that one of a block starts as by `initialize_layers`, `identity`, or None without an entry."""
    found = re.fullmatch(r"layers\.(\d+)(\..*)", tensor.name)
    if not layers or not found:
        return None
    source = layers[int(found[1])]
    return IDENTITY if source == IDENTITY else f"layers.{source}{found[2]}"


def mapped(
    checkpoint: Checkpoint, targets: Iterable[Fragment], mapping: Mapping[str, str], layers: Sequence[int | str] = ()
) -> tuple[list[Fragment], list[tuple[Fragment, LogicalTensor]]]:
    """(targets without an entry in map and list, targets that are made from a stored tensor, with it). New ones and
    blocks that start as the identity are neither.

    Raises:
        CheckpointError: a stored tensor that the map or the list names is missing.
    """
    rest, made = [], []
    for target in targets:
        origin = origin_of(target.tensor.name, mapping) or of_layer(target.tensor, layers)
        if origin is None:
            rest.append(target)
        elif origin in checkpoint.tensors:
            made.append((target, checkpoint.tensors[origin]))
        elif origin == IDENTITY:
            if target.tensor.role is Role.OUTPUT:
                target.data.zero_()
        elif origin != NEW:
            said = "initialize_map or initialize_layers"
            raise CheckpointError(
                checkpoint.path, f"it has no {origin}, which checkpoint.{said} names for {target.tensor.name}"
            )
    return rest, made


def upcycle(checkpoint: Checkpoint, made: Iterable[tuple[Fragment, LogicalTensor]]) -> None:
    """Fill the targets that `mapped` found. One stored tensor is in memory at a time.

    Raises:
        CheckpointError: a target cannot be made from its tensor.
    """
    last: tuple[str, Tensor] | None = None
    for target, origin in made:
        if last is None or origin.name != last[0]:
            stored = checkpoint.read(FragmentSpec.whole(origin, WEIGHT), torch.float32).data
            last = origin.name, stored.view(origin.shape)
        fill(target, last[1], checkpoint.path)


def fill(target: Fragment, dense: Tensor, source: object) -> None:
    """Write this range of a shard of the target's tensor, made from the stored tensor `dense`."""
    tensor = target.tensor
    if tuple(dense.shape) == tensor.shape:
        flat = shard_of(dense, tensor, 0, target).reshape(-1)
        target.data.copy_(flat[target.start : target.start + len(target.data)])
        return
    block = prod(tensor.local_shape(target.tensor_rank, target.tensor_ranks)[1:])  # elements of one expert
    first, last = target.start // block, -(-(target.start + len(target.data)) // block)
    for expert in range(first, last):
        own = shard_of(_expert(dense, tensor, expert, source), tensor, 1, target).reshape(-1)
        begin, end = max(target.start, expert * block), min(target.start + len(target.data), (expert + 1) * block)
        target.data[begin - target.start : end - target.start] = own[begin - expert * block : end - expert * block]


def _expert(dense: Tensor, tensor: LogicalTensor, expert: int, source: object) -> Tensor:
    """Start of one expert of `tensor`, of the shape [...] without the experts' dimension."""
    shape = tensor.shape[1:]
    if tuple(dense.shape) == shape:
        return dense
    if len(dense.shape) == len(shape) and tensor.shard is not None:
        dim = tensor.shard.dim - 1
        parts = tensor.shard.parts or (shape[dim],)
        finer, left = divmod(dense.shape[dim], shape[dim])
        others = [size for place, size in enumerate(dense.shape) if place != dim]
        if not left and others == [size for place, size in enumerate(shape) if place != dim]:
            slices = [part.chunk(finer, dim)[expert % finer] for part in dense.chunk(len(parts), dim)]
            return torch.cat(slices, dim)
    raise CheckpointError(source, f"{tensor.name} {tensor.shape} cannot be made of a tensor {tuple(dense.shape)}")


def shard_of(whole: Tensor, tensor: LogicalTensor, skipped: int, target: Fragment) -> Tensor:
    """The target's tensor parallel shard of a whole tensor that lacks the first `skipped` dimensions."""
    for dim, spans in enumerate(tensor.spans(target.tensor_rank, target.tensor_ranks)[skipped:]):
        whole = torch.cat([whole.narrow(dim, span.start, span.length) for span in spans], dim)
    return whole


TOKENS, HEAD = "embedding.tokens.weight", ("head.weight", "head.bias")
SAME, MEAN, INITIAL = "same", "mean", "initial"


def extended(
    checkpoint: Checkpoint, targets: Iterable[Fragment], config: Config, log: Callable[[str], None]
) -> tuple[list[Fragment], list[tuple[Fragment, LogicalTensor]], int]:
    """(targets that are read as they are, targets with new rows and the stored tensor of each, number of known rows).

    Raises:
        CheckpointError: a token has another id than in the weights' tokenizer, or the vocabulary is smaller.
    """
    rest: list[Fragment] = []
    made: list[tuple[Fragment, LogicalTensor]] = []
    if config.checkpoint.initialize_vocabulary == SAME or TOKENS not in checkpoint.tensors:
        return list(targets), made, 0
    stored = checkpoint.tensors[TOKENS].shape[0]
    known = min(stored, _known_tokens(checkpoint, config, log) or stored)
    if config.model.vocab_size < known:
        raise CheckpointError(
            checkpoint.path,
            f"it has {known} tokens, and model.vocab_size is {config.model.vocab_size}: "
            "rows can be added, not taken away",
        )
    for target in targets:
        table = target.tensor.role is Role.EMBEDDING or target.tensor.name in HEAD  # blocks may have tables, too
        if table and target.tensor.name in checkpoint.tensors:
            made.append((target, checkpoint.tensors[target.tensor.name]))
        else:
            rest.append(target)
    how = "the mean of the others" if config.checkpoint.initialize_vocabulary == MEAN else "this run's initial values"
    log(f"{known} rows of the vocabulary are kept, and the other {config.model.vocab_size - known} start as {how}")
    return rest, made, known


def extend(checkpoint: Checkpoint, made: Iterable[tuple[Fragment, LogicalTensor]], known: int, mean: bool) -> None:
    """Fill the targets that `extended` found. One stored table is in memory at a time."""
    last = ""
    table = kept = torch.empty(0)
    for target, origin in made:
        if origin.name != last:
            stored = checkpoint.read(FragmentSpec.whole(origin, WEIGHT), torch.float32).data.view(origin.shape)
            last, table = origin.name, stored.new_zeros(target.tensor.shape)
            kept = torch.ones(target.tensor.shape, dtype=torch.bool)
            table[:known] = stored[:known]
            if mean:
                table[known:] = stored[:known].double().mean(0).float()
            else:
                kept[known:] = False
        stop = target.start + len(target.data)
        values = shard_of(table, target.tensor, 0, target).reshape(-1)[target.start : stop]
        mask = shard_of(kept, target.tensor, 0, target).reshape(-1)[target.start : stop].to(target.data.device)
        target.data.copy_(torch.where(mask, values.to(target.data), target.data))


def _ids(section: TokenizerSection) -> dict[str, int]:
    return cast(HuggingFaceTokenizer, build_tokenizer(section)).backend.get_vocab()


def _known_tokens(checkpoint: Checkpoint, config: Config, log: Callable[[str], None]) -> int | None:
    """Number of the checkpoint's rows with a token. None if its tokenizer cannot be read."""
    before = config_of(checkpoint).tokenizer
    now = config.tokenizer
    if (before.type, before.path) == (now.type, now.path) and before.type != "huggingface":
        return None
    if before.type != "huggingface" or now.type != "huggingface":
        types = f"{before.type} and {now.type}"
        log(f"warning: the tokenizers ({types}) cannot be compared, so every row of the checkpoint is kept")
        return None
    try:
        old = _ids(before)
    except (DataError, OSError, ValueError) as error:
        log(f"warning: the checkpoint's tokenizer cannot be read ({error}), so every row of the checkpoint is kept")
        return None
    new = _ids(now)
    moved = sorted((number, token) for token, number in old.items() if new.get(token) != number)
    if moved:
        number, token = moved[0]
        raise CheckpointError(
            checkpoint.path,
            f"its rows would mean other tokens: {len(moved)} tokens of its tokenizer have another id or none in "
            f"{now.path}. The first is {token!r} ({number}, now {new.get(token)}). Extend the checkpoint's tokenizer",
        )
    return max(old.values()) + 1
