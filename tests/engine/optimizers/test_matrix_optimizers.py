"""Optimizers of whole matrices, and AdEMAMix, on one process, against the papers' equations and torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from more_optimizers.jorge.update import follow

from megatron.config.optimizer_kind import kinds_inside
from megatron.config.registry import INSIDE, OPTIMIZER
from megatron.engine.optimizers.contract import optimizer_class
from megatron.engine.optimizers.dion import dion_step
from megatron.engine.optimizers.dion import first_basis as first_columns
from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.engine.optimizers.matrix import MatrixOptimizer
from megatron.engine.optimizers.muon import ITERATIONS, orthogonalize
from megatron.engine.optimizers.soap import first_basis
from megatron.parallel.layout.shard import Role
from megatron.rehearsal.command import main
from tests.engine.optimizers.test_optimizers import RATES, gradients, model, parameter, train
from tests.paths import ROOT
from tests.training.plain_matrices import PlainMatrices, polar_express
from tests.training.settings import settings


def tensors():
    return [*model(), parameter("stack", Role.HIDDEN, 3, 8, 5, matrices=(4, 4))]


@pytest.mark.parametrize(
    "kind, options, bound",
    [
        ("muon", {}, 1e-5),
        ("muon", {"polynomials": "polar_express", "cautious": True}, 1e-5),
        ("normuon", {"beta2": 0.9}, 1e-5),
        ("normuon", {"polynomials": "polar_express", "cautious": True}, 1e-5),
        ("dion", {"rank": 0.5, "cautious": True}, 1e-4),
        ("soap", {"frequency": 2}, 1e-4),
        ("jorge", {"lr": 0.05, "frequency": 2}, 1e-3),
    ],
)
def test_it_is_the_papers_rule(kind, options, bound):
    """The equations are computed in float64. The bound is what fp32 costs five updates."""
    chosen = {"type": kind, "lr": 0.01, "weight_decay": 0.2, "groups": {}, "epsilon": 1e-6, "options": options}
    config = settings(model={"extensions": ["more_optimizers"]}, optimizer=chosen)
    ours, masters = tensors(), [p.detach().double() for p in tensors()]
    plain = PlainMatrices(config.optimizer, [p.logical for p in ours], masters, [0.2] * len(ours))
    optimizer, start = build_optimizer(config, ours), [p.detach().clone() for p in ours]
    for step in range(5):
        gradients(ours, step)
        plain.step([p.grad.double() for p in ours])
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
    for p, master, begin in zip(ours, masters, start):
        moved = float((master - begin).norm())
        assert float((p.detach() - master).norm()) < bound * moved, p.logical.name


def test_polar_express_is_the_best_polynomial_of_each_step():
    """Against Remez's algorithm in float64, whose points are good to 1e-15 and its coefficients to about 1e-11."""
    table = ITERATIONS["polar_express"]
    assert table.margin == 1.02
    for found, exact in zip(table.coefficients, polar_express(5), strict=True):
        assert found == pytest.approx(exact, rel=1e-9)


