"""Where a table chooses algorithms, a step sends what the formulas say, to the byte. Hosts are pretended (islands)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.config import resolve
from megatron.config.arithmetic.algorithm_table import (
    DOUBLING,
    OPERATIONS,
    RECURSIVE,
    RING,
    THREE,
    TWO_LEVEL,
    candidates,
)
from megatron.model.costs.traffic import NotPredicted
from megatron.parallel.messages.traffic import Tally
from megatron.plan.messages.predict import predict
from tests.engine.test_traffic import comparable, counted
from tests.selection import toured
from tests.training.matrix import Case, cases, merged
from tests.workers import run

# Differences in messages: how gradients are reduced, layers cut, and experts spread. Two hosts of two ranks, or
# four of one.
RUNS = [
    ("fp32: neox on tp2 · dp2, ZeRO 1", 2, TWO_LEVEL),
    ("fp32: gpt2 on tp2 · pp2, sequence parallel, recomputation", 1, RING),
    ("fp32: mqa on cp4 nested, ZeRO 2, recomputation", 1, RECURSIVE),
    ("fp32: moe on dp2 · ep2, ZeRO 1, four micro-batches", 1, TWO_LEVEL),
    ("fp32: llama on dp2, ZeRO 3, four micro-batches, recomputation", 1, TWO_LEVEL),
    ("bf16: llama on dp2, ZeRO 1, four micro-batches", 1, DOUBLING),
    ("Muon: llama on dp2, ZeRO 1, four micro-batches", 1, "backend:gloo"),
]


def table(file: Path, ranks: int, hosts: int, algorithm: str, least: int = 64) -> str:
    """A machine.yml whose messages go by one algorithm from `least` bytes on, in groups of every form."""
    forms = [(over, size) for over in range(2, hosts + 1) for size in range(over, ranks + 1, over)]
    rows = [
        {"operation": operation, "hosts": over, "ranks": size, "choices": [[0, "backend"], [least, algorithm]]}
        for over, size in forms
        for operation in OPERATIONS
        if algorithm in candidates(operation, over) or algorithm.startswith("backend:")
    ]
    facts = {"ranks": ranks, "hosts": hosts, "backend": "gloo", "device": "x"}
    file.write_text(yaml.safe_dump({"algorithms": {**facts, "table": rows}}))
    return str(file)


def routed(values: dict, ranks: int, steps: int) -> list[list[list]]:
    """As `counted`, by the table."""
    import torch

    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.algorithms import chosen_algorithms
    from megatron.training.world import World

    config = resolve(values, ranks=ranks)
    mesh = Mesh.build(Layout.of(config, ranks))
    world = World(torch.device("cpu"), mesh, GroupCommunicator(), SOLO)
    with chosen_algorithms(config, world, lambda _: None):
        return counted(values, ranks, steps)


def named(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


@pytest.mark.parametrize(("name", "island", "algorithm"), toured(RUNS, "layouts"))
def test_counted_and_predicted_are_equal(name: str, island: int, algorithm: str, tmp_path):
    case = named(name)
    ranks = case.ranks
    file = table(tmp_path / "machine.yml", ranks, ranks // island, algorithm)
    check(merged(case.values, {"parallel": {"communication": {"table": file, "island": island}}}), ranks, case)


def test_small_gathers_are_joined(tmp_path):
    """ZeRO 3 gathers each parameter that stays everywhere after the update: many messages, or one."""
    case = named("fp32: llama on dp2, ZeRO 3, four micro-batches, recomputation")
    file = Path(table(tmp_path / "machine.yml", 2, 2, RING, least=10**6))
    document = yaml.safe_load(file.read_text())
    for row in document["algorithms"]["table"]:
        row |= {"join_below": 10**5} if row["operation"] == "all_gather" else {}
    file.write_text(yaml.safe_dump(document))
    values = merged(case.values, {"parallel": {"communication": {"table": str(file), "island": 1}}})
    config = resolve(values, ranks=2)
    counts = [
        predict(each, 2, 0, weighted=True).step.by("phase", "operation")["update", "all_gather"]
        for each in (resolve(case.values, ranks=2), config)
    ]
    assert counts[0][0] > counts[1][0] == 1 and counts[0][1] == counts[1][1]
    own = predict(config, 2, 0, weighted=True)
    assert [found[-1] for found in run(2, routed, values, 2, own.settled + 1)] == [own.step.rows()] * 2


SMALL = {"training": {"micro_batch_size": 1}}


def test_three_levels(tmp_path):
    """Eight ranks: two hosts of two pairs."""
    case = named("fp32: neox on tp2 · dp2, ZeRO 1")
    for algorithm in sorted({*THREE} - {"three_level_ring"}):  # between two hosts as recursive doubling
        file = table(tmp_path / f"{algorithm}.yml", 8, 2, algorithm)
        communication = {"table": file, "island": 4, "pair": 2}
        values = merged(case.values, {"parallel": {"tensor": 1, "communication": communication}, **SMALL})
        check(values, 8, case)


def check(values: dict, ranks: int, case: Case) -> None:
    config = resolve(values, ranks=ranks)
    predicted = [predict(config, ranks, rank, weighted=True) for rank in range(ranks)]
    steps = max(2, predicted[0].settled + 1)
    every = [list(map(Tally.of_rows, found)) for found in run(ranks, routed, values, ranks, steps)]
    for own, found in zip(predicted, every):
        assert comparable(own, own.step).rows() == comparable(own, found[-1]).rows()
    together = sum((own.step for own in predicted), Tally())
    assert together.rows() == sum((found[-1] for found in every), Tally()).rows()
    groups = {call.group.partition("/")[2] for call, *_ in together}
    algorithm = config.parallel.communication.table
    assert groups - {""} or "backend:" in Path(algorithm).read_text(), "some go by the table"


@pytest.mark.parametrize(
    ("file", "said"), [("none.yml", "No such file"), ("other.yml", "8 in the table, 4 in this job")]
)
def test_a_table_that_says_nothing(file: str, said: str, tmp_path):
    table(tmp_path / "other.yml", 8, 2, TWO_LEVEL)
    values = merged(named("fp32: neox on tp2 · dp2, ZeRO 1").values, {"parallel": {"communication": {"island": 2}}})
    config = resolve(values, ranks=4)
    communication = config.parallel.communication.model_copy(update={"table": str(tmp_path / file)})
    parallel = config.parallel.model_copy(update={"communication": communication})
    with pytest.raises(NotPredicted, match=said):
        predict(config.model_copy(update={"parallel": parallel}), 4, 0)
