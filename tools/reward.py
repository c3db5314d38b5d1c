#!/usr/bin/env python
"""Score texts or token files with a reward model.

    deepy reward runs/reward --texts answers.jsonl --output scored.jsonl
    deepy reward runs/reward --tokens data/answers --output data/answers_rewards.npy

A line of --texts is an object with the text under --key. Its copy in the output has the number under "reward". A token
file gets a .npy file of one number per document. The number is the value of the last token. A text is followed by the
end of a document, as `deepy data chat` writes answers, unless --no-append-eod is given.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

from tools.data.command import add_shared, opened, run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="RUN", help="run or checkpoint of the reward model")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--texts", metavar="FILE", help="JSON lines")
    given.add_argument("--tokens", metavar="PREFIX", help="token file, without .bin and .idx")
    add("--key", default="text", help="key of the text (default: %(default)s)")
    add_shared(parser, "--append-eod", "--texts: read the value at an end-of-document token (default: yes)")
    add("--output", required=True, metavar="FILE", help=".jsonl of --texts, .npy of --tokens")
    add("--overwrite", action="store_true", help="replace the output")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.config.file_access import keep_inputs, replacing
    from megatron.data.errors import DataError
    from megatron.data.token_file import TokenFile
    from megatron.data.tokenizer import tokenizer_for

    output, file = Path(given.output), TokenFile(given.tokens) if given.tokens else None
    keep_inputs([output], [given.texts] if file is None else [file.bin_path, file.idx_path])
    if output.exists() and not given.overwrite:
        raise DataError(output, "it must not exist yet", "use another --output, or --overwrite")
    if output.suffix != (".jsonl" if file is None else ".npy"):
        ending = ".jsonl with --texts" if file is None else ".npy with --tokens"
        raise DataError(output, f"its name must end with {ending}", "give another --output")
    model = opened(given.model)
    if model.config.objective.type != "reward_model":
        rule = f"it must be a reward model, and its objective.type is {model.config.objective.type}"
        raise DataError(given.model, rule, "train one with objective.type=reward_model")
    rewards: list[float] = []

    def score(place: str, ids: Any) -> float:
        try:
            rewards.append(model.reward(ids))
        except ValueError as error:
            raise DataError(place, str(error), "correct it, or remove it") from error
        if not np.isfinite(rewards[-1]):
            raise DataError(place, f"its value must be finite, not {rewards[-1]}", "use another checkpoint")
        return rewards[-1]

    with replacing(output) as written:
        if file is not None:
            for number in range(len(file)):
                score(f"{given.tokens}, document {number}", file[number])
            np.save(written, np.array(rewards, np.float32))
        else:
            tokenizer = tokenizer_for(model.config.tokenizer, given.append_eod)
            end = [tokenizer.eod_id] if given.append_eod else []
            for place, record in _records(Path(given.texts), given.key):
                reward = score(place, [*tokenizer.encode(record[given.key]), *end])
                written.write(json.dumps({**record, "reward": reward}, ensure_ascii=False).encode() + b"\n")
    return {"output": str(output), "texts": len(rewards), "mean": float(np.mean(rewards)) if rewards else None}


def _records(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of each line."""
    from megatron.config.file_access import parse_json
    from megatron.data.errors import DataError

    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                record = parse_json(line)
                json.dumps(record, ensure_ascii=False).encode()  # not with half of a surrogate pair
            except (ValueError, RecursionError):
                record = None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(record, dict) or not isinstance(text, str) or not text:
                rule = f"it must be a JSON object in Unicode, with a text under the key {key!r}"
                raise DataError(place, rule, "correct the line, or give --key")
            yield place, record


def show(result: dict) -> None:
    mean = "" if result["mean"] is None else f", {result['mean']:.4g} on average"
    print(f"{result['output']}: {result['texts']:,} rewards{mean}")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
