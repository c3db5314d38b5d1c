"""Faults that happen to real runs, which must end as undisturbed ones, and the checks that find a difference."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.config import load
from megatron.config.sections.layout import LaunchSection
from megatron.trials.chaos import Event, Round, own_network, table, where
from megatron.trials.faults import AGAIN, FAULTS, GOES_ON, RESTART, damage, mount, unmount_all
from megatron.trials.inject import KINDS, corrupt_gradient, flip
from megatron.trials.job import TrialJob
from tests.chaos.hosts import RUNNER, VARIABLE, TrialHosts
from tests.paths import ROOT

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 32, vocab_size: 64, dropout: 0.1, attention: {heads: 2}}
training: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 4, steps: 100}
optimizer: {lr: 1e-2}
data: {synthetic: copy}
tokenizer: {type: none}
zero: {stage: 0}
evaluation: {at_end: false}
logging: {console: quiet, curve: false}
launch: {device: cpu}
"""


def chaos(folder: Path, *words: str, hosts: int = 1) -> tuple[int, list[dict], str]:
    (folder / "tiny.yml").write_text(TINY)
    tool = ["-m", "tests.chaos.between_hosts", str(hosts)] if hosts > 1 else [str(ROOT / "tools" / "chaos.py")]
    command = [sys.executable, *tool, str(folder / "tiny.yml"), *words, "--json"]
    done = subprocess.run([*command, "--folder", str(folder / "runs")], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, json.loads(done.stdout)["rounds"] if done.stdout else [], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in FAULTS if "hosts" not in each.needs])
def test_each_fault_is_survived(name: str, tmp_path: Path) -> None:
    (needs,) = [set(each.needs) for each in FAULTS if each.name == name]
    words = ["zero.stage=1"] if "masters" in needs else []
    status, rounds, said = chaos(tmp_path, *words, "--only", name, "--steps", "60", "--every", "5", "--most", "2")
    if status == 3 and "none of these faults can happen" in said and needs & {"disk", "network"}:
        pytest.skip("needs root, for mounts and network namespaces")
    assert status == 0 and rounds[0]["events"], said


def test_a_fault_that_cannot_happen_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    status, rounds, said = chaos(tmp_path, "--only", "rank stopped for good", "--ranks", "1")
    assert status == 3 and not rounds
    assert "none of these faults can happen to this run. They need rank stopped for good: ranks" in said

    assert not list((tmp_path / "runs").rglob("*"))


@pytest.mark.parametrize("minutes", ["nan", "inf", "0", "-1"])
def test_faults_must_come_to_an_end(tmp_path: Path, minutes: str) -> None:
    status, rounds, said = chaos(tmp_path, f"--minutes={minutes}")
    assert status == 2 and not rounds and "--minutes must be a number above 0" in said


@pytest.mark.slow
def test_a_run_that_logs_now_and_then_is_compared_in_every_step(tmp_path: Path) -> None:
    words = ("--only", "rank killed", "--most", "1", "--steps", "30", "--every", "5", "--ranks", "1")
    status, rounds, said = chaos(tmp_path, "logging.every=10", *words)
    assert status == 0 and rounds[0]["events"], said


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(not own_network(), reason="needs root, for network namespaces")
def test_what_happens_between_hosts_is_survived(tmp_path: Path) -> None:
    names = ("host lost", "network cut for a while", "slow network", "agent killed")
    only = [word for name in names for word in ("--only", name)]
    most = ("--most", str(len(names)))
    status, rounds, said = chaos(tmp_path, *only, *most, "--steps", "120", "--every", "5", hosts=2)
    assert status == 0 and {each["fault"] for each in rounds[0]["events"]} == set(names), said


@pytest.mark.slow
def test_a_run_that_does_not_end_like_the_other_is_told(tmp_path: Path) -> None:
    """A hook with a state that no checkpoint knows: after a restart other weights come out."""
    hooks = "hooks=['tests.trials.test_verify_resume:Forgetful']"
    words = ("--only", "rank killed", "--most", "3", "--steps", "40", "--every", "5", "--ranks", "1")
    status, rounds, said = chaos(tmp_path, hooks, "checkpoint.prove=false", *words)
    assert status == 1, said
    assert rounds[-1]["problems"], said


