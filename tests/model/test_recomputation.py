"""Activation checkpointing: the same gradients bit by bit, from less memory."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron.config import resolve
from megatron.model.recompute import _policy, deciding, keep_whole
from megatron.model.stack import build_model
from megatron.parallel.layers import cross_entropy
from tests.float64 import DOUBLE
from tests.model.parity import named

B, S, V, L = 3, 64, 31, 4
VARIANTS = {
    "neox": {"residual": {"form": "parallel"}, "attention": {"heads": 2, "rotary": {"fraction": 0.25}}},
    "llama": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2},
        "mlp": {"gated": True, "hidden_size": 96},
    },
    "olmo2, window": {
        "residual": {"norm": "post"},
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "qk_norm": "full", "window": 9},
    },
    "softcap, alibi": {"attention": {"heads": 4, "softcap": 3.0, "position": "alibi"}},
}


def setting(name: str, mode: str = "none", every: int = 1, documents: bool = False):
    """A model and its inputs."""
    config = resolve({
        "model": {"layers": f"(attention/mlp) x{L}", "hidden_size": 32, "vocab_size": V, **VARIANTS[name]},
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": S, "activation_checkpointing": {"mode": mode, "every": every}},
    })
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(0))
    extra = {}
    if documents:
        extra = {"documents": (torch.arange(S) // 20).expand(B, S), "positions": (torch.arange(S) % 20).expand(B, S)}
    return build_model(config), (tokens, labels, torch.ones(labels.shape)), extra


def gradients(*arguments) -> dict[str, torch.Tensor]:
    model, inputs, extra = setting(*arguments)
    model(*inputs, **extra)[0].backward()
    return {name: p.grad for name, p in named(model).items()}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mode, every", [("full", 1), ("full", 2), ("selective", 1)])
@pytest.mark.parametrize("documents", [False, True])
def test_gradients_are_equal_bit_by_bit(name: str, mode: str, every: int, documents: bool):
    wanted = gradients(name, "none", 1, documents)
    found = gradients(name, mode, every, documents)
    assert all(found[key].equal(wanted[key]) for key in wanted)


class Allocations(TorchDispatchMode):
    """The storages that operations made and that still exist, without the storages of parameters."""

    def __init__(self, parameters):
        super().__init__()
        self.storages = {}
        self.left_out = {p.untyped_storage().data_ptr() for p in parameters}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.left_out:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes(), storage.data_ptr())
        return result

    def bytes(self) -> int:
        cross_entropy._chunk_memory.cache_clear()  # it stays from step to step: no activation
        return sum({address: size for alive, size, address in self.storages.values() if alive() is not None}.values())


def held(*arguments) -> int:
    """Bytes that exist between the forward and the backward pass, next to parameters and inputs."""
    model, inputs, extra = setting(*arguments)
    with Allocations(model.parameters()) as allocations:
        loss, _ = model(*inputs, **extra)
    found = allocations.bytes()
    loss.backward()
    return found


def test_the_measure():
    """Without recomputation, what exists is what autograd says that it saved."""
    model, inputs, _ = setting("llama")
    kept: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *inputs)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = model(*inputs)
    assert held("llama") == pytest.approx(sum(kept.values()), rel=0.01)


@pytest.mark.parametrize("name", VARIANTS)
def test_less_is_kept(name: str):
    """full keeps one tensor per block, its input. Every second block saves half."""
    none, selective, full, half = (held(name, *mode) for mode in (("none",), ("selective",), ("full",), ("full", 2)))
    block_input = B * S * 32 * 4
    ends = full - L * block_input
    assert 0 < ends < 0.06 * none
    assert half - ends == pytest.approx((none - ends) / 2 + L / 2 * block_input, rel=0.1)
    assert 1.5 * full < selective < 0.75 * none


def test_what_is_kept_as_a_whole_shifts_nothing_that_follows():
    """torch identifies results of an operation by the number of its calls. A repetition runs none of what is kept
    whole."""
    first, second, third = (torch.randn(2, 3, 3, dtype=DOUBLE, requires_grad=True) for _ in range(3))

    def layer(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        whole = keep_whole(lambda: torch.bmm(x.detach(), x.detach()))
        return torch.bmm(torch.bmm(torch.bmm(whole * y, z).tanh(), y).sin(), z).tanh()

    selective = functools.partial(create_selective_checkpoint_contexts, _policy)
    found = checkpoint(
        layer, first, second, third, use_reentrant=False, context_fn=functools.partial(deciding, selective)
    )
    wanted = layer(first, second, third)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (second, third)), torch.autograd.grad(wanted.sum(), (second, third))
    ):
        assert torch.equal(one, other)
