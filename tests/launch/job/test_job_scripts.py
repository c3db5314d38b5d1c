"""Job scripts and manifests: hostile values stay values, and Kubernetes' own schemas accept what we print."""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest
import yaml as pyyaml

from megatron.launch.command_line import main
from megatron.launch.job.templates import _service_name
from tests.launch.running import CONFIG

TRAP = "x$(touch pwned)`touch pwned`;touch pwned #'\" y"


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys, kind: str, *words: str) -> str:
    assert main(["--ranks", "4", "--print", kind, "train.py", "a.yml", "launch.batch.nodes=2", *words]) == 0
    return capsys.readouterr().out


def override(key: str, value: str) -> str:
    return f"{key}={json.dumps(value)}"


def ran(place, text: str) -> list[str]:
    """Commands that the script started, with stubs in the place of python and the schedulers' programs."""
    stubs = place / "stubs"
    stubs.mkdir()
    for name in ("python-stub", "scontrol", "srun"):
        (stubs / name).write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$ARGUMENTS"\n')
        (stubs / name).chmod(0o755)
    (place / "nodes").write_text("n1\nn1\nn2\n")
    environment = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "ARGUMENTS": str(place / "arguments")}
    environment |= {"PBS_NODEFILE": str(place / "nodes"), "PBS_JOBID": "7.server"}
    done = subprocess.run(["bash", "-c", text], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (place / "arguments").read_text().split("\0")[:-1]


@pytest.mark.parametrize("kind", ["pbs", "sbatch"])
@pytest.mark.parametrize("folder", [f"runs/{TRAP.replace('/', '_')}", "-rf", "a b", "runs/HOSTFILE"])
def test_hostile_values_are_only_values(place, capsys, kind, folder):
    words = (override("run.dir", folder), override("run.name", TRAP), "launch.python=python-stub")
    arguments = ran(place, printed(capsys, kind, *words))
    assert not list(place.rglob("pwned"))
    assert override("run.dir", folder) in arguments and override("run.name", TRAP) in arguments
    if kind == "pbs":
        assert f"--hostfile={folder}/hosts.7.server" in arguments
        assert (place / folder / "hosts.7.server").read_text() == "n1 slots=4\nn2 slots=4\n"


@pytest.mark.parametrize("kind", ["pbs", "sbatch", "k8s"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "a\n#SBATCH --uid=0"),
        ("run.name", "a\rb"),
        ("run.dir", "runs/a\ntouch pwned"),
        ("launch.batch.time", "1:00\n#PBS -W x"),
        ("launch.batch.time", "1:00 --uid=0"),
        ("launch.batch.account", "a b"),
        ("launch.batch.partition", "p;q"),
        ("launch.batch.qos", "-x"),
        ("launch.batch.image", "a\nb"),
        ("launch.python", "python\nx"),
    ],
)
def test_line_breaks_and_second_words_are_refused(place, capsys, kind, key, value):
    assert main(["--ranks", "4", "--print", kind, "train.py", "a.yml", override(key, value)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and key in captured.err and "must be" in captured.err


def test_directives_of_slurm_keep_their_values_whole(place, capsys):
    out = printed(capsys, "sbatch", override("run.name", "a b'c"))
    flags = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in out.splitlines() if line.startswith("#SBATCH")]
    assert "--job-name=a b'c" in flags and f"--output={place}/slurm-%j.out" in flags and "--mem=0" in flags


def test_a_percent_sign_of_a_folder_is_none_of_slurms(place, monkeypatch):
    (place / "sbatch").write_text("#!/bin/sh\n")
    (place / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    words = ["--ranks", "4", "--sbatch", "--submit", "train.py", "a.yml", override("run.dir", "runs/50%j")]
    assert main(words) == 0
    text = (place / "runs" / "50%j" / "job.sbatch").read_text()
    assert f"#SBATCH --output={place}/runs/50%%j/slurm-%j.out\n" in text


def test_memory(place, capsys):
    words = ("launch.batch.cores=8", "launch.batch.memory=200G")
    script = printed(capsys, "sbatch", *words)
    assert "--mem=200G" in script and "--exclusive" not in script
    assert ":ncpus=8:mem=200G" in printed(capsys, "pbs", *words)
    assert "--mem" not in printed(capsys, "sbatch", "launch.batch.cores=8")


@pytest.mark.parametrize("name", ["14m", "70m", "Llama_3.1 8B", "ümläut", "-x-", "1" * 80, "a" * 80, "日本", ""])
def test_names_of_services(name):
    import re

    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,58}[a-z0-9])?", _service_name(name))


MANIFESTS = {
    "plain": (),
    "pythia": ("run.name=70m",),
    "hostile": (override("run.name", TRAP), override("launch.environment.A", "x\n- {name: B}"), "launch.restarts=5"),
    "amd and rdma": ("launch.batch.gpus=amd", "launch.batch.resources={rdma/hca: 8}"),
    "cpu": ("launch.device=cpu",),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_are_valid_for_kubernetes(place, capsys, case):
    validator = pytest.importorskip("kubernetes_validate")
    service, job = pyyaml.safe_load_all(printed(capsys, "k8s", *MANIFESTS[case]))
    for each in (service, job):
        validator.validate(each, "1.31", strict=True)
    assert (
        service["metadata"]["name"]
        == job["spec"]["template"]["spec"]["subdomain"]
        == _service_name({"pythia": "70m", "hostile": TRAP}.get(case, "launched"))
    )
    container = job["spec"]["template"]["spec"]["containers"][0]
    limits = container["resources"].get("limits", {})
    assert limits == {"amd and rdma": {"amd.com/gpu": 4, "rdma/hca": 8}, "cpu": {}}.get(case, {"nvidia.com/gpu": 4})
    assert ("IPC_LOCK" in str(container["securityContext"])) == (case == "amd and rdma")
    assert job["spec"]["backoffLimit"] == (10 if case == "hostile" else 6), "all pods come back after one was lost"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"FailJob", "Ignore"}
    words = shlex.split(container["command"][2])
    if case == "hostile":
        assert override("run.name", TRAP) in words


def test_the_validator_refuses_what_is_wrong():
    validator = pytest.importorskip("kubernetes_validate")
    with pytest.raises(validator.ValidationError):
        validator.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"completions": "x"}}, "1.31"
        )
