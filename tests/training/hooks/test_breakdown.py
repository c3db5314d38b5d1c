"""Validation by parts, and bits per byte: against each label's loss of one process, sorted one by one, on layouts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.save.store import find_checkpoint
from megatron.data.plan_builder import build_plan
from megatron.training.text import load_model
from tests.data.make import write_documents
from tests.training.test_run import job
from tests.workers import run as on_ranks

EOD = 256
CONFIG = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 260, attention: {heads: 2}}
training: {steps: 2, sequence_length: 16, global_batch_size: 4, micro_batch_size: 1}
optimizer: {lr: 0.01}
tokenizer: {type: bytes}
data:
  train: [FOLDER/prose, FOLDER/code]
  validation: {both: [FOLDER/prose, {path: FOLDER/code, name: programs}]}
  reset_attention_at_eod: true
  mask_loss_at_eod: false
evaluation: {at_end: true, batches: 3, breakdown: [source, position, frequency]}
logging: {console: quiet, curve: false}
"""
LAYOUTS = {
    "one": (1, []),
    "dp2, ZeRO 3": (2, ["zero.stage=3"]),
    "tp2 · pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2", "zero.stage=0"]),
    "cp2": (2, ["parallel.context=2"]),
}


def corpora(folder: Path) -> None:
    draw = np.random.default_rng(3)
    common = np.minimum(draw.geometric(0.05, 4000), 255)
    for name, tokens in (("prose", common), ("code", draw.integers(0, 256, 2000))):
        pieces = np.split(tokens, np.sort(draw.choice(np.arange(1, len(tokens)), 150, replace=False)))
        write_documents(folder / name, [[*piece.tolist(), EOD] for piece in pieces])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("breakdown")
    corpora(folder)
    (folder / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def validation(folder: Path, ranks: int, overrides: list[str]) -> dict:
    lines = on_ranks(ranks, job, str(folder), ranks, "training.accumulation=null", *overrides)[0]
    return next(line["validation"]["both"] for line in lines if "validation" in line)


def by_hand(folder: Path) -> dict:
    """The same numbers from the checkpoint, label by label."""
    model, config = load_model(find_checkpoint(folder / "run"), torch.device("cpu"))
    plan = build_plan(config, "validation", "both")
    uses = {use.name: use.tokens / use.available for use in build_plan(config).uses()}
    shares: Counter = Counter()  # the run reads as much of both, so that tokens of the smaller one count more
    for source in build_plan(config).sources:
        for number in range(len(source.file)):
            for token in source.file.read(number).tolist():
                shares[token] += uses[source.name]
    everything = sum(shares.values())
    found: dict = defaultdict(lambda: defaultdict(list))
    bits, size = 0.0, 0
    for number in range(12):
        sample = plan.sample(number)
        for place in range(16):
            begin = place  # of the document that the label's input token is in
            while not sample.begins[begin]:
                begin -= 1
            read = torch.tensor(sample.tokens[begin : place + 1]).unsqueeze(0)
            label = int(sample.tokens[place + 1])
            with torch.no_grad():
                logits = model.head.logits(model.stream(read, positions=torch.arange(len(read[0])).unsqueeze(0)))
            loss = float(F.cross_entropy(logits[0, -1], torch.tensor(label)))
            power = int(math.log2(place - begin + 1))
            share = shares[label] / everything
            found["by_source"][plan.sources[sample.source].name].append(loss)
            found["by_position"][f"{2**power}-{2 * 2**power - 1}" if power else "1"].append(loss)
            decade = next(name for name in ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "0") if share >= float(name))
            found["by_frequency"][decade].append(loss)
            bits, size = bits + loss / math.log(2), size + (label != EOD)
    return {"bits_per_byte": bits / size, **found}


def test_parts_and_bits_are_those_of_labels_sorted_one_by_one(trained):
    whole = validation(trained, *LAYOUTS["one"])
    expected = by_hand(trained)
    assert whole["bits_per_byte"] == pytest.approx(expected.pop("bits_per_byte"), rel=1e-5)
    assert set(expected["by_source"]) == {"prose", "programs"} and len(expected["by_position"]) == 5
    assert len(expected["by_frequency"]) > 1
    for kind, groups in expected.items():
        assert set(whole[kind]) == set(groups)
        for name, losses in groups.items():
            assert whole[kind][name]["tokens"] == len(losses)
            assert whole[kind][name]["loss"] == pytest.approx(np.mean(losses), rel=1e-4), (kind, name)
        total = sum(each["loss"] * each["tokens"] for each in whole[kind].values())
        assert total / whole["tokens"] == pytest.approx(whole["loss"], rel=1e-6)
    for ranks, overrides in list(LAYOUTS.values())[1:]:
        found = validation(trained, ranks, [*overrides, "run.name=again", f"run.dir={trained}/{ranks}{len(overrides)}"])
        assert found["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-5)
        for kind in expected:
            assert {name: each["tokens"] for name, each in found[kind].items()} == {
                name: each["tokens"] for name, each in whole[kind].items()
            }
            for name, each in found[kind].items():
                assert each["loss"] == pytest.approx(whole[kind][name]["loss"], rel=1e-4), (ranks, kind, name)
