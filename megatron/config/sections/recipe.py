"""How the model learns: steps and batches, optimizer, schedule, objective."""

from typing import Any, Literal

from ..arithmetic.batches import Uncounted, steps_of_epochs
from ..features.feature import extended
from ..registry import OBJECTIVE, OPTIMIZER, SCHEDULE
from ..section import Derivable, Derived, RotaryScaling, Section, key, same_as
from .layout import ActivationCheckpointing


def _steps(own: dict[str, Any], at: Any) -> int:
    if own["epochs"] is not None:
        try:
            return steps_of_epochs(at.__getitem__)
        except Uncounted:
            pass
    return 1  # rules/recipe.py reports the missing key, and the rest can be checked


def _accumulation(own: dict[str, Any], at: Any) -> int | None:
    total, ranks = own["global_batch_size"], at.data_ranks
    if total is None:
        return 1
    per_pass = own["micro_batch_size"] * ranks if ranks else None
    return total // per_pass if per_pass and total % per_pass == 0 else None


def _global_batch_size(own: dict[str, Any], at: Any) -> int | None:
    if at.data_ranks is None or own["accumulation"] is None:
        return None
    return own["micro_batch_size"] * own["accumulation"] * at.data_ranks


class StageRotary(Section):
    base: float = key(..., "Base of the rotary frequencies in the stage.", gt=0)
    scaling: RotaryScaling = key(RotaryScaling, "Frequency scaling in the stage.")


class SequenceStage(Section):
    until: int = key(..., "Updates that are done when the stage ends.", unit="steps", gt=0)
    sequence_length: int = key(
        ..., "Tokens per sample in the stage. It divides training.sequence_length.", unit="tokens", gt=0, le=2**31 - 1
    )
    rotary: dict[str, StageRotary] = key(
        dict,
        "Rotary options of the stage by kind of layer (`attention`), or kind and variant (`attention@far`). Other "
        "kinds have the options of the model.",
    )


class BatchStage(Section):
    until: int | None = key(None, "Updates that are done when the stage ends.", unit="steps", gt=0)
    until_tokens: int | None = key(
        None,
        "Instead of until: tokens of the run that are read when the stage ends. The batch that has the last of them is "
        "the stage's last.",
        unit="tokens",
        gt=0,
    )
    global_batch_size: int = key(..., "Samples per optimizer step in the stage.", unit="samples", gt=0)