def test_damage_changes_a_file_as_it_says(tmp_path: Path) -> None:
    draw = random.Random(3)
    for number in range(50):
        file, before = tmp_path / "file", random.Random(number).randbytes(1 + number)
        file.write_bytes(before)
        said = damage(file, draw, "flip")
        after = file.read_bytes()
        changed = [(at, a ^ b) for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        (only,) = changed
        assert bin(only[1]).count("1") == 1 and f"of byte {only[0]} of" in said
        damage(file, draw, "cut")
        assert len(file.read_bytes()) < len(before) and after.startswith(file.read_bytes())
        damage(file, draw, "delete")
        assert not file.exists()


def test_no_mount_is_left_on_top_of_another(tmp_path: Path) -> None:
    if not mount(tmp_path / "disk", 1 << 20):
        pytest.skip("mounting is not allowed here")
    assert mount(tmp_path / "disk", 1 << 20)
    unmount_all(tmp_path / "disk")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


@pytest.mark.skipif(not own_network(), reason="needs root, for network namespaces")
def test_hosts_have_links_that_can_be_cut_and_slow() -> None:
    def link(name: str) -> str:
        inside = ("nsenter", "-t", hosts.variables[VARIABLE].partition(f"{name}=")[2].partition(",")[0], "-n", "-u")
        (found,) = json.loads(subprocess.run((*inside, "ip", "-j", "link", "show", "eth0"), capture_output=True).stdout)
        told = subprocess.run((*inside, "hostname"), capture_output=True, text=True).stdout.strip()
        assert told == name
        return found["operstate"]

    def becomes(name: str, up: bool) -> None:  # the kernel reports a link a moment later
        end = time.monotonic() + 120
        while (link(name) == "UP") != up:
            assert time.monotonic() < end, link(name)

    with TrialHosts(2) as hosts:
        assert hosts.names == ["host1", "host2"] and hosts.hostfile(3) == "host1 slots=3\nhost2 slots=3\n"
        processes = [int(each.partition("=")[2]) for each in hosts.variables[VARIABLE].split(",")]
        becomes("host1", up=True)
        becomes("host2", up=True)
        hosts.cut("host2")
        becomes("host2", up=False)
        assert link("host1") == "UP"
        hosts.join("host2")
        becomes("host2", up=True)
        hosts.slow("host1", 500)
        with pytest.raises(OSError, match="tc"):
            hosts.slow("host1", 500)
        hosts.fast("host1")
        hosts.slow("host1", 500)
        job = SimpleNamespace(hosts=[SimpleNamespace(name="host2"), SimpleNamespace(name="host1")], directory="/")
        with mock.patch.dict("os.environ", hosts.variables):
            first, second = RUNNER.commands(job, LaunchSection())
        assert first.arguments[:4] == ("nsenter", "-t", str(processes[2]), "-n") and second.hosts == (1,)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()], "nothing is left"


def test_flip_changes_one_bit() -> None:
    tensor = torch.randn(5)
    before = tensor.clone()
    flip(tensor)
    changed = tensor.view(torch.int32) ^ before.view(torch.int32)
    assert changed.tolist() == [1 << 22, 0, 0, 0, 0]
    assert 0.2 < float((tensor[0] / before[0]).abs()) < 2, "no update rounds it away"


def test_a_gradient_is_corrupted_in_one_update() -> None:
    """As SGD's updates show: the largest element's is another one once, and no other's ever."""
    weight = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    corrupt_gradient(optimizer)
    for largest in (-6.0, -4.0, -4.0):  # the highest bit of the mantissa of 4 is worth 2
        before = weight.detach().clone()
        weight.grad = torch.tensor([0.0, 1.0, 4.0, -2.0, 0.0])
        optimizer.step()
        assert (weight.detach() - before).tolist() == [0.0, -1.0, largest, 2.0, 0.0]


