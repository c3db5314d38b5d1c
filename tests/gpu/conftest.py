"""Tests that have passed in an earlier call of bench/gpu.sh are not run again.

$PASSED_BEFORE is a file of their names. Names of further tests that pass are added to the file $PASSED at once, so that
a call that is ended loses none.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if before := os.environ.get("PASSED_BEFORE"):
        passed = set(Path(before).read_text().splitlines())
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid in passed])
        items[:] = [each for each in items if each.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    ended = report.when == "call" and report.passed
    if ended and (file := os.environ.get("PASSED")) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(file, "a") as names:
            names.write(f"{report.nodeid}\n")
