"""Retention on several layouts, decoded, counted, against a loop over tokens, and its rules."""

from pathlib import Path

import pytest
import torch
import yaml
from my_lab.retention.layer import remembered, retention

from megatron.config import ConfigError, resolve
from megatron.testing import check_counts, check_decoding, check_layouts

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
LAYOUTS = [
    {"zero": {"stage": 1}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"tensor": 2, "sequence": True}},
    {"parallel": {"pipeline": 2}},
    {"parallel": {"context": 2}},
    {"zero": {"stage": 3}},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout):
    check_layouts(VALUES, [layout])


def test_documents_on_ranks():
    check_layouts(
        {**VALUES, "data": {"reset_attention_at_eod": True}},
        [{"parallel": {each: 2}} for each in ("tensor", "context")],
    )


@pytest.mark.parametrize("pieces", [(7,), (1,) * 7, (3, 1, 1, 2)], ids=str)
def test_decoding(pieces):
    check_decoding(VALUES, pieces)


def test_counts():
    check_counts(VALUES)


def test_one_token_after_another():
    """The recurrence as the paper writes it, with a document that ends within the sequence."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 9, 4, generator=draw, dtype=torch.float64).unbind()
    log_a = torch.log(torch.tensor([0.9, 0.6, 0.99], dtype=torch.float64))
    starts = torch.tensor([[0] * 9, [0] * 4 + [4] * 5])
    wanted = torch.zeros_like(v)
    for sample in range(2):
        for head in range(3):
            memory = torch.zeros(4, 4, dtype=torch.float64)
            for t in range(9):
                if starts[sample, t] == t:
                    memory = torch.zeros_like(memory)
                memory = log_a[head].exp() * memory + torch.outer(k[sample, head, t], v[sample, head, t])
                wanted[sample, head, t] = q[sample, head, t] @ memory / 2
    assert torch.allclose(retention(q, k, v, log_a, starts), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_a_document_goes_on_in_the_next_piece(cut):
    """Two pieces with a memory between them against the whole. One document begins at token 4."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=draw, dtype=torch.float64).unbind()
    log_a, starts = torch.log(torch.tensor([0.9, 0.6], dtype=torch.float64)), torch.tensor([[0] * 4 + [4] * 5])
    wanted = retention(q, k, v, log_a, starts)
    before = remembered(k[:, :, :cut], v[:, :, :cut], log_a, starts[:, :cut])
    later = torch.where(starts[:, cut:] <= cut - 1, -1, starts[:, cut:] - cut)
    rest = [each[:, :, cut:] for each in (q, k, v)]
    assert torch.allclose(retention(*rest, log_a, later, before), wanted[:, :, cut:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options, parallel, rule",
    [
        ({}, {}, "the number of heads must be given"),
        ({"heads": 5}, {}, "heads * head_dim must be model.hidden_size"),
        ({"heads": 2}, {"tensor": 4}, "each tensor parallel rank must have the same number of heads"),
        ({"heads": 4, "hedas": 4}, {}, "unknown key in model.retention"),
    ],
)
def test_rules(options, parallel, rule):
    model = {**VALUES["model"], "retention": options}
    with pytest.raises(ConfigError) as error:
        resolve({**VALUES, "model": model, "parallel": parallel}, ranks=4)
    assert rule in str(error.value)
