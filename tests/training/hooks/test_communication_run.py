"""A run with an account and times: in its metrics, in a file per rank, and complete by an independent count.

The collectives of these runs are also noted in the ranks' beacons, as in every run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.arithmetic.algorithm_table import RING
from megatron.data.contract import Copy
from megatron.data.sample import Sample
from megatron.parallel.messages.traffic import Durations, Tally
from megatron.report.communication import AccountFile, RankAccount, by_group, read_accounts, regular_calls
from megatron.report.message_trace import read_events
from megatron.report.tensorboard import tagged
from megatron.training.exchange import REQUESTS
from megatron.training.trainer import Trainer
from tests.engine.test_routed_traffic import table
from tests.training.test_run import job
from tests.workers import run

CONFIG = """
model: {layers: (attention/mlp) x2, hidden_size: 32, vocab_size: 258, attention: {heads: 4}, embedding: {tied: true}}
training: {steps: 4, sequence_length: 16, global_batch_size: 4, micro_batch_size: 2}
optimizer: {lr: 0.01}
schedule: {warmup_steps: 2}
tokenizer: {type: bytes}
data: {synthetic: copy}
evaluation: {every: 2}
checkpoint: {every: 100}
logging: {console: plain, curve: false, communication: times}
spikes: {action: report, window: 4}
"""


train = Trainer.run


class Dispatched(TorchDispatchMode):
    """Messages by torch's dispatcher: another place than the account's, too slow for every run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.seen[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def watched(folder: str, ranks: int, *overrides: str) -> tuple[list[dict], dict[str, int]]:
    mode = Dispatched()

    def run_watched(trainer):
        with mode:
            return train(trainer)

    with mock.patch.object(Trainer, "run", autospec=True, side_effect=run_watched):
        lines = job(folder, ranks, *overrides)
    return lines, dict(mode.seen)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict], list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp("communication")
    (folder / "tiny.yml").write_text(CONFIG)
    results = run(2, watched, str(folder), 2, "parallel.pipeline=2", "training.micro_batch_size=1")
    return folder / "run", results[0][0], [seen for _, seen in results]


def counts(entry: dict) -> tuple[int, int]:
    return entry["messages"], entry["bytes"]


def test_metrics_have_each_group(found):
    folder, lines, _ = found
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 4
    for line in steps:
        pipeline = line["communication"]["pipeline"]
        # 4 micro-batches of 16 x 32 floats. The first step sends the shape, in 256 integers
        first = line["step"] == 0
        assert counts(pipeline["send"]) == (4 + first, 4 * 16 * 32 * 4 + 1024 * first)
        assert counts(pipeline["recv"]) == (4, 4 * 16 * 32 * 4)
        for each in pipeline.values():
            assert 0 <= each["exposed_seconds"] <= each["seconds"] and 0 <= each["waiting_seconds"] <= each["seconds"]
    assert (
        tagged(steps[1])["communication/pipeline/recv/seconds"]
        == steps[1]["communication"]["pipeline"]["recv"]["seconds"]
    )
    assert tagged(steps[1])["communication/pipeline/send/bytes"] == 4 * 16 * 32 * 4


def test_every_message_is_in_an_account(found):
    """Against torch's dispatcher, which sees all between the run's start and its end."""
    folder, _, seen = found
    accounts = read_accounts(folder)
    assert list(accounts) == [0, 1] and all(account.end == 4 for account in accounts.values())
    names = {
        "send": {"c10d::send"},
        "recv": {"c10d::recv_"},
        "broadcast": {"c10d::broadcast_"},
        "all_reduce": {"c10d::allreduce_"},
        "all_gather": {"c10d::allgather_", "c10d::_allgather_base_"},
        "barrier": {"c10d::barrier"},
    }
    assert {name for calls in seen for name in calls} <= set().union(*names.values())
    for account, calls in zip(accounts.values(), seen):
        total = account.outside
        for step in range(4):
            total += account.at(step)
        for operation, own in names.items():
            counted = total.by("operation").get((operation,), (0, 0))[0]
            assert counted == sum(calls.get(name, 0) for name in own), operation
    evaluation = accounts[0].outside.by("phase", "operation")
    assert evaluation["evaluate", "send"][0] > 0  # what happens between steps is not in a step


