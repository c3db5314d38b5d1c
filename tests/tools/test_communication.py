"""tools/communication.py: what a run sent next to what was predicted, and a prediction without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.parallel.messages.curve import CostCurve
from megatron.parallel.messages.traffic import Duration, Durations, MessageKind, Tally
from megatron.report.communication import read_accounts
from megatron.report.message_times import Slowest, slowest
from megatron.report.message_trace import read_events, trace
from tests.training.test_run import job
from tests.workers import run
from tools.communication import main, show

CONFIG = """
model: {layers: (attention/mlp) x2, hidden_size: 32, vocab_size: 258, attention: {heads: 4}}
training: {steps: 2, sequence_length: 16, global_batch_size: 4, micro_batch_size: 2}
optimizer: {lr: 0.01}
schedule: {warmup_steps: 1}
tokenizer: {type: bytes}
data: {synthetic: copy}
checkpoint: {at_end: false}
evaluation: {at_end: false}
parallel: {tensor: 2}
logging: {console: quiet, curve: false, communication: times}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tiny.yml").write_text(CONFIG)
    run(2, job, str(folder), 2)
    return folder


def test_a_run_sends_what_was_predicted(folder, capsys):
    picture = folder / "picture.png"
    assert main([str(folder / "run"), "--json", "--output", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True and found["step"] == 1 and found["ranks"] == [0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    # 2 micro-batches, 2 ranks, 4 layers and the embedding: sums of 2 x 16 x 32 floats
    forward = [call for call in found["calls"] if call["phase"] == "forward"]
    assert sum(call["bytes"] for call in forward) == 2 * 2 * (5 * 2 * 16 * 32 * 4 + 3 * 32 * 4)
    for call in found["calls"]:
        assert (call["messages"], call["bytes"]) == (call["predicted_messages"], call["predicted_bytes"])


def test_a_configuration_is_predicted_without_a_run(folder, capsys):
    assert main([str(folder / "run"), "--json", "--layers"]) == 0
    counted = json.loads(capsys.readouterr().out)["calls"]
    assert main([str(folder / "tiny.yml"), "--ranks", "2", "--json", "--layers"]) == 0
    predicted = json.loads(capsys.readouterr().out)["calls"]
    names = ("phase", "layer", "group", "operation", "dtype")
    assert [[call[name] for name in (*names, "bytes")] for call in counted] == [
        [call[name] for name in (*names, "predicted_bytes")] for call in predicted
    ]


def test_a_step_that_differs_is_told(folder, capsys):
    file = folder / "run" / "communication" / "rank_0.jsonl"
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[0]["predicted"][0][-1] += 8
    for line in lines:
        del line["crc"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        assert main([str(folder / "run")]) == 0
    finally:
        file.write_text(text)
    printed = capsys.readouterr().out
    assert "differs by -8 bytes" in printed and "counted and predicted differ" in printed


def test_looks_within_slow_steps_are_no_difference():
    """How many there are depends on the time."""
    row = ["exchange", "", "world", 4, "all_reduce", "fp64", 1, 112]
    look = ["look", "", "world", 4, "all_reduce", "fp64", 3, 192]
    predicted = Tally.of_rows([row])
    assert "are equal" in show({}, Tally.of_rows([row, look]), predicted, ("phase", "group"))
    assert "differ" in show({}, Tally.of_rows([look]), predicted, ("phase", "group"))


def test_times_of_a_step(folder, capsys):
    assert main([str(folder / "run"), "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert times["step"] == 1 and times["ranks"] == 2
    for call in times["calls"]:
        assert call["messages"] == call["split"] > 0 and call["waiting"] <= call["seconds"]
    assert main([str(folder / "run"), "--rank", "1"]) == 0
    printed = capsys.readouterr().out
    assert "times of step 1, one rank:" in printed and "slowest rank" not in printed


def test_times_beside_the_machines_curves(folder, capsys):
    """A curve of one time for all sizes: each row has its messages times that."""
    points = ((1024, 0.25, 0.5, 1.0), (2**30, 0.25, 0.5, 1.0))
    file = folder / "machine.yml"
    file.write_text(json.dumps({"collectives": [CostCurve("all_reduce", "tensor", 2, 1, 1, points).document()]}))
    assert main([str(folder / "run"), "--json", "--machine", str(file)]) == 0
    calls = json.loads(capsys.readouterr().out)["times"]["calls"]
    sums = [call for call in calls if call["operation"] == "all_reduce"]
    assert sums and all(call["curve_seconds"] == pytest.approx(0.5 * call["messages"]) for call in sums)
    assert all(call["curve_seconds"] is None for call in calls if call["operation"] != "all_reduce")
    assert main([str(folder / "run"), "--machine", str(file)]) == 0
    assert "by curve" in capsys.readouterr().out


def test_what_was_slowest_is_named():
    """Two pairs. 2-3 is ten times as slow. Rank 3 is the one that they wait for."""

    def summed(members: str, seconds: float, waiting: float, last: int) -> Durations:
        kind = MessageKind("backward", "data", members, "all_reduce", "fp32")
        return Durations([(kind, Duration(4, 4 * 2**20, seconds, seconds, waiting, 4, last))])

    found = slowest({
        0: summed("0 1", 0.01, 0.0, 2), 1: summed("0 1", 0.01, 0.0, 2),
        2: summed("2 3", 0.3, 0.2, 0), 3: summed("2 3", 0.1, 0.0, 4),
    })  # fmt: skip
    assert found == Slowest("2 3", pytest.approx(2 * 4 * 2**20 / 0.2), 3, 4, 4)
    small = Durations([
        (MessageKind("update", "data", "0 1", "all_reduce", "fp32"), Duration(9, 36, 1.0, 1.0, 0.0, 9, 9))
    ])
    assert slowest({0: small}).link == "", "four bytes say nothing of bandwidth"


def timed_run(place: Path, exposed: float, timed: int) -> str:
    """A folder with accounts of two ranks whose steps, but for the first, sum gradients in 0.4 seconds."""
    (place / "communication").mkdir(parents=True)
    row = ["backward", "data", "0 1", "all_reduce", "fp32", 2, 8]
    calls = [["backward", "", "data", 2, "all_reduce", "fp32", 2, 8]]
    for rank in range(2):
        lines = [{"rank": rank, "predicted": calls, "layout": {"data": 2}}, {"step": 0, "calls": calls}]
        lines += [{"step": 0, "times": [[*row, 9.0, 9.0, 0.0, 2, 0]]}]  # omitted
        slow = {1: 100.0} if timed > 3 else {}  # one step that the machine held up
        lines += [{"step": at, "times": [[*row, slow.get(at, 0.4), exposed, 0.0, 2, 0]]} for at in range(1, timed)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / "communication" / f"rank_{rank}.jsonl").write_text(text)
    return str(place)


def test_two_runs_side_by_side(tmp_path, capsys):
    before, after = timed_run(tmp_path / "slow", 0.4, 4), timed_run(tmp_path / "fast", 0.1, 3)
    assert main([after, "--before", before, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for when, exposed, steps in (("before", 0.4, [1, 2, 3]), ("after", 0.1, [1, 2])):
        (call,) = found[when]["calls"]
        assert (call["messages"], call["seconds"], call["exposed"]) == (2.0, pytest.approx(0.4), pytest.approx(exposed))
        assert call["hidden"] == pytest.approx(1 - exposed / 0.4) and found[when]["steps"] == steps
    assert main([after, "--before", before]) == 0
    printed = capsys.readouterr().out
    assert "median of 3 steps of 2 ranks and 2 steps of 2 ranks" in printed and "75%" in printed
    for other, told in (
        (tmp_path / "none", "communication=counts"),
        (timed_run(tmp_path / "one", 0.4, 1), "two steps"),
    ):
        assert main([after, "--before", str(other)]) == 2
        assert told in capsys.readouterr().err


def test_what_is_predicted_at_most():
    """The same number of messages of no more bytes. Of other calls exactly as much."""
    most, exact = (["forward", "", group, 2, "all_gather", "fp32", 2, 80] for group in ("tensor", "data"))
    facts, predicted = {"most": [[*most[:6], 0, 0]]}, Tally.of_rows([most, exact])
    for counted, equal in (
        ([[*most[:6], 2, 60], exact], True), ([most, exact], True), ([exact], False),
        ([[*most[:6], 1, 60], exact], False), ([[*most[:6], 2, 88], exact], False),
        ([[*most[:6], 3, 60], exact], False),
        ([most], False), ([most, [*exact[:7], 88]], False),
    ):  # fmt: skip
        text = show(facts, Tally.of_rows(counted), predicted, ("phase", "group"))
        assert ("are equal" in text) is equal and "the most that there can be" in text


def check_trace(trace: dict) -> None:
    """By the Trace Event Format: complete events with their keys, slices of a thread inside each other or apart, and
    names of all threads. Flows have one start and one later end inside slices."""
    events = trace["traceEvents"]
    threads, flows, named = {}, {}, set()
    for event in events:
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] in "sf"
            flows.setdefault(event["id"], []).append(event)
    assert set(threads) == named
    for spans in threads.values():
        open_: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6
            open_.append(end)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"] + 1e3 and end["bp"] == "e"
        for each in (begin, end):
            assert any(a - 1e-6 <= each["ts"] <= b + 1e-6 for a, b in threads[each["pid"], each["tid"]])


def test_a_trace_of_all_ranks(folder, capsys):
    file = folder / "trace.json"
    assert main([str(folder / "run"), "--trace", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_steps"] == [0, 1]
    trace = json.loads(file.read_text())
    check_trace(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"]["step"] == 1]
    accounts = read_accounts(folder / "run")
    for rank, account in accounts.items():
        sent = [event for event in slices if event["pid"] == rank and event["cat"] == "communication"]
        assert len(sent) == sum(messages for _, messages, _ in account.at(1))
        assert sum(event["args"]["bytes"] for event in sent) == sum(size for *_, size in account.at(1))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"phases", "tensor (0 1)"} <= names
    assert main([str(folder / "run"), "--trace", str(file), "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_steps"] == [1]


def test_arrows_and_messages_at_the_same_time():
    """Rank 0 sends two messages. Two sums of rank 1 are under way together, so they are on two threads."""
    pair, both = ["forward", "", "pipeline", "0 1"], ["backward", "", "data", "1 3", "all_reduce", "fp32", 8]
    ranks = {
        0: [[*pair, "send", "fp32", 4, at, at + 5, at, [[at, at + 5]]] for at in (1000, 2000)],
        1: [[*pair, "recv", "fp32", 4, at, at + 950, at + 900, [[at, at + 950]]] for at in (100, 1100)]
        + [[*both, 3000, 5000, None, []], [*both, 4000, 6000, None, []], [*both, 5500, None, None, []]],
    }
    records = {
        rank: {"rank": rank, "step": 7, "clock_error": 1500, "spans": [["forward", 0, 7000]], "messages": rows}
        for rank, rows in ranks.items()
    }
    found = trace({7: records})
    check_trace(found)
    events = found["traceEvents"]
    arrows = [(event["ph"], event["pid"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 0, 1.0), ("f", 1, 1.05), ("s", 0, 2.0), ("f", 1, 2.05)]
    waiting = [(event["pid"], event["ts"], event["dur"]) for event in events if event.get("cat") == "waiting"]
    assert waiting == [(1, 0.1, 0.9), (1, 1.1, 0.9)]
    assert len({event["tid"] for event in events if event["name"] == "all_reduce"}) == 2
    assert found["otherData"]["largest_error_us"] == 1.5


@pytest.mark.parametrize("line", ["{}", '{"rank": 0, "step": 1, "spans": [["a", 1]], "messages": []}',
                                  '{"rank": 0, "step": 1, "spans": [], "messages": [["forward", 3]]}'])  # fmt: skip
def test_damaged_messages_are_skipped(tmp_path, capsys, line):
    with pytest.raises(ValueError, match="logging.communication=times"):
        read_events(tmp_path)
    (tmp_path / "communication").mkdir()
    whole = '{"rank": 0, "step": 2, "spans": [], "messages": []}'
    (tmp_path / "communication" / "events_0.jsonl").write_text(f"{line}\n{whole}\n")
    assert read_events(tmp_path) == {2: {0: json.loads(whole)}}
    assert "events_0.jsonl: line 1 is damaged and skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{run}", "--rank", "7"], "not of 7"),
        (["{run}", "--step", "9"], "no account of step 9"),
        (["{folder}"], "logging.communication=counts"),
        (["{run}", "--machine", "{folder}/tiny.yml"], "list of `collectives`"),
        (["{run}", "--trace", "{folder}/t.json", "--step", "9"], "step 9"),
        (["{run}", "--trace", "{run}/communication/events_0.jsonl"], "events_0.jsonl"),
        (["{folder}/tiny.yml", "--ranks", "2", "--rank", "2"], "from 0 to 1"),
        (
            ["{folder}/tiny.yml", "--ranks", "2", "zero.stage=3", "zero.bucket_size=5", "parallel.tensor=1"],
            "no formula for ZeRO 3",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(folder, capsys, words, told):
    words = [word.format(run=folder / "run", folder=folder) for word in words]
    assert main(words) == 2
    assert told in capsys.readouterr().err
