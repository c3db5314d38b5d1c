"""Train peers over slow links, and compare their losses with one process, at equal tokens.

    python -m bench slow-links --no-link --out build/losses           losses, without links
    python -m bench slow-links --steps 60 --out build/links           utilisation and bytes
    python -m bench slow-links --table build/losses/slow_links.json build/links/slow_links.json --out docs

A link changes no loss, since all peers contribute to all rounds. So losses may be measured without one. Links need
root: each peer is in a network namespace, on a link with a rate and a delay (`bench/links/wire.py`). The folder is
served in another namespace, by the server of `deepy peers serve`. The data are the bytes of this repository's
documentation and Python files. "One process" reads the same global batches. No learning rate was tuned for any row.

A device computes a step in `--step` seconds, whatever this machine needs: peers that share two cores would measure the
cores. Utilisation is the share of the time between the first and the last step in which a peer computes, rather than
sends, receives or waits. Bytes are of packets on the peer's link.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from bench.learning.optimizers import MODEL, corpus
from bench.links.wire import Wire, enter
from bench.runner import Result, grid, in_folder

ONE, RATE, LENGTH, BATCH = "one process", 4e-3, 64, 4
INTERVALS = (1, 10, 30, 100)
AVERAGE = "average"  # diloco whose outer step takes the mean of the peers' weights
ROWS = ("gradients:1", *(f"{name}:{every}" for name in ("diloco", AVERAGE) for every in INTERVALS), "sparseloco:30")


class Clock:
    """Seconds that a peer computes.

    Args:
        least: seconds of a step.
    """

    def __init__(self, least: float) -> None:
        self.least, self.spent, self.since, self.begin, self.end = least, 0.0, 0.0, 0.0, 0.0

    def computing(self) -> None:
        self.since = time.perf_counter()

    def exchanging(self, least: float = 0.0) -> None:
        if (rest := least - (time.perf_counter() - self.since)) > 0:
            time.sleep(rest)
        self.spent += time.perf_counter() - self.since


def _watched(clock: Clock, ready: Callable[[], None]) -> ExitStack:
    """Have the hooks of peers use a clock, until the stack is closed."""
    from megatron.features.peers.gradients import SlotGradients
    from megatron.features.peers.hook import PeersHook
    from megatron.features.peers.slot_hook import SlotHook

    stack = ExitStack()

    def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

    def started(before: Any) -> Any:
        def on_start(*words: Any) -> None:
            before(*words)
            ready()
            clock.begin = time.perf_counter()
            clock.computing()

        return on_start

    def stepped(before: Any, least: float) -> Any:
        def after_step(*words: Any) -> None:
            clock.exchanging(least)
            before(*words)
            clock.end = time.perf_counter()
            clock.computing()

        return after_step

    def within(before: Any) -> Any:
        def run_step(hook: Any, trainer: Any, run: Any, *words: Any) -> Any:
            clock.exchanging()

            def own(*values: Any) -> Any:
                clock.computing()
                result = run(*values)
                clock.exchanging(clock.least)
                return result

            result = before(hook, trainer, own, *words)
            clock.computing()
            return result

        return run_step

    def applied(before: Any) -> Any:
        def apply(*words: Any) -> None:
            clock.computing()
            before(*words)
            clock.exchanging()

        return apply

    for hook, least in ((PeersHook, clock.least), (SlotHook, 0.0)):
        put(hook, "on_start", started)
        put(hook, "after_step", functools.partial(stepped, least=least))
    put(SlotHook, "run_step", within)
    put(SlotGradients, "apply", applied)
    return stack


def one_peer(
    place: str, folder: str, name: str, count: int, least: float, values: dict[str, Any], ranks: int = 1
) -> dict[str, float]:
    """Train as one of `count` peers in a network namespace, on this rank of the peer. Others of them may come later."""
    from megatron.testing.runs import train_on_this_rank

    clock = Clock(least)

    def ready() -> None:
        Path(folder, f"ready.{name}").touch()
        while len(list(Path(folder).glob("ready.*"))) < count:
            time.sleep(0.01)

    if place:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the machine has no address there
        enter(place)
    with _watched(clock, ready):
        rows = train_on_this_rank(values, [], ranks)
    if not rows:
        return {}  # not the first rank
    return {"loss": _loss(rows), "computing": clock.spent, "seconds": clock.end - clock.begin}


def _loss(rows: Sequence[dict[str, Any]]) -> float:
    return float([each["validation"]["validation"]["loss"] for each in rows if "validation" in each][-1])


def values_of(steps: int, data: Path, folder: Path, seed: int, batch: int) -> dict[str, Any]:
    training = {"steps": steps, "sequence_length": LENGTH, "global_batch_size": batch, "micro_batch_size": BATCH}
    return {
        "run": {"dir": str(folder)},
        "model": MODEL,
        "training": {**training, "seed": seed},
        "optimizer": {"lr": RATE, "weight_decay": 0.1},
        "schedule": {"type": "cosine", "warmup_fraction": 0.1, "min_lr_ratio": 0.1},
        "data": {"train": f"{data}/train", "validation": f"{data}/validation"},
        "evaluation": {"at_end": True, "batches": 64},
        "checkpoint": {"every": None, "at_end": False},
        "logging": {"console": "quiet", "curve": False, "predictions": False, "every": 10},
    }


def _train(given: argparse.Namespace, row: str, seed: int, data: Path, folder: Path, teams: Sequence[Any]) -> Any:
    """One run of all peers over the wire."""
    algorithm, every = row.split(":")
    steps = -(-given.steps // int(every)) * int(every)
    names, key = [f"p{place}" for place in range(given.peers)], folder / "key"
    folder.mkdir(parents=True)
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    keys = {
        "every": int(every), "algorithm": algorithm, "members": names, "signature": "shared_key", "key_file": str(key),
        "folder": str(folder / "shared"), "state_every": 1000,
    }  # fmt: skip
    if algorithm == AVERAGE:
        keys |= {"algorithm": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
    with ExitStack() as stack, ThreadPoolExecutor(given.peers) as threads:
        wire = None if given.no_link else stack.enter_context(Wire.star(given.peers, given.rate, given.round_trip / 2))
        if wire is not None:
            keys["folder"] = served(stack, wire, folder / "shared", names, key)
        jobs = []
        for place, (name, team) in enumerate(zip(names, teams, strict=True)):
            values = {**values_of(steps, data, folder / name, seed, BATCH), "peers": {**keys, "name": name}}
            at, least = (wire.places[place + 1].place, given.step) if wire is not None else ("", 0.0)
            jobs.append(threads.submit(team.run, one_peer, (at, str(folder), name, given.peers, least, values)))
        found = [job.result()[0] for job in jobs]
        links = wire.bytes()[1:] if wire is not None else []
    if len({each["loss"] for each in found}) > 1:
        raise RuntimeError(f"{row}: the peers end with different weights: {[each['loss'] for each in found]}")
    made = {"row": row, "seed": seed, "steps": steps, "corpus": _size(data), "loss": found[0]["loss"]}
    if not links:
        return made
    return made | {
        "utilisation": statistics.mean(each["computing"] / each["seconds"] for each in found),
        "seconds": max(each["seconds"] for each in found) / steps,
        "sent": statistics.mean(up for up, _ in links) / steps,
        "received": statistics.mean(down for _, down in links) / steps,
    }


def served(stack: ExitStack, wire: Wire, folder: Path, names: Sequence[str], key: Path) -> str:
    """The URL of a folder that is served in the wire's first namespace."""
    from megatron.features.peers.signing import Signer
    from megatron.features.peers.sockets import FolderServer

    signer, address = Signer(bytes.fromhex(key.read_text()), None), (wire.addresses[0], 7000)
    server = stack.enter_context(wire.places[0].call(FolderServer, folder, address, "peers", {*names}, signer))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    stack.callback(server.shutdown)
    return f"tcp://{address[0]}:{address[1]}"


