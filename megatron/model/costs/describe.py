"""Costs of a model, layer by layer, from the layers' own counts. Needs no model, no device and no process group."""

from dataclasses import dataclass, replace
from typing import Any

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.arithmetic.recurrence import core_of, expected_passes, passes_of_step
from megatron.config.pattern import BlockPattern
from megatron.config.sequences import as_stage, stages_of
from megatron.config.teacher import teacher_config
from megatron.objectives.named import objective_of
from megatron.parallel.messages.traffic import SIZES

from ..block import block_counts, streams_saved
from ..counts import Counts
from ..embedding_and_head import embedding_counts, head_counts, multi_token_counts
from ..partition import rank_of


@dataclass(frozen=True)
class LayerCosts:
    """One layer of the list [embedding, blocks..., head].

    A block of a recurrent core has the costs of all its passes, but its parameters once. The head has the modules that
    predict further tokens, which only training runs."""

    name: str  # prefix of its logical names
    kind: str  # "embedding", "head", or the block's pattern
    stage: int  # the pipeline stage that holds it
    counts: Counts  # whole costs before recomputation. FLOPs and state are of an evaluation.
    # Elements saved per token for the backward pass, with the run's activation checkpointing, in units of the compute
    # type
    saved: int
    recomputed: int  # FLOPs per token of the forward pass that run a second time
    training_flops: float = 0.0  # per token, forward and backward, without what is recomputed. The mean over steps.


def layers(config: Config) -> list[LayerCosts]:
    """The costs of every layer.

    Args:
        config: resolved, with `model.vocab_size`.
    """
    model = config.model
    blocks = model.blocks
    further = multi_token_counts(model, config.training.sequence_length)
    counts = [
        embedding_counts(model),
        *(block_counts(model, block, config.training.sequence_length, index) for index, block in enumerate(blocks)),
        head_counts(model, objective_of(config).scores) + replace(further, flops=0),
    ]
    names = ["embedding", *(f"layers.{index}" for index in range(len(blocks))), "head"]
    kinds = ["embedding", *map(str, blocks), "head"]
    wider = model.hidden_size * (_stream_units(config) - 1)  # more to read of an fp32 stream
    saved = [
        (counts[0].activations + (wider if model.residual.channel_scales else 0), 0),
        *(_recomputation(config, index, block, each) for index, (block, each) in enumerate(zip(blocks, counts[1:-1]))),
        _head_recomputation(config, counts[-1], wider),
    ]
    rows = [LayerCosts(*r[:4], *r[4], 3 * r[3].flops) for r in zip(names, kinds, rank_of(config), counts, saved)]
    rows[-1] = replace(rows[-1], training_flops=rows[-1].training_flops + 3 * further.flops)
    inside = {index + 1 for index in core_of(blocks)}
    return [_repeated(config, row) if place in inside else row for place, row in enumerate(rows)]


def _repeated(config: Config, once: LayerCosts) -> LayerCosts:
    """A block of the core, from the costs of one pass. Activations are of steps with most of them."""
    options = config.model.recurrence
    mean, shown, counts = expected_passes(options), options.evaluation, once.counts
    flops, state, memory = (shown * each for each in (counts.flops, counts.state, counts.memory))
    return replace(
        once,
        counts=replace(counts, flops=flops, state=state, memory=memory),
        saved=options.backward * once.saved,
        recomputed=round(mean.backward * once.recomputed),
        training_flops=counts.flops * (mean.without + 3 * mean.backward),
    )


def _recomputation(config: Config, index: int, block: BlockPattern, counts: Counts) -> tuple[int, int]:
    """(elements saved per token, FLOPs per token computed again) of a block."""
    options, units = config.training.activation_checkpointing, _stream_units(config)
    width = config.model.hidden_size * units
    if config.training.sequence_chunks > 1:
        return width, counts.flops
    if options.mode == "selective":
        return width + counts.products, 0
    if options.mode == "full" and index % options.every == 0:
        return width, counts.flops
    streams = (units - 1) * config.model.hidden_size * streams_saved(config.model, block)
    return counts.activations + copies(config, counts) + streams, 0


def copies(config: Config, counts: Counts) -> int:
    """Elements that a layer keeps in addition to its activations, since it computes them in fp32."""
    return counts.copies if SIZES[config.precision.compute] == 2 else 0


