"""The valid layouts of a run on a machine, which of them fit, and their speed.

A layout is valid if the launcher would start it. The same rules resolve every structure (sizes of the axes, ZeRO
stage), and each result before it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import gcd, inf, prod
from typing import Any

import yaml

from megatron.config import Config, ConfigError, Problem
from megatron.config.arithmetic.batches import Batches, batches_of
from megatron.config.arithmetic.pipelines import in_rounds, least_micro_batches
from megatron.config.problems import ABSENT, divisors
from megatron.config.resolution import Resolved, combine
from megatron.config.source.files import gather, run_name, translate_flat
from megatron.config.source.layers import ConfigSource
from megatron.config.tree import get, leaves, put
from megatron.model.costs.describe import teacher_flops, totals

from .candidate import Candidate, apply
from .devices import Cluster
from .memory import TIGHT, Memory, memory
from .shapes import Shapes
from .step import StepEstimator, StepTime

WORTH = 1.11  # times as fast must be what is near the limit: the formulas' median error on published runs
MICRO_BATCHES = tuple(2**power for power in range(8))
# Pipeline schedules with their stages per rank, in addition to 1F1B. More stages only add messages.
SCHEDULES_TRIED = (("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_h1", 2), ("zb_h1", 4), ("zbv", 2))
NOT_TRIED = {  # a plan's W is never longer than F, and tests/config/arithmetic/test_pipelines.py shows the first reason
    "dualpipe_v": "its bubble is shorter than the bubbles of zbv and zb_h1 only if gradients of weights take "
    "longer than a forward pass, and it keeps half a micro-batch more",
    "asynchronous": "its table is that of 1f1b, and it needs CPU ranks",
}
LONG = 16384  # tokens from which ranks may share a sequence: below, other axes are better


@dataclass(frozen=True)
class Plan:
    """A layout that is legal and fits."""

    choice: Candidate
    memory: Memory
    step: StepTime
    tokens_per_second: float  # of the whole machine
    mfu: float  # model FLOPs (without recomputation, attention over the whole square) as a share of the devices' peak
    share: float  # of a device's memory that it takes

    @property
    def turn(self) -> tuple[float, float]:
        """Rank of a plan: the time of a step, longer for plans near the memory limit. A gain below the error of the
        formulas may not be real, but the free memory is."""
        return self.step.seconds * (WORTH if self.share > TIGHT else 1.0), self.memory.total

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": vars(self.choice),
            "step": self.step.to_json(),
            "memory": self.memory.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "memory_share": self.share,
        }


@dataclass
class Question:
    """A run and a machine to plan for.

    Attributes:
        missing: keys that the files leave open and every answer therefore says: precision, global batch.
    """

    sources: list[ConfigSource]  # of the configuration, in the order in which they are merged
    at: Cluster  # the machine
    base: Config  # the run on one rank, with its global batch for the machine
    missing: dict[str, Any] = field(default_factory=dict)
    _legal: dict[Candidate, Problem | None] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Sequence[str], overrides: Sequence[str], at: Cluster) -> Question:
        """Read a run's files and ignore their layout.

        Raises:
            ConfigError: they are wrong by themselves.
        """
        sources, _ = translate_flat(gather(files, overrides))
        return cls.from_sources(sources, at, run_name(files[0]) if files else "run")

    @classmethod
    def from_sources(cls, sources: list[ConfigSource], at: Cluster, name: str = "run") -> Question:
        """The same for sources that were read before."""
        missing: dict[str, Any] = {}
        clean = ConfigSource({**_values(Candidate()), "launch": {"ranks": None, "hostfile": None}})
        if at.device.name != "cpu" and all(each.values.get("precision") is None for each in sources):
            missing["precision"] = "bf16"
            clean.values["precision"] = {"compute": "bf16"}
        given = [get(each.values, ("training", "global_batch_size"), None) for each in sources]
        if not any(given):
            keys = [("training", name) for name in ("accumulation", "micro_batch_size")]
            given = [next(filter(None, (get(each.values, key, 0) for each in reversed(sources))), 1) for key in keys]
            missing["global_batch_size"] = prod(given) * at.devices
            clean.values["training"]["global_batch_size"] = missing["global_batch_size"]
        sources = [*sources, clean]
        resolved = combine(sources, ranks=1, check_inputs=False, name=name, here=False)
        if resolved.config.model.vocab_size is None:
            rule = "planning needs the vocabulary's size"
            fix = "give model.vocab_size, or a local tokenizer in tokenizer.path"
            raise ConfigError([Problem("model.vocab_size", rule, fix)])
        return cls(sources, at, resolved.config, missing)

    def on(self, at: Cluster) -> Question:
        """The same run on another machine."""
        same = at.devices == self.at.devices  # what the launcher refuses does not depend on links
        other = Question(self.sources, at, self.base, self.missing, self._legal if same else {})
        if same:
            other.shapes = self.shapes
        return other

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.base, self.at.devices)

    @cached_property
    def clock(self) -> StepEstimator:
        return StepEstimator(self.base, self.shapes, self.at)

    @cached_property
    def batches(self) -> Batches:
        return batches_of(self.base)

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.batches.before(self.base.training.steps) * self.base.training.sequence_length

    @cached_property
    def flops(self) -> int:
        """Of training on one token."""
        return totals(self.base).training_flops + teacher_flops(self.base)

    def resolved(self, choice: Candidate) -> Resolved:
        """The launcher's resolved configuration of a layout.

        Raises:
            ConfigError: it would refuse.
        """
        source = ConfigSource(_values(choice))
        return combine([*self.sources, source], ranks=self.at.devices, check_inputs=False, here=False)

    def warnings(self, choice: Candidate) -> tuple[Problem, ...]:
        """Warnings of `config check` about a layout that the launcher would start."""
        return self.resolved(choice).warnings

    def lines(self, choice: Candidate) -> str:
        """YAML that sets a layout on top of the run's own files: all values that differ from them or from defaults."""
        found: dict[str, Any] = {"precision": self.missing["precision"]} if "precision" in self.missing else {}
        defaults = _values(Candidate())
        for path, value in leaves(_values(choice)):
            said = [here for each in self.sources[:-1] if (here := get(each.values, path)) is not ABSENT]
            before = said[-1] if said else 1 if path[-1] == "every" and value else get(defaults, path)
            if value != before or path in ALWAYS:
                put(found, path, value)
        if "global_batch_size" in self.missing:
            put(found, ("training", "global_batch_size"), self.missing["global_batch_size"])
        shown = (yaml.safe_dump({k: v}, default_flow_style=True, sort_keys=False, width=1000) for k, v in found.items())
        return "".join(each[1:-2] + "\n" for each in shown)

    def refusal(self, choice: Candidate) -> Problem | None:
        """Why the launcher would not start a layout. None if it would."""
        key = replace(choice, recompute="none", micro_batch=1)
        if choice.recompute == "selective" and choice.passes_weights:
            key = replace(key, recompute="selective")
        if key not in self._legal:
            try:
                self.resolved(key)
                self._legal[key] = None
            except ConfigError as error:
                self._legal[key] = next(each for each in error.problems if each.fatal)
        return self._legal[key]

    def structures(self) -> Iterator[Candidate]:
        """Sizes of axes and ZeRO stages that may be valid, without the ones that arithmetic excludes."""
        devices, config = self.at.devices, self.base
        blocks, length = len(config.model.blocks), config.training.sequence_length
        experts = self.experts()
        contexts = [1] if length < LONG else [1, 2, 4, 8, 16]
        stages = (1, 2, 3) if config.precision.compute != "fp32" else (0, 1, 2, 3)
        for (tensor, columns), pipeline, context in product(self.grids, divisors(devices), contexts):
            grid = tensor * columns
            inner = grid * pipeline * context
            if devices % inner or pipeline > blocks or (columns > 1 and context > 1):
                continue
            if self.batches.common % (devices // inner):
                continue
            if context > 1 and pipeline * tensor > 2 * self.at.per_host:
                continue
            replicas = devices // (grid * pipeline)
            spreads = [each for each in divisors(replicas) if experts and experts % each == 0 and each <= 64]
            for expert in spreads or [1]:
                for zero in stages:
                    if zero == 3 and (expert > 1 or columns > 1):
                        continue
                    cut = tensor > 1 and columns == 1
                    once = Candidate(tensor, pipeline, context, expert, zero, sequence=cut, columns=columns)
                    yield once
                    if zero == 3:
                        continue
                    if context == 1:
                        depths = divisors(gcd(replicas, max(1, self.at.per_host // grid)))[1:]
                        yield from (
                            replace(once, depth=each)
                            for each in depths
                            if not experts or expert in (1, each) and experts % each == 0
                        )
                    if tensor == 1 < context and (expert == context or not experts):
                        yield Candidate(1, pipeline, context, expert, zero, folded=context)

    @cached_property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of tensor parallel ranks, powers of two on at most two hosts. Columns send three times the
        numbers of rows, so more than two are tried only where no more rows are possible."""
        most = min(self.at.devices, 2 * self.at.per_host)
        sides = [each for each in divisors(most) if not each & (each - 1)]
        rows = max(each for each in sides if each == 1 or self._starts(Candidate(each)))
        columns = sides if self._starts(Candidate(columns=2)) else [1]
        return [(r, c) for r in sides for c in columns if r * c <= most and (c <= 2 or r == rows)]

    def _starts(self, choice: Candidate) -> bool:
        """Whether the launcher starts a layout on its fewest ranks."""
        try:
            combine([*self.sources, ConfigSource(_values(choice))], ranks=choice.inner, check_inputs=False, here=False)
        except ConfigError:
            return False
        return True

    def experts(self) -> int:
        """Largest number of experts of a layer, 0 without such layers."""
        shapes = self.shapes
        return max((shapes.experts(place)[1] for place in range(shapes.places)), default=0)

    def judge(self, choice: Candidate) -> Plan:
        """Memory and time of a layout, whether it fits or not.

        Raises:
            ValueError: its sizes do not divide the devices or the batch.
        """
        config = apply(self.base, choice, self.at.devices)
        need = memory(config, self.shapes, choice, self.at)
        step = self.clock.step(config, choice)
        tokens = config.training.global_batch_size * config.training.sequence_length / step.seconds
        peak = self.at.device.peak(config.precision.compute) * self.at.devices
        return Plan(choice, need, step, tokens, tokens * self.flops / peak, need.total / self.at.device.bytes)

    def seconds_of(self, choice: Candidate) -> float:
        """Of one step in a layout that was judged before."""
        return self.clock.step(apply(self.base, choice, self.at.devices), choice).seconds

    def seconds(self, plan: Plan) -> float:
        """Of the whole run in a layout: each stage of batch size has its own steps."""
        found, training = 0.0, self.base.training
        for size, steps in self.batches.counts(training.steps):
            if size == training.global_batch_size:
                found += steps * plan.step.seconds
                continue
            own = training.model_copy(update={"global_batch_size": size, "batch_schedule": []})
            config = apply(self.base.model_copy(update={"training": own}), plan.choice, self.at.devices)
            found += steps * self.clock.step(config, plan.choice).seconds
        return found

    def answers(self, fixed: dict[str, Any] | None = None) -> Answers:
        """All layouts that fit, sorted by `turn`. Each structure has 1F1B. If it could be the first without the bubble,
        it also has the fastest of its other schedules.

        Args:
            fixed: values that every layout must have.
        """
        fixed, found = fixed or {}, Answers(self)
        axes = {name: value for name, value in fixed.items() if name in STRUCTURE}
        schedule: dict[str, Any] = {name: axes.pop(name) for name in ("stages_per_rank", "schedule") if name in axes}
        first, counted = inf, 0  # the shortest turn of the first `counted` plans
        for structure in self.structures():
            if not _agrees(structure, axes):
                continue
            problem = self.refusal(structure)
            if problem is not None and structure.sequence:
                structure = replace(structure, sequence=False)
                problem = self.refusal(structure)
            found.tried += 1
            if problem is not None:
                found.refuse(problem)
                continue
            own = Answers(self)
            without_bubble = self._fill(structure, fixed, own)
            if _agrees(structure, schedule):
                found.add(own)
            first = min((first, *(plan.turn[0] for plan in found.plans[counted:])))
            counted = len(found.plans)
            if without_bubble < first and (own.plans or schedule):  # no schedule keeps less than 1F1B
                others = [each for each in self.schedules(structure, fixed) if _agrees(each, schedule)]
                self._schedule(others, fixed, found)
        found.plans.sort(key=lambda plan: plan.turn)
        return found

    def schedules(self, structure: Candidate, fixed: dict[str, Any] | None = None) -> Iterator[Candidate]:
        """The structure with other schedules of its pipeline, if each stage has a block.

        Args:
            fixed: may name one that is not tried by itself.
        """
        if structure.pipeline == 1 or max(structure.folded, structure.depth, structure.columns) > 1:
            return
        named = (fixed or {}).get("schedule", "1f1b")
        more = [] if named == "1f1b" else [(named, (fixed or {}).get("stages_per_rank", 1))]
        for schedule, each in dict.fromkeys((*SCHEDULES_TRIED, *more)):
            if structure.pipeline * each <= len(self.base.model.blocks):
                yield replace(structure, schedule=schedule, stages_per_rank=each)

    def compared(self, plan: Plan) -> list[Plan]:
        """A layout under each schedule that it can have, the first in `turn` first."""
        choice = replace(plan.choice, schedule="1f1b", stages_per_rank=1)
        found = [choice, *self.schedules(choice, vars(plan.choice))]
        legal = (each for each in found if self._allows(each) and self.refusal(each) is None)
        return sorted((self.judge(each) for each in legal), key=lambda each: (each.share > 1, each.turn))

    def _schedule(self, structures: list[Candidate], fixed: dict[str, Any], found: Answers) -> None:
        """Add the layouts of the fastest of these schedules, and of the first one in `turn`."""
        tries = []
        for structure in structures:
            own = Answers(self)
            self._fill(structure, fixed, own)
            tries.append((structure, own))
        orders = [
            sorted(tries, key=lambda each: min(map(value, each[1].plans), default=inf))
            for value in (lambda plan: plan.turn[0], lambda plan: plan.step.seconds)
        ]
        known = dict[Candidate, Problem | None]()
        for order in orders:
            for structure, own in order:
                if structure not in known:
                    known[structure] = problem = self.refusal(structure)
                    found.tried += 1
                    if problem is None:
                        found.add(own)
                    else:
                        found.refuse(problem)
                if known[structure] is None and own.plans:
                    break

    def _allows(self, choice: Candidate) -> bool:
        """Whether the data axis and the schedule divide each batch size of the run."""
        data = self.at.devices // choice.inner
        samples, unit = choice.micro_batch * data, choice.pipeline if in_rounds(choice) else 1
        return self.batches.common % samples == 0 and all(
            size % (samples * unit) == 0 and size >= samples * least_micro_batches(choice)
            for size, _ in self.batches.counts(self.base.training.steps)
        )

    def _fill(self, structure: Candidate, fixed: dict[str, Any], found: Answers) -> float:
        """Add the micro-batches that fit a structure, each with the least recomputation that makes it fit. Return the
        shortest step without a bubble."""
        least = inf
        once = self.base.training.cuda_graphs or self.base.parallel.async_tensor  # a block runs once a step
        for micro in MICRO_BATCHES:
            sized = replace(structure, micro_batch=micro)
            if micro != fixed.get("micro_batch", micro) or not self._allows(sized):
                continue
            fits = False
            for mode in structure.modes:
                if mode != fixed.get("recompute", mode) or (mode != "none" and once):
                    continue
                plan = self.judge(replace(sized, recompute=mode))
                found.consider(plan)
                least = min(least, plan.step.seconds - plan.step.parts["bubble"])
                if plan.share <= 1:
                    fits = True
                    break
            if not fits and "micro_batch" not in fixed:
                break
        return least


ALWAYS = (("zero", "stage"), ("training", "micro_batch_size"))  # shown also where they are defaults
AXES = ("tensor", "columns", "pipeline", "context", "expert", "folded", "depth")
STRUCTURE = (*AXES, "zero", "stages_per_rank", "schedule")


def _agrees(structure: Candidate, values: dict[str, Any]) -> bool:
    return all(getattr(structure, name) == value for name, value in values.items())


@dataclass
class Answers:
    """Results of a search."""

    question: Question
    plans: list[Plan] = field(default_factory=list)  # that fit, in their `turn`: mostly the fastest first
    closest: Plan | None = None  # the one that needs least memory, where none fits
    refused: Counter[str] = field(default_factory=Counter)  # how many structures each rule refused
    refusal: Problem | None = None  # one of these problems
    tried: int = 0  # structures
    large: int = 0  # layouts that do not fit

    @property
    def distinct(self) -> list[Plan]:
        """The first plan of each structure."""
        first: dict[Candidate, Plan] = {}
        for plan in self.plans:
            first.setdefault(replace(plan.choice, micro_batch=1, recompute="none"), plan)
        return list(first.values())

    def refuse(self, problem: Problem) -> None:
        """Count a structure that the launcher would not start."""
        self.refused[f"{problem.key}: {problem.rule}"] += 1
        self.refusal = self.refusal or problem

    def consider(self, plan: Plan) -> None:
        """Add a layout."""
        if plan.share <= 1:
            self.plans.append(plan)
            return
        self.large += 1
        if self.closest is None or plan.share < self.closest.share:
            self.closest = plan

    def add(self, others: Answers) -> None:
        """Add the layouts of another search."""
        self.plans += others.plans
        self.large += others.large
        if others.closest is not None and (self.closest is None or others.closest.share < self.closest.share):
            self.closest = others.closest


def _values(choice: Candidate) -> dict[str, Any]:
    """All keys that a layout sets. Keys that no candidate varies have their defaults."""
    values = choice.values()
    values["parallel"] |= {"pipeline_split": "parameters", "expert_tensor": None, "context_method": "auto"}
    values["parallel"] |= {"context_ulysses": None, "context_cut": "auto"}
    return values