def write_corpus(folder: Path) -> None:
    import numpy as np

    from megatron.data.token_file import TokenFileWriter

    for name, values in zip(("train", "validation"), corpus(), strict=True):
        with TokenFileWriter(folder / name, np.uint16) as writer:
            writer.append(values.numpy())


def _size(data: Path) -> int:
    """Bytes of the corpus. Losses of one corpus are compared."""
    return sum((data / f"{name}.bin").stat().st_size // 2 for name in ("train", "validation"))


def options(parser: argparse.ArgumentParser) -> None:
    number = parser.add_argument
    number("--peers", type=int, default=4)
    number("--rate", type=float, default=100e6, help="bits per second of each peer's link, in each direction")
    number("--round-trip", type=float, default=0.05, help="seconds between a peer and the server and back")
    number("--step", type=float, default=0.1, help="seconds of a device for a step")
    number("--steps", type=int, default=300, help="rounded up to whole rounds")
    number("--no-link", action="store_true", help="measure losses only, on this machine's disk")
    number("--seeds", type=int, nargs="+", default=[1, 2, 3])
    number("--only", nargs="+", default=[ONE, *ROWS], help="rows, as algorithm:every")
    number("--out", type=Path, help="folder for results and picture. Rows of an earlier call are not repeated")
    number("--table", type=Path, nargs="+", help="no run: show results of earlier calls")


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    if given.table:
        made = [row for path in given.table for row in json.loads(path.read_text(encoding="utf-8"))]
    else:
        made = _measured(given, folder)
    if given.out is not None:
        draw(given.out / "slow_links.svg", made)
    return Result(made, table(made))


def _measured(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from megatron.testing import ranks
    from megatron.testing.runs import train_on_this_rank

    kept = given.out / "slow_links.json" if given.out is not None else folder / "slow_links.json"
    made: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(folder)
    ranks.TIMEOUT = 3600.0  # seconds for a run
    teams = [ranks.RankPool(1) for _ in range(given.peers)]
    try:
        for seed in given.seeds:
            for row in given.only:
                if any((each["row"], each["seed"]) == (row, seed) for each in made):
                    continue
                place = folder / f"{row.replace(':', '_').replace(' ', '_')}_{seed}"
                if row == ONE and not given.no_link:
                    continue
                if row == ONE:
                    values = values_of(given.steps, folder, place, seed, BATCH * given.peers)
                    rows = ranks.on_ranks(1, train_on_this_rank, values, [], 1)[0]
                    made.append({
                        "row": row,
                        "seed": seed,
                        "steps": given.steps,
                        "corpus": _size(folder),
                        "loss": _loss(rows),
                    })
                else:
                    made.append(_train(given, row, seed, folder, place, teams))
                kept.write_text(json.dumps(made, indent=1), encoding="utf-8")
    finally:
        for team in teams:
            team.close()
    return made


def table(made: Sequence[dict[str, Any]]) -> str:
    """A row for each algorithm and interval: the median over seeds, and the range of losses."""
    heads = ["peers", "validation loss (range)", "above one process", "utilisation", "seconds", "sent", "received"]
    cells, longest = [heads], _longest(made)
    plain = {(each["corpus"], each["seed"]): each["loss"] for each in longest if each["row"] == ONE}
    for row in dict.fromkeys(each["row"] for each in made):
        losses = sorted(each["loss"] for each in longest if each["row"] == row)
        pairs = [(each["loss"], plain.get((each["corpus"], each["seed"]))) for each in longest if each["row"] == row]
        above = [loss - other for loss, other in pairs if other is not None]
        line = [_name(row), f"{statistics.median(losses):.3f} ({losses[0]:.3f} – {losses[-1]:.3f})" if losses else ""]
        line.append(f"{statistics.median(above):+.3f}" if row != ONE and above else "")
        linked = [each for each in made if each["row"] == row and "utilisation" in each]
        if linked:
            middle = {name: statistics.median(each[name] for each in linked) for name in linked[0] if name != "row"}
            line += [f"{middle['utilisation']:.1%}", f"{middle['seconds']:.2f}"]
            line += [f"{middle[name] / 1e3:.1f} kB" for name in ("sent", "received")]
        cells.append(line + [""] * (len(heads) - len(line)))
    return grid(cells)


def _longest(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    most = max(each["steps"] for each in made)
    return [each for each in made if each["steps"] == most]


def _name(row: str) -> str:
    algorithm, _, every = row.partition(":")
    return f"`{algorithm}`, H = {every}" if every else row


def draw(path: Path, made: Sequence[dict[str, Any]]) -> None:
    """Loss, utilisation and bytes over the interval."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, 3)
    plain = [each["loss"] for each in _longest(made) if each["row"] == ONE]
    if plain:
        panels[0].axhspan(min(plain), max(plain), color="0.8")
        panels[0].axhline(statistics.median(plain), color="0.4", label=ONE)
    kinds = (("loss", 1.0, _longest(made)), ("utilisation", 100.0, made), ("sent", 1e-3, made))
    algorithms = dict.fromkeys(each["row"].partition(":")[0] for each in made if each["row"] != ONE)
    for panel, (name, factor, rows) in zip(panels, kinds, strict=True):
        for algorithm in algorithms:
            groups: dict[int, list[float]] = {}
            for each in rows:
                kind, _, every = each["row"].partition(":")
                if kind == algorithm and name in each:
                    groups.setdefault(int(every), []).append(factor * each[name])
            at = sorted(groups)
            middle = [statistics.median(groups[h]) for h in at]
            span = [[m - min(groups[h]) for m, h in zip(middle, at)], [max(groups[h]) - m for m, h in zip(middle, at)]]
            panel.errorbar(at, middle, span, marker="o", markersize=4, capsize=2, label=algorithm)
    titles = ("validation loss, nats per byte", "utilisation, %", "sent by a peer in a step, kB")
    for panel, title in zip(panels, titles):
        panel.set(title=title, xscale="log", xlabel="steps between two exchanges (H)")
        panel.grid(alpha=0.3)
    panels[1].set(ylim=(0, 100))
    panels[2].set(yscale="log")
    panels[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "deepy"}):  # text as text, and the same bytes each time
        figure.savefig(path, metadata={"Date": None})
