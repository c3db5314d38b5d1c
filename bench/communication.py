"""Measure collectives on this machine, in the process groups of a run.

Groups of each axis are measured one by one, and all of them at once.

    ./deepy.py --ranks 4 bench/communication.py a.yml parallel.tensor=2 --output machine.yml [--picture FILE.png]
    ./deepy.py --hostfile hosts bench/communication.py a.yml --most 1G --output machine.yml
    python -m bench communication a.yml --hosts a:4,b:4 --output machine.yml        the same in one command
    ./deepy.py --hostfile hosts bench/communication.py a.yml --tune --output machine.yml [--backends ucc]

Each operation is measured in sizes from --least to --most, after a warm-up, with the run's own backend: gloo on CPUs,
NCCL or RCCL on GPUs. A group's time is the mean over its ranks. Of groups that work at the same time the slowest is
kept. Sizes and bandwidths are defined as in nccl-tests. `--compare OPERATION=FILE` adds the output of nccl-tests or of
the OSU micro-benchmarks. `deepy plan --machine` and `deepy communication --machine` read machine.yml.

`--tune` measures groups over several hosts instead: the backend's own algorithm and algorithms in two levels, in turns.
It writes the fastest one for each range of sizes. `parallel.communication.table: machine.yml` uses that table.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from bench.runner import parser_of  # noqa: E402
from megatron.config.problems import UserError  # noqa: E402
from megatron.parallel.messages.curve import OPERATIONS  # noqa: E402
from megatron.worker.job import (  # noqa: E402
    guarded,
    leave_process,  # noqa: E402
    read_job,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.training.world import World

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def size_of(word: str) -> int:
    """Bytes: 4096, 4K, 16M."""
    number, unit = (word[:-1], word[-1].upper()) if word[-1:].isalpha() else (word, "")
    if unit not in UNITS or not (number.isascii() and number.isdigit()) or not 4 <= int(number) * UNITS[unit] <= 2**36:
        raise argparse.ArgumentTypeError(f"must be a size such as 4096, 4K or 16M, of 4 bytes to 64G, not {word!r}")
    return int(number) * UNITS[unit]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="a.yml", help="files and overrides of the run")
    parser.add_argument("--hosts", help="start the ranks on these hosts, such as a:4,b:4 (or on this one: :4)")
    parser.add_argument("--least", type=size_of, default=2**10, help="first size (default 1K)")
    parser.add_argument(
        "--most", type=size_of, default=2**24, help="last size (default 16M). Each is 4 times the one before"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="approximate time for each point (default 0.5)")
    parser.add_argument(
        "--operations", default=",".join(OPERATIONS), help=f"some of {','.join(OPERATIONS)} (default: all)"
    )
    parser.add_argument("--output", default="machine.yml", help="file of the curves (default machine.yml)")
    parser.add_argument("--picture", help="draw bus bandwidths into this PNG file")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="OPERATION=FILE",
        help="output of nccl-tests or OSU to compare",
    )
    parser.add_argument("--tune", action="store_true", help="measure algorithms against each other, and choose")
    parser.add_argument("--backends", default="", help="with --tune: further backends of torch to try, such as ucc")


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options that follow the configuration, checked."""
    parser = parser_of(sys.modules[__name__], "deepy bench communication")
    given = parser.parse_intermixed_args(words)
    given.operations = given.operations.split(",")
    given.backends = [each for each in given.backends.split(",") if each]
    if given.backends and not given.tune:
        parser.error("--backends must go with --tune")
    if wrong := [each for each in given.operations if each not in OPERATIONS]:
        parser.error(f"--operations must be of {', '.join(OPERATIONS)}, not {', '.join(wrong)}")
    if given.least > given.most or not 0 < given.seconds <= 600:
        parser.error("--least must not be above --most, and --seconds must be above 0 and at most 600")
    return given


def measure(given: argparse.Namespace) -> int:
    """Start the ranks, which run this file as a script. It is the command without the launcher.

    Raises:
        UserError: there are no hosts.
    """
    hosts = read_options(given.words).hosts
    if not hosts:
        raise UserError(
            "--hosts must name the hosts and their ranks, such as --hosts a:4,b:4 (on this host: --hosts :4)"
        )
    return started(given.words, hosts)