def _head_recomputation(config: Config, counts: Counts, wider: int) -> tuple[int, int]:
    """(elements saved per token, FLOPs per token computed again) of the head. Blocks of modules that predict further
    tokens are recomputed as blocks of the stack are.

    Args:
        wider: elements that an fp32 stream adds to what the head reads.
    """
    model, saved, again = config.model, counts.activations + wider, 0
    for index, block in enumerate(model.further_blocks, start=len(model.blocks)):
        own = block_counts(model, block, config.training.sequence_length, index)
        kept, flops = _recomputation(config, index, block, own)
        saved, again = saved + kept - own.activations + wider, again + flops
    return saved, again


def _stream_units(config: Config) -> int:
    return SIZES["fp32"] // SIZES[config.precision.compute] if config.model.residual.fp32 else 1


def layers_table(config: Config) -> list[dict[str, Any]]:
    """One row per layer.

    FLOPs are of the forward pass per token. Activations are of one micro-batch, of all tensor parallel ranks together.
    The decoding state is of one sample of training.sequence_length tokens."""
    size, tokens = SIZES[config.precision.compute], config.training.micro_batch_size * config.training.sequence_length
    return [
        {
            "name": layer.name,
            "kind": layer.kind,
            "stage": layer.stage,
            "parameters": layer.counts.parameters,
            "active_parameters": layer.counts.parameters - layer.counts.idle,
            "flops": layer.counts.flops,
            "activation_bytes": layer.saved * tokens * size,
            "state_bytes": (layer.counts.state - layer.counts.memory) * size + layer.counts.memory * SIZES["fp32"],
        }
        for layer in layers(config)
    ]


@dataclass(frozen=True)
class Totals:
    """Costs of the whole model."""

    parameters: int  # trainable elements
    active_parameters: int  # parameters without the experts that a token does not choose
    embedding_parameters: int  # of the token and position embeddings and of an untied head's matrix
    forward_flops: int  # per token.
    # Per token, forward and backward. The backward pass counts as twice the forward pass, without recomputation. A
    # recurrent core has the mean over steps. Model FLOPs utilisation is a share of this.
    training_flops: int
    hardware_flops: int  # the same with recomputation
    core_flops: int = 0  # of one forward pass through a recurrent core

    @property
    def non_embedding_parameters(self) -> int:
        return self.parameters - self.embedding_parameters


def totals(config: Config) -> Totals:
    """The sums over all layers."""
    rows, model = layers(config), config.model
    training = round(sum(row.training_flops for row in rows))
    vocabularies = 1 if model.embedding.tied else 2
    positions = model.embedding.max_positions if model.embedding.position == "learned" else 0
    forward = sum(row.counts.flops for row in rows)
    return Totals(
        parameters=sum(row.counts.parameters for row in rows),
        active_parameters=sum(row.counts.parameters - row.counts.idle for row in rows),
        embedding_parameters=(vocabularies * model.vocab_size + positions) * model.hidden_size,
        forward_flops=forward,
        training_flops=training,
        hardware_flops=training + sum(row.recomputed for row in rows),
        core_flops=sum(rows[index + 1].counts.flops // model.recurrence.evaluation for index in core_of(model.blocks)),
    )


def teacher_flops(config: Config) -> int:
    """FLOPs per token of the teacher's forward pass. 0 without one.

    Raises:
        UserError: its checkpoint cannot be read.
    """
    if objective_of(config).teacher is None or config.objective.teacher is None:
        return 0
    model = teacher_config(config.objective.teacher).model
    return totals(config.model_copy(update={"model": model})).forward_flops


def flops_of_step(config: Config, total: Totals, step: int) -> float:
    """`training_flops` of a training step, with the passes through a recurrent core that this step draws.

    Args:
        total: of the configuration.
    """
    if not total.core_flops:
        return total.training_flops
    options = config.model.recurrence
    mean, own = expected_passes(options), passes_of_step(options, config.training.seed, step)
    return total.training_flops + total.core_flops * (own.without - mean.without + 3 * (own.backward - mean.backward))


def training_operations(config: Config, completed: int) -> int:
    """FLOPs of all tokens of n completed updates, forward and backward. Shorter stages of sequence length have
    fewer."""
    batches, found = batches_of(config), 0
    for stage in stages_of(config):
        end = completed if stage.end is None else min(stage.end, completed)
        if end > stage.begin:
            samples = batches.before(end) - batches.before(stage.begin)
            found += samples * totals(as_stage(config, stage)).training_flops
    return found * config.training.sequence_length
