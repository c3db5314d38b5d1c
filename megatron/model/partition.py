"""The layers of each pipeline stage. The list of layers is: embedding, blocks, head."""

from torch import nn

from megatron.config import Config
from megatron.config.arithmetic.pipelines import ranks_of_stages
from megatron.config.arithmetic.recurrence import core_of, expected_passes
from megatron.config.pattern import call_numbers
from megatron.config.problems import uniform_counts
from megatron.config.variants import options_of
from megatron.objectives.named import objective_of
from megatron.parallel.layers.parameters import logical_of

from .block import block_counts
from .embedding_and_head import embedding_counts, head_counts, multi_token_counts
from .options import layer_class
from .token_inputs import SHARED


def stage_bounds(config: Config) -> list[int]:
    """Bounds b such that stage i holds layers b[i] ... b[i + 1] - 1 of [embedding, blocks..., head]. Stages are
    on the ranks `ranks_of_stages`.

    Every stage has at least one block: the first holds the embedding too, the last the final norm and the head. The
    blocks of a recurrent core stay together."""
    stages, split = config.parallel.pipeline * config.parallel.stages_per_rank, config.parallel.pipeline_split
    blocks = config.model.blocks
    if split in ("parameters", "flops"):
        sizes = [
            getattr(block_counts(config.model, block, config.training.sequence_length, index), split)
            for index, block in enumerate(blocks)
        ]
        first = getattr(embedding_counts(config.model), split)
        model, scores = config.model, objective_of(config).scores
        last = getattr(head_counts(model, scores), split)
        last += getattr(multi_token_counts(model, config.training.sequence_length), split)
        last += first if (model.embedding.tied and not scores) or model.further_blocks else 0
        core = core_of(blocks) or range(1)
        inside = sum(sizes[core.start : core.stop])
        inside *= round(expected_passes(model.recurrence).total) if split == "flops" and core_of(blocks) else 1
        together = [*sizes[: core.start], inside, *sizes[core.stop :]]
        counts = balanced(together, stages, first, last)
        ends = [sum(counts[: stage + 1]) for stage in range(stages)]
        counts[next(stage for stage, end in enumerate(ends) if end > core.start)] += len(core) - 1
    elif isinstance(split, str):
        counts = uniform_counts(len(blocks), stages)
    else:
        counts = list(split)
    bounds = [0]
    for stage, count in enumerate(counts):
        bounds.append(bounds[-1] + count + (stage == 0) + (stage == stages - 1))
    return bounds


def users(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameters that several layers may use: prefixes of logical names, and the pipeline stages of these layers."""
    model, bounds = config.model, stage_bounds(config)
    stages = [stage for stage in range(len(bounds) - 1) for _ in range(bounds[stage], bounds[stage + 1])]
    found: dict[str, set[int]] = {}
    tied = model.embedding.tied and not objective_of(config).scores  # a reward model's head has no tokens
    if tied or model.further_blocks:
        found[model.outline[1]] = {0, stages[-1]}
    for block, numbers, stage in zip(model.blocks, call_numbers(model.blocks), stages[1:]):
        for kind, number in zip(block.side, numbers):
            name = layer_class(model, kind).shared_name(kind, options_of(model, kind), number)
            found.setdefault(name, set()).add(stage)
    if model.residual.token_inputs:
        found[SHARED] = set(stages[1:-1])
    core = core_of(model.blocks)
    if core and model.recurrence.norm == "head":
        found["final_norm"] = {stages[core.start + 1], stages[-1]}
    return {name: tuple(sorted(at)) for name, at in found.items()}


def copies(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameters on several ranks of the pipeline: prefixes of logical names, and the ranks, in order."""
    homes = ranks_of_stages(config.parallel)
    held = {name: tuple(sorted({homes[stage] for stage in at})) for name, at in users(config).items()}
    return {name: at for name, at in held.items() if len(at) > 1}


def stages_of_parameters(
    config: Config, rank: int, held: dict[int, list[nn.Parameter]]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """The stages of a rank that use each of its parameters. A layer may borrow some from another one.

    Args:
        held: parameters of the layers of each of its stages.
    """
    homes = ranks_of_stages(config.parallel)
    several = {f"{name}.": tuple(stage for stage in at if homes[stage] == rank) for name, at in users(config).items()}
    return {
        parameter: next((at for name, at in several.items() if logical_of(parameter).name.startswith(name)), (stage,))
        for stage, parameters in held.items()
        for parameter in parameters
    }


def balanced(sizes: list[int], stages: int, first: int = 0, last: int = 0) -> list[int]:
    """Number of consecutive items of each stage, so that the largest stage is as small as possible.

    Args:
        sizes: of the items.
        stages: every stage takes at least one item.
        first, last: further sizes of the first and the last stage.
    """
    prefix = [0]
    for size in sizes:
        prefix.append(prefix[-1] + size)
    count = len(sizes)
    # best[i]: (largest stage, -smallest stage) and the counts, over the ways to put the first i items into the stages
    # so far
    best: dict[int, tuple[tuple[int, int], list[int]]] = {
        end: ((prefix[end] + first, -prefix[end] - first), [end]) for end in range(1, count - stages + 2)
    }
    if stages == 1:
        return [count]
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0
        following: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            options = []
            for begin, ((largest, least), counts) in best.items():
                if begin < end:
                    size = prefix[end] - prefix[begin] + extra
                    options.append(((max(largest, size), max(least, -size)), [*counts, end - begin]))
            following[end] = min(options)
        best = following
    return best[count][1]


def rank_of(config: Config) -> list[int]:
    """The pipeline rank of each layer of [embedding, blocks..., head]."""
    bounds = stage_bounds(config)
    homes = zip(ranks_of_stages(config.parallel), bounds[:-1], bounds[1:], strict=True)
    return [rank for rank, begin, end in homes for _ in range(begin, end)]
