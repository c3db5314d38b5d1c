"""metrics.jsonl keeps every digit, and a resumed run finds its place in it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.report.jsonl import MetricsFile, flatten, read_lines, supersede


def write(path, records):
    file = MetricsFile(path)
    for record in records:
        file.write(record)
    file.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_digit_is_kept(tmp_path_factory, number):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write(path, [{"step": 0, "loss": number}])
    assert json.loads(path.read_text())["loss"] == number


def test_infinities_become_null_and_stay_json(tmp_path):
    write(tmp_path / "m.jsonl", [{"step": 3, "grad_norm": math.inf, "deep": {"list": [math.nan, 1.0]}}])
    found = json.loads((tmp_path / "m.jsonl").read_text())
    assert found == {"step": 3, "grad_norm": None, "deep": {"list": [None, 1.0]}}


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"step": 0, "loss": 1.5})
    assert list(read_lines(tmp_path / "m.jsonl")) == [{"step": 0, "loss": 1.5}]
    file.close()


def test_resume_at_four_takes_away_what_will_be_written_again(tmp_path):
    """Training line s tells of update s, a validation line of the weights after its step: 4's are still true."""
    path = tmp_path / "metrics.jsonl"
    training = [{"step": step, "loss": 5.0 - step} for step in range(7)]
    validation = [{"step": step, "validation": {"a": {"loss": 1.0}}} for step in (2, 4, 6)]
    kept = [*training[:2], validation[0], *training[2:4], validation[1]]
    write(path, [*kept, *training[4:6], validation[2], training[6]])
    with open(path, "a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    assert supersede(path, 4) == 4
    assert list(read_lines(path)) == kept
    assert list(read_lines(tmp_path / "metrics.superseded.jsonl")) == [*training[4:6], validation[2], training[6]]
    write(path, [training[4]])
    assert list(read_lines(path))[-1] == training[4]
    assert supersede(path, 5) == 0 and supersede(tmp_path / "none.jsonl", 3) == 0


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2"):
        list(read_lines(tmp_path / "m.jsonl"))


def test_flatten_keeps_numbers_by_path():
    record = {"step": 1, "validation": {"a": {"loss": 2.0}}, "batch_hash": "00ff", "skipped": False}
    assert flatten(record) == {"step": 1, "validation/a/loss": 2.0}
