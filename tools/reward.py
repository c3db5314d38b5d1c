#!/usr/bin/env python
"""Score texts or token files with a reward model.

    python tools/reward.py runs/reward --texts answers.jsonl --output scored.jsonl
    python tools/reward.py runs/reward --tokens data/answers --output data/answers_rewards.npy

A line of --texts is an object with the text under --key. Its copy in the output has the number under "reward". A token
file gets a .npy file of one number per document. The number is the value of the last token.
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

from tools.data.command import run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="RUN", help="run or checkpoint of the reward model")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--texts", metavar="FILE", help="JSON lines")
    given.add_argument("--tokens", metavar="PREFIX", help="token file, without .bin and .idx")
    add("--key", default="text", help="key of the text (default: %(default)s)")
    add("--output", required=True, metavar="FILE", help=".jsonl of --texts, .npy of --tokens")
    add("--overwrite", action="store_true", help="replace the output")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron import api
    from megatron.data.errors import DataError
    from megatron.data.token_file import TokenFile
    from megatron.data.tokenizer import build_tokenizer

    output = Path(given.output)
    if output.exists() and not given.overwrite:
        raise DataError(output, "it must not exist yet", "use another --output, or --overwrite")
    if output.suffix != (".npy" if given.tokens else ".jsonl"):
        ending = ".npy with --tokens" if given.tokens else ".jsonl with --texts"
        raise DataError(output, f"its name must end with {ending}", "give another --output")
    model = api.open_model(given.model)
    if model.config.objective.type != "reward_model":
        rule = f"it must be a reward model, and its objective.type is {model.config.objective.type}"
        raise DataError(given.model, rule, "train one with objective.type=reward_model")
    part = output.with_name(f"{output.stem}.{os.getpid()}{output.suffix}")  # a file under the final name is complete
    if given.tokens:
        file = TokenFile(given.tokens)
        rewards = [model.reward(file[number]) for number in range(len(file))]
        np.save(part, np.array(rewards, np.float32))
    else:
        rewards, tokenizer = [], build_tokenizer(model.config.tokenizer)
        records = [*_records(Path(given.texts), given.key)]
        with part.open("w", encoding="utf-8") as written:
            for record in records:
                rewards.append(model.reward(tokenizer.encode(record[given.key])))
                written.write(json.dumps({**record, "reward": rewards[-1]}, ensure_ascii=False) + "\n")
    os.replace(part, output)
    return {"output": str(output), "texts": len(rewards), "mean": float(np.mean(rewards)) if rewards else None}


def _records(path: Path, key: str) -> Iterator[dict[str, Any]]:
    from megatron.config.foreign_json import parse_json
    from megatron.data.errors import DataError

    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = parse_json(line)
            except (ValueError, RecursionError):
                record = None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str) or not text:
                rule = f"it must be a JSON object with a text under the key {key!r}"
                raise DataError(f"{path}:{number}", rule, "correct the line, or give --key")
            yield record


def show(result: dict) -> None:
    mean = "" if result["mean"] is None else f", {result['mean']:.4g} on average"
    print(f"{result['output']}: {result['texts']:,} rewards{mean}")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
