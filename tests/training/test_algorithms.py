"""Runs whose collectives go as a table says: the losses of the plain run, and DeepSpeed's calls are among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron.config import load
from megatron.config.arithmetic.algorithm_table import OPERATIONS, RING, TWO_LEVEL, AlgorithmTable
from megatron.report.communication import read_accounts
from megatron.training.algorithms import pairs_of, processor
from megatron.worker.place import StartError
from tests.training.test_run import TINY, job, losses
from tests.workers import run
from tools.communication import main

FACTS = {"ranks": 4, "hosts": 2, "backend": "gloo", "device": processor()}
ISLANDS, MISSING = "parallel.communication.island=2", "backend:mpi"
SHORT = ["training.steps=2", "evaluation.every=null", "checkpoint.every=null", "logging.communication=counts",
         "training.micro_batch_size=1"]  # fmt: skip


def write(path: Path, algorithm: str) -> None:
    """A table that sends all of 64 bytes and more that way."""
    choices = {
        (each, 2, ranks): ((64, TWO_LEVEL if each == "all_to_all" and algorithm == RING else algorithm),)
        for each in OPERATIONS
        for ranks in (2, 4)
    }
    path.write_text(yaml.safe_dump({"algorithms": AlgorithmTable(FACTS, choices).document()}))


def using(folder: str, algorithm: str) -> str:
    return f"parallel.communication.table={Path(folder, algorithm.replace(':', '_'))}.yml"


def runs(folder: str) -> dict[str, tuple[list[float], dict]]:
    """Losses, and what rank 0 has sent by group and operation, without and with a table."""
    found = {}
    for name, overrides in (("zero 3", ["zero.stage=3"]), ("tensor", ["parallel.tensor=2", "precision=bf16"])):
        for way in ("plain", TWO_LEVEL, RING):
            at = Path(folder, f"{name} {way}")
            table = [] if way == "plain" else [using(folder, way)]
            lines = job(folder, 4, f"run.dir={at}", *SHORT, ISLANDS, *overrides, *table)
            sent = read_accounts(at)[0].at(1).by("group", "operation")
            crossing = read_accounts(at)[0].to_other_hosts(1).by("group")
            found[f"{name} {way}"] = losses(lines), sent, crossing
    return found


def wrong(folder: str) -> list[str]:
    """Errors of tables for another job, or with algorithms that are not installed."""
    said = []
    for algorithm, island in ((TWO_LEVEL, []), (MISSING, [ISLANDS])):
        with pytest.raises(StartError) as error:
            job(folder, 4, *SHORT, *island, using(folder, algorithm))
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("algorithms")
    (made / "tiny.yml").write_text(TINY)
    for algorithm in (TWO_LEVEL, RING, MISSING):
        write(made / f"{algorithm.replace(':', '_')}.yml", algorithm)
    return str(made)


@pytest.mark.tour
def test_losses_are_those_without_a_table(folder, capsys):
    found = run(4, runs, folder)[0]
    for name, rounding in (("zero 3", 1e-5), ("tensor", 2e-2)):
        plain, sent, _ = found[f"{name} plain"]
        assert not any("/" in group for group, _ in sent)
        for way in (TWO_LEVEL, RING):
            values, sent, crossing = found[f"{name} {way}"]
            assert values == pytest.approx(plain, rel=rounding), f"{name} {way}: sums in another order"
            assert any(group == "data/between" for group, _ in sent), (name, way, sorted(sent))
            assert crossing, "what goes to the other island is counted"
    calls = found[f"zero 3 {TWO_LEVEL}"][1]
    assert {("data/between", "all_gather"), ("data/between", "reduce_scatter")} <= set(calls), "DeepSpeed's own"
    assert ("data", "all_gather") not in calls and ("data", "reduce_scatter") not in calls
    bytes_to_others = {}
    for way in ("plain", TWO_LEVEL):
        at = Path(folder, f"zero 3 {way}")
        capsys.readouterr()
        assert main([str(at), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        told = [account.to_other_hosts(shown["step"]) for account in read_accounts(at).values()]
        bytes_to_others[way] = sum(call["to_other_hosts"] for call in shown["calls"])
        assert bytes_to_others[way] == sum(size for each in told for *_, size in each) > 0
        assert main([str(at)]) == 0 and "to other hosts: " in capsys.readouterr().out
    # two hosts of two: a ring of 4 sends 3/4 over each of two links, two levels one half
    assert 0.6 < bytes_to_others[TWO_LEVEL] / bytes_to_others["plain"] < 0.8


@pytest.mark.parametrize(("hosts", "pair", "ranks"), [("aaaaaabbbbbb", 4, "4 to 7"), ("abababab", 2, "0 to 1")])
def test_pairs_over_hosts_are_refused_before_groups_are_made(folder, hosts, pair, ranks):
    own = ["training.global_batch_size=48", f"parallel.communication.pair={pair}"]
    config = load([f"{folder}/tiny.yml"], own, ranks=len(hosts)).config
    with pytest.raises(StartError, match=f"pair must lie within a host: with {pair}, ranks {ranks} .* on a, b"):
        pairs_of(config, hosts)
    assert pairs_of(config, sorted("ab" * 4)) == [rank // pair for rank in range(8)]


def test_tables_of_another_job_and_missing_backends_are_refused(folder):
    hosts, backend = run(4, wrong, folder)[0]
    assert "hosts: 2 in the table, 1 in this job" in hosts and "--tune" in hosts
    assert "must name backends that torch has" in backend and "mpi" in backend and "0, 1, 2, 3" in backend
