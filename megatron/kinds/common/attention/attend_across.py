"""Softmax attention over a sequence whose tokens several ranks share.

Shapes: B samples, S positions of the sequence, s of this rank, n query heads, m key/value heads (m divides n). A key
has D channels and a value E."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.sequences import choose_cut, choose_method
from megatron.config.variants import options_of
from megatron.model.options import kind_of
from megatron.model.stream import Chunk, Stream
from megatron.parallel.layers.context import ContextGroup

from .attend import Remember, attend
from .chunked_keys import ChunkedKeys
from .key_value_cache import Keys
from .paged_keys import PagedKeys
from .pattern import Dropped, Pattern
from .ring import ring_attention
from .spread_keys import SpreadKeys


def describe_context(config: Config) -> list[str]:
    """One line per choice: how the kinds of layers of a run compute where ranks share its sequences, and why."""
    parallel = config.parallel
    ranks = parallel.context
    if ranks == 1:
        return []
    cut, why = choose_cut(config)
    lines = [f"sequences over {ranks} ranks: {cut} cut ({why})"]
    chosen: dict[tuple[str, str], list[str]] = {}
    for each in dict.fromkeys(kind for block in config.model.blocks for kind in block.kinds):
        how = kind_of(config.model, each).context
        if how == "attends":
            heads = options_of(config.model, each).heads // parallel.tensor
            method = choose_method(parallel.context_method, heads, ranks, parallel.context_ulysses)
            chosen.setdefault((method.name, method.why), []).append(str(each))
        elif how == "scans":
            choice = ("all ranks at once", "states before a rank's tokens follow from the tokens of the ranks before")
            chosen.setdefault(choice, []).append(str(each))
        elif how == "states":
            choice = "one rank after the other", "each continues from the state of the rank before"
            chosen.setdefault(choice, []).append(str(each))
    return lines + [
        f"sequences over {ranks} ranks: {', '.join(names)}: {how} ({why})" for (how, why), names in chosen.items()
    ]


def attend_in(
    context: ContextGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    stream: Stream,
    dropout: Dropped | None = None,
    sinks_n: Tensor | None = None,
    elsewhere: Keys | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to all tokens of the sequence before them.

    Args:
        q: [B, n, s, D], k: [B, m, s, D], v: [B, m, s, E], of this rank's tokens.
        stream: has the documents of these tokens.
        sinks_n: see `attend`.
        elsewhere: the layer's state, if it has keys that are not in `k`.

    Returns:
        [B, n, s, E].

    Raises:
        ValueError: keys of other chunks are read, and ranks share the tokens, but not by heads.
    """
    documents, remember = stream.documents, stream.remember
    if isinstance(elsewhere, SpreadKeys | PagedKeys):
        return elsewhere.attend(q, k, v, pattern, sinks_n)
    chunked = elsewhere if isinstance(elsewhere, ChunkedKeys) else None
    if context.size == 1 and chunked is not None:
        return chunked.attend(q, k, v, chunk_of(stream), pattern, documents, dropout, sinks_n)
    if context.size == 1:
        return attend(q, k, v, pattern, documents_BS=documents, dropout=dropout, sinks_n=sinks_n, remember=remember)
    method = choose_method(context.method, q.shape[1], context.size, context.together)
    if chunked is not None and method.together != context.size:
        raise ValueError(f"keys of chunks are kept by heads, and attention is computed by {method.name}")
    if method.name == "gather":
        return _gathered(context, q, k, v, pattern, stream, dropout, sinks_n)
    if method.together == 1:
        documents = all_documents(context, stream)
        return ring_attention(context, 1, q, k, v, pattern, documents, dropout, sinks_n, remember)
    return _by_heads(context, method.together, q, k, v, pattern, stream, dropout, sinks_n, chunked)


def chunk_of(stream: Stream) -> Chunk:
    """The chunk of the stream.

    Raises:
        ValueError: it has none.
    """
    if stream.chunk is None:
        raise ValueError("a layer with the state of a chunk got a stream without a chunk")
    return stream.chunk


def all_documents(context: ContextGroup, stream: Stream) -> Tensor | None:
    """The documents of the whole sequence, [B, S]."""
    documents = stream.documents
    if documents is None:
        return None
    return stream.remember("all documents", lambda: context.gather_numbers(documents))


def _by_heads(
    context: ContextGroup,
    together: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    stream: Stream,
    dropout: Dropped | None,
    sinks_n: Tensor | None,
    chunked: ChunkedKeys | None,
) -> Tensor:
    """Attention of some heads on each rank, to all tokens of `together` neighbours (Ulysses, Jacobs et al. 2023).

    If the neighbours do not have all tokens, keys and values pass between the neighbourhoods. If the ranks do not
    divide the key/value heads, each head goes to several ranks, and autograd sums their gradients."""
    u, heads, kv_heads = together, q.shape[1], k.shape[1]
    copies = math.lcm(kv_heads, u) // kv_heads
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    own, widths = heads // u, [each.shape[1] // u * each.shape[3] for each in (q, k, v)]
    parts = [each.transpose(1, 2).unflatten(2, (u, -1)).flatten(3) for each in (q, k, v)]  # [B, s, u, heads / u * D]
    channels = [q.shape[3], k.shape[3], v.shape[3]]
    whole = context.to_heads(torch.cat(parts, -1), u).split(widths, -1)
    q, k, v = (each.unflatten(-1, (-1, width)).transpose(1, 2) for each, width in zip(whole, channels))
    first = own * (context.rank % u)
    if pattern.slopes is not None:
        pattern = replace(pattern, slopes=pattern.slopes[first : first + own])
    if dropout is not None:
        dropout = replace(dropout, first_head=dropout.first_head + first)
    sinks_n = None if sinks_n is None else sinks_n[first : first + own]
    documents, remember = all_documents(context, stream), stream.remember
    if chunked is not None:
        y = chunked.attend(q, k, v, chunk_of(stream), pattern, documents, dropout, sinks_n)
    elif u == context.size:
        y = attend(q, k, v, pattern, documents_BS=documents, dropout=dropout, sinks_n=sinks_n, remember=remember)
    else:
        y = ring_attention(context, u, q, k, v, pattern, documents, dropout, sinks_n, remember)
    return context.to_tokens(y.transpose(1, 2).flatten(2), u).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)


def _gathered(
    context: ContextGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    stream: Stream,
    dropout: Dropped | None,
    sinks_n: Tensor | None,
) -> Tensor:
    """Every rank gets all keys and values. Each run of its queries reads the keys that it may see."""
    widths = [k.shape[3], v.shape[3]]
    both_BSmW = context.gather(torch.cat([k, v], -1).transpose(1, 2))
    k, v = both_BSmW.transpose(1, 2).split(widths, -1)
    documents = all_documents(context, stream)
    if dropout is not None:
        dropout = replace(dropout, length=k.shape[2])

    def remember(at: int) -> Remember:
        return lambda key, make: stream.remember((*key, at), make)

    found = []
    for run in context.runs(q.shape[2]):
        begin = 0
        if pattern.window is not None and dropout is None:  # a draw's key is the place in the whole sequence
            begin = max(0, run.first - pattern.window + 1)
        keys = slice(begin, run.stop)
        found.append(
            attend(
                q[:, :, run.begin : run.begin + run.length],
                k[:, :, keys],
                v[:, :, keys],
                pattern,
                documents_BS=None if documents is None else documents[:, keys],
                dropout=dropout,
                sinks_n=sinks_n,
                remember=remember(run.first),
            )
        )
    return found[0] if len(found) == 1 else torch.cat(found, 2)
