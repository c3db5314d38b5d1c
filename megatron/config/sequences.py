"""How ranks share a sequence: the one place that chooses, and says why. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .kind import kinds_of
from .variants import used_kinds

Cut = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Method:
    """How one layer's attention is computed.

    Attributes:
        name: "ulysses", "ring", "nested" or "gather".
        together: neighbours that exchange heads for tokens (ulysses), or 1. Keys and values then pass around rings of
            context / together ranks.
        why: the reason for the choice.
    """

    name: str
    together: int
    why: str


def choose_method(asked: str, heads: int, ranks: int, together: int | None = None) -> Method:
    """How attention is computed where `ranks` share a sequence.

    Args:
        asked: `parallel.context_method`.
        heads: query heads of a rank before they are exchanged.
        together: `parallel.context_ulysses`. None is the most neighbours that divide the heads.
    """
    common = together or math.gcd(heads, ranks)
    if asked == "nested":
        return Method("nested", common, f"parallel.context_method: nested, {common} neighbours exchange heads")
    if asked != "auto":
        return Method(asked, ranks if asked == "ulysses" else 1, f"parallel.context_method: {asked}")
    if heads % ranks == 0:
        return Method("ulysses", ranks, f"{ranks} ranks divide {heads} heads: each computes some of them on all tokens")
    if common > 1:
        why = (
            f"{ranks} ranks do not divide {heads} heads: {common} neighbours share them, {ranks // common} pass keys on"
        )
        return Method("nested", common, why)
    return Method(
        "ring", 1, f"{ranks} ranks share no divisor with {heads} heads: keys and values pass from rank to rank"
    )


def _attending(config: Any) -> Iterator[tuple[Any, Method]]:
    """The options and the method of each kind and variant that attends."""
    parallel = config.parallel
    for _, kind, options in used_kinds(config.model):
        heads = getattr(options, "heads", None)
        if kind.context == "attends" and heads and heads >= parallel.tensor:
            own = heads // parallel.tensor
            yield options, choose_method(parallel.context_method, own, parallel.context, parallel.context_ulysses)


def choose_cut(config: Any) -> tuple[Cut, str]:
    """Which tokens a rank has, and why: a run of neighbours, or (zigzag) the r-th run from both ends of the sequence.

    With zigzag, causal attention is the same work for all ranks. Layers that need the token before a rank's first one
    need a contiguous cut.
    """
    parallel, length = config.parallel, config.training.sequence_length
    asked: Cut | Literal["auto"] = parallel.context_cut
    if asked != "auto":
        return asked, f"parallel.context_cut: {asked}"
    if config.training.sequence_chunks > 1:
        return "contiguous", "all ranks work on one chunk at a time"
    if names := kinds_needing_neighbours(config):
        return "contiguous", f"{', '.join(names)} layers continue from the token before"
    passing = [(options, how) for options, how in _attending(config) if how.name != "ulysses"]
    if not passing:
        return "contiguous", "every rank has the same work"
    if all(0 < (getattr(options, "window", None) or 0) < length for options, _ in passing):
        return "contiguous", "windows reach the ranks before only"
    if length % (2 * parallel.context):
        return "contiguous", f"{length} tokens cannot be cut into {2 * parallel.context} equal runs"
    return "zigzag", "causal attention is the same work for all ranks"


def kinds_needing_neighbours(config: Any) -> list[str]:
    """The kinds of layers of a run that need the token before a rank's first one."""
    names = {kind.name for block in config.model.blocks for kind in block.kinds}
    kinds = kinds_of(tuple(config.model.extensions))
    return [
        name
        for name in kinds
        if name in names and (kinds[name].context in ("scans", "states") or kinds[name].neighbours)
    ]


def longest_text(config: Any) -> int | None:
    """Tokens of the longest text that can be read at once, or None without a limit. Learned positions end, and ranks
    that share a sequence have equal parts of it."""
    embedding, parallel = config.model.embedding, config.parallel
    if embedding.position != "learned":
        return None
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    zigzag = parallel.context > 1 and choose_cut(config)[0] == "zigzag"
    even = math.lcm(ranks, 2 * parallel.context) if zigzag else ranks
    most: int = embedding.max_positions
    return most // even * even
