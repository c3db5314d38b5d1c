"""Sequences that layers work on in chunks: the numbers of the whole, from memory that does not grow with it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import api
from megatron.kinds.common.attention import ring
from megatron.kinds.common.attention.attend import attend
from megatron.kinds.common.attention.chunked_keys import ChunkedKeys
from megatron.kinds.common.attention.pattern import Dropped, Pattern
from megatron.model.stack import Model, build_model
from megatron.model.stream import Chunk
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Axis, Mesh
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named
from tests.selection import toured
from tests.workers import run

B, S = 2, 48
# One architecture for each way in which a layer continues from a chunk: cached keys, states, convolutions, shifts,
# losses of experts, channels from layer to layer. Keys are of windows, sinks, latents, shared or compressed.
NAMES = [
    "gpt2",
    "gpt_oss",
    "deepseek_v2",
    "falcon_h1",
    "gated_delta",
    "jamba",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "zamba2",
    "zaya",
]


def model_of(name: str, chunks: int, length: int = S, dtype: torch.dtype = DOUBLE, ranks: int = 1, **more) -> Model:
    """With parameters off their initial values. Some are zero at first and hide the values behind them.

    Args:
        ranks: that share the sequence. The process is one of them.
    """
    values = {
        "training.sequence_length": length,
        "training.sequence_chunks": chunks,
        "training.steps": 1,
        "schedule.warmup_steps": 0,
        "checkpoint.every": None,
    }
    config = api.resolve(name, values | more | {"parallel.context": ranks}, ranks=ranks).config
    model = build_model(config, Mesh.build(Layout.of(config, ranks)), dtype=dtype)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw, dtype=torch.float32).to(dtype)
    return model


def numbers(
    name: str, chunks: int, documents: bool, length: int = S, ranks: int = 1, **more
) -> dict[str, torch.Tensor]:
    """Loss, cross-entropies and gradients of one sample more than a sample, with weights of labels. Where ranks share
    sequences, of this rank's tokens, so that the means over the ranks are the means of all.
    """
    model = model_of(
        name,
        chunks,
        ranks=ranks,
        **{"data.reset_attention_at_eod": documents, "model.dropout": 0.1 * documents},
        **more,
    )
    draw = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(model.plan.config.model.vocab_size, (2, B, length), generator=draw)
    extra = {"samples": torch.tensor([3, 11])}
    if documents:
        place = torch.arange(length).expand(B, length)
        extra |= {"documents": place // 20, "positions": place % 20}
    weights = torch.rand(B, length, generator=draw) * ranks
    if ranks > 1:
        extra.setdefault("positions", torch.arange(length).expand(B, length))
    cut = model.plan.context.cut
    own = {key: value if key == "samples" else cut(value, 1) for key, value in extra.items()}
    loss, each = model(*(cut(part, 1) for part in (tokens, labels, weights)), **own)
    loss.backward()
    return {"loss": loss.detach(), "each": each} | {key: p.grad for key, p in named(model).items()}


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float = EXACT) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key] - value).norm() <= bound * value.norm(), key


@pytest.mark.parametrize("name, documents", [*((name, True) for name in NAMES), ("llama", False), ("mamba2", False)])
def test_chunks_change_no_number(name: str, documents: bool):
    name = f"test/tiny_{name}"
    compare(numbers(name, 3, documents), numbers(name, 1, documents))


# A layer of each way of handing on what a chunk leaves, from the last rank to the first. Of experts their losses.
SHARED = ["gpt2", "deepseek_v2", "falcon_h1", "gated_delta", "jamba", "rwkv4", "rwkv6", "rwkv7", "zamba2", "zaya"]


@pytest.mark.parametrize("name", toured(SHARED, "layouts"))
def test_ranks_that_share_chunks_change_no_number(name: str):
    """Float64. Dropout, documents that end within chunks, at their ends and at the ends of a rank's part."""
    name, ranks = f"test/tiny_{name}", 2
    wanted = numbers(name, 1, True)
    found = run(ranks, numbers, name, 3, True, S, ranks)
    places = [ContextGroup(Axis(rank, ranks), chunk=S // 3).places(S // ranks) for rank in range(ranks)]
    each = torch.empty_like(wanted["each"])
    for own, at in zip(found, places):
        each[:, at] = own.pop("each")
    together = {key: sum(own[key] for own in found) / ranks for key in found[0]}
    compare(together | {"each": each}, wanted)


def test_a_shorter_sequence_has_fewer_chunks():
    """An evaluation may read any length: whole chunks, and what is left."""
    wanted = numbers("test/tiny_jamba", 1, True, 40)
    compare(numbers("test/tiny_jamba", 3, True, 40), wanted)


def test_angles_that_depend_on_the_length_are_those_of_the_whole():
    scaling = {"type": "dynamic", "factor": 2.0, "original_length": 16}
    wanted, found = (
        numbers("test/tiny_llama", chunks, False, **{"model.attention.rotary.scaling": scaling}) for chunks in (1, 3)
    )
    compare(found, wanted)


def test_what_a_model_gives_without_gradients():
    tokens = torch.randint(60, (B, 40), generator=torch.Generator().manual_seed(0))
    for name in ("test/tiny_falcon_h1", "test/tiny_deepseek_v2"):
        plain, cut = (model_of(name, chunks).eval() for chunks in (1, 4))
        with torch.no_grad():
            wanted, state = plain.logits(tokens), cut.new_state()
            pieces = [cut.decode(tokens[:, :30], state, 0), cut.decode(tokens[:, 30:], state, 30)]
            assert (cut.logits(tokens) - wanted).norm() <= EXACT * wanted.norm()
        assert (torch.cat(pieces, 1) - wanted).norm() <= EXACT * wanted.norm()


def attention(pattern: Pattern, documents, dropout, sinks, chunks: int) -> list[torch.Tensor]:
    """The output of attention of four heads over two keys, and its gradients."""
    length, heads = 60, 4
    draw = torch.Generator().manual_seed(5)
    shapes = (heads, 6), (2, 6), (2, 5)
    q, k, v = (torch.randn(B, n, length, d, generator=draw, dtype=DOUBLE).requires_grad_() for n, d in shapes)
    sinks_n = torch.randn(heads, generator=draw, dtype=DOUBLE).requires_grad_() if sinks else None
    if chunks == 1:
        y = attend(q, k, v, pattern, documents_BS=documents, dropout=dropout, sinks_n=sinks_n)
    else:
        keys, size, found = ChunkedKeys(), length // chunks, []
        for number in range(chunks):
            own = slice(number * size, (number + 1) * size)
            parts = (each[:, :, own] for each in (q, k, v))
            chunk = Chunk(number, own.start, size, length)
            seen = None if documents is None else documents[:, own]
            found.append(keys.attend(*parts, chunk, pattern, seen, dropout, sinks_n))
        y = torch.cat(found, 2)
    inputs = [each for each in (q, k, v, sinks_n) if each is not None]
    weights = torch.randn(y.shape, generator=draw, dtype=DOUBLE)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize(
    "window, softcap, slopes", [(None, None, None), (9, None, None), (25, 2.0, (0.5, 0.2, 0.1, 0.0))]
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dropped, sinks", [(False, False), (True, True)])
def test_attention_to_earlier_chunks(window, softcap, slopes, documents, dropped, sinks, monkeypatch):
    """Of queries and keys with other numbers of channels, which no fused kernel takes, masks are written out."""
    monkeypatch.setattr(ring, "PIECE", 7)
    pattern = Pattern(0.4, window, softcap, slopes)
    begins = torch.zeros(B, 60, dtype=torch.int64)
    begins[0, [13, 40, 41]] = begins[1, [5, 30]] = 1
    ids = begins.cumsum(1) if documents else None
    dropout = Dropped(0.2, 77, torch.tensor([3, 11])) if dropped else None
    wanted = attention(pattern, ids, dropout, sinks, 1)
    for chunks in (2, 5):
        for one, other in zip(attention(pattern, ids, dropout, sinks, chunks), wanted, strict=True):
            assert (one - other).norm() <= EXACT * other.norm()


class Peak(TorchDispatchMode):
    """The most bytes that storages which operations made had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.live.values()))
        return result


def peak(length: int, chunks: int) -> int:
    """Bytes at the fullest moment of a step of a hybrid with wide feed-forward networks."""
    wide = {"model.layers": "mamba2/mlp attention/mlp", "model.mlp": {"hidden_size": 512}, "model.attention.window": 16}
    more = {"training.activation_checkpointing.mode": "full"}
    model = model_of("test/tiny_falcon_h1", chunks, length, torch.float32, **wide, **more)
    tokens, labels = torch.randint(60, (2, 1, length), generator=torch.Generator().manual_seed(0))
    with Peak() as seen:
        model(tokens, labels, torch.ones(1, length))[0].backward()
    return seen.most


def test_memory_does_not_grow_with_what_a_chunk_needs():
    """Of each token beyond a chunk there are what each block reads, gradients of what one reads and gives, and these
    once more while chunks are put together. Keys and values, and their gradients."""
    config = model_of("test/tiny_falcon_h1", 1).plan.config.model
    H, kv = config.hidden_size, 2 * config.attention.kv_heads * config.attention.head_dim
    must = 4 * ((len(config.blocks) + 4) * H + 2 * kv + 8)  # the last: tokens, labels, weights, losses
    chunked, whole = ((peak(1024, more) - peak(512, fewer)) / 512 for more, fewer in ((16, 8), (1, 1)))
    assert chunked <= must < whole
