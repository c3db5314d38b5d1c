"""Four steps of a class of transformers: by the engine on some ranks, and by a plain loop of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megatron.config import resolve
from megatron.data.batch import StepBatch

STEPS, BATCH, LENGTH = 4, 4, 16
LR, MOMENTUM = 0.05, 0.9


def values_of(
    name: str, options: dict[str, Any], stage: int = 0, parallel: dict[str, int] | None = None, **more: Any
) -> dict[str, Any]:
    """A run of a model type with these settings."""
    return {
        "model": {"layers": "transformers", "transformers": {"config": name, "options": options, **more}},
        "training": {"steps": STEPS, "sequence_length": LENGTH, "global_batch_size": BATCH, "micro_batch_size": 1},
        "optimizer": {"type": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0, "gradient_clipping": 1e9},
        "data": {"synthetic": "copy"},
        "tokenizer": {"type": "none"},
        "zero": {"stage": stage},
        "parallel": parallel or {},
    }


def tokens_of(step: int, vocabulary: int) -> torch.Tensor:
    """int64 [BATCH, LENGTH + 1]."""
    return torch.randint(0, vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def by_engine(values: dict[str, Any], ranks: int) -> tuple[list[float], list[tuple]]:
    """On each rank: the mean losses of all ranks, and this rank's parts of the weights (name, places, values)."""
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config = resolve(values, ranks=ranks)
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(config, ranks))
    engine, losses = build_engine(config, mesh, "cpu"), []
    for step in range(STEPS):
        replicas = mesh.replicas.size
        rows = torch.tensor([[number * replicas + mesh.data.rank] for number in range(BATCH // replicas)])
        batch = StepBatch(step, tokens_of(step, config.model.vocab_size)[rows], rows, hash=0)
        result = engine.step(batch, LR)
        sums = torch.tensor([float(result.loss) * float(result.tokens), float(result.tokens)], dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
    return losses, [(each.tensor.name, places_of(each), each.data.numpy().copy()) for each in engine.state.masters()]


def places_of(part: Any) -> np.ndarray:
    """The places of a fragment's elements in the flattened tensor."""
    tensor = part.tensor
    places = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
    for dim, spans in enumerate(tensor.spans(part.tensor_rank, part.tensor_ranks)):
        places = places.take(np.concatenate([np.arange(each.start, each.stop) for each in spans]), dim)
    return places.reshape(-1)[part.start : part.start + len(part.data)]


def by_torch(values: dict[str, Any], rounded: bool = False) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same by transformers and torch, in one process: losses and weights, flattened.

    Args:
        rounded: each initial weight is rounded once more, up or down: the other result is as good.
    """
    from megatron.kinds.transformers.build import hf_model
    from megatron.kinds.transformers.options import TransformersOptions
    from megatron.kinds.transformers.probe import arguments_of

    model = hf_model(TransformersOptions.model_validate(values["model"]["transformers"]).model_dump(), seed_of(values))
    draw = torch.Generator().manual_seed(1)
    for each in model.parameters() if rounded else ():
        each.data *= 1 + 2.0**-23 * (2 * torch.randint(2, each.shape, generator=draw) - 1)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    vocabulary, losses = model.get_output_embeddings().weight.shape[0], []
    for step in range(STEPS):
        tokens = tokens_of(step, vocabulary)
        losses.append(0.0)
        for row in tokens.split(1):  # some classes route or normalise over a batch
            logits = model(input_ids=row[:, :-1], **arguments_of(model)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()) / BATCH
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: each.detach().numpy().reshape(-1) for name, each in model.named_parameters()}


def seed_of(values: dict[str, Any]) -> int:
    return resolve(values).training.seed


def differences(
    answers: list[tuple[list[float], list[tuple]]], losses: list[float], wanted: dict[str, np.ndarray]
) -> tuple[float, float, str]:
    """Largest relative difference of a loss, of a tensor in the Euclidean norm, and that tensor's name."""
    found = {name: np.full(each.size, np.nan) for name, each in wanted.items()}
    for _, parts in answers:
        for name, places, data in parts:
            if name in found:  # a checkpoint has buffers too
                found[name][places] = data
    loss = max(abs(a / b - 1) for a, b in zip(answers[0][0], losses, strict=True))
    worst = {
        name: np.linalg.norm(found[name] - each) / max(float(np.linalg.norm(each)), 1e-3)
        for name, each in wanted.items()
    }
    name = max(worst, key=lambda each: math.inf if math.isnan(worst[each]) else worst[each])
    return loss, float(worst[name]), name
