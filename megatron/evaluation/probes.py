"""Probe sets: texts whose losses are recorded one by one. Without torch, so that a start can check them."""

from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.file_access import parse_json
from megatron.config.sections.output import ProbeOptions
from megatron.config.sequences import shortest
from megatron.data.tokenizer import Tokenizer

LARGEST = 10_000  # most examples of a set: each has a number in every record


class ProbeError(ValueError):
    """A file of probes that cannot be used. The text has the rule."""


class Probe(NamedTuple):
    """Tokens, with the number of predicted ones at their end."""

    tokens: tuple[int, ...]
    scored: int


def longest_of(config: Config, options: ProbeOptions) -> int:
    """Tokens that the model reads at once whenever a set is scored: in the shortest stage since its first time."""
    saved, steps = config.checkpoint, config.training.steps
    first = min(saved.every or steps, *saved.steps, 0 if saved.log_spaced else steps, steps)
    return shortest(config, max(first - 1, 0) if options.every is None else 0)


def read_probes(path: str | Path, tokenizer: Tokenizer, longest: int) -> list[Probe]:
    """The examples of a file, one JSON object per line: {"text": ...}, or {"context": ..., "continuation": ...}.

    Every token of a text counts, the first one after the end-of-document token if the tokenizer has one. In the other
    form the continuation counts. A context's trailing spaces belong to it, as in the evaluation harness.

    Args:
        longest: tokens that the model reads at once.

    Raises:
        ProbeError: the file or a line cannot be used.
    """
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_probe(line, f"{path}:{number}", tokenizer, longest))
                if len(found) > LARGEST:
                    raise ProbeError(f"{path} must have at most {LARGEST} examples: take a part of them")
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(f"{path} must be a file of JSON lines: {error}") from error
    if not found:
        raise ProbeError(f"{path} must have at least one example")
    return found


def _probe(line: str, where: str, tokenizer: Tokenizer, longest: int) -> Probe:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ProbeError(f"{where} must be a JSON object: {error}") from error
    forms = ({"text"}, {"context", "continuation"})
    if not isinstance(value, dict) or not any(form <= value.keys() for form in forms):
        raise ProbeError(f'{where} must have "text", or "context" and "continuation"')
    if not all(isinstance(value[name], str) for form in forms for name in form & value.keys()):
        raise ProbeError(f"{where}: text, context and continuation must be strings")
    if "text" in value:
        ids = tokenizer.encode(value["text"])
        start = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
        made = Probe((*start, *ids), len(ids) if start else len(ids) - 1)
    else:
        context = value["context"].rstrip()
        rest = value["context"][len(context) :] + value["continuation"]
        before = len(tokenizer.encode(context))
        ids = tokenizer.encode(context + rest)
        made = Probe(tuple(ids), len(ids) - before)
    if not 0 < made.scored < len(made.tokens):
        raise ProbeError(f"{where} must have a token to predict, and one before it")
    if len(made.tokens) > longest + 1:
        raise ProbeError(f"{where} has {len(made.tokens)} tokens. It must have at most {longest + 1}: shorten it")
    return made
