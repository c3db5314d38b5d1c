"""launch.compare: hosts are measured before each start, and slow ones named."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config.problems import ConfigError
from megatron.launch import supervisor
from megatron.launch.doctor.doctor import FAIL, WARN, Doctor, HostFinding
from megatron.launch.doctor.probe import MEASURES
from megatron.launch.job.hosts import RunnerChoice
from megatron.launch.job.job_plan import make_plan
from megatron.launch.launcher.launcher import Result
from megatron.launch.report.console import Failure
from megatron.launch.wire.specification import Host
from megatron.report.ledger import Ledger, read_ledger
from megatron.trials.chaos import own_network
from megatron.trials.job import TrialJob
from megatron.worker.network import Address
from tests.chaos.hosts import TrialHosts
from tests.launch.launcher.test_spares import plan_of
from tests.paths import ROOT

NAMES = ("node1", "node2", "node3")
COMPARE = ["launch.compare=true"]


def examined(monkeypatch, answers: dict[str, list[dict]], result: Result | None = None) -> tuple[Doctor, list[str]]:
    """A doctor of three hosts whose probes answer so, and what it asks of them."""
    asked = []
    ended = result or Result(0, None, (), (), 1.0, True)

    def run(self, words, slots=(), address=None):
        asked.append(f"{' '.join(words)} {address or ''}".strip())
        hosts = [SimpleNamespace(addresses=[Address("eth0", f"10.0.0.{n + 1}", 24)]) for n in range(3)]
        told = dict(enumerate(answers.get(words[0], [])))
        self.signals = self.signals or ended.signals
        return SimpleNamespace(hosts=hosts, started=ended.started), ended, SimpleNamespace(answers=lambda: told)

    monkeypatch.setattr(Doctor, "_run", run)
    choice = RunnerChoice("ssh", tuple(Host(name, (0,)) for name in NAMES), "a test")
    return Doctor(choice, lambda job: []), asked


def rates(products: float, devices: int = 0) -> dict:
    return {**{each.name: 9e9 for each in MEASURES}, "products": products, "devices": devices}


def met(slow: int) -> list[dict]:
    return [
        {"rates": {str(other): 1e6 if slow in (rank, other) else 9e9 for other in range(3) if other != rank}}
        for rank in range(3)
    ]


def test_only_what_is_slow_is_told(monkeypatch):
    doctor, asked = examined(monkeypatch, {"speeds": [rates(50e9), rates(20e9), rates(51e9)], "pairs": met(2)})
    found = [(each.grade, each.check, each.hosts) for each in doctor.compared()]
    assert found == [(WARN, "products", ("node2",)), (WARN, "pairs", ("node3",))]
    assert asked == ["speeds", "pairs gloo 10.0.0.1"]
    doctor, asked = examined(monkeypatch, {"speeds": [rates(50e9, devices=8)] * 3, "pairs": met(9)})
    assert doctor.compared() == [] and asked[1:] == ["pairs gloo 10.0.0.1", "pairs nccl 10.0.0.1"]


def test_after_a_signal_nothing_more_is_measured(monkeypatch):
    doctor, asked = examined(monkeypatch, {}, Result(143, None, (), (signal.SIGTERM,), 1.0, True))
    assert doctor.compared() == [] and doctor.signals == (signal.SIGTERM,) and asked == ["speeds"]


def test_a_host_that_does_not_answer_is_told_and_the_start_is_tried(monkeypatch, tmp_path, capsys):
    first = Failure(1.0, "node2", None, 255, "its agent was not ready within 5 s")
    doctor, _ = examined(monkeypatch, {}, Result(255, first, (first,), (), 1.0, False))
    (found,) = doctor.compared()
    assert found.hosts == ("node2",) and "not ready" in found.value
    assert supervisor._compare_hosts(plan_of(tmp_path, 1, 1, 1, own=COMPARE)) == 0
    assert "warning: speeds of node2: its agent was not ready" in capsys.readouterr().err


def test_hosts_and_spares_are_measured_as_the_run_would_run(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(Doctor, "compared", lambda self: seen.append(self) or [])
    own = [*COMPARE, "launch.environment={A: b}", "launch.python=/usr/bin/python9", "launch.start_timeout=7"]
    plan = plan_of(tmp_path, 2, 2, 2, own=own)
    assert [host.name for host in plan.choice.spares] == ["node3"]
    assert supervisor._compare_hosts(plan) == 0
    (doctor,) = seen
    assert doctor.names == [*NAMES] and doctor.environment["A"] == "b" and doctor.directory == plan.job.directory
    assert (doctor.python, doctor.timeout) == ("/usr/bin/python9", 7.0)


def test_slow_hosts_are_in_the_ledger_and_a_signal_ends_it(monkeypatch, tmp_path):
    plan = plan_of(tmp_path, 1, 1, 1, own=COMPARE)
    slow = [HostFinding(WARN, "products", "20 GFLOP/s, the others 50 GFLOP/s", ("node2",))]
    monkeypatch.setattr(Doctor, "compared", lambda self: slow)
    assert supervisor._compare_hosts(plan) == 0
    assert not (tmp_path / "run" / "ledger.jsonl").exists(), "a run that has not begun has none"
    (tmp_path / "run").mkdir()
    Ledger(tmp_path / "run" / "ledger.jsonl").write("start", step=0)
    assert supervisor._compare_hosts(plan) == 0
    entry = read_ledger(tmp_path / "run" / "ledger.jsonl")[-1]
    assert entry["event"] == "compared"
    assert entry["slow"] == [{"hosts": ["node2"], "check": "products", "value": slow[0].value}]

    def stopped(self):
        self.signals = (signal.SIGINT,)
        return []

    monkeypatch.setattr(Doctor, "compared", stopped)
    monkeypatch.setattr(supervisor, "start", lambda *_: pytest.fail("nothing starts after a signal"))
    monkeypatch.setattr(supervisor, "tell_need", lambda plan: plan)
    assert supervisor.supervise(plan) == 130


def test_before_each_start(monkeypatch, tmp_path):
    plan, order = plan_of(tmp_path, 1, 1, 1, own=[*COMPARE, "launch.restart_delay=0"]), []
    failed = Failure(1.0, "node1", 0, -9)
    ends = iter([Result(137, failed, (failed,), (), 1.0, True), Result(0, None, (), (), 1.0, True)])
    monkeypatch.setattr(supervisor, "tell_need", lambda plan: plan)
    monkeypatch.setattr(supervisor, "start", lambda plan, attempt: order.append(attempt) or next(ends))
    monkeypatch.setattr(supervisor, "_compare_hosts", lambda plan: order.append("compare") or 0)
    assert supervisor.supervise(plan) == 0 and order == ["compare", 0, "compare", 1]
    order.clear()
    ends = iter([Result(0, None, (), (), 1.0, True)])
    launch = plan.launch.model_copy(update={"compare": False})
    config = plan.resolved.config.model_copy(update={"launch": launch})
    assert supervisor.supervise(replace(plan, resolved=replace(plan.resolved, config=config))) == 0 and order == [0]


def test_a_host_that_never_comes_to_an_end_is_named(tmp_path, monkeypatch):
    """As where its disk does not answer: the start is tried all the same."""
    monkeypatch.setattr("megatron.launch.doctor.doctor.LONGEST", 0.0)
    config = str(ROOT / "configs/test/tiny_neox.yml")
    plan = make_plan(str(ROOT / "train.py"), [config, "launch.device=cpu", f"run.dir={tmp_path}/run"], [], {})
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o700)
    doctor = Doctor(plan.choice, lambda job: plan.choice.commands(job, plan.launch), str(python), 8.0, run=plan.job)
    (found,) = doctor.compared()
    assert (found.grade, found.check, len(found.hosts)) == (FAIL, "speeds", 1) and "did not end in time" in found.value


def test_who_asks_meanwhile_is_told_what_is_going_on(tmp_path):
    """A stand-in for the hosts' Python asks the launcher that has started it."""
    config = str(ROOT / "configs/test/tiny_neox.yml")
    plan = make_plan(str(ROOT / "train.py"), [config, "launch.device=cpu", f"run.dir={tmp_path}/run"], [], {})
    python, said, answer = tmp_path / "python", tmp_path / "said", json.dumps({**rates(9e9), "rates": {}})
    words = shlex.join([sys.executable, str(ROOT / "deepy.py"), "--status", f"{tmp_path}/run"])
    python.write_text(f"#!/bin/sh\n{words} >> {said} 2>&1\necho '{answer}'\n")
    python.chmod(0o700)
    doctor = Doctor(plan.choice, lambda job: plan.choice.commands(job, plan.launch), str(python), run=plan.job)
    assert doctor.compared() == []
    told = [line.partition(", since")[0] for line in said.read_text().splitlines()]
    assert told == [f"no rank is running: comparing 1 host (launch.compare: {what})" for what in ("speeds", "pairs")]
    assert not (tmp_path / "run/launcher.json").exists()


