#!/usr/bin/env python
"""Run the example of continual pretraining: corpus A, then B, with and without replay.

    deepy continual
    deepy continual --divide 10        # a tenth of all steps, to see it run
    deepy continual --seeds 1,2,3      # all runs with each of these seeds: mean and standard deviation

Makes the quick start's data (A: the standard library's sources) and token files of English (B), and trains the five
runs of configs/continual/. It draws their validation losses on A and on B over time. Each step is a printed command
that can be typed. A finished run is not repeated.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.config import Config

Points = list[tuple[int, float]]
RUNS = Path("runs/continual")
FILES = Path("configs/continual")
# The runs in their order, and after which other run the time of each is counted in the picture.
AFTER: dict[str, str | None] = {"a": None, "annealed": None, "b": "annealed", "replay": "annealed", "infinite": None}
TITLES = {
    "annealed": "A, annealed",
    "b": "A, annealed, then B",
    "replay": "A, annealed, then B with 5 % of A",
    "infinite": "infinite schedule: B with 5 % of A from its constant phase on",
}
COLOURS = {"annealed": "grey", "b": "tab:red", "replay": "tab:blue", "infinite": "tab:green"}
LENGTHS = (
    "training.steps",
    "schedule.warmup_steps",
    "schedule.cooldown_steps",
    "schedule.decay_steps",
    "schedule.steps",
    "evaluation.every",
    "checkpoint.every",
)


@dataclass(frozen=True)
class ContinualStage:
    """One of the runs: its command line for train.py, and where it ends."""

    name: str
    words: tuple[str, ...]
    steps: int
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return _checkpoint(self.folder, self.steps)


def stages(
    root: Path, divide: int = 1, overrides: tuple[str, ...] = (), seed: int | None = None
) -> list[ContinualStage]:
    """All runs, in an order in which each finds what it starts from.

    Args:
        root: the repository, whose configs/continual/ is read.
        divide: all lengths in steps are divided by this.
        overrides: further changes of all configurations, and files of them.
        seed: of all runs, which then have a folder of their own. None leaves both as the files say.
    """
    from megatron.config import load

    found = []
    for name in AFTER:
        files = [str(root / FILES / f"{name}.yml"), *(word for word in overrides if word.endswith(".yml"))]
        others = [word for word in overrides if not word.endswith(".yml")]
        config = load(files, others, ranks=1, check_inputs=False).config
        place = [] if seed is None else seeded(config, seed)
        config = load(files, [*others, *place], ranks=1, check_inputs=False).config
        changes = shorter(config, divide) if divide > 1 else []
        steps = max(1, config.training.steps // divide)
        found.append(ContinualStage(name, (*files, *place, *changes, *others), steps, Path(config.run.dir)))
    return found


def seeded(config: Config, seed: int) -> list[str]:
    """Overrides that give a run this seed, and a folder next to the seed's other runs."""

    def moved(path: str) -> str:
        return str(RUNS / f"seed_{seed}" / Path(path).relative_to(RUNS))

    changes = [f"training.seed={seed}", f"run.dir={moved(config.run.dir)}"]
    for name in ("resume", "initialize_from"):
        value = getattr(config.checkpoint, name)
        if value and "step_" in value:
            changes.append(f"checkpoint.{name}={moved(value)}")
    return changes


