"""metrics.jsonl keeps every digit, and a resumed run finds its place in it."""

from __future__ import annotations

import json
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from megatron.report.jsonl import MetricsFile, flatten, put_aside, read_lines, sound_metrics, supersede


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
    json.loads((tmp_path / "m.jsonl").read_text())
    (found,) = read_lines(tmp_path / "m.jsonl")
    assert found == {"step": 3, "grad_norm": None, "deep": {"list": [None, 1.0]}}


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"step": 0, "loss": 1.5})
    assert list(read_lines(tmp_path / "m.jsonl")) == [{"step": 0, "loss": 1.5}]
    file.close()


def test_resume_at_four_takes_away_what_will_be_written_again(tmp_path):
    """Training line s is of update s, a validation line of the weights after its step: 4's are still true."""
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


def test_a_damaged_line_is_named_and_skipped(tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    assert list(read_lines(tmp_path / "m.jsonl")) == [{"step": 0}, {"step": 1}]
    assert "m.jsonl: line 2 is damaged and skipped" in capsys.readouterr().err


def flips(content: bytes, seed: int, count: int):
    """Copies of a file with one bit changed each."""
    draw = random.Random(seed)
    for _ in range(count):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        yield place, content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_one_flipped_bit_costs_the_lines_that_it_is_in(tmp_path):
    """All other lines stay, at their places. The damaged bytes are kept next to the file."""
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.damaged.jsonl"
    write(path, [{"step": step, "loss": 5.0 - step / 7, "batch_hash": f"{step:016x}"} for step in range(20)])
    content = path.read_bytes()
    lines, damaged = content.splitlines(keepends=True), 0
    for place, broken in flips(content, 3, 400):
        path.write_bytes(broken)
        aside.unlink(missing_ok=True)
        numbers = put_aside(path, sound_metrics)
        mended = path.read_bytes()
        damaged += bool(numbers)
        last = place == len(content) - 1  # what was the line's end is not: the line counts as cut off
        assert last or len(mended) == len(content)
        assert not numbers or b"".join(aside.read_bytes().splitlines()).replace(b"\n", b"") in broken.replace(
            b"\n", b""
        )
        own = content[:place].count(b"\n")
        for number, line in enumerate(lines):
            assert number in (own, own + 1) or line in mended
        assert put_aside(path, sound_metrics) == []
        assert all(map(sound_metrics, read_lines(path)))
    assert damaged > 100


def test_flatten_keeps_numbers_by_path():
    record = {"step": 1, "validation": {"a": {"loss": 2.0}}, "batch_hash": "00ff", "skipped": False}
    assert flatten(record) == {"step": 1, "validation/a/loss": 2.0}
