"""A reward model as a reward: the value of a prompt with its completion, computed in a verifier's process.

The model is a run or checkpoint of `objective.type: reward_model`, or a folder that transformers opens as a sequence
classifier with one output, such as an export."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.config.registry import load

CONFIG = "config.json"  # of a folder of transformers


def reward_model(
    prompt: str, completion: str, record: Mapping[str, Any], *, model: str, append_eod: bool = True, suffix: str = ""
) -> float:
    """The model's value at the end of the text, in fp32 on one thread.

    Args:
        append_eod: the value is read at an end-of-document token behind the text, as `deepy data chat` writes answers.
        suffix: text between completion and that token, such as the template's end of a turn, where `align.stop` is it:
            a completion has no stop text.
    """
    encode, score = _opened(model, append_eod)
    return score(encode(prompt + completion + suffix))


@lru_cache(maxsize=4)
def _opened(path: str, append_eod: bool) -> tuple[Callable[[str], list[int]], Callable[[list[int]], float]]:
    if not (Path(path) / CONFIG).is_file():
        from megatron.data.tokenizer import tokenizer_for

        own = load("megatron.api:open_model")(path)
        if own.config.objective.type != "reward_model":
            raise ValueError(f"{path} must be a reward model, and its objective.type is {own.config.objective.type}")
        tokenizer = tokenizer_for(own.config.tokenizer, append_eod)
        end = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        return lambda text: [*tokenizer.encode(text), *end], own.reward
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    theirs = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    if theirs.config.num_labels != 1:
        raise ValueError(f"{path} must have one output, and has {theirs.config.num_labels}")
    theirs.config.pad_token_id = None  # the last token counts, even where it is the padding of batches
    words = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if append_eod and words.eos_token_id is None:
        raise ValueError(f"{path} has no end-of-text token: use append_eod: false")
    last = [words.eos_token_id] if append_eod else []

    def score(ids: list[int]) -> float:
        with torch.no_grad():
            return float(theirs(torch.tensor([ids])).logits[0, 0])

    return lambda text: [*words.encode(text, add_special_tokens=False), *last], score


def pinned(rewards: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rewards whose models are named by checkpoint, so that a newer one of the run changes nothing, and a SHA-256 of
    the files of each model.

    Raises:
        CheckpointError: there is none.
    """
    from megatron.checkpoint.save.store import find_checkpoint

    found, hashes = list[dict[str, Any]](), dict[str, str]()
    for each in rewards:
        own = dict(each)
        if own["type"] == "reward_model":
            folder = Path(own["options"]["model"])
            folder = folder if (folder / CONFIG).is_file() else find_checkpoint(folder)
            own["options"] = {**own["options"], "model": str(folder)}
            hashes[str(folder)] = _hash(folder)
        found.append(own)
    return found, hashes


def _hash(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder)} {digest}\n".encode())
    return whole.hexdigest()
