"""Rewards of completions, computed in processes of their own. A reward that hangs or raises costs its sample only.

The processes read a JSON document per line from standard input, and answer in the same way. A process that does not
answer in time is killed with its children, and another one takes its place. Each also ends itself a second later, so
that none outlives a trainer that was killed. A timer of its own does that: rewards such as `math` use the alarm."""

import contextlib
import faulthandler
import inspect
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from megatron.config.problems import UserError
from megatron.config.registry import load

from .options import REWARDS, AlignSection

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

    def __init__(self, rewards: Sequence[Mapping[str, Any]], limit: float, others: Sequence[str] = ()) -> None:
        self.limit, self.text = limit, b""
        paths = [str(Path(__file__).parents[3]), *(each or os.getcwd() for each in sys.path)]
        self.child = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.child.stdin is not None
        os.set_blocking(self.child.stdin.fileno(), False)  # a process that reads nothing must not stop this one
        found = self.ask({"rewards": [dict(each) for each in rewards], "limit": limit, "others": others}, START)
        if "failure" in found:
            self.end()
            raise UserError(f"align.rewards: {found['failure']}")

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message. A process that gives none in time, or no JSON, has failed and is killed."""
        assert self.child.stdin is not None and self.child.stdout is not None
        deadline, asks, answers = time.monotonic() + seconds, self.child.stdin.fileno(), self.child.stdout.fileno()
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while b"\n" not in self.text and len(self.text) < LONGEST:
                left = max(0.0, deadline - time.monotonic())
                readable, writable, _ = select.select([answers], [asks] if rest else [], [], left)
                if not readable and not writable:
                    self.end()
                    return {"failure": f"no answer within {seconds:g} seconds"}
                if writable:
                    rest = rest[os.write(asks, rest[: 1 << 16]) :]
                if readable and not (piece := os.read(answers, 1 << 16)):
                    break
                if readable:
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

    @classmethod
    def of(cls, section: AlignSection) -> Self:
        return cls([each.model_dump() for each in section.rewards], section.workers, section.time_limit)

    def fault(self, others: Sequence[str] = ()) -> str | None:
        """Why the rewards, or other functions at import paths, cannot be used. None if they can."""
        process = self.idle.get()
        try:
            process = process or _Process(self.rewards, self.limit, others)
        except UserError as error:
            return str(error)
        finally:
            self.idle.put(process)
        return None

    def judge(self, items: Sequence[Item], alive: Callable[[], None] = lambda: None) -> list[Verdict]:
        """The verdict on each item, in their order.

        Args:
            alive: called after each verdict.

        Raises:
            UserError: the rewards cannot be imported, or a process does not begin.
        """
        found = []
        for verdict in self.threads.map(self._judge, items):
            found.append(verdict)
            alive()
        return found

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
        parts: dict[str, float] = found["parts"]
        return Verdict(math.fsum(parts.values()), parts)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
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
        rewards = [(each, _ready(each["type"], each["options"])) for each in settings["rewards"]]
        for name in settings["others"]:
            load(name)
        say(ready=True)
    except Exception as error:
        say(failure=f"{type(error).__name__}: {error}")
        return
    with open(os.devnull, "w") as nowhere:
        for line in asked:
            item = json.loads(line)
            faulthandler.dump_traceback_later(settings["limit"] + 1, exit=True, file=nowhere)
            try:
                say(parts=_parts(item, rewards))
            except BaseException as error:  # of a user's function: it costs this sample only
                say(failure=f"{type(error).__name__}: {error}")
            faulthandler.cancel_dump_traceback_later()


def _ready(name: str, options: Mapping[str, Any]) -> Callable[..., float]:
    """The function of a reward. One inside is tried: its mistakes would otherwise cost every sample.

    Raises:
        Exception: it cannot be imported, or does not take these options.
    """
    reward = load(REWARDS.get(name, name))
    try:
        signature = inspect.signature(reward)
    except ValueError:  # one that is not written in Python
        return reward
    try:
        signature.bind("", "", {}, **options)
    except TypeError as error:
        raise TypeError(f"{name} does not take align.rewards.options {list(options)}: {error}") from error
    if name in REWARDS:
        record = {"answer": "1", "tests": "1", "completion_tokens": 1, "ended": True}
        if "key" in options:
            record[options["key"]] = "1"
        if not reward("", "1", record, **options) and name == "tests":
            raise ValueError("tests: a program of one line does not end with these seconds and memory_mib")
    return reward


def _parts(
    item: Mapping[str, Any], rewards: Sequence[tuple[Mapping[str, Any], Callable[..., float]]]
) -> dict[str, float]:
    """The weighted rewards of a completion."""
    parts = {}
    closed = False
    for number, (each, reward) in enumerate(rewards):
        value = float(reward(item["prompt"], item["completion"], item["record"], **each["options"]))
        if not math.isfinite(value):
            raise ValueError(f"{each['type']} gives {value}, and a reward must be a finite number")
        parts[f"{number}.{each['type']}"] = each["weight"] * value
        closed = closed or (each.get("gate", False) and value == 0)
    if closed:
        return dict.fromkeys(parts, 0.0)
    if not math.isfinite(total := sum(parts.values())):
        raise ValueError(f"the weighted rewards add up to {total}, and must be finite")
    return parts


if __name__ == "__main__":
    serve()
