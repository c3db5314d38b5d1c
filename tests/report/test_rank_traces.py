"""A trace for each rank, and whether Holistic Trace Analysis reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.report.message_trace import rank_traces, write_trace

US = 1000  # nanoseconds


def record(rank: int, step: int) -> dict[str, Any]:
    """A step of 100 us with a sum that takes 40, for which rank 0 waits 10, and a message from rank 0 to rank 1."""
    begin = 1000 * US * (step + 1)
    spans = [["forward", begin, begin + 50 * US], ["backward", begin + 50 * US, begin + 100 * US]]
    start, end, latest = begin + (50 + 10 * rank) * US, begin + 90 * US, begin + 60 * US
    total = ["backward", "", "data", "0 1", "all_reduce", "fp32", 4096, start, end, latest, [[start, end]]]
    pair = ["send", "recv"][rank]
    sent = ["forward", "layers.0", "pipeline", "0 1", pair, "bf16", 64, begin, begin + 5 * US, None, []]
    return {"rank": rank, "step": step, "spans": spans, "messages": [sent, total], "clock_error": 500}


STEPS = {step: {rank: record(rank, step) for rank in range(2)} for step in range(2)}


def test_each_rank_has_its_own_events():
    found = rank_traces(STEPS)
    assert set(found) == {0, 1}
    for rank, trace in found.items():
        assert trace["distributedInfo"] == {"rank": rank, "world_size": 2} and trace["schemaVersion"] == 1
        assert {event["pid"] for event in trace["traceEvents"]} == {rank}
        assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
        sums = [event for event in trace["traceEvents"] if event["name"] == "all_reduce"]
        assert [event["dur"] for event in sums] == [40.0 - 10.0 * rank] * 2


def test_holistic_trace_analysis_reads_them(tmp_path: Path):
    """By its own parser: every slice with its times, on one clock."""
    traces = pytest.importorskip("hta.common.trace", reason="HolisticTraceAnalysis is not installed")
    write_trace(tmp_path, STEPS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank_0.json", "rank_1.json"]
    read = traces.Trace(trace_dir=str(tmp_path))
    read.parse_traces(use_multiprocessing=False)
    read.decode_symbol_ids()
    assert set(read.traces) == {0, 1}
    for rank in range(2):
        frame = read.get_trace(rank)
        sums = frame[frame["s_name"] == "all_reduce"]
        assert list(sums["dur"]) == [40 - 10 * rank] * 2 and set(sums["s_cat"]) == {"communication"}
        slices = [each for each in json.loads((tmp_path / f"rank_{rank}.json").read_text())["traceEvents"]
                  if each["ph"] == "X"]  # fmt: skip
        assert len(frame) == len(slices)
        waits = frame[frame["s_name"] == "waiting"]
        assert list(waits["dur"]) == ([10, 10] if rank == 0 else [])
