"""Names of measurements: one file each, whatever folder it is in, and the same for both commands."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

from bench.runner import ROOT, measurements, parser_of
from megatron.command.verbs import group


def test_no_two_files_have_one_name():
    names = Counter(path.stem for path in (ROOT / "bench").glob("*/*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_both_commands_know_the_same_names():
    assert {verb.words[1] for verb in group("bench")} == set(measurements())
    assert {Path(verb.script or "").name for verb in group("bench")} == {"__main__.py"}


def test_names_stay_where_files_move():
    """Names that documentation and results have used, with and without a peer."""
    assert {
        "train-step",
        "communication",
        "plan-table",
        "tokenize",
        "watchers",
        "slow-links",
        "gpu-rows",
        "pipelines",
        "page",
    } <= set(measurements())
    module = importlib.import_module(measurements()["growth"][0])
    assert parser_of(module, "bench growth").prog == "bench growth"
