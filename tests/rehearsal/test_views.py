"""Views of tensors without values, and flat buffers: the forms that tensors with values have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron.engine.deepspeed import without_values
from megatron.engine.deepspeed.without_values import VIEWS, Values

aten = torch.ops.aten
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda x: aten.as_strided.default(x, (2, 3), (4, 1), 2),
    "expand": lambda x: aten.expand.default(x[:1], (5, 4, 6)),
    "permute": lambda x: aten.permute.default(x, (2, 0, 1)),
    "select": lambda x: aten.select.int(x, -1, 3),
    "slice": lambda x: aten.slice.Tensor(x, 1, 1, 4, 2),
    "slice to the end": lambda x: aten.slice.Tensor(x, 0, 1, 2**62),
    "t": lambda x: aten.t.default(x[1]),
    "transpose": lambda x: aten.transpose.int(x, 0, -1),
    "unsqueeze": lambda x: aten.unsqueeze.default(x, 1),
    "view": lambda x: aten.view.default(x, (12, -1)),
    "a part of a view of a part": lambda x: x[1:].view(2, -1).narrow(1, 5, 7).t(),
}


def test_every_view_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    short = without_values._view
    monkeypatch.setattr(
        without_values, "_view", lambda base, func, *rest: (made.append(func), short(base, func, *rest))[1]
    )
    with FakeTensorMode(), Values():
        for form in FORMS.values():
            form(torch.empty(3, 4, 6))
    assert set(made) == VIEWS


@pytest.mark.parametrize("name", FORMS)
def test_form_and_storage_are_those_of_a_tensor_with_values(name: str) -> None:
    real = FORMS[name](torch.zeros(3, 4, 6, dtype=torch.bfloat16))
    with FakeTensorMode(), Values():
        base = torch.empty(3, 4, 6, dtype=torch.bfloat16)
        fake = FORMS[name](base)
    assert type(fake) is FakeTensor and fake.device == torch.device("cpu")
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.storage_offset() == real.storage_offset()
    assert fake.untyped_storage()._cdata == base.untyped_storage()._cdata


@pytest.mark.parametrize("name", FORMS)
def test_gradient_arrives(name: str) -> None:
    with FakeTensorMode(), Values():
        base = torch.empty(3, 4, 6, requires_grad=True)
        form = FORMS[name](base * 2)
        form.sum().backward()
        assert form.requires_grad and base.grad is not None and base.grad.shape == base.shape


def test_wrong_view_is_refused_as_with_values() -> None:
    with FakeTensorMode(), Values(), pytest.raises(RuntimeError, match="invalid for input of size 6"):
        torch.empty(2, 3).view(4, 2)


def test_a_number_that_is_known_stays_known() -> None:
    with FakeTensorMode(), Values():
        assert torch.tensor([5]).view(()).item() == 5  # torch keeps values of tensors with one element


def test_parts_are_joined_as_with_values() -> None:
    with FakeTensorMode(), Values():
        parts = [torch.empty(size, dtype=torch.bfloat16) for size in (3, 0, 5)]
        flat = torch.cat(parts)
        rows = torch.cat([torch.empty(2, 3), torch.empty(4, 3)])
        wide = torch.cat([torch.empty(2), torch.empty(2, dtype=torch.float64)])
        assert torch.cat([torch.tensor([3])]).item() == 3
    assert (flat.shape, flat.dtype, flat.storage_offset()) == ((8,), torch.bfloat16, 0)
    assert flat.untyped_storage().nbytes() == 16
    assert flat.untyped_storage()._cdata not in [each.untyped_storage()._cdata for each in parts]
    assert rows.shape == (6, 3) and wide.dtype == torch.float64
