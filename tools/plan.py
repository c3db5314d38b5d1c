#!/usr/bin/env python3
"""Find the layout for a run on a machine that need not be here: what fits, how fast, what it costs.

    python tools/plan.py a.yml --gpus 512 --gpu h100                     layouts that fit, the fastest first
    python tools/plan.py a.yml --gpus 512 --gpu a100 --network ib200 --price 1.8
    python tools/plan.py a.yml --gpus 64 --gpu h100 --why-not tensor=8,pipeline=2
    python tools/plan.py a.yml --gpus 64 --gpu mine --machine mine.yml   a device of your own

`--json` prints one JSON document. Exit status 2: nothing fits, or the configuration or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.config import ConfigError, Problem, split_arguments  # noqa: E402

_UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}


def search(options: argparse.Namespace) -> None:
    """Layouts that fit, the fastest first."""
    from megatron.plan.advice import nothing
    from megatron.plan.candidate import parse
    from megatron.plan.devices import cluster, known
    from megatron.plan.search import Question
    from megatron.plan.table import document, text

    files, overrides = _files(options)
    at = cluster(options.gpus, options.gpu, options.hosts, options.network, options.machine)
    named = parse(options.why_not) if options.why_not else None
    question = Question.of(files, overrides, at)
    answers = question.answers()
    if not answers.plans:
        raise ConfigError([nothing(question, answers, dict(known(options.machine)[0]))])
    if options.json:
        print(json.dumps(document(answers, options.price, named), indent=2))
    else:
        print(text(answers, options.price, named, options.disk, options.top))


def _files(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    files, overrides = split_arguments(options.arguments)
    if not files:
        raise ConfigError([Problem("", "must have a YAML file", "name one: a.yml", where="command line")])
    return list(files), list(overrides)


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 0 < int(word) <= 10**6):
        raise argparse.ArgumentTypeError(f"must be a number of devices from 1 to 1,000,000, not {word!r}")
    return int(word)


def _positive(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {word!r}")
    return number


def _bytes(word: str) -> float:
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", word.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 500TB, not {word!r}")
    return _positive(match[1]) * _UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="a.yml [key.path=value]", help="configuration of the run")
    parser.add_argument("--gpus", type=_count, required=True, help="devices in all")
    parser.add_argument("--gpu", default="h100", help="device: h100, a100, h200, b200, mi250x, mi300x, cpu, ...")
    parser.add_argument("--hosts", type=_count, help="hosts that have them (default: as few as can)")
    parser.add_argument("--network", help="between hosts: ib400 (default), ib200, roce, slingshot, ethernet")
    parser.add_argument("--machine", metavar="FILE", help="further devices and networks (megatron/plan/devices.yml)")
    parser.add_argument("--price", type=_positive, help="of a device for an hour")
    parser.add_argument("--disk", type=_bytes, help="room for checkpoints, such as 500TB")
    parser.add_argument("--why-not", metavar="tensor=8,...", help="what speaks against this layout")
    parser.add_argument("--top", type=_count, default=8, help="layouts to show")
    parser.add_argument("--json", action="store_true", help="one JSON document with all of them")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Answer one question; returns the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(each.startswith("-") for each in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.arguments += rest  # files and overrides after an option
    try:
        search(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        if options.json:
            print(json.dumps({"ok": False, "problems": [each.to_json() for each in error.problems]}, indent=2))
        return 2
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
