"""Losses of policy gradients: golden values of another implementation, exact expectations, layouts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import ConfigError, resolve
from megatron.objectives.policy.objective import Policy
from megatron.parallel.layers.label_costs import Labels, LabelsLoss
from megatron.parallel.layout.mesh import ALONE
from megatron.testing.layouts import check_layouts

LENGTHS = (5, 3, 4, 2)
REWARDS = (1.0, 0.0, 0.25, 1.0)

# TRL 1.16 in float64: loss, and its derivatives by the log-probabilities [0, 0] and [1, 1]. Its dapo is {mean: label}.
DAPO = {"loss": "grpo", "mean": "label"}
GOLDEN: list[tuple[dict[str, Any], float, float | None, float | None]] = [
    ({"loss": "grpo"}, 0.119527846262, -0.028445366773, 0.135563918804),
    (DAPO, 0.066035328312, -0.040636238247, 0.116197644689),
    ({**DAPO, "clip_high": 0.28}, 0.057219935080, -0.040636238247, 0.116197644689),
    ({"loss": "grpo", "mean": "constant", "length": 8}, 0.028890456136, -0.017778354233, 0.050836469551),
    ({"loss": "grpo", "beta": 0.04, "kl_ratio": True}, 0.130339159765, -0.029517878846, 0.136593725766),
    ({"loss": "grpo", "beta": 0.04}, 0.132041976569, -0.030896448630, 0.136187813612),
    ({"loss": "gspo"}, 0.131750165538, 0.0, 0.117211971511),
    ({"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2}, 0.104608285521, -0.043919688427, 0.117211971511),
    ({"loss": "cispo"}, 0.009382169691, -0.040636238247, 0.116197644689),
    ({**DAPO, "correction": "clamp"}, 0.129174955573, -0.040636238247, 0.142825331054),
    (
        {**DAPO, "correction": "mask", "correction_low": 0.8, "correction_high": 1.2},
        *(-0.068398734247, -0.040636238247, 0.0),
    ),
    (
        {**DAPO, "correction": "sequence_mask", "correction_high": 3.0},
        *(0.296395272337, -0.024096100994, 0.184589751417),
    ),
    ({**DAPO, "stale_limit": 0.05}, -0.093673654636, None, None),
    ({**DAPO, "ratio_limit": 1.1}, 0.054787072847, None, None),
    ({"loss": "rloo"}, 0.229677641667, -0.173183455910, 0.401559158563),
    ({"loss": "dppo", "beta": 2e-3, "kl": "k2"}, 0.107102345467, -0.040693381104, 0.142911852163),
]


def golden() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities [4, 5] of a group, weights, and columns."""
    i, t = torch.arange(4, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)
    log_p = -1.5 + torch.sin(1.3 * i + 0.7 * t)
    old = log_p + 0.4 * torch.cos(2.1 * i + 1.1 * t)
    counts = t < torch.tensor(LENGTHS)[:, None]
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    columns = {
        "sequence": torch.where(counts, 0.0, -1.0).double(),
        "advantage": advantage[:, None].expand(4, 5),
        "old": old,
        "sampler": old + 0.3 * torch.sin(3 * i + 0.9 * t),
        "reference": -1.5 + 0.8 * torch.cos(0.9 * i - 0.4 * t),
    }
    return log_p, counts.double() / counts.sum(1, keepdim=True) / 4, columns


@pytest.mark.parametrize("options, loss, of_first, of_second", GOLDEN)
def test_golden_values(options, loss, of_first, of_second):
    log_p, weights, columns = golden()
    if options["loss"] == "dppo":  # its divergence is from the sampler
        columns["reference"] = columns["sampler"]
    if options["loss"] == "rloo":  # a reward less the mean of the others
        rewards = torch.tensor(REWARDS, dtype=torch.float64)[:, None]
        columns["advantage"] = (rewards - (rewards.sum() - rewards) / 3).expand(4, 5)
    objective = Policy(**options)
    of_labels = LabelsLoss(objective.cost_of_labels, 1, objective.reports)
    of_labels.units = {name: 1 / float(each.sum()) for name, each in objective.counted(weights, columns).items()}
    given = {name: columns[name] for name in objective.columns}
    signed, found = of_labels.weights(-log_p, weights, given, ALONE)
    assert float(found) == pytest.approx(loss, rel=1e-10, abs=1e-11)
    for derivative, wanted in ((-float(signed[0, 0]), of_first), (-float(signed[1, 1]), of_second)):
        assert wanted is None or derivative == pytest.approx(wanted, rel=1e-9, abs=1e-11)
    assert not signed[weights == 0].any()


def test_the_policy_that_has_drawn_them_gives_reinforces_gradient():
    """At log p = log p_old all ratios are 1: every loss has the gradient of -A log p with its mean."""
    log_p, weights, columns = golden()
    columns["old"] = columns["sampler"] = log_p

    def gradient(**options: Any) -> Tensor:
        objective = Policy(**options)
        of_labels = LabelsLoss(objective.cost_of_labels, 1, objective.reports)
        of_labels.units = {"label": 1 / 14}
        return of_labels.weights(-log_p, weights, columns, ALONE)[0]

    wanted = gradient(loss="reinforce")
    torch.testing.assert_close(wanted, columns["advantage"] * (weights > 0) / 14, rtol=1e-12, atol=0)
    for loss in ("grpo", "cispo", "dppo"):
        torch.testing.assert_close(gradient(loss=loss, mean="label"), wanted, rtol=1e-12, atol=1e-15)
    by_sequence = gradient(loss="reinforce", mean="sequence")
    torch.testing.assert_close(gradient(loss="gspo"), by_sequence, rtol=1e-12, atol=1e-15)
    columns["advantage"] = torch.zeros(4, 5, dtype=torch.float64)  # a group whose rewards are equal
    assert not gradient(loss="grpo").any()


