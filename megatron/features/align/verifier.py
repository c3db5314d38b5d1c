"""Rewards of completions, computed in processes of their own. A reward that hangs or raises costs its sample only.

The processes read a JSON document per line from standard input, and answer in the same way. A process that does not
answer in time is killed with its children, and another one takes its place. Each also ends itself a second later, so
that none outlives a trainer that was killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron.config.problems import UserError
from megatron.config.registry import load

from .options import REWARDS

START = 120.0  # seconds in which a process must have imported the rewards
LONGEST = 1 << 20  # bytes of an answer


@dataclass(frozen=True)
class Item:
    """A completion to judge."""

    prompt: str
    completion: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The reward of a completion: its weighted parts added up. After a failure it is 0, and `failure` says why."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


class _Process:
    """One process, which judges one item at a time.

    Raises:
        UserError: the rewards cannot be imported, or the process does not begin.
    """

    def __init__(self, rewards: Sequence[Mapping[str, Any]], limit: float) -> None:
        self.limit, self.text = limit, b""
        paths = [str(Path(__file__).parents[3]), *(each or os.getcwd() for each in sys.path)]
        self.child = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        found = self.ask({"rewards": [dict(each) for each in rewards], "limit": limit}, START)
        if "failure" in found:
            self.end()
            raise UserError(f"align.rewards: {found['failure']}")

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message. A process that gives none in time, or no JSON, has failed and is killed."""
        assert self.child.stdin is not None and self.child.stdout is not None
        deadline, pipe = time.monotonic() + seconds, self.child.stdout.fileno()
        try:
            self.child.stdin.write(json.dumps(message).encode() + b"\n")
            self.child.stdin.flush()
            while b"\n" not in self.text and len(self.text) < LONGEST:
                if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    self.end()
                    return {"failure": f"no answer within {seconds:g} seconds"}
                if not (piece := os.read(pipe, 1 << 16)):
                    break
                self.text += piece
            line, _, self.text = self.text.partition(b"\n")
            found = json.loads(line)
            if isinstance(found, dict):
                return found
        except (BrokenPipeError, ValueError):
            pass
        self.end()
        return {"failure": f"the process has ended with status {self.child.returncode}"}

    @property
    def ended(self) -> bool:
        return self.child.poll() is not None

    def end(self) -> None:
        """Kill the process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Verifier:
    """A pool of processes that compute rewards. They are started when they are needed.

    Args:
        rewards: `align.rewards`, each with type, weight and options.
        limit: seconds for all rewards of one completion.
    """

    def __init__(self, rewards: Sequence[Mapping[str, Any]], processes: int, limit: float) -> None:
        self.rewards, self.limit = rewards, limit
        self.threads = ThreadPoolExecutor(processes, thread_name_prefix="verifier")
        self.idle: SimpleQueue[_Process | None] = SimpleQueue()
        for _ in range(processes):
            self.idle.put(None)

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """The verdict on each item, in their order.

        Raises:
            UserError: the rewards cannot be imported, or a process does not begin.
        """
        return list(self.threads.map(self._judge, items))

    def _judge(self, item: Item) -> Verdict:
        process = self.idle.get()
        try:
            if process is None or process.ended:
                process = _Process(self.rewards, self.limit)
            found = process.ask(
                {"prompt": item.prompt, "completion": item.completion, "record": dict(item.record)}, self.limit
            )
        finally:
            self.idle.put(process)
        if "failure" in found:
            return Verdict(failure=str(found["failure"])[:500])
        parts = {str(name): float(value) for name, value in found["parts"].items()}
        return Verdict(math.fsum(parts.values()), parts)

    def close(self) -> None:
        self.threads.shutdown()
        while not self.idle.empty():
            if (process := self.idle.get()) is not None:
                process.end()


def serve() -> None:
    """Judge what standard input has, until its end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward prints must not be taken for an answer
    asked = iter(sys.stdin.readline, "")

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(next(asked))
    try:
        rewards = [(each, load(REWARDS.get(each["type"], each["type"]))) for each in settings["rewards"]]
        say(ready=True)
    except Exception as error:
        say(failure=f"{type(error).__name__}: {error}")
        return
    for line in asked:
        item = json.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # its default action ends the process, whatever it does
        signal.setitimer(signal.ITIMER_REAL, settings["limit"] + 1)
        try:
            parts = {}
            for number, (each, reward) in enumerate(rewards):
                value = float(reward(item["prompt"], item["completion"], item["record"], **each["options"]))
                if not math.isfinite(value):
                    raise ValueError(f"{each['type']} gives {value}, and a reward must be a finite number")
                parts[f"{number}.{each['type']}"] = each["weight"] * value
            say(parts=parts)
        except BaseException as error:  # of a user's function: it costs this sample only
            say(failure=f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve()
