"""The package that others install: wheel and sdist, tried outside of the repository, with metadata and neighbours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

TESTED = re.compile(r"^# torch: tested from (\d+\.\d+) to (\d+\.\d+)", re.MULTILINE)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and with the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel(folder: Path) -> Path:
    (path,) = folder.glob("deepy-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The `bin` folder of an environment with the wheel, which sees the packages it depends on, and no repository."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    words = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
    done = subprocess.run(
        [*words, "--no-index", "--quiet", str(wheel(built))], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(here))
    return folder / "bin"


def outside(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command outside of the repository, as somebody who has no copy of it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, timeout=900)


@pytest.mark.tour
def test_the_installed_command_trains_a_ready_configuration(installed, tmp_path):
    deepy = str(installed / "deepy")
    where = "import megatron, megatron.installation as i; print(megatron.__file__, i.installed(), i.root())"
    told = outside([str(installed / "python"), "-c", where], tmp_path).stdout
    assert str(installed.parent) in told and " True " in told and str(ROOT) not in told
    shown = outside([deepy, "--help"], tmp_path)
    assert shown.returncode == 0 and "to-hf" in shown.stdout and "quickstart" not in shown.stdout
    words = ["test/tiny_llama", "training.stop_at_step=2", "launch.device=cpu", "run.dir=runs/x"]
    done = outside([deepy, "train", "--ranks", "2", *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "x" / "metrics.jsonl").read_text().count('"loss"') >= 2
    seen = outside([deepy, "checkpoint", "inspect", "runs/x"], tmp_path)
    assert seen.returncode == 0 and "step_00000002" in seen.stdout, seen.stdout + seen.stderr
    checked = outside([deepy, "config", "check", "pythia/70m", "data.synthetic=copy", "tokenizer.type=none"], tmp_path)
    assert checked.returncode == 0 and "no problems" in checked.stdout
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]


def test_the_wheel_holds_the_scripts_and_nothing_of_the_tests(built):
    names = set(zipfile.ZipFile(wheel(built)).namelist())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if name.startswith(("megatron/", "eval_tasks/")):
            assert name in names
        if name.startswith(("tools/", "configs/")) or ("/" not in name and name.endswith(".py")):
            assert f"megatron/_bundle/{name}" in names, name
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "tests/" in name]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"megatron", "eval_tasks", "deepy"}
    (sdist,) = built.glob("deepy-*.tar.gz")
    held = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert {"LICENSE", "README.md", "CITATION.cff", "tests/test_package.py", "docs/data.md", "deepy.py"} <= held


def metadata(built: Path):
    archive = zipfile.ZipFile(wheel(built))
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(archive.read(name).decode())


def test_dependencies_are_those_of_the_requirement_files(built):
    """Each pin of requirements/ is within what the wheel asks for, and nothing else is asked for."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    asked: dict[str, dict[str, Requirement]] = {}
    for text in metadata(built).get_all("Requires-Dist"):
        requirement = Requirement(text)
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker or ""))
        asked.setdefault(extra[1] if extra else "base", {})[requirement.name.lower()] = requirement
    files = {path.stem: path for path in (ROOT / "requirements").glob("*.txt")}
    assert set(metadata(built).get_all("Provides-Extra")) == set(files) - {"base"} >= {"gpu", "rocm", "dev", "docs"}
    for kind, path in files.items():
        included = re.findall(r"^-r (?!base\.txt)(.+)$", path.read_text(), re.MULTILINE)
        text = "".join(each.read_text() for each in (path, *(path.with_name(name) for name in included)))
        pins = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", text, re.MULTILINE)
        assert {name.lower().replace("_", "-") for name, _ in pins} == {
            name.replace("_", "-") for name in asked.get(kind, {})
        }, kind
        for name, version in pins:
            found = {key.replace("_", "-"): value for key, value in asked[kind].items()}
            specifier = found[name.lower().replace("_", "-")].specifier
            assert Version(version) in specifier, name
            by_year = int(version.split(".")[0]) >= 2000
            assert specifier.contains("9999") == by_year, f"{name}: an upper bound, unless versions are dates"
    oldest, newest = map(Version, TESTED.search((ROOT / "requirements/base.txt").read_text()).groups())
    found = asked["base"]["torch"].specifier
    assert oldest in found and f"{newest}.1" in found
    assert f"{oldest.major}.{oldest.minor - 1}.1" not in found and f"{newest.major}.{newest.minor + 1}.0" not in found


