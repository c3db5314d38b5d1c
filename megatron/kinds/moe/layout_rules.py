"""Rules of the ranks that experts are spread over, with or without experts in the stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.problems import divisors, near

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext


def _folds(context: RuleContext) -> bool:
    """Whether tensor parallel ranks have whole experts."""
    return context.config.parallel.expert_tensor == 1 < context.config.parallel.tensor


def _spreads(context: RuleContext) -> bool:
    return context.config.parallel.expert > 1 or _folds(context)


def there_are_experts_to_spread(context: RuleContext) -> Iterator[Problem]:
    for name in ("expert", "expert_tensor"):
        if context.given(f"parallel.{name}") and _spreads(context) and context.blocks and not context.uses("moe"):
            yield context.problem(
                f"parallel.{name} model.layers",
                rule="the model must have experts to spread over ranks, and it has none",
                fix=f"remove parallel.{name}, or use layers with a moe feed-forward",
            )


def experts_are_cut_or_whole(context: RuleContext) -> Iterator[Problem]:
    parallel = context.config.parallel
    if parallel.expert_tensor not in (1, parallel.tensor):
        either = "1" if parallel.tensor == 1 else f"1 or {parallel.tensor}"
        yield context.problem(
            "parallel.expert_tensor parallel.tensor",
            rule="an expert must be cut over all tensor parallel ranks, or be whole on each of them",
            fix=f"use parallel.expert_tensor = {either}",
        )
    elif _folds(context) and parallel.columns > 1:
        yield context.problem(
            "parallel.expert_tensor parallel.columns",
            rule=f"must be parallel.tensor = {parallel.tensor} with columns, over which experts are cut as well",
            fix="remove expert_tensor, or use parallel.columns=1",
        )


def expert_ranks_divide_their_line(context: RuleContext) -> Iterator[Problem]:
    """Experts are spread over the data axis, or over data and tensor axes where no tensor parallel rank has a slice."""
    parallel, replicas = context.config.parallel, context.replicas
    if replicas is None:
        return
    folds = _folds(context)
    line = replicas * parallel.tensor if folds else replicas
    if line % parallel.expert:
        axes = ("tensor", "columns", "pipeline", "context")
        sizes = [f"parallel.{name}" for name in axes if getattr(parallel, name) > 1]
        both = "data and context" if parallel.context > 1 else "data"
        where = f"{both} and tensor parallel ranks of a stage" if folds else f"{both} parallel ranks"
        why = "" if folds else " (tensor parallel ranks have slices of every expert)"
        possible = not folds and parallel.columns == 1 and replicas * parallel.tensor % parallel.expert == 0
        wider = ", parallel.expert_tensor=1" if possible else ""
        yield context.problem(
            "parallel.expert",
            *sizes,
            rule=f"parallel.expert must divide the {line} {where} that experts are spread over{why}",
            fix=f"use parallel.expert = {near(parallel.expert, divisors(line))}{wider}, or another number of ranks",
        )


def experts_are_where_rows_are(context: RuleContext) -> Iterator[Problem]:
    """To gradients and states, matrices whose rows ranks share are experts that are spread."""
    parallel = context.config.parallel
    folded, depth = parallel.folded, parallel.depth
    if context.uses("moe") and 1 < folded != parallel.expert:
        yield context.problem(
            "parallel.expert parallel.folded",
            rule=f"must be parallel.folded = {folded} in stacks with experts, which the same ranks share",
            fix=f"use parallel.expert={folded}",
        )
    if context.uses("moe") and depth > 1 and parallel.expert not in (1, depth):
        yield context.problem(
            "parallel.expert parallel.depth",
            rule=f"must be 1 or parallel.depth = {depth} in stacks with experts, which the same ranks share",
            fix=f"use parallel.expert={depth}, so that tokens travel, or 1, so that experts do",
        )


def spread_experts_fit_the_stage(context: RuleContext) -> Iterator[Problem]:
    if _spreads(context) and context.config.zero.stage == 3:
        key = "parallel.expert_tensor" if _folds(context) else "parallel.expert"
        yield context.problem(
            "zero.stage",
            key,
            rule="zero.stage must be below 3: ZeRO 3 partitions every parameter over all data parallel ranks, "
            "and expert parallel ranks have different parameters",
            fix=f"use zero.stage=1 or 2, or remove {key} and let ZeRO 3 partition the experts",
        )


def folded_experts_want_equal_shards(context: RuleContext) -> Iterator[Problem]:
    """DeepSpeed's ZeRO fills a bucket with gradients of all kinds and sends it when it is full. Ranks with other
    numbers of elements fill it at other parameters. Where their experts' groups have several such ranks, they would
    wait for ever."""
    config = context.config
    vocabulary, ranks = config.model.vocab_size, config.parallel.tensor
    if _folds(context) and context.uses("moe") and config.zero.stage in (1, 2) and vocabulary and vocabulary % ranks:
        yield context.problem(
            "model.vocab_size parallel.tensor parallel.expert_tensor zero.stage",
            rule="with folded experts all tensor parallel ranks must have the same number of parameters, "
            "since ZeRO's buckets sum the experts' gradients across these ranks",
            fix=f"use model.vocab_size={-(-vocabulary // ranks) * ranks}, model.vocab_multiple={ranks}, "
            "or zero.stage=0",
        )


LAYOUT_RULES = (
    there_are_experts_to_spread,
    experts_are_cut_or_whole,
    expert_ranks_divide_their_line,
    experts_are_where_rows_are,
    spread_experts_fit_the_stage,
    folded_experts_want_equal_shards,
)
