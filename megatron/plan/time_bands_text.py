"""A run's bands as text and picture: a table, the steps from the peak down to wall-clock MFU, the first changes to
make."""

from __future__ import annotations

from pathlib import Path

from megatron.report.communication import table
from megatron.report.console import duration
from megatron.report.figures import new_figure, write_figure

from .time_bands import TITLES, WITHIN, TimeProfile

WORTH = 0.03  # of the wall time: from here on a band is worth a word
ADVICE = {
    "below": "products reach {rate}: try a larger training.micro_batch_size, and the sizes of deepy plan lint",
    "attention": "try the kernels that model.kernels and docs/performance.md name, or a shorter "
    "training.sequence_length",
    "memory": "norms, activations and residual sums: try training.compile",
    "recompute": "where memory allows, take training.activation_checkpointing.mode selective or none "
    "(./deepy.py --rehearse says whether it fits)",
    "optimizer": "share it over data parallel ranks with zero.stage, or update less often with a larger "
    "training.global_batch_size",
    "bubble": "more micro-batches (a smaller training.micro_batch_size, a larger training.global_batch_size) or fewer "
    "stages (parallel.pipeline)",
    "communication": "logging.communication=times shows which messages, and which rank is last. Fewer tensor parallel "
    "ranks, zero.overlap and larger micro-batches send less often",
    "data": "more data.workers and data.prefetch, or a faster disk",
    "hooks": "log less often (logging.every), and check hooks of your own. Writing a trace is one too",
    "start": "a longer run makes it small, a checkpoint that is read from a slow disk does not",
    "evaluation": "evaluate less often (evaluation.every) or on less (evaluation.batches)",
    "save": "save less often (checkpoint.auto finds how often), or in the background (checkpoint.asynchronous)",
    "restarts": "ledger.jsonl says why the run failed, and checkpoint.auto loses least",
    "end": "evaluation.at_end, checkpoint.at_end and logging.curve are what happens there",
}
HOST = {
    True: "operations are too small for what it takes to start them: try a larger training.micro_batch_size, or "
    "training.compile",
    False: "the cause of this time is unknown: profile a few steps (logging.profile.start) and compare again",
}


def text(found: TimeProfile) -> str:
    """The whole account."""
    rows = [
        [
            TITLES[each.name],
            duration(each.seconds) if each.seconds >= 60 else f"{each.seconds:.2f} s",
            f"{each.seconds / found.wall:.1%}",
            "measured" if each.measured else "derived",
            each.source,
        ]
        for each in found.bands
        if each.seconds > 0
    ]
    rows.append(["wall time", duration(found.wall), "100.0%", "", ""])
    head = f"{found.run}: {found.completed:,} steps on {found.ranks} x {found.device} in {found.compute}"
    lines = [head, table(["band", "time", "share", "", "from"], rows), "", *_cascade(found)]
    first = advice(found)
    return "\n".join([*lines, *(["", "what to change first:", *(f"  {each}" for each in first)] if first else [])])


def _cascade(found: TimeProfile) -> list[str]:
    """From the peak down to wall-clock MFU."""
    if found.peak is None:
        return [f"MFU is not known: {found.peak_source}"]
    lines = [f"peak             {found.peak:,.4g} TFLOP/s ({found.peak_source})"]
    if found.matrix_rate is not None:
        lines.append(f"matrix products  {found.matrix_rate / found.peak:.1%} of it")
        if found.matrix_rate > found.peak:
            lines.append("                 the peak is too low for this device: give its own (logging.peak_tflops)")
    steps = found.seconds(*WITHIN)
    busy = steps - found.seconds("data", "hooks", "communication", "bubble")
    for name, seconds in (("computation", busy), ("steps", steps), ("wall time", found.wall)):
        share = found.utilisation(seconds)
        if share is not None:
            lines.append(f"{name:<15}  {share:.1%} MFU")
    return lines


def advice(found: TimeProfile) -> list[str]:
    """How to reduce the largest bands: up to three sentences."""
    able = sorted(
        (each for each in found.bands if each.name != "matrix" and each.seconds >= WORTH * found.wall),
        key=lambda each: -each.seconds,
    )
    rate = "little of the peak"
    if found.peak and found.matrix_rate is not None:
        rate = f"{found.matrix_rate / found.peak:.0%} of the peak"
    said = []
    for each in able[:3]:
        words = HOST[each.measured] if each.name == "host" else ADVICE[each.name].format(rate=rate)
        said.append(f"{TITLES[each.name]} ({each.seconds / found.wall:.1%}): {words}")
    return said


def picture(found: TimeProfile, path: str | Path) -> None:
    """Draw the bands as a PNG, each from the end of the one before. Derived bands are hatched."""
    bands = [each for each in found.bands if each.seconds > 0]
    figure = new_figure(9, 0.9 + 0.34 * len(bands), 120)
    axes = figure.add_subplot()
    begin = 0.0
    for place, each in enumerate(bands):
        share = 100 * each.seconds / found.wall
        colour = "C2" if each.name == "matrix" else "C0" if each.name in WITHIN else "C1"
        hatch = "" if each.measured else "////"
        axes.barh(place, share, left=begin, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        axes.text(begin + share + 0.8, place, f"{share:.1f}%", va="center", fontsize=8)
        begin += share
    axes.set_yticks(range(len(bands)), [TITLES[each.name] for each in bands], fontsize=8)
    axes.invert_yaxis()
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    axes.set(xlim=(0, 109), xlabel=f"% of {duration(found.wall)} wall time (hatched: derived)")
    axes.set_title(f"{Path(found.run).name}: {found.ranks} x {found.device}, {found.compute}{mfu}", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    write_figure(figure, path)
