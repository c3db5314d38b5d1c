"""The documentation as a site: it builds without a warning, and its notebook runs. The project's other pages exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.paths import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` does: warnings (links and anchors that lead nowhere, too) are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-c",
            "docs",
            "--fail-on-warning",
            "--keep-going",
            "--quiet",
            ".",
            str(folder),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.tour
def test_every_page_is_part_of_the_site(site):
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", NOTEBOOK]:
        assert (site / path.relative_to(ROOT)).with_suffix(".html").is_file(), path


@pytest.mark.tour
def test_reference_pages_hold_what_the_code_says(site):
    api = (site / "docs" / "api.html").read_text()
    for name in ("megatron.api.resolve", "megatron.api.train", "megatron.api.analysis.OpenModel.forward"):
        assert f'id="{name}"' in api
    assert "train-tokenizer" in (site / "docs" / "commands.html").read_text()
    assert "optimizer.lr" in (site / "docs" / "configuration" / "training.html").read_text()
    assert "docs/index.html" in (site / "index.html").read_text()
    assert "mamba" in (site / "searchindex.js").read_text()  # the search needs no server
    assert 'src="data:' in (site / "docs" / "notebook.html").read_text() or "png" in json.dumps(NOTEBOOK.read_text())


@pytest.mark.tour
def test_pages_need_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', path.read_text())
        assert not [each for each in loaded if "contributor-covenant" not in each], (path, loaded)


@pytest.mark.tour
def test_the_notebook_runs(tmp_path):
    """Every cell, in a fresh kernel. Printed losses and hashes equal the text next to them."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, 4)
    stored = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in stored[1:]), "the stored notebook has outputs"
    assert not re.search(r"/(?:work|home|root|tmp)/", NOTEBOOK.read_text())
    python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        NotebookClient(book, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        os.environ.pop("PYTHONPATH")
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
    printed = [
        output.text for cell in book.cells for output in cell.get("outputs", ()) if output.get("name") == "stdout"
    ]
    lines = "".join(printed).splitlines()  # a slow kernel may send one line in two outputs
    (pair,) = [line.split() for line in lines if re.fullmatch(r"[\d.e+-]+ [\d.e+-]+", line)]
    assert float(pair[0]) == pytest.approx(float(pair[1]), rel=1e-6)


def test_pre_commit_runs_the_pinned_formatter():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-check", "ruff-format", "mypy"}
    (pin,) = re.findall(r"^ruff==\S+", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert {hook["additional_dependencies"][0] for hook in hooks if hook["id"].startswith("ruff")} == {pin}


def test_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:bench|megatron|tests|configs|docs|requirements|tools)/[\w./-]*\w/?)`", text)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists(), name
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"`make ([\w-]+)", text):
        assert name in targets, name
