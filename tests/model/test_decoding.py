"""Decoding with a state gives the logits of the whole text."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.decoding.one_text import complete, generate
from megatron.decoding.sampling import Sampling, choose_tokens, filtered
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.model.costs.describe import layers_table
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.kinds.mamba.test_state_space import MODELS as WITH_STATES
from tests.kinds.rwkv.test_rwkv import MODELS as RWKV
from tests.model.parity import randomise, relative
from tests.model.test_model_options import OPTIONS, config_of
from tests.selection import covering

CASES = [
    "plain",
    "alibi",
    "no positions",
    "learned positions",
    "learned and rotary",
    "rotary fraction",
    "multi-query",
    "grouped, wide heads",
    "qk norm full, grouped",
    "qk norm by head",
    "gate by channel",
    "normalised values that are keys",
    "proportional rotary",
    "three rows",
    "inputs of tokens",
    "variants that read earlier keys",
    "softcap",
    "softcap, window, alibi",
    "window",
    "window of two",
    "window in one layer",
    "variants of all",
    "attention and mlp blocks",
    "parallel, shared norm",
    "post norm",
    "channel scales",
    "tied",
    "head multiplier, bias, softcap",
    "biases",
]


@pytest.mark.parametrize(("pieces", "name"), covering([[12], [1] * 12, [5, 1, 1, 1, 4], [7, 5]], CASES, every=3))
def test_pieces_equal_the_whole(name: str, pieces: list[int]):
    model = build_model(config_of(OPTIONS[name]), dtype=DOUBLE).eval()
    randomise(model, 2)
    tokens = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    assert relative(torch.cat(found, 1), wanted) < EXACT


def held(state) -> int:
    """Bytes of one sample of whatever a decoding state has, at its length."""
    if isinstance(state, torch.Tensor):
        return state[0].numel() * state.element_size() if state.is_floating_point() else 0
    if isinstance(state, KeyValueCache):
        return 2 * state.keys[0, :, : state.length].numel() * state.keys.element_size()
    return sum(map(held, state if isinstance(state, tuple) else vars(state).values() if state is not None else ()))


KEPT = {**WITH_STATES, **{f"rwkv, {name}": values for name, values in RWKV.items()}}


@pytest.mark.parametrize(("precision", "name"), covering(["fp32", "bf16"], KEPT))
def test_bytes_of_decoding_states(name: str, precision: str):
    """The states of recurrences are fp32 in every precision, and are counted so."""
    model = {"hidden_size": 24, "vocab_size": 37, "norm": {"type": "rmsnorm"}, **KEPT[name]}
    config = resolve({"model": model, "precision": precision, "training": {"steps": 1, "sequence_length": 12}})
    model = build_model(config, dtype=torch.float32 if precision == "fp32" else torch.bfloat16).eval()
    state = model.new_state()
    with torch.no_grad():
        model.decode(torch.ones(2, 12, dtype=torch.int64), state, 0)
    assert [held(own) for own in state] == [row["state_bytes"] for row in layers_table(config)[1:-1]]


def test_a_state_grows_without_losing_what_it_has():
    model = build_model(config_of({}), dtype=DOUBLE).eval()
    tokens = torch.randint(37, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        state = model.new_state()
        for place in range(12):
            model.decode(tokens[:, place : place + 1], state, place)
        cache = state[0].mixer
        assert cache.length == 12 and cache.keys.shape[2] >= 12
        once = model.new_state()
        model.decode(tokens, once, 0)
        assert relative(cache.keys[:, :, :12], once[0].mixer.keys[:, :, :12]) < EXACT


def test_who_may_be_chosen():
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    assert filtered(logits, Sampling(top_k=2))[0].tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
    # The smallest set that reaches p: what crosses it belongs to it.
    assert filtered(logits, Sampling(top_p=0.6))[0].tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
    assert filtered(logits, Sampling(top_p=0.4))[0].tolist() == pytest.approx([1, 0, 0, 0, 0])
    squares = [0.25, 0.04, 0.0225, 0.01, 0.0025]
    assert filtered(logits, Sampling(temperature=0.5))[0].tolist() == pytest.approx([
        each / sum(squares) for each in squares
    ])
    for sure in (Sampling(top_p=0.0), Sampling(temperature=1e-320), Sampling(temperature=1e-9, top_p=0.5)):
        assert filtered(logits, sure)[0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 0.5}, {"top_p": 1.5}]
)
def test_settings_outside_of_their_ranges(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Sampling(**wrong)


def test_draws_follow_the_probabilities(monkeypatch):
    """Each token has the half-open interval of its probability. One without any is never drawn."""
    logits = torch.tensor([[-float("inf"), 0.25, 0.75]]).double()
    logits[0, 1:] = logits[0, 1:].log()
    for draw, wanted in ((0.0, 1), (0.2499, 1), (0.25, 2), (0.999999, 2)):
        monkeypatch.setattr(
            "megatron.decoding.sampling.uniform", lambda *_, draw=draw: torch.tensor([[draw]], dtype=torch.float64)
        )
        assert choose_tokens(logits, Sampling(), [0], [0])[0].tolist() == [wanted]


@pytest.mark.parametrize("cache", [True, False])
def test_ids_that_the_tokenizer_has_not_are_never_made(cache):
    """Rows of the embedding that fill it up are no tokens."""
    model = build_model(config_of({})).eval()
    randomise(model, 2)
    prompt = torch.zeros(8, 3, dtype=torch.int64)
    free, bound = (
        torch.stack(list(generate(model, prompt, 20, Sampling(), vocabulary=size, cache=cache))) for size in (None, 5)
    )
    assert int(free.max()) >= 5 > int(bound.max())


def test_text_ends_with_the_learned_positions():
    config = config_of(OPTIONS["learned positions"])
    model, positions = build_model(config).eval(), config.model.embedding.max_positions
    assert len(list(complete(model, [1, 2, 3], 1000, Sampling()))) == positions - 3
    assert list(complete(model, [1] * (positions + 2), 5, Sampling())) == []
