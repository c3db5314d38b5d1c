"""The program of `deepy align`: generate, verify, train, save, evaluate.

A round begins before the first of its steps. `Rounds.step` calls `AlignHook.prepare`, which draws completions of
prompts by the present weights, has them judged and writes them to the round's file. The trainer then makes
`align.updates` steps on the file, as on any data, and its other hooks log, save and stop. Steps are a function of
files, so a run that was killed continues with the rounds that it has."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path as FilePath
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.format.communicator import from_rank_0
from megatron.checkpoint.format.errors import CheckpointError
from megatron.config.problems import UserError
from megatron.config.tree import thaw
from megatron.data.batch import StepBatch
from megatron.data.errors import DataError
from megatron.data.loader import Loader
from megatron.data.tokenizer import build_tokenizer
from megatron.decoding.sampling import Sampling
from megatron.evaluation.shared_contexts import Text
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer
from megatron.worker.beacon import EVALUATE

from .options import AlignSection
from .problems import Problems, Prompt
from .rollouts import (
    Rollout,
    advantages,
    await_round,
    file_hash,
    next_level,
    path_of,
    read_head,
    read_round,
    write_round,
)
from .sampler import Drawn, Rule, Sampler
from .server import Server
from .verifier import Item, Verdict, Verifier

Group = tuple[Prompt, list[Drawn], list[Verdict]]
# Keys that change neither what is drawn nor what is trained.
OTHER = (
    *("workers", "texts", "time_limit", "evaluate", "problems", "held_out", "held_out_labels"),
    *("server", "votes", "vote_on", "aggregate"),
)
# Earlier versions' files lack these. They count where they are given.
LATER = ("prompt_labels", "behind", "curriculum", "routes")


class Rounds:
    """The loader of a run, which has each round drawn before its first step is read."""

    def __init__(self, loader: Loader, hook: AlignHook, trainer: Trainer) -> None:
        self.loader, self.hook, self.trainer, self.ready = loader, hook, trainer, -1

    def step(self, step: int) -> StepBatch:
        number = step // self.hook.own.updates
        if number != self.ready:
            with self.trainer.beacon.during(EVALUATE, b"rollouts"):
                self.hook.prepare(self.trainer, number)
            self.ready = number
        return self.loader.read(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class AlignHook(Hook):
    """Draws rounds and evaluates. The numbers of a round are in the records of its steps."""

    def __init__(self, parts: HookContext) -> None:
        assert parts.engine is not None and parts.world is not None
        config: Any = parts.config
        self.config, self.own, self.engine, self.world = config, config.align, parts.engine, parts.world
        self.size = config.training.global_batch_size * self.own.updates
        self.tokenizer = build_tokenizer(config.tokenizer)
        world = parts.world
        self.sampler = Sampler(config, parts.engine, world.mesh, world.device, texts=self.own.texts)
        if self.own.routes == "sampler" and not self.sampler.cached:
            raise UserError("align.routes must be trainer where no decoder reads the texts of this model")
        self.server: Server | None = None
        if self.own.server.url is not None:
            from .server import Server

            ends = (self.own.stop, self.tokenizer.eod_id)
            self.server = Server(self.own.server, FilePath(config.run.dir), world, parts.contents, self.own.texts, ends)
        self.step = 0
        found, failure = from_rank_0(world.communicator, self.rewards, CheckpointError, OSError)
        if failure is not None:
            raise UserError(f"align.rewards: {failure}")
        rewards, self.models = found
        self.verifier = Verifier(rewards, self.own.workers, self.own.time_limit)
        self.problems = Problems(config, self.tokenizer)
        self.held_out = Problems(config, self.tokenizer, held_out=True) if self.own.evaluate is not None else None
        self.numbers: dict[str, float] = {}

    def rewards(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The rewards, and the hashes of their models."""
        given = [each.model_dump() for each in self.own.rewards]
        if all(each["type"] != "reward_model" for each in given):
            return given, {}
        from .reward_model import pinned

        return pinned(given)

    def on_start(self, trainer: Trainer) -> None:
        if self.models:
            trainer.record("reward_models", sha256=self.models)
        if wrong := self.world.communicator.broadcast(self.verifier.fault() if self.world.is_main else None):
            raise UserError(wrong)
        self.sampler.alive = partial(trainer.beacon.at, EVALUATE, detail=b"rollouts")
        url = self.own.server.url
        trainer.log(self.sampler.note() if url is None else f"rollouts: texts are drawn by the server at {url}")
        trainer.loader = cast("Loader", Rounds(trainer.loader, self, trainer))

    def before_step(self, trainer: Trainer, step: int) -> None:
        trainer.extra_metrics.update(self.numbers)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if trainer.last:
            self.evaluate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self.verifier.close()

    def prepare(self, trainer: Trainer, number: int) -> None:
        """Have the file of a round, which is drawn unless it is there and belongs to this course of the run."""
        self.step = trainer.completed
        if self.own.evaluate is not None and number % self.own.evaluate == 0:
            self.evaluate(trainer)
        last = -(-trainer.steps // self.own.updates)
        rounds = range(number, min(number + 1 + self.own.behind, last))
        # A round that is missing in the middle of the steps on another one cannot be drawn by the weights before them.
        first = not self.own.behind or self.step == number * self.own.updates
        digest = [self.have(each, first and number in (0, each - self.own.behind)) for each in rounds][0]
        rollouts = read_round(path_of(self.config, number))
        self.numbers = numbers_of(rollouts, self.own.group)
        if self.own.curriculum is not None:
            self.numbers["difficulty"] = float(read_head(path_of(self.config, number))["level"])
        if all(each.failure is not None for each in rollouts):
            trainer.log(f"round {number}: all rewards have failed, the first with {rollouts[0].failure!r}")
        trainer.record("rollouts", step=trainer.completed, round=number, sha256=digest, **self.numbers)

    def have(self, number: int, drawn_now: bool) -> str:
        """Have the file of a round, and return its hash. Only some rounds are drawn by the present weights."""
        path = path_of(self.config, number)
        found, failure = from_rank_0(self.world.communicator, lambda: self.found(number), OSError, DataError)
        if failure is not None:
            raise UserError(failure)
        there, head = found
        if not there:
            if not drawn_now:
                raise UserError(
                    f"{path} must be there as this run has drawn it: weights of {self.own.behind} rounds before are "
                    "gone. Begin again with checkpoint.resume=none, or resume from an earlier checkpoint"
                )
            drawn, hardest = self.draw_round(number, head.get("level"))
            if self.world.is_main:
                write_round(path, {**head, **({} if "level" not in head else {"hardest": hardest})}, drawn)
        digest: str = self.world.communicator.broadcast(file_hash(path) if self.world.is_main else None)
        await_round(path, digest)
        return digest

    def found(self, number: int) -> tuple[bool, dict[str, Any]]:
        """Whether the file of a round is there and belongs to this course of the run, and the head that it must have.

        Raises:
            DataError: the file of the round before does not say how difficult this one is.
        """
        head, there = self.head(number), read_head(path_of(self.config, number))
        return {name: there.get(name) for name in head} == head, head

    def head(self, number: int) -> dict[str, Any]:
        """The first line of a round's file: the settings that it follows from, and the file before it."""
        whole = thaw(self.config.model_dump(mode="json"))
        names = ("model", "adapter", "objective", "optimizer", "schedule", "tokenizer")
        given = {name: whole[name] for name in names if name in whole}
        later = [name for name in LATER if getattr(self.own, name) == getattr(AlignSection(), name)]
        given["align"] = {name: value for name, value in whole["align"].items() if name not in (*OTHER, *later)}
        for each in given["align"]["rewards"]:
            if not each["gate"]:
                del each["gate"]
        if self.models:
            given["models"] = self.models
        keys = ("seed", "steps", "global_batch_size", "sequence_length", "weight_average")
        given["training"] = [whole["training"][name] for name in keys]
        given["prompts"] = self.problems.digest
        given["base"] = whole["checkpoint"]["initialize_from"]
        settings = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
        before = file_hash(path_of(self.config, number - 1)) if number else ""
        found = {"round": number, "settings": settings, "before": before}
        return found if self.own.curriculum is None else {**found, "level": self.level(number)}

    def level(self, number: int) -> int:
        """The largest difficulty of a round, which follows from the file of the round before."""
        least, largest = self.own.difficulty
        if number == 0:
            return int(least)
        path = path_of(self.config, number - 1)
        before = read_head(path)
        if not isinstance(before.get("level"), int) or "hardest" not in before:
            raise DataError(path, "it must have the level of its problems", "begin again with checkpoint.resume=none")
        return next_level(before["hardest"], before["level"], self.own.curriculum, least, largest)

    def draw_round(self, number: int, level: int | None = None) -> tuple[list[Rollout], float | None]:
        """Draw, judge and score the texts of a round. All ranks get the same.

        Returns:
            The texts, and the mean reward of all problems of this level, replaced ones included.
        """
        own, count = self.own, self.size // self.own.group
        chosen, spare, hardest = list[Group](), list[Group](), list[float]()
        for wave in range(1 + own.dynamic_sampling):
            first = (number * (1 + own.dynamic_sampling) + wave) * count
            for group in self.groups(range(first, first + count), level):
                rewards = [verdict.reward for verdict in group[2]]
                if level is not None and group[0].record["difficulty"] == level:
                    hardest += rewards
                equal = len(set(rewards)) == 1
                (spare if equal and own.dynamic_sampling else chosen).append(group)
            if len(chosen) >= count:
                break
        found = [
            Rollout(
                list(prompt.ids),
                each.tokens,
                self.text(each),
                each.ended,
                each.log_p,
                reward=verdict.reward,
                parts=dict(verdict.parts),
                failure=verdict.failure,
                counts=each.ended or not own.mask_truncated,
                difficulty=None if level is None else int(prompt.record["difficulty"]),
                experts=encoded(torch.stack([each.routes[at] for at in range(len(prompt.ids) + len(each.tokens) - 1)]))
                if own.routes == "sampler"
                else "",
            )  # fmt: skip
            for prompt, drawn, verdicts in (chosen + spare)[:count]
            for each, verdict in zip(drawn, verdicts)
        ]
        return self.scored(found), fmean(hardest) if hardest else None

    def groups(self, numbers: Sequence[int], level: int | None = None) -> list[Group]:
        """Completions of the prompts of these numbers, and the verdicts on them."""
        size, seed = self.own.group, self.config.training.seed
        prompts = [self.problems(number, level) for number in numbers]
        texts = [number * size + place for number in numbers for place in range(size)]
        repeated = [prompt for prompt in prompts for _ in range(size)]
        drawn = self.draw([each.ids for each in repeated], texts, self.rule(seed))
        verdicts = self.verify(repeated, drawn)
        cuts = [slice(begin, begin + size) for begin in range(0, len(texts), size)]
        return [(prompt, drawn[cut], verdicts[cut]) for prompt, cut in zip(prompts, cuts)]

    def draw(self, prompts: Sequence[tuple[int, ...]], numbers: Sequence[int], rule: Rule) -> list[Drawn]:
        """The continuation of each prompt, by the present weights."""
        if self.server is None:
            return self.sampler.draw(prompts, numbers, rule)
        return self.server.draw(self.step, prompts, numbers, rule, self.sampler.alive)

    def rule(self, seed: int | None, purpose: str = "rollouts") -> Rule:
        """How tokens are chosen: by draws of the policy itself, at temperature 1, or the likeliest."""
        more = {"tokens": self.own.tokens, "finished": self.finished, "vocabulary": self.tokenizer.size}
        if seed is None:
            return Rule(**more)
        routes = self.own.routes == "sampler" and purpose == "rollouts"
        return Rule(sampling=Sampling(seed=seed, purpose=purpose), routes=routes, **more)

    def finished(self, ids: list[int]) -> bool:
        stop = self.own.stop
        if ids[-1] == self.tokenizer.eod_id:
            return True
        return stop is not None and stop in self.tokenizer.decode(ids[-len(stop.encode()) - 4 :])

    def text(self, drawn: Drawn) -> str:
        """The text of a completion, without the token or the text that ended it."""
        ids = drawn.tokens[:-1] if drawn.tokens[-1] == self.tokenizer.eod_id else drawn.tokens
        text = self.tokenizer.decode(ids)
        return text.partition(self.own.stop)[0] if self.own.stop is not None else text

    def verify(self, prompts: Sequence[Prompt], drawn: Sequence[Drawn]) -> list[Verdict]:
        """The verdict on each completion, by rank 0's processes."""
        found = None
        if self.world.is_main:
            facts = [{"completion_tokens": len(each.tokens), "ended": each.ended} for each in drawn]
            items = [
                Item(p.text, self.text(each), {**p.record, **fact}) for p, each, fact in zip(prompts, drawn, facts)
            ]
            found = [asdict(verdict) for verdict in self.verifier.judge(items, self.sampler.alive)]
        return [Verdict(**each) for each in self.world.communicator.broadcast(found)]

    def scored(self, found: list[Rollout]) -> list[Rollout]:
        """With advantages, and with log-probabilities by the weights that have drawn the texts."""
        texts = [Text((*each.prompt, *each.completion), len(each.completion)) for each in found]
        score = partial(self.sampler.log_probabilities, texts, self.tokenizer.size)
        reference, exact = [list[float]()] * len(found), self.sampler.exact
        old = [each.sampler for each in found] if exact and self.server is None else score()
        apart = fmean(abs(a - b) for each, own in zip(found, old) for a, b in zip(each.sampler, own))
        if self.server is not None and apart > self.own.server.limit:
            raise UserError(
                f"align.server: its log-probabilities differ by {apart:.3g} on average from the trainer's, and must "
                "by at most align.server.limit: it draws from other weights than it was given"
            )
        if self.config.objective.options.get("beta"):
            with self.engine.averaged():
                reference = score()
        # The first update of a round trains on the weights that have drawn it, unless rounds are behind.
        first = 0 if self.own.behind else self.config.training.global_batch_size
        trainer: list[list[float] | None] = [None] * len(found)
        whole, experts = list[list[float]](), [each.experts for each in found]
        if self.config.objective.options.get("replay") and self.own.routes == "trainer":
            whole, routes = self.sampler.with_routes(texts)
            experts = list(map(encoded, routes))
        if exact and first < len(found):
            trainer[first:] = whole[first:] or self.sampler.of_whole_texts(texts[first:])
        trainer[:first] = [[] for _ in found[:first]]
        rewards = np.array([each.reward for each in found]).reshape(-1, self.own.group)
        worth = advantages(rewards, self.own.advantage).flatten().tolist()
        return [
            replace(each, old=own, reference=other, advantage=value, trainer=passes, experts=routed)
            for each, own, other, value, passes, routed in zip(found, old, reference, worth, trainer, experts)
        ]

    def evaluate(self, trainer: Trainer) -> None:
        """Answer the held-out problems greedily."""
        if self.held_out is None:
            return
        self.step = trainer.completed
        prompts = [self.held_out(number) for number in range(self.own.problems)]
        with trainer.aside(EVALUATE, "held-out problems"):
            drawn = self.draw([each.ids for each in prompts], range(len(prompts)), self.rule(None))
            found = {"reward": fmean(each.reward for each in self.verify(prompts, drawn))}
            if self.own.votes:
                from .voting import Voting

                found |= Voting(self).evaluate(prompts)
        trainer.sinks.write({"step": trainer.completed, "held_out": found})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        trainer.log(f"held-out problems after {trainer.completed} steps: {shown}")


def encoded(experts: Tensor) -> str:
    """Experts [tokens, width] as a round's file has them."""
    return base64.b64encode(experts.numpy().astype("<u2").tobytes()).decode()


def numbers_of(rollouts: Sequence[Rollout], group: int) -> dict[str, float]:
    """Numbers of a round: means over its texts."""
    apart = [abs(old - drawn) for each in rollouts for old, drawn in zip(each.old, each.sampler)]
    rewards = np.array([each.reward for each in rollouts]).reshape(-1, group)
    return {
        "reward": float(rewards.mean()),
        "equal_groups": float((rewards == rewards[:, :1]).all(1).mean()),
        "completion_tokens": fmean(len(each.completion) for each in rollouts),
        "truncated": fmean(not each.ended for each in rollouts),
        "reward_failures": sum(each.failure is not None for each in rollouts),
        "sampler_difference": fmean(apart),
    }
