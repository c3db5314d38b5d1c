"""How ranks share a sequence, and stages of sequence length (`training.sequence_schedule`). No torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from .kind import kinds_of
from .section import Section
from .tree import get, thaw
from .variants import used_kinds

Cut = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Method:
    """How one layer's attention is computed."""

    name: str  # "ulysses", "ring", "nested" or "gather"
    # Neighbours that exchange heads for tokens (ulysses), or 1. Keys and values then pass around rings of context /
    # together ranks.
    together: int
    why: str  # the reason for the choice


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
    return Method("ring", 1, f"{ranks} ranks share no divisor with {heads} heads: keys and values go from rank to rank")


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
    need a contiguous cut."""
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
    return [k for k in kinds if k in names and (kinds[k].context in ("scans", "states") or kinds[k].neighbours)]


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


C = TypeVar("C", bound=Section)


@dataclass(frozen=True)
class Stage:
    """Steps `begin` ... `end` - 1 of a run. The last stage has no end."""

    number: int  # its place in the schedule. The last stage, which no entry describes, has the next number.
    begin: int
    end: int | None
    length: int  # tokens of a sample
    pieces: int  # that a sample of `training.sequence_length` tokens is cut into


def stages_of(config: Any) -> list[Stage]:
    """The stages of a run, in order. A run without a schedule is one stage.

    The configuration describes the last one, and so the model that comes out: its sequences are the longest, and its
    rotary options are exported. In every stage a step reads the tokens that it would read without a schedule. A shorter
    stage cuts each sample into equal pieces."""
    longest, found, begin = config.training.sequence_length, list[Stage](), 0
    for number, entry in enumerate(config.training.sequence_schedule):
        length = entry.sequence_length
        found.append(Stage(number, begin, entry.until, length, longest // length))
        begin = entry.until
    return [*found, Stage(len(found), begin, None, longest, 1)]


def stage_at(config: Any, step: int) -> Stage:
    """The stage of update `step`, from 0."""
    return next(stage for stage in stages_of(config) if stage.end is None or step < stage.end)


def stage_of(config: Any, completed: int) -> Stage:
    """The stage of the last of the completed updates."""
    return stage_at(config, max(completed - 1, 0))


def shortest(config: Any, first: int, end: int | None = None) -> int:
    """Tokens of the shortest samples of updates `first` to `end` - 1, or to the run's end."""
    return min(
        stage.length
        for stage in stages_of(config)
        if (end is None or stage.begin < end) and (stage.end is None or first < stage.end)
    )


def as_stage(config: C, stage: Stage) -> C:
    """The configuration of a run that is nothing but this stage: its lengths, batches and rotary options."""
    training: Any = config.training  # type: ignore[attr-defined]
    if not training.sequence_schedule:
        return config
    return type(config).model_validate(stage_values(config.model_dump(), stage.number))


def as_of(config: C, completed: int) -> C:
    """The configuration after a number of updates, such as that of a checkpoint."""
    return as_stage(config, stage_of(config, completed))


def stage_values(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """`as_stage` on the plain values of a resolved configuration."""
    found = cast(dict[str, Any], thaw(values))
    training, model = found["training"], found["model"]
    schedule, training["sequence_schedule"] = training.get("sequence_schedule") or [], []
    if number >= len(schedule):
        return found
    entry = schedule[number]
    longest, length = training["sequence_length"], entry["sequence_length"]
    pieces = longest // length
    training["sequence_length"] = length
    training["sequence_chunks"] = _chunks(length, longest // (training.get("sequence_chunks") or 1))
    for name in ("micro_batch_size", "global_batch_size"):
        if training[name] is not None:
            training[name] *= pieces
    for batch in training.get("batch_schedule") or []:
        batch["global_batch_size"] *= pieces
    for name, rotary in entry["rotary"].items():
        put_rotary(model, name, rotary)
    return found


def _chunks(length: int, tokens: int) -> int:
    """Number of chunks of a shorter sequence: each has the tokens of the longest one's chunks, or a divisor of them."""
    return 1 if length <= tokens else length // math.gcd(length, tokens)


def put_rotary(model: dict[str, Any], name: str, rotary: Mapping[str, Any]) -> None:
    """Give a kind of layer, or `kind@variant`, other rotary options, in place."""
    kind, _, variant = name.partition("@")
    options = model["variants"].get(variant) if variant else model.get(kind)
    if options is not None:
        options["rotary"] = {**(get(model, (kind, "rotary"), None) or {}), **(options.get("rotary") or {}), **rotary}
