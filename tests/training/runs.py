"""One short training run, in two ways: through the engine on this rank of a layout, and in plain PyTorch.

Both start from the same perturbed weights and read the same batches. The plain run shares the model's layers with the
engine, but neither its loss, accumulation, clipping, optimizer nor anything of DeepSpeed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron.config import Config, resolve
from megatron.data.batch import StepBatch
from megatron.data.plan import Targets
from megatron.data.sample import Sample
from megatron.kinds.moe.losses import Balance
from megatron.model.stream import LOSS
from megatron.objectives.named import objective_of
from megatron.parallel.layers.parameters import buffers_of, stored_tensors
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.precision import at_least_fp32, wide_type
from megatron.parallel.layout.shard import LogicalTensor
from tests.checkpoint.brute import local_shard
from tests.training.plain_averages import PlainScheduleFree
from tests.training.plain_learned import PlainLearned
from tests.training.plain_matrices import PLAIN, PlainAdEMAMix, PlainCautious, PlainMatrices

HALF_A_DIGIT = torch.finfo(torch.float32).eps / 2
EVALUATION = 1000  # the step whose batch is for evaluation


@dataclass
class Outcome:
    """Numbers of a run: per step the loss and the gradient norm. Mean loss and weight of the evaluation, and
    weights."""

    losses: list[float]
    norms: list[float]
    evaluation: tuple[float, float]
    weights: dict[str, np.ndarray]


def noise(tensor: LogicalTensor) -> np.ndarray:
    """Number added to each initial value of a tensor, fp32 of the logical shape."""
    generator = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    return generator.normal(0.0, 0.1, tensor.shape).astype(np.float32)


def global_batch(config: Config, step: int) -> StepBatch:
    """All samples of a step in one micro-batch. The first two have no label that counts, the others more and more."""
    B, S = config.training.global_batch_size, config.training.sequence_length
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.model.vocab_size, (1, B, S + 1), generator=draw)
    counted = torch.rand(1, B, S, generator=draw) < (torch.arange(B).view(1, B, 1) - 1) / B
    mask = torch.rand(1, B, S, generator=draw) * counted
    targets = Targets(objective_of(config))
    if targets.weighs:
        begins = np.arange(S + 1) == 0
        made = [targets.of(Sample(row.numpy(), begins=begins)).weights for row in tokens[0]]
        mask = mask * torch.from_numpy(np.stack(made))
    documents = positions = None
    if config.data.reset_attention_at_eod:
        starts = torch.rand(1, B, S, generator=draw) < 0.2
        documents = starts.int().cumsum(-1).int()
        place = torch.arange(S).expand(1, B, S)
        positions = (place - torch.where(starts, place, 0).cummax(-1).values).int()
    return StepBatch(step, tokens, step * B + torch.arange(B).view(1, B), 0, mask, documents, positions)


def local_batch(config: Config, step: int, rank: int, ranks: int) -> StepBatch:
    """A data parallel rank's part: item b of micro-step a is sample (a * ranks + rank) * M + b of the step."""
    whole, M = global_batch(config, step), config.training.micro_batch_size
    chosen = [
        [(a * ranks + rank) * M + b for b in range(M)] for a in range(config.training.global_batch_size // (M * ranks))
    ]
    parts = {
        name: None if value is None else value[0, chosen]
        for name, value in vars(whole).items()
        if name not in ("step", "hash", "columns")
    }
    columns = {name: each[0, chosen] for name, each in whole.columns.items()}
    return StepBatch(step=step, hash=0, columns=columns, **parts)


def start(values: dict[str, Any], ranks: int):
    """The resolved configuration, and this rank's engine with its weights perturbed."""
    config = resolve(values, ranks=ranks)
    return config, build(config, ranks)


def build(config: Config, ranks: int):
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine

    prepare_deepspeed(torch.device("cpu"))
    engine = build_engine(config, Mesh.build(Layout.of(config, ranks)), "cpu")
    for fragment in engine.state.masters():
        shard = local_shard(noise(fragment.tensor), fragment.tensor, fragment.tensor_rank, fragment.tensor_ranks)
        fragment.data.add_(torch.from_numpy(shard[fragment.start : fragment.start + fragment.data.numel()]))
    engine.state.refresh()
    return engine


def steps(config: Config, engine, first: int, count: int) -> tuple[list[float], list[float]]:
    """Losses over all ranks, and this rank's gradient norms, of some steps."""
    losses, norms = [], []
    data = engine.mesh.data
    for step in range(first, first + count):
        result = engine.step(local_batch(config, step, data.rank, data.size), config.optimizer.lr)
        tokens = float(result.tokens)
        losses.append(mean(float(result.loss) * tokens if tokens else 0.0, tokens)[0])
        norms.append(float(result.grad_norm))
    return losses, norms


def mean(total, weight) -> tuple[float, float]:
    """Mean and weight over all ranks of sums that each has a part of."""
    sums = torch.tensor([float(total), float(weight)], dtype=torch.float64)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1]), float(sums[1])


