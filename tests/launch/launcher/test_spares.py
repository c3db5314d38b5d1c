"""Spare hosts take the places of hosts that are lost or compute wrong values: in the plan, and between real hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config.problems import ConfigError
from megatron.config.sections.layout import LaunchSection
from megatron.launch.agent.agent import Agent
from megatron.launch.job.hosts import HostError, choose_runner
from megatron.launch.job.job_plan import JobPlan, commands, make_plan
from megatron.launch.launcher.launcher import Result
from megatron.launch.report.console import HOST_LOST, Failure
from megatron.launch.supervisor import _elsewhere, _on_hosts_that_are_left
from megatron.launch.wire.protocol import decode, encode
from tests.launch.host_job import DEEPY
from tests.launch.launcher.test_real_training import HOSTFILE, TRAIN, lines, losses, reference  # noqa: F401  (a fixture)
from tests.launch.namespaces import Cluster
from tests.paths import ROOT

SPARE = ["launch.spares=1", "launch.restarts=3", "launch.restart_delay=0"]


def hostfile(folder: Path, *slots: int) -> str:
    path = folder / "hosts"
    path.write_text("".join(f"node{index + 1} slots={number}\n" for index, number in enumerate(slots)))
    return str(path)


def plan_of(folder: Path, *slots: int, spares: int = 1, own: Sequence[str] = ()) -> JobPlan:
    hosts = [f"launch.hostfile={hostfile(folder, *slots)}", "launch.restarts=3", f"launch.spares={spares}"]
    words = [str(ROOT / "configs/test/tiny_neox.yml"), "launch.device=cpu", f"run.dir={folder}/run", *hosts, *own]
    return make_plan(str(ROOT / "train.py"), words, [], {})


def after_losing(plan: JobPlan, *names: str) -> JobPlan:
    failures = tuple(Failure(1.0, name, None, HOST_LOST, "nothing was heard from it") for name in names)
    return _on_hosts_that_are_left(plan, Result(HOST_LOST, failures[0], failures, (), 10.0, True))


def names(plan: JobPlan) -> list[str]:
    assert plan.job.hosts == plan.choice.hosts
    return [host.name for host in plan.choice.hosts]


def test_the_last_hosts_are_kept_back(tmp_path):
    def chosen(*slots: int, spares: int):
        return choose_runner(LaunchSection(hostfile=hostfile(tmp_path, *slots), spares=spares, runner="ssh"), {})

    found = chosen(2, 2, 4, spares=1)
    assert [host.name for host in found.hosts] == ["node1", "node2"] and found.ranks == 4
    assert [host.name for host in found.spares] == ["node3"]
    with pytest.raises(HostError, match="must be fewer than the hosts: 2 of 2"):
        chosen(2, 2, spares=2)
    with pytest.raises(HostError, match="node3 must have at least 2 slots"):
        chosen(2, 2, 1, spares=1)


def test_a_spare_has_the_ranks_of_the_host_that_was_lost(tmp_path, capsys):
    """At its place in their order. Where no spare is left, the run continues with fewer hosts."""
    plan = plan_of(tmp_path, 2, 2, 4, 2, spares=2)
    first = after_losing(plan, "node1")
    assert names(first) == ["node3", "node2"] and first.choice.hosts[0].slots == (0, 1), "as many slots"
    assert first.resolved is plan.resolved, "the same run"
    assert "node3, a spare host, takes the place of node1" in capsys.readouterr().err
    second = after_losing(first, "node2")
    assert names(second) == ["node3", "node4"] and not second.choice.spares
    third = after_losing(second, "node3")
    assert names(third) == ["node4"] and third.choice.ranks == 2
    both = after_losing(plan_of(tmp_path, 2, 2, 2), "node1", "node2")
    assert names(both) == ["node3"], "one has a spare, the run goes on without the other"


def test_a_spare_that_is_lost_itself_is_no_help(tmp_path):
    plan = after_losing(plan_of(tmp_path, 2, 2, 2, 2, spares=2), "node2")
    assert names(plan) == ["node1", "node3"]
    assert names(after_losing(plan, "node3")) == ["node1", "node4"], "its agent was not ready in time"


@pytest.mark.parametrize("lost", [True, False])
def test_agents_that_a_scheduler_starts_follow_the_plan(tmp_path, lost):
    """srun starts an agent on each host of --nodelist and numbers them as it likes. Each takes the place of its name in
    the plan, after a spare has come in and after every rank has moved to the next host."""
    plan = plan_of(tmp_path, 1, 2, 1, 2, spares=1)
    plan = replace(plan, choice=replace(plan.choice, runner="slurm"))
    plan = after_losing(plan, "node1") if lost else _elsewhere(plan)
    order = ["node4", "node2", "node3"] if lost else ["node2", "node3", "node1"]
    assert names(plan) == order
    (command,) = commands(plan)
    assert f"--nodelist={','.join(order)}" in command.arguments and command.index is None
    option, variable = command.arguments[-2:]
    assert (option, variable) == ("--host", "SLURMD_NODENAME")
    for number, name in enumerate(sorted(order)):
        theirs, ours = os.pipe()
        answers, said = os.pipe()
        job = replace(plan.job, directory=str(tmp_path))
        os.write(ours, encode(job.to_message(command.index)))
        os.close(ours)
        agent = Agent(theirs, said, name=name)
        agent._from_launcher()
        agent.link.flush()
        told = [decode(line) for line in os.read(answers, 1 << 16).splitlines()]
        assert agent.index == order.index(name) and told[-1]["type"] == "ready", (number, told)
        assert {each["host"] for each in told} == {agent.index}
        for each in (theirs, answers, said):
            os.close(each)


def test_pairs_of_ranks_are_within_hosts(tmp_path):
    """Known before a process starts, and again when hosts are lost."""
    own = ["parallel.communication.pair=4", "training.global_batch_size=48"]
    with pytest.raises(ConfigError, match=r"(?s)pair = 4.* must lie within a host.*node1 has 6"):
        plan_of(tmp_path, 6, 6, own=own, spares=0)
    island = ["parallel.communication.island=12"]
    assert plan_of(tmp_path, 6, 6, own=own + island, spares=0).choice.ranks == 12


def test_a_host_that_the_plan_does_not_know_is_named(tmp_path):
    job = plan_of(tmp_path, 1, 1, spares=0).job
    with pytest.raises(ValueError, match="this host is node7 .* one of the job's hosts: node1, node2"):
        job.index_of("node7")


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.limit(900)
def test_a_spare_takes_over_with_what_the_neighbour_has(hosts_work, reference, tmp_path, jobs):  # noqa: F811
    """A host dies whose state its neighbour's memory has: the spare continues from there, equal to the last digit."""
    with Cluster(tmp_path / "cluster", ["node1", "node2", "node3"]) as cluster:
        hostfile(tmp_path, 1, 1, 1)
        levels = "checkpoint.levels=[{place: memory, every: 2, neighbours: 1}]"
        own = ["parallel.tensor=2", "zero.stage=1", "checkpoint.every=100", levels, "run.dir=run", *SPARE]
        job = jobs(cluster, tmp_path, [*DEEPY, *HOSTFILE, *TRAIN, *own])
        run, end = tmp_path / "run", time.monotonic() + 400
        while max(losses(run), default=0) < 5:
            assert time.monotonic() < end and job.process.poll() is None, job.process.communicate(timeout=10)
            time.sleep(0.01)
        cluster.kill("node2")
        status, _, error = job.finish()
        assert status == 0, error
        assert "2 ranks on 2 hosts (node1 ... node2), and node3 to spare" in error
        assert "node3, a spare host, takes the place of node2: the same ranks" in error
        assert losses(run) == reference(2), "every loss, to the last digit"
        (resume,) = [each for each in lines(run / "ledger.jsonl") if each["event"] == "resume"]
        assert "memory" in resume["checkpoint"] and resume["step"] >= 4, resume
        assert job.nothing_left("node1", "node3")


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.limit(900)
def test_a_host_that_computes_wrong_values_is_told_and_replaced(hosts_work, reference, tmp_path, jobs):  # noqa: F811
    """Computed again in place, then on another host (status 16), then without the host at fault (status 17)."""
    with Cluster(tmp_path / "cluster", ["node1", "node2", "node3"]) as cluster:
        hostfile(tmp_path, 1, 1, 1)
        wrong = "{step: 9, size: .nan, cause: host, place: node2/0}"
        own = ["zero.stage=1", "checkpoint.every=4", "spikes.attribute=true", "spikes.non_finite=skip", "run.dir=run"]
        own.append(f"hooks=[{{type: 'tests.trials.miscompute:Miscompute', options: {wrong}}}]")
        job = jobs(cluster, tmp_path, [*DEEPY, *HOSTFILE, *TRAIN, *own, *SPARE])
        status, _, error = job.finish(800)
        assert status == 0, error
        run = tmp_path / "run"
        events = {each["event"]: each for each in lines(run / "ledger.jsonl")}
        restarts = [each["status"] for each in lines(run / "ledger.jsonl") if each["event"] == "restart"]
        assert restarts == [16, 17] and events["attribution"]["cause"] == "host", error
        assert events["attribution"]["places"] == ["node2/0"]
        assert "node3, a spare host, takes the place of node2" in error
        job = jobs(cluster, tmp_path, [*DEEPY, *HOSTFILE, "--exclude", "node2@node3", *TRAIN, "run.dir=alone"])
        assert job.finish()[0] == 0
        found, alone = losses(run), losses(tmp_path / "alone")
        assert found == pytest.approx(alone, rel=1e-4) and len(found) == len(alone), "nothing of it has stayed"