def test_polar_express_brings_small_singular_values_nearer_to_one():
    """Of 1e-3 to 1 of the norm, in float64. The other iteration ends between 0.68 and 1.21 at best."""
    values = torch.logspace(-3, 0, 24, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(2, 24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    matrix = turn[0] @ torch.diag(values / values.norm()) @ turn[1]
    far = {
        name: float((torch.linalg.svdvals(orthogonalize(matrix, torch.float64, name)) - 1).abs().max())
        for name in ITERATIONS
    }
    assert far["polar_express"] < far["jordan"]


def test_dions_rank_is_rounded_up_but_not_by_rounding():
    optimizer = build_optimizer(settings(optimizer={"type": "dion", "options": {"rank": 0.07}}), tensors())
    assert [optimizer._rank(*shape) for shape in ((100, 200), (101, 100), (110, 120), (1, 50))] == [7, 7, 8, 1]


def test_dion_of_full_rank_orthogonalizes_the_momentum():
    """After many steps with one gradient, in float64: rank 1.0 gives U V^T of its singular value decomposition."""
    draw = torch.Generator().manual_seed(4)
    gradient = torch.randn(1, 6, 9, generator=draw, dtype=torch.float64)
    momentum, basis = torch.zeros_like(gradient), first_columns(9, 6)[None].clone()
    for _ in range(4000):
        momentum.zero_()
        step = dion_step(gradient, momentum, basis, 0.95)
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    torch.testing.assert_close(step, left @ right * (6 / 9) ** 0.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(momentum, 0.95 * gradient, rtol=1e-9, atol=1e-9)


def test_dion_steps_have_no_direction_that_is_rounding():
    """A gradient of rank 2 where steps have rank 4: noise of its rounding moves nothing, and zeros move nothing."""
    draw = torch.Generator().manual_seed(5)
    low = torch.randn(1, 8, 2, generator=draw, dtype=torch.float64) @ torch.randn(
        1, 2, 7, generator=draw, dtype=torch.float64
    )
    noise = 1e-8 * torch.randn(1, 8, 7, generator=draw, dtype=torch.float64)
    found = []
    for gradient in (low, low + noise):
        momentum, basis = torch.zeros_like(low), first_columns(7, 4)[None].clone()
        found.append(dion_step(gradient, momentum, basis, 0.95))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(found[0]) == 2
    momentum, basis = torch.zeros_like(low), first_columns(7, 4)[None].clone()
    assert not dion_step(torch.zeros_like(low), momentum, basis, 0.95).any() and not momentum.any()
    assert torch.equal(basis[0], first_columns(7, 4))


def test_soaps_first_basis_does_not_depend_on_rounding():
    """A gradient of low rank leaves the rest of the basis open: noise in it must not choose."""
    generator = torch.Generator().manual_seed(3)
    low = torch.randn(12, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, 7, generator=generator, dtype=torch.float64
    )
    noise = 1e-8 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    one, other = first_basis(low), first_basis(low + noise)
    torch.testing.assert_close(one @ one.T, torch.eye(12, dtype=torch.float64))
    signs = (one * other).sum(0).sign()  # a direction is the same both ways
    torch.testing.assert_close(one, other * signs, rtol=0, atol=1e-6)


def test_jorges_root_is_near_the_exact_one():
    """Against the inverse fourth root of the average with the same coefficients, over 200 random gradients."""
    generator = torch.Generator().manual_seed(1)
    root, average = torch.eye(8)[None].double(), torch.eye(8).double()
    for _ in range(200):
        gradient = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        gram = gradient @ gradient.T
        norm = (torch.linalg.matrix_power(root[0], 4) @ gram).norm()
        average = (norm * average + gram) / (norm + 1)
        root = follow(root, gram[None])
        assert torch.equal(root, root.mT)
    values, vectors = torch.linalg.eigh(average)
    exact = vectors @ torch.diag(values**-0.25) @ vectors.T
    assert 1e-4 < float((root[0] - exact).norm() / exact.norm()) < 0.15


def test_adafactor_is_torchs():
    """Torch multiplies by the weights' size, at least the second epsilon: larger than all here, it is a constant."""
    config = settings(optimizer={"type": "adafactor", "lr": 0.01, "weight_decay": 0.2, "groups": {}})
    ours, theirs = model(), model()
    matrices = [p for p in theirs if p.dim() == 2 and p.logical.name != "qkv"]
    fused = [
        torch.nn.Parameter(each.clone()) for p in theirs if p.logical.name == "qkv" for each in p.detach().split(6)
    ]
    reference = torch.optim.Adafactor([*matrices, *fused], eps=(None, 10.0), weight_decay=0.02, foreach=False)
    optimizer = build_optimizer(config, ours)
    for step, lr in enumerate(RATES):
        gradients(ours, step)
        for p, other in zip(ours, theirs):
            other.grad = p.grad.clone()
            if p.logical.name == "qkv":
                for part, gradient in zip(fused, p.grad.split(6)):
                    part.grad = gradient.clone()
        set_learning_rate(optimizer, lr)
        reference.param_groups[0].update(lr=lr / 10, weight_decay=2.0)
        optimizer.step()
        reference.step()
    found = {p.logical.name: p.detach() for p in ours}
    for p in matrices:
        torch.testing.assert_close(found[p.logical.name], p.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["qkv"], torch.cat([p.detach() for p in fused]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12])
def test_adafactors_steps_do_not_depend_on_the_size_of_gradients(size):
    """A large model's are small. Torch's own bounds the mean of their squares from below by 1e-7."""
    found = []
    for factor in (1.0, size):
        ours = tensors()
        optimizer = build_optimizer(settings(optimizer={"type": "adafactor", "lr": 0.01, "epsilon": 1e-30}), ours)
        for step in range(2):
            gradients(ours, step)
            for p in ours:
                p.grad *= factor
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
        found.append([p.detach() for p in ours if len(p.shape) > 1])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_ademamix_is_the_papers_equations():
    options = {"slow": 0.999, "alpha": 3.0, "warmup": 4}
    config = settings(
        optimizer={
            "type": "ademamix",
            "betas": (0.8, 0.9),
            "epsilon": 1e-6,
            "weight_decay": 0.2,
            "groups": {},
            "options": options,
        }  # fmt: skip
    )
    ours = model(torch.float64)
    weights = [p.detach().clone() for p in ours]
    fast, slow, square = ([torch.zeros_like(p) for p in weights] for _ in range(3))
    for t, lr in enumerate(RATES, start=1):
        gradients(ours, t - 1)
        alpha, beta3 = 3.0, 0.999
        if t < 4:
            one, three = math.log(0.8), math.log(0.999)
            alpha *= t / 4
            beta3 = min(beta3, math.exp(one * three / ((1 - t / 4) * three + t / 4 * one)))
        for i, p in enumerate(ours):
            fast[i] = 0.8 * fast[i] + 0.2 * p.grad
            slow[i] = beta3 * slow[i] + (1 - beta3) * p.grad
            square[i] = 0.9 * square[i] + 0.1 * p.grad**2
            size = (square[i] / (1 - 0.9**t)).sqrt() + 1e-6
            weights[i] = weights[i] - lr * ((fast[i] / (1 - 0.8**t) + alpha * slow[i]) / size + 0.2 * weights[i])
    for found, wanted in zip(train(build_optimizer(config, ours), ours, RATES), weights):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_role_has_betas_and_an_epsilon_of_its_own():
    """As two of torch's AdamW, each with its own."""
    groups = {"hidden": {"betas": (0.5, 0.6), "epsilon": 1e-3}}
    config = settings(optimizer={"lr": 0.01, "weight_decay": 0.2, "groups": groups})
    ours, theirs = model(), model()
    hidden = [p for p in theirs if p.logical.role is Role.HIDDEN]
    rest = [p for p in theirs if p.logical.role is not Role.HIDDEN]
    own = {"params": hidden, "betas": (0.5, 0.6), "eps": 1e-3}
    reference = torch.optim.AdamW([own, {"params": rest}], betas=(0.9, 0.95), weight_decay=0.2)
    for a, b in zip(train(build_optimizer(config, ours), ours, RATES), train(reference, theirs, RATES)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_what_needs_whole_matrices_is_known_without_torch():
    found = {
        kind
        for kind in INSIDE[OPTIMIZER]
        if issubclass(optimizer_class(settings(optimizer={"type": kind})), MatrixOptimizer)
    }
    assert found == {name for name, kind in kinds_inside().items() if kind.whole_matrices}


def test_a_rehearsal_says_that_it_cannot(capsys):
    assert main(["--ranks", "2", str(ROOT / "configs/test/tiny_llama.yml"), "optimizer.type=soap"]) == 2
    assert "optimizer.type" in capsys.readouterr().err


@pytest.mark.parametrize("kind", (*INSIDE[OPTIMIZER], "jorge", "small_fc_lopt"))
def test_the_schedule_multiplies_each_groups_rate(kind):
    """However often it is set, a role's share of the rate stays. A schedule at 0 moves nothing."""
    groups = {"norm": {"lr_scale": 0.5}, "hidden": {"lr_scale": 0.25}}
    options = {"weights": str(ROOT / "tests/stand_ins/small_fc_lopt.safetensors")} if kind == "small_fc_lopt" else {}
    ours = tensors()
    chosen = {"type": kind, "lr": 0.01, "groups": groups, "options": options}
    optimizer = build_optimizer(settings(model={"extensions": ["more_optimizers"]}, optimizer=chosen), ours)
    for lr in (0.01, 0.003, 0.02):
        set_learning_rate(optimizer, lr)
        for group in optimizer.param_groups:
            role = group["params"][0].logical.role
            base = 2.0 if kind in ("muon", "normuon", "dion") and group["matrix"] else 1.0  # muon_lr / lr
            assert group["lr"] == pytest.approx(lr * base * {Role.NORM: 0.5, Role.HIDDEN: 0.25}.get(role, 1.0))
    before = [p.detach().clone() for p in ours]
    gradients(ours, 0)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ours))