def test_hosts_that_cannot_be_compared_are_refused_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)launch.compare = true.*must have hosts to compare"):
        plan_of(tmp_path, 2, spares=0, own=COMPARE)


@pytest.mark.parametrize("runner", ["pdsh", "openmpi", "mpich"])
def test_runners_whose_agents_call_are_refused(monkeypatch, tmp_path, runner):
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/usr/bin/true")
    with pytest.raises(
        ConfigError, match=rf"(?s)reaches each host by itself, which {runner} does not.*launch.runner=ssh"
    ):
        plan_of(tmp_path, 1, 1, spares=0, own=[*COMPARE, f"launch.runner={runner}"])


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(not own_network(), reason="needs root, for network namespaces")
def test_a_run_names_the_host_whose_network_is_slow(tmp_path: Path):
    """Three hosts made of namespaces. The second receives 20 Mbit/s. The run continues all the
    same."""
    words = [str(ROOT / "configs/test/tiny_neox.yml"), "training.steps=4", "training.global_batch_size=12"]
    words += ["schedule.warmup_steps=1", "launch.device=cpu", *COMPARE]
    with TrialHosts(3) as hosts:
        hosts.slow("host2", 20_000)
        job = TrialJob(tmp_path / "job", words, 1, hosts=hosts)
        try:
            job.start()
            assert job.finish() == 0, job.tail(60)
        finally:
            job.close()
    said = job.output.read_text()
    assert "comparing 3 hosts (launch.compare)" in said
    named = [line for line in said.splitlines() if "warning: pairs of" in line]
    assert len(named) == 1 and "pairs of host2" in named[0], said
    assert len(job.losses()) == 4 and not job.processes()
    assert json.loads((job.run / "ledger.jsonl").read_text().splitlines()[0])["event"] == "start"
