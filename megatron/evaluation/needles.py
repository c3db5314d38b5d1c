"""Needles in haystacks: whether a model finds one sentence in a long text, by the text's length and its depth there.

A text has exactly the given number of tokens of the model's own tokenizer. It has plain sentences, one with a number,
and at the end a question for that number. Sentences, numbers and places follow from a seed, so nothing is loaded."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.file_access import replace_file
from megatron.data.tokenizer import Tokenizer
from megatron.evaluation.scoring import Scorer, Text
from megatron.report.figures import HeatMap, save_heat_maps

from .select import TaskError

THINGS = (
    "anchor basket bridge button camera candle cloud dragon engine feather forest garden island ladder mirror mountain "
    "paper pencil river rocket saddle silver stone ticket violin wagon window yellow zebra"
).split()
PLACES = ("above", "behind", "below", "beside", "near", "under")
CHOICES = 4  # numbers to choose the right one from
DIGITS = 5


@dataclass(frozen=True)
class Haystack:
    """One question.

    Attributes:
        prompt: all tokens up to the answer.
        choices: tokens of the answers, the right one first. Only that number is in the prompt.
    """

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cell:
    """Results for all texts of one length with the needle in one depth."""

    length: int
    depth: float  # per cent of the haystack before the needle
    texts: int
    found: float  # share of texts in which each token of the answer is the likeliest
    chosen: float  # share of texts whose answer is the likeliest of `CHOICES`. A guess is right in 1 / `CHOICES`.
    loss: float  # of the answer's tokens, in nats per token


def haystack(tokenizer: Tokenizer, length: int, depth: float, number: int, seed: int = 0) -> Haystack:
    """A text from which the model reads `length` tokens: all but the last token of the longest answer.

    Args:
        depth: per cent of the sentences before the needle. The first one, which may be cut, always comes before it.
        number: of the text. Each has other sentences and another answer, the same ones at every depth.

    Raises:
        TaskError: needle and question need more tokens.
    """
    draw = random.Random(f"{seed} {length} {number}")
    thing = draw.choice(THINGS)
    numbers = [str(each) for each in draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), CHOICES)]
    needle = tokenizer.encode(f" The number of the {thing} is {numbers[0]}.")
    question = tokenizer.encode(f" What is the number of the {thing}? The number of the {thing} is")
    choices = tuple(tuple(tokenizer.encode(f" {each}")) for each in numbers)
    room = length + 1 - len(needle) - len(question) - max(map(len, choices))
    if room < 0:
        raise TaskError(f"--needles {length}: must be at least {length - room} tokens for the needle and the question")
    sentences: list[list[int]] = []
    while sum(map(len, sentences)) < room:
        one, other = draw.sample([each for each in THINGS if each != thing], 2)
        sentences.append(tokenizer.encode(f" The {one} is {draw.choice(PLACES)} the {other}."))
    if sentences:
        sentences[0] = sentences[0][sum(map(len, sentences)) - room :]  # the text begins within a sentence
    place = max(round(len(sentences) * depth / 100), 1)
    parts = [*sentences[:place], needle, *sentences[place:], question]
    return Haystack(tuple(token for part in parts for token in part), choices)


def needles(
    scorer: Scorer, tokenizer: Tokenizer, lengths: Sequence[int], depths: Sequence[float], texts: int, seed: int = 0
) -> list[Cell]:
    """A cell for each length and depth. All ranks call it with the same arguments."""
    cells = []
    for length in lengths:
        for depth in depths:
            made = [haystack(tokenizer, length, depth, number, seed) for number in range(texts)]
            asked = [Text(each.prompt + answer, len(answer)) for each in made for answer in each.choices]
            scores = iter(scorer.score(asked))
            rows = [[next(scores) for _ in each.choices] for each in made]
            logs = [[score.log_likelihood for score in row] for row in rows]
            found = sum(row[0].greedy for row in rows) / texts
            chosen = sum(row[0] > max(row[1:]) for row in logs) / texts
            tokens = sum(len(each.choices[0]) for each in made)
            cells.append(Cell(length, depth, texts, found, chosen, -sum(row[0] for row in logs) / tokens))
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Lines of lengths, columns of depths: the shares found and chosen, and the answer's loss."""
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    head = "tokens".rjust(8) + "".join(f"{depth:>14g} %" for depth in depths)
    lines = [f"needle found / chosen of {CHOICES} / loss per token of the answer, by depth", head]
    for length in dict.fromkeys(cell.length for cell in cells):
        own = {cell.depth: cell for cell in cells if cell.length == length}
        row = (f"{own[depth].found:.2f}/{own[depth].chosen:.2f}/{own[depth].loss:.2f}" for depth in depths)
        lines.append(f"{length:>8,}" + "".join(each.rjust(16) for each in row))
    return "\n".join(lines)


def write(file: Path, cells: Sequence[Cell], facts: dict[str, Any]) -> Path:
    """Write the cells as JSON, and next to it a picture. Returns the picture's path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps({"facts": facts, "needles": [vars(cell) for cell in cells]}, indent=1) + "\n")
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    maps = []
    for name in ("found", "chosen"):
        values = [[getattr(cell, name) for cell in cells if cell.depth == depth] for depth in depths]
        rows = [f"{depth:g} %" for depth in depths]
        maps.append(HeatMap(name, values, "tokens", "depth", rows=rows, names=[f"{each:,}" for each in lengths]))
    save_heat_maps(file.with_suffix(".png"), maps, title="needles in haystacks", most=1.0, middle=0.5)
    return file.with_suffix(".png")
