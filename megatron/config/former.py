"""Runs from when a run was called after its file alone: one of this file must not start anew under its new name."""

from __future__ import annotations

from pathlib import Path

from .facts import Facts
from .problems import Problem


def former_runs(facts: Facts) -> list[Problem]:
    """A problem where `runs/<file>` is a run of the first file, and the run's own directory is not there yet."""
    if not facts.files or facts.given("run.dir") or facts.given("run.name") or Path(facts.config.run.dir).exists():
        return []
    file = Path(facts.files[0])
    former = Path("runs") / file.stem
    try:
        told = (former / "config.yml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    if str(former) == facts.config.run.dir or f"{file.absolute().parent.name}/{file.name}" not in told:
        return []
    rule = f"must name the run to go on with: {former} is a run of this file, under its former name"
    fix = f"go on with it: run.dir={former}; or start another one: run.name=NAME"
    return [facts.problem("run.dir", rule=rule, fix=fix)]
