"""Messages between ranks: islands, compression, and a table of algorithms for this job."""

from collections.abc import Iterator

from ..arithmetic.algorithm_table import read_table
from ..arithmetic.wire import LEAST_BLOCK, PIPELINE
from ..file_access import unreadable
from ..problems import Problem
from ..rule_context import Check, RuleContext

SECTION = "parallel.communication"
TABLE, DATA = f"{SECTION}.table", f"{SECTION}.compress.data"
MAKE = "make one with bench/communication.py --tune on this job's hosts, or remove the key"


def islands_fill_the_job(context: RuleContext) -> Iterator[Problem]:
    options = context.config.parallel.communication
    within, whole = options.island or context.ranks, "island" if options.island else "run"
    if options.island is not None and context.ranks is not None and context.ranks % options.island:
        yield context.problem(
            f"{SECTION}.island",
            rule=f"must divide the run's {context.ranks} ranks",
            fix="give the ranks that share a fast link, or remove the key: a host's ranks are an island",
        )
    if options.pair is not None and within is not None and within % options.pair:
        fix = "give the ranks of a host that share the fastest links, or remove the key"
        yield context.problem(f"{SECTION}.pair", rule=f"must divide the {whole}'s {within} ranks", fix=fix)


def table_is_for_this_job(context: RuleContext) -> Iterator[Problem]:
    """As far as it is known before the ranks are up. The ranks compare the hosts and the backends."""
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
            f"{TABLE} {SECTION}.pair",
            rule="must go with pair where it has algorithms in three levels",
            fix=f"set {SECTION}.pair to the ranks that share the fastest links, or tune again without it",
        )
    launch, island = context.config.launch, context.config.parallel.communication.island
    facts = {"ranks": context.ranks} if context.ranks is not None else {}
    if island is not None and context.ranks is not None:
        facts["hosts"] = context.ranks // island
    known = {**facts, "backend": {"cpu": "gloo", "cuda": "nccl"}.get(launch.device, table.facts["backend"])}
    if wrong := table.differs(known):
        yield context.problem(TABLE, rule=f"must be a table that was made on such a job ({'; '.join(wrong)})", fix=MAKE)


def compressed_gradients_are_sent(context: RuleContext) -> Iterator[Problem]:
    if context.config.parallel.communication.compress.data != "none" and context.replicas == 1:
        rule = "must go with several data parallel ranks, since one rank sends nothing"
        yield context.warning(DATA, rule=rule, fix="start more ranks, or remove the key")


def compressed_activations_get_smaller(context: RuleContext) -> Iterator[Problem]:
    config, compress = context.config, context.config.parallel.communication.compress
    compute = config.precision.compute
    stream = "fp32" if config.model.residual.fp32 else compute
    for axis, ranks, dtype in (
        ("tensor", config.parallel.tensor, compute), ("pipeline", config.parallel.pipeline, stream)
    ):  # fmt: skip
        wire, key = getattr(compress, axis), f"{SECTION}.compress.{axis}"
        if wire != "none" and ranks == 1:
            rule = f"must go with parallel.{axis} above 1, since nothing is sent on that axis"
            yield context.warning(key, rule=rule, fix=f"set parallel.{axis}, or remove the key")
        if wire in ("bf16", "fp16") and dtype != "fp32":
            yield context.problem(
                f"{key} precision.compute",
                rule=f"must be none or int8_block where activations have 16 bits already ({dtype})",
                fix="use int8_block, or remove the key",
            )


def blocks_have_one_kind_of_numbers(context: RuleContext) -> Iterator[Problem]:
    if context.config.parallel.communication.compress.pipeline != "int8_block":
        return
    losses = [getattr(use.options, "losses", None) for use in context.used]
    if any(each and (each.balance or each.sequence or each.z) for each in losses):
        yield context.problem(
            PIPELINE,
            rule="must not be int8_block with auxiliary losses of experts, which are sent with the activations: blocks "
            "would round small gradients by the losses' large ones",
            fix="use compress.pipeline=bf16",
        )


CHECKS = (
    Check(
        f"{DATA} zero.stage",
        lambda c: c.parallel.communication.compress.data != "none" and c.zero.stage == 3,
        "must be none at ZeRO 3, where DeepSpeed scatters gradients itself, parameter by parameter",
        "use zero.stage=1, or compress.data=none",
    ),
    Check(
        f"{PIPELINE} model.hidden_size",
        lambda c: c.parallel.communication.compress.pipeline == "int8_block" and c.model.hidden_size % LEAST_BLOCK,
        f"int8_block must go with a hidden size that {LEAST_BLOCK} divides, so that blocks are whole",
        f"use a multiple of {LEAST_BLOCK}, or compress.pipeline=bf16",
    ),
    Check(
        f"{PIPELINE} model.hidden_size parallel.columns",
        lambda c: (
            c.parallel.communication.compress.pipeline == "int8_block"
            and c.model.hidden_size % LEAST_BLOCK == 0 == c.model.hidden_size % c.parallel.columns
            and c.model.hidden_size // c.parallel.columns % LEAST_BLOCK
        ),
        lambda c: (
            f"int8_block must go with channels of a column that {LEAST_BLOCK} divides, so that blocks are whole, and "
            f"here are {c.model.hidden_size // c.parallel.columns}"
        ),
        "use compress.pipeline=bf16, or fewer columns",
    ),
)
INPUT_RULES = (table_is_for_this_job,)
