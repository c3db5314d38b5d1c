"""Compiled blocks compute the same as plain ones, once and where they run again. A block that cannot be compiled has a
reason."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.model.kernels.compile import choose_compilation, describe_compile
from megatron.model.stack import Model, build_model
from tests.selection import covering

V, S = 61, 24


def settings(mode: str = "layer", recompute: str = "none", model: dict | None = None, **sections: dict):
    return resolve({
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": 32,
            "vocab_size": V,
            "attention": {"heads": 2},
            **(model or {}),
        },
        "training": {
            "steps": 1,
            "sequence_length": S,
            "compile": mode,
            "activation_checkpointing": {"mode": recompute},
        },
        **sections,
    })


def gradients(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.randint(V, (2, S + 1), generator=torch.Generator().manual_seed(1))
    loss, _ = model(tokens[:, :-1], tokens[:, 1:], torch.full((2, S), 1 / (2 * S)))
    loss.backward()
    return loss.detach(), {p.logical.name: p.grad for p in model.parameters()}


def test_compiled_is_plain():
    torch._dynamo.reset()
    loss, wanted = gradients(build_model(settings("off")))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for recompute in ("none", "full"):
        found_loss, found = gradients(build_model(settings("layer", recompute)))
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before, "nothing was compiled"
    assert not torch._dynamo.utils.counters["graph_break"]


PARTLY = {
    "experts": {"layers": "(attention/moe) x3", "moe": {"experts": 4, "top_k": 2, "hidden_size": 16}},
    "experts with losses, capacity": {
        "layers": "(attention/moe) x3",
        "moe": {
            "experts": 4,
            "top_k": 2,
            "hidden_size": 16,
            "capacity_factor": 1.0,
            "losses": {"balance": 0.1, "sequence": 0.1, "z": 0.1},
        },
    },
    "experts that choose": {
        "layers": "(attention/moe) x2",
        "moe": {"experts": 4, "top_k": 2, "hidden_size": 16, "router": {"select": "expert_choice"}},
    },
    "experts with a limit": {
        "layers": "(attention/moe) x2",
        "moe": {"experts": 4, "top_k": 1, "hidden_size": 16, "limit": 0.5, "up_offset": 1.0, "bias": True},
    },
    "earlier keys, inputs of tokens": {
        "layers": "attention/mlp attention@last/mlp",
        "residual": {"token_inputs": 8},
        "variants": {"last": {"keys": "earlier"}},
    },
    "earlier keys beside experts": {
        "layers": "attention/moe attention@last/moe",
        "moe": {"experts": 4, "top_k": 2, "hidden_size": 16},
        "variants": {"last": {"keys": "earlier"}},
    },
    "mamba2 and mlp": {"layers": "mamba2/mlp attention/mlp mamba2", "mamba2": {"head_dim": 16, "state_size": 8}},
    "gated delta": {
        "layers": "gated_delta/mlp x2",
        "gated_delta": {"heads": 2, "key_heads": 2, "key_dim": 8, "value_dim": 8},
    },
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x3", "rwkv7": {"head_dim": 16}, "norm": {"type": "layernorm", "bias": True}},
}


@pytest.mark.parametrize(("recompute", "name"), covering(["none", "full"], PARTLY))
def test_blocks_of_other_layers_are_compiled_in_part(monkeypatch, name: str, recompute: str):
    """Traced as for a compiler, run as torch's operations: no breaks, and each part once for all blocks."""
    torch._dynamo.reset()
    loss, wanted = gradients(build_model(settings("off", recompute, model=PARTLY[name])))
    compiled = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda forward, dynamic, options: compiled(forward, dynamic=dynamic, backend="aot_eager")
    )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model = build_model(settings("layer", recompute, model=PARTLY[name]))
    found_loss, found = gradients(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    for each, gradient in wanted.items():
        torch.testing.assert_close(found[each], gradient, rtol=1e-4, atol=1e-6, msg=each)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert 1 <= graphs <= 15, graphs  # at most eight functions, most with a gradient and without
    torch._dynamo.reset()


def broken_forward(graph, inputs):
    raise RuntimeError("C++ compile error\nno compiler")


def broken_backward():
    """A backend that compiles forward passes, to what they are, and no backward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=broken_forward)


@pytest.mark.parametrize("broken", [broken_forward, broken_backward()], ids=["forward", "backward"])
def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch, broken):
    torch._dynamo.reset()
    loss, wanted = gradients(build_model(settings("off")))
    compiled = torch.compile
    monkeypatch.setattr("torch.compile", lambda forward, **options: compiled(forward, backend=broken))
    model = build_model(settings("layer"))
    with pytest.warns(
        UserWarning, match="torch.compile failed, so blocks run as they are: .* C.. compile error no"
    ) as told:
        found_loss, found = gradients(model)
    assert all("\n" not in str(each.message) for each in told) and torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    torch._dynamo.reset()


@pytest.mark.slow  # a minute of the C++ compiler
def test_equal_gradients_of_two_biases_are_compiled_in_bf16(recwarn):
    """Of both branches of a parallel residual: one sum, stored twice."""
    torch._dynamo.reset()
    model = {
        "residual": {"form": "parallel"},
        "attention": {"heads": 2, "qkv_bias": True, "output_bias": True},
        "mlp": {"bias": True},
    }
    exact, _ = gradients(build_model(settings("off", model=model), dtype=torch.float64))
    plain, wanted = gradients(build_model(settings("off", model=model, precision="bf16"), dtype=torch.bfloat16))
    loss, found = gradients(build_model(settings("layer", model=model, precision="bf16"), dtype=torch.bfloat16))
    assert not [each for each in recwarn if "torch.compile failed" in str(each.message)]
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 2**-8
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.mark.parametrize(
    "model, kinds",
    [
        ({"layers": "(attention/mlp) x3"}, 1),
        (
            {
                "layers": "(attention@local/mlp attention/mlp) x2",
                "attention": {"heads": 2, "position": "alibi"},
                "variants": {"local": {"window": 5}},
            },
            2,
        ),
    ],
)
def test_blocks_of_a_kind_share_one_compilation(model, kinds):
    """torch gives up on a function that it has compiled eight times, and a model may have a hundred blocks."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(build_model(settings("layer", model=model)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == kinds


@pytest.mark.slow
def test_what_clips_logits_is_compiled_with_its_block():
    """Each layer has a tensor of its own for them. All share one compilation."""
    model = {"layers": "(attention/mlp) x3", "attention": {"heads": 2, "qk_clip": 0.01}}
    torch._dynamo.reset()
    plain, fast = build_model(settings("off", model=model)), build_model(settings("layer", "full", model=model))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for each in (plain, fast):
        gradients(each)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for one, other in zip(plain.blocks, fast.blocks):
        wanted = one.mixer.logit_clip.largest
        assert (wanted > 0).all()
        torch.testing.assert_close(other.mixer.logit_clip.largest, wanted)


@pytest.mark.parametrize(
    "config, device, chosen, word",
    [
        (settings("off"), "cuda", "off", "off"),
        (settings("auto"), "cpu", "off", "CPU"),
        (settings("auto"), "cuda", "blocks", "GPU"),
        (settings("layer"), "cpu", "blocks", "layer"),
        (settings("layer", "selective"), "cuda", "parts", "selective"),
        (settings("auto", model={"dropout": 0.1}), "cuda", "parts", "dropout"),
        (settings("auto", zero={"stage": 3}), "cuda", "parts", "ZeRO 3"),
        (settings("auto", model={"dropout": 0.1}), "cpu", "off", "CPU"),
        (settings("layer", model={"layers": "rwkv6 x2", "rwkv6": {"head_dim": 16}}), "cuda", "off", "no layer"),
        (
            settings("layer", model={"layers": "rwkv6 x2", "rwkv6": {"head_dim": 16}, "dropout": 0.1}),
            "cuda",
            "off",
            "no",
        ),
    ],
)
def test_the_choice_and_its_reason(config, device, chosen, word):
    assert choose_compilation(config, device)[0] == chosen
    assert word in describe_compile(config, device)
