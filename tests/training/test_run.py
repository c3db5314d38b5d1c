"""Whole runs through `megatron.training.run`: resuming, changing the layout, text from checkpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.format.fragment import MASTER, FragmentSpec
from megatron.config import ConfigError, load, to_yaml
from megatron.report.ledger import read_ledger
from megatron.testing.runs import run_on_this_rank
from megatron.worker.place import LaunchError, StartError
from tests.selection import toured
from tests.workers import run as on_ranks

TINY = """
model:
  layers: "(attention/mlp) x3"
  hidden_size: 32
  vocab_size: 257
  dropout: 0.1
  attention: {heads: 4, kv_heads: 2}
training: {steps: 6, sequence_length: 16, micro_batch_size: 2, global_batch_size: 8}
optimizer: {lr: 1e-2, gradient_clipping: 0.5}
schedule: {warmup_steps: 2}
data: {synthetic: copy}
tokenizer: {type: bytes}
evaluation: {every: 3, batches: 1}
checkpoint: {every: 2}
logging: {console: quiet, curve: false}
"""


def job(folder: str, ranks: int, *overrides: str, attempt: int = 0) -> list[dict]:
    """One run on this worker's ranks. Rank 0 returns the lines of metrics.jsonl."""
    resolved = load([str(Path(folder) / "tiny.yml")], [f"run.dir={folder}/run", *overrides], ranks=ranks)
    return run_on_this_rank(resolved, ranks, attempt)


def start(tmp_path: Path, ranks: int, *overrides: str, attempt: int = 0) -> list[dict]:
    (tmp_path / "tiny.yml").write_text(TINY)
    return on_ranks(ranks, partial(job, attempt=attempt), str(tmp_path), ranks, *overrides)[0]


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] if "loss" in line else line["validation"]["validation"]["loss"] for line in lines]


def tensors(tmp_path: Path, step: int, run: str = "run") -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = open_checkpoint(tmp_path / run / "checkpoints" / f"step_{step:08d}", verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data
        for name, state in checkpoint.stored
    }


LAYOUTS = {
    "dp2": (2, []),
    "dp2 bf16": (2, ["precision=bf16"]),
    "dp2 zero3": (2, ["zero.stage=3"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pp2 bf16": (2, ["parallel.pipeline=2", "precision=bf16"]),
}


@pytest.mark.parametrize("name", toured(LAYOUTS))
def test_a_stopped_run_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    expected = start(whole, ranks, *overrides)
    start(parts, ranks, *overrides, "training.stop_at_step=4")
    found = start(parts, ranks, *overrides)
    assert losses(found) == losses(expected)
    assert [line.get("batch_hash") for line in found] == [line.get("batch_hash") for line in expected]
    ours, theirs = tensors(parts, 6), tensors(whole, 6)
    assert ours.keys() == theirs.keys() and (any(state == MASTER for _, state in ours))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    events = [json.loads(line)["event"] for line in (parts / "run" / "ledger.jsonl").read_text().splitlines()]
    assert events.count("start") == 1 and events.count("resume") == 1


def test_the_layout_changes_nothing_that_is_learned(tmp_path: Path) -> None:
    expected = start(tmp_path, 1, "run.dir=" + str(tmp_path / "one"))
    start(tmp_path, 2, "parallel.tensor=2", "parallel.sequence=true", "training.stop_at_step=2")
    start(tmp_path, 2, "parallel.pipeline=2", "training.stop_at_step=4")
    found = start(tmp_path, 2, "zero.stage=3")
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    ours, theirs = tensors(tmp_path, 6), tensors(tmp_path, 6, "one")
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-6)


def test_a_run_that_goes_back_leaves_the_other_branch(tmp_path: Path) -> None:
    """Later checkpoints of the old branch would be what the next `resume: auto`, after a crash, continues from."""
    start(tmp_path, 1)
    folder = tmp_path / "run" / "checkpoints"
    back = f"checkpoint.resume={folder}/step_00000002"
    found = start(tmp_path, 1, back, "optimizer.lr=1e-3", "training.stop_at_step=4")
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000002", "step_00000004"]
    aside = folder / "superseded_1"
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000004", "step_00000006"]
    assert open_checkpoint(aside / "step_00000006", verify="checksums").step == 6
    # Started again after a failure it continues, though its configuration still names step 2.
    whole = start(tmp_path, 1, back, "optimizer.lr=1e-3", attempt=1)
    learned = [[line["loss"] for line in lines if "loss" in line] for lines in (found, whole)]
    assert [len(each) for each in learned] == [4, 6] and learned[1][:4] == learned[0]
    event = [
        json.loads(line)
        for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "resume"
    ][-1]
    assert event["checkpoint"].endswith("step_00000004")
    start(tmp_path, 1, "checkpoint.resume=none", "training.stop_at_step=2")
    assert [path.name for path in folder.glob("step_*")] == ["step_00000002"]
    assert sorted(path.name for path in (folder / "superseded_2").iterdir()) == [
        f"step_0000000{step}" for step in (2, 4, 6)
    ]


def test_weights_of_a_hugging_face_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
    )
    theirs.save_pretrained(tmp_path / "theirs")
    run = [
        "model.layers=(attention/mlp) x2",
        "model.norm.type=rmsnorm",
        "model.norm.epsilon=1e-6",
        "model.mlp.gated=true",
        "model.mlp.activation=silu",
        "model.mlp.hidden_size=48",
        "model.dropout=0",
        "training.steps=2",
    ]
    lines = start(
        tmp_path, 2, *run, "parallel.tensor=2", "optimizer.lr=0.0", f"checkpoint.initialize_from={tmp_path}/theirs"
    )
    stored = tensors(tmp_path, 2)
    assert torch.equal(stored["embedding.tokens.weight", MASTER].view(257, 32), theirs.model.embed_tokens.weight)
    assert lines[0]["step"] == 0
    with pytest.raises(RuntimeError, match="does not fit|shape"):
        start(
            tmp_path,
            1,
            "model.layers=(attention/mlp) x2",
            "training.steps=2",
            f"run.dir={tmp_path}/other",
            f"checkpoint.initialize_from={tmp_path}/theirs",
        )


