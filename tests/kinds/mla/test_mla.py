"""Multi-head latent attention by itself: decoding, counts, documents. test_parity.py compares it with DeepSeek's."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.model.costs.describe import layers, layers_table
from megatron.model.stack import build_model
from megatron.testing import check_counts, check_decoding
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import randomise, relative
from tests.model.test_recomputation import Allocations

B, S = 2, 64
SIZES = {"heads": 4, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 10}
CASES = {
    "queries of the stream": {},
    "compressed queries, biases": {"query_rank": 14, "bias": True},
    "no positions": {"position": "none", "query_rank": 10},
    "yarn": {"rotary": {"scaling": {"type": "yarn", "factor": 4.0, "original_length": 16}}, "mscale_all_dim": 1.0},
}


def values(name: str, layers: str = "mla x2", **training) -> dict:
    return {
        "model": {"layers": layers, "hidden_size": 24, "vocab_size": 37, "mla": {**SIZES, **CASES[name]}},
        "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B, **training},
    }


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_flops(name: str):
    check_counts(values(name))


@pytest.mark.parametrize("name", CASES)
def test_pieces_equal_the_whole(name: str):
    for pieces in ((12,), (1,) * 5, (5, 1, 1, 4)):
        check_decoding(values(name), pieces)


def test_the_state_is_the_compressed_vector():
    """16 numbers per token, where attention with the same number of heads would keep 80."""
    config = resolve(values("queries of the stream"))
    model = build_model(config).eval()
    state = model.new_state()
    with torch.no_grad():
        model.decode(torch.ones(1, S, dtype=torch.int64), state, 0)
    for own, row in zip(state, layers_table(config)[1:-1]):
        held = [each[0, :, : own.mixer.length] for each in (own.mixer.keys, own.mixer.values)]
        assert row["state_bytes"] == 4 * sum(each.numel() for each in held) == 4 * S * (12 + 4)


def test_a_step_of_decoding_does_not_expand_the_past():
    """The FLOPs of a token after the first are attention among compressed vectors."""
    model, state = build_model(resolve(values("queries of the stream", "mla"))).eval(), None
    state = model.new_state()
    with torch.no_grad():
        model.decode(torch.ones(1, 40, dtype=torch.int64), state, 0)
        with FlopCounterMode(display=False) as counter:
            model.decode(torch.ones(1, 1, dtype=torch.int64), state, 40)
    heads, keys = SIZES["heads"], 41
    once = 24 * heads * 10 + 24 * 16 + heads * (6 + 10) * 12 + heads * 10 * 24 + 24 * 37
    assert counter.get_total_flops() == 2 * (once + keys * heads * (16 + 12))


@pytest.mark.parametrize("name", CASES)
def test_kept_activations(name: str):
    def kept(count: int) -> int:
        model = build_model(resolve(values(name, f"mla x{count}")))
        tokens = torch.randint(37, (2, B, S), generator=torch.Generator().manual_seed(0))
        with Allocations(model.parameters()) as allocations:
            loss, _ = model(tokens[0], tokens[1], torch.ones(B, S))
        found = allocations.bytes()
        loss.backward()
        return found

    own = CASES[name]
    # torch's RMSNorm on CPUs also keeps the normalised vector
    elements = layers(resolve(values(name)))[1].counts.activations + SIZES["kv_rank"] + own.get("query_rank", 0)
    assert kept(2) - kept(1) == pytest.approx(elements * B * S * 4, rel=0.001)


def test_documents_do_not_see_each_other():
    model = build_model(resolve(values("compressed queries, biases")), dtype=DOUBLE).eval()
    randomise(model, 5)
    tokens = torch.randint(37, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        packed = model.logits(tokens, positions, documents)
        alone = torch.cat([model.logits(tokens[:, :5]), model.logits(tokens[:, 5:])], 1)
    assert relative(packed, alone) < EXACT


def test_derived_scale():
    plain, stretched = (resolve(values(name)).model.mla.scale for name in ("queries of the stream", "yarn"))
    assert plain == 10**-0.5 and stretched == pytest.approx(10**-0.5 * (0.1 * 1.3862943611198906 + 1) ** 2, rel=1e-12)
