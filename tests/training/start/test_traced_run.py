"""A run on two sources, traced back: what the trainer says it learned from is what lies in the input files."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from megatron.checkpoint import open_checkpoint
from megatron.config import load
from megatron.config.sections.data import TokenizerSection
from megatron.config.source.resolved_file import read_resolved
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob
from megatron.data.corpus.job import run as tokenize
from megatron.data.loader import build_loader
from megatron.data.plan_builder import build_plan
from megatron.model.stack import build_model
from megatron.training.start.same_run import data_changes
from tests.scripts import script
from tests.training.test_run import job
from tests.workers import run as on_ranks

EOD = 256  # the byte tokenizer's: byte b is token b
CONFIG = """
model: {layers: "(attention/mlp) x1", hidden_size: 16, vocab_size: 257, attention: {heads: 2}}
training: {steps: 6, sequence_length: 40, global_batch_size: 8, micro_batch_size: 2}
schedule: {warmup_steps: 2}
tokenizer: {type: bytes}
data:
  train: [{path: FOLDER/prose, weight: 0.7}, {path: FOLDER/code, weight: 0.3}]
  validation: {code: FOLDER/code}
evaluation: {every: 100}
checkpoint: {every: 100}
logging: {console: quiet, curve: false}
"""


def corpora(folder: Path) -> None:
    """One file of lines as it is, one compressed. Both with characters of several bytes."""
    random = np.random.default_rng(11)
    for name, count, packed in (("prose", 120, False), ("code", 50, True)):
        lines = [
            json.dumps(
                {"text": f"{name} {number} " + "".join(random.choice(list("aé z→"), random.integers(1, 90)))},
                ensure_ascii=False,
            )
            for number in range(count)
        ]
        content = ("\n".join(lines) + "\n").encode()
        path = folder / (f"{name}.jsonl.gz" if packed else f"{name}.jsonl")
        path.write_bytes(gzip.compress(content) if packed else content)
        tokenize(TokenizeJob(find_inputs([str(path)]), folder / name, TokenizerSection(type="bytes"), Treatment()))


def bytes_of(piece: dict, folder: Path) -> list[int]:
    """A piece's tokens, from the byte range of the input file that the tool names, and from nothing else of ours."""
    path = next(folder.glob(f"{piece['source']}.jsonl*"))
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    assert piece["unit"] == "bytes" and Path(piece["input"]).name == path.name
    record = json.loads(content[piece["input_start"] : piece["input_start"] + piece["input_length"]])
    return [*record["text"].encode(), EOD][piece["start"] : piece["start"] + piece["length"]]


def test_the_loss_counts_the_labels_of_some_sources(tmp_path: Path) -> None:
    """Ranks have unequal numbers of labels that count, some of them none or all: the loss is the mean over all."""
    corpora(tmp_path)
    text = CONFIG.replace("FOLDER", str(tmp_path)).replace(
        "global_batch_size: 8, micro_batch_size: 2", "global_batch_size: 4"
    )
    (tmp_path / "tiny.yml").write_text(text.replace("weight: 0.3}", "weight: 0.1, loss: false}"))
    metrics = [line for line in on_ranks(2, job, str(tmp_path), 2)[0] if "loss" in line]
    config = read_resolved(tmp_path / "run" / "config.yml")
    loaders = [build_loader(config, data_rank=rank, data_ranks=2) for rank in (0, 1)]
    counts = [[int(loader.step(step).loss_mask.sum()) for loader in loaders] for step in range(6)]
    assert any(one != other for one, other in counts)
    model = build_model(config).eval()
    rows = [batch.tokens.flatten(0, 1) for batch in (loader.step(0) for loader in loaders)]
    masks = torch.cat([loader.step(0).loss_mask.flatten() for loader in loaders])
    with torch.no_grad():
        logits = torch.cat([model.head.logits(model.stream(each[:, :-1])) for each in rows])
    each = F.cross_entropy(logits.flatten(0, 1), torch.cat(rows)[:, 1:].flatten(), reduction="none")
    np.testing.assert_allclose(metrics[0]["loss"], float((each * masks).sum() / masks.sum()), rtol=1e-5)


def test_a_resumed_run_says_where_it_leaves_the_data_of_its_checkpoint(tmp_path: Path) -> None:
    corpora(tmp_path)
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    on_ranks(1, job, str(tmp_path), 1, "training.stop_at_step=2", "parallel.tensor=1")
    meta = open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000002").meta
    assert meta.data["samples"] == 16 and len(meta.data["last_sample"]) == 16

    def said(*overrides: str) -> list[str]:
        config = load([str(tmp_path / "tiny.yml")], overrides, ranks=1).config
        return data_changes(meta, config, build_plan(config))

    assert said() == said("training.micro_batch_size=4", "training.steps=8") == []
    (line,) = said("training.global_batch_size=16")
    assert "continue at sample 32 " in line and "has read 16: the samples between are skipped" in line
    (line,) = said("training.global_batch_size=4", "training.micro_batch_size=1")
    assert "continue at sample 8 " in line and "read again" in line
    for other in ("training.steps=600", "data.seed=5", "data.order=stream", "training.sequence_length=41"):
        (line,) = said(other)  # 600 steps need more epochs, and all epochs are shuffled together
        assert "the data order differs from the checkpoint's" in line


def test_every_step_of_a_run_is_found_in_the_bytes_of_its_inputs(tmp_path: Path) -> None:
    corpora(tmp_path)
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    metrics = [line for line in on_ranks(2, job, str(tmp_path), 2)[0] if "loss" in line]
    assert len(metrics) == 6
    done = script("data/batch.py", tmp_path / "run", "--step", 0, "--to", 5, "--json")
    assert done.returncode == 0, done.stderr
    sources, batches = set(), []
    for line, step in zip(metrics, json.loads(done.stdout)["steps"], strict=True):
        total, rows = 0, []
        for index, sequence in enumerate(step["sequences"]):
            row = [token for piece in sequence["pieces"] for token in bytes_of(piece, tmp_path)]
            assert len(row) == 41
            digest = hashlib.blake2b(
                index.to_bytes(8, "little") + np.array(row, "<u4").tobytes(), digest_size=8
            ).digest()
            total += int.from_bytes(digest, "little")
            sources |= {piece["source"] for piece in sequence["pieces"]}
            rows.append(row)
        assert line["batch_hash"] == step["hash"] == f"{total % 2**64:016x}"
        batches.append(torch.tensor(rows))
    assert sources == {"prose", "code"}
    # And what was hashed is what was learned from: the first loss is that of the initial model on these very bytes.
    model = build_model(read_resolved(tmp_path / "run" / "config.yml")).eval()
    with torch.no_grad():
        logits = model.head.logits(model.stream(batches[0][:, :-1]))
    expected = F.cross_entropy(logits.flatten(0, 1), batches[0][:, 1:].flatten())
    np.testing.assert_allclose(metrics[0]["loss"], float(expected), rtol=1e-5)