def shorter(config: Config, divide: int) -> list[str]:
    """Overrides that divide every length in steps, and name the checkpoints that then exist."""
    changes = []
    for key in LENGTHS:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value and not (name == "decay_steps" and config.schedule.type != "infinite"):
            changes.append(f"{key}={max(1, value // divide)}")
    for name in ("resume", "initialize_from"):
        value = getattr(config.checkpoint, name)
        if value and "step_" in value:
            folder, step = value.rsplit("step_", 1)
            changes.append(f"checkpoint.{name}={folder}step_{int(step) // divide:08d}")
    if config.data.phases:
        phases = [{**phase.model_dump(), "start": phase.start // divide} for phase in config.data.phases]
        changes.append(f"data.phases={json.dumps(phases)}")
    return changes


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def train(every: list[ContinualStage], run: Callable[[ContinualStage], Any], log: Callable[[str], None]) -> None:
    """Train the runs that are not finished."""
    for stage in every:
        if stage.checkpoint.is_dir():
            log(f"done before: {stage.checkpoint} (remove {RUNS} to train again)")
            continue
        run(stage)
        if not stage.checkpoint.is_dir():
            raise FileNotFoundError(f"{stage.name} ended without its last checkpoint, {stage.checkpoint}")


def losses(every: list[ContinualStage]) -> dict[str, dict[str, Points]]:
    """Validation losses by run and by set, each over the number of steps since the very beginning.

    A run that starts from another one's weights counts from its last step. A run that resumes counts its own.
    """
    from megatron.report.curve import History

    ends = {stage.name: stage.steps for stage in every}
    found = {}
    for stage in every:
        earlier = AFTER[stage.name]
        before = ends[earlier] if earlier else 0
        history = History.read(stage.folder / "metrics.jsonl")
        found[stage.name] = {
            which: [(before + step, loss) for step, loss in points] for which, points in history.validation.items()
        }
    return found


def draw(found: dict[str, dict[str, Points]], path: Path) -> None:
    """Two fields, one above the other: the loss on A and the loss on B of every run."""
    from megatron.report.figures import new_figure, write_figure

    figure = new_figure(8, 6.5)
    fields = dict(zip(("a", "b"), figure.subplots(2, sharex=True)))
    for which, axes in fields.items():
        first = found["a"][which]
        axes.plot(*zip(*first), color="black", label="A, infinite schedule")
        for name, color in COLOURS.items():
            points = found[name][which]
            begin = [] if AFTER[name] else [point for point in first if point[0] < points[0][0]][-1:]
            axes.plot(*zip(*begin, *points), color=color, label=TITLES[name])
        axes.set(ylabel=f"validation loss on {which.upper()} (nats per token)")
        axes.grid(alpha=0.3)
    fields["a"].legend(fontsize=8)
    fields["b"].set(xlabel="step")
    write_figure(figure, path)


def table(*found: dict[str, dict[str, Points]]) -> str:
    """Last losses of each run as a Markdown table, with mean and sample standard deviation of several seeds."""

    def cell(name: str, which: str) -> str:
        last = [each[name][which][-1][1] for each in found]
        return f"{mean(last):.3f}" + (f" ± {stdev(last):.3f}" if len(last) > 1 else "")

    lines = ["| run | steps in all | validation loss on A | on B |", "|---|---|---|---|"]
    for name, title in TITLES.items():
        step = found[0][name]["a"][-1][0]
        lines.append(f"| {title} | {step} | {cell(name, 'a')} | {cell(name, 'b')} |")
    return "\n".join(lines)


def prepare(documents: int | None) -> None:
    """The quick start's data, and the English texts with the same tokenizer."""
    from tools import quickstart

    folder = quickstart.ROOT / "data" / "quickstart"
    quickstart.prepare(quickstart.Settings("configs/quickstart.yml", folder, 4096, 0.02, documents, ()))
    quickstart.heading("Corpus B: English")
    quickstart.call(["tools/data/prepare.py", "english", "--output", "data/continual", "--validation", "0.08"])
    for part in ("train", "validation"):
        output = f"data/continual/english_{part}"
        words = ["tools/data/tokenize.py", "--input", f"{output}.jsonl", "--output", output]
        words += ["--tokenizer", "data/quickstart/tokenizer.json", "--overwrite", "--quiet"]
        quickstart.call(words)


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _seeds(text: str) -> list[int]:
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text) or len(set(text.split(","))) < len(text.split(",")):
        raise argparse.ArgumentTypeError(f"must be different whole numbers, as in 1,2,3, not {text!r}")
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--divide", type=_count, default=1, metavar="N", help="all lengths in steps, divided by this")
    parser.add_argument("--documents", type=_count, metavar="N", help="use only the first N documents of A")
    parser.add_argument("--seeds", type=_seeds, metavar="S,...", help="train with each. The picture has the first")
    parser.add_argument("--picture", default=str(RUNS / "losses.png"), metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes of all configurations")
    given = parser.parse_args()
    from megatron.config import ConfigError
    from tools import quickstart

    os.chdir(quickstart.ROOT)  # paths of a configuration are seen from here
    machine = quickstart.look()
    try:
        seeds = given.seeds or [None]  # mistakes in configurations are seen before anything is made
        every = [stages(Path(), given.divide, (*machine.extra, *given.overrides), seed) for seed in seeds]
        prepare(given.documents)

        def run(stage: ContinualStage) -> None:
            quickstart.heading(f"Training: {stage.name}")
            quickstart.call(["./deepy.py", "--ranks", str(machine.ranks), "train.py", *stage.words])

        for runs in every:
            train(runs, run, print)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except (quickstart.Failed, FileNotFoundError) as error:
        print(f"continual: {error}", file=sys.stderr)
        return getattr(error, "status", 1)
    found = [losses(runs) for runs in every]
    draw(found[0], Path(given.picture))
    print(table(*found))
    print(f"\nthe validation losses over time: {given.picture}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
