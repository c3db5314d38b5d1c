"""Losses and gradients of a layout, compared with one process of plain PyTorch without engine or DeepSpeed."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.config import Config, resolve
from megatron.config.variants import overlay
from megatron.data.batch import StepBatch
from megatron.model.stack import Model
from megatron.objectives.named import objective_of
from megatron.parallel.layers.label_costs import Labels
from megatron.parallel.layers.objective_logits import ChunkLogits
from megatron.parallel.layers.parameters import logical_of

from .checks import batch, noise, part_of
from .ranks import on_ranks

Answer = tuple[float, list[tuple]]  # the mean loss over all ranks, and a rank's fragments of the gradient

# One step of SGD whose momentum starts at 0: the momentum after it is the gradient, to the last bit.
RECIPE = {
    "optimizer": {"type": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "gradient_clipping": 1e9},
    "data": {"synthetic": "copy"},
}


def check_layouts(
    values: Mapping[str, Any],
    layouts: Sequence[Mapping[str, Any]],
    bound: float = 1e-5,
    step: Callable[[dict[str, Any], int], Answer] | None = None,
) -> None:
    """Check that loss and gradients of one step on each layout equal one process.

    Args:
        values: a configuration, fp32, without dropout. Its batch must fit all layouts. The optimizer's
            section is replaced.
        layouts: differences, such as {"parallel": {"tensor": 2}}. "ranks" is the number of processes, by default
            the smallest that the layout needs.
        bound: largest relative error of the loss, and of each gradient in the Euclidean norm. Ten times the difference
            of fp32 from float64 in one process is added to it. It is rounding, which layouts do in other orders.
        step: runs on each rank instead of `on_this_rank`, with the same form. Its preparations and checks must be in
            one call, since the next one may find other processes.

    Raises:
        AssertionError: with the layout, and each tensor whose gradient differs.
    """
    values = overlay(dict(values), RECIPE)
    loss, wanted = one_process(values, torch.float32)
    exact_loss, exact = one_process(values, torch.float64)
    for layout in layouts:
        own = {name: section for name, section in layout.items() if name != "ranks"}
        config = overlay(values, own)
        ranks = layout.get("ranks") or _smallest(own)
        answers = on_ranks(ranks, step or on_this_rank, config, ranks)
        found = _assembled([answer[1] for answer in answers])
        wrong = [] if found.keys() == wanted.keys() else [f"tensors {sorted(found.keys() ^ wanted.keys())}"]
        error, room = abs(answers[0][0] / loss - 1), bound + 10 * abs(loss / exact_loss - 1)
        wrong += [f"loss: {answers[0][0]} instead of {loss}"] if not error <= room else []
        for name in found.keys() & wanted.keys():
            size, spread = np.linalg.norm(wanted[name]), np.linalg.norm(wanted[name] - exact[name])
            error = np.linalg.norm(found[name] - wanted[name])
            if size == 0:
                wrong.append(f"{name}: its gradient is 0, so this proves nothing of it")
            elif not error <= bound * size + 10 * spread:
                wrong.append(f"{name}: the gradient's relative error is {error / size:.1e}")
        assert not wrong, f"{dict(layout)} on {ranks} ranks:\n  " + "\n  ".join(wrong)


def one_process(values: dict[str, Any], dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """The mean cross-entropy of the labels that count, and the gradient of the objective by logical name, flattened, in
    plain PyTorch."""
    from megatron.model.stack import build_model

    config = resolve(values)
    model = build_model(config, dtype=dtype).train()
    if model.plan.depth is not None:
        model.plan.depth.step = 0
    for parameter in dict.fromkeys(model.parameters()):
        begun = parameter.detach().float() + torch.from_numpy(noise(logical_of(parameter)))
        parameter.data = begun.to(dtype)
    drawn, M = batch(config), config.training.micro_batch_size
    objective, total = objective_of(config), 0.0
    teacher = _teacher(config, dtype)
    given = drawn["loss_mask"]
    weights = torch.ones_like(drawn["tokens"][:, 1:], dtype=dtype) if given is None else given.to(dtype)
    weights /= weights.sum()
    counted = objective.counted(weights, drawn["columns"]) if objective.reads_labels else {}
    units = {name: 1 / float(each.sum()) for name, each in counted.items()}
    for begin in range(0, drawn["tokens"].shape[0], M):
        rows = slice(begin, begin + M)
        extras = {name: drawn[name][rows] for name in model.form.optional if drawn.get(name) is not None}
        stream = model.stream(drawn["tokens"][rows, :-1], **extras)
        if objective.scores:
            read = model.head.values_at(model.head.read(stream))
            numbers = {name: each[rows].to(dtype) for name, each in drawn["columns"].items()}
            scored = Labels(read, weights[rows], numbers, objective.sequences, units=units)
            cost = objective.cost_of_labels(scored)
            (weights[rows] * cost).sum().backward()
            total += float((weights[rows] * cost.detach()).sum())
            continue
        logits, targets = model.head.logits(stream), drawn["tokens"][rows, 1:]
        ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        lse = logits.flatten(0, 1).logsumexp(1)
        if objective.reads_labels:
            numbers = {name: each[rows].to(dtype) for name, each in drawn["columns"].items()}
            log_p = -ce.view_as(weights[rows])
            labels = Labels(log_p, weights[rows], numbers, objective.sequences, units=units)
            costs = objective.cost_of_labels(labels).flatten()
        elif objective.reads_logits:
            costs = objective.cost_of_logits(ChunkLogits(logits.flatten(0, 1), targets.flatten(), logits.shape[-1]))
        else:
            costs = objective.cost(ce, lse)
        if teacher is not None and objective.teacher is not None:
            share, temperature = objective.teacher.share, objective.teacher.temperature
            with torch.no_grad():
                places = [None if drawn[name] is None else drawn[name][rows] for name in ("positions", "documents")]
                taught = teacher.logits(drawn["tokens"][rows, :-1], *places)
            own, theirs = ((each.flatten(0, 1) / temperature).log_softmax(1) for each in (logits, taught))
            divergence = torch.nn.functional.kl_div(own, theirs, reduction="none", log_target=True).sum(1)
            costs = (1 - share) * costs + share * temperature**2 * divergence
        costs = costs + config.training.z_loss * lse.square()
        (weights[rows].flatten() * costs).sum().backward()
        total += float((weights[rows].flatten() * ce.detach()).sum())
    found = {}
    for parameter in dict.fromkeys(model.parameters()):
        assert parameter.grad is not None, f"{logical_of(parameter).name} has no gradient"
        found[logical_of(parameter).name] = parameter.grad.double().numpy().reshape(-1)
    return total, found


def _teacher(config: Config, dtype: torch.dtype) -> Model | None:
    if objective_of(config).teacher is None or config.objective.teacher is None:
        return None
    from megatron.training.text import load_model

    return load_model(Path(config.objective.teacher), torch.device("cpu"), dtype)[0].eval()


def on_this_rank(values: dict[str, Any], ranks: int) -> Answer:
    """One step of the engine: the mean loss over all ranks, and this rank's fragments of the gradient."""
    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.engine.parts.teacher import Teacher
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config = resolve(values, ranks=ranks)
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(config, ranks))
    teacher = Teacher.of(config, mesh)
    engine = build_engine(config, mesh, "cpu", teacher=teacher)
    if teacher is not None:
        teacher.load(GroupCommunicator() if ranks > 1 else SOLO)
    for fragment in engine.state.masters():
        shard = part_of(noise(fragment.tensor), fragment.tensor, fragment.tensor_rank, fragment.tensor_ranks)
        fragment.data.add_(torch.from_numpy(shard[fragment.start : fragment.start + fragment.data.numel()]))
    engine.state.refresh()
    result = engine.step(_own(config, engine.mesh.data.rank, engine.mesh.data.size), config.optimizer.lr)
    sums = torch.tensor([float(result.loss) * float(result.tokens), float(result.tokens)], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    gradients = [
        (each.tensor, each.tensor_rank, each.tensor_ranks, each.start, each.data.numpy().copy())
        for each in engine.state.fragments()
        if each.state == "momentum_buffer"
    ]
    return float(sums[0] / sums[1]), gradients


def _own(config: Config, rank: int, ranks: int) -> StepBatch:
    """A data parallel rank's part of the step, as the loader gives it."""
    drawn, M = batch(config), config.training.micro_batch_size
    passes = config.training.global_batch_size // (M * ranks)
    rows = torch.tensor([[(a * ranks + rank) * M + b for b in range(M)] for a in range(passes)])
    extras: dict[str, Any] = {
        name: None if drawn[name] is None else drawn[name][rows] for name in ("documents", "positions", "loss_mask")
    }
    extras["columns"] = {name: each[rows] for name, each in drawn["columns"].items()}
    return StepBatch(step=0, tokens=drawn["tokens"][rows], sample_ids=rows, hash=0, **extras)


def _smallest(layout: Mapping[str, Any]) -> int:
    """The ranks of one replica, and two of those where only the data axis can be cut."""
    axes = ("tensor", "columns", "pipeline", "context")
    return max(math.prod(layout.get("parallel", {}).get(axis, 1) for axis in axes), 2)


def _assembled(ranks: list[list[tuple]]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for tensor, rank, count, begin, data in (fragment for own in ranks for fragment in own):
        places = np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape)
        where = part_of(places, tensor, rank, count)[begin : begin + len(data)]
        found.setdefault(tensor.name, np.full(places.size, np.nan))[where] = data
    return found
