"""The commands of docs/post_training.md, typed on a tiny corpus: each stage begins where its reference is."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron import api
from megatron.data.token_file import TokenFile
from tests.paths import ROOT

pytestmark = pytest.mark.tour
PAGE = (ROOT / "docs" / "post_training.md").read_text(encoding="utf-8")
WORDS = "seven eight nine ten red green blue cat dog bird sun moon".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """After all commands of the page. A good answer repeats the question's word, a bad one has another."""
    place, draw = tmp_path_factory.mktemp("chain"), random.Random(0)

    def chat(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Say {question}."}, {"role": "assistant", "content": f"{answer}!"}]

    rows: dict[str, list[dict]] = {"corpus": [], "chats": [], "pairs": [], "rated": []}
    for _ in range(60):
        word, other = draw.sample(WORDS, 2)
        rows["corpus"].append({"text": " ".join(draw.choices(WORDS, k=40)) + f". Say {word}. {word}!"})
        rows["chats"].append({"messages": chat(word, word)})
        rows["pairs"].append({"chosen": chat(word, word), "rejected": chat(word, other)})
        good = draw.random() < 0.5
        rows["rated"].append({"messages": chat(word, word if good else other), "label": good})
    for name, records in rows.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    for kind, name, text in re.findall(r"```(yaml|sh) ?(\S*)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "yaml":
            (place / name).write_text(text + ("launch: {device: cpu}\n" if name == "base.yml" else ""))
    start = "import sys; from megatron.command.main import main; sys.exit(main())"
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for command in block.splitlines():
            words = [sys.executable, "-c", start, *shlex.split(command)[1:]]
            done = subprocess.run(words, cwd=place, capture_output=True, text=True, env=own)
            assert done.returncode == 0, command + done.stdout + done.stderr
    return place


def steps(folder: Path, run: str) -> list[dict]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if "loss" in each]


def test_stages_begin_at_their_reference_and_learn(folder: Path):
    for run, loss in (("dpo", math.log(2)), ("kto", 0.5)):
        found = steps(folder, run)
        assert found[0]["objective_loss"] == pytest.approx(loss, abs=1e-5), run
        assert found[0]["preference_margin"] == pytest.approx(0, abs=1e-4), run
        assert found[-1]["objective_loss"] < found[0]["objective_loss"], run
        assert found[-1]["preference_margin"] > 0, run
    assert steps(folder, "sft")[-1]["loss"] < steps(folder, "sft")[0]["loss"]


def test_the_reward_model_scores_both_sides(folder: Path):
    """Thirty steps are too few to learn more than the scale."""
    chosen, rejected = (np.load(folder / f"data/{side}_rewards.npy") for side in ("chosen", "rejected"))
    assert len(chosen) == 60 and np.isfinite(chosen).all() and np.isfinite(rejected).all()
    model, file = api.open_model(str(folder / "runs/reward")), TokenFile(folder / "data/chosen")
    assert chosen.tolist() == pytest.approx([model.reward(file[number]) for number in range(60)], rel=1e-6)
