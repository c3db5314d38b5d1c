"""Shared parts of the data tools: errors with status 2, and `--json` output as one document."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron.config.file_access import OutputError
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.provenance import config_file
from megatron.data.skipped_batches import LeftOut
from megatron.pipes import piped
from megatron.report.ledger import left_out

SHARED: dict[str, dict[str, Any]] = {
    "--format": {"choices": ["lines", "array", "table", "text", "dat"]},
    "--append-eod": {"action": argparse.BooleanOptionalAction, "default": True},
    "--bad": {"choices": ["skip", "fatal"], "default": "skip"},
    "--split": {"default": "train", "choices": ["train", "validation", "test"]},
    "--workers": {"type": int, "default": len(os.sched_getaffinity(0))},
}


def run_tool(
    parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], Any], show: Callable[[Any], None]
) -> int | None:
    """Parse the command line, do the work, and print the result.

    Args:
        parser: gets the option `--json`.
        main: from the parsed options to a result that JSON can hold.
        show: prints a result for people.

    Returns:
        The exit status: 0, 1 if the result lists problems, 2 after a user error, which is explained on standard error,
        130 after Ctrl-C.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return piped(lambda: _run(parser.parse_args(), main, show))


def _run(options: argparse.Namespace, main: Callable[[argparse.Namespace], Any], show: Callable[[Any], None]) -> int:
    try:
        result = main(options)
    except (UserError, OutputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.json:
        json.dump(result, sys.stdout, indent=1, ensure_ascii=False)
        print()
    else:
        show(result)
    return 1 if isinstance(result, dict) and result.get("problems") else 0


def opened(model: str) -> Any:
    """The model of a run or a checkpoint (`megatron.api.open_model`).

    Raises:
        DataError: there is none, or it is damaged.
    """
    from megatron import api
    from megatron.checkpoint import CheckpointError

    try:
        return api.open_model(model)
    except CheckpointError as error:
        raise DataError(model, str(error), "give a run, or the folder of a checkpoint") from error


def run_left_out(given: str) -> LeftOut | None:
    """The batches that a run skipped, from its ledger. None without an entry.

    Args:
        given: the run's directory, or its config.yml.
    """
    found = left_out(config_file(given).with_name("ledger.jsonl"))
    return None if found is None else LeftOut.of(found)


def add_shared(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    """An option that several of these tools have. Help texts differ."""
    parser.add_argument(name, help=help, **SHARED[name])


def show_bad(count: int, examples: list) -> None:
    """Print how many records were skipped, and the first of them."""
    if count:
        print(f"{count:,} bad records were skipped, among them:")
        for name, line, reason in examples:
            print(f"  {name}:{line}: {reason}")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """The options that describe a tokenizer."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, a folder with one, a name on the hub, a model file, or an encoding's name",
    )
    group.add_argument(
        "--tokenizer-type",
        default="huggingface",
        choices=["huggingface", "sentencepiece", "tiktoken", "gpt2", "bytes", "characters"],
        help="kind (default: %(default)s)",
    )
    group.add_argument("--merges", metavar="FILE", help="gpt2: the merges next to the vocabulary")
    group.add_argument("--eod-token", metavar="TEXT", help="the end-of-document token (default: the tokenizer's own)")


def tokenizer_section(options: argparse.Namespace) -> Any:
    """The `tokenizer` section of the parsed options."""
    from megatron.config.sections.data import TokenizerSection

    return TokenizerSection(
        type=options.tokenizer_type, path=options.tokenizer, merges=options.merges, eod_token=options.eod_token
    )