def test_both_ends_of_torch_are_in_the_matrix():
    """Continuous integration runs with the oldest and the newest version that the wheel accepts."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    versions = [version.rpartition(".")[0] for version in jobs["torch"]["strategy"]["matrix"]["torch"]]
    assert tuple(versions) == TESTED.search((ROOT / "requirements/base.txt").read_text()).groups()
    assert jobs["torch"]["steps"][-1]["run"] == "make torch TORCH=${{ matrix.torch }}"
    assert jobs["suite"]["steps"][-1]["run"] == ".ci/run"


def test_metadata_tell_name_version_and_licence(built):
    import megatron

    found = metadata(built)
    assert found["Name"] == "deepy" and found["Version"] == megatron.__version__
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == ">=3.11"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_citation_is_valid():
    """The keys that the Citation File Format 1.2.0 requires, and none that it does not have."""
    import megatron

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert set(cited) <= {
        "cff-version",
        "message",
        "title",
        "authors",
        "type",
        "abstract",
        "version",
        "date-released",
        "license",
        "keywords",
    }
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(set(author) <= {"name"} or {"family-names", "given-names"} <= set(author) for author in cited["authors"])
    assert (
        str(cited["version"]) == megatron.__version__ and cited["license"] == "Apache-2.0" and cited["title"] == "deepy"
    )
    changes = re.findall(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes[0] == (megatron.__version__, str(cited["date-released"])), "the newest release"


# ---- NVIDIA's Megatron-Core next to it -------------------------------------------------------------------------------


def sees_both(folders: list[str], core: str, tmp_path: Path) -> None:
    """In this order of sys.path both packages are imported, each from its own folder."""
    code = (
        f"import sys; sys.path[:0] = {folders!r}\n"
        f"import {core} as core, megatron, megatron.config, megatron.installation\n"
        "print(core.__file__); print(megatron.config.__file__); print(megatron.__file__)"
    )
    done = outside([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    theirs, *ours = done.stdout.split()
    (folder,) = [each for each in folders if each != str(ROOT)]
    assert theirs.startswith(folder) and all(path.startswith(str(ROOT)) for path in ours)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_namespace_package_of_the_same_name_stays_importable(tmp_path, ours_first):
    """Megatron-Core's layout: `megatron/core/__init__.py`, no `megatron/__init__.py`."""
    (tmp_path / "site" / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "site" / "megatron" / "core" / "__init__.py").write_text("NAME = 'core'\n")
    (tmp_path / "site" / "megatron" / "config.py").write_text("raise RuntimeError('ours is meant')\n")
    theirs = str(tmp_path / "site")
    sees_both([str(ROOT), theirs] if ours_first else [theirs, str(ROOT)], "megatron.core", tmp_path)


@pytest.fixture(scope="module")
def megatron_core(tmp_path_factory) -> Path:
    """NVIDIA's own wheel, unpacked."""
    folder = tmp_path_factory.mktemp("core")
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:", "-d", str(folder)]
    try:
        done = subprocess.run([*words, "megatron-core==0.16.1"], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("pip did not download megatron-core in 300 s")
    if done.returncode:
        pytest.skip(f"pip cannot download megatron-core: {done.stderr.strip().splitlines()[-1]}")
    (path,) = folder.glob("megatron_core-*.whl")
    zipfile.ZipFile(path).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False])
def test_nvidias_wheel_stays_importable(megatron_core, tmp_path, ours_first):
    assert not (megatron_core / "megatron" / "__init__.py").exists()
    folders = [str(ROOT), str(megatron_core)] if ours_first else [str(megatron_core), str(ROOT)]
    sees_both(folders, "megatron.core.package_info", tmp_path)