def test_a_copy_is_known_by_what_it_is_of(tmp_path: Path) -> None:
    """The names of checkpoints are steps: two buckets, or one that was written again, have the same."""
    for name, lr in (("one", "1e-2"), ("two", "2e-2"), ("one_again", "3e-2")):
        start(
            tmp_path,
            1,
            f"run.dir={tmp_path}/{name}",
            f"optimizer.lr={lr}",
            "training.stop_at_step=2",
            f"checkpoint.levels=[{{place: store, every: auto, url: 'file://{tmp_path}/bucket/{name.partition('_')[0]}'}}]",
        )
        if name == "one_again":
            continue
        start(
            tmp_path,
            1,
            "checkpoint.optimizer_state=false",
            "training.stop_at_step=1",
            "optimizer.lr=0.0",
            f"run.dir={tmp_path}/new_{name}",
            f"checkpoint.dir={tmp_path}/new",
            "checkpoint.resume=none",
            f"checkpoint.initialize_from=file://{tmp_path}/bucket/{name}/step_00000002",
        )
    copies = tmp_path / "new" / "fetched"
    assert len(list(copies.glob("*/step_00000002"))) == 2
    (copies / "0000" / "step_00000002.tmp-0a").mkdir(parents=True)  # a start that was killed while it downloaded
    data = next(copies.glob("*/step_*/data/0000/rank_00000.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    for name, source in (("one", "one_again"), ("two", "two")):
        start(
            tmp_path,
            1,
            "training.stop_at_step=1",
            "optimizer.lr=0.0",
            f"run.dir={tmp_path}/last_{name}",
            f"checkpoint.dir={tmp_path}/new",
            "checkpoint.resume=none",
            f"checkpoint.initialize_from=file://{tmp_path}/bucket/{name}/step_00000002",
        )
        read = open_checkpoint(tmp_path / "new" / "step_00000001")
        right = open_checkpoint(tmp_path / source / "checkpoints" / "step_00000002")
        for tensor, state in right.stored:
            if state == MASTER:
                spec = FragmentSpec.whole(right.tensors[tensor], MASTER)
                assert torch.equal(read.read(spec).data, right.read(spec).data), (name, tensor)
    assert not list(copies.glob("*/*.tmp-*"))


def test_a_folder_and_a_run_stand_for_their_newest_checkpoint(tmp_path: Path) -> None:
    start(tmp_path, 1)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000006" / "manifest.json").unlink()
    for number, source in enumerate((folder, tmp_path / "run")):
        started = start(
            tmp_path,
            2,
            f"run.dir={tmp_path}/weights{number}",
            "training.stop_at_step=1",
            "parallel.tensor=2",
            "model.attention.rotary.base=5000",
            f"checkpoint.initialize_from={source}",
        )
        assert started[0]["step"] == 0
        (event,) = [
            line
            for line in map(json.loads, (tmp_path / f"weights{number}" / "ledger.jsonl").read_text().splitlines())
            if line["event"] == "start"
        ]
        assert event["initialize_from"].endswith("step_00000004")
        assert event["changed"] == ["model.attention.rotary.base: 10000.0 -> 5000.0"]
        gone_on = start(tmp_path, 1, f"run.dir={tmp_path}/all{number}", f"checkpoint.resume={source}")
        assert gone_on[0]["step"] == 4


def test_an_average_of_the_weights_is_evaluated_saved_and_gone_on_with(tmp_path: Path) -> None:
    lines = start(tmp_path, 2, "training.weight_average=0.5", "checkpoint.every=1")
    for line in (line["validation"] for line in lines if "validation" in line):
        assert line.keys() == {"validation", "validation (average)"}
        assert line["validation"]["loss"] != line["validation (average)"]["loss"]
    saved = {step: tensors(tmp_path, step) for step in range(1, 7)}
    names = [name for name, state in saved[1] if state == "average"]
    assert names == [name for name, state in saved[1] if state == "master"]
    for step in range(2, 7):
        for name in names:
            wanted = (saved[step - 1][name, "average"] + saved[step][name, "master"]) / 2
            torch.testing.assert_close(saved[step][name, "average"], wanted)
    path = tmp_path / "run" / "checkpoints" / "step_00000003"
    start(tmp_path, 1, "training.weight_average=0.5", f"run.dir={tmp_path}/other", f"checkpoint.resume={path}")
    for name in names:
        torch.testing.assert_close(
            tensors(tmp_path, 6, "other")[name, "average"], saved[6][name, "average"], rtol=0, atol=1e-5
        )
    checkpoint = open_checkpoint(path).averaged()
    read = checkpoint.read(FragmentSpec.whole(checkpoint.tensors[names[0]], "weight"), torch.float32)
    assert torch.equal(read.data, saved[3][names[0], "average"])
    start(tmp_path, 1, f"run.dir={tmp_path}/none", "training.stop_at_step=2")
    with pytest.raises(CheckpointError, match="training.weight_average"):
        open_checkpoint(tmp_path / "none" / "checkpoints" / "step_00000002").averaged()


def test_what_does_not_fit_is_told_in_a_few_lines(tmp_path: Path) -> None:
    start(tmp_path, 1)
    with pytest.raises(RuntimeError) as caught:
        start(tmp_path, 2, "optimizer.type=muon", "parallel.pipeline=2")
    text = str(caught.value)
    assert "the weights fit" in text and "initialize_from" in text
    assert "missing: layers.0-1.mlp.up.weight" in text and "left over: layers.0-2.mlp.up.weight (exp_avg)" in text
    assert issubclass(StartError, LaunchError) and "StartError" in text  # a message and status 2, no traceback
    with pytest.raises(RuntimeError) as caught:
        allowed = "checkpoint.allow_changes=[model]"
        start(tmp_path, 1, "model.vocab_size=300", "model.layers=(attention/mlp) x4", allowed)
    assert "wrong shape: embedding.tokens.weight is (300, 32)" in str(caught.value)
    assert "missing: layers.3.mlp.up.weight is in the run" in str(caught.value) and "the weights fit" not in str(
        caught.value
    )


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    start(tmp_path, 1)
    source = tmp_path / "run" / "checkpoints" / "step_00000006"
    lines = start(
        tmp_path,
        2,
        "parallel.tensor=2",
        f"run.dir={tmp_path}/new",
        f"checkpoint.initialize_from={source}",
        "training.steps=2",
        "optimizer.lr=0.0",
        "model.dropout=0.0",
        "evaluation.every=1",
    )
    before = tensors(tmp_path, 6)
    after = tensors(tmp_path, 2, "new")
    assert lines[0]["step"] == 0
    for key in before:
        if key[1] == MASTER:
            assert torch.equal(before[key], after[key])


def test_weights_without_optimizer_state(tmp_path: Path) -> None:
    start(tmp_path, 2, "parallel.tensor=2")
    start(
        tmp_path,
        2,
        "zero.stage=1",
        "precision=bf16",
        f"run.dir={tmp_path}/light",
        "checkpoint.optimizer_state=false",
        f"checkpoint.initialize_from={tmp_path}/run/checkpoints/step_00000006",
        "optimizer.lr=0.0",
        "model.dropout=0.0",
    )
    light, full = tensors(tmp_path, 6, "light"), tensors(tmp_path, 6)
    assert {state for _, state in light} == {"weight"}
    assert all(torch.equal(value, full[name, MASTER].bfloat16()) for (name, _), value in light.items())
    assert not open_checkpoint(tmp_path / "light" / "checkpoints" / "step_00000006").meta.resumable


def test_a_missing_checkpoint_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(TINY)
    with pytest.raises(ConfigError, match="checkpoint.resume"):
        load(
            [str(tmp_path / "tiny.yml")], [f"run.dir={tmp_path}/run", f"checkpoint.resume={tmp_path}/nowhere"], ranks=1
        )


OTHER_RUNS = {
    "training.seed": "training.seed=7",
    "model.attention.rotary.base": "model.attention.rotary.base=5000.0",
    "model.init.std": "model.init.std=0.5",
    "tokenizer.eod_id": "tokenizer.eod_id=5",
}


@pytest.mark.parametrize("key", OTHER_RUNS)
def test_another_run_is_not_gone_on_with(key: str, tmp_path: Path) -> None:
    start(tmp_path, 1, "training.stop_at_step=2")
    before = sorted((tmp_path / "run" / "checkpoints").rglob("*"))
    with pytest.raises(RuntimeError) as caught:
        start(tmp_path, 1, OTHER_RUNS[key])
    text = str(caught.value)
    assert "StartError" in text and f"- {key}: " in text and f"checkpoint.allow_changes=[{key}" in text
    assert sorted((tmp_path / "run" / "checkpoints").rglob("*")) == before
    lines = start(tmp_path, 1, OTHER_RUNS[key], f"checkpoint.allow_changes=[{key}]")
    assert [line["step"] for line in lines if "loss" in line] == list(range(6))


def test_what_makes_a_run_another_one(tmp_path: Path) -> None:
    from megatron.checkpoint import CheckpointError
    from megatron.training.start.same_run import refuse_other_runs

    (tmp_path / "tiny.yml").write_text(TINY)
    config = load([str(tmp_path / "tiny.yml")], [], ranks=1).config
    same = ["optimizer.lr: 1 -> 2", "model.dropout: 0.1 -> 0.0", "model.kernels.attention: 'auto' -> 'math'"]
    same += [
        "model.moe.losses.balance: 0.0 -> 0.01",
        "tokenizer.path: '/a/t.json' -> '/b/t.json'",
        "training.steps: 1 -> 2",
    ]
    refuse_other_runs(tmp_path, same, config)
    for line in ("tokenizer.path: '/a/t.json' -> '/a/u.json'", "model.layers: 'a' -> 'b'", "training.seed: 1 -> 2"):
        with pytest.raises(CheckpointError, match="of another run"):
            refuse_other_runs(tmp_path, [*same, line], config)


def test_changed_keys_are_named(tmp_path: Path) -> None:
    from megatron.training.start.same_run import changes

    (tmp_path / "tiny.yml").write_text(TINY)
    old = load([str(tmp_path / "tiny.yml")], [], ranks=1)
    new = load(
        [str(tmp_path / "tiny.yml")], ["optimizer.lr=0.02", "training.micro_batch_size=1", "run.name=other"], ranks=1
    )
    assert changes(to_yaml(old), old.config) == []
    assert changes(to_yaml(old), new.config) == ["optimizer.lr: 0.01 -> 0.02"]


def test_text_of_a_checkpoint_of_any_layout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from megatron.training.text import load_model, main

    start(tmp_path, 2, "parallel.pipeline=2")
    command = [
        str(tmp_path / "run"),
        "--prompt",
        "abc",
        "--tokens",
        "12",
        "--temperature",
        "0",
        "--json",
        "--ignore-end",
    ]
    assert main(command) == 0
    cached = json.loads(capsys.readouterr().out)
    assert main([*command, "--no-cache"]) == 0
    assert json.loads(capsys.readouterr().out) == cached
    model, _ = load_model(tmp_path / "run" / "checkpoints" / "step_00000006", torch.device("cpu"))
    masters = tensors(tmp_path, 6)
    for parameter in model.parameters():
        assert torch.equal(parameter.detach().flatten(), masters[parameter.logical.name, MASTER])
    assert main([str(tmp_path / "nothing")]) == 2


def test_a_signal_shows_in_the_exit_status() -> None:
    from megatron.launch.report.console import STOPPED_EARLY
    from megatron.training.run import status
    from megatron.training.trainer import Outcome

    assert status(Outcome(6, "finished", True)) == 0
    assert status(Outcome(6, "signal SIGTERM", True)) == 0
    assert status(Outcome(3, "training.stop_after: 1 minutes", False)) == 0
    assert status(Outcome(3, "signal SIGTERM", False)) == 143
    assert status(Outcome(3, "signal SIGUSR1", False)) == STOPPED_EARLY


def test_tokens_are_those_that_were_read_though_the_batch_grew(tmp_path):
    """2 steps of 8 samples, 2 of 16, 2 of 8 again: sums, not the step times the present batch."""
    start(tmp_path, 1, "training.stop_at_step=2")
    start(tmp_path, 1, "training.stop_at_step=4", "training.global_batch_size=16")
    lines = start(tmp_path, 1)
    assert [line["tokens"] for line in lines if "loss" in line] == [16 * read for read in (8, 16, 32, 48, 56, 64)]
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000006").meta.data["tokens"] == 64 * 16


def test_a_checkpoint_has_its_place_in_the_ledger(tmp_path):
    """Cut there, the ledger has the batches of exactly the steps before the checkpoint. A resumed run logs the
    place."""
    start(tmp_path, 1, "training.stop_at_step=4", "checkpoint.every=3")
    place = open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000003").meta.ledger["bytes"]
    text = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    before = [json.loads(line) for line in text[:place].splitlines()]
    assert text[place - 1 : place] == b"\n" and place < len(text)
    seen = [each["first_step"] + k for each in before if each["event"] == "batches" for k in range(len(each["hashes"]))]
    assert seen == [0, 1, 2]
    newest = open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000004").meta.ledger
    start(tmp_path, 1)
    (resumed,) = (
        each
        for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
        if (each := json.loads(line))["event"] == "resume"
    )
    assert resumed["ledger"] == newest and newest["bytes"] > place


def test_flipped_bits_in_a_run_s_logs_cost_their_lines(tmp_path: Path) -> None:
    """The run continues as if nothing had happened, and omits the same batches: its checkpoint knows them too."""
    out = "data.left_out=[{step: 1, batches: 2}]"
    whole = start(tmp_path, 1, f"run.dir={tmp_path}/whole", out)
    start(tmp_path, 1, out, "training.stop_at_step=4")
    for name, damaged in (("ledger", b'"event": "start"'), ("metrics", b'{"step": 1, "loss"')):
        path = tmp_path / "run" / f"{name}.jsonl"
        content = path.read_bytes()
        place = content.index(damaged) + 3
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
    found = start(tmp_path, 1, out)
    assert [line["step"] for line in found if "loss" in line] == [0, 2, 3, 4, 5]
    assert losses(found[-3:]) == losses(whole[-3:])
    assert [line.get("batch_hash") for line in found[-3:]] == [line.get("batch_hash") for line in whole[-3:]]
    entries = read_ledger(tmp_path / "run/ledger.jsonl")
    assert [each["event"] for each in entries].count("resume") == 1 and entries[-1]["event"] == "end"
    assert next(each["lines"] for each in entries if each["event"] == "damaged") == [1]
    assert b"start" in (tmp_path / "run/ledger.damaged.jsonl").read_bytes()
    assert len((tmp_path / "run/metrics.damaged.jsonl").read_bytes().splitlines()) == 1
