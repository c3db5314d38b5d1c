"""Rules of options that only GPUs have: kernels of attention, CUDA graphs, products that overlap with messages."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..arithmetic import machine
from ..arithmetic.machine import FA3, FA3_FIX, installed, why_not
from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.model import SHORT

FLASH, DOCUMENTS, MOST = (f"model.fused_attention.{name}" for name in ("flash", "documents", "most_documents"))
PRODUCTS, GRAPHS = "parallel.async_tensor", "training.cuda_graphs"
Forbidden = tuple[tuple[str, Callable[[Any], bool], str, str], ...]

# Another key, whether its value forbids the option, the need of the option, and a value that the key can have.
NO_OVERLAP: Forbidden = (
    ("parallel.sequence", lambda it: not it, "activations that tensor ranks share", "true"),
    ("parallel.communication.compress.tensor", lambda it: it != "none", "uncompressed activations", "none"),
    ("zero.stage", lambda it: it == 3, "weights that stay where they are", "2"),
    ("parallel.depth", lambda it: it > 1, "weights that stay where they are", "1"),
    ("training.activation_checkpointing.mode", lambda it: it != "none", "each product once a step", "none"),
    ("training.sequence_chunks", lambda it: it > 1, "whole sequences in a pass", "1"),
)
NO_GRAPHS: Forbidden = (
    ("launch.device", lambda it: it == "cpu", "a GPU", "cuda"),
    ("precision.compute", lambda it: it == "fp32", "16-bit gradients, which are summed elsewhere", "bf16"),
    ("training.compile", lambda it: it == "off", "compiled blocks", "auto"),
    ("training.activation_checkpointing.mode", lambda it: it != "none", "each pass of a block once a step", "none"),
    ("training.sequence_chunks", lambda it: it > 1, "whole sequences in a pass", "1"),
    ("training.sequence_schedule", bool, "sequences of one length", "[]"),
    ("parallel.tensor", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.depth", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.columns", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.context", lambda it: it > 1, "blocks without collectives", "1"),
    ("parallel.pipeline", lambda it: it > 1, "one micro-batch at a time", "1"),
    ("zero.stage", lambda it: it == 3, "weights that stay where they are", "2"),
    ("zero.offload_optimizer.device", lambda it: it != "none", "gradients that stay on the GPU", "none"),
    ("model.dropout", lambda it: it > 0, "no random numbers in a step", "0"),
    ("objective.teacher", lambda it: it is not None, "one model in a pass", "null"),
    ("model.multi_token_prediction.depth", lambda it: it > 0, "every block once in a pass", "0"),
)


def _forbidden(context: RuleContext, key: str, what: str, table: Forbidden) -> Iterable[Problem]:
    for other, forbids, need, fix in table:
        value = context.option(other)
        if value is not None and forbids(value):
            yield context.problem(key, other, rule=f"{what} must have {need}", fix=f"use {key}=false, or {other}={fix}")


def async_products_have_messages(context: RuleContext) -> Iterator[Problem]:
    parallel, what = context.config.parallel, "products that overlap with messages"
    if not parallel.async_tensor:
        return
    if parallel.tensor == 1:
        # As with `parallel.sequence`, no error: plans and evaluations read a run's file for other layouts too.
        rule = f"{what} must go with tensor parallelism, without which they have no effect"
        fix = f"use {PRODUCTS}=false, or parallel.tensor of 2 or more"
        yield context.warning(PRODUCTS, "parallel.tensor", rule=rule, fix=fix)
        return
    yield from _forbidden(context, PRODUCTS, what, NO_OVERLAP)
    island = parallel.communication.island
    if island is not None and island % parallel.tensor:
        other = "parallel.communication.island"
        rule = f"must be a multiple of parallel.tensor = {parallel.tensor}, whose ranks must share fast links"
        fix = f"use {PRODUCTS}=false, or {other}={parallel.tensor}"
        yield context.problem(other, PRODUCTS, rule=rule, fix=fix)


def graphs_find_the_same_in_every_step(context: RuleContext) -> Iterator[Problem]:
    """CUDA graphs of blocks need the same shapes and addresses in every step."""
    if not context.config.training.cuda_graphs:
        return
    yield from _forbidden(context, GRAPHS, "CUDA graphs", NO_GRAPHS)
    uses = [use for use in context.used if not context.kinds[use.kind].compiles]
    drawing = [use for use in context.used if context.kinds[use.kind].draws(use.options)]
    if uses or drawing or any(block.recurrent for block in context.blocks):
        kinds = ", ".join(dict.fromkeys(use.kind for use in uses or drawing)) or "a recurrent group"
        why = "it has the same weights in several passes"
        if uses:
            why = "it is not compiled as a whole, with fixed shapes"
        elif drawing:
            why = "dropout draws new numbers"
        rule, fix = f"must be false with {kinds}: {why}", f"use {GRAPHS}=false, or attention/mlp blocks"
        yield context.problem(GRAPHS, "model.layers", rule=rule, fix=fix)


def graphs_find_a_gpu(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    here = config.launch.device != "cpu" and context.starts_here
    if config.training.cuda_graphs and here and not machine.has_gpu():
        rule = "CUDA graphs must have a GPU, and this machine has none"
        yield context.problem(GRAPHS, "launch.device", rule=rule, fix=f"use {GRAPHS}=false")


def _asked(context: RuleContext) -> list[str]:
    options = context.config.model.fused_attention
    return [key for key, value in ((FLASH, options.flash), (DOCUMENTS, options.documents)) if value != "auto"]


def kernels_of_attention_have_work(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    apart = config.data.reset_attention_at_eod
    asked = _asked(context)
    if DOCUMENTS in asked and not apart:
        yield context.problem(
            f"{DOCUMENTS} data.reset_attention_at_eod",
            rule="varlen must have documents that attention keeps apart",
            fix="use data.reset_attention_at_eod=true, or remove documents",
        )
        return
    if FLASH in asked and apart and DOCUMENTS not in asked:
        yield context.problem(
            f"{FLASH} {DOCUMENTS} data.reset_attention_at_eod",
            rule="fa3 must go with documents: varlen where attention keeps documents apart, which masks do otherwise",
            fix="use documents: varlen, or flash: auto",
        )
        return
    attention = [use for use in context.used if context.kinds[use.kind].attends]
    found = {use.kind: why_not(use.options, apart, config.training.sequence_length) for use in attention}
    if asked and context.blocks and all(found.values()):
        no = ", ".join(f"{kind} {reason}" for kind, reason in found.items()) or "model.layers has no attention"
        yield context.problem(
            f"{asked[0]} model.layers",
            rule=f"must be auto where FlashAttention computes no layer: {no}",
            fix=f"use {asked[0].rpartition('.')[2]}: auto",
        )


def kernels_of_attention_fit_the_run(context: RuleContext) -> Iterator[Problem]:
    """In 16 bits, on GPUs, with whole sequences on each rank."""
    config = context.config
    for key in _asked(context):
        off = f"use {key.rpartition('.')[2]}: auto"
        if config.precision.compute == "fp32":
            rule = "FlashAttention must have queries, keys and values of 16 bits"
            yield context.problem(key, "precision.compute", rule=rule, fix=f"use precision=bf16, or {off[4:]}")
        if config.launch.device == "cpu":
            yield context.problem(key, "launch.device", rule="FlashAttention must have a GPU", fix=off)
        for other in ("parallel.context", "training.sequence_chunks"):
            if context.value(other) > 1:
                rule = f"must be auto with {other} > 1: parts of sequences are computed otherwise"
                yield context.problem(key, other, rule=rule, fix=f"{off}, or {other}=1")


def documents_have_kernels(context: RuleContext) -> Iterator[Problem]:
    own = context.config.model.fused_attention.most_documents
    derived = max(8, context.config.training.sequence_length // SHORT)  # which a run's resolved file has
    if context.given(MOST) and own != derived and DOCUMENTS not in _asked(context):
        rule = "must go with documents: varlen, without which it has no effect"
        yield context.warning(MOST, DOCUMENTS, rule=rule, fix="remove it")


def kernels_of_attention_are_here(context: RuleContext) -> Iterator[Problem]:
    if context.config.launch.device == "cpu" or not context.starts_here:
        return
    for key in _asked(context):
        off = f"use {key.rpartition('.')[2]}: auto"
        if not machine.has_gpu():
            rule = "FlashAttention must have a GPU, and this machine has none"
            yield context.problem(key, "launch.device", rule=rule, fix=off)
        elif key == FLASH and not installed(FA3):
            yield context.problem(key, rule="fa3 must be installed", fix=f"{FA3_FIX}, or {off[4:]}")


INPUT_RULES = (graphs_find_a_gpu, kernels_of_attention_are_here)
