"""Checks of a kind's declarations: decoding against whole sequences, counts against torch's own."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import Config, resolve
from megatron.data.plan import Targets
from megatron.data.sample import Sample
from megatron.objectives.named import objective_of
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.shard import LogicalTensor


def noise(tensor: LogicalTensor) -> np.ndarray:
    """Noise for a tensor's initial values, fp32 of the logical shape, so that no matrix is 0."""
    generator = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    return generator.normal(0.0, 0.1, tensor.shape).astype(np.float32)


def part_of(values: np.ndarray, tensor: LogicalTensor, rank: int, ranks: int) -> np.ndarray:
    """A tensor parallel rank's shard of a logical tensor's values, flattened."""
    for dim, spans in enumerate(tensor.spans(rank, ranks)):
        values = np.concatenate([values.take(range(span.start, span.stop), axis=dim) for span in spans], axis=dim)
    return values.reshape(-1)


def batch(config: Config) -> dict[str, Any]:
    """All samples of one step: tokens [B, S + 1], and if the run has them documents, positions and the labels' weights
    [B, S], and the columns of the objective."""
    B, S = config.training.global_batch_size, config.training.sequence_length
    draw = torch.Generator().manual_seed(config.training.seed)
    found: dict[str, Any] = {"tokens": torch.randint(0, config.model.vocab_size, (B, S + 1), generator=draw)}
    found |= {"documents": None, "positions": None, "loss_mask": None}
    targets = Targets(objective_of(config), config.data.reset_attention_at_eod)
    starts = torch.rand(B, S, generator=draw) < 0.2 if targets.marks_documents else None
    if targets.weighs:
        found["loss_mask"] = torch.stack([_weights(targets, found["tokens"], starts, row) for row in range(B)])
    if starts is not None and config.data.reset_attention_at_eod:
        place = torch.arange(S).expand(B, S)
        found["documents"] = starts.int().cumsum(-1).int()
        found["positions"] = (place - torch.where(starts, place, 0).cummax(-1).values).int()
    objective = objective_of(config)
    found["columns"] = {name: torch.randn(B, S, generator=draw) for name in objective.columns}
    if objective.sequences:  # runs of the sample
        runs = torch.arange(S, dtype=torch.float32) * objective.sequences / S
        found["columns"]["sequence"] = runs.floor().expand(B, S).contiguous()
    return found


def _weights(targets: Targets, tokens: torch.Tensor, starts: torch.Tensor | None, row: int) -> torch.Tensor:
    """The objective's weights of a sample's labels, [S]. The first token begins a document."""
    begins = None if starts is None else np.array([True, *starts[row, 1:].tolist(), False])
    weights = targets.of(Sample(tokens[row].numpy(), begins=begins)).weights
    return torch.ones(tokens.shape[1] - 1) if weights is None else torch.from_numpy(weights)


def check_decoding(values: Mapping[str, Any], pieces: Sequence[int] = (3, 1, 1, 2), bound: float = 1e-10) -> None:
    """A sequence read piece by piece with a state has the logits of the whole, in float64.

    Args:
        pieces: lengths in tokens.
        bound: largest error, over the largest logit.

    Raises:
        AssertionError: with the error.
    """
    from megatron.model.stack import build_model

    config = resolve(dict(values))
    model = build_model(config, dtype=torch.float64).eval()
    for parameter in dict.fromkeys(model.parameters()):
        parameter.data += torch.from_numpy(noise(logical_of(parameter))).to(parameter.dtype)
    tokens = batch(config)["tokens"][:2, : sum(pieces)]
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    error = ((torch.cat(found, 1) - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= bound, f"pieces of {list(pieces)} tokens: logits differ from the whole sequence's by {error:.1e}"


def check_counts(values: Mapping[str, Any]) -> None:
    """Counts of parameters and of the forward pass's FLOPs equal torch's.

    Raises:
        AssertionError: with both numbers.
    """
    from megatron.model.costs.describe import totals
    from megatron.model.stack import build_model

    config = resolve(dict(values))
    model, said = build_model(config).eval(), totals(config)
    parameters = sum(parameter.numel() for parameter in dict.fromkeys(model.parameters()))
    assert said.parameters == parameters, f"counts say {said.parameters} parameters, and there are {parameters}"
    tokens = batch(config)["tokens"][:1, :-1]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(tokens)
    flops = counter.get_total_flops() / tokens.numel()
    assert said.forward_flops == flops, f"counts say {said.forward_flops} FLOPs per token, torch counts {flops}"
