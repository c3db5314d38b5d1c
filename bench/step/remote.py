"""Sides of a comparison in processes of their own, so that the peak memory of each is its own. They take turns in short
rounds, so that a change of the machine's load affects all of them.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.runner import Mismatch
from bench.step.contenders import Contender, serve
from bench.step.setup import Setup

# Relative, of losses and gradient norms in the first steps. In bf16 a loss is a mean of fp32 numbers over all tokens,
# so it must be closer than one unit in the last of bf16's places.
TOLERANCE = {"fp32": {"losses": 2e-4, "norms": 2e-4}, "bf16": {"losses": 2**-8, "norms": 2e-2}}
CHECKED_STEPS = 2

# Errors of inductor where its C++ cannot be compiled, as of loops that are joined in bf16 (torch 2.13).
NOT_COMPILED = re.compile(r"\b(CppCompileError|InductorError)\b")


class Remote:
    """One contender's process."""

    def __init__(self, name: str, setup: Setup, make: Callable[[Setup], Contender] | None = None):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, setup, theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, first: int, steps: int) -> dict[str, Any]:
        self.begin(first, steps)
        return self.answer()

    def begin(self, first: int, steps: int) -> None:
        """Have it take steps, while others do too."""
        self.pipe.send((first, steps))

    def answer(self) -> Any:
        """Its next message: None when it is built, then the results of steps.

        Raises:
            RuntimeError: the contender failed, or its process ended.
        """
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"{self.name}: its process ended with status {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()


@contextlib.contextmanager
def started(names: Sequence[str], setup: Setup, makers: Mapping[str, Any] | None = None) -> Iterator[list[Remote]]:
    """The contenders, built one after another.

    Args:
        makers: functions that build a contender, where they differ from `CONTENDERS`.
    """
    remotes: list[Remote] = []
    try:
        for name in names:
            remotes.append(Remote(name, setup, (makers or {}).get(name)))
            remotes[-1].answer()
        yield remotes
    finally:
        for remote in remotes:
            remote.close()


def rounds_of(remotes: Sequence[Remote], steps: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds per step of each contender in each round, and its peak memory in bytes."""
    seconds: dict[str, list[float]] = {remote.name: [] for remote in remotes}
    peaks: dict[str, int] = {}
    for number in range(rounds):
        for remote in remotes:
            answer = remote.run(CHECKED_STEPS + number * steps, steps)
            seconds[remote.name].append(answer["seconds"] / steps)
            peaks[remote.name] = answer["peak"]
    return seconds, peaks


def check_equal(first: dict[str, dict[str, Any]], tolerances: dict[str, float]) -> None:
    """Compare losses and gradient norms of the first steps with the first contender's.

    Raises:
        Mismatch: a value differs by more than its tolerance, relatively, or is not finite.
    """
    reference, *others = first
    for what, tolerance in tolerances.items():
        wanted = first[reference][what]
        for name in (reference, *others):
            for step, (found, right) in enumerate(zip(first[name][what], wanted, strict=True)):
                if not math.isfinite(found) or abs(found - right) > tolerance * abs(right):
                    raise Mismatch(f"step {step}: {what} of {name} {found!r}, of {reference} {right!r}")


def first_steps(contenders: Sequence[Remote]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Results of the first steps, and by name the reason why torch could not compile a contender, which is skipped.

    Raises:
        RuntimeError: one failed in another way.
    """
    first, failed = dict[str, dict[str, Any]](), dict[str, str]()
    for remote in contenders:
        try:
            first[remote.name] = remote.run(0, CHECKED_STEPS)
        except RuntimeError as error:
            reason = NOT_COMPILED.search(str(error))
            if "compiled" not in remote.name or reason is None:
                raise
            failed[remote.name] = reason[0]
    return first, failed
