"""Agents in containers: the options of each tool, and a run through a program that stands in for Apptainer."""

from __future__ import annotations

import json
import sys

import pytest

from megatron.config import ConfigError, resolve
from megatron.config.registry import registry_of
from megatron.config.sections.layout import LaunchSection
from megatron.launch.runner import runner_of
from megatron.launch.wire.specification import Host, Specification
from tests.launch.running import CONFIG, Job
from tests.paths import ROOT

BATCH = {"gpus": "amd"}


def arguments(runner: str, **keys) -> list[str]:
    job = Specification((Host("a", (0,)), Host("b", (0,))), ("python",), "/work dir", {}, "x", credentials_file="/t")
    keys = {"hostfile": "hosts" if runner == "ssh" else None, "python": "python3", **keys}
    return list(runner_of(registry_of(), runner).commands(job, LaunchSection(**keys))[0].arguments)


def test_each_tool_is_told_image_folders_and_command():
    agent = ["python3", "-u", str(ROOT / "deepy.py"), "--agent", "--host", "SLURMD_NODENAME"]
    code, work = f"{ROOT}:{ROOT}", "/work dir:/work dir"
    found = arguments("slurm", container="apptainer:/i.sif", container_mounts=["/data", "/a:/b"])
    binds = [word for mount in (code, work, "/data:/data", "/a:/b") for word in ("--bind", mount)]
    start = found.index("apptainer")
    assert found[start:] == ["apptainer", "exec", "--nv", *binds, "--pwd", "/work dir", "/i.sif", *agent]
    assert "--rocm" in arguments("slurm", container="apptainer:/i.sif", batch=BATCH)
    assert "--nv" not in arguments("slurm", container="apptainer:/i.sif", device="cpu")
    found = arguments("slurm", container="enroot:deepy")
    assert found[-9 - 4 :] == ["enroot", "start", "--mount", code, "--mount", work, "deepy", *agent]
    found = arguments("slurm", container="pyxis:nvcr.io#me/deepy:1", container_mounts=["/data"])
    assert found[-6:] == agent and found[0] == "srun"
    assert found[-9:-6] == [
        "--container-image=nvcr.io#me/deepy:1",
        f"--container-mounts={code},{work},/data:/data",
        "--container-workdir=/work dir",
    ]
    assert "'/work dir:/work dir'" in arguments("ssh", container="enroot:deepy")[-1]  # words for a remote shell


def test_a_run_in_a_container(tmp_path, monkeypatch):
    """The stand-in notes how it was called and starts what it was given."""
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "json.dump(sys.argv, open(os.environ['NOTES'] + '/called', 'w'))\n"
        "words = sys.argv[sys.argv.index('/i.sif') + 1 :]\n"
        "os.environ['IN_CONTAINER'] = '1'\n"
        "os.execvp(words[0], words)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{__import__('os').environ['PATH']}")
    words = ("launch.container=apptainer:/i.sif", f"launch.python={sys.executable}", "launch.device=cpu")
    job = Job(tmp_path, "floods", ranks=1, overrides=words)
    status, out, error = job.finish(100)
    assert status == 0, error
    called = json.loads((tmp_path / "notes" / "called").read_text())
    assert called[1:3] == ["exec", "--bind"] and f"{tmp_path}:{tmp_path}" in called and "x" * 100 in out


@pytest.mark.parametrize(
    ("launch", "key"),
    [
        ({"container": "docker:a", "python": "p"}, "launch.container"),
        ({"container": "apptainer:", "python": "p"}, "launch.container"),
        ({"container": "apptainer:a"}, "launch.python"),
        ({"container": "pyxis:a", "python": "p", "runner": "local"}, "launch.container"),
        ({"container": "enroot:a", "python": "p", "runner": "torchrun"}, "launch.container"),
        ({"container": "enroot:a", "python": "p", "container_mounts": ["a,b"]}, "launch.container_mounts"),
        ({"container_mounts": ["/a"]}, "launch.container_mounts"),
    ],
)
def test_what_cannot_be_started_is_refused(launch, key):
    import yaml

    with pytest.raises(ConfigError) as caught:
        resolve({**yaml.safe_load(CONFIG), "launch": launch}, ranks=1)
    assert [problem.key for problem in caught.value.problems] == [key]
