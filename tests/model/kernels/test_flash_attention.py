"""FlashAttention 3: which GPUs and hosts may use it, and torch's setting then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from megatron.config import resolve
from megatron.config.arithmetic.machine import why_not
from megatron.kinds.attention.options import AttentionOptions
from megatron.kinds.common.attention import attend as paths
from megatron.kinds.common.attention.pattern import Pattern
from megatron.kinds.mla.options import MLAOptions
from megatron.model.kernels.choice import describe_flash_attention, use_flash_attention


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of Hopper, and the backend that torch was set to."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr("megatron.model.kernels.choice.installed", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(attention, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: told.append("restored"))
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: told[-1] if told else None)
    return told


def test_it_is_used_once_and_given_back(hopper):
    assert "FA3" in attention.list_flash_attention_impls()  # torch knows the name
    for _ in range(2):  # once per block
        use_flash_attention("fa3", "cuda")
    assert hopper == ["FA3"]
    use_flash_attention("auto", "cuda")
    assert hopper == ["FA3", "restored"]
    use_flash_attention("auto", "cuda")
    use_flash_attention("fa3", "cpu")
    assert hopper == ["FA3", "restored"]


def test_tensors_without_values_ask_no_gpu():
    use_flash_attention("fa3", "cuda")  # of a machine without one


@pytest.mark.parametrize(
    "name, value, error, says",
    [
        ("torch.cuda.get_device_capability", lambda device: (8, 0), ValueError, "GPUs of Hopper.*unlike NVIDIA A100"),
        ("torch.cuda.get_device_capability", lambda device: (10, 0), ValueError, "GPUs of Hopper"),
        ("torch.version.hip", "6.4", ValueError, "GPUs of Hopper"),
        ("torch.nn.attention.list_flash_attention_impls", list, ValueError, "torch that can call it"),
        ("megatron.model.kernels.choice.installed", lambda name: False, ModuleNotFoundError, "install FlashAttention"),
    ],
)
def test_what_cannot_use_it(hopper, monkeypatch, name, value, error, says):
    monkeypatch.setattr(name, value)
    with pytest.raises(error, match=says):
        use_flash_attention("fa3", "cuda")
    assert not hopper


def test_a_torch_that_does_not_know_of_it(hopper, monkeypatch):
    for name in ("current_flash_attention_impl", "list_flash_attention_impls", "activate_flash_attention_impl"):
        monkeypatch.delattr(attention, name)
    use_flash_attention("auto", "cuda")
    with pytest.raises(ValueError, match="torch that can call it"):
        use_flash_attention("fa3", "cuda")


@pytest.mark.parametrize(
    "pattern, width, wanted",
    [
        (Pattern(1.0, flash="fa3"), 64, [SDPBackend.FLASH_ATTENTION]),
        (Pattern(1.0), 64, None),  # as torch likes
        (Pattern(1.0, flash="fa3"), 512, None),
    ],
)
def test_torch_is_kept_from_other_kernels(monkeypatch, pattern: Pattern, width: int, wanted):
    """Of attention on a GPU, which prefers cuDNN's."""
    asked = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def watched(*inputs, **options):
        asked.append(attention._cur_sdpa_kernel_backends())
        return inputs[0]

    q = SimpleNamespace(shape=(1, 2, 8, width), device=torch.device("cuda"))
    usual = attention._cur_sdpa_kernel_backends()
    monkeypatch.setattr(paths, "F", SimpleNamespace(scaled_dot_product_attention=watched))
    monkeypatch.setattr(paths, "_OneLayout", SimpleNamespace(apply=lambda y: y))
    paths._fused(q, q, q, pattern, None)
    assert asked == [usual if wanted is None else wanted]
    assert torch.nn.functional.scaled_dot_product_attention is fused


def attention_options(**options) -> AttentionOptions:
    return AttentionOptions(heads=4, **{"head_dim": 64, **options})


@pytest.mark.parametrize(
    "options, documents, says",
    [
        (attention_options(), False, None),
        (attention_options(window=64), False, None),
        (attention_options(window=8), False, "window"),
        (attention_options(window=8), True, None),
        (attention_options(dropout=0.1), True, "drops"),
        (attention_options(softcap=30.0), False, "logits"),
        (attention_options(sinks=True), False, "logits"),
        (attention_options(position="alibi"), False, "logits"),
        (attention_options(head_dim=512), False, "heads of 512 channels"),
        (attention_options(head_dim=20), False, "heads of 20 channels"),
        (MLAOptions(heads=4, nope_dim=128, rope_dim=64, value_dim=128), True, "other channels"),
        (MLAOptions(heads=4, nope_dim=64, rope_dim=64, value_dim=128), True, None),
    ],
)
def test_which_layers(options, documents: bool, says: str | None):
    found = why_not(options, documents, 64)
    assert found is None if says is None else says in found


def test_what_a_run_says():
    values = {
        "model": {
            "layers": "attention/mlp",
            "hidden_size": 32,
            "vocab_size": 64,
            "attention": {"heads": 2},
            "fused_attention": {"flash": "fa3", "documents": "varlen"},
        },
        "precision": {"compute": "bf16"},
        "data": {"synthetic": "copy", "reset_attention_at_eod": True},
        "tokenizer": {"eod_id": 0},
        "training": {"steps": 1, "sequence_length": 1024, "global_batch_size": 1},
    }
    config = resolve(values)
    assert describe_flash_attention(config, "cuda") == [
        "plain causal attention: FlashAttention 3",
        "attention of documents: FlashAttention of variable lengths, 16 a sample at most",
    ]
    assert all("needs a GPU" in line for line in describe_flash_attention(config, "cpu"))
    values["model"].pop("fused_attention")
    assert describe_flash_attention(resolve(values), "cuda") == []
