"""Optimizers against torch's own, against the papers' equations in float64, and group membership."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.engine.optimizers.contract import initialize_state
from megatron.engine.optimizers.groups import build_optimizer, parameter_groups, set_learning_rate
from megatron.engine.optimizers.lion import Lion
from megatron.engine.optimizers.muon import Muon, muon_direction
from megatron.engine.optimizers.sgd import SGD
from megatron.parallel.layout.shard import LogicalTensor, Role
from tests.training.plain_matrices import PlainCautious
from tests.training.settings import settings


def parameter(name: str, role: Role, *shape: int, dtype=torch.float32, **extra) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    made = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
    made.logical = LogicalTensor(name, shape, role, **extra)
    return made


def model(dtype=torch.float32) -> list[nn.Parameter]:
    return [
        parameter("embedding", Role.EMBEDDING, 11, 6, dtype=dtype),
        parameter("qkv", Role.HIDDEN, 18, 6, dtype=dtype, matrices=(6, 6, 6)),
        parameter("qkv.bias", Role.BIAS, 18, dtype=dtype),
        parameter("out", Role.OUTPUT, 6, 6, dtype=dtype),
        parameter("up", Role.HIDDEN, 10, 6, dtype=dtype),
        parameter("down", Role.OUTPUT, 6, 10, dtype=dtype),
        parameter("experts", Role.HIDDEN, 2, 6, 4, dtype=dtype),
        parameter("norm", Role.NORM, 6, dtype=dtype),
        parameter("router", Role.ROUTER, 2, 6, dtype=dtype),
        parameter("head", Role.HEAD, 11, 6, dtype=dtype),
    ]


def gradients(parameters, step: int) -> None:
    for index, p in enumerate(parameters):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def train(optimizer, parameters, rates) -> list[torch.Tensor]:
    for step, lr in enumerate(rates):
        gradients(parameters, step)
        if all("lr_scale" in group for group in optimizer.param_groups):
            set_learning_rate(optimizer, lr)
        else:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


RATES = [0.01, 0.02, 0.005, 0.01, 0.0]


def test_every_parameter_is_in_exactly_one_group_with_its_settings():
    groups = {
        "norm": {"weight_decay": 0.0},
        "bias": {"weight_decay": 0.0},
        "router": {"lr_scale": 0.5},
        "embedding": {"lr_scale": 2.0, "weight_decay": 0.3},
    }
    config = settings(optimizer={"weight_decay": 0.1, "groups": groups})
    parameters = model()
    found = parameter_groups(config, [*parameters, parameters[0]])  # the embedding again, as a tied head
    placed = [p for group in found for p in group["params"]]
    assert sorted(map(id, placed)) == sorted(map(id, parameters))
    expected = {"embedding": (2.0, 0.3), "router": (0.5, 0.1), "norm": (1.0, 0.0), "qkv.bias": (1.0, 0.0)}
    for group in found:
        for p in group["params"]:
            assert (group["lr_scale"], group["weight_decay"]) == expected.get(p.logical.name, (1.0, 0.1))
    roles = [sorted(p.logical.role.value for p in group["params"]) for group in found]
    assert len(found) == 4 and ["head", *["hidden"] * 3, *["output"] * 2] in roles


def test_frozen_parameters_are_left_out_and_types_are_kept_apart():
    parameters = [
        parameter("a", Role.HIDDEN, 2, 2),
        parameter("b", Role.HIDDEN, 2, 2, dtype=torch.bfloat16),
        parameter("c", Role.HIDDEN, 2, 2),
    ]
    parameters[2].requires_grad_(False)
    found = parameter_groups(settings(), parameters)
    assert [[p.logical.name for p in group["params"]] for group in found] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="no logical tensor"):
        parameter_groups(settings(), [nn.Parameter(torch.zeros(3))])


def test_nothing_moves_before_the_schedule_speaks():
    for kind in ("adamw", "lion", "sgd", "muon"):
        parameters = model()
        before = [p.detach().clone() for p in parameters]
        optimizer = build_optimizer(settings(optimizer={"type": kind}), parameters)
        gradients(parameters, 0)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, parameters))


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_torchs(fused):
    groups = {"norm": {"weight_decay": 0.0}, "bias": {"weight_decay": 0.0}, "head": {"lr_scale": 0.25}}
    config = settings(
        optimizer={
            "type": "adamw",
            "betas": (0.8, 0.9),
            "epsilon": 1e-6,
            "weight_decay": 0.2,
            "groups": groups,
            "fused": fused,
        }
    )
    ours, theirs = model(), model()
    reference = torch.optim.AdamW(
        [
            {
                "params": [p],
                "weight_decay": 0.0 if p.logical.role.value in ("norm", "bias") else 0.2,
                "scale": 0.25 if p.logical.role is Role.HEAD else 1.0,
            }
            for p in theirs
        ],
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=False,
    )
    optimizer = build_optimizer(config, ours)
    assert bool(optimizer.defaults["fused"]) == fused
    for a, b in zip(train(optimizer, ours, RATES), train(reference, theirs, RATES)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_lion_is_the_papers_equations():
    ours, betas, decay = model(torch.float64), (0.9, 0.99), 0.3
    expected = [p.detach().clone() for p in ours]
    momentum = [torch.zeros_like(p) for p in expected]
    for step, lr in enumerate(RATES):
        gradients(ours, step)
        for index, p in enumerate(ours):
            c = betas[0] * momentum[index] + (1 - betas[0]) * p.grad
            expected[index] = expected[index] - lr * (torch.sign(c) + decay * expected[index])
            momentum[index] = betas[1] * momentum[index] + (1 - betas[1]) * p.grad
    optimizer = Lion(ours, betas=betas, weight_decay=decay)
    for a, b in zip(train(optimizer, ours, RATES), expected):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(optimizer.state[ours[0]]["exp_avg"], momentum[0], rtol=1e-13, atol=1e-14)


def test_cautious_decay_spares_weights_that_the_step_moves_away_from_zero():
    """Against torch's AdamW without decay, to which the decay is added afterwards by the sign of what it did."""
    chosen = {"type": "adamw", "weight_decay": 0.3, "groups": {}, "options": {"cautious": True}}
    ours, theirs = model(torch.float64), model(torch.float64)
    optimizer = build_optimizer(settings(optimizer=chosen), ours)
    reference = PlainCautious([{"params": theirs, "weight_decay": 0.3}], betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for a, b in zip(train(optimizer, ours, RATES), train(reference, theirs, RATES)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert all(group["weight_decay"] in (0.0, 0.3) for group in optimizer.param_groups)


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_without_decay_is_torchs(momentum, nesterov):
    ours, theirs = model(), model()
    optimizer = build_optimizer(
        settings(
            optimizer={"type": "sgd", "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0, "groups": {}}
        ),
        ours,
    )
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, nesterov=nesterov)
    for a, b in zip(train(optimizer, ours, RATES), train(reference, theirs, RATES)):
        assert torch.equal(a, b)


def test_sgd_decay_is_decoupled():
    """Without gradients the weights shrink by (1 - lr decay) each step, momentum or not."""
    p = parameter("w", Role.HIDDEN, 4, 4, dtype=torch.float64)
    expected = p.detach().clone()
    optimizer = SGD([p], momentum=0.9, weight_decay=0.5)
    for lr in RATES:
        p.grad = torch.zeros_like(p)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        expected *= 1 - lr * 0.5
    torch.testing.assert_close(p.detach(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lion(p, betas=(1.0, 0.9)),
        lambda p: SGD(p, momentum=1.0),
        lambda p: SGD(p, nesterov=True),
        lambda p: Lion(p, lr=-1.0),
        lambda p: SGD(p, weight_decay=-0.1),
    ],
)
def test_bad_coefficients_are_refused(make):
    with pytest.raises(ValueError, match="optimizer"):
        make([parameter("w", Role.HIDDEN, 2, 2)])


def test_muon_of_an_fp32_run_orthogonalises_in_fp32():
    """As exact as fp32 is against the iteration in float64. In bf16 it is not."""
    update = torch.randn(18, 6, generator=torch.Generator().manual_seed(1))
    exact = muon_direction(update.double(), (6, 6, 6), torch.float64)

    def error(dtype: torch.dtype) -> float:
        return float((muon_direction(update, (6, 6, 6), dtype) - exact).norm() / exact.norm())

    assert error(torch.float32) < 1e-4 < 1e-3 < error(torch.bfloat16)
    for compute, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.bfloat16)):
        config = settings(optimizer={"type": "muon"}, precision={"compute": compute})
        assert build_optimizer(config, model()).dtype == wanted


