"""Runs from when a run was called after its file alone: one of this file must not start anew under its new name."""

from __future__ import annotations

from pathlib import Path

from ..problems import Problem
from ..rule_context import RuleContext


def former_runs(context: RuleContext) -> list[Problem]:
    """A problem where `runs/<file>` is a run of the first file, and the run's own directory is not there yet."""
    named = context.given("run.dir") or context.given("run.name")
    if not context.files or named or Path(context.config.run.dir).exists():
        return []
    file = Path(context.files[0])
    former = Path("runs") / file.stem
    try:
        told = (former / "config.yml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    if str(former) == context.config.run.dir or f"{file.absolute().parent.name}/{file.name}" not in told:
        return []
    rule = f"must name the run to go on with: {former} is a run of this file, under its former name"
    fix = f"go on with it: run.dir={former}; or start another one: run.name=NAME"
    return [context.problem("run.dir", rule=rule, fix=fix)]
