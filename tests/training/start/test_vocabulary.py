"""A run with more tokens than the weights that it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import MASTER, FragmentSpec
from tests.selection import covering
from tests.training.test_run import job
from tests.workers import run as on_ranks

TINY = """
model:
  layers: "(attention/mlp) x2"
  hidden_size: 32
  vocab_size: 40
  attention: {heads: 4}
  head: {bias: true}
  residual: {token_inputs: 4}
training: {steps: 2, sequence_length: 16, micro_batch_size: 2, global_batch_size: 4}
data: {synthetic: copy}
checkpoint: {log_spaced: true}
logging: {console: quiet, curve: false}
"""
OLD, NEW = 28, 37


def tokenizer(path: Path, size: int, *, shift: int = 0) -> dict[str, str]:
    words = ["<|endoftext|>", *(chr(97 + (number + shift) % 26) for number in range(26)), "?"]
    words += [f"new{number}" for number in range(size - len(words))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path))
    return {"type": "huggingface", "path": str(path)}


def masters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder / "run" / "checkpoints" / f"step_{step:08d}", verify="checksums")
    return {
        name: checkpoint.read(FragmentSpec.whole(tensor, MASTER)).data.view(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
    }


def train(folder: Path, ranks: int, tokens: dict[str, str], *overrides: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "tiny.yml").write_text(TINY + f"tokenizer: {{type: {tokens['type']}, path: {tokens['path']}}}\n")
    on_ranks(ranks, job, str(folder), ranks, *overrides)
    return masters(folder, 0)


@pytest.mark.parametrize(
    ("layout", "how"),
    covering([(1,), (2, "parallel.tensor=2"), (2, "zero.stage=3"), (2, "parallel.pipeline=2")], ["mean", "initial"]),
)
def test_known_rows_are_kept_and_new_ones_start_as_said(tmp_path: Path, layout, how: str) -> None:
    """New are the rows of new tokens and the rows that only filled the old table up."""
    old, new = tokenizer(tmp_path / "old.json", OLD), tokenizer(tmp_path / "new.json", NEW)
    train(tmp_path / "before", 1, old)
    source = tmp_path / "before" / "run" / "checkpoints" / "step_00000002"
    before = masters(tmp_path / "before", 2)
    ranks, *words = layout
    larger = ["model.vocab_size=51", "training.seed=5", *words]
    fresh = train(tmp_path / "fresh", ranks, new, *larger)
    words = [*larger, f"checkpoint.initialize_from={source}", f"checkpoint.initialize_vocabulary={how}"]
    found = train(tmp_path / "after", ranks, new, *words)
    assert found.keys() == before.keys()
    for name, value in found.items():
        if name in ("embedding.tokens.weight", "head.weight", "head.bias") or name.endswith("inputs.table.weight"):
            assert value.shape[0] == 51 and value[:OLD].equal(before[name][:OLD])
            mean = before[name][:OLD].double().mean(0).float().expand_as(value[OLD:])
            assert value[OLD:].equal(mean if how == "mean" else fresh[name][OLD:])
        else:
            assert value.equal(before[name])


def test_a_tokenizer_with_other_ids_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "before", 1, tokenizer(tmp_path / "old.json", OLD))
    source = tmp_path / "before" / "run" / "checkpoints" / "step_00000002"
    words = [f"checkpoint.initialize_from={source}", "checkpoint.initialize_vocabulary=mean", "model.vocab_size=51"]
    with pytest.raises(RuntimeError, match="26 tokens of its tokenizer have another id .* The first is 'a'"):
        train(tmp_path / "moved", 1, tokenizer(tmp_path / "new.json", NEW, shift=1), *words)
