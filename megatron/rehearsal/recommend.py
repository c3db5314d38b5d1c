"""The recommended layout of every ready configuration on a host and on a small cluster, as a page of the documentation.

The plan's formulas propose layouts, the fastest first, and a rehearsal decides. A JSON file next to the page keeps the
results with a digest of the configuration's values. A row is computed again if they have changed."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron.config.source.files import gather
from megatron.model.costs.describe import totals
from megatron.parallel.layout.layout import Layout
from megatron.plan.advice import why_nothing_fits
from megatron.plan.candidate import Candidate, on_device
from megatron.plan.devices import cluster, known_devices
from megatron.plan.search import Answers, Plan, Question

from .command import in_own_process
from .report import describe_rank, kinds_of_ranks

GPU, SIZES = "h100", (8, 64)
# Parts of configurations, models of a few thousand parameters, tutorials.
LEFT_OUT = ("layouts", "test", "continual", "curation", "ladder.yml")
PARTS = ("family.yml", "suite.yml")  # what the files of a family extend
QUICK = "quickstart"  # whose tokenizer is trained by the tutorial
VOCABULARY = "model.vocab_size=4096"
TRIES = 8  # layouts that are rehearsed before the search for one is given up

HEAD = """# Recommended layouts

For every ready configuration: the fastest layout that `tools/plan.py` finds on 8 and on 64 H100 (one and eight hosts,
InfiniBand NDR). A [rehearsal](planning.md#rehearsal) of one rank of each kind shows that it fits. A layout that takes
more than 90 % of a device's memory is named only if it is 11 % faster than all that take less. The median error of the
formulas' times is 11 %. `memory` is the prediction, and the rehearsal's count with its allowance. A device has
79.1 GiB. The formulas give tokens per second and MFU. [Planning](planning.md) says how far they can be trusted. Where a
configuration sets no precision, it is bf16.

`t` is tensor, `p` pipeline, `c` context and `e` expert parallelism. `f` says that the ranks that share sequences share
matrices, too. `mb` is the micro-batch, and the last word is the recomputation.

`deepy plan recommend` writes this page, and `recommended_layouts.json` with the same in full. It computes the
rows whose files have changed or that were not rehearsed. It can be stopped and continued. Given names, it computes only
those rows.

Up to eight layouts are rehearsed for a row: the fastest that are expected to fit by the rehearsals before, also with
more recomputation than the formulas ask for. The last one is the layout that is expected to need least.

A rehearsal runs the program of CPUs, which keeps more than a GPU's fused kernels do. Where the two figures are far
apart, a larger micro-batch may fit. At ZeRO 3 a step takes at least what DeepSpeed's Python takes for its tensors, by
the one host where it was measured ([Planning](planning.md#how-memory-and-time-are-predicted)).

"""


def ready(folder: Path) -> list[Path]:
    """The configurations that are whole runs, in order."""
    found = sorted(folder.rglob("*.yml"))
    return [each for each in found if each.name not in PARTS and each.relative_to(folder).parts[0] not in LEFT_OUT]


def name_of(path: Path, folder: Path) -> str:
    """Name of a row."""
    return path.relative_to(folder).with_suffix("").as_posix()


def digest(path: Path) -> str:
    """Hash of a configuration's values."""
    values = [source.values for source in gather([str(path)], _overrides(path))]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _overrides(path: Path) -> list[str]:
    return [VOCABULARY] if path.name.startswith(QUICK) else []


def found(path: Path, formulas: bool = False) -> dict[str, Any]:
    """A row as JSON.

    Args:
        formulas: use the fastest layout of the formulas, without rehearsals.
    """
    row: dict[str, Any] = {"digest": digest(path), "parameters": None}
    for devices in SIZES:
        question = Question.of([str(path)], _overrides(path), cluster(devices, GPU))
        row["parameters"] = totals(question.base).parameters
        row[str(devices)] = best(question, formulas)
    return row


def best(question: Question, formulas: bool = False) -> dict[str, Any]:
    """The fastest layout that rehearses without running out, or under `none` why there is none."""
    answers, size = question.answers(), question.at.device.bytes
    if not answers.plans:
        problem = why_nothing_fits(question, answers, dict(known_devices()[0]))
        return {"none": problem.rule, "fix": problem.fix}
    left = sorted(forms(question, answers), key=lambda plan: plan.turn)
    if formulas:
        return proposed(left[0])
    excess, tried = Excess(), list[str]()
    while left and len(tried) < TRIES:
        likely = (plan for plan in left if excess.expected(plan) <= size)
        leanest = min(left, key=excess.expected)  # which the last try is for, so that no other would have done
        plan = leanest if len(tried) == TRIES - 1 else next(likely, leanest)
        left.remove(plan)
        own = {**proposed(plan), **rehearsed(question, plan.choice)}
        if own["rehearsed"] <= size:
            return {**own, "tried": tried}
        tried.append(f"{plan.choice}: {own['rehearsed'] / 2**30:.1f} GiB")
        excess.learn(plan, own["rehearsed"])
    return {"none": "no layout rehearses without running out", "fix": "use more devices", "tried": tried}


def forms(question: Question, answers: Answers) -> Iterator[Plan]:
    """The layouts that fit, also with more recomputation than the formulas need."""
    for plan in answers.plans:
        yield plan
        modes = plan.choice.modes
        for mode in modes[modes.index(plan.choice.recompute) + 1 :]:
            yield question.judge(replace(plan.choice, recompute=mode))


@dataclass
class Excess:
    """Largest ratio of rehearsed to predicted memory of a micro-batch, by mode of recomputation. For example, logits of
    unfused attention are kept by all layers, or exist in one layer at a time."""

    factors: dict[str, float] = field(default_factory=dict)

    def expected(self, plan: Plan) -> float:
        """Bytes of a layout that is not rehearsed yet."""
        return plan.memory.total + (self.factors.get(plan.choice.recompute, 1.0) - 1) * plan.memory.passing

    def learn(self, plan: Plan, found: float) -> None:
        """Learn from the bytes of a rehearsal."""
        mode, factor = plan.choice.recompute, 1 + (found - plan.memory.total) / plan.memory.passing
        self.factors[mode] = max(self.factors.get(mode, 1.0), factor)


def proposed(plan: Plan) -> dict[str, Any]:
    """The formulas' figures of a layout."""
    return {
        "layout": vars(plan.choice),
        "planned": round(plan.memory.total),
        "tokens_per_second": round(plan.tokens_per_second),
        "mfu": round(plan.mfu, 4),
    }


def rehearsed(question: Question, choice: Candidate) -> dict[str, Any]:
    """Bytes of the rank that needs most, with the allowance, and the cost of the rehearsal: seconds of processor time
    of all ranks, and the bytes of the largest process."""
    config, ranks = question.resolved(choice).config, question.at.devices
    config = on_device(config, question.at.device.name != "cpu")
    layout = Layout.of(config, ranks)
    seen = {rank: in_own_process(config, ranks, rank) for rank in kinds_of_ranks(config, layout)}
    needs = [describe_rank(config, layout, rank, each, question.at.device)["memory"] for rank, each in seen.items()]
    return {
        "rehearsed": max(each["total"] for each in needs),
        "processor_seconds": round(sum(each.processor for each in seen.values()), 1),
        "process": max(each.host for each in seen.values()),
    }


def whole(row: dict[str, Any]) -> bool:
    """Whether its layouts were rehearsed."""
    return all("rehearsed" in row[str(devices)] or "none" in row[str(devices)] for devices in SIZES)


def renewed(
    folder: Path, rows: dict[str, Any], names: Iterable[str] = (), formulas: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """All rows in order, each with its name. With `names` only these are computed again, otherwise rows in `rows` whose
    files have changed or that were not rehearsed.

    Raises:
        ConfigError: a configuration is wrong by itself.
    """
    wanted = set(names)
    for path in ready(folder):
        name = name_of(path, folder)
        kept = rows.get(name)
        current = kept is not None and kept["digest"] == digest(path) and (formulas or whole(kept))
        keep = kept is not None and (current if not wanted else name not in wanted)
        yield name, kept if kept is not None and keep else found(path, formulas)


def cells(own: dict[str, Any]) -> list[str]:
    """The layout, its memory by formulas and rehearsed, tokens per second and MFU."""
    if "none" in own:
        return ["none fits", "", "", ""]
    seen = f"{own['rehearsed'] / 2**30:.0f}" if "rehearsed" in own else "?"
    memory = f"{own['planned'] / 2**30:.0f} / {seen} GiB"
    return [str(Candidate(**own["layout"])), memory, f"{own['tokens_per_second']:,}", f"{own['mfu']:.0%}"]


def line(name: str, row: dict[str, Any]) -> str:
    """A line of the table."""
    size = row["parameters"]
    texts = [f"`{name}`", f"{size / 1e9:,.2f} B" if size >= 1e8 else f"{size / 1e6:,.1f} M"]
    for devices in SIZES:
        texts += cells(row[str(devices)])
    return f"| {' | '.join(texts)} |"


def reasons(rows: dict[str, Any]) -> list[str]:
    """Why there is no layout, and the cost of the rehearsals."""
    told = []
    for name, row in rows.items():
        for devices in SIZES:
            if "none" in row[str(devices)]:
                own = row[str(devices)]
                tried = f" ({'; '.join(own['tried'])})" if own.get("tried") else ""
                text = f"- `{name}` on {devices}: {own['none']}{tried}. Fix: {own['fix']}."
                told.append(fill(text, 120, subsequent_indent="  "))
    open_rows = [f"`{name}`" for name, row in rows.items() if not whole(row)]
    if open_rows:
        told += [
            "",
            "Not rehearsed so far (`?` in the table):",
            "",
            fill(f"- {', '.join(open_rows)}", 120, subsequent_indent="  "),
        ]
    cost = [row[str(devices)] for row in rows.values() for devices in SIZES if "rehearsed" in row[str(devices)]]
    if cost:
        seconds, largest = (max(each[key] for each in cost) for key in ("processor_seconds", "process"))
        told += [
            "",
            f"The rehearsal of a layout took at most {seconds:,.0f} s of processor time for all its ranks, and a "
            f"process {largest / 2**30:.2f} GiB.",
        ]
    return told


def page(rows: dict[str, Any]) -> str:
    """The whole page."""
    titles = ["configuration", "parameters"]
    for devices in SIZES:
        titles += [f"on {devices}", "memory", "tokens/s", "MFU"]
    rule = "|" + "|".join(["---", "--:", *["---", "--:", "--:", "--:"] * len(SIZES)]) + "|"
    table = [f"| {' | '.join(titles)} |", rule, *(line(name, row) for name, row in rows.items())]
    return HEAD + "\n".join([*table, "", "## Where nothing fits", "", *reasons(rows)]) + "\n"
