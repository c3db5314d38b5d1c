"""The ledger only grows, survives a kill, and knows each step's batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from megatron.report.ledger import Ledger, batch_hashes, hash_text, read_ledger


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
