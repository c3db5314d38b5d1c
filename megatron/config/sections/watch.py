"""When a run is taken for stuck, what then happens, and when a rank is called slow."""

from __future__ import annotations

from typing import Literal

from ..section import Section, key


class SlowOptions(Section):
    every: int | None = key(
        10,
        "Compare the ranks' times over n steps each, sent with the numbers of the step after them. null: never.",
        unit="steps",
        gt=0,
    )
    factor: float = key(
        1.5, "A rank is slow if its time is this multiple of the median of the others, or of its own past.", gt=1
    )
    windows: int = key(3, "Number of comparisons in a row in which a rank must be slow before it is named.", gt=0)


class WatchSection(Section):
    hang: Literal["auto", "report", "stop", "off"] = key(
        "auto",
        "Reaction to a run that hangs. report: name the rank at fault and keep waiting. stop: also end the run, "
        "and start it again with launch.restarts. auto: stop with launch.restarts, report without.",
    )
    factor: float = key(5.0, "A phase may take this multiple of its longest time in this run.", ge=1)
    step: float = key(
        180.0, "But forward, backward, reduction and optimizer always at least this long.", unit="seconds", gt=0
    )
    data: float = key(300.0, "The same for reading a batch.", unit="seconds", gt=0)
    evaluation: float = key(900.0, "The same for evaluation, samples and other hooks.", unit="seconds", gt=0)
    save: float = key(1800.0, "The same for saving a checkpoint, and for the end of the run.", unit="seconds", gt=0)
    setup: float = key(
        1800.0, "The same for the start and the first two steps, which compile and warm up.", unit="seconds", gt=0
    )
    slow: SlowOptions = key(SlowOptions, "Slow ranks.")
