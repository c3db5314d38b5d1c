"""A GPU computes what the CPU computes: every architecture of tests/layouts.yml, plain, compiled and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import Config, resolve
from megatron.model.stack import Model, build_model
from tests.float64 import DOUBLE
from tests.model.parity import randomise
from tests.training.matrix import merged, read

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MATRIX = read()
S, B = 64, 2


def settings(architecture: str, **training: Any) -> Config:
    """An architecture of the matrix with a longer sequence, and heads of a size that fused kernels take."""
    given = MATRIX["architectures"][architecture]
    sections = {name: section for name, section in given.items() if name in ("model", "training", "data")}
    values = merged(MATRIX["common"], sections, {"training": {"sequence_length": S, **training}})
    if "head_dim" not in str(given["model"]):
        values = merged(values, {"model": {"hidden_size": 64}})
    return resolve(values)


def batch(config: Config) -> dict[str, torch.Tensor]:
    """Tokens, weights, and what the architecture asks for besides."""
    draws, S = torch.Generator().manual_seed(1), config.training.sequence_length
    tokens = torch.randint(config.model.vocab_size, (B, S + 1), generator=draws)
    ends = torch.tensor([[20, 3], [41, 1]])
    documents = torch.stack([(torch.arange(S)[:, None] >= each).sum(1) for each in ends])
    starts = torch.stack([torch.tensor([0, *ends[0]])[documents[0]], torch.tensor([0, *ends[1]])[documents[1]]])
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": torch.rand(B, S, generator=draws) / (B * S),
        "documents": documents,
        "positions": torch.arange(S) - starts,
        "samples": torch.arange(B),
    }


def gradients(model: Model, data: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one batch, on the CPU in float64."""
    data = {name: value.to(device) for name, value in data.items()}
    channels = {name: data[name] for name in ("documents", "positions", "samples") if getattr(model.form, name)}
    loss, losses = model(data["tokens"], data["labels"], data["weights"], **channels)
    loss.backward()
    found = {p.logical.name: p.grad for p in model.parameters() if p.grad is not None}
    return {name: value.detach().cpu().to(DOUBLE) for name, value in {"loss": loss, **found}.items()}


def computed(config: Config, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = build_model(config, device="cpu", dtype=torch.float32)
    randomise(model, 3)
    values = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model = build_model(config, device=device, dtype=dtype)
    model.load_state_dict({name: value.to(model.state_dict()[name].dtype) for name, value in values.items()})
    return gradients(model, batch(config), device)


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of the loss and of all gradients together, relative, whichever is larger."""
    assert found.keys() == wanted.keys()
    square = sum((found[name] - wanted[name]).square().sum() for name in wanted if name != "loss")
    whole = sum(value.square().sum() for name, value in wanted.items() if name != "loss")
    return max(float((square / whole).sqrt()), float(((found["loss"] - wanted["loss"]) / wanted["loss"]).abs()))


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 products in fp32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("architecture", MATRIX["architectures"])
def test_gradients_are_those_of_the_cpu(architecture: str) -> None:
    """In fp32 as near to float64 as the CPU, where ten times allow for another order of the sums. The same compiled."""
    wanted = computed(settings(architecture, compile="off"), "cpu", DOUBLE)
    spread = 10 * error(computed(settings(architecture, compile="off"), "cpu", torch.float32), wanted)
    for mode in ("off", "layer"):
        torch._dynamo.reset()
        found = computed(settings(architecture, compile=mode), "cuda", torch.float32)
        assert error(found, wanted) < spread + 1e-6, mode


@pytest.mark.parametrize("architecture", MATRIX["architectures"])
def test_bf16_is_as_near_as_on_the_cpu(architecture: str) -> None:
    wanted = computed(settings(architecture, compile="off"), "cpu", DOUBLE)
    spread = error(computed(settings(architecture, compile="off"), "cpu", torch.bfloat16), wanted)
    for mode in ("off", "auto", "off"):  # kernels that remember the strides of an earlier call are wrong in one of them
        torch._dynamo.reset()
        found = error(computed(settings(architecture, compile=mode), "cuda", torch.bfloat16), wanted)
        assert found < 2 * spread, mode


@pytest.mark.parametrize("architecture", MATRIX["architectures"])
def test_a_run_starts_from_the_same_weights(architecture: str) -> None:
    """Draws are integers of a key. Their results may differ in the last place."""
    config = settings(architecture)
    there, here = (build_model(config, device=device).state_dict() for device in ("cuda", "cpu"))
    for name, value in here.items():
        torch.testing.assert_close(there[name].cpu(), value, rtol=2e-6, atol=1e-7, msg=name)
