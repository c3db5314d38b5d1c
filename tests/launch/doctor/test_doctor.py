"""The doctor's judgement of facts, and one examination of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from megatron.config.sections.layout import LaunchSection
from megatron.launch.doctor import probe
from megatron.launch.doctor.doctor import FAIL, GIB, OK, WARN, Doctor, judge, judge_clocks, judge_rates, table
from megatron.launch.doctor.probe import MEASURES, PAIRS, best_pairs, partners
from megatron.launch.job.hosts import RunnerChoice
from megatron.launch.runners.ssh import LOCAL
from megatron.launch.wire.specification import Host
from megatron.trials.chaos import own_network
from megatron.worker import devices
from tests.chaos.hosts import RUNNER, TrialHosts
from tests.paths import ROOT
from tools.doctor import main as examine

GOOD = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5",
    "pydantic": "2",
    "tokenizers": "1",
    "driver": "NVIDIA 550",
    "code": "abc",
    "accelerators": 8,
    "open files": 65536,
    "locked memory": -1,
    "shm": 8 * GIB,
    "shm free": 8 * GIB,
    "disk free": 900 * GIB,
    "memory": 512 * GIB,
    "shared": True,
}
NAMES = ["h0", "h1", "h2"]


def bad(**changes):
    """Findings that are not ok when the second of three hosts differs."""
    return [each for each in judge([GOOD, {**GOOD, **changes}, GOOD], NAMES) if each.grade != OK]


def test_equal_and_healthy_hosts():
    assert bad() == []


def test_no_accelerator_is_said_in_words():
    bare = {**GOOD, "accelerators": 0, "driver": "none"}
    (found,) = [each for each in judge([bare] * 3, NAMES) if each.check == "accelerators"]
    assert (found.grade, found.value) == (OK, "none: a run here uses the CPU")
    blind = {**GOOD, "accelerators": 0}
    (found,) = [each for each in judge([GOOD, blind, GOOD], NAMES) if each.check == "accelerators"]
    assert found.grade == WARN and found.hosts == ("h1",) and "driver" in found.value and found.advice


@pytest.mark.parametrize(
    ("changes", "check", "grade"),
    [
        ({"torch": "2.12.0"}, "torch", FAIL),
        ({"deepspeed": "missing"}, "deepspeed", FAIL),
        ({"driver": "NVIDIA 535"}, "driver", FAIL),
        ({"code": "def"}, "code", FAIL),
        ({"accelerators": 7}, "accelerators", WARN),
        ({"shared": False}, "shared folder", WARN),
        ({"open files": 1024}, "open files", WARN),
        ({"shm": 64 << 20}, "shm", WARN),
        ({"disk free": GIB}, "disk free", WARN),
        ({"locked memory": 65536}, "locked memory", WARN),
    ],
)
def test_one_host_that_differs_is_named(changes, check, grade):
    findings = bad(**changes)
    assert {each.check for each in findings} == {check} and {each.grade for each in findings} == {grade}
    assert any(each.hosts == ("h1",) for each in findings)
    assert all(each.advice for each in findings)


def test_missing_everywhere_is_not_equal_enough():
    findings = judge([{**GOOD, "torch": "missing"}] * 3, NAMES)
    assert [each.grade for each in findings if each.check == "torch"] == [FAIL]


def test_clocks():
    assert [each.grade for each in judge_clocks([0.001, 0.2, -0.3], NAMES)] == [OK]
    (finding,) = judge_clocks([0.0, -7.5, 0.0], NAMES)
    assert finding.grade == WARN and finding.hosts == ("h1",) and "+7.5" in finding.value


def test_the_table_has_a_line_of_advice_for_what_is_wrong():
    lines = table(bad(torch="2.12.0"), 3).splitlines()
    assert len(lines) == 4 and lines[0].startswith("FAIL  torch") and "->" in lines[1] and "h0, h2" in lines[0]


@pytest.mark.tour
def test_this_machine():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--compare", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    answer = json.loads(done.stdout)
    checks = {each["check"]: each for each in answer["findings"]}
    assert checks["reachable"]["grade"] == OK and checks["all-reduce gloo"]["grade"] == OK, answer
    assert all(checks[each.name]["value"].endswith(each.unit) for each in MEASURES), "alone it is an outlier of nothing"
    assert checks["python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert checks["shared folder"]["grade"] == OK and not list(ROOT.glob(".doctor-*"))
    assert done.returncode == (0 if answer["ok"] else 1)


def test_a_folder_that_cannot_be_written_to_is_a_finding(monkeypatch):
    """/proc: not even root makes folders there."""
    monkeypatch.chdir("/proc")
    doctor = Doctor(
        RunnerChoice("local", (Host("here", (0,)),), "a test"), lambda job: LOCAL.commands(job, LaunchSection())
    )
    monkeypatch.setattr(doctor, "_networks", lambda *_: [])
    (finding,) = [each for each in doctor.examine() if each.check == "shared folder"]
    assert finding.grade == FAIL and finding.value.startswith("the current folder cannot be written to: ")


def test_facts_and_speeds_are_of_all_devices_of_a_host(tmp_path, monkeypatch):
    """Eight pretended devices: what agents let the probe see of them, by the function that agents ask."""
    jobs = []

    def start(job):
        jobs.append(job)
        return LOCAL.commands(job, LaunchSection())

    doctor = Doctor(RunnerChoice("local", (Host("here", (0,)),), "a test"), start, compare=True)
    monkeypatch.chdir(tmp_path)
    doctor.examine()
    for name in ("nvidiactl", *(f"nvidia{index}" for index in range(8))):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEV", tmp_path)
    monkeypatch.setattr(devices, "nvidia_buses", list)
    seen = {
        job.command[job.command.index("megatron.launch.doctor.probe") + 1]: devices.count(
            devices.visibility(job.hosts[0].slots, {}, job.device)
        )
        for job in jobs
    }
    assert seen == {"facts": 8, "speeds": 8, "reduce": 2}, "those that talk to each other have one each"


def test_the_speed_of_a_host_is_that_of_its_slowest_device(tmp_path, monkeypatch):
    """Three pretended devices. The last multiplies slowest, and the second copies slowest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(probe, "_products", lambda device: (9.0, 8.0, 2.0)[device.index])
    monkeypatch.setattr(probe, "_copies", lambda device: (7.0, 3.0, 6.0)[device.index])
    found = probe.speeds()
    assert (found["products"], found["memory rate"]) == (2.0, 3.0) and found["disk rate"] > 0


