"""Rollouts: what the model wrote in a round, its rewards and log-probabilities. One file per round.

A file has a line of JSON for the round and one for each text. It is written once, whole or not at all. Its first line
has the hash of the file before it and of the settings, so a file belongs to one course of a run."""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron.config import Config
from megatron.config.file_access import read_plain, replace_file
from megatron.config.routes import choices_of, route_columns
from megatron.data.errors import DataError, NotMadeYet
from megatron.data.sample import Sample

from .options import POLICY, align_of

FOLDER = "rollouts"  # in the run's directory


@dataclass(frozen=True)
class Rollout:
    """One text."""

    prompt: list[int]  # prompt, completion: ids. The completion has the token that ended it.
    completion: list[int]
    text: str  # of the completion
    ended: bool  # whether it ended by itself. Otherwise it has the largest length.
    # sampler, old, reference: log-probabilities of the completion's tokens, as the sampler drew them, by the same
    # weights as `Sampler` scores texts, and by the reference's weights (empty without one)
    sampler: list[float]
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    reward: float = 0.0  # reward, parts, failure: as the verifier gave them
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    advantage: float = 0.0
    counts: bool = True  # whether its labels count in the loss
    difficulty: int | None = None  # of the problem, with a curriculum.
    # By the same weights, as a training pass reads texts. Empty where the step trains on these weights, so that its own
    # pass has them. None: as `old`.
    trainer: list[float] | None = None
    experts: str = ""  # of each token and layer as it was read, uint16 in base64, with routing replay

    def routes(self, width: int) -> np.ndarray:
        """The experts [tokens, width] of all tokens but the last. ValueError where the file has others."""
        found = np.frombuffer(base64.b64decode(self.experts, validate=True), "<u2")
        return found.reshape(len(self.prompt) + len(self.completion) - 1, width)


def path_of(config: Config, number: int) -> Path:
    return Path(config.run.dir) / FOLDER / f"round-{number:06d}.jsonl"


def file_hash(path: Path) -> str | None:
    """SHA-256 of a round's file. None if there is none."""
    try:
        return hashlib.sha256(read_plain(path)).hexdigest()
    except FileNotFoundError:
        return None