def test_a_job_knows_its_own_processes(tmp_path: Path) -> None:
    """And the processes that they have started, and no others."""
    mine, other = TrialJob(tmp_path / "a", [], 1), TrialJob(tmp_path / "b", [], 1)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, env={"DEEPY_TRIAL": mine.mark}, start_new_session=True
    )
    mine.process = process
    mine.wait_until(lambda: len(mine.processes()) == 2, "both processes")
    assert other.processes() == [] and mine.agents() == [] and mine.members() == {}
    mine.close()
    mine.wait_until(lambda: mine.processes() == [], "their end")


def test_the_table_has_every_fault_and_every_miss() -> None:
    events = [
        Event("rank killed", "rank 1", 12, 0.5, 10.0, 3, 137),
        Event("rank killed", "rank 0", 40, 1.5, 20.0, 0, 137),
    ]
    missed = Event("spike of a gradient", "rank 0", 50, problem="nobody saw it")
    text = table([Round(1, events), Round(2, [missed], ["spike of a gradient: nobody saw it"])])
    row = next(line for line in text.splitlines() if line.startswith("| rank killed"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "rank killed",
        "2",
        "1.0 (1.5)",
        "15.0 (20.0)",
        "0-3",
        "137",
    ]
    assert "3 faults in 2 runs, 3 steps done again. 1 of 2 runs ended equal" in text
    assert text.endswith("run 2: spike of a gradient: nobody saw it")


def test_calls_are_joined_into_one_table(tmp_path: Path) -> None:
    """A row for each layout and kind of fault, over all calls of a layout."""

    def call(name: str, where: str, seed: int, *events: Event) -> str:
        rounds = [asdict(Round(1, list(events)))]
        (tmp_path / name).write_text(json.dumps({"where": where, "seed": seed, "rounds": rounds}))
        return str(tmp_path / name)

    first = call("a", "ZeRO 1, 2 ranks", 7, Event("rank killed", "rank 1", 12, 0.5, 10.0, 3, 137))
    second = call("b", "ZeRO 1, 2 ranks", 3, Event("rank killed", "rank 0", 40, 1.5, 20.0, 0, 137))
    third = call("c", "ZeRO 3, 2 ranks", 3, Event("slow disk", "rank 0", 40, None, 0.2))
    command = [sys.executable, "-m", "tests.chaos.published", first, third, second]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert lines[0][:3] == ["fault", "where (seeds)", "times"]
    assert lines[2] == ["rank killed", "ZeRO 1, 2 ranks (3, 7)", "2", "1.0 (1.5)", "15.0 (20.0)", "0-3", "137"]
    assert lines[3] == ["slow disk", "ZeRO 3, 2 ranks (3)", "1", "", "0.2", "0", ""]
    assert "ZeRO 1, 2 ranks: 2 faults in 2 runs, 3 steps done again. 2 of 2 runs ended equal" in done.stdout


def test_a_layout_is_told_in_a_few_words(tmp_path: Path) -> None:
    def told(ranks: int, hosts: int, *words: str) -> str:
        return where(load([tmp_path / "tiny.yml"], list(words), ranks=ranks * hosts).config, ranks, hosts)

    (tmp_path / "tiny.yml").write_text(TINY)
    assert told(2, 1, "zero.stage=3") == "ZeRO 3, 2 ranks"
    assert (
        told(4, 1, "zero.stage=0", "parallel.tensor=2", "parallel.pipeline=2")
        == "ZeRO 0, tensor 2, pipeline 2, 4 ranks"
    )
    assert told(1, 2, "zero.stage=1") == "ZeRO 1, 2 ranks, 2 hosts"


def test_the_published_table_has_every_fault() -> None:
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    lines = text[text.index("| fault ") :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    assert {name for name, _, _ in rows} == {each.name for each in FAULTS}
    times = sum(int(number) for _, _, number in rows)
    for layout in ("ZeRO 1", "ZeRO 3", "pipeline 2"):
        assert sum(int(number) for _, where, number in rows if layout in where) >= 8, layout
    assert times >= 300 and f"These are {times} faults" in text


def test_every_fault_says_what_must_follow() -> None:
    names = [each.name for each in FAULTS]
    assert len(set(names)) == len(names) and len(KINDS) == 9
    for each in FAULTS:
        assert each.then in (RESTART, AGAIN, GOES_ON)
        assert each.noticed is None or each.then == GOES_ON
