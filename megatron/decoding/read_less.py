"""Loki and SiftAttention as options of the decoder: models that can use them, calibration, the file of components."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatron.config import Config
from megatron.config.file_access import replace_file, unreadable
from megatron.config.problems import UserError
from megatron.kinds.common.attention.fewer_keys import Loki, Moments, Reading, Reads, Sift
from megatron.model.stack import Model
from megatron.parallel.layout.mesh import Mesh

from .covered import cannot_read_less, heads_of
from .decoder import Decoder, WholeModel
from .schedule import Request

FORM = "deepy loki 1"
Factory = Callable[[int], Reading]


@dataclass(frozen=True)
class Components:
    """Principal components of each layer with keys: [m, D, D] as columns, and variances [m, D]."""

    bases: list[Tensor]
    variances: list[Tensor]

    def rank(self, asked: float | int) -> list[int]:
        """Components of each layer: a number, or below 1 the most that explain less than this share in some head."""
        if isinstance(asked, int):
            return [min(asked, each.shape[-1]) for each in self.variances]
        shares = [each.cumsum(-1) / each.sum(-1, keepdim=True) for each in self.variances]
        return [max(1, int((each < asked).sum(-1).max())) for each in shares]

    def reading(self, rank: float | int, keys: float | int, reads: Reads | None = None) -> Factory:
        ranks, counts = self.rank(rank), Reads() if reads is None else reads
        return lambda layer: Loki(self.bases[layer], ranks[layer], keys, counts)


def sift(quantile: float, warmup: int, renormalise: bool = True, reads: Reads | None = None) -> Factory:
    counts = Reads() if reads is None else reads
    return lambda layer: Sift(quantile, warmup, renormalise, counts)


def calibrate(model: Model, texts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Components:
    """The components of all keys of these texts, as attention reads them: after positions have turned them."""
    moments: list[Moments] = []

    def of_layer(layer: int) -> Moments:
        moments.append(Moments())
        return moments[-1]

    decoder = Decoder(WholeModel(model), device, reading=of_layer)
    decoder.run([Request(tuple(each), 0, number) for number, each in enumerate(texts) if len(each)])
    bases, variances = zip(*(each.components() for each in moments))
    return Components(list(bases), list(variances))


def loss_of(
    model: Model,
    texts: Sequence[Sequence[int]],
    reading: Factory | None,
    before: int,
    device: torch.device | str = "cpu",
) -> float:
    """Mean loss in nats of the tokens from place `before` on, which are read as tokens after a prompt."""
    requests = [Request(tuple(each), 0, at, scored=len(each) - before) for at, each in enumerate(texts)]
    drawn = Decoder(WholeModel(model), device, reading=reading).run(requests)
    scores = [score for each in drawn for score in each.scores]
    return -sum(scores) / len(scores)


def write(path: Path, components: Components) -> None:
    """Write components to a safetensors file."""
    tensors = {f"{at}.basis": each.contiguous() for at, each in enumerate(components.bases)}
    tensors |= {f"{at}.variances": each.contiguous() for at, each in enumerate(components.variances)}
    shapes = [list(each.shape[:2]) for each in components.bases]
    replace_file(path, save(tensors, {"form": FORM, "heads": json.dumps(shapes)}))


def read(path: Path, heads: Sequence[tuple[int, int, int]], ranks: tuple[int, int] = (0, 1)) -> Components:
    """Components of a file.

    Args:
        heads: of each layer with keys, as of `heads_of`.
        ranks: place and number of tensor parallel ranks. Each gets the components of its own heads.

    Raises:
        UserError: there is no such file, or it is of another model.
    """
    if (reason := unreadable(path)) is not None:
        raise UserError(f"{path}: {reason}")
    try:
        with safe_open(str(path), "pt") as file:
            if (file.metadata() or {}).get("form") != FORM:
                raise UserError(f"{path} must be a file of deepy calibrate")
            names = [f"{at}.{name}" for at in range(len(heads)) for name in ("basis", "variances")]
            if sorted(file.keys()) != sorted(names):
                raise UserError(f"{path} must have the components of {len(heads)} layers with keys")
            found = [file.get_tensor(name) for name in names]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for (_, m, D), basis, variances in zip(heads, found[::2], found[1::2]):
        if basis.shape != (m, D, D) or variances.shape != (m, D) or basis.dtype != torch.float64:
            raise UserError(f"{path} must have components of {m} heads with {D} channels, not {list(basis.shape)}")
        if not (basis.transpose(1, 2) @ basis - torch.eye(D, dtype=basis.dtype)).abs().max() < 1e-6:
            raise UserError(f"{path} must have orthogonal components: make it again with deepy calibrate")
        if not (variances.isfinite() & (variances >= 0)).all():
            raise UserError(f"{path} must have variances of at least 0: make it again with deepy calibrate")
    used = [_used_heads(n, m, *ranks) for n, m, _ in heads]
    return Components([basis[own] for own, basis in zip(used, found[::2])], found[1::2])


def _used_heads(n: int, m: int, rank: int, ranks: int) -> list[int]:
    """The key/value heads that attention keeps on a tensor parallel rank: its share, or what its query heads read."""
    if m % ranks == 0:
        return list(range(m * rank // ranks, m * (rank + 1) // ranks))
    used = [head * m // n for head in range(n * rank // ranks, n * (rank + 1) // ranks)]
    return used[:1] if len(set(used)) == 1 else used


class Asked(Protocol):
    """Options of a command, or of `evaluation.read_less`."""

    loki: Any
    sift: float | None
    rank: float | int
    keys: float | int
    warmup: int


def chosen(
    given: Asked | argparse.Namespace, config: Config, device: torch.device | str, ranks: tuple[int, int] = (0, 1)
) -> Factory | None:
    """The way of reading that options ask for. None is full attention.

    Args:
        ranks: as in `read`.

    Raises:
        UserError: an option is outside of its range, or the model cannot read less.
    """
    if given.loki is None and given.sift is None:
        return None
    if given.loki is not None and given.sift is not None:
        raise UserError("--loki and --sift must not be given together: one of them reads fewer keys, the other all")
    if (reason := cannot_read_less(config)) is not None:
        raise UserError(f"--{'sift' if given.loki is None else 'loki'}: this model cannot read less: {reason}")
    for name, value in (("rank", given.rank), ("keys", given.keys)):
        if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
            raise UserError(f"--{name} must be a number of at least 1, or a share above 0.0 and up to 1.0, not {value}")
    if given.sift is not None:
        if not 0 <= given.sift < 1 or given.warmup < 2:
            raise UserError("--sift must be at least 0 and below 1, and --warmup at least 2")
        return sift(given.sift, given.warmup)
    found = read(Path(given.loki), heads_of(config), ranks)
    bases = [each.to(device) for each in found.bases]
    return Components(bases, found.variances).reading(given.rank, given.keys)


def of_evaluation(config: Config, device: torch.device | str, mesh: Mesh) -> Factory | None:
    """The way of reading of `evaluation.read_less`.

    Raises:
        UserError: as in `chosen`.
    """
    own = config.evaluation.read_less
    rank, keys = (int(each) if each > 1 else each for each in (own.rank, own.keys))
    given = argparse.Namespace(loki=own.loki, sift=own.sift, warmup=own.warmup, keys=keys, rank=rank)
    heads = mesh.of_blocks.tensor  # ranks that share the heads
    return chosen(given, config, device, (heads.rank, heads.size))
