"""RMSNorm by rows, on a CPU, against torch's operations and autograd: the same bits, and less memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import norm
from megatron.model.norm import rms_norm
from tests.selection import covering

EPSILON = 1e-5
Norm = Callable[[Tensor, Tensor | None], Tensor]


def ours(x: Tensor, weight: Tensor | None) -> Tensor:
    return rms_norm(x, weight, EPSILON)


def theirs(x: Tensor, weight: Tensor | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPSILON)


def results(form: Norm, x: Tensor, weight: Tensor | None, of_y: Tensor) -> list[Tensor]:
    """The norm, and the gradients of the inputs that have one."""
    y = form(x, weight)
    inputs = [each for each in (x, weight) if each is not None and each.requires_grad]
    return [y, *torch.autograd.grad(y, inputs, of_y)]


@pytest.mark.parametrize(
    ("dtype", "shape", "weights", "cut"),
    covering(
        [torch.bfloat16, torch.float16, torch.float32, torch.float64],
        [(2, 300, 512), (3, 70, 5, 64), (1, 1, 768), (2, 33, 50), (700, 130), (2, 9, 1)],
        ["trained", "frozen", "none", "only"],
        [False, True],
    ),
)
@pytest.mark.parametrize("rows", [norm.ROWS, 1 << 10])
def test_bits_are_torchs(dtype, shape, weights, cut, rows, monkeypatch):
    monkeypatch.setattr(norm, "ROWS", rows)
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)
    x = wide[..., : shape[-1]] if cut else wide[..., : shape[-1]].contiguous()
    x.requires_grad_(weights != "only")
    weight = 1.0 + 0.3 * torch.randn(shape[-1], generator=generator)
    weight = None if weights == "none" else weight.to(dtype).requires_grad_(weights != "frozen")
    of_y = torch.randn(*shape, generator=generator).to(dtype)
    for mine, other in zip(results(ours, x, weight, of_y), results(theirs, x, weight, of_y), strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_torchs_where_tensors_lie_otherwise(dtype):
    """Heads before positions in the input, in the gradient (as attention returns it) or in both, and vectors."""
    generator = torch.Generator().manual_seed(0)
    weight = (1.0 + 0.3 * torch.randn(64, generator=generator)).to(dtype).requires_grad_()
    plain, turned = (torch.randn(3, each, 57 - each, 64, generator=generator).to(dtype) for each in (7, 50))
    turned = turned.transpose(1, 2)
    for x in (plain, turned):
        for of_y in (plain.cos(), turned.sin()):
            found = (results(form, x.detach().requires_grad_(), weight, of_y) for form in (ours, theirs))
            assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))
    vector = plain[0, 0, 0].detach().requires_grad_()
    found = (results(form, vector, weight, turned[0, 0, 0]) for form in (ours, theirs))
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_a_residual_the_bits_are_torchs(dtype):
    """In fp32, where one sum of three numbers would have another order, torch computes."""
    generator = torch.Generator().manual_seed(0)
    x, of_y = torch.randn(2, 6, 50, 64, generator=generator).to(dtype)
    weight, found = torch.linspace(-1, 2, 64).to(dtype), []
    for form in (ours, theirs):
        leaf = x.detach().requires_grad_()
        stream = leaf * 1
        found += torch.autograd.grad(stream + form(stream, weight).sin(), leaf, of_y)
    assert torch.equal(*found)


def test_an_input_is_unchanged_and_infinite_numbers_pass():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 3], x[2, 5], x[3] = float("inf"), float("nan"), 0.0
    kept, weight = x.clone(), torch.linspace(-1, 1, 64).bfloat16().requires_grad_()
    found = [results(form, x.requires_grad_(), weight, torch.ones(4, 64).bfloat16()) for form in (ours, theirs)]
    assert torch.equal(x.detach().nan_to_num(), kept.nan_to_num())
    for mine, other in zip(*found):
        assert torch.equal(mine.isnan(), other.isnan()) and torch.equal(mine.nan_to_num(), other.nan_to_num())


def kept_by(form: Norm, x: Tensor, weight: Tensor) -> int:
    """Bytes of different tensors that the backward pass keeps."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = form(x, weight)
    assert y.requires_grad
    return sum(found.values())


def test_only_the_input_and_a_number_per_row_are_kept():
    x, weight = torch.randn(6, 50, 64).bfloat16().requires_grad_(), torch.ones(64).bfloat16().requires_grad_()
    assert kept_by(ours, x, weight) == 2 * x.numel() + 2 * 64 + 4 * 300
    assert kept_by(theirs, x, weight) > 3 * kept_by(ours, x, weight)


def test_without_gradients_torch_computes(monkeypatch):
    monkeypatch.setattr(norm._RowsOfRMSNorm, "apply", lambda *_: pytest.fail("rows"))
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(ours(x, None), theirs(x, None))
    with torch.no_grad():
        ours(x.requires_grad_(), None)
