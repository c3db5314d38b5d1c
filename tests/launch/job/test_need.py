"""The line of the plan before the ranks of a run on GPUs are started: by another process, and not again by rank 0."""

from __future__ import annotations

import ctypes
import signal

import pytest

from megatron.config.source.resolved_file import read_resolved
from megatron.launch import supervisor
from megatron.launch import supervisor as need
from megatron.launch.job.job_plan import make_plan
from megatron.launch.supervisor import TOLD, tell_need
from megatron.plan.__main__ import main, steps_left
from megatron.plan.prediction import TOO_LARGE, predict
from megatron.training.run import printed_by_launcher
from megatron.worker import devices
from megatron.worker.place import WorkerEnvironment
from tests.paths import ROOT

H100 = "NVIDIA H100 80GB HBM3"
FILE = str(ROOT / "configs" / "test" / "tiny_neox.yml")


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = [FILE, f"run.dir={tmp_path}/run", "launch.ranks=2", "training.global_batch_size=8"]
    return make_plan(str(ROOT / "train.py"), words, [], {})


def test_the_launcher_says_what_the_formulas_say(plan, monkeypatch, capsys):
    monkeypatch.setattr(devices, "name_of_first", lambda environment: H100)
    monkeypatch.setattr(need, "PATIENCE", 600.0)  # on a busy machine an import may take longer than a user waits
    told = tell_need(plan)
    config = plan.resolved.config
    wanted = predict(config, 2, H100, 2).text(config.training.steps)
    lines = "".join(f"deepy: {line}\n" for line in wanted.splitlines())
    assert lines == capsys.readouterr().err and "of 79 GiB" in wanted
    assert told.job.environment[TOLD] == H100 and TOLD not in plan.job.environment


def test_nothing_is_said_of_a_device_that_nobody_knows(plan, monkeypatch, capsys):
    for name, patience in (("Some Other Device", 60.0), (H100, 0.001)):  # the second has no time to say it
        monkeypatch.setattr(devices, "name_of_first", lambda environment, name=name: name)
        monkeypatch.setattr(need, "PATIENCE", patience)
        assert tell_need(plan) == plan and not capsys.readouterr().err


def test_no_process_is_started_where_rank_0_says_it(plan, monkeypatch):
    """On CPUs, for scripts that do not train, and where it is not set."""
    monkeypatch.setattr(need, "_said", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(devices, "name_of_first", lambda environment: None)
    assert tell_need(plan) is plan
    monkeypatch.setattr(devices, "name_of_first", lambda environment: H100)
    for words in (["launch.device=cpu"], ["logging.predictions=false"]):
        other = make_plan(str(ROOT / "train.py"), [FILE, *words], [], {})
        assert tell_need(other) is other


def hosts_of(name: str) -> list[tuple[str, bool]]:
    """Hosts of a plan that is made on a machine with this name, and whether the machine is one of them."""
    return [(name, True), (f"{name}.cluster", True), ("other", False), (f"{name}2", False), ("127.0.0.1", True),
            ("localhost", True), ("192.0.2.7", False)]  # fmt: skip


@pytest.mark.parametrize(("host", "here"), hosts_of("login"))
def test_a_machine_that_is_no_host_of_the_run_says_nothing_of_its_own_device(tmp_path, monkeypatch, capsys, host, here):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"first slots=1\n{host} slots=1\n")
    monkeypatch.setattr(need.socket, "gethostname", lambda: "login.site")
    monkeypatch.setattr(devices, "name_of_first", lambda environment: H100)
    monkeypatch.setattr(need, "_said", lambda *_: ["plan: said"])
    words = [FILE, f"launch.hostfile={hostfile}", f"run.dir={tmp_path}/run", "training.global_batch_size=8"]
    told = tell_need(make_plan(str(ROOT / "train.py"), words, [], {}))
    assert (TOLD in told.job.environment, "plan: said" in capsys.readouterr().err) == (here, here)


def test_slurm_names_a_machine_as_it_likes(tmp_path, monkeypatch):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n017 slots=1\n")
    monkeypatch.setattr(devices, "name_of_first", lambda environment: H100)
    monkeypatch.setattr(need, "_said", lambda *_: ["plan: said"])
    words = [FILE, f"launch.hostfile={hostfile}", f"run.dir={tmp_path}/run", "training.global_batch_size=8"]
    plan = make_plan(str(ROOT / "train.py"), words, [], {})
    assert TOLD not in tell_need(plan).job.environment
    monkeypatch.setenv("SLURMD_NODENAME", "n017")
    assert tell_need(plan).job.environment[TOLD] == H100


def test_rank_0_keeps_silent_of_the_device_that_was_told_alone(monkeypatch):
    first, again = WorkerEnvironment(), WorkerEnvironment(attempt=1)
    assert not printed_by_launcher(first, H100)
    monkeypatch.setenv(TOLD, H100)
    assert printed_by_launcher(first, H100)
    assert not printed_by_launcher(first, "NVIDIA A100-SXM4-80GB") and not printed_by_launcher(again, H100)


def test_an_interrupt_while_it_is_said_ends_the_launcher(plan, tmp_path, monkeypatch, capsys):
    """The process that says it sends the launcher what Ctrl-C sends, and continues."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(devices, "name_of_first", lambda environment: H100)
    monkeypatch.setattr(need.sys, "executable", str(program))
    monkeypatch.setattr(supervisor, "start", lambda *_: pytest.fail("ranks were started"))
    assert supervisor.supervise(plan) == 128 + signal.SIGINT
    assert need.PATIENCE <= 20


def test_what_does_not_fit(tmp_path, capsys):
    """Pythia 12B on one device. From its newest checkpoint on."""
    (tmp_path / "run" / "checkpoints" / "step_00000040").mkdir(parents=True)
    words = [
        "training.steps=100",
        "precision=bf16",
        f"run.dir={tmp_path}/run",
        "data.synthetic=copy",
        "data.train=null",
    ]
    words += ["training.global_batch_size=8", "logging.predictions=true"]
    file = tmp_path / "resolved.yml"
    for more, left in ((["training.stop_at_step=50"], 10), ([], 60)):
        own = [str(ROOT / "configs/pythia/12b.yml"), *words, *more]
        plan = make_plan(str(ROOT / "train.py"), own, ["launch.ranks=1"], {})
        file.write_text(plan.job.configuration, encoding="utf-8")
        assert read_resolved(file).training.steps == 100 and steps_left(read_resolved(file))[0] == left
    assert main([str(file), "1", "1", H100]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert "for 60 steps" in " ".join(said) and last == TOO_LARGE


def test_the_name_of_the_first_visible_device(monkeypatch):
    class Library:
        """As far as NVML is asked: device n is called "GPU n"."""

        def __getattr__(self, name):
            return lambda *_: 0

        def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
            self.index = index
            return 0

        def nvmlDeviceGetName(self, handle, text, size):  # noqa: N802
            text.value = f"GPU {self.index}".encode()
            return 0

    monkeypatch.setattr(devices, "vendor", lambda: "nvidia")
    monkeypatch.setattr(devices, "nvidia_buses", lambda: ["a", "b", "c"])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert devices.name_of_first({}) == "GPU 0"
    assert devices.name_of_first({"CUDA_VISIBLE_DEVICES": "2,0"}) == "GPU 2"
    assert devices.name_of_first({"CUDA_VISIBLE_DEVICES": ""}) is None
    assert devices.name_of_first({"CUDA_VISIBLE_DEVICES": "MIG-1"}) is None
    monkeypatch.setattr(devices, "vendor", lambda: "amd")
    assert devices.name_of_first({}) is None
