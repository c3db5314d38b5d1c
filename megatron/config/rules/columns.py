"""Columns of tensor parallel ranks, which cut the channels of the residual stream."""

from collections.abc import Callable, Iterator
from typing import Any

from ..features.feature import wanted_features
from ..problems import Problem, divisors, near
from ..rule_context import RuleContext

COLUMNS = "parallel.columns"

# A key, whether its value goes with columns, what it must be, and why not.
OTHERS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("parallel.sequence", lambda it: not it, "false", "ranks of a row have the same tokens"),
    ("parallel.context", lambda it: it == 1, "1", "ranks of a row have the same tokens"),
    ("parallel.stages_per_rank", lambda it: it == 1, "1", "a rank has one stage of a part of the channels"),
    ("parallel.schedule", lambda it: it == "1f1b", "1f1b", "a rank has one stage of a part of the channels"),
    ("parallel.communication.compress.tensor", lambda it: it == "none", "none", "sums over columns are not compressed"),
    ("zero.stage", lambda it: it < 3, "below 3", "ZeRO 3 gathers whole parameters"),
    ("precision.products", lambda it: it == "compute", "compute", "the parts of a product are summed over columns"),
    ("training.sequence_chunks", lambda it: it == 1, "1", "the stream of a chunk has all channels"),
    ("model.dropout", lambda it: it == 0.0, "0", "its draws are numbered by channels of the whole stream"),
    ("model.residual.streams", lambda it: it == 1, "1", "connections read all channels of the stream"),
    ("objective.teacher", lambda it: it is None, "null", "a teacher has a stream of its own width"),
)


ABLE = ("spikes", "noise_scale", "hashes", "audit")  # features that do not care how matrices are cut


def columns_cut_the_stream(context: RuleContext) -> Iterator[Problem]:
    config, columns = context.config, context.config.parallel.columns
    if columns == 1:
        return
    for name, fits, value, reason in OTHERS:
        if not fits(context.option(name)):
            rule = f"must be {value} with {COLUMNS}: {reason}"
            yield context.problem(
                f"{name} {COLUMNS}", rule=rule, fix=f"use {name}={value.replace('below 3', '2')}, or {COLUMNS}=1"
            )
    if config.model.hidden_size % columns:
        rule = f"must divide model.hidden_size = {config.model.hidden_size}, whose channels the columns share equally"
        fix = f"use {COLUMNS}={near(columns, divisors(config.model.hidden_size))}"
        yield context.problem(f"{COLUMNS} model.hidden_size", rule=rule, fix=fix)
    able = ", ".join(name for name, about in context.kinds.items() if about.columns)
    others = [use.kind for use in context.used if not context.kinds[use.kind].columns]
    others += ["a recurrent group"] if "recurrent(" in config.model.layers else []
    if others:
        rule = f"must be 1 with {', '.join(dict.fromkeys(others))}: only layers of {able} have a part of the channels"
        sides = [f"parallel.{side}={columns * getattr(config.parallel, side)}" for side in ("tensor", "depth")]
        yield context.problem(f"{COLUMNS} model.layers", rule=rule, fix=f"use {COLUMNS}=1 with {' or '.join(sides)}")
    if any(context.kinds[use.kind].clips_logits(use.options) for use in context.used):
        rule = "must be 1 where attention's logits are clipped, by rows of whole matrices"
        yield context.problem(f"{COLUMNS} model.layers", rule=rule, fix=f"use {COLUMNS}=1, or no qk_clip")
    if features := ", ".join(name for name in wanted_features(config) if name not in ABLE):
        rule = f"must be 1 with {features}, which read whole matrices"
        yield context.problem(COLUMNS, rule=rule, fix=f"use {COLUMNS}=1, or switch them off")
