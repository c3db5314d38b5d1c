"""A layout to be judged: the choices that a search makes, as values of a configuration. No torch."""

import re
from dataclasses import dataclass, fields
from typing import Any

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.arithmetic.pipelines import SCHEDULES, V_SHAPED
from megatron.config.problems import ConfigError, Problem
from megatron.parallel.layout.layout import Layout

PARALLEL = "tensor pipeline context expert sequence folded stages_per_rank depth schedule columns".split()
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """Sizes of the axes, ZeRO stage, micro-batch and recomputation. Names as in the configuration."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 1
    micro_batch: int = 1  # `training.micro_batch_size`
    recompute: str = "none"  # `training.activation_checkpointing.mode`
    sequence: bool = False
    folded: int = 1  # `parallel.folded`: 1, or `context` where these ranks share matrices too
    stages_per_rank: int = 1
    depth: int = 1
    schedule: str = "1f1b"
    columns: int = 1  # second side of the grid of tensor parallel ranks

    @property
    def grid(self) -> int:
        """Ranks that share each matrix, without depth."""
        return self.tensor * self.columns

    @property
    def cuts(self) -> tuple[int, ...]:
        """Candidates with equal ones have layers of equal shapes, with the same place of a pipeline."""
        return self.tensor, self.columns, self.expert, self.sequence, self.folded, self.depth

    @property
    def inner(self) -> int:
        """Ranks of one data parallel replica."""
        return self.grid * self.pipeline * self.context

    @property
    def passes_weights(self) -> bool:
        """Whether a rank computes with temporary weights, with which selective recomputation does not work."""
        return self.zero == 3 or self.folded > 1

    @property
    def overlaps(self) -> bool:
        """`zero.overlap`, where it has an effect in every precision."""
        return self.zero > 1 and self.pipeline == 1

    @property
    def modes(self) -> tuple[str, ...]:
        """How much can be recomputed, the least first."""
        return tuple(mode for mode in RECOMPUTE if mode != "selective" or not self.passes_weights)

    def values(self) -> dict[str, Any]:
        """As nested values of a configuration."""
        checkpointing = {"mode": self.recompute, "every": 1 if self.recompute == "full" else None}
        training = {"micro_batch_size": self.micro_batch, "accumulation": None}
        return {
            "parallel": {name: getattr(self, name) for name in PARALLEL},
            "zero": {"stage": self.zero, "overlap": self.overlaps},
            "training": {**training, "activation_checkpointing": checkpointing},
        }

    def __str__(self) -> str:
        axes = {"t": self.tensor, "p": self.pipeline, "c": self.context, "e": self.expert, "f": self.folded}
        axes |= {"v": self.stages_per_rank, "d": self.depth, "col": self.columns}
        words = [f"{name}{size}" for name, size in axes.items() if size > 1 or name in "tp"]
        words += [self.schedule] if self.schedule not in ("1f1b", "interleaved") else []
        return " ".join([*words, f"zero{self.zero}", f"mb{self.micro_batch}", self.recompute])


def parse(text: str, option: str) -> dict[str, Any]:
    """A layout that a user names: `tensor=8,pipeline=4,recompute=full`. The search chooses the other values.

    Args:
        option: that has it, for messages.

    Raises:
        ConfigError: nothing is named, a name is not known or comes twice, or a value is not of its type.
    """
    types = {field.name: type(field.default) for field in fields(Candidate)}
    found: dict[str, Any] = {}
    for word in [each for each in text.split(",") if each.strip()] or [text]:
        name, _, value = (part.strip() for part in word.partition("="))
        kind = types.get(name)
        wrong = kind is None or name in found or (kind is int and not re.fullmatch("[0-9]{1,6}", value))
        wrong |= kind is bool and value not in ("true", "false")
        wrong |= value not in {"recompute": RECOMPUTE, "schedule": SCHEDULES}.get(name, (value,))
        wrong |= kind is int and name != "zero" and not value.strip("0")
        if wrong:
            rule = f"must be NAME=VALUE of {', '.join(types)}, recompute one of {', '.join(RECOMPUTE)}"
            rule += f", and schedule one of {', '.join(SCHEDULES)}"
            raise ConfigError([Problem(option, rule, "for example tensor=8,pipeline=4,zero=1", word)])
        found[name] = int(value) if kind is int else value == "true" if kind is bool else value
    if found.get("stages_per_rank", 1) > 1:
        found.setdefault("schedule", "interleaved")
    if found.get("schedule") in V_SHAPED:
        found.setdefault("stages_per_rank", 2)
    return found


def apply(config: Config, choice: Candidate, ranks: int) -> Config:
    """The configuration with a candidate's values, without checks, so that many can be counted quickly.

    Raises:
        ValueError: the ranks or the global batch cannot be cut like that.
    """
    parallel = config.parallel.model_copy(update={**choice.values()["parallel"], "expert_tensor": choice.tensor})
    if ranks % choice.inner:
        raise ValueError(f"{ranks} ranks are not a multiple of tensor * columns * pipeline * context = {choice.inner}")
    data, batch, batches = ranks // choice.inner, config.training.global_batch_size, batches_of(config)
    if batches.common % (choice.micro_batch * data):
        raise ValueError(
            f"global_batch_size {batches} is not a multiple of micro_batch_size {choice.micro_batch} * data {data}"
        )
    checkpointing = config.training.activation_checkpointing.model_copy(update={"mode": choice.recompute, "every": 1})
    sizes = {"micro_batch_size": choice.micro_batch, "accumulation": batch // (choice.micro_batch * data)}
    training = config.training.model_copy(update={**sizes, "activation_checkpointing": checkpointing})
    zero = config.zero.model_copy(update={"stage": choice.zero, "overlap": choice.overlaps})
    return config.model_copy(update={"parallel": parallel, "training": training, "zero": zero})


def layout_of(choice: Candidate, ranks: int) -> Layout:
    """The layout on `ranks` devices, which the candidate divides."""
    return Layout(
        tensor=choice.grid,
        columns=choice.columns,
        data=ranks // choice.inner,
        pipeline=choice.pipeline,
        sequence=choice.sequence and choice.tensor > 1,
        zero_stage=choice.zero,
        expert=max(choice.expert, choice.folded, choice.depth),
        context=choice.context,
        depth=choice.depth,
        gathers_experts=choice.expert == 1 < choice.depth,
        shares_rows=choice.folded > 1,
    )


def on_device(config: Config, gpu: bool) -> Config:
    """The same run with the value that `training.loss_chunk: null` has on GPUs or on CPUs."""
    tokens = config.training.tokens_of_loss(config.model.vocab_size, gpu)
    return config.model_copy(update={"training": config.training.model_copy(update={"loss_chunk": tokens})})