def write_round(path: Path, head: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [dict(head), *(asdict(each) for each in rollouts)]
    for line in lines[1:]:
        if line["difficulty"] is None:
            del line["difficulty"]
        if not line["experts"]:
            del line["experts"]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_head(path: Path) -> dict[str, Any]:
    """The first line of a file. Empty if there is no such file, or it is not one of a round."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def await_round(path: Path, digest: str, patience: float = 90.0) -> None:
    """Wait until this host sees the file of this hash, and forget what was read. A network file system may show an
    earlier file of the name for a while.

    Raises:
        DataError: it does not appear.
    """
    deadline = time.monotonic() + patience
    while file_hash(path) != digest:
        if time.monotonic() > deadline:
            raise DataError(
                path, "all hosts must see rank 0's file, and this one does not", "use a run.dir that all hosts share"
            )
        time.sleep(0.5)
    read_round.cache_clear()


@lru_cache(maxsize=2)
def read_round(path: Path) -> tuple[Rollout, ...]:
    """The texts of a round.

    Raises:
        NotMadeYet: there is no file.
        DataError: it is damaged.
    """
    try:
        lines = read_plain(path).decode().splitlines()
        return tuple(Rollout(**json.loads(line)) for line in lines[1:])
    except FileNotFoundError as error:
        raise NotMadeYet(path, "this round was not drawn yet", "train with deepy align, which draws it") from error
    except (OSError, ValueError, TypeError, UnicodeError) as error:
        raise DataError(path, f"it must have a text per line: {error}", "delete it, and it is drawn again") from error


class Rollouts:
    """The texts of all rounds as samples. Sample n is text n of the run. The texts of a step come one after another."""

    masked = True

    def __init__(self, config: Config, size: int) -> None:
        self.config, self.size, self.length = config, size, config.training.sequence_length
        self.filler = config.tokenizer.eod_id or 0
        replays = config.objective.type == POLICY and config.objective.options.get("replay")
        layers = route_columns(config.model) if replays else {}
        self.names = [name for names in layers.values() for name in names]
        counts = [choices_of(config.model, layer) for layer, names in layers.items() for _ in names]
        self.experts = np.array(counts, np.int64)

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        return cls(config, config.training.global_batch_size * align_of(config).updates)

    def sample(self, number: int) -> Sample:
        """Sample n: prompt and completion, weights of the completion's labels with the sum 1, and columns."""
        number, place = divmod(number, self.size)
        path = path_of(self.config, number)
        found = read_round(path)
        if len(found) != self.size:
            raise DataError(path, f"it must have {self.size} texts, not {len(found)}", "delete it")
        one, S = found[place], self.length
        own = [*one.prompt, *one.completion]
        begin, end = len(one.prompt) - 1, len(own) - 1  # labels of the completion
        columns = {"sequence": np.full(S, -1, np.float32), "advantage": np.full(S, one.advantage, np.float32)}
        given = {"old": one.old, "sampler": one.sampler, "reference": one.reference or one.old}
        given["trainer"] = one.old if one.trainer is None else one.trainer or [float("nan")] * (end - begin)
        if not 0 < len(one.prompt) < len(own) <= S + 1 or any(len(each) != end - begin for each in given.values()):
            raise DataError(path, f"text {place} must have at most {S + 1} tokens, and numbers for all", "delete it")
        columns |= {name: np.zeros(S, np.float32) for name in given}
        columns["sequence"][begin:end] = 0
        for name, values in given.items():
            columns[name][begin:end] = values
        columns |= self._routes(path, one)
        weights = np.zeros(S, np.float32)
        weights[begin:end] = one.counts / (end - begin)
        tokens = np.full(S + 1, self.filler, np.int64)
        tokens[: len(own)] = own
        begins = np.zeros(S + 1, bool)
        begins[[0, *([len(own)] if len(own) <= S else [])]] = True
        return Sample(tokens, weights, begins, columns=columns)

    def _routes(self, path: Path, one: Rollout) -> dict[str, np.ndarray]:
        """The columns of a text's experts. Filler has none."""
        if not self.names:
            return {}
        try:
            found = one.routes(len(self.names))
        except ValueError as error:
            raise DataError(path, f"its texts must have the experts of all tokens: {error}", "delete it") from error
        if (found >= self.experts).any():
            raise DataError(path, f"experts must be below {self.experts.tolist()}", "delete it, and it is drawn again")
        columns = np.full((len(self.names), self.length), -1, np.float32)
        columns[:, : len(found)] = found.T
        return dict(zip(self.names, columns))


def next_level(hardest: float | None, level: int, enough: float, least: int, largest: int) -> int:
    """The largest difficulty of the next round, as ZAYA1 moves RLVE's (arXiv 2605.05365).

    It is 1 more where the mean reward of the hardest problems is above `enough`, and 1 less where it is not above 0.
    Without such a problem it stays."""
    change = 0 if hardest is None else 1 if hardest > enough else -1 if hardest <= 0 else 0
    return min(max(level + change, least), largest)


def advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
    """Advantages [P, G] of the rewards of P groups, float64.

    `group`: (r - mean) / (standard deviation + 1e-4), as in GRPO. `mean`: r - mean, as in Dr. GRPO. `leave_one_out`:
    r - the mean of the others, as in RLOO. `max_rl`: (r - mean) / mean, and 0 without a mean above 0. `reward`: r."""
    if kind == "reward":
        return rewards
    mean, size = rewards.mean(1, keepdims=True), rewards.shape[1]
    equal = (rewards == rewards[:, :1]).all(1, keepdims=True)  # rounding of their mean is no advantage
    apart = np.where(equal, 0.0, rewards - mean)
    if kind == "group":
        return apart / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    if kind == "leave_one_out":
        return apart * size / (size - 1)
    if kind == "max_rl":
        return np.where(mean > 0, apart / np.where(mean > 0, mean, 1), 0.0)
    return apart
