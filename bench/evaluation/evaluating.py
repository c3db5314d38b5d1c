"""Measure scoring texts for benchmark tasks on one rank, and compare lm_eval's own Hugging Face backend.

    OMP_NUM_THREADS=1 python -m bench evaluating --shape pythia-14m --clock cpu

Both sides have the same weights, tokenizer and number of texts in a batch. They answer the same requests of the harness
in turns, in one process. Requests are questions with four answers each, as of a multiple choice task, and documents
whose every token counts, as of a perplexity. The texts are the Python standard library's. Building tasks and computing
metrics is the harness's work on both sides, and is not timed. The log-likelihoods must agree.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.data.tokenize import train_tokenizer
from bench.runner import Result, compare, comparison, in_folder, in_turns, share, timed
from bench.step.contenders import Ours, has, twin
from bench.step.setup import SHAPES, Setup, configuration

PEER = "lm_eval, hf"
TOLERANCE = 1e-4  # relative, of a text's log-likelihood in fp32
WORDS, QUESTION, ANSWER, ANSWERS = 4096, 600, 30, 4  # of the tokenizer, characters of each part, answers to a question
QUESTIONS, DOCUMENTS = "questions", "documents"


def requests(count: int, length: int) -> dict[str, list[Any]]:
    """The harness's requests.

    Args:
        count: of questions. The number of documents is a fourth of it.
        length: of a document, in characters.
    """
    from lm_eval.api.instance import Instance

    from megatron.data.corpus.registry import stdlib_texts

    needed = max(QUESTION + ANSWERS * ANSWER, length)
    texts = [each for record in stdlib_texts() if len(each := str(record["text"])) >= needed]
    asked: dict[str, list[Any]] = {QUESTIONS: [], DOCUMENTS: []}
    for number, text in enumerate(itertools.islice(itertools.cycle(texts), count)):
        question, rest = f"{number} {text[:QUESTION]}", text[QUESTION:]
        for answer in range(ANSWERS):
            arguments = question.rstrip(), " " + rest[answer * ANSWER :][:ANSWER].strip()
            asked[QUESTIONS].append(Instance("loglikelihood", {}, arguments, answer))
    for number, text in enumerate(itertools.islice(itertools.cycle(texts), count // 4)):
        asked[DOCUMENTS].append(Instance("loglikelihood_rolling", {}, (f"{number} {text[:length]}",), 0))
    return asked


def ours(setup: Setup, tokenizer: str, texts: int) -> Any:
    """The harness's view of our model."""
    import torch

    from megatron.checkpoint.format.communicator import SOLO
    from megatron.config.sections.data import TokenizerSection
    from megatron.data.tokenizer import build_tokenizer
    from megatron.evaluation.adapter import HarnessModel
    from megatron.evaluation.scoring import Leader, Scorer
    from megatron.parallel.layout.mesh import Mesh

    words = build_tokenizer(TokenizerSection(path=tokenizer))
    scorer = Scorer(configuration(setup), Ours(setup).engine, Mesh.single(), torch.device(setup.device), texts=texts)
    return HarnessModel(Leader(scorer, SOLO, words), words, setup.sequence)


def theirs(setup: Setup, tokenizer: str, texts: int) -> Any:
    """The harness's backend around transformers' model with the same weights."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    model = twin(configuration(setup)).eval()
    return HFLM(model, tokenizer=words, batch_size=texts, max_length=setup.sequence, device=setup.device)


def answers(side: Any, part: str, asked: Sequence[Any]) -> list[float]:
    """Log-likelihoods, in nats."""
    if part == DOCUMENTS:
        return side.loglikelihood_rolling(asked, disable_tqdm=True)
    return [value for value, _ in side.loglikelihood(asked, disable_tqdm=True)]


def check_equal(part: str, mine: Sequence[float], theirs: Sequence[float]) -> None:
    """Raises RuntimeError where log-likelihoods differ by more than the tolerance, or are not finite."""
    for own, other in zip(mine, theirs, strict=True):
        if not math.isfinite(own + other) or abs(own - other) > TOLERANCE * abs(other):
            raise RuntimeError(f"{part}: a log-likelihood of ours is {own!r}, of {PEER} {other!r}")


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Raises RuntimeError where the sides do not agree."""
    setup = Setup(given.shape, given.sequence, given.texts)
    tokenizer = train_tokenizer(folder / "tokenizer.json", WORDS)
    sides = {"ours": ours(setup, tokenizer, given.texts), PEER: theirs(setup, tokenizer, given.texts)}
    made: list[dict[str, Any]] = []
    for part, asked in requests(given.questions, 3 * given.sequence).items():
        first = {name: answers(side, part, asked) for name, side in sides.items()}  # not counted
        check_equal(part, first["ours"], first[PEER])

        ways: dict[str, Callable[[], float]] = {
            name: functools.partial(timed, answers, given.clock, side, part, asked) for name, side in sides.items()
        }
        what = f"score {len(asked)} {'answers' if part == QUESTIONS else part}, {given.shape}, {given.texts} in a batch"
        made += compare(what, "texts/s", in_turns(ways, given.rounds), len(asked))
    return comparison(made)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[each for each in SHAPES if has("eager", each)], default="pythia-14m")
    parser.add_argument("--texts", type=int, default=8, help="in a batch")
    parser.add_argument(
        "--questions", type=int, default=64, help="with four answers each, and a fourth of the number in documents"
    )
    share(parser, "--sequence", "--rounds", "--clock", rounds=3)
