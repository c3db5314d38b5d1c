#!/usr/bin/env python
"""Count what one rank, one host and the launcher do at a start, for worlds of 10 to 10,000 ranks, on one process.

    python tools/bench/growth.py --worlds 16 160 1600 10240

Nothing is started: process groups are pretended and counted, the checkpoint's manifest and index are those of a run of
so many ranks without its tensors, and the specification of the job is written as it would be sent. Each number is of
one rank (or of what the column says), with how it grows from the world before: 0 is not at all, 1 in proportion.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import tracemalloc  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import numpy as np  # noqa: E402

TENSORS, STATES, DEVICES = 100, ("master", "exp_avg", "exp_avg_sq"), 8
TENSOR, PIPELINE = 8, 2  # of the layout; the rest is data parallel
MESSAGE = "x" * 200  # a fingerprint of configuration and code


def groups(world: int) -> dict[str, float]:
    """Process groups of one rank: how many, their members together, and the time to find out who they are."""
    from megatron.parallel import mesh
    from megatron.parallel.layout import Layout

    made: list[int] = []

    def pretend(ranks: Sequence[int], *arguments: Any, **options: Any) -> object:
        made.append(len(ranks))
        return object()

    layout = Layout(tensor=TENSOR, pipeline=PIPELINE, data=world // (TENSOR * PIPELINE))
    with (
        mock.patch.object(mesh, "new_group", pretend),
        mock.patch.object(mesh.dist, "get_world_size", return_value=world),
        mock.patch.object(mesh.dist, "get_rank", return_value=world // 2),
    ):
        seconds, memory = costs(lambda: mesh.Mesh.build(layout))
    return {"groups": len(made) / 2, "members": sum(made) / 2, "groups: ms": seconds * 1e3, "groups: KiB": memory}


def launcher(world: int) -> dict[str, float]:
    """The launcher's message to one host, and the time to write those to all."""
    from megatron.launch.specification import Host, Specification

    hosts = tuple(Host(f"node{number:05d}", tuple(range(DEVICES))) for number in range(max(1, world // DEVICES)))
    job = Specification(hosts, ("python", "train.py"), "/job", configuration="x" * 20_000)
    begin = time.process_time()
    sizes = [len(json.dumps(job.to_message(number))) for number in range(len(hosts))]
    seconds = time.process_time() - begin
    return {"launch: KiB to a host": sizes[0] / 1024, "launch: ms for all hosts": seconds * 1e3}


def agreement(world: int) -> dict[str, float]:
    """What a rank hears where all tell all that they run the same thing."""
    return {"agreement: KiB heard": world * len(json.dumps(MESSAGE)) / 1024}


def write_checkpoint(folder: Path, world: int) -> int:
    """Manifest, index and meta data of a run of ZeRO 1 on so many ranks; bytes of the manifest and of the index."""
    from megatron.checkpoint.index import INDEX_NAME, Index
    from megatron.checkpoint.meta import Meta
    from megatron.checkpoint.names import MANIFEST_NAME, META_NAME
    from megatron.checkpoint.rankfile import FileRecord
    from megatron.checkpoint.table import ROW, Vocabulary
    from megatron.checkpoint.writer import manifest_bytes
    from megatron.parallel.shard import LogicalTensor, Role

    vocabulary = Vocabulary(
        [LogicalTensor(f"layers.{number}.weight", (world * 4,), Role.HIDDEN) for number in range(TENSORS)], list(STATES)
    )
    each = -(-TENSORS * world * 4 // world)  # elements of a rank: a run of the flattened parameters
    rows = []
    for rank in range(world):
        begin, end = rank * each, (rank + 1) * each
        while begin < end:
            tensor, start = divmod(begin, world * 4)
            count = min(end - begin, world * 4 - start)
            rows += [(tensor, state, 0, 0, 1, rank, start, count, 0, 0) for state in range(len(STATES))]
            begin += count
    table = np.array(rows, dtype=ROW)
    order = np.lexsort((table["start"], table["tensor_rank"], table["state"], table["tensor"]))
    records = [FileRecord(f"data/{rank:05d}.safetensors", 10**9, "0" * 32, "0" * 32, 0, 10**9) for rank in range(world)]
    contents = {INDEX_NAME: Index(vocabulary, table[order]).to_bytes(), META_NAME: Meta(1).to_bytes()}
    for name, content in {**contents, MANIFEST_NAME: manifest_bytes(records, contents)}.items():
        (folder / name).write_bytes(content)
    return (folder / MANIFEST_NAME).stat().st_size


def checkpoint(world: int) -> dict[str, float]:
    """A rank that opens a checkpoint of as many ranks as its own run has, and plans what it reads."""
    from megatron.checkpoint.fragment import FragmentSpec
    from megatron.checkpoint.read_plan import plan
    from megatron.checkpoint.reader import Checkpoint

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "step_00000001"
        place.mkdir()
        manifest = write_checkpoint(place, world)
        index = (place / "index.safetensors").stat().st_size
        opened: list[Checkpoint] = []
        seconds, memory = costs(lambda: opened.append(Checkpoint(place, check_index=False)))
        tensor = opened[0].index.vocabulary.tensors[0]
        wanted = [FragmentSpec(tensor, state, 0, 1, 2 * world, 4) for state in STATES]
        planning, _ = costs(lambda: [plan(opened[0].index, each) for each in wanted])
    return {
        "manifest: KiB read": manifest / 1024,
        "index: KiB mapped": index / 1024,
        "open: ms": seconds * 1e3,
        "open: KiB": memory,
        "plan a tensor's states: ms": planning * 1e3,
    }


def costs(action: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds of the first call, and KiB of the most that a second one held at once."""
    begin = time.process_time()
    action()
    seconds = time.process_time() - begin
    tracemalloc.start()
    action()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, most / 1024


def measure(world: int) -> dict[str, float]:
    return {**groups(world), **launcher(world), **agreement(world), **checkpoint(world)}


def table(worlds: Sequence[int], found: Sequence[dict[str, float]]) -> str:
    """Markdown: a line for each number, and the power of the world by which the last two differ."""
    lines = [
        "| of one rank | " + " | ".join(f"{world:,} ranks" for world in worlds) + " | grows as |",
        "| --- |" + " --- |" * (len(worlds) + 1),
    ]
    for name in found[0]:
        values = [each[name] for each in found]
        power = math.log(values[-1] / values[-2]) / math.log(worlds[-1] / worlds[-2]) if values[-2] else 0.0
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        lines.append(f"| {name} | " + " | ".join(shown) + f" | world^{power:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[16, 160, 1600, 10240])
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(arguments)
    if any(world % (TENSOR * PIPELINE) for world in given.worlds) or len(given.worlds) < 2:
        parser.error(f"--worlds must be two or more multiples of {TENSOR * PIPELINE}")
    measure(given.worlds[0])  # imports
    found = [measure(world) for world in given.worlds]
    print(json.dumps(dict(zip(map(str, given.worlds), found))) if given.json else table(given.worlds, found))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
