"""Initial values: of the right distribution by role, and the same for any cut."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config import resolve
from megatron.config.sections.model import InitOptions
from megatron.model.initialisation import scheme_init
from megatron.model.stack import build_model
from megatron.parallel.layout import initial
from megatron.parallel.layout.initial import Init, initial_values
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard, Span
from tests.model.parity import named

H, L, V, WIDTH = 192, 4, 1003, 384


def config_of(init: dict, **model):
    values = {
        "layers": f"(attention/mlp) x{L}",
        "hidden_size": H,
        "vocab_size": V,
        "init": init,
        "attention": {"heads": 6, "kv_heads": 3, "qkv_bias": True},
        "mlp": {"hidden_size": WIDTH, "gated": True},
        **model,
    }
    return resolve({"model": values, "training": {"steps": 1, "sequence_length": 64}})


NORMAL = {
    "normal": 0.03,
    "scaled_normal": 0.03 / math.sqrt(2 * L),
    "small_init": math.sqrt(2 / (5 * H)),
    "wang_init": 2 / (L * math.sqrt(H)),
}


@pytest.mark.parametrize("scheme", NORMAL)
def test_normal_schemes_by_role(scheme: str):
    roles = {"embedding": scheme, "hidden": scheme, "output": scheme, "std": 0.03}
    for name, parameter in named(build_model(config_of(roles))).items():
        if parameter.dim() == 2:
            values = parameter.detach()
            assert values.std().item() == pytest.approx(NORMAL[scheme], rel=0.02), name
            assert abs(values.mean().item()) < 5 * NORMAL[scheme] / math.sqrt(values.numel())
            kurtosis = (values / values.std()).pow(4).mean().item()
            assert kurtosis == pytest.approx(3.0, abs=0.15), "not normal"
        else:
            assert parameter.eq(0.0 if name.endswith("bias") else 1.0).all()


def test_each_role_has_its_own_scheme():
    roles = {
        "embedding": "normal",
        "hidden": "small_init",
        "output": "wang_init",
        "head": "zeros",
        "std": 0.5,
        "layers": 9,
    }
    values = {name: p.detach() for name, p in named(build_model(config_of(roles))).items()}
    std = {name: values[name].std().item() for name in values}
    assert std["embedding.tokens.weight"] == pytest.approx(0.5, rel=0.02)
    assert std["layers.1.attention.query.weight"] == pytest.approx(NORMAL["small_init"], rel=0.02)
    assert std["layers.1.attention.key_value.weight"] == pytest.approx(NORMAL["small_init"], rel=0.02)
    assert std["layers.1.mlp.gate_up.weight"] == pytest.approx(NORMAL["small_init"], rel=0.02)
    for output in ("attention.output", "mlp.down"):
        assert std[f"layers.1.{output}.weight"] == pytest.approx(2 / (9 * math.sqrt(H)), rel=0.02)
    assert not values["head.weight"].any()


def test_the_head_follows_the_embedding():
    values = named(build_model(config_of({"embedding": "small_init", "hidden": "zeros"})))
    assert values["head.weight"].std().item() == pytest.approx(NORMAL["small_init"], rel=0.02)


@pytest.mark.parametrize("scheme, spread", [("xavier_uniform", 6.0), ("xavier_normal", 2.0)])
def test_xavier_uses_the_fans_of_the_separate_matrices(scheme: str, spread: float):
    values = named(build_model(config_of({"hidden": scheme, "output": scheme})))
    for name, fans in (
        ("attention.query", H + H),
        ("attention.key_value", H + H // 2),
        ("mlp.gate_up", H + WIDTH),
        ("mlp.down", H + WIDTH),
    ):
        weight = values[f"layers.0.{name}.weight"].detach()
        variance = spread / fans / (3.0 if scheme == "xavier_uniform" else 1.0)
        assert weight.var().item() == pytest.approx(variance, rel=0.04), name
        if scheme == "xavier_uniform":
            bound = math.sqrt(6.0 / fans)
            assert weight.abs().max().item() == pytest.approx(bound, rel=0.01) and weight.abs().max() <= bound


def test_orthogonal_rows_or_columns_of_each_fused_matrix():
    values = named(build_model(config_of({"hidden": "orthogonal", "output": "orthogonal"})))
    key_value = values["layers.0.attention.key_value.weight"].detach().double()
    for matrix in key_value.split(H // 2):  # fewer rows than columns: the rows are orthonormal
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(H // 2, dtype=torch.float64), rtol=0, atol=1e-5)
    for matrix in values["layers.0.mlp.gate_up.weight"].detach().double().split(WIDTH):  # more: the columns are
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(H, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_rank_makes_only_the_orthogonal_matrices_that_it_has_a_part_of(monkeypatch):
    made, real = [], initial._orthogonal
    monkeypatch.setattr(initial, "_orthogonal", lambda *args: made.append(args[1:3]) or real(*args))
    tensor = LogicalTensor("w", (3, 12, 8), Role.HIDDEN, Shard(1), matrices=(6, 2, 4))
    upper = initial_values(tensor, Init("orthogonal", 1.0), 0, rank=0, ranks=2, run=Span(1, 2, 0))
    assert made == 2 * [(6, 8)]
    whole = initial_values(tensor, Init("orthogonal", 1.0), 0)
    assert len(made) == 2 + 9 and upper.equal(whole[1:, :6])


def test_values_depend_on_name_and_seed_alone():
    first, again = (named(build_model(config_of({}))) for _ in range(2))
    deeper = named(build_model(config_of({}, layers=f"(attention/mlp) x{L + 1}")))
    assert all(first[name].equal(again[name]) for name in first)
    assert first["layers.0.attention.query.weight"].equal(deeper["layers.0.attention.query.weight"])
    matrices = [p for p in first.values() if p.dim() == 2]
    flat = [p.detach().flatten()[:1000] for p in matrices]
    correlations = torch.corrcoef(torch.stack(flat)) - torch.eye(len(flat))
    assert correlations.abs().max() < 0.2, "two tensors share their values"


def test_only_the_depth_factor_knows_the_depth():
    options = InitOptions(std=0.02)
    assert scheme_init("scaled_normal", options, 64, 8, 1, 1).value == pytest.approx(0.02 / 4)
    assert scheme_init("normal", options, 64, 8, 1, 1).value == 0.02


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("hidden", ["normal", "xavier_uniform", "orthogonal"])
def test_every_cut_has_the_same_values(ranks: int, hidden: str):
    """Putting the shards of all ranks together gives the tensors of one rank, bit by bit. The vocabulary is odd."""
    config = config_of({"hidden": hidden, "output": hidden})
    whole = named(build_model(config))
    meshes = [Mesh.describe(Layout(tensor=ranks), rank) for rank in range(ranks)]
    shards = [named(build_model(config, mesh)) for mesh in meshes]
    for name, tensor in whole.items():
        rebuilt = torch.full_like(tensor, math.nan)
        for rank in range(ranks):
            put_back(rebuilt, shards[rank][name], rank, ranks)
        assert rebuilt.equal(tensor), name


def put_back(whole: torch.Tensor, local: torch.Tensor, rank: int, ranks: int) -> None:
    """Written from what a shard means: each part of the cut dimension in `ranks` runs of whole units."""
    logical = local.logical
    with torch.no_grad():
        if logical.shard is None:
            whole.copy_(local)
            return
        dim, unit, begin, used = logical.shard.dim, logical.shard.unit, 0, 0
        for part in logical.shard.parts or (logical.shape[dim],):
            first, last = (part // unit * r // ranks * unit for r in (rank, rank + 1))
            run = last - first
            whole.narrow(dim, begin + first, run).copy_(local.narrow(dim, used, run))
            begin, used = begin + part, used + run
        assert used == local.shape[dim]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "shape, shard",
    [
        ((2500, 1100), Shard(0)),
        ((2500, 1100), Shard(1)),
        ((2400, 1030), Shard(0, (1600, 800), 100)),
        ((3_000_001,), Shard(0)),
    ],
)
def test_cuts_through_tiles(ranks: int, shape: tuple, shard: Shard):
    """Tensors of several tiles, none of them cut at a tile's border."""
    tensor = LogicalTensor("x", shape, Role.HIDDEN, shard)
    whole = initial_values(tensor, Init("normal", 1.0), 7)
    rebuilt = torch.full_like(whole, math.nan)
    for rank in range(ranks):
        local = initial_values(tensor, Init("normal", 1.0), 7, rank, ranks)
        local.logical = tensor
        put_back(rebuilt, local, rank, ranks)
    assert rebuilt.equal(whole)
    assert whole.std().item() == pytest.approx(1.0, rel=0.01)
    assert len(whole.flatten()[:: max(1, whole.numel() // 5000)].unique()) > 4900, "values repeat"


def test_meta_model_has_shapes_alone():
    real, meta = named(build_model(config_of({}))), named(build_model(config_of({}), device="meta"))
    assert {name: p.shape for name, p in meta.items()} == {name: p.shape for name, p in real.items()}
    assert all(p.device.type == "meta" for p in meta.values())
