"""Train peers on slow links while one joins, one is cut off and one is killed, and repeat their ledger.

    python -m bench peer-events --out build/events

Links, device and data are as with `python -m bench slow-links`, and root is needed too. One peer has two tensor
parallel ranks, another one two ranks with ZeRO 3, and the others one rank. In the middle of a round

- the last peer starts, for the first time (round 1),
- the link of another one is cut until the others have the line of the round (round 2),
- the ranks of the ZeRO 3 peer are killed, and started again at once (round 3).

Then a replay without links and faults is started for each peer. It must end with the bits of the run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.links.slow_links import BATCH, one_peer, served, values_of, write_corpus
from bench.links.wire import Wire
from bench.runner import Result, grid, in_folder
from megatron.testing.ranks import RankPool

WAIT = 300.0  # seconds for a line
Lives = dict[str, RankPool]


def options(parser: argparse.ArgumentParser) -> None:
    number = parser.add_argument
    number("--peers", type=int, default=8, help="at least 5")
    number("--rounds", type=int, default=6, help="at least 5")
    number("--every", type=int, default=30)
    number("--rate", type=float, default=100e6, help="bits per second of each peer's link, in each direction")
    number("--round-trip", type=float, default=0.05, help="seconds between a peer and the server and back")
    number("--step", type=float, default=0.4, help="seconds of a device for a step")
    number("--timeout", type=float, default=8.0, help="peers.timeout")
    number("--out", type=Path, help="folder for the results")


def _layouts(count: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Ranks and sections of the configuration of each peer."""
    special: dict[int, tuple[int, dict[str, Any]]] = {
        0: (2, {"parallel": {"tensor": 2}}),
        1: (2, {"zero": {"stage": 3}, "training": {"micro_batch_size": BATCH // 2}}),
    }
    return {f"p{place}": special.get(place, (1, {})) for place in range(count)}


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    names, key = list(_layouts(given.peers)), folder / "key"
    write_corpus(folder)
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    keys = {
        "every": given.every, "members": names, "signature": "shared_key", "key_file": str(key), "quorum": 3,
        "state_every": 1000, "timeout": given.timeout, "patience": 120.0,
    }  # fmt: skip
    for run in ("run", "again"):
        (folder / run).mkdir()
    made = _run(given, folder, keys)
    lines = _lines(folder / "run/shared")
    again = {"replay": str(folder / "run/shared"), "folder": str(folder / "again/shared")}
    lives = Lives()
    try:
        with ThreadPoolExecutor(len(names)) as threads:
            jobs = [threads.submit(_life, given, folder, name, "again", {**keys, **again}, lives) for name in names]
            for job in jobs:
                job.result()
    finally:
        _close(lives)
    same = [_same(folder, given, "run", names[0], run, name) for run in ("run", "again") for name in names]
    made |= {"equal": sum(same), "lines": [[each["peer"] for each in line["members"]] for line in lines]}
    made["absent"] = [line["absent"] for line in lines]
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "peer_events.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    return Result(made, table(made, len(names)), 0 if all(same) else 1)


def table(made: Mapping[str, Any], peers: int) -> str:
    rows = [["round", "contributions", "absent"]]
    for round, (members, absent) in enumerate(zip(made["lines"], made["absent"], strict=True)):
        rows.append([str(round), str(len(members)), ", ".join(f"{name}: {why}" for name, why in absent.items())])
    said = (
        f"utilisation {made['utilisation']:.1%}, {made['seconds']:.2f} s in a step, sent {made['sent'] / 1e3:.1f} kB, "
        f"received {made['received'] / 1e3:.1f} kB. {made['equal']} of {2 * peers} runs have the same common weights"
    )
    return f"{grid(rows)}\n\n{said}"


def _run(given: argparse.Namespace, folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The run with its events."""
    names, shared = list(_layouts(given.peers)), folder / "run/shared"
    late, cut, killed = len(names) - 1, len(names) - 2, 1
    half = given.every * given.step / 2
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:
        wire = stack.enter_context(Wire.star(given.peers, given.rate, given.round_trip / 2))
        url = served(stack, wire, shared, names, Path(keys["key_file"]))
        lives = Lives()
        stack.callback(_close, lives)

        def start(place: int) -> Any:
            at = wire.places[place + 1].place
            return threads.submit(
                _life, given, folder, names[place], "run", {**keys, "folder": url}, lives, at, killed == place
            )

        jobs = [start(place) for place in range(late)]
        _until((shared / "rounds/00000000.json").exists)
        time.sleep(half)
        jobs.append(start(late))
        _until((shared / "rounds/00000001.json").exists)
        time.sleep(half)
        wire.cut(cut + 1, True)
        _until((shared / "rounds/00000002.json").exists)
        wire.cut(cut + 1, False)
        time.sleep(half)
        for process in lives[names[killed]].processes:
            process.kill()
        found = [job.result() for job in jobs]
        links = wire.bytes()[1:]
    steps = given.rounds * given.every
    return {
        "steps": steps,
        "utilisation": statistics.mean(each["computing"] / each["seconds"] for each in found),
        "seconds": max(each["seconds"] for each in found) / steps,
        "sent": statistics.mean(up for up, _ in links) / steps,
        "received": statistics.mean(down for _, down in links) / steps,
    }


def _life(
    given: argparse.Namespace, folder: Path, name: str, run: str, keys: Mapping[str, Any], lives: Lives,
    place: str = "", again: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Train as one peer to the end. `again`: it is started once more after it was killed."""
    ranks, sections = _layouts(given.peers)[name]
    values = values_of(given.rounds * given.every, folder, folder / run / name, 1, BATCH)
    values |= {"checkpoint": {"every": given.every}, "evaluation": {"at_end": True, "batches": 4}}
    for section, own in sections.items():
        values[section] = {**values.get(section, {}), **own}
    values["peers"] = {**keys, "name": name}
    lives[name] = RankPool(ranks)
    count, least = (given.peers - 1, given.step) if place else (0, 0.0)
    try:
        found: dict[str, float] = lives[name].run(
            one_peer, (place, str(folder / run), name, count, least, values, ranks)
        )[0]
        return found
    except (RuntimeError, OSError):
        if not again:
            raise
    lives[name].close()
    return _life(given, folder, name, run, keys, lives, place)


def _close(lives: Lives) -> None:
    for life in lives.values():
        life.close()


def _until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not there():
        if time.monotonic() > end:
            raise TimeoutError("the peers do not write a line")
        time.sleep(0.05)


def _lines(shared: Path) -> list[dict[str, Any]]:
    files = sorted((shared / "rounds").iterdir())
    return [json.loads(each.read_text(encoding="utf-8"))["signed"] for each in files]


def _same(folder: Path, given: argparse.Namespace, run: str, name: str, other: str, peer: str) -> bool:
    """Whether two peers end with the same common weights and velocity."""
    import torch

    from megatron.checkpoint import FragmentSpec, open_checkpoint

    step = f"checkpoints/step_{given.rounds * given.every:08d}"
    one, two = (open_checkpoint(folder / path / step) for path in (f"{run}/{name}", f"{other}/{peer}"))
    keys = [each for each in one.stored if each[1].startswith("outer_")]
    pairs = ([each.read(FragmentSpec.whole(each.tensors[key[0]], key[1])).data for each in (one, two)] for key in keys)
    return bool(keys) and all(torch.equal(*pair) for pair in pairs)
