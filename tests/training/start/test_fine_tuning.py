"""The commands of docs/fine_tuning.md, on a tiny model: its first loss is transformers' own."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
import yaml

from megatron.data.sample import IGNORED
from megatron.data.token_file import TokenFile
from tests.checkpoint.published import ROWS, publish
from tests.paths import ROOT

pytestmark = pytest.mark.tour
PAGE = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def deepy(command: str, folder: Path) -> str:
    """Run the installed command from this checkout."""
    start = "import sys; from megatron.command.main import main; sys.exit(main())"
    words = [sys.executable, "-c", start, *shlex.split(command)[1:]]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """After all commands of the page."""
    place = tmp_path_factory.mktemp("sft")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = hf.Qwen2Config(vocab_size=ROWS, intermediate_size=128, max_position_embeddings=256, **shape)
    publish(place / "models" / "base", base)
    draw = random.Random(1)
    with (place / "chats.jsonl").open("w") as file:
        for _ in range(200):
            one, other = draw.randrange(10), draw.randrange(10)
            question = {"role": "user", "content": f"What is {one} plus {other}?"}
            file.write(json.dumps({"messages": [question, {"role": "assistant", "content": f"{one + other}."}]}) + "\n")
    (place / "sft.yml").write_text(block("yaml") + "launch: {device: cpu}\n")
    for command in block("sh").splitlines():
        deepy(command, place)
    return place


def test_the_first_loss_is_that_of_transformers(folder: Path):
    """Of conversations read one by one, in float64: in the run they are packed, and must not see each other."""
    shown = json.loads(deepy("deepy data batch runs/sft --step 0 --json", folder))
    documents = [each["document"] for sequence in shown["steps"][0]["sequences"] for each in sequence["pieces"]]
    tokens, labels = TokenFile(folder / "data/chats"), TokenFile(folder / "data/chats_labels")
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "models/base", dtype=torch.float64).eval()
    total, count = 0.0, 0
    for number in documents:
        size = int(tokens.sizes[number])
        ids, marks = (torch.from_numpy(each.read(number, 0, size).astype(np.int64))[None] for each in (tokens, labels))
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        counted = marks[:, 1:] != IGNORED
        total += torch.nn.functional.cross_entropy(logits[counted], ids[:, 1:][counted], reduction="sum").item()
        count += int(counted.sum())
    first = json.loads((folder / "runs/sft/metrics.jsonl").read_text().splitlines()[0])
    assert len(documents) > 8 and first["loss"] == pytest.approx(total / count, rel=1e-5)  # fp32 against float64


def test_it_learns_and_transformers_chats_with_it(folder: Path):
    lines = [json.loads(line) for line in (folder / "runs/sft/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    tuned = folder / "models" / "tuned"
    assert (settings := json.loads((tuned / "tokenizer_config.json").read_text()))["chat_template"]
    model = hf.AutoModelForCausalLM.from_pretrained(tuned)
    chat = hf.PreTrainedTokenizerFast(tokenizer_file=str(tuned / "tokenizer.json"), bos_token=settings["bos_token"])
    question = [{"role": "user", "content": "What is 3 plus 4?"}]
    prompt = chat.apply_chat_template(
        question, chat_template=settings["chat_template"], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = chat.decode(model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.size(1) :])
    assert re.fullmatch(r" \d+\.<\|turn\|>", answer)  # it has learned the form, and that a turn ends


def test_the_yaml_of_an_import_is_the_model_alone(folder: Path):
    found = yaml.safe_load((folder / "imported.yml").read_text())
    assert set(found) == {"model", "tokenizer", "checkpoint"} and found["model"]["attention"]["qkv_bias"] is True
