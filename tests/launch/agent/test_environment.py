"""Workers find their place and their configuration, whatever started them."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from megatron.config import ConfigError, config_hash, load, save_resolved
from megatron.config.source.arguments import ArgumentError, split
from megatron.launch.agent.ranks import rank_environment
from megatron.launch.command_line import rank_command
from megatron.launch.report.forwarding import forwarded, read_file, shown
from megatron.worker.job import check_agreement, guarded, read_job
from megatron.worker.place import LaunchError, WorkerEnvironment, worker_environment
from tests.launch.running import CONFIG
from tests.paths import ROOT

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "n[7-8]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "994050049",
}
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1, "127.0.0.1", "single", 0)),
        (TORCHRUN, (3, 4, 1, 2, "n1", "environment", 2)),
        ({**TORCHRUN, "JOB_CONFIG": "x", "JOB_ATTEMPT": "1"}, (3, 4, 1, 2, "n1", "agent", 1)),
        (SLURM, (5, 6, 1, 2, "n7", "slurm", 0)),
        ({**SLURM, "SLURM_RESTART_COUNT": "3", "MASTER_ADDR": "ib7"}, (5, 6, 1, 2, "ib7", "slurm", 3)),
        # A job that was queued again, whoever starts ranks in it.
        ({**OPENMPI, "SLURM_RESTART_COUNT": "1"}, (1, 2, 1, 2, "127.0.0.1", "openmpi", 1)),
        (
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"},
            (3, 4, 1, 2, "n1", "environment", 1),
        ),
        ({"SLURM_RESTART_COUNT": "1"}, (0, 1, 0, 1, "127.0.0.1", "single", 1)),
        (OPENMPI, (1, 2, 1, 2, "127.0.0.1", "openmpi", 0)),
        (MPICH, (2, 4, 0, 2, "n1", "mpich", 0)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, "127.0.0.1", "environment", 0)),
        # A batch script has SLURM_PROCID too, but is no task of a step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "5"}, (0, 1, 0, 1, "127.0.0.1", "single", 0)),
        # The agent's or torchrun's environment has precedence over the allocation around it.
        ({**SLURM, **TORCHRUN}, (3, 4, 1, 2, "n1", "environment", 2)),
    ],
)
def test_the_place_of_a_worker(environment, expected):
    place = worker_environment(environment)
    assert (
        place.rank,
        place.world_size,
        place.local_rank,
        place.local_world_size,
        place.master_address,
        place.starter,
        place.attempt,
    ) == expected
    assert 0 < place.master_port < 65536 or "MASTER_PORT" not in environment and place.starter == "environment"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (SLURM, "inside a step of srun"),
        (OPENMPI, "inside mpirun"),
        (MPICH, "inside mpiexec"),
        (TORCHRUN, "RANK and WORLD_SIZE are set"),
    ],
)
def test_deepy_becomes_a_rank_where_others_have_started_it(yaml, tmp_path, environment, why):
    script = tmp_path / "a.py"
    script.write_text("")
    words, overrides = [yaml, "training.steps=9", "--", "own", "x=y"], ["launch.interface=ib0"]
    first = {
        name: "0" if name.endswith(("RANK", "RANKID", "PROCID", "LOCALID")) else value
        for name, value in environment.items()
    }
    command, said = rank_command(str(script), words, overrides, first)
    assert command == [sys.executable, "-u", str(script), yaml, "training.steps=9", *overrides, "--", "own", "x=y"]
    assert why in said and f"{worker_environment(environment).world_size} ranks" in said
    assert rank_command(str(script), words, overrides, environment)[1] == "", "one of them speaks"
    assert rank_command(str(script), words, ["launch.runner=local"], environment) is None
    assert rank_command(str(script), words, overrides, {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}) is None


def test_ranks_are_not_told_the_place_of_their_agent():
    outside = {
        **OPENMPI,
        **MPICH,
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "5",
        "JOB_CREDENTIALS": "s",
    }
    given = rank_environment({**outside, "PATH": "/bin"}, 3, 1, 2, 4, ("10.0.0.1", 5))
    assert set(given) - {"PATH", "SLURM_JOB_ID"} == {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }


def test_all_ranks_of_a_step_agree_on_where_to_meet():
    first = worker_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    last = worker_environment(SLURM)
    other = worker_environment({**SLURM, "SLURM_JOB_ID": "124"})
    assert (first.master_address, first.master_port) == (last.master_address, last.master_port)
    assert other.master_port != last.master_port
    assert first.local_world_size == 4


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -x MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, "does not fit 2 nodes"),
    ],
)
def test_places_that_cannot_be(environment, part):
    with pytest.raises(LaunchError, match=part):
        worker_environment(environment)


@pytest.fixture
def yaml(tmp_path):
    (tmp_path / "a.yml").write_text(CONFIG)
    return str(tmp_path / "a.yml")


def test_a_job_of_the_agent_is_read_from_its_file(yaml, tmp_path):
    resolved = load([yaml], ["training.steps=9"], ranks=4)
    path = tmp_path / "private.yml"
    save_resolved(resolved, path)
    environment = {
        **TORCHRUN,
        "JOB_CONFIG": str(path),
        "JOB_CONFIG_SHA256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    config, place = read_job(["--prompt", "x"], environment)
    assert config == resolved.config and place.rank == 3 and place.own == ("--prompt", "x")
    assert place.config_sha256 == config_hash(resolved.config)
    path.write_text(path.read_text().replace("steps: 9", "steps: 8"))
    with pytest.raises(LaunchError, match="not the configuration that was sent"):
        read_job([], environment)


def test_a_worker_started_otherwise_reads_the_files_itself(yaml):
    config, place = read_job([yaml, "training.steps=9", "training.global_batch_size=16", "--prompt", "a.yml"], TORCHRUN)
    assert config.training.steps == 9 and config.training.accumulation == 2, "resolved for the 4 ranks there are"
    assert place.own == ("--prompt", "a.yml")
    assert place.config_sha256 == config_hash(config)


def test_agreement():
    place = WorkerEnvironment(rank=1, world_size=3, config_sha256="a" * 64)
    check_agreement(place, lambda mine: [mine] * 3)
    with pytest.raises(LaunchError, match=r"ranks \[2\]"):
        check_agreement(place, lambda mine: [mine, mine, mine.replace("a", "b")])


def test_mistakes_become_messages_and_status_2(yaml, capsys):
    def wrong():
        read_job([yaml, "training.stepz=9"], {})

    assert guarded(wrong) == 2
    assert "stepz" in capsys.readouterr().err
    assert guarded(lambda: read_job(["what"], {})) == 2
    assert "'what'" in capsys.readouterr().err
    assert guarded(lambda: None) == 0 and guarded(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError):
        read_job([str(tmp_path / "none.yml")], {})


@pytest.mark.parametrize(
    ("words", "files", "overrides", "own"),
    [
        ("a.yml b.yaml x.y=1 c.json", "a.yml b.yaml c.json", "x.y=1", ""),
        ("a.yml training.steps=5 --prompt b.yml k=v", "a.yml", "training.steps=5", "--prompt b.yml k=v"),
        ("a.yml -- b.yml k=v", "a.yml", "", "b.yml k=v"),
        (
            "a.yml model.attention@local.window=4 data.train=/x/y=z",
            "a.yml",
            "model.attention@local.window=4 data.train=/x/y=z",
            "",
        ),
    ],
)
def test_arguments(words, files, overrides, own):
    taken = split(words.split())
    assert (taken.files, taken.overrides, taken.own) == (
        tuple(files.split()),
        tuple(overrides.split()),
        tuple(own.split()),
    )


@pytest.mark.parametrize("word", ["train", "a.yaml.bak", "=5", ".x=1"])
def test_words_that_mean_nothing(word):
    with pytest.raises(ArgumentError):
        split(["a.yml", word])


def test_what_is_forwarded():
    environment = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "MY_THING": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "WANDB_API_KEY": "k",
        "SLURM_JOB_ID": "1",
    }
    assert forwarded(environment, []) == {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k"}
    assert forwarded(environment, ["MY_*", "HOME"]) == {
        "HOME": "/root",
        "MY_THING": "1",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "k",
    }
    assert shown({"WANDB_API_KEY": "k", "HF_TOKEN": "t", "NCCL_DEBUG": "INFO"}) == {
        "WANDB_API_KEY": "********",
        "HF_TOKEN": "********",
        "NCCL_DEBUG": "INFO",
    }


def test_a_file_of_variables(tmp_path):
    path = tmp_path / "env"
    path.write_text('# comment\n\nA=1\nB=say "hi" $HOME `id`\nC=\nD=a=b\n')
    assert read_file(path) == {"A": "1", "B": 'say "hi" $HOME `id`', "C": "", "D": "a=b"}
    path.write_text("A=1\nnonsense\n")
    with pytest.raises(ValueError, match=":2: 'nonsense'"):
        read_file(path)


def test_the_launcher_loads_neither_torch_nor_deepspeed():
    code = (
        "import sys, pkgutil, importlib, megatron.launch, megatron.config, megatron.worker\n"
        "for room in (megatron.launch, megatron.config, megatron.worker):\n"
        "    for each in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(each.name)\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_an_agent_does_not_load_the_configuration():
    """One starts on every host, and a third of a second is half of its start."""
    code = (
        "import sys, megatron.launch.command_line as one, megatron.launch.agent.agent\n"
        "print([name for name in ('pydantic', 'yaml', 'megatron.config.schema') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_word_of_deepspeeds_launcher_is_no_option_of_ours() -> None:
    taken = split(["--local_rank=1", "a.yml", "training.steps=5", "--mine", "--local_rank=2"])
    own = ("--mine", "--local_rank=2")
    assert (taken.files, taken.overrides, taken.own) == (("a.yml",), ("training.steps=5",), own)


def test_unusable_data_is_a_message_and_not_a_traceback(capsys: pytest.CaptureFixture) -> None:
    from megatron.data.errors import DataError

    def main() -> None:
        raise DataError("data.split", "no document is left for validation", "give more documents")

    assert guarded(main) == 2
    assert capsys.readouterr().err == "data.split: no document is left for validation\n    fix: give more documents\n"
