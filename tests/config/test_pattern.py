"""The layer pattern against its expansion written out, and its messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.pattern import BlockPattern, Kind, PatternError, parse


@dataclass(frozen=True)
class Role:
    role: str


KINDS = {
    "attention": Role("mixer"),
    "mamba": Role("mixer"),
    "rwkv7": Role("mixer"),
    "mlp": Role("ffn"),
    "moe": Role("ffn"),
    "shared_attention": Role("side"),
}


def expanded(text: str) -> list[str]:
    return [str(block) for block in parse(text, KINDS)]


@pytest.mark.parametrize(
    "text, blocks",
    [
        ("attention/mlp", ["attention/mlp"]),
        ("(attention/mlp) x3", ["attention/mlp"] * 3),
        ("(attention/mlp)x3", ["attention/mlp"] * 3),
        ("attention/mlp x 2", ["attention/mlp"] * 2),
        ("(mamba moe) x2", ["mamba", "moe", "mamba", "moe"]),
        ("(mamba x2 mamba+shared_attention) x2", ["mamba", "mamba", "mamba+shared_attention"] * 2),
        ("(rwkv7/mlp x3 attention@local/moe) x2", [*["rwkv7/mlp"] * 3, "attention@local/moe"] * 2),
        ("((attention/mlp) x2 mlp) x2 mamba", ["attention/mlp", "attention/mlp", "mlp"] * 2 + ["mamba"]),
        ("attention@a/mlp@b", ["attention@a/mlp@b"]),
        ("(attention&mamba@b/mlp) x2 mamba & attention", ["attention&mamba@b/mlp"] * 2 + ["mamba&attention"]),
        ("attention&mamba+shared_attention/moe", ["attention&mamba+shared_attention/moe"]),
        ("  attention/mlp\n  mamba ", ["attention/mlp", "mamba"]),
    ],
)
def test_expansion(text, blocks):
    assert expanded(text) == blocks


def test_roles():
    first, second, third = parse("attention@local/mlp mlp mamba+shared_attention@wide", KINDS)
    assert first == BlockPattern(Kind("attention", "local"), Kind("mlp"))
    assert second == BlockPattern(None, Kind("mlp"))
    assert third == BlockPattern(Kind("mamba", None, (Kind("shared_attention", "wide"),)), None)
    assert [str(kind) for kind in third.kinds] == ["mamba+shared_attention@wide", "shared_attention@wide"]


def test_mixers_that_are_summed():
    (block,) = parse("attention@near&mamba+shared_attention/mlp", KINDS)
    assert [kind.name for kind in block.mixers] == ["attention", "mamba"] and block.mixers[0].variant == "near"
    assert [kind.name for kind in block.layers] == ["attention", "mamba", "mlp"]
    assert [kind.name for kind in block.kinds] == ["attention", "mamba", "shared_attention", "mlp"]


@pytest.mark.parametrize(
    "text, column, says",
    [
        ("", 1, "a block is expected"),
        ("()", 2, "a block is expected"),
        ("(attention/mlp", 1, "never closed"),
        ("attention/mlp)", 14, "does not belong here"),
        ("attention//mlp", 11, "a kind of layer is expected"),
        ("atention/mlp", 1, "did you mean attention?"),
        ("attention/mpl", 11, "did you mean mlp?"),
        ("mlp/attention", 1, "cannot stand before '/'"),
        ("attention/mamba", 11, "write 'attention mamba' for two blocks"),
        ("attention/mlp/moe", 14, "put a space between blocks"),
        ("(attention) x0", 13, "at least once"),
        ("attention x", 11, "unknown kind"),
        ("attention*2", 10, "'*' is no part"),
        ("attention@/mlp", 11, "variant's name"),
        ("shared_attention", 1, "only stands after a '+'"),
        ("mamba+mlp", 7, "cannot stand after a '+'"),
        ("attention/mlp+shared_attention", 15, "nothing is added to mlp"),
        ("attention&mlp", 11, "mlp is no mixer and cannot stand next to '&'"),
        ("mlp&attention", 1, "mlp is no mixer and cannot stand next to '&'"),
        ("attention&mamba&attention@near", 17, "attention stands in this block already"),
        ("mamba+shared_attention&mamba", 23, "does not belong here"),
        ("mamba+shared_attention+shared_attention", 24, "is added to mamba already"),
        ("x3 attention", 1, "a block is expected"),
        ("attention x2 x3", 14, "does not belong here"),
        ("(attention x50000) x50000", 20, "more than 100000 blocks"),
        ("attention x2000000000000", 11, "more than"),
    ],
)
def test_messages(text, column, says):
    with pytest.raises(PatternError) as error:
        parse(text, KINDS)
    assert error.value.column == column
    assert says in str(error.value)


trees = st.recursive(
    st.sampled_from(["attention/mlp", "mamba", "moe", "attention@a/moe@b", "mamba+shared_attention"]),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=3), st.integers(1, 3)),
    max_leaves=6,
)


def written(tree) -> str:
    return tree if isinstance(tree, str) else f"({' '.join(map(written, tree[0]))}) x{tree[1]}"


def flat(tree) -> list[str]:
    return [tree] if isinstance(tree, str) else [block for each in tree[0] for block in flat(each)] * tree[1]


@given(trees)
def test_any_nesting_expands_as_it_reads(tree):
    assert expanded(written(tree)) == flat(tree)
