"""Where wall time has gone: a simulated clock, on which everything that happens to a run takes a known time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron.report.ledger import KINDS, PARTS, goodput

BEGIN = 1_800_000_000.0


class Simulated:
    """A run on a clock of its own: writes the ledger as trainer and launcher do, and keeps the true account."""

    def __init__(self) -> None:
        self.now, self.entries = BEGIN, []
        self.truth = dict.fromkeys(PARTS, 0.0)
        self.attempt = self.completed = 0
        self.history: list[float] = []  # seconds of each step that the run still has

    def launch(self, *, again: bool) -> None:
        self.attempt = self.attempt + 1 if again else 0
        self.since, self.spent = self.now, dict.fromkeys(KINDS, 0.0)
        self.marked: int | None = None  # completed updates at this start's last mark

    def take(self, part: str, seconds: float, kind: str | None = None) -> None:
        """Time passes."""
        self.now += seconds
        self.truth[part] += seconds
        if kind:
            self.spent[kind] += seconds

    def mark(self, event: str) -> None:
        own = {"since": self.since, "attempt": self.attempt, "completed": self.completed, **self.spent}
        own["within"] = {"forward": 0.75 * self.spent["steps"], "waiting": 0.25 * self.spent["steps"]}
        self.entries.append({"event": event, "step": self.completed, "spent": own})
        self.marked = self.completed

    def begin(self, completed: int, seconds: float) -> None:
        """From the launch, or a decision to go back, to the first step."""
        self.take("start", seconds, "start")
        self.go_back(completed)
        self.mark("resume" if completed else "start")

    def go_back(self, completed: int) -> None:
        lost = sum(self.history[completed:])
        self.truth["kept"], self.truth["lost"] = self.truth["kept"] - lost, self.truth["lost"] + lost
        del self.history[completed:]
        self.completed = completed

    def step(self, seconds: float) -> None:
        self.take("kept", seconds, "steps")
        self.history.append(seconds)
        self.completed += 1

    def fail(self, unfinished: float, detection: float) -> None:
        """Killed within a step, or before the first. The work since the last mark is lost."""
        self.take("start" if self.marked is None else "lost", unfinished)
        failed = self.now
        self.take("detection", detection)
        entry = {"since": self.since, "failed": failed, "ended": self.now, "attempt": self.attempt + 1}
        self.entries.append({"event": "restart", **entry})
        if self.marked is not None:
            self.go_back(self.marked)

    def save(self, seconds: float) -> None:
        self.take("save", seconds, "save")
        self.mark("checkpoint")


def test_the_parts_are_those_that_happened() -> None:
    run = Simulated()
    run.launch(again=False)
    run.begin(0, 10.0)
    for step in range(6):
        run.step(1.0 + step)
        if run.completed == 4:
            run.take("evaluation", 3.0, "evaluation")
            run.save(2.0)
    run.fail(0.5, 7.0)  # in step 6. 4 and 5 are lost with it
    run.take("wait", 5.0)
    run.launch(again=True)
    run.begin(4, 12.0)
    for _ in range(3):
        run.step(2.0)
    run.save(2.5)
    run.take("end", 0.25, "end")
    run.mark("end")
    found = goodput(run.entries)
    assert found.seconds == pytest.approx({
        "kept": 1 + 2 + 3 + 4 + 6.0, "lost": 5 + 6 + 0.5, "start": 22.0, "evaluation": 3.0, "save": 4.5,
        "detection": 7.0, "wait": 5.0, "end": 0.25,
    }, abs=1e-6)  # fmt: skip
    assert found.wall == pytest.approx(run.now - BEGIN, abs=1e-6)
    assert (found.starts, found.failures, found.saves, found.completed) == (2, 1, 2, 7)
    assert found.within == pytest.approx({"forward": 12.0, "waiting": 4.0}, abs=1e-6) and found.again == 12.0
    assert found.text().startswith("23.1% of 0:01:09 in 2 starts (start ")
    last = goodput(run.entries, since=run.since)
    assert last.seconds["kept"] == 6.0 and last.wall == pytest.approx(12 + 6 + 2.5 + 0.25) and last.starts == 1


def chance(seed: int) -> tuple[Simulated, float]:
    """A run to which things happen by chance. Returns it, and the time between runs that a person started."""
    draw, run, away = random.Random(seed), Simulated(), 0.0
    saved, again = [0], False
    for number in range(draw.randint(1, 8)):
        if again:
            run.take("wait", draw.uniform(0, 9))
        elif number:
            pause = draw.uniform(0, 1e5)
            run.now, away = run.now + pause, away + pause
        run.launch(again=again)
        if again and draw.random() < 0.2:  # dies before it has said anything
            run.fail(draw.uniform(0, 5), draw.uniform(0, 9))
            continue
        run.begin(draw.choice(saved[-2:]), draw.uniform(0, 20))  # the newest one may be damaged
        saved = [each for each in saved if each <= run.completed]
        for _ in range(draw.randint(1, 30)):
            run.step(draw.uniform(0.1, 2))
            if draw.random() < 0.2:
                run.save(draw.uniform(0, 2))
                saved.append(run.completed)
            elif draw.random() < 0.1:
                run.take("evaluation", draw.uniform(0, 2), "evaluation")
                run.mark("mark")
            elif draw.random() < 0.1:
                run.mark("mark")
            elif draw.random() < 0.05:  # a spike: back to a checkpoint, in the same process
                run.begin(saved[-1], draw.uniform(0, 3))
        again = draw.random() < 0.7
        if again:
            run.fail(draw.uniform(0, 2), draw.uniform(0, 9))
        else:
            run.save(draw.uniform(0, 2))
            saved.append(run.completed)
            run.take("end", draw.uniform(0, 2), "end")
            run.mark("stop")
    return run, away


def test_every_second_is_in_one_part() -> None:
    for seed in range(200):
        run, away = chance(seed)
        found = goodput(run.entries)
        assert found.wall == pytest.approx(run.now - BEGIN - away, abs=1e-5), seed
        assert found.seconds == pytest.approx(run.truth, abs=1e-5), seed


def test_a_ledger_without_marks_has_no_account() -> None:
    old: list[dict[str, Any]] = [{"event": "start", "step": 0}, {"event": "restart", "attempt": 1, "status": 137}]
    assert goodput(old).wall == 0.0 and goodput(old).share == 0.0
