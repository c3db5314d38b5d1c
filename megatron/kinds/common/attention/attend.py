"""Scaled dot-product attention, and the choice of its implementation.

Shapes: B samples, n query heads, m key/value heads (m divides n), Q queries, K keys, D head_dim."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron.config.arithmetic.machine import WIDEST
from megatron.parallel.fallback import Fallback, lower_backward_at_once
from megatron.parallel.layout.precision import at_least_fp32, to_device, wide_type
from megatron.parallel.layout.random import uniform

from .pattern import Dropped, Pattern
from .ring import attend_in_pieces
from .tiles import attend_as_tiles, attend_in_tiles
from .varlen import attend_by_documents, begins

Remember = Callable[[tuple[Hashable, ...], Callable[[], Any]], Any]  # `Stream.remember`

FLEX_CHANNELS = 16  # the fewest per head that FlexAttention's kernels take
TILED = 512  # tokens up to which torch's flash attention for CPUs would compute all pairs
LONG = 4096  # tokens of a sequence beyond which a mask, or logits, of all pairs of tokens take too much memory


def choose(
    pattern: Pattern,
    *,
    documents: bool,
    keys: int,
    square: bool,
    dropout: float,
    device: str,
    sinks: bool = False,
    channels: int = FLEX_CHANNELS,
    compiled: bool = False,
    narrow: bool = False,
    flash: bool = True,
) -> tuple[str, str]:
    """The implementation ("tiles", "causal", "varlen", "masked", "flex", "math" or "pieces") and the reason for it.

    Args:
        channels: of a head's queries, keys or values, whichever has the fewest.
        compiled: whether it is part of a compiled block, where each piece would be compiled separately.
        narrow: whether it is in bf16. In fp32 torch's kernel, which computes head by head, rounds alike on every
            layout.
        flash: whether FlashAttention accepts heads of these widths.
    """
    windowed = pattern.window is not None and pattern.window < keys
    plain = not (documents or windowed or pattern.slopes or pattern.softcap or sinks or dropout > 0.0)
    if plain and square and narrow and device == "cpu" and keys <= TILED and not compiled:
        return "tiles", "plain causal attention of a short sequence on a CPU: few masked products"
    if plain and square:
        return "causal", "plain causal attention: torch SDPA (flash on GPUs)"
    if documents and device == "cuda" and square and flash and by_documents(pattern) and dropout == 0.0 and not sinks:
        return "varlen", "model.fused_attention.documents: varlen"
    if device == "cuda" and square and channels >= FLEX_CHANNELS and dropout == 0.0:
        return "flex", "a mask or a change of logits: FlexAttention skips what is masked"
    if square and keys > LONG and not compiled:
        return "pieces", "memory does not grow with pairs of tokens, and masked pieces are skipped"
    if dropout > 0.0:
        return "math", "attention dropout is drawn by key, which fused kernels cannot do"
    if pattern.softcap or sinks:
        return "math", "softcap and sinks need the logits"
    return "masked", "torch SDPA with an explicit mask"


def takes(query_width: int, value_width: int) -> bool:
    """Whether FlashAttention's kernels accept heads of these widths."""
    return query_width == value_width <= WIDEST and query_width % 8 == 0


def by_documents(pattern: Pattern) -> bool:
    """Whether documents are to be computed one after another, with logits of FlashAttention."""
    return pattern.most_documents is not None and not (pattern.slopes or pattern.softcap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    documents_BS: Tensor | None = None,
    dropout: Dropped | None = None,
    sinks_n: Tensor | None = None,
    remember: Remember | None = None,
) -> Tensor:
    """Causal attention. The last query is at the last key.

    Args:
        q: [B, n, Q, D], k, v: [B, m, K, D].
        documents_BS: int [B, K]: tokens attend only within equal numbers.
        dropout: of probabilities. None in evaluation.
        sinks_n: a logit of each head that takes a share of the softmax and has no value.
        remember: `Stream.remember`, so that layers share masks.

    Returns:
        [B, n, Q, D].
    """
    remember = remember or (lambda key, make: make())
    kind, _ = choose(
        pattern,
        documents=documents_BS is not None,
        keys=k.shape[2],
        square=q.shape[2] == k.shape[2],
        dropout=dropout.rate if dropout else 0.0,
        device=q.device.type,
        sinks=sinks_n is not None,
        channels=min(q.shape[-1], v.shape[-1]),
        compiled=torch.compiler.is_compiling(),
        narrow=q.dtype == torch.bfloat16 and not hasattr(q, "fake_mode"),  # a rehearsal is of a GPU
        flash=takes(q.shape[-1], v.shape[-1]),
    )
    if kind == "tiles":
        # `sdpa_kernel` may ask for torch's written out form, whose products are counted.
        return (
            attend_in_tiles(q, k, v, pattern.scale)
            if torch.backends.cuda.flash_sdp_enabled()
            else _fused(q, k, v, pattern, None)
        )
    if kind == "causal":
        return _fused(q, k, v, pattern, None)
    if kind == "pieces":
        return attend_in_pieces(q, k, v, pattern, documents_BS, dropout, sinks_n, remember)
    mask = _remembered(kind, pattern, q.shape[2], k.shape[2], documents_BS, q.device, q.dtype, remember)
    if kind == "varlen":
        return attend_by_documents(q, k, v, pattern, mask)
    if kind == "flex":
        return _flex(q, k, v, pattern, mask, sinks_n)
    if kind == "masked":
        return _fused(q, k, v, pattern, mask)
    return _math(q, k, v, pattern, mask, dropout, sinks_n)


