"""Recipes: every mistake at once, with its line, and ready ones that are read without mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from megatron.config.problems import ConfigError  # noqa: E402
from megatron.curation.recipe import read_recipe  # noqa: E402
from tests.paths import ROOT  # noqa: E402

BROKEN = """
output: out
sorces: []
sources:
  - {name: "../up", path: here}
  - {name: a, path: here, format: csv}
  - {name: a}
executor: slurm
workers: none
limits: {document: 0}
stages:
  - exakt: {}
  - exact: {by: words}
  - minhash: {bands: 1000, rows: 100}
  - keep: {signals: {rps_doc_word_cont: [1, 2], rps_doc_word_count: [5, 2], rps_lines_num_words: [1, 2]}}
  - blocklist: {file: nothing.txt}
  - pii
  - [pii]
  - signals: {names: [record.score, zyda_length]}
"""


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(BROKEN)
    with pytest.raises(ConfigError) as raised:
        read_recipe(file)
    found = {each.key: each for each in raised.value.problems}
    lines = {each.key: int(each.where.rsplit(":", 1)[-1]) for each in raised.value.problems}
    assert lines == {
        "sorces": 3,
        "sources.1.format": 6,
        "sources.2.path": 7,
        "workers": 9,
        "limits.document": 10,
        "stages.0": 12,
        "stages.1.exact.by": 13,
        "stages.2.minhash.bands": 14,
        "stages.3.keep.signals.rps_doc_word_cont": 15,
        "stages.3.keep.signals.rps_doc_word_count": 15,
        "stages.3.keep.signals.rps_lines_num_words": 15,
        "stages.4.blocklist.file": 16,
        "stages.6": 18,
        "stages.7.signals.names.record.score": 19,
    }
    assert found["sorces"].fix == "did you mean sources?" and found["stages.0"].fix == "did you mean exact?"
    assert "must be a whole number of at least 1" in found["limits.document"].rule
    assert "must be one of text, normalised" in found["stages.1.exact.by"].rule
    assert all(each.fix for each in raised.value.problems)


def test_rules_about_several_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(
        "output: out\nexecutor: slurm\nsources:\n"
        "- {name: '../up', path: a}\n- {name: b, path: a}\n- {name: b, path: 'https://a.example/c?Signature=hidden'}\n"
    )
    with pytest.raises(ConfigError) as raised:
        read_recipe(file)
    found = [(each.key, each.where.rsplit(":", 1)[-1]) for each in raised.value.problems]
    secret = ("sources.2.path", "6")
    assert found == [("sources.0.name", "4"), ("sources.2.name", "6"), secret, ("slurm", "2")]
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "output: [", "output: 1\nsources: 2\nstages: 3\n", "stages: {exact: {}}\n"])
def test_no_recipe_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(ConfigError):
        read_recipe(tmp_path / "a.yml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "curation").glob("*.yml")), ids=lambda path: path.stem)
def test_ready_recipes_have_no_mistakes(path: Path) -> None:
    assert read_recipe(path, {"output": "out"}).stages
