"""The ledger only grows, survives a kill, and knows each step's batch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from megatron.config.problems import UserError
from megatron.report.ledger import Ledger, batch_hashes, hash_text, left_out, read_ledger


def test_events_and_batches_are_in_order(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write("start", step=0, seed=7)
    for step in range(230):
        ledger.batch(step, 1000 + step)
    ledger.write("checkpoint", step=230, path="x")
    ledger.close()
    entries = read_ledger(path)
    assert [entry["event"] for entry in entries] == ["start", "batches", "batches", "batches", "checkpoint"]
    assert [entry["first_step"] for entry in entries if entry["event"] == "batches"] == [0, 100, 200]
    assert entries[0]["seed"] == 7 and all("time" in entry for entry in entries)
    assert batch_hashes(path) == {step: hash_text(1000 + step) for step in range(230)}


def test_a_repeated_step_counts_as_it_was_last(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for first, value in ((0, 1), (3, 2)):
        ledger = Ledger(path)
        ledger.write("start" if first == 0 else "resume", step=first)
        for step in range(first, first + 5):
            ledger.batch(step, value)
        ledger.close()
    assert batch_hashes(path) == {**{s: hash_text(1) for s in range(3)}, **{s: hash_text(2) for s in range(3, 8)}}
    before = path.read_bytes()
    Ledger(path).close()
    assert path.read_bytes() == before


def test_hash_text_is_64_bits():
    assert hash_text(255) == "00000000000000ff" and hash_text(2**64 + 1) == hash_text(1) and len(hash_text(-1)) == 16


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    code = (
        "import os, sys; from megatron.report.ledger import Ledger; l = Ledger(sys.argv[1]); "
        "l.write('start', step=0); l._file.write(b'{\"event\": \"half'); os._exit(9)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert subprocess.run([sys.executable, "-c", code, str(path)], cwd=root).returncode == 9
    assert path.read_text().endswith("half")
    ledger = Ledger(path)
    ledger.write("resume", step=0)
    ledger.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "resume"]


def written(path) -> list[dict]:
    """A ledger with entries of all kinds that its readers rely on."""
    spent = {"since": 1.0, "attempt": 0, "completed": 4} | dict.fromkeys(
        ("start", "steps", "evaluation", "save", "end"), 1.5
    )
    ledger = Ledger(path)
    ledger.write("start", step=0, ranks=2, spent=spent)
    for step in range(12):
        ledger.batch(step, 1000 + step)
    ledger.write("checkpoint", step=12, stall_seconds=0.25, spent={**spent, "completed": 12})
    ledger.write("uploaded", step=12, url="s3://a/b", manifest="00ff")
    ledger.write("rollback", step=15, to=12, left_out=[[13, 2]])
    ledger.write("restart", attempt=1, status=1, since=1.0, failed=2.0, ended=3.0)
    ledger.close()
    return read_ledger(path)


def test_every_flipped_bit_is_noticed(tmp_path, capsys):
    """A changed digit is as bad as a line that is no JSON: it would omit other batches. Line breaks aside, which join
    or cut lines, a flip costs one entry, and never makes another one of it."""
    path = tmp_path / "ledger.jsonl"
    entries = written(path)
    content, draw = path.read_bytes(), random.Random(7)
    for _ in range(600):
        place, bit = draw.randrange(len(content) - 1), draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        found = read_ledger(path)
        bare = [{key: value for key, value in entry.items() if key[:1].isalpha()} for entry in found]
        lost = [entry for entry in entries if entry not in bare]
        assert len(lost) <= (2 if content[place] == 10 else 1)
        if len(found) == len(entries):  # it was in the name or the form of the checksum
            assert b'"crc": ' in content[place - 24 : place + 24]
        Ledger(path).close()
        assert [each for each in read_ledger(path) if each["event"] != "damaged"] == found
        assert left_out(path) in ([[13, 2]], [])
        for each in ("ledger.jsonl", "ledger.damaged.jsonl"):
            (tmp_path / each).unlink(missing_ok=True)
    assert "ledger.damaged.jsonl" in capsys.readouterr().err


def test_damaged_lines_leave_their_places_to_blanks(tmp_path):
    """Checkpoints know how long the ledger was: nothing after a damaged line moves."""
    path = tmp_path / "ledger.jsonl"
    entries = written(path)
    content = path.read_bytes()
    begin = content.index(b'"event": "checkpoint"')
    path.write_bytes(content.replace(b'"event": "checkpoint"', b'"event": #checkpoint"'))
    ledger = Ledger(path)
    ledger.close()
    now = path.read_bytes()
    assert now.index(b'{"event": "uploaded"') == content.index(b'{"event": "uploaded"')
    assert now[begin : begin + 100] == b" " * 100
    assert b"#checkpoint" in (tmp_path / "ledger.damaged.jsonl").read_bytes()
    assert [entry["event"] for entry in read_ledger(path)] == [
        "start",
        "batches",
        "uploaded",
        "rollback",
        "restart",
        "damaged",
    ]
    assert read_ledger(path)[-1]["lines"] == [3] and len(entries) == 6


def test_entries_of_older_versions_have_no_checksum_and_are_read(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "start", "step": 0}\n{"event": "start", "step": "0"}\n{"step": 3}\n{"event": "end"}\n')
    assert read_ledger(path) == [{"event": "start", "step": 0}, {"event": "end"}]


def test_batches_left_out_since_a_place(tmp_path):
    """An entry from before a checkpoint may be damaged. The checkpoint knows it as well."""
    path = tmp_path / "ledger.jsonl"
    written(path)
    assert left_out(path) == [[13, 2]]
    assert left_out(path, path.stat().st_size) is None


def test_a_folder_that_is_moved_away_is_a_sentence(tmp_path):
    """A run whose folder has gone cannot say what its checkpoints have seen: it ends with the way back."""
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    ledger.write("start", step=0)
    assert ledger.position() > 0
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"was moved or deleted.*run\.dir"):
        ledger.position()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert ledger.position() == (tmp_path / "run" / "ledger.jsonl").stat().st_size