@extended("training")
class TrainingSection(Section):
    steps: Derivable[int] = key(
        None,
        "Optimizer steps of the whole run. Required, unless training.epochs is given.",
        unit="steps",
        derived=Derived(
            "whole batches of training.epochs times the samples that the sources of data.train have",
            _steps,
            (".epochs", ".global_batch_size", ".sequence_length", "data.train", "data.split", "data.order"),
        ),
        ge=0,
        le=10**12,
    )
    seed: int = key(1234, "Seed of the initial weights, of dropout and of the data order.", ge=0)
    sequence_length: int = key(..., "Tokens per sample that the model reads.", unit="tokens", gt=0, le=2**31 - 1)
    sequence_schedule: list[SequenceStage] = key(
        list,
        "Stages of shorter sequences before the steps with training.sequence_length. A batch has the same tokens "
        "in all of them (docs/long_context.md).",
    )
    micro_batch_size: int = key(1, "Samples per forward pass of a data parallel rank.", unit="samples", gt=0, le=2**20)
    global_batch_size: Derivable[int] = key(
        None,
        "Samples per optimizer step over all ranks.",
        unit="samples",
        derived=Derived(
            "training.micro_batch_size * training.accumulation * data parallel size",
            _global_batch_size,
            ("training.micro_batch_size", "training.accumulation"),
        ),
        gt=0,
    )
    batch_schedule: list[BatchStage] = key(
        list, "Stages of other batch sizes before the steps with training.global_batch_size (docs/data.md)."
    )
    accumulation: Derivable[int] = key(
        None,
        "Micro-batches per optimizer step and data parallel rank.",
        unit="micro-batches",
        derived=Derived(
            "training.global_batch_size / (training.micro_batch_size * data parallel size), or 1",
            _accumulation,
            ("training.global_batch_size", "training.micro_batch_size"),
        ),
        gt=0,
    )
    z_loss: float = key(0.0, "Coefficient of the mean squared log-partition (PaLM z-loss).", ge=0)
    loss_chunk: int | None = key(
        None,
        "Tokens whose logits exist at one time while the loss is computed. 0 computes all at once. null: 1024 on CPUs. "
        "On GPUs 8192, halved while their logits and gradients take more than 2.5 GiB, and 1024 at least.",
        unit="tokens",
        ge=0,
    )
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing, "Trade computation for memory.")
    sequence_chunks: int = key(
        1,
        "Chunks of a sequence that a layer computes one after the other. Each is recomputed in the backward pass, "
        "and keys and values of earlier ones are in the host's memory (docs/long_context.md).",
        unit="chunks",
        ge=1,
        le=2**16,
    )
    weight_average: float | None = key(
        None,
        "Coefficient of an exponential moving average of the weights over steps, such as 0.999. 1 keeps the first "
        "weights. It is evaluated with the weights, saved, and exported by to_hf.py --average.",
        gt=0,
        le=1,
    )
    compile: Literal["auto", "off", "layer"] = key(
        "auto", "torch.compile: where it pays (GPUs), off, or per layer (parts where collectives or draws cut it)."
    )
    cuda_graphs: bool = key(
        False,
        "Replay compiled blocks of attention and mlp as CUDA graphs. Shapes and addresses must be the same in "
        "every step (docs/performance.md).",
    )
    deterministic: bool = key(False, "Use deterministic kernels where torch has them.")
    epochs: int | None = key(
        None,
        "Passes over the training data, instead of training.steps (docs/data.md). With the pythia order each repeats "
        "the first, as GPT-NeoX's train_epochs does.",
        unit="epochs",
        gt=0,
        le=10**9,
    )
    stop_after: float | None = key(None, "Wall time after which the run saves and stops.", unit="minutes", gt=0)
    stop_at_step: int | None = key(
        None, "Save and stop after this step although the schedule ends at training.steps.", unit="steps", gt=0
    )

    def tokens_of_loss(self, vocabulary: int, on_gpu: bool = False) -> int:
        """Tokens of a chunk of the loss on a device. 0: all."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        tokens = 8192 if on_gpu else 1024
        while tokens > 1024 and 6 * tokens * vocabulary > 2.5 * 2**30:  # logits in fp32, their gradients in 16 bits
            tokens //= 2
        return tokens


@extended("objective")
class ObjectiveSection(Section):
    type: str = key("cross_entropy", "Which labels count, and what each costs (docs/data.md).", role=OBJECTIVE)
    k: int = key(4, "goldfish: mask one in k labels.", ge=2, le=10**6)
    h: int = key(13, "goldfish: the h tokens before a label decide whether it is masked.", unit="tokens", ge=1, le=1024)
    mask: Literal["hashed", "static", "reference"] = key(
        "hashed",
        "goldfish: rule of masked labels. hashed: a hash of the h tokens before the label in its document. "
        "static: every k-th one of a sample. reference: as in the authors' program (docs/memorisation.md).",
    )
    teacher: str | None = key(None, "distillation: checkpoint to learn from, never changed (docs/distillation.md).")
    alpha: float = key(
        0.5,
        "distillation: share of the divergence from the teacher in the cost of a label. The rest is its cross-entropy.",
        gt=0,
        le=1,
    )
    temperature: float = key(1.0, "distillation: both models' logits are divided by this in the divergence.", gt=0)
    options: dict[str, Any] = key(dict, "Further options, for an objective from a package of yours.")


class ParameterGroup(Section):
    lr_scale: float = key(1.0, "The scheduled learning rate is multiplied by this.", ge=0)
    weight_decay: Derivable[float] = key(None, "Weight decay.", derived=same_as("optimizer.weight_decay"), ge=0)
    betas: tuple[float, float] | None = key(None, "Averaging coefficients. null: optimizer.betas.", strict=False)
    epsilon: float | None = key(None, "Epsilon of this role. null: optimizer.epsilon.", gt=0)


ParameterRole = Literal[
    "embedding", "position", "head", "norm", "bias", "hidden", "output", "router", "state", "decay", "convolution"
]


@extended("optimizer")
class OptimizerSection(Section):
    type: str = key(
        "adamw", "Optimizer (docs/optimizers.md). muon and soap leave all but hidden matrices to AdamW.", role=OPTIMIZER
    )
    lr: float = key(3e-4, "Peak learning rate.", ge=0, le=1000)
    betas: tuple[float, float] = key((0.9, 0.95), "Averaging coefficients of AdamW and Lion.", strict=False)
    epsilon: float = key(1e-8, "Added to AdamW's denominator.", gt=0)
    weight_decay: float = key(0.1, "Decoupled weight decay.", ge=0)
    momentum: float = key(0.9, "Momentum of sgd.", ge=0, lt=1)
    nesterov: bool = key(False, "Nesterov momentum of sgd.")
    muon_lr: float = key(0.02, "Peak learning rate of muon's matrices.", ge=0, le=1000)
    muon_momentum: float = key(0.95, "Momentum of muon's matrices.", ge=0, lt=1)
    muon_scale: Literal["original", "moonlight"] = key(
        "original",
        "Size of muon's updates. original: sqrt(max(1, rows / columns)). moonlight: 0.2 sqrt(max(rows, columns)), "
        "the size of AdamW's, so that muon_lr can be AdamW's rate.",
    )
    gradient_clipping: float = key(1.0, "Largest global gradient norm. Larger ones are scaled down. 0 is off.", ge=0)
    fused: bool = key(True, "Use the fused implementation where the device has one.")
    groups: dict[ParameterRole, ParameterGroup] = key(
        lambda: {role: ParameterGroup(weight_decay=0.0) for role in ("norm", "bias", "state", "decay")},
        "Settings by role of a parameter, merged with the default. Other roles use the optimizer's own.",
    )
    options: dict[str, Any] = key(dict, "Further options of the optimizer (docs/optimizers.md), or of your own.")


class ScheduleSection(Section):
    type: str = key("cosine", "Shape of the learning rate after the warmup.", role=SCHEDULE)
    warmup_steps: int | None = key(None, "Linear warmup, in steps.", unit="steps", ge=0)
    warmup_tokens: int | None = key(None, "Linear warmup, in tokens.", unit="tokens", ge=0)
    warmup_fraction: float | None = key(None, "Linear warmup, as a share of schedule.steps.", ge=0, le=1)
    steps: Derivable[int] = key(
        None,
        "Step at which the schedule ends.",
        unit="steps",
        derived=Derived("training.steps", lambda own, at: max(at["training.steps"], 1), ("training.steps",)),
        gt=0,
    )
    start: int = key(0, "Step at which the schedule begins (rewarming in continual pretraining).", unit="steps", ge=0)
    min_lr_ratio: float = key(0.1, "The lowest learning rate as a share of the peak.", ge=0, le=1)
    initial_lr_ratio: float = key(0.0, "The warmup starts from this share of the peak.", ge=0, le=1)
    decay_steps: Derivable[int] = key(
        None,
        "wsd and infinite: length of the final decay.",
        unit="steps",
        derived=Derived(
            "10 % of schedule.steps",
            lambda own, at: max(own["steps"] // 10, 1) if own["type"] in ("wsd", "infinite") else None,
            ("schedule.steps",),
        ),
        gt=0,
    )
    decay_shape: Literal["linear", "sqrt", "cosine", "exponential"] = key("linear", "wsd: form of the final decay.")
    cooldown_steps: int | None = key(None, "infinite: steps from the peak to the constant rate.", unit="steps", ge=0)
    cooldown_shape: Literal["cosine", "inverse_sqrt"] = key("cosine", "infinite: form of the cooldown.")
    constant_lr_ratio: float = key(0.5, "infinite: the constant rate as a share of the peak.", gt=0, le=1)
    compat: Literal["none", "neox", "neox-v1"] = key(
        "none",
        "Reproduce GPT-NeoX's learning rates, step for step. neox: of today's version. neox-v1: of 1.0 (Pythia, "
        "GPT-NeoX-20B).",
    )
    options: dict[str, Any] = key(dict, "Further options, for a schedule from a package of yours.")