def test_a_step_is_judged_by_the_message_in_which_its_numbers_are_exchanged(found):
    """It comes before the update and has the gradient norm too. There is no other one."""
    for account in read_accounts(found[0]).values():
        numbers = account.at(2).by("phase", "operation", "dtype")["exchange", "all_reduce", "fp64"]
        assert numbers == Tally.of_rows(account.facts["predicted"]).by("phase", "operation", "dtype")[
            "exchange", "all_reduce", "fp64"
        ] and numbers == (1, 8 * (2 + 4 + len(REQUESTS) + 2)), "losses, batch hash, requests; seconds and norm"


def test_every_message_of_a_step_is_timed_and_split(found):
    """Each rank's sums, and of each collective some rank came last, of each message one of the two."""
    folder, _, _ = found
    accounts = read_accounts(folder)
    for step in range(4):
        for account in accounts.values():
            timed = account.times[step].by("phase", "group", "operation", "dtype")
            assert {key: each[:2] for key, each in timed.items()} == account.at(step).by(
                "phase", "group", "operation", "dtype"
            )
            assert all(each.split == each.messages for each in timed.values())
            assert all(each.transfer >= 0 and each.exposed <= each.seconds for each in timed.values())
        whole = sum((account.times[step] for account in accounts.values()), Durations())
        for (_, operation), each in whole.by("members", "operation").items():
            if operation not in ("send", "recv"):
                assert each.last >= each.messages / 2, operation


def test_single_messages_are_kept_of_the_last_steps(found):
    folder, _, _ = found
    steps = read_events(folder)
    assert list(steps) == [0, 1, 2, 3] and all(list(ranks) == [0, 1] for ranks in steps.values())
    for step, ranks in steps.items():
        for rank, record in ranks.items():
            messages = read_accounts(folder)[rank].at(step).by("operation")
            assert Counter(row[4] for row in record["messages"]) == {op: n for (op,), (n, _) in messages.items()}
            assert {"forward", "backward", "update"} <= {name for name, *_ in record["spans"]}


def test_steps_that_repeat_are_written_once(found):
    folder, lines, _ = found
    text = [json.loads(line) for line in (folder / "communication" / "rank_0.jsonl").read_text().splitlines()]
    assert text[0]["layout"]["pipeline"] == 2 and text[0]["at"] == {"tensor": 0, "data": 0, "pipeline": 0}
    assert [line["step"] for line in text if "calls" in line] == [0, 1]  # the first sends shapes too
    account = read_accounts(folder)[0]
    assert account.at(1) == account.at(3) != account.at(0)
    line = next(line for line in lines if line.get("step") == 2 and "loss" in line)
    assert by_group(account.at(2), account.times[2]) == line["communication"]
    with pytest.raises(ValueError, match="step 4"):
        account.at(4)


def test_predictions_of_steps_that_vary_by_a_table(tmp_path):
    """How often a recurrent core runs is drawn in each step, and its sums go by a table, between hosts of one rank."""
    (tmp_path / "tiny.yml").write_text(CONFIG)
    file = table(tmp_path / "machine.yml", 2, 2, RING)
    layers = "model.layers=(attention/mlp) recurrent(attention/mlp)"
    words = [
        "parallel.tensor=2",
        f"parallel.communication={{table: {file}, island: 1}}",
        "logging.communication=counts",
        "evaluation={every: null, at_end: false}",  # with 32 passes of the core each
    ]
    run(2, job, str(tmp_path), 2, layers, *words)
    accounts, sizes = read_accounts(tmp_path / "run"), set()
    for account in accounts.values():
        for step in range(4):
            assert regular_calls(account.at(step)).rows() == account.expected(step).rows()
            sizes.add(account.at(step).by("group", "operation")["tensor/between", "send"])
    assert len(sizes) > 1, "steps differ"


