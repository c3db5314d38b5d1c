"""How ranks talk: a table of algorithms that is for this job."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.algorithm_table import read_table
from ..arithmetic.wire import LEAST_BLOCK, PIPELINE
from ..file_access import unreadable
from ..problems import Problem
from ..rule_context import RuleContext

TABLE = "parallel.communication.table"
MAKE = "make one with bench/communication.py --tune on this job's hosts, or remove the key"


def islands_fill_the_job(context: RuleContext) -> Iterator[Problem]:
    island = context.config.parallel.communication.island
    if island is not None and context.ranks is not None and context.ranks % island:
        yield context.problem(
            "parallel.communication.island",
            rule=f"must divide the run's {context.ranks} ranks",
            fix="give the ranks that share a fast link, or remove the key: a host's ranks are an island",
        )


def pairs_fill_the_islands(context: RuleContext) -> Iterator[Problem]:
    options = context.config.parallel.communication
    within = options.island or context.ranks
    if options.pair is not None and within is not None and within % options.pair:
        what = f"the island's {within} ranks" if options.island else f"the run's {within} ranks"
        yield context.problem(
            "parallel.communication.pair",
            rule=f"must divide {what}",
            fix="give the ranks of a host that share the fastest links, or remove the key",
        )


def table_is_for_this_job(context: RuleContext) -> Iterator[Problem]:
    """As far as it is known before the ranks are up; they compare the hosts and look for the backends."""
    path = context.config.parallel.communication.table
    if path is None:
        return
    if reason := unreadable(path):
        yield context.problem(TABLE, rule=f"must be a machine.yml: {reason}", fix=MAKE)
        return
    try:
        table = read_table(path)
    except ValueError as error:
        yield context.problem(TABLE, rule=f"must be a machine.yml with algorithms: {error}", fix=MAKE)
        return
    if table.needs_pairs and context.config.parallel.communication.pair is None:
        yield context.problem(
            TABLE,
            "parallel.communication.pair",
            rule="must go with pair where it has algorithms in three levels",
            fix="set parallel.communication.pair to the ranks that share the fastest links, or tune again without it",
        )
    launch, island = context.config.launch, context.config.parallel.communication.island
    facts = {"ranks": context.ranks} if context.ranks is not None else {}
    if island is not None and context.ranks is not None:
        facts["hosts"] = context.ranks // island
    known = {**facts, "backend": {"cpu": "gloo", "cuda": "nccl"}.get(launch.device, table.facts["backend"])}
    if wrong := table.differs(known):
        yield context.problem(TABLE, rule=f"must be a table that was made on such a job ({'; '.join(wrong)})", fix=MAKE)


def compressed_gradients_are_ours_to_sum(context: RuleContext) -> Iterator[Problem]:
    config, key = context.config, "parallel.communication.compress.data"
    if config.parallel.communication.compress.data == "none":
        return
    if config.zero.stage == 3:
        yield context.problem(
            key,
            "zero.stage",
            rule="must be none at ZeRO 3, where DeepSpeed scatters gradients by itself, parameter by parameter",
            fix="use zero.stage=1, or compress.data=none",
        )
    if context.replicas == 1:
        yield context.warning(
            key,
            rule="must go with several data parallel ranks; with one nothing is sent",
            fix="start more ranks, or remove the key",
        )


def compressed_activations_get_smaller(context: RuleContext) -> Iterator[Problem]:
    config, compress = context.config, context.config.parallel.communication.compress
    compute = config.precision.compute
    stream = "fp32" if config.model.residual.fp32 else compute
    for axis, ranks, dtype in (
        ("tensor", config.parallel.tensor, compute), ("pipeline", config.parallel.pipeline, stream)
    ):  # fmt: skip
        wire, key = getattr(compress, axis), f"parallel.communication.compress.{axis}"
        if wire == "none":
            continue
        if ranks == 1:
            yield context.warning(
                key,
                rule=f"must go with parallel.{axis} above 1; nothing is sent on that axis",
                fix=f"set parallel.{axis}, or remove the key",
            )
        if wire in ("bf16", "fp16") and dtype != "fp32":
            yield context.problem(
                key,
                "precision.compute",
                rule=f"must be none or int8_block where activations have 16 bits already ({dtype})",
                fix="use int8_block, or remove the key",
            )


def blocks_of_activations_are_alike(context: RuleContext) -> Iterator[Problem]:
    """A scale for each block of the stream between stages: of neither one number nor of numbers of another kind."""
    config, key = context.config, PIPELINE
    if config.parallel.communication.compress.pipeline != "int8_block":
        return
    if config.model.hidden_size % LEAST_BLOCK:
        yield context.problem(
            key,
            "model.hidden_size",
            rule=f"int8_block must go with a hidden size that {LEAST_BLOCK} divides, so that blocks are whole",
            fix=f"use a multiple of {LEAST_BLOCK}, or compress.pipeline=bf16",
        )
    losses = [getattr(use.options, "losses", None) for use in context.used]
    if any(each and (each.balance or each.sequence or each.z) for each in losses):
        yield context.problem(
            key,
            rule="must not be int8_block with auxiliary losses of experts, which travel among the activations: blocks "
            "would round small gradients by the losses' large ones",
            fix="use compress.pipeline=bf16",
        )


INPUT_RULES = (table_is_for_this_job,)
