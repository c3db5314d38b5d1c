"""Kernels of attention that are asked for by name are installed, and have something to compute."""

from __future__ import annotations

from collections.abc import Iterator

from ...arithmetic import machine
from ...arithmetic.fused_attention import FA3, FA3_FIX, why_not
from ...arithmetic.kernels import installed
from ...problems import Problem
from ...rule_context import RuleContext
from ...sections.model import SHORT

FLASH, DOCUMENTS, MOST = (f"model.fused_attention.{name}" for name in ("flash", "documents", "most_documents"))


def _asked(context: RuleContext) -> list[str]:
    """The keys that ask for kernels by name."""
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


INPUT_RULES = (kernels_of_attention_are_here,)