@pytest.mark.parametrize("scale", ["original", "moonlight"])
def test_muon_is_torchs_muon_and_adamw(scale):
    """Fused matrices are given to torch one by one. Everything that is no hidden matrix goes to AdamW."""
    config = settings(
        optimizer={"type": "muon", "lr": 0.01, "muon_lr": 0.05, "muon_scale": scale, "weight_decay": 0.2, "groups": {}},
        precision={"compute": "bf16"},  # torch's iteration is in bf16 whatever the weights are
    )
    ours, theirs = model(), {p.logical.name: p for p in model()}
    fused = [nn.Parameter(part.clone()) for part in theirs["qkv"].detach().split(6)]
    whole = ("out", "up", "down")
    matrices = [*fused, *(theirs[name] for name in whole)]
    rest = [theirs[name] for name in ("embedding", "qkv.bias", "experts", "norm", "router", "head")]
    adjust = "match_rms_adamw" if scale == "moonlight" else "original"
    muon = torch.optim.Muon(matrices, weight_decay=0.2, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, fused=False)
    optimizer = build_optimizer(config, ours)
    for step, lr in enumerate(RATES):
        gradients(ours, step)
        for p in ours:
            theirs[p.logical.name].grad = p.grad.clone()
        for part, gradient in zip(fused, theirs["qkv"].grad.split(6)):
            part.grad = gradient
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = lr * 5, lr
        set_learning_rate(optimizer, lr)
        for each in (optimizer, muon, adamw):
            each.step()
    found = {p.logical.name: p.detach() for p in ours}
    torch.testing.assert_close(found["qkv"], torch.cat([p.detach() for p in fused]), rtol=1e-6, atol=1e-7)
    for p in (*(theirs[name] for name in whole), *rest):
        torch.testing.assert_close(found[p.logical.name], p.detach(), rtol=1e-6, atol=1e-7)


