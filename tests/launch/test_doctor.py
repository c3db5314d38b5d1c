"""The doctor's judgement of facts, and one examination of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron.config.sections.layout import LaunchSection
from megatron.launch.choose import RunnerChoice
from megatron.launch.doctor import FAIL, GIB, OK, WARN, Doctor, judge, judge_clocks, table
from megatron.launch.runners import local
from megatron.launch.specification import Host
from tests.paths import ROOT

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


def test_this_machine():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    answer = json.loads(done.stdout)
    checks = {each["check"]: each for each in answer["findings"]}
    assert checks["reachable"]["grade"] == OK and checks["all-reduce gloo"]["grade"] == OK, answer
    assert checks["python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert checks["shared folder"]["grade"] == OK and not list(ROOT.glob(".doctor-*"))
    assert done.returncode == (0 if answer["ok"] else 1)


def test_a_folder_that_cannot_be_written_to_is_a_finding(monkeypatch):
    """/proc: not even root makes folders there."""
    monkeypatch.chdir("/proc")
    doctor = Doctor(
        RunnerChoice("local", (Host("here", (0,)),), "a test"), lambda job: local.commands(job, LaunchSection())
    )
    monkeypatch.setattr(doctor, "_networks", lambda *_: [])
    (finding,) = [each for each in doctor.examine() if each.check == "shared folder"]
    assert finding.grade == FAIL and finding.value.startswith("the current folder cannot be written to: ")


def test_a_missing_hostfile_is_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--hosts", str(tmp_path / "none")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "No such file" in done.stderr
