"""The time of a CPU's step from what a rehearsal counts: the figures of a host found again, and sums written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from bench.plan import host_time, machine
from bench.runner import run
from megatron.config import resolve
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.plan.devices import HostTime, known_devices
from megatron.rehearsal import command
from megatron.rehearsal.command import in_own_process
from megatron.rehearsal.report import HostWork, step_seconds, works
from megatron.testing.ranks import on_ranks
from tests.engine.test_traffic import account_of

FIGURES = HostTime(operation=3.0, collective=1200.0, send=400.0, gather=300.0, step=5000.0)


def device(host: HostTime | None = FIGURES):
    return known_devices()[0]["cpu"].model_copy(update={"host": host})


def drawn(number: int) -> list[HostWork]:
    generator = np.random.default_rng(4)
    return [HostWork(*generator.integers(1, 1000, 4).tolist(), 0.0) for _ in range(number)]


def taken(work: HostWork) -> float:
    return work.seconds(device(), "fp32")


def test_figures_are_found_again():
    found = host_time.fitted([(work, taken(work)) for work in drawn(12)])
    assert found.model_dump() == pytest.approx(FIGURES.model_dump(), rel=1e-3)


def test_no_figure_is_negative():
    """Runs that take less for each of their sends: sends explain nothing."""
    found = host_time.fitted([(work, 1e-5 * work.operations * (1 - work.sends / 2000)) for work in drawn(12)])
    assert min(found.model_dump().values()) == 0.0 and found.operation > 0


def test_flops_come_on_top():
    work = HostWork(10, 1, 1, 1, 1e9)
    at = device()
    wanted = (10 * 3 + 1200 + 400 + 300 + 5000) * 1e-6 + 1e9 / (0.9 * 0.085e12)
    assert work.seconds(at, "fp32") == pytest.approx(wanted)
    with pytest.raises(ValueError, match="no figures of the host"):
        work.seconds(device(None), "fp32")


def counted_rows(config):
    """Of a real step of this rank, the second: stages of a pipeline say in the first what they send."""
    mesh = Mesh.build(Layout.of(config, 2))
    return account_of(config, build_engine(config, mesh, torch.device("cpu")), 2)[1]


def configuration(ranks=2, **sections):
    return resolve(
        {
            "model": {"layers": "(attention/mlp) x2", "hidden_size": 16, "attention": {"heads": 2}, "vocab_size": 32},
            "training": {"steps": 1, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 8},
            **sections,
        },
        ranks=ranks,
    )


def test_a_pipeline_waits_until_it_is_full():
    config = configuration(parallel={"pipeline": 2})
    slow, fast = HostWork(1000, 0, 0, 0, 0), HostWork(500, 0, 0, 0, 0)
    assert step_seconds(config, 2, [fast, slow], device()) == pytest.approx((1000 + 500 / 8) * 3e-6 + 5e-3)
    assert step_seconds(configuration(), 2, [fast, slow], device()) == pytest.approx(1000 * 3e-6 + 5e-3)


@pytest.mark.parametrize("sections", [{"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}])
def test_calls_are_those_that_a_run_makes(sections):
    config = configuration(**sections)
    [work] = works(config, 2, {0: in_own_process(config, 2, 0)})
    rows = on_ranks(2, counted_rows, config)[0]
    sends = sum(row[6] for row in rows if row[4] in ("send", "recv"))
    assert (work.collectives, work.sends) == (sum(row[6] for row in rows) - sends, sends)
    assert work.operations > 0 and work.gathers == 0


def test_ranks_that_share_a_sequence_wait_for_the_slowest():
    config = configuration(parallel={"context": 2})
    first, second = (in_own_process(config, 2, rank) for rank in (0, 1))
    second = replace(second, operations=first.operations + 100)
    [of_both] = works(config, 2, {0: first, 1: second})
    assert [of_both] == works(config, 2, {1: second})


def test_an_update_counts_once():
    """Two micro-batches predict eight, but for some operations: the first one of a step finds
    no gradients, and a few stand between passes. The update is a third of all."""
    config = configuration(ranks=1)
    [shown] = works(config, 1, {0: in_own_process(config, 1, 0)})
    [whole] = works(config, 1, {0: in_own_process(config, 1, 0, 8)})
    assert shown.operations == pytest.approx(whole.operations, rel=0.01) and shown.flops == whole.flops


@pytest.mark.parametrize("machine_file", [False, True])
def test_the_command_tells_the_time_by_the_figures_of_a_machine(machine_file, tmp_path, capsys):
    mine = device(HostTime(operation=0, collective=0, send=0, gather=0, step=7e6))
    file, run = tmp_path / "machine.yml", tmp_path / "run.yml"
    file.write_text(yaml.safe_dump({"devices": {"mine": mine.model_dump(exclude_none=True)}}))
    values = {"layers": "(attention/mlp) x2", "hidden_size": 16, "attention": {"heads": 2}, "vocab_size": 32}
    training = {"steps": 1, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 8}
    run.write_text(yaml.safe_dump({"model": values, "training": training}))
    named = ["--device=mine", f"--machine={file}"] if machine_file else ["--device=cpu"]
    assert command.main(["--ranks=2", *named, str(run)]) == 0
    output = capsys.readouterr().out
    where = f"mine in {file}" if machine_file else "cpu in megatron/plan/devices.yml"
    assert f"and figures of {where}" in output and ("a step: about 7 s" in output) == machine_file


def test_gathered_tensors():
    """Each parameter once, and half as often again with recomputation."""
    plain = configuration(zero={"stage": 3})
    recomputing = plain.training.model_copy(
        update={"activation_checkpointing": plain.training.activation_checkpointing.model_copy(update={"mode": "full"})}
    )
    again = plain.model_copy(update={"training": recomputing})
    counts = in_own_process(plain, 2, 0)
    [few], [more] = works(plain, 2, {0: counts}), works(again, 2, {0: counts})
    [parameters] = on_ranks(1, parameters_of, configuration(ranks=1))
    assert few.gathers == 4 * parameters and more.gathers == 1.5 * few.gathers


def parameters_of(config) -> int:
    return len(list(build_engine(config, Mesh.single(), torch.device("cpu")).module.parameters()))


@pytest.mark.tour
def test_a_measured_machine_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(host_time, "RUNS", (("tiny_neox", 1, []), ("tiny_llama", 2, ["parallel.tensor=2"])))
    monkeypatch.setattr(machine, "COPIED", 1 << 16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)  # of the tests' own process
    file = tmp_path / "machine.yml"
    small = ["--widths", "128", "--tokens", "512", "--repeat", "3", "--rounds", "1"]
    assert run("machine", ["--name", "mine", "--like", "cpu", "--host", *small, "--output", str(file)]) == 0
    written = yaml.safe_load(file.read_text())["devices"]["mine"]["host"]
    assert set(written) == set(HostTime.model_fields) and sum(written.values()) > 0
    assert known_devices(file)[0]["mine"].host == HostTime(**written)