def in_documents(folder: str, ranks: int, *words: str) -> list[dict]:
    """A run in whose even steps each document is as long as a rank's run of tokens, and in odd ones as a sample."""

    def sample(source: Copy, number: int) -> Sample:
        tokens = source.tokens(number)
        return Sample(tokens, begins=np.arange(len(tokens)) % (4 if number // 4 % 2 == 0 else 99) == 0)

    with mock.patch.object(Copy, "sample", sample):
        return job(folder, ranks, *words)


def test_predictions_of_steps_whose_documents_say_how_far_keys_go(tmp_path):
    (tmp_path / "tiny.yml").write_text(CONFIG)
    words = ("parallel={context: 2, context_method: ring}", "data.reset_attention_at_eod=true")
    run(2, in_documents, str(tmp_path), 2, *words, "logging.communication=counts")
    for account in read_accounts(tmp_path / "run").values():
        assert "most" not in account.facts
        for step in range(4):
            assert regular_calls(account.at(step)).rows() == account.expected(step).rows()
            assert (("send",) in account.at(step).by("operation")) is (step % 2 == 1)


def test_a_damaged_line_costs_the_steps_that_it_may_have_been_about(tmp_path, capsys):
    """Each line has a checksum: a flipped bit is reported, and is neither fatal nor a wrong number."""
    with pytest.raises(ValueError, match="logging.communication=counts"):
        read_accounts(tmp_path)
    file = tmp_path / "communication" / "rank_0.jsonl"
    file.parent.mkdir()
    row = ["forward", "", "data", 2, "all_reduce", "fp32", 1]
    written = AccountFile(tmp_path, 0, {"data": 2})
    for step, size in ((0, 8), (3, 1024), (6, 24)):
        written.step(step, Tally.of_rows([[*row, size]]), Tally(), Tally())
    written.close(9, Tally())
    content = file.read_bytes()
    assert read_accounts(tmp_path)[0].at(4).rows() == [[*row, 1024]]
    file.write_bytes(content.replace(b"1024", b"1025"))
    account = read_accounts(tmp_path)[0]
    assert "rank_0.jsonl: line 3 is damaged" in capsys.readouterr().err
    for step, size in ((0, 8), (6, 24), (8, 24)):
        assert account.at(step).rows() == [[*row, size]]
    for step in (1, 4, 5, 9):
        with pytest.raises(ValueError, match=f"no account of step {step}"):
            account.at(step)
    file.write_text('{"rank": 0}\n{"step": 0, "calls": [["forward", 3]]}\n')
    with pytest.raises(ValueError, match="no account"):
        read_accounts(tmp_path)[0].at(0)


def test_an_account_of_a_resumed_run():
    """Steps that are done again replace what was written of them."""
    from megatron.report.communication import _take

    account, row = RankAccount(), ["forward", "", "data", 2, "all_reduce", "fp32", 1, 8]
    for step, size in ((0, 8), (2, 16), (1, 24)):
        _take(account, {"step": step, "calls": [[*row[:7], size]]})
    assert [(first, tally.by("operation")) for first, tally in account.steps] == [
        (0, {("all_reduce",): (1, 8)}),
        (1, {("all_reduce",): (1, 24)}),
    ]
    assert account.at(2) == Tally.of_rows([[*row[:7], 24]])
    times = ["forward", "data", "0 1", "all_reduce", "fp32", 1, 8, 0.5, 0.5, 0.0, 1, 0]
    for step in (0, 1, 2, 1):
        _take(account, {"step": step, "times": [times]})
    assert list(account.times) == [0, 1]
