"""Needles in haystacks: what the texts are, what readers of known memory score, and a model against a plain pass."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.data.tokenizer import BytesTokenizer, build_tokenizer
from megatron.evaluation.arguments import OptionError, before_start, parse
from megatron.evaluation.needles import haystack, needles, table
from megatron.evaluation.scoring import Score
from megatron.evaluation.select import TaskError
from megatron.training.text import load_model
from tests.eval_tasks.models import settings, write_checkpoint
from tests.workers import run as on_ranks

WORDS = ["--needles", "130,200", "--depths", "0,50,100", "--needle-texts", "2"]


class Reader:
    """Knows the number that a text says last, if it stands in the last `memory` tokens. Else it knows nothing."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def score(self, texts) -> list[Score]:
        found = []
        for text in texts:
            seen = bytes(text.tokens[: -text.scored][-self.memory :]).decode()
            told = re.findall(r"The number of the \w+ is (\d+)\.", seen)
            right = bool(told) and bytes(text.targets).decode() == f" {told[-1]}"
            found.append(Score(-1.0 if right else -9.0, right))
        return found


def test_texts_are_as_long_as_they_shall_be_and_say_the_number_once() -> None:
    tokenizer = BytesTokenizer()
    for length in (134, 150, 600):
        places = []
        for depth in (0, 25, 50, 100):
            made = haystack(tokenizer, length, depth, 3)
            assert len(made.prompt) + len(made.choices[0]) == length + 1
            text, answers = bytes(made.prompt).decode(), [bytes(each).decode() for each in made.choices]
            assert [text.count(each) for each in answers] == [1, 0, 0, 0] and len(set(answers)) == 4
            (thing,) = re.findall(r"\? The number of the (\w+) is$", text)
            assert text.count(thing) == 3
            assert re.search(rf"(^|\.) The number of the {thing} is{answers[0]}\. ", text)
            places.append(text.index(answers[0]))
        assert places == sorted(places) and (length < 600 or len(set(places)) == 4)
    assert haystack(tokenizer, 600, 50, 0) != haystack(tokenizer, 600, 50, 1)
    with pytest.raises(TaskError, match="must be at least 1[0-9][0-9] tokens"):
        haystack(tokenizer, 60, 50, 0)


def test_readers_of_known_memory() -> None:
    """One that reads everything finds every needle. One that reads the last 300 tokens finds the sentences among
    them."""
    tokenizer, lengths, depths = BytesTokenizer(), (200, 800), (0.0, 50.0, 100.0)
    assert all(cell.found == cell.chosen == 1.0 for cell in needles(Reader(10**6), tokenizer, lengths, depths, 4))
    cells = needles(Reader(300), tokenizer, lengths, depths, 4)
    assert [cell.found for cell in cells] == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert [cell.chosen for cell in cells] == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]  # all alike is not chosen
    assert cells[-1].loss == pytest.approx(1 / 6) and cells[3].loss == pytest.approx(9 / 6)
    assert table(cells).splitlines()[-1].split() == ["800", "0.00/0.00/1.50", "0.00/0.00/1.50", "1.00/1.00/0.17"]


def evaluate(folder: str, layout: dict, ranks: int, words: list[str]) -> None:
    """evaluate.py on this worker's ranks."""
    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.evaluation.main import run
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.world import World

    values = settings("gpt_neox", Path(folder)) | layout
    config = combine([ConfigSource(values)], ranks=ranks, check_inputs=False, name="small").config
    prepare_deepspeed(torch.device("cpu"))
    mesh, talk = Mesh.build(Layout.of(config, ranks)), GroupCommunicator() if ranks > 1 else SOLO
    run(config, parse(words), World(torch.device("cpu"), mesh, talk, talk))


def test_a_model_on_layouts_against_a_plain_pass(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("gpt_neox", tmp_path)
    found = []
    for ranks, layout in ((1, {}), (2, {"parallel": {"tensor": 2}})):
        on_ranks(ranks, evaluate, str(tmp_path), layout, ranks, WORDS)
        (file,) = tmp_path.rglob("*.needles.json")
        found.append(json.loads(file.read_text())["needles"])
        assert file.with_suffix(".png").stat().st_size > 5000
        file.unlink()
    model, config = load_model(checkpoint, torch.device("cpu"))
    tokenizer = build_tokenizer(config.tokenizer)
    assert [(cell["length"], cell["depth"]) for cell in found[0]] == [(n, d) for n in (130, 200) for d in (0, 50, 100)]
    for cell, other in zip(*found, strict=True):
        total, count = 0.0, 0
        for number in range(2):
            made = haystack(tokenizer, cell["length"], cell["depth"], number)
            tokens = torch.tensor([made.prompt + made.choices[0]])
            with torch.no_grad():
                logits = model.logits(tokens[:, :-1])[0, -len(made.choices[0]) :]
            total += float(F.cross_entropy(logits, tokens[0, -len(made.choices[0]) :], reduction="sum"))
            count += len(made.choices[0])
        assert cell["loss"] == pytest.approx(total / count, rel=1e-5)
        assert other["loss"] == pytest.approx(cell["loss"], rel=1e-5) and other["chosen"] == cell["chosen"]


def test_options(tmp_path: Path) -> None:
    own = parse(WORDS)
    assert (own.needles, own.depths, own.needle_texts, own.requests) == ((130, 200), (0.0, 50.0, 100.0), 2, ())
    for words, said in (
        (["--needles", "many"], "--needles must be numbers with commas"),
        (["--needles", "12.5"], "whole numbers"),
        (["--needles", "100", "--depths", "50,101"], "--depths has 101: it must have numbers from 0 to 100"),
        (["--needles", "100", "--needle-texts", "0"], "--needle-texts is 0: it must be at least 1"),
    ):
        with pytest.raises(OptionError, match=said):
            parse(words)
    values = settings("gpt_neox", tmp_path)
    model = values["model"] | {"embedding": {"position": "learned"}}
    model["attention"] = model["attention"] | {"position": "none", "rotary": {}}
    config = combine([ConfigSource(values | {"model": model})], ranks=1, check_inputs=False, name="small").config
    assert any("--needles has 200 tokens, and the model 64 positions" in each for each in before_start(WORDS, config))


@pytest.mark.parametrize(
    "parallel, ranks, most",
    [
        ({}, 1, 101),
        ({"tensor": 2}, 2, 101),
        ({"tensor": 2, "sequence": True}, 2, 100),
        ({"context": 4, "context_method": "ring"}, 4, 96),  # two runs of each rank
        ({"context": 4, "context_method": "ring", "context_cut": "contiguous"}, 4, 100),
    ],
)
def test_texts_beyond_what_ranks_can_share_are_refused(tmp_path: Path, parallel: dict, ranks: int, most: int) -> None:
    values = settings("gpt_neox", tmp_path) | {"parallel": parallel}
    model = values["model"] | {"embedding": {"position": "learned", "max_positions": 101}}
    model["attention"] = model["attention"] | {"position": "none", "rotary": {}}
    config = combine([ConfigSource(values | {"model": model})], ranks=ranks, check_inputs=False, name="small").config
    for option in (["--needles"], ["--tasks", "nothing", "--max-length"]):
        fits, beyond = (before_start([*option, str(tokens)], config) for tokens in (most, most + 1))
        assert not any("positions" in each for each in fits)
        told = next(each for each in beyond if "positions" in each)
        assert f"{option[-1]} has {most + 1} tokens" in told and str(most) in told
