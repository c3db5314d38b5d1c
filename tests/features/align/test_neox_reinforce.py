"""GPT-NeoX's file of REINFORCE, trained by `deepy align` on files that GPT-NeoX writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import resolve
from megatron.data.errors import DataError
from megatron.data.tokenizer import build_tokenizer
from megatron.features.align.problems import Problems
from megatron.testing.runs import train_on_ranks
from tests.config.neox.neox_cases import flat
from tests.config.neox.test_neox_post_training import PACKING, REINFORCE
from tests.data.make import write_documents


def test_its_file_of_reinforce_trains(tmp_path: Path):
    """Prompts are the tokens before the first label, and the answer is the text of the first labels."""
    documents = [[*b"1+1=", *b"2", 256], [*b"2+3=", *b"5", 256, *b"7+1=", *b"8", 256]]
    labels = [[*[-100] * 4, *b"2", 256], [*[-100] * 4, *b"5", 256, *[-100] * 4, *b"8", 256]]
    write_documents(tmp_path / "answers_document", documents, np.int32)
    write_documents(tmp_path / "answers_label_document", labels, np.int32)
    given = {name: [str(tmp_path / each) for each in value] if name.endswith("_paths") else value
             for name, value in REINFORCE.items()}  # fmt: skip
    found = flat(**given, **PACKING, train_iters=2, warmup=0.5, eval_interval=1)
    assert found.problems == []
    align = {**found.values["align"], "rewards": [{"type": "exact"}], "group": 2, "tokens": 3, "problems": 2}
    values = {**found.values, "tokenizer": {"type": "bytes"}, "run": {"dir": str(tmp_path / "run")}, "align": align}
    values["model"] = {**values["model"], "vocab_size": 264}
    values |= {"logging": {"console": "quiet", "curve": False}, "precision": {"compute": "fp32"}}
    records = train_on_ranks(1, values)
    assert [np.isfinite(each["objective_loss"]) for each in records if "loss" in each] == [True, True]
    assert len([each for each in records if "held_out" in each]) == 3
    config: Any = resolve(values)
    own = Problems(config, build_tokenizer(config.tokenizer))
    assert {(own(n).text, own(n).record["answer"]) for n in range(2)} == {("1+1=", "2"), ("2+3=", "5")}
    assert {own(n).ids for n in range(2)} == {tuple(each[:4]) for each in documents}
    write_documents(tmp_path / "answers_label_document", [[-100] * 6, [-100] * 12], np.int32)
    with pytest.raises(DataError, match="document 0 has no label that counts"):
        Problems(config, build_tokenizer(config.tokenizer))
