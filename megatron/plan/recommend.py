"""The recommended layout of every ready configuration on a host and on a small cluster: a page of the manual."""

from __future__ import annotations

from pathlib import Path

from megatron.config import ConfigError
from megatron.model.describe import totals

from .advice import NEAR
from .devices import cluster
from .search import Question

GPU, SIZES = "h100", (8, 64)
# Parts of configurations, models of a few thousand parameters, tutorials.
LEFT_OUT = ("layouts", "test", "continual", "ladder.yml")

HEAD = """# Recommended layouts

For every ready configuration, the fastest layout that `tools/plan.py` finds on 8 and on 64 H100 (one and eight hosts,
InfiniBand NDR), with at most 90 % of a device's memory; [Planning](planning.md) says what the figures mean and how far
they can be trusted. Where a configuration says nothing of precision, it is bf16. `t` is tensor, `p` pipeline, `c`
context and `e` expert parallel; `mb` the micro-batch; then what is recomputed. `python tools/plan.py recommend` writes
this page.

ZeRO 3 is predicted too well for small models, since the work of DeepSpeed's hooks is not counted: below a billion
parameters take `zero: {stage: 1}` first.

These are formulas, and a rehearsal may find more: that of `mixtral/8x7b` on 64, which `--rehearse` runs without a GPU's
fused kernels, takes 85 GiB where the plan has 67. Rehearse a layout before you queue it.

"""


def ready(folder: Path) -> list[Path]:
    """The configurations that are whole runs, in order."""
    found = sorted(folder.rglob("*.yml"))
    return [each for each in found if each.name != "family.yml" and each.relative_to(folder).parts[0] not in LEFT_OUT]


def cells(path: Path, devices: int) -> list[str]:
    """Parameters, and for a number of devices the layout, its memory, tokens per second and MFU."""
    try:
        question = Question.of([str(path)], [], cluster(devices, GPU))
    except ConfigError as error:
        return ["", f"none: {error.problems[0].rule.splitlines()[0]}", "", "", ""]
    size = f"{totals(question.base).parameters / 1e9:,.2f} B"
    plans = [plan for plan in question.answers().plans if plan.share <= NEAR]
    if not plans:
        return [size, "none fits", "", "", ""]
    best = plans[0]
    memory = f"{best.memory.total / 2**30:.0f} GiB"
    return [size, str(best.choice), memory, f"{best.tokens_per_second:,.0f}", f"{best.mfu:.0%}"]


def row(path: Path, folder: Path) -> str:
    """A line of the table."""
    small, large = (cells(path, devices) for devices in SIZES)
    name = path.relative_to(folder).with_suffix("").as_posix()
    return "| " + " | ".join([f"`{name}`", small[0], *small[1:], *large[1:]]) + " |"


def page(folder: Path) -> str:
    """The whole page."""
    titles = ["configuration", "parameters"]
    for devices in SIZES:
        titles += [f"on {devices}", "memory", "tokens/s", "MFU"]
    rows = [row(path, folder) for path in ready(folder)]
    line = "|" + "|".join(["---", "--:", *["---", "--:", "--:", "--:"] * len(SIZES)]) + "|"
    return HEAD + "\n".join(["| " + " | ".join(titles) + " |", line, *rows]) + "\n"
