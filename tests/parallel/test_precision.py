"""Exponentials in another way than torch's, against float64."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.layout.precision import exp_


def test_an_exponential_is_off_by_its_roundings():
    """The factor log2(e) and the product with x are rounded, 2^-24 of x log2(e) each, which is 2^-24 |x| of the result.
    Torch's exp2 is off by one unit in the last place (2^-23) or less."""
    x = torch.linspace(-80, 10, 64 * 1001)
    exact = x.double().exp()
    error = (exp_(x.clone()).double() - exact).abs() / exact
    assert (error <= 2**-23 * (x.abs().double() + 2)).all()


@pytest.mark.parametrize("width", [1, 31, 64, 1000, 1024, 50304])
def test_a_row_has_the_same_bits_alone(width: int):
    x = torch.randn(7, width) * 3
    together = exp_(x.clone())
    assert torch.equal(together, torch.cat([exp_(row.clone()) for row in x.split(1)]))
    assert torch.equal(together, torch.cat([exp_(rows.clone()) for rows in x.split(3)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_torchs(dtype: torch.dtype):
    x = torch.linspace(-80, 10, 1024, dtype=dtype)
    assert torch.equal(exp_(x.clone()), x.exp())


def test_what_is_no_number_stays_so():
    given = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, 100.0, -200.0, -1e38, 0.0])
    x = exp_(given.repeat(8))[:8]
    assert x[:2].tolist() == [0.0, torch.inf] and x[2].isnan() and x[3:].tolist() == [1.0, torch.inf, 0.0, 0.0, 1.0]