def started(arguments: Sequence[str], hosts: str) -> int:
    """Start this script with deepy.py on hosts, and return its exit status."""
    from megatron.launch.command_line import main as launch

    lines = []
    for each in hosts.split(","):
        name, _, slots = each.partition(":")
        if not slots.isdigit() or not int(slots) or not all(part.isalnum() or part in "-._" for part in name):
            raise UserError(f"--hosts must be names with numbers of ranks, such as a:4,b:4, not {each!r}")
        lines.append((name, slots))
    words = [word for word in arguments if not word.startswith("--hosts=")]
    if "--hosts" in words:
        at = words.index("--hosts")
        del words[at : at + 2]
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    if behind := read_options(words[first:]).sources:  # the launcher would see options there
        raise UserError(f"files and overrides must come before the options: move {' '.join(behind)} to the front")
    if [name for name, _ in lines] == [""]:
        return launch(["--ranks", lines[0][1], __file__, *words])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "hosts")
        file.write_text("".join(f"{name} slots={slots}\n" for name, slots in lines))
        return launch(["--hostfile", str(file), __file__, *words])


def tuned(config: Config, world: World, options: argparse.Namespace) -> int:
    """Choose algorithms, on every rank. Only rank 0 writes and prints."""
    import torch.distributed as dist

    from bench.messages.curves import put
    from bench.messages.tuning import draw_tuned, tune, tuned_table
    from megatron.config.arithmetic.algorithm_table import OPERATIONS as TUNABLE
    from megatron.training.algorithms import hosts_of, pairs_of

    if missing := [each for each in options.backends if not dist.is_backend_available(each)]:
        raise UserError(f"--backends must be in this build of torch, and it lacks {', '.join(missing)}")
    chosen = [each for each in options.operations if each in TUNABLE]
    hosts = hosts_of(config, world)
    found = tune(
        world, hosts, options.least, options.most, options.seconds, options.backends, chosen, pairs_of(config, hosts)
    )
    if not world.is_main:
        return 0
    if not found.points:
        raise UserError(
            "there must be a group with equal numbers of ranks on several hosts (or islands of them, "
            "parallel.communication.island), or another backend (--backends): there is nothing to choose"
        )
    put(options.output, found.document())
    if options.picture:
        draw_tuned(options.picture, found)
    if options.json:
        print(json.dumps(found.document() | {"points": [vars(each) for each in found.points]}))
        return 0
    print(tuned_table(found))
    print(f"\nwritten: {options.output}" + (f", {options.picture}" if options.picture else ""))
    return 0


def main() -> int:
    """Measure, on every rank. Only rank 0 writes and prints."""
    words = sys.argv[1:]
    if "JOB_CONFIG" not in os.environ and (hosts := read_options(words).hosts):
        return started(words, hosts)
    config, place = read_job(check_inputs=False)
    options = read_options(list(place.own))
    if place.world_size == 1:
        raise UserError("one rank sends nothing: give --hosts, or start this file with ./deepy.py --ranks N")
    from bench.messages.collectives import measure
    from bench.messages.curves import compared, draw, present, put, table
    from megatron.training.algorithms import memory_of_hosts
    from megatron.training.world import joined

    with joined(config, place) as world:
        if world.is_main:
            present(options.output)
        with memory_of_hosts(config, print if world.is_main else (lambda *_: None)):
            if options.tune:
                return tuned(config, world, options)
            found = measure(world, options.operations, options.least, options.most, options.seconds)
    if not world.is_main:
        return 0
    put(options.output, found.document())
    rows = [compared(found.curves, word) for word in options.compare]
    if options.picture:
        draw(options.picture, found)
    if options.json:
        print(json.dumps(found.document() | {"compared": rows}))
        return 0
    print(table(found))
    for each in rows:
        print(f"\n{each['text']}")
    print(f"\nwritten: {options.output}" + (f", {options.picture}" if options.picture else ""))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    leave_process(piped(lambda: guarded(main)) or 0)