def train(values: dict[str, Any], ranks: int) -> tuple[list[float], list[float], tuple[float, float], list]:
    """On every rank: train and evaluate. Losses, norms, evaluation, and this rank's fragments of the masters."""
    return trained(*start(values, ranks))


def trained(config: Config, engine) -> tuple[list[float], list[float], tuple[float, float], list]:
    """The same for an engine that is there."""
    losses, norms = steps(config, engine, 0, config.training.steps)
    data = engine.mesh.data
    evaluation = mean(*engine.evaluate(local_batch(config, EVALUATION, data.rank, data.size)))
    return losses, norms, evaluation, portable(f for f in engine.state.fragments() if f.state == "master")


def portable(fragments) -> list[tuple]:
    """Fragments as plain values that travel between processes."""
    return [(f.tensor, f.state, f.tensor_rank, f.tensor_ranks, f.start, f.data.numpy().copy()) for f in fragments]


def assemble(ranks: list[list[tuple]]) -> dict[tuple[str, str], np.ndarray]:
    """Logical tensors by (name, state) from the fragments of all ranks. Each element comes exactly once."""
    values: dict[tuple[str, str], np.ndarray] = {}
    seen: dict[tuple[str, str], np.ndarray] = {}
    for tensor, state, rank, count, begin, data in (fragment for own in ranks for fragment in own):
        size = int(np.prod(tensor.shape))
        where = local_shard(np.arange(size).reshape(tensor.shape), tensor, rank, count)[begin : begin + len(data)]
        values.setdefault((tensor.name, state), np.full(size, np.nan, np.float32))[where] = data
        np.add.at(seen.setdefault((tensor.name, state), np.zeros(size, np.int64)), where, 1)
    for label, count in seen.items():
        if not (count == 1).all():
            missing, doubled = (count == 0).sum(), (count > 1).sum()
            raise AssertionError(f"{label}: {missing} elements are nobody's, {doubled} several ranks'")
    return values


def plainly(values: dict[str, Any], exact: bool = False, shaken: int | None = None) -> Outcome:
    """The same run in one process of plain PyTorch, without engine or DeepSpeed.

    Args:
        exact: compute in float64 (a bf16 run in fp32, from the same rounded weights): what `plainly` differs from it is
        the rounding of one process. It bounds the distance of the roundings of layouts. shaken: seed of changes to the
        initial weights of half a last digit of fp32, as any rounding is to the steps after it. The distance of these
        runs is the sensitivity of the model.
    """
    from megatron.model.stack import build_model
    from megatron.parallel.layout.precision import COMPUTE_TYPES

    config = resolve(values)
    narrow = COMPUTE_TYPES[config.precision.compute]
    dtype = {torch.float32: torch.float64, torch.bfloat16: torch.float32}[narrow] if exact else narrow
    begun, model = build_model(config, dtype=narrow), build_model(config, dtype=dtype)
    parameters = list(dict.fromkeys(model.parameters()))
    masters = [
        (each.detach().float() + torch.from_numpy(noise(p.logical))).to(wide_type(dtype))
        for each, p in zip(dict.fromkeys(begun.parameters()), parameters)
    ]
    if shaken is not None:
        draw = torch.Generator().manual_seed(shaken)
        for master in masters:
            master *= 1.0 + HALF_A_DIGIT * torch.randn(master.shape, generator=draw, dtype=torch.float64)
    optimizer = PlainOptimizer(config, [p.logical for p in parameters], masters)
    corrections = buffers_of(model)
    for tensor in corrections:
        tensor += torch.from_numpy(noise(tensor.logical))
    losses, norms = [], []
    for step in range(config.training.steps):
        load(parameters, masters, narrow)
        loss, gradients = plain_gradients(config, model, parameters, step)
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients))
        factor = min(1.0, config.optimizer.gradient_clipping / (float(norm) + 1e-6))
        optimizer.step([g * factor for g in gradients])
        correct(model)
        losses.append(loss)
        norms.append(float(norm))
    optimizer.finish()
    load(parameters, masters, narrow)
    batch = global_batch(config, EVALUATION)
    with torch.no_grad():
        ce, _, _ = token_losses(config, model.eval(), batch, slice(None))
    total, weight = (ce * batch.loss_mask[0]).double().sum(), batch.loss_mask.double().sum()
    weights = {p.logical.name: m.numpy().reshape(-1) for p, m in zip(parameters, masters)}
    weights |= {tensor.logical.name: tensor.flatten().numpy() for tensor in corrections}
    return Outcome(losses, norms, (float(total / weight), float(weight)), weights)


