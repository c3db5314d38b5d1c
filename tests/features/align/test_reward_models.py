"""Reward models that judge rollouts: from a run, from an export, in the verifier's processes, and in a run's ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import api
from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.export import export
from megatron.checkpoint.save.store import find_checkpoint
from megatron.features.align.reward_model import pinned, reward_model
from megatron.features.align.verifier import Item, Verifier
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents
from tests.features.align.test_rounds import values


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """A run of two steps that prefers digits to letters."""
    folder = tmp_path_factory.mktemp("judge")
    for side, answers in (("chosen", ["1", "23", "4"]), ("rejected", ["a", "bc", "d"])):
        write_documents(folder / side, [[*b"2+3=", *each.encode(), 256] for each in answers])
    sides = {side: str(folder / side) for side in ("chosen", "rejected")}
    own = values(folder)
    own["model"] |= {"norm": {"type": "rmsnorm"}, "mlp": {"hidden_size": 64, "activation": "silu", "gated": True}}
    own |= {"align": {}, "objective": {"type": "reward_model"}}
    own["data"] = {"synthetic": "reward_pairs", "reset_attention_at_eod": True, "options": sides}
    own["training"] = {"steps": 2, "sequence_length": 24, "micro_batch_size": 2, "global_batch_size": 2}
    train_on_ranks(1, own)
    return folder / "run"


def test_its_value_is_that_of_the_text(judge, tmp_path):
    """An export gives the same value with the tokenizer that is in its folder, or is refused without one."""
    wanted = api.open_model(judge).reward([*b"1+1=", *b"2", 256])
    assert reward_model("1+1=", "2", {}, model=str(judge)) == wanted
    assert reward_model("1+1=", "", {}, model=str(judge), suffix="2") == wanted
    assert reward_model("1+1=", "2", {}, model=str(judge), append_eod=False) != wanted
    export(open_checkpoint(find_checkpoint(judge)), tmp_path / "hf")
    _byte_tokenizer(tmp_path / "hf")
    assert reward_model("1+1=", "2", {}, model=str(tmp_path / "hf")) == pytest.approx(wanted, abs=1e-5)


def _byte_tokenizer(folder: Path) -> None:
    """Ids of bytes, as transformers opens them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: byte for character, byte in _alphabet().items()} | {"<|endoftext|>": 256}
    own = Tokenizer(models.BPE(words, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|endoftext|>").save_pretrained(folder)


def _alphabet() -> dict[str, int]:
    from megatron.data.tokenizer import BYTE_OF

    return BYTE_OF


def test_a_run_is_judged_by_it_and_its_ledger_has_the_hash(judge, tmp_path):
    rewards = [{"type": "reward_model", "options": {"model": str(judge)}}, {"type": "exact", "weight": 0.0}]
    own = values(tmp_path, rewards=rewards, evaluate=None, workers=1, time_limit=60.0)
    own["training"] |= {"steps": 1}
    records = train_on_ranks(1, own)
    model = api.open_model(judge)
    path = tmp_path / "run/rollouts/round-000000.jsonl"
    head, *texts = map(json.loads, path.read_text().splitlines())
    for each in texts:
        text = bytes(each["prompt"]).decode() + each["text"]
        assert each["reward"] == pytest.approx(model.reward([*text.encode(), 256]), abs=1e-6)
    assert next(each for each in records if "loss" in each)["reward"] == pytest.approx(
        np.mean([each["reward"] for each in texts])
    )
    events = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    (found,) = [each["sha256"] for each in events if each["event"] == "reward_models"]
    ((_, hashes),) = [pinned([{"type": "reward_model", "options": {"model": str(judge)}}])]
    assert found == hashes and list(found) == [str(find_checkpoint(judge))]


def test_a_gate_closes_the_sum():
    both: list[dict[str, Any]] = [
        {"type": "exact", "weight": 0.0, "gate": True, "options": {}},
        {"type": "length", "weight": 2.0, "options": {"limit": 1, "buffer": 1}},
    ]
    verifier = Verifier(both, 1, 10.0)
    record = {"answer": "2", "completion_tokens": 1}
    found = verifier.judge([Item("", each, record) for each in ("2", "3")])
    verifier.close()
    assert [each.reward for each in found] == [-2.0, 0.0] and not any(each.failure for each in found)


def test_what_is_no_reward_model_is_found_before_the_first(judge, tmp_path):
    verifier = Verifier([{"type": "reward_model", "weight": 1.0, "options": {"model": str(tmp_path)}}], 1, 10.0)
    assert "neither a checkpoint nor a folder with one" in (verifier.fault() or "")
    verifier.close()