def test_fusion_matters_to_muon():
    """A check of the test above: treating the fused matrix as one gives something else."""
    results = []
    for matrices in ((6, 6, 6), None):
        p = parameter("qkv", Role.HIDDEN, 18, 6, matrices=matrices)
        optimizer = build_optimizer(settings(optimizer={"type": "muon", "lr": 0.02}), [p])
        results.append(train(optimizer, [p], RATES)[0])
    assert (results[0] - results[1]).abs().max() > 1e-3


def test_optimizer_state_survives_a_round_trip():
    for kind in ("adamw", "lion", "sgd", "muon"):
        config = settings(optimizer={"type": kind})
        straight = train(build_optimizer(config, first := model()), first, RATES)
        second = model()
        early = build_optimizer(config, second)
        train(early, second, RATES[:2])
        late = build_optimizer(config, second)
        late.load_state_dict(early.state_dict())
        for step, lr in list(enumerate(RATES))[2:]:
            gradients(second, step)
            set_learning_rate(late, lr)
            late.step()
        assert all(torch.equal(a, b) for a, b in zip(straight, second)), kind


@pytest.mark.parametrize(
    "options",
    [
        {"type": "adamw"},
        {"type": "adamw", "fused": False},
        {"type": "lion"},
        {"type": "sgd"},
        {"type": "sgd", "momentum": 0.0},
        {"type": "muon"},
    ],
)
def test_state_made_early_is_the_state_of_the_first_step(options):
    config = settings(optimizer=options)
    late, early = build_optimizer(config, first := model()), build_optimizer(config, second := model())
    for group in early.param_groups:
        initialize_state(early, group)
    made = [{name: (value.shape, value.dtype, value.device) for name, value in early.state[p].items()} for p in second]
    for a, b in zip(train(late, first, RATES), train(early, second, RATES), strict=True):
        assert torch.equal(a, b)
    assert made == [{n: (v.shape, v.dtype, v.device) for n, v in late.state[p].items()} for p in first]
    kept = early.state[second[0]].get("exp_avg")
    initialize_state(early, early.param_groups[0])
    assert early.state[second[0]].get("exp_avg") is kept


def test_the_state_of_a_stranger_is_not_guessed():
    stranger = torch.optim.Adagrad([parameter("w", Role.HIDDEN, 2, 2)])
    with pytest.raises(TypeError, match="Adagrad"):
        initialize_state(stranger, stranger.param_groups[0])


def test_muon_wants_a_schedule_to_follow():
    with pytest.raises(ValueError, match="optimizer.lr"):
        build_optimizer(settings(optimizer={"type": "muon", "lr": 0.0}), model())
    with pytest.raises(ValueError, match="not a matrix"):
        Muon([{"params": [parameter("v", Role.HIDDEN, 3)], "matrix": True, "name": "0"}])
