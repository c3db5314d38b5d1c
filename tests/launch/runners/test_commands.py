"""Commands of each runner, as data: golden commands, and nothing that grows over the system's limits."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml as pyyaml

from megatron.config.registry import INSIDE, RUNNER, registry_of
from megatron.config.sections.layout import LaunchSection
from megatron.launch.command_line import main, overrides_of
from megatron.launch.job.job_plan import make_plan, restarted
from megatron.launch.options import REHEARSAL, parser
from megatron.launch.runner import runner_of
from megatron.launch.runners import torchrun
from megatron.launch.wire.specification import Host, Specification, seat_in
from tests.launch.running import CONFIG
from tests.paths import ROOT

AGENT = [sys.executable, "-u", str(ROOT / "deepy.py"), "--agent"]
LIMIT = 128 * 1024  # of one argument, on Linux
RUNNERS = {name: runner_of(registry_of(), name).commands for name in INSIDE[RUNNER]}
RUN = [name for name, commands in RUNNERS.items() if commands]


@pytest.fixture(autouse=True)
def plain_place(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if "." not in name else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def job(number, slots=2, configuration="x"):
    hosts = tuple(Host(f"node{index:04d}", tuple(range(slots))) for index in range(number))
    return Specification(
        hosts,
        ("python", "train.py"),
        "/work dir",
        {"API_KEY": "hushhush"},
        configuration,
        credentials_file="/run dir/.credentials-1",
    )


def build(runner, number=2, **keys):
    return RUNNERS[runner](
        job(number), LaunchSection(hostfile=None if runner in ("local", "slurm") else "hosts", **keys)
    )


def test_local():
    (command,) = RUNNERS["local"](job(1), LaunchSection())
    assert list(command.arguments) == AGENT and command.hosts == (0,) and command.index == 0 and not command.dials


def test_ssh_with_a_port_and_options():
    first, second = build("ssh", ssh_port=2222, ssh_options=["-o", "IdentityFile=/k"])
    assert first.arguments[:5] == ("ssh", "-o", "IdentityFile=/k", "-p", "2222")
    assert first.arguments[-2:] == ("node0000", "exec " + shlex.join(AGENT))
    assert [each.index for each in (first, second)] == [0, 1] and "BatchMode=yes" in first.arguments


def test_pdsh():
    (command,) = build("pdsh", ssh_port=2222)
    assert command.arguments == (
        "pdsh",
        "-S",
        "-R",
        "ssh",
        "-f",
        "1024",
        "-w",
        "node0000,node0001",
        f"exec {shlex.join(AGENT)} --index %n --credentials '/run dir/.credentials-1'",
    )
    assert command.dials and command.credentials_file == "/run dir/.credentials-1" and command.hosts == (0, 1)
    assert "-p 2222" in command.environment["PDSH_SSH_ARGS_APPEND"]


def test_openmpi():
    (command,) = build("openmpi", interface="ib0", ssh_port=2222)
    assert list(command.arguments) == [
        "mpirun",
        "--host",
        "node0000,node0001",
        "-np",
        "2",
        "--map-by",
        "seq",
        "--bind-to",
        "none",
        "-x",
        "JOB_CREDENTIALS",
        "--mca",
        "oob_tcp_if_include",
        "ib0",
        "--mca",
        "plm_rsh_args",
        "-p 2222",
        *AGENT,
        "--index",
        "OMPI_COMM_WORLD_RANK",
        "--credentials",
        "JOB_CREDENTIALS",
    ]
    assert command.dials and not command.credentials_file


def test_mpich():
    (command,) = build("mpich")
    assert list(command.arguments) == [
        "mpiexec",
        "-hosts",
        "node0000,node0001",
        "-n",
        "2",
        "-ppn",
        "1",
        *AGENT,
        "--index",
        "PMI_RANK",
        "--credentials",
        "JOB_CREDENTIALS",
    ]


def test_slurm():
    (command,) = build("slurm", 16)
    words = list(command.arguments)
    assert words[:6] == ["srun", "-N", "16", "-n", "16", "--ntasks-per-node=1"] and words[-6:] == [
        *AGENT,
        "--host",
        "SLURMD_NODENAME",
    ]
    assert command.index is None and not command.dials
    (command,) = build("slurm", 2)
    assert "--nodelist=node0000,node0001" in command.arguments


def test_torchrun_wraps_the_job_and_not_the_runner():
    wrapped = torchrun.wrapped(job(2), LaunchSection(restarts=3), "abc")
    assert wrapped.wrapper and wrapped.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert wrapped.command[:2] == ("/bin/sh", "-c")
    assert {"--nnodes=2", "--rdzv-id=abc", "--max-restarts=3"} <= set(wrapped.command)
    assert any(word.startswith("--signals-to-handle=") and "SIGUSR1" in word for word in wrapped.command)


def test_the_shell_of_torchrun_gives_exact_arguments(tmp_path):
    """The line runs a stand-in for Python that prints what it is given."""
    fake = tmp_path / "fake python"
    fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    fake.chmod(0o755)
    nasty = ["a b", "it's", "", "$HOME", "`id`", "x;id", "*"]
    base = Specification((Host("a", (0, 1)),), (str(fake), "-u", "train.py", *nasty), "/")
    command = torchrun.wrapped(base, LaunchSection(), "n").command
    environment = {
        "RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "JOB_SLOTS": "2",
        "JOB_ADDRESS": "10.0.0.1",
    }
    words = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    assert words[:3] == ["-u", "-m", "torch.distributed.run"] and words[-8:] == ["train.py", *nasty]
    assert {"--rdzv-endpoint=10.0.0.1:5", "--nproc-per-node=2", "--rdzv-conf=is_host=true"} <= set(words)


@pytest.mark.parametrize("runner", RUN)
def test_a_thousand_hosts_and_a_huge_configuration(runner):
    number = 1 if runner == "local" else 1024
    commands = RUNNERS[runner](job(number, 8, "x" * 5_000_000), LaunchSection(hostfile="hosts"))
    assert sorted(index for command in commands for index in command.hosts) == list(range(number))
    for command in commands:
        assert all(len(word) < LIMIT for word in command.arguments)
        assert sum(map(len, command.arguments)) < 2 * LIMIT
        text = " ".join([*command.arguments, *command.environment.values()])
        assert "hushhush" not in text and "xxxx" not in text


@pytest.mark.parametrize("runner", RUN)
def test_the_same_command_for_every_job(runner):
    first = RUNNERS[runner](job(2), LaunchSection(hostfile="hosts"))
    other = Specification(
        job(2).hosts,
        ("python", "other.py", "--x"),
        "/elsewhere",
        {"A": "b"},
        "y",
        credentials_file="/run dir/.credentials-1",
    )
    assert first == RUNNERS[runner](other, LaunchSection(hostfile="hosts"))


# ---- the command line


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_stand_for_keys():
    options = parser().parse_args([
        "--ranks",
        "4",
        "--hostfile",
        "my hosts",
        "--master-address",
        "10.0.0.1",
        "--interface",
        "ib0",
        "t.py",
        "--ranks",
        "2",
    ])
    assert overrides_of(options) == [
        "launch.ranks=4",
        "launch.hostfile='my hosts'",
        "launch.master_address='10.0.0.1'",
        "launch.interface=ib0",
    ]
    assert options.words == ["t.py", "--ranks", "2"]


@pytest.mark.parametrize(
    ("script", "shown"),
    [(None, True), ("train.py", True), ("align.py", False), ("evaluate.py", False), ("extract.py", False)],
)
def test_only_the_help_of_training_shows_rehearsals(script, shown):
    text = parser(script).format_help()
    assert all((f"{name} " in text) == shown for name in ("--rehearse", *REHEARSAL))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no script"),
        (["nope.py", "a.yml"], "no script nope.py"),
        (["a.yml"], "expected a script"),
        (["train.py"], "no configuration file"),
        (["train.py", "a.yml", "--ranks", "2"], "before train.py"),
        (["train.py", "a.yml", "what"], "'what'"),
        (["--hostfile", "nowhere", "train.py", "a.yml"], "nowhere"),
        (["--hostfile", "hosts", "--include", "x", "train.py", "a.yml"], "no host 'x'"),
        (["train.py", "a.yml", "training.stepz=1"], "stepz"),
        (["train.py", "a.yml", "launch.rank=1"], "launch.rank"),
        (["--ranks", "two", "train.py", "a.yml"], "launch.ranks"),
        (["train.py", "b.yml"], "b.yml"),
        (["--runner", "slurm", "train.py", "a.yml"], "allocation"),
        (["--sbatch", "train.py", "a.yml"], "--ranks"),
        (["--submit", "train.py", "a.yml"], "--submit needs --sbatch"),
        (["--device", "h100", "--json", "train.py", "a.yml"], "--device, --json must come with --rehearse"),
        (["--dry-run", "--sbatch", "--ranks", "2", "train.py", "a.yml"], "--dry-run and --sbatch exclude each other"),
        (["--logs", "runs/x", "train.py", "a.yml"], "remove train.py a.yml"),
        (["--status", "", "train.py", "a.yml"], "remove train.py a.yml"),
        (["--rehearse", "--ranks", 5000 * "9", "train.py", "a.yml"], "below ten million"),
        (["--rehearse", "--ranks", "2", "other.py", "a.yml"], "--rehearse must be of train.py, not of other.py"),
        (["--ranks", "0", "train.py", "a.yml"], "launch.ranks"),
        (["--ranks", "-1", "train.py", "a.yml"], "launch.ranks"),
        (["--ranks", "", "train.py", "a.yml"], "launch.ranks"),
        (["--ranks", 5000 * "9", "train.py", "a.yml"], "launch.ranks"),
        (["--ranks", "3", "train.py", "a.yml", "parallel.tensor=2"], "parallel.tensor"),
    ],
)
def test_mistakes_end_with_2_and_a_message(place, capsys, words, part):
    assert main(words) == 2
    assert part in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_dry_run_tells_everything_but_secrets(place, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hushhush")
    assert main(["--dry-run", "--hostfile", "hosts", "train.py", "a.yml", "launch.environment.A='1'"]) == 0
    out = capsys.readouterr().out
    for part in (
        "4 ranks on 2 hosts",
        "ssh -T",
        "what only the host knows",
        "node1",
        "node2",
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
        "A=1",
        "JOB_CONFIG_SHA256",
    ):
        assert part in out, part
    assert "WANDB_API_KEY=" in out and "hushhush" not in out and not (place / "runs").exists()


def test_dry_run_of_one_rank(place, capsys):
    assert main(["--dry-run", "--ranks", "1", "train.py", "a.yml"]) == 0
    assert "1 rank on 1 host\n" in capsys.readouterr().out


@pytest.mark.parametrize("tensor, warned", [(1, False), (2, False), (4, True)])
def test_tensor_parallel_ranks_on_two_hosts_are_warned_of(place, capsys, tensor, warned):
    heads = "model.attention.heads=4"
    words = ["--dry-run", "--hostfile", "hosts", "train.py", "a.yml", f"parallel.tensor={tensor}", heads]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert ("4 do not divide the 2 ranks of a host" in out and "use parallel.tensor=2" in out) == warned


def test_a_job_script_asks_this_machine_for_nothing(place, capsys):
    words = ["--ranks", "8", "train.py", "a.yml", *BATCH, "run.dir=/dev/null/run"]
    assert main(["--print", "sbatch", *words]) == 0
    assert main(["--dry-run", *words]) == 2
    assert "run.dir" in capsys.readouterr().err


BATCH = [
    "launch.batch.nodes=4",
    "launch.batch.time='12:00:00'",
    "launch.batch.account=acc",
    "launch.batch.partition=gpu",
]


def test_slurm_job_script(place, capsys):
    assert main(["--ranks", "8", "--print", "sbatch", "train.py", "a.yml", *BATCH]) == 0
    out = capsys.readouterr().out
    for part in (
        "--nodes=4",
        "--ntasks-per-node=1",
        "--time=12:00:00",
        "--account=acc",
        "--partition=gpu",
        "--gpus-per-node=8",
        "--signal=USR1@300",
        "--requeue",
        "scontrol requeue",
    ):
        assert part in out, part
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0
    line = next(line for line in out.splitlines() if "deepy.py" in line)
    assert shlex.split(line)[1:5] == [str(ROOT / "deepy.py"), "--runner", "slurm", "train.py"]
    assert (
        "--gpus-per-node"
        not in (
            main(["--ranks", "2", "--print", "sbatch", "train.py", "a.yml", "launch.device=cpu"]),
            capsys.readouterr().out,
        )[1]
    )


def test_a_job_script_is_checked_for_all_its_ranks(place, capsys):
    words = [
        "--ranks",
        "8",
        "--print",
        "sbatch",
        "train.py",
        "a.yml",
        "launch.batch.nodes=4",
        "training.global_batch_size=96",
    ]
    assert main(words) == 2, "96 is not a multiple of 2 * 32"
    assert main([*words[:-1], "training.global_batch_size=128"]) == 0
    capsys.readouterr()


def test_pbs_job_script(place, capsys):
    assert main(["--ranks", "4", "--print", "pbs", "train.py", "a.yml", *BATCH]) == 0
    out = capsys.readouterr().out
    assert "#PBS -l select=4:mpiprocs=1:ngpus=4" in out and "#PBS -l walltime=12:00:00" in out and "slots=4" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0


def test_kubernetes_manifest(place, capsys):
    assert (
        main(["--ranks", "8", "--print", "k8s", "train.py", "a.yml", *BATCH, "launch.environment.NCCL_DEBUG=INFO"]) == 0
    )
    service, work = pyyaml.safe_load_all(capsys.readouterr().out)
    assert (
        service["metadata"]["name"] == work["metadata"]["name"] == "launched" and service["spec"]["clusterIP"] == "None"
    )
    pod = work["spec"]["template"]["spec"]
    assert work["spec"]["completions"] == 4 and pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in pod["containers"][0]["env"]
    assert "--node-rank=$JOB_COMPLETION_INDEX" in pod["containers"][0]["command"][2]


def test_kubernetes_takes_variables_of_a_file_from_a_secret(place, capsys):
    (place / "variables").write_text("MY_TOKEN=x1y2\n")
    words = [
        "--ranks",
        "8",
        "--print",
        "k8s",
        "train.py",
        "a.yml",
        *BATCH,
        f"launch.environment_file={place}/variables",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    _, work = pyyaml.safe_load_all(out)
    (container,) = work["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "launched-environment"}}] and "x1y2" not in out
    assert "\n# kubectl create secret generic launched-environment --from-env-file=" in out


def test_secrets_are_neither_taken_nor_shown(place, capsys):
    for word in ("launch.environment={MY_TOKEN: x1y2}", "launch.environment.MY_API_KEY=x1y2"):
        assert main(["--ranks", "2", "train.py", "a.yml", word]) == 2
        told = capsys.readouterr()
        assert "launch.environment_file" in told.err and "x1y2" not in told.err + told.out


def test_a_job_that_was_queued_again_is_no_first_start(place, monkeypatch):
    """Its ranks must continue from their own newest checkpoint, even where checkpoint.resume names another or none."""
    plan = make_plan("train.py", ["a.yml"], ["launch.ranks=2"], {})
    assert restarted(plan, 0).environment["JOB_ATTEMPT"] == "0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert [restarted(plan, attempt).environment["JOB_ATTEMPT"] for attempt in (0, 1)] == ["2", "3"]


def test_sbatch_writes_the_script(place, capsys):
    assert main(["--ranks", "2", "--sbatch", "train.py", "a.yml", "launch.device=cpu"]) == 0
    path = place / "launched.sbatch"
    assert path.is_file() and capsys.readouterr().out == f"sbatch {path}\n"
    assert not (place / "runs").exists()


def test_a_job_that_cannot_be_submitted_makes_no_folder(place, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["--ranks", "2", "--sbatch", "--submit", "train.py", "a.yml", "launch.device=cpu"]) == 2
    assert "--submit needs the program sbatch" in capsys.readouterr().err and not (place / "runs").exists()


def test_logs_are_merged_by_time(place, capsys):
    folder = place / "runs" / "x" / "logs"
    folder.mkdir(parents=True)
    (folder / "rank_0000.log").write_text("2026-01-01T00:00:00.100Z a\n2026-01-01T00:00:02.000Z c\n")
    (folder / "rank_0001.log").write_text("2026-01-01T00:00:01.000Z b\nwithout time\n2026-01-01T00:00:03.000Z d\n")
    assert main(["--logs", "runs/x"]) == 0
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "[0] a",
        "[1] b",
        "[1] without time",
        "[0] c",
        "[1] d",
    ]
    assert main(["--logs", "runs/none"]) == 2


def test_the_message_to_a_host_has_the_job_and_its_own_seat(monkeypatch):
    """A message does not grow with the hosts, and the job is made into one once: for 1,280 hosts that was 14 s of a
    launcher's time, now 1 s.
    """
    many, calls = job(50), []
    plain = dataclasses.asdict
    monkeypatch.setattr(
        dataclasses, "asdict", lambda value: isinstance(value, Specification) and calls.append(1) or plain(value)
    )
    messages = [many.to_message(index) for index in range(50)]
    assert len(calls) == 1
    one, thousand = (len(json.dumps(job(number).to_message(0))) for number in (1, 1000))
    assert thousand <= one + 6  # digits of how many there are
    assert all(Specification.from_message(message) == dataclasses.replace(many, hosts=()) for message in messages)
    first = 0
    for index, message in enumerate(messages):
        seat = seat_in(message, many, None, None)
        assert (seat.index, seat.host, seat.first_rank) == (index, many.hosts[index], first)
        assert (seat.hosts, seat.world_size) == (50, sum(len(host.slots) for host in many.hosts))
        first += len(seat.host.slots)
    changed = dataclasses.replace(many, attempt=1)
    assert Specification.from_message(changed.to_message(0)).attempt == 1
