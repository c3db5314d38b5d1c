"""How ranks talk: a table of algorithms that is for this job."""

from __future__ import annotations

from collections.abc import Iterator

from ..algorithm_table import read_table
from ..file_access import unreadable
from ..problems import Problem
from ..rule_context import RuleContext

TABLE = "parallel.communication.table"
MAKE = "make one with tools/bench/communication.py --tune on this job's hosts, or remove the key"


def islands_fill_the_job(context: RuleContext) -> Iterator[Problem]:
    island = context.config.parallel.communication.island
    if island is not None and context.ranks is not None and context.ranks % island:
        yield context.problem(
            "parallel.communication.island",
            rule=f"must divide the run's {context.ranks} ranks",
            fix="give the ranks that share a fast link, or remove the key: a host's ranks are an island",
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


RULES = (islands_fill_the_job, compressed_gradients_are_ours_to_sum)
INPUT_RULES = (table_is_for_this_job,)
