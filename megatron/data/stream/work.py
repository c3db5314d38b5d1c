"""The process that tokenises a stream: `python -m megatron.data.stream.work`, started by a rank.

It gets its settings as a line of JSON on standard input, and ends when that is closed, which is when the rank ends. Its
only output is the error of a user, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any

from megatron import __version__
from megatron.config.arithmetic.shards import ShardError, describe_shards, list_shards
from megatron.config.sections.data import TokenizerSection

from ..corpus.encode import Treatment
from ..corpus.job import TokenizeJob, run
from ..errors import DataError
from .store import ShardInput

SAVE_EVERY = 0.5  # seconds until new tokens can be read
NICE = 5  # ranks have precedence


def job_of(settings: dict[str, Any], inputs: list[ShardInput]) -> TokenizeJob:
    """The tokenizing job of a stream."""
    return TokenizeJob(
        list(inputs),
        settings["prefix"],
        TokenizerSection(**settings["tokenizer"]),
        Treatment(key=settings["key"]),
        workers=settings["workers"] or max(1, len(os.sched_getaffinity(0)) // 2),
        save_every=SAVE_EVERY,
        version=__version__,
        identity=settings["shards"],
        at_once=True,
    )


def tokenise(settings: dict[str, Any]) -> None:
    """Tokenise a stream to its end, or the rest of it.

    Raises:
        DataError: its files have another state than in the configuration, or cannot be read.
    """
    stream = settings["stream"]
    try:
        shards, _ = list_shards(stream)
    except ShardError as error:
        raise DataError(stream, error.rule, error.fix) from OSError(str(error))
    if (now := describe_shards(shards)) != settings["shards"]:
        rule = f"its files have changed since the start: they were {settings['shards']}, and are {now}"
        raise DataError(stream, rule, "restore them: the order of a stream is fixed by its files") from OSError(rule)
    found = run(job_of(settings, [ShardInput.of(shard) for shard in shards])).progress
    bad = "".join(f"\n    {name}:{line}: {reason}" for name, line, reason in found.examples)
    made = f"{found.documents:,} documents, {found.tokens:,} tokens, {found.bad:,} bad records"
    print(f"{stream}: tokenised, {made}{bad}", file=sys.stderr, flush=True)


def main() -> int:
    settings = json.loads(sys.stdin.readline())

    def follow() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):  # a scheduler sends them to all, and the rank may need a last batch
        signal.signal(number, lambda *_: None)
    os.nice(NICE)
    with contextlib.suppress(OSError):  # a rank may be bound to some of the host's processors
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        tokenise(settings)
    except DataError as error:
        print(json.dumps([error.subject, error.rule, error.fix]), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the thread that follows the rank still reads