def load(parameters: list[torch.nn.Parameter], masters: list[torch.Tensor], narrow: torch.dtype) -> None:
    """Masters to the parameters, rounded to bf16 where a run of that type rounds them."""
    with torch.no_grad():
        for parameter, master in zip(parameters, masters):
            rounds = narrow == torch.bfloat16 and not parameter.logical.keep_fp32
            parameter.copy_(master.bfloat16() if rounds else master)


def correct(model) -> None:
    """Routers' corrections move by their rate towards the mean of what the layer has tallied in the step."""
    for layer in model.modules():
        if isinstance(layer, Balance):
            counts = layer.tally[: layer.experts].clone()
            layer.tally.zero_()
            if layer.correction is not None:
                layer.correction[: layer.experts] += layer.options.correction_rate * torch.sign(counts.mean() - counts)


def token_losses(
    config: Config, model, batch: StepBatch, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Cross-entropy and log-partition [B, S] of the samples `rows`, from whole fp32 logits, and their
    auxiliary loss.
    """
    form, extras = model.form, {"positions": batch.positions, "documents": batch.documents, "samples": batch.sample_ids}
    chosen = {name: extras[name][0, rows] for name in form.optional}
    stream = model.stream(batch.inputs[0, rows], **chosen)
    logits = model.head.logits(stream)
    auxiliary = at_least_fp32(stream.channels[LOSS]).mean() if LOSS in stream.channels else 0.0
    ce = F.cross_entropy(logits.flatten(0, 1), batch.labels[0, rows].flatten(), reduction="none")
    return ce.view_as(batch.labels[0, rows]), logits.logsumexp(-1), auxiliary


def plain_gradients(config: Config, model, parameters, step: int) -> tuple[float, list[torch.Tensor]]:
    """The mean loss over labels of the global batch, and fp32 gradients (of it and the z-loss), by micro-batches."""
    batch, total = global_batch(config, step), 0.0
    M, weight = config.training.micro_batch_size, batch.loss_mask.double().sum()
    gradients = [torch.zeros(p.shape, dtype=wide_type(p.dtype)) for p in parameters]
    model.train()
    if model.plan.depth is not None:
        model.plan.depth.step = step
    for begin in range(0, batch.tokens.shape[1], M):
        rows = slice(begin, begin + M)
        ce, lse, auxiliary = token_losses(config, model, batch, rows)
        share = (batch.loss_mask[0, rows] / weight).to(ce.dtype)
        loss = (share * (ce + config.training.z_loss * lse.square())).sum() + auxiliary * (M / batch.tokens.shape[1])
        if model.head.further is not None:
            loss = loss + further_loss(config, model, batch, rows, share)
        for gradient, part in zip(gradients, torch.autograd.grad(loss, parameters)):
            gradient += part
        total += float((share.double() * ce.detach()).sum())
    return total, gradients


def further_loss(config: Config, model, batch: StepBatch, rows: slice, share: torch.Tensor) -> torch.Tensor:
    """Loss of modules that predict further tokens, label by label of each sample.

    Args:
        share: of each label of the next token in the loss, [B, S].
    """
    extras = {"positions": batch.positions, "documents": batch.documents, "samples": batch.sample_ids}
    stream = model.stream(batch.inputs[0, rows], **{name: extras[name][0, rows] for name in model.form.optional})
    x, further, length = model.head.norm(stream.hidden), model.head.further, share.shape[1]
    total, before = torch.zeros((), dtype=x.dtype), stream.channels.get(LOSS)
    for ahead, module in enumerate(further.tokens, start=1):
        places = [min(place + ahead, length - 1) for place in range(length)]
        read = batch.labels[0, rows].roll(1, 1)[:, places]  # token i + ahead is label i + ahead - 1
        read[:, length - ahead :] = batch.labels[0, rows, -1:]
        x, stream = module(further.table(read), x, stream)
        logits = F.linear(x, model.head.weight).float() if x.dtype == torch.bfloat16 else F.linear(x, model.head.weight)
        for place in range(length - ahead):
            counts = share[:, place + ahead]
            if batch.documents is not None:
                same = batch.documents[0, rows, place] == batch.documents[0, rows, place + ahead]
                counts = counts * same
            labels = batch.labels[0, rows, place + ahead]
            ce = F.cross_entropy(logits[:, place], labels, reduction="none")
            cost = ce + config.training.z_loss * logits[:, place].logsumexp(-1).square()
            total = total + further.weight * (counts * cost).sum()
    if LOSS in stream.channels:  # what the modules' own layers have added
        added = at_least_fp32(stream.channels[LOSS]).mean() - (0.0 if before is None else at_least_fp32(before).mean())
        total = total + added * (share.shape[0] / batch.tokens.shape[1])
    return total


class PlainOptimizer:
    """SGD with momentum, written out, torch's AdamW, or a rule of whole matrices. Norms and biases do not decay. Each
    tensor has its scales.
    """

    def __init__(self, config: Config, tensors: list[LogicalTensor], masters: list[torch.Tensor]):
        self.options, self.masters = config.optimizer, masters
        self.rates = [self.options.lr * each.scales.lr for each in tensors]
        self.decays = [
            0.0
            if each.role.value in ("norm", "bias", "state", "decay")
            else self.options.weight_decay * each.scales.weight_decay
            for each in tensors
        ]
        self.averages = [torch.zeros_like(m) for m in masters]
        self.adamw = None
        epsilons = [self.options.epsilon * each.scales.epsilon for each in tensors]
        written = ("sgd", "adamw", "ademamix", "schedule_free_adamw", "small_fc_lopt", *PLAIN)
        assert self.options.type in written, "written out for these alone"
        if self.options.type == "schedule_free_adamw":
            self.adamw = PlainScheduleFree(self.options, masters, self.rates, self.decays, epsilons)
        if self.options.type == "ademamix":
            self.adamw = PlainAdEMAMix(self.options, masters, self.rates, self.decays, epsilons)
        if self.options.type == "small_fc_lopt":
            self.adamw = PlainLearned(self.options, tensors, masters, self.rates, self.decays)
        if self.options.type in PLAIN:
            self.adamw = PlainMatrices(self.options, tensors, masters, self.decays)
        if self.options.type == "adamw":
            groups = [
                {"params": [m], "lr": lr, "weight_decay": decay, "eps": epsilon}
                for m, lr, decay, epsilon in zip(masters, self.rates, self.decays, epsilons)
            ]
            adamw = PlainCautious if self.options.options.get("cautious") else torch.optim.AdamW
            self.adamw = adamw(groups, betas=self.options.betas, foreach=False)

    def finish(self) -> None:
        """The evaluated weights replace the trained ones."""
        if isinstance(self.adamw, PlainScheduleFree):
            self.adamw.finish()

    def step(self, gradients: list[torch.Tensor]) -> None:
        if isinstance(self.adamw, PlainMatrices):
            self.adamw.step(gradients)
            return
        if self.adamw is not None:
            for master, gradient in zip(self.masters, gradients):
                master.grad = gradient
            self.adamw.step()
            return
        for master, gradient, lr, decay, average in zip(
            self.masters, gradients, self.rates, self.decays, self.averages
        ):
            average.copy_(self.options.momentum * average + gradient)
            master -= lr * (average + decay * master)


def initial(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """The perturbed weights that every run starts from."""
    from megatron.model.stack import build_model

    config = resolve(values)
    model = build_model(config, dtype=torch.bfloat16 if config.precision.compute == "bf16" else torch.float32)
    return {p.logical.name: (p.detach().float().numpy() + noise(p.logical)).reshape(-1) for p in stored_tensors(model)}