# torch's kernels for attention with a mask, without cuDNN's (pytorch/pytorch#196678).
KERNELS_OF_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _OneLayout(torch.autograd.Function):
    """[B, n, Q, D] as it is. Its gradient lies in memory as [B, Q, n, D].

    On Hopper torch uses cuDNN's kernels, in two thirds of the time of FlashAttention's. It keeps their plans by the
    strides of q, k and v, not of the gradient. With torch 2.11 on an H100, a gradient in another memory layout than the
    first of its shape gave gradients of q, k and v with errors larger than themselves. Compiled and plain code differ
    so."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.transpose(1, 2).contiguous().transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Tensor | None) -> Tensor:
    on_gpu = k.device.type == "cuda"
    kernels: AbstractContextManager = nullcontext()
    if on_gpu and mask is not None:
        kernels = sdpa_kernel(KERNELS_OF_MASKS)
    elif on_gpu and pattern.flash != "auto" and takes(q.shape[-1], v.shape[-1]):
        kernels = sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # torch prefers cuDNN's
    with kernels:
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=pattern.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _OneLayout.apply(y) if on_gpu else y


def prepare(
    pattern: Pattern,
    documents_BS: Tensor | None,
    length: int,
    like: Tensor,
    *,
    channels: int,
    sinks: bool,
    remember: Remember,
) -> None:
    """Make the mask of `attend` in training without dropout, so that a compiled block finds it in the memo.

    Args:
        length: of the sequence.
        like: has the device and the type of the queries.
        channels: see `choose`.
    """
    documents, device = documents_BS is not None, like.device
    kind, _ = choose(
        pattern,
        documents=documents,
        keys=length,
        square=True,
        dropout=0.0,
        device=device.type,
        sinks=sinks,
        channels=channels,
        compiled=True,
        flash=takes(channels, channels),
    )
    if kind != "causal":
        _remembered(kind, pattern, length, length, documents_BS, device, like.dtype, remember)


def _remembered(
    kind: str,
    pattern: Pattern,
    queries: int,
    keys: int,
    documents_BS: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    remember: Remember,
) -> Any:
    """The mask in the form of the implementation, made once for all layers of a pattern."""
    if kind == "varlen":
        assert documents_BS is not None and pattern.most_documents is not None
        numbers_BS, most = documents_BS, pattern.most_documents
        return remember(("begins", most), lambda: begins(numbers_BS, most))
    if kind == "flex":
        batch = None if documents_BS is None else documents_BS.shape[0]
        allowed, _ = flex_modifiers(pattern, documents_BS, device)
        return remember(
            ("flex", pattern.window, queries),
            lambda: create_block_mask(allowed, batch, None, queries, keys, device=device),
        )
    return remember(
        ("mask", pattern.window, pattern.slopes, queries, keys, device, dtype),
        lambda: _mask(queries, keys, pattern, documents_BS, device, dtype),
    )


def _mask(
    queries: int, keys: int, pattern: Pattern, documents_BS: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Additions to the logits, -inf where attention is not allowed, [1 or B, 1, Q, K], with ALiBi [1 or B, n, Q, K].

    torch SDPA would make them of a bool mask in every layer, and keep them for each."""
    k = torch.arange(keys, device=device)
    q = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    allowed = k <= q
    if pattern.window is not None:
        allowed = allowed & (q - k < pattern.window)
    allowed = allowed[None, None]
    if documents_BS is not None:
        allowed = allowed & (documents_BS[:, None, -queries:, None] == documents_BS[:, None, None, :])
    return _additions(~allowed, k - q, pattern, dtype)


