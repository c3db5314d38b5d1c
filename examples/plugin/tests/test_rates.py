"""The schedule against its formula, the sink against metrics.jsonl, and both in runs that are resumed and go back."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from my_lab.multi_step import multi_step
from my_lab.table import Table

from megatron.config import resolve
from megatron.config.problems import UserError
from megatron.testing import train_on_ranks
from megatron.training.schedule import Schedule

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
RUN = {
    **VALUES,
    "training": {**VALUES["training"], "steps": 10},
    "schedule": {"type": "multi_step", "warmup_steps": 2, "options": {"milestones": [0.5, 0.8]}},
    "checkpoint": {"every": 4},
    "logging": {
        "console": "quiet",
        "curve": False,
        "sinks": [{"type": "table", "options": {"columns": ["loss", "lr"]}}],
    },
}


def test_rates_of_the_paper():
    """Of 1000 steps: warmed up over 20, whole until 800, 31.6 % until 900, then a tenth, which stays."""
    values = {**VALUES, "training": {**VALUES["training"], "steps": 1000}}
    schedule = Schedule(resolve({**values, "schedule": {"type": "multi_step", "warmup_steps": 20}}, ranks=1))
    rates = {0: 0.0, 10: 0.5, 20: 1.0, 799: 1.0, 800: 0.316, 899: 0.316, 900: 0.1, 1000: 0.1, 5000: 0.1}
    assert {step: schedule.multiplier(step) for step in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"steps": [0.5]}, "must not have steps: use milestones, rates"),
        ({"rates": [0.5]}, "must have one rate per milestone, 2 in all"),
        ({"milestones": [0.9, 0.8]}, "must rise"),
        ({"milestones": [80, 90]}, "must be a list of numbers from 0 to 1"),
        ({"rates": "half"}, "must be a list of numbers from 0 to 1"),
    ],
)
def test_options_of_the_schedule(options, rule):
    """They are checked before the first step, though the warmup does not ask for them."""
    with pytest.raises(UserError, match=rule):
        multi_step(5, 1.0, SimpleNamespace(length=10), SimpleNamespace(options=options))
    with pytest.raises(UserError, match=rule):
        Schedule(resolve({**RUN, "schedule": {**RUN["schedule"], "options": options}}, ranks=1))


def test_in_runs(tmp_path):
    """Four steps on one rank, the rest on two, and the last six once more: the table has each step once."""
    values = {**RUN, "run": {"dir": str(tmp_path)}}

    def train(ranks, *overrides):
        train_on_ranks(ranks, values, overrides)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        with (tmp_path / "table.csv").open(newline="") as file:
            return [each for each in lines if "loss" in each], list(csv.DictReader(file))

    _, rows = train(1, "training.stop_at_step=4")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    records, rows = train(2, "parallel.tensor=2")
    peak = values["optimizer"]["lr"]
    rates = [peak * share for share in (0.0, 0.5, 1.0, 1.0, 1.0, 0.316, 0.316, 0.316, 0.1, 0.1)]
    assert [each["lr"] for each in records] == pytest.approx(rates, rel=1e-12)
    written = [(str(each["step"]), float(each["loss"]), float(each["lr"])) for each in records]
    assert [(row["step"], float(row["loss"]), float(row["lr"])) for row in rows] == written and len(rows) == 10
    first = tmp_path / "checkpoints" / "step_00000004"
    _, again = train(1, f"checkpoint.resume={first}")
    assert [row["step"] for row in again] == [row["step"] for row in rows]
    assert [row["lr"] for row in again] == [row["lr"] for row in rows]


def test_a_table_goes_on(tmp_path):
    """Records without a column are skipped. A table of other columns is refused, and stays as it is."""
    table = Table(tmp_path, ["loss"])
    table.write({"step": 0, "loss": 2.5})
    table.write({"step": 1, "validation": {"validation": {"loss": 3.0}}})
    table.write({"step": 1, "loss": float("nan")})
    table.close()
    Table(tmp_path, ["loss"]).write({"step": 2, "loss": 1.5})
    text = (tmp_path / "table.csv").read_text()
    assert text.splitlines() == ["step,loss", "0,2.5", "1,nan", "2,1.5"]
    with pytest.raises(UserError, match="has other columns"):
        Table(tmp_path, ["lr"])
    assert (tmp_path / "table.csv").read_text() == text
    inner = Table(tmp_path, ["validation/validation/loss"], file="validation.csv")
    inner.write({"step": 1, "validation": {"validation": {"loss": 3.0}}})
    assert (tmp_path / "validation.csv").read_text().splitlines()[1:] == ["1,3.0"]


@pytest.mark.parametrize("options", [{"columns": "loss"}, {"columns": []}, {"columns": ["loss"], "file": "../a.csv"}])
def test_options_of_the_sink(options, tmp_path):
    with pytest.raises(UserError, match="must be"):
        Table(tmp_path, **options)