def test_the_change_of_a_training_pass_is_added_to_the_old_log_probability():
    """A pass by other kernels gives no ratio but 1 at first, and the gradient of the pass."""
    log_p, weights, columns = golden()
    options: dict[str, Any] = {"loss": "grpo", "mean": "label", "beta": 0.1, "correction": "clamp"}

    def run(anchored: bool, log_p: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        objective = Policy(anchored=anchored, **options)
        of_labels = LabelsLoss(objective.cost_of_labels, 1, objective.reports)
        of_labels.units = {"label": 1 / 14}
        return of_labels.weights(-log_p, weights, {**columns, **given}, ALONE)

    rounding = 0.01 * torch.sin(torch.arange(20.0, dtype=torch.float64)).view(4, 5)
    wanted = run(False, log_p)
    # the correction is of the training pass
    shifted = {"trainer": columns["old"] + rounding, "sampler": columns["sampler"] + rounding}
    torch.testing.assert_close(run(True, log_p + rounding, **shifted), wanted, rtol=1e-12, atol=1e-15)
    columns["old"] = columns["sampler"] = columns["reference"] = log_p
    first = {"trainer": torch.full_like(log_p, float("nan")), "sampler": log_p + rounding}
    torch.testing.assert_close(run(True, log_p + rounding, **first), run(False, log_p), rtol=0, atol=0)


def test_estimators_have_the_divergence_as_their_mean():
    """Over a whole vocabulary E[k1] = E[k3] = KL, and the gradient of k2 is that of KL on average."""
    draw = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 1, 9, generator=draw, dtype=torch.float64)
    log_p, reference = logits.log_softmax(1), other.log_softmax(1)
    exact = float((log_p.exp() * (log_p - reference)).sum())
    one = torch.ones(1, 9, dtype=torch.float64)
    labels = Labels(log_p, one, {"reference": reference}, 1)
    for kind in ("k1", "k3"):
        found = Policy(beta=1.0, kl=kind).divergence(labels, torch.zeros_like(log_p))
        assert float((log_p.exp() * found).sum()) == pytest.approx(exact, rel=1e-12)
    leaf = logits.clone().requires_grad_()
    own = leaf.log_softmax(1)
    (wanted,) = torch.autograd.grad((own.exp() * (own - reference)).sum(), leaf)
    own = leaf.log_softmax(1)
    k2 = Policy(beta=1.0, kl="k2").divergence(Labels(own, one, {"reference": reference}, 1), torch.zeros_like(log_p))
    (found,) = torch.autograd.grad((own.detach().exp() * k2).sum(), leaf)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_ratios_do_not_overflow():
    log_p, weights, columns = golden()
    columns["old"], columns["reference"] = log_p.float() - 200, log_p.float() + 200
    objective = Policy(loss="grpo", beta=0.1)
    given = {name: columns[name].float() for name in objective.columns}
    signed, found = LabelsLoss(objective.cost_of_labels, 1, objective.reports).weights(
        -log_p.float(), weights.float(), given, ALONE
    )
    assert signed.isfinite().all() and found.isfinite()


SHAPE = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 48, "attention": {"heads": 4}},
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "loss_chunk": 7},
    "tokenizer": {"type": "none", "eod_id": 0},
}


@pytest.mark.parametrize(
    "options", [{"loss": "grpo", "mean": "label", "beta": 0.1, "correction": "clamp"}, {"loss": "gspo", "sequences": 2}]
)
def test_layouts_are_one_process(options):
    """Two passes with sums over ranks, against autograd through one pass of whole logits."""
    if options["loss"] == "gspo":  # random log-probabilities are far from the model's
        options = {**options, "clip_low": 1.0, "clip_high": 1e5}
    values = {**SHAPE, "objective": {"type": "policy", "options": options}}
    layouts: list[dict[str, Any]] = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    layouts += [{"zero": {"stage": each}} for each in range(4)]
    check_layouts(values, layouts)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"loss": "ppo"}, "loss must be one of reinforce, grpo, gspo"),
        ({"loss": "reinforce", "clip_low": 0.1}, "clip_low must come with loss: grpo or gspo or rloo"),
        ({"mean": "constant"}, "mean: constant must come with length"),
        ({"length": 4}, "length must come with mean: constant"),
        ({"kl": "k1"}, "kl must come with beta above 0"),
        ({"correction": "mask", "correction_low": 3.0}, "correction_low = 3 must be at most correction_high = 2"),
        ({}, "must be a source of texts with advantages"),
    ],
)
def test_mistakes_are_found_before_a_start(options, rule):
    data = {"synthetic": "copy"} if options else {"synthetic": "none"}
    with pytest.raises(ConfigError, match=rule):
        resolve({**SHAPE, "objective": {"type": "policy", "options": options}, "data": data})
