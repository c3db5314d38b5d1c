"""CUDA graphs of blocks need the same shapes and addresses in every step (`training.cuda_graphs`)."""

from __future__ import annotations

from collections.abc import Iterator

from ...arithmetic import machine
from ...problems import Problem
from ...rule_context import RuleContext

KEY, OFF = "training.cuda_graphs", "training.cuda_graphs=false"

# (another key, whether its value forbids graphs, the need of graphs, a value that it can have)
FORBIDDEN = (
    ("launch.device", lambda it: it == "cpu", "a GPU", "cuda"),
    ("precision.compute", lambda it: it == "fp32", "16-bit gradients, which are summed elsewhere", "bf16"),
    ("training.compile", lambda it: it == "off", "compiled blocks", "auto"),
    ("training.activation_checkpointing.mode", lambda it: it != "none", "each pass of a block once a step", "none"),
    ("training.sequence_chunks", lambda it: it > 1, "whole sequences in a pass", "1"),
    ("training.sequence_schedule", bool, "sequences of one length", "[]"),
    ("parallel.tensor", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.context", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.pipeline", lambda it: it > 1, "one micro-batch at a time", "1"),
    ("zero.stage", lambda it: it == 3, "weights that stay where they are", "2"),
    ("zero.offload_optimizer.device", lambda it: it != "none", "gradients that stay on the GPU", "none"),
    ("model.dropout", lambda it: it > 0, "no random numbers in a step", "0"),
    ("objective.teacher", lambda it: it is not None, "one model in a pass", "null"),
    ("model.multi_token_prediction.depth", lambda it: it > 0, "every block once in a pass", "0"),
)


def graphs_find_the_same_in_every_step(context: RuleContext) -> Iterator[Problem]:
    if not context.config.training.cuda_graphs:
        return
    for other, forbids, need, fix in FORBIDDEN:
        value = context.option(other)
        if value is not None and forbids(value):
            rule = f"CUDA graphs must have {need}"
            yield context.problem(KEY, other, rule=rule, fix=f"use {OFF}, or {other}={fix}")
    uses = [use for use in context.used if not context.kinds[use.kind].compiles]
    drawing = [use for use in context.used if context.kinds[use.kind].draws(use.options)]
    recurrent = any(block.recurrent for block in context.blocks)
    if uses or drawing or recurrent:
        kinds = ", ".join(dict.fromkeys(use.kind for use in uses or drawing)) or "a recurrent group"
        why = (
            "dropout draws new numbers" if drawing and not uses else "it is not compiled as a whole, with fixed shapes"
        )
        why = why if uses or drawing else "it has the same weights in several passes"
        yield context.problem(
            KEY, "model.layers", rule=f"must be false with {kinds}: {why}", fix=f"use {OFF}, or attention/mlp blocks"
        )


def graphs_find_a_gpu(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    here = config.launch.device != "cpu" and context.starts_here
    if config.training.cuda_graphs and here and not machine.has_gpu():
        rule = "CUDA graphs must have a GPU, and this machine has none"
        yield context.problem(KEY, "launch.device", rule=rule, fix=f"use {OFF}")


INPUT_RULES = (graphs_find_a_gpu,)