def test_a_missing_hostfile_is_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--hosts", str(tmp_path / "none")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "No such file" in done.stderr


@pytest.mark.parametrize("words", ["--timeout nan", "--timeout 0", "--timeout inf", "--ssh-port 0", "--ssh-port 65536"])
def test_numbers_that_cannot_be_are_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        examine(words.split())
    assert end.value.code == 2 and f"{words.split()[0]} must be" in capsys.readouterr().err


def test_pairs_are_all_different_and_everybody_is_in_one_at_a_time():
    for world in range(2, 20):
        met = [partners(rank, world) for rank in range(world)]
        for round_ in zip(*met, strict=True):
            assert all(other is None or round_[other] == rank for rank, other in enumerate(round_))
            assert sum(other is None for other in round_) == world % 2
        for rank, others in enumerate(met):
            known = [other for other in others if other is not None]
            assert rank not in known and len(set(known)) == len(known) >= min(world - 1, 2)


@pytest.mark.parametrize("world", [3, 4, 5, 8, 9])
def test_a_host_with_a_bad_cable_is_named_and_no_other(world):
    for bad in range(world):
        met: dict[int, dict[int, float]] = {rank: {} for rank in range(world)}
        for rank in range(world):
            for other in filter(lambda each: each is not None, partners(rank, world)):
                met[rank][other] = 1.0 if bad in (rank, other) else 9.0 + rank % 2
        rates = best_pairs(met)
        findings = judge_rates(PAIRS, [rates[rank] for rank in range(world)], [f"h{rank}" for rank in range(world)])
        assert [(each.grade, each.hosts) for each in findings] == [(WARN, (f"h{bad}",))]


def test_a_slow_host_is_named_beside_the_others_rate():
    measure = MEASURES[0]
    (found,) = judge_rates(measure, [50e9, 30e9, 52e9], NAMES)
    assert (found.grade, found.hosts, found.value) == (WARN, ("h1",), "30 GFLOP/s, the others 51 GFLOP/s")
    (found,) = judge_rates(measure, [50e9, 45e9, 52e9], NAMES)
    assert (found.grade, found.hosts, found.value) == (OK, tuple(NAMES), "45 GFLOP/s to 52 GFLOP/s")
    assert [each.hosts for each in judge_rates(measure, [50e9, 30e9], NAMES)] == [("h1",)], "two hosts are compared too"


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(not own_network(), reason="needs root, for network namespaces")
def test_a_slow_network_between_real_hosts_is_named(tmp_path, monkeypatch):
    """Three hosts made of namespaces. The second receives 20 Mbit/s."""
    monkeypatch.chdir(tmp_path)
    with TrialHosts(3) as hosts:
        choice = RunnerChoice("trial", tuple(Host(name, (0,)) for name in hosts.names), "a test")
        monkeypatch.setenv(*next(iter(hosts.variables.items())))
        doctor = Doctor(choice, lambda job: RUNNER.commands(job, LaunchSection()), timeout=200.0, compare=True)
        even = {each.check: each for each in doctor.examine()}
        hosts.slow("host2", 20_000)
        uneven = [each for each in doctor.examine() if each.check == "pairs"]
    assert even["pairs"].grade == OK and {*even} >= {each.name for each in MEASURES}, even
    assert [(each.grade, each.hosts) for each in uneven] == [(WARN, ("host2",))], uneven