def _math(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Tensor, dropout: Dropped | None, sinks_n: Tensor | None
) -> Tensor:
    """Attention written out, with fp32 softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = at_least_fp32(q @ k.transpose(-1, -2)) * pattern.scale
    if pattern.softcap:
        logits = pattern.softcap * torch.tanh(logits / pattern.softcap)
    logits = logits + at_least_fp32(mask)
    if sinks_n is not None:
        sinks = at_least_fp32(sinks_n).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        probabilities = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        probabilities = logits.softmax(-1)
    if dropout:
        keep = uniform(dropout.key, dropout.samples_B, _counters(dropout, *probabilities.shape[1:])) >= dropout.rate
        probabilities = probabilities * keep / (1.0 - dropout.rate)
    return probabilities.to(q.dtype) @ v


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, places_BQ: Tensor, pattern: Pattern, sinks_n: Tensor | None, remember: Remember
) -> Tensor:
    """Attention of queries at any places among keys from place 0 on, without gradients.

    Args:
        q: [B, n, Q, D], k: [B, m, K, D], v: [B, m, K, E].
        remember: as in `attend`, for these places.

    Returns:
        [B, n, Q, E].
    """

    def masks() -> Tensor:
        place_k, place_q = torch.arange(k.shape[2], device=q.device), places_BQ.unsqueeze(-1)
        hidden = place_k > place_q
        if pattern.window is not None:
            hidden = hidden | (place_q - place_k >= pattern.window)
        return _additions(hidden.unsqueeze(1), place_k - place_q.unsqueeze(1), pattern, q.dtype)

    mask = remember(("mask", pattern.window, pattern.slopes, q.dtype), masks)
    plain = not (pattern.softcap or sinks_n is not None)
    if plain and q.device.type == "cpu" and q.dtype == torch.bfloat16 and pattern.slopes is None:
        return attend_as_tiles(q, k, v, pattern.scale, mask)
    return _fused(q, k, v, pattern, mask) if plain else _math(q, k, v, pattern, mask, None, sinks_n)


def _additions(hidden: Tensor, distance: Tensor, pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """Additions to the logits: -inf where keys are hidden, and ALiBi's of each head.

    Args:
        distance: of keys to queries, at most 0 where keys are seen.
    """
    if pattern.slopes is None:
        return torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(hidden, float("-inf"))
    slopes = to_device(torch.tensor(pattern.slopes, dtype=wide_type(dtype)), hidden.device).view(1, -1, 1, 1)
    return (slopes * distance).masked_fill(hidden, float("-inf")).to(dtype)


def _counters(dropout: Dropped, heads: int, queries: int, keys: int) -> Tensor:
    """Places [n, Q, K] in the probabilities [n, S, S] of all heads of the whole sequence."""
    length, device = dropout.length or keys, dropout.samples_B.device
    head = torch.arange(dropout.first_head, dropout.first_head + heads, device=device).view(-1, 1, 1)
    query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    return (head * length + query) * length + torch.arange(keys, device=device)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable:
    lower_backward_at_once()
    fallback = Fallback("FlexAttention runs as single operations, with all its logits in memory")
    return fallback.of(torch.compile(flex_attention, dynamic=False), flex_attention)


def flex_modifiers(
    pattern: Pattern, documents_BS: Tensor | None, device: torch.device
) -> tuple[Callable[..., Tensor], Callable[..., Tensor] | None]:
    """The mask and score functions of FlexAttention for a pattern."""
    slopes = None if pattern.slopes is None else torch.tensor(pattern.slopes, device=device)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ok = k <= q
        if pattern.window is not None:
            ok = ok & (q - k < pattern.window)
        if documents_BS is not None:
            ok = ok & (documents_BS[b, q] == documents_BS[b, k])
        return ok

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if pattern.softcap:
            value = pattern.softcap * torch.tanh(value / pattern.softcap)
        return value if slopes is None else value + slopes[h] * (k - q)

    return allowed, (score if pattern.softcap or slopes is not None else None)


def _flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, blocks: BlockMask, sinks_n: Tensor | None) -> Tensor:
    compute: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()  # fused in blocks
    _, score = flex_modifiers(pattern, None, q.device)
    options = {"scale": pattern.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks_n is None:
        return compute(q, k, v, score_mod=score, block_mask=blocks, **options)
    y, normalizer = compute(q, k, v, score_mod=score, block_mask=blocks, return_lse=True, **options)
    return with_sinks(y, normalizer, sinks_n)


def with_sinks(y: Tensor, normalizer_BnQ: Tensor, sinks_n: Tensor) -> Tensor:
    """Attention's output [B, n, Q, D] with sinks, from the log-sum-exp of the logits without them."""
    left = torch.sigmoid(at_least_fp32(normalizer_BnQ) - at_least_fp32(sinks_n).view(1, -1, 1))
    return (at_least_fp32(y) * left.unsqueeze(-1)).to(y.dtype)
