"""The container files: linted, and of one mind about images, packages and sources."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

DOCKERFILES = ("Dockerfile", "Dockerfile.rocm")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """An Apptainer definition, taken apart: its header under "", then its sections by name."""
    parts = re.split(r"^%(\w+)\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def debian_packages(text: str) -> set[str]:
    """Packages of the apt-get line."""
    (line,) = re.findall(r"apt-get install -y --no-install-recommends \\\n((?:.*\\\n)*.*)\n", text)
    return {word for word in line.partition("&&")[0].replace("\\", " ").split()}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_have_no_finding(name):
    program = Path(sys.executable).parent / "hadolint"
    found = str(program) if program.exists() else shutil.which("hadolint")
    assert found, "hadolint is in requirements/dev.txt, and not installed"
    done = subprocess.run([found, "--no-color", name], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_images_have_what_several_hosts_need():
    lists = [debian_packages(read(name)) for name in (*DOCKERFILES, "apptainer.def")]
    for each in lists:
        assert {
            "openssh-client",
            "openssh-server",
            "pdsh",
            "openmpi-bin",
            "numactl",
            "ibverbs-providers",
            "git",
        } <= each
    nvidia, amd, apptainer = lists
    assert apptainer == nvidia and nvidia - amd == {"python3", "python3-dev", "python3-venv"}, "AMD's image has Python"


def test_apptainer_starts_from_the_same_images():
    images = [re.search(r"^FROM (\S+)$", read(name), re.MULTILINE)[1] for name in DOCKERFILES]
    text = read("apptainer.def")
    assert f"base={images[0]}\n" in sections(text)["arguments"] and f"--build-arg base={images[1]} " in text
    assert sections(text)[""].split() == ["Bootstrap:", "docker", "From:", "{{", "base", "}}"]


def test_apptainer_takes_the_source_that_docker_takes():
    rows = [line.split() for line in sections(read("apptainer.def"))["files"].splitlines() if line]
    assert all(target == f"/megatron/{source}" for source, target in rows)
    taken = {source for source, _ in rows}
    assert all((ROOT / source).exists() for source in taken)
    allowed = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    assert taken == {name for name in allowed if (ROOT / name).exists()}


@pytest.mark.parametrize("kind", ["gpu", "rocm"])
def test_the_scripts_of_apptainer_are_shell(kind):
    parts = sections(read("apptainer.def"))
    for name in ("post", "environment", "runscript", "test"):
        script = parts[name].replace("{{ kind }}", kind)
        assert "{{" not in script
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    assert (ROOT / "requirements" / f"{kind}.txt").exists()


@pytest.mark.parametrize(
    "name", ["requirements/install", "requirements/beside_torch", "tools/sshd", ".ci/run", ".ci/packages"]
)
def test_shell_scripts_can_be_run(name):
    path = ROOT / name
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0


def test_packages_beside_a_torch_that_is_there(tmp_path):
    """A stand-in for Python notes what pip is given: everything but torch, held to the torch that is there."""
    fake = tmp_path / "python"
    fake.write_text(f"""#!/bin/bash
if [[ $1 == -c ]]; then cat {tmp_path}/version; exit; fi
printf '%s ' "$@" > {tmp_path}/pip
while [[ $# -gt 0 ]]; do
    case $1 in --constraint) cp "$2" {tmp_path}/held;; --requirement) cp "$2" {tmp_path}/wanted;; esac
    shift
done
[[ -e {tmp_path}/other ]] && echo '9.9 13.0' > {tmp_path}/version
exit 0
""")
    fake.chmod(0o755)
    (tmp_path / "version").write_text("2.11.0+rocm7.14 7.14\n")

    def run():
        return subprocess.run([ROOT / "requirements/beside_torch", "rocm", fake], capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "held").read_text() == "torch==2.11.0+rocm7.14\n"
    wanted = (tmp_path / "wanted").read_text().splitlines()
    assert not [line for line in wanted if line.startswith(("torch==", "-r"))]
    assert any(line.startswith("deepspeed==") for line in wanted) and any(
        line.startswith("gigatoken==") for line in wanted
    )
    (tmp_path / "other").touch()
    done = run()
    assert done.returncode == 1 and "torch was 2.11.0+rocm7.14" in done.stderr
