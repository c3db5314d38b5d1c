"""Policy gradients of sampled texts.

REINFORCE (Williams 1992), RLOO (Ahmadian et al. 2024, arXiv 2402.14740), PPO's clip with GRPO's mean (Schulman et al.
2017, arXiv 1707.06347, Shao et al. 2024, arXiv 2402.03300), the means of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)
and DAPO (Yu et al. 2025, arXiv 2503.14476), GSPO (Zheng et al. 2025, arXiv 2507.18071), CISPO (MiniMax 2025, arXiv
2506.13585). k1, k2 and k3 are the estimators of Schulman, "Approximating KL Divergence" (2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from megatron.config.routes import route_columns

from ..contract import Objective
from .options import (
    ADVANTAGE,
    BY_SEQUENCE,
    CONSTANT,
    LABEL,
    LOSSES,
    OBJECTIVE,
    OLD,
    REFERENCE,
    ROLLOUTS,
    SAMPLER,
    SEQUENCE,
    TRAINER,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels

LARGEST = 20.0  # of a difference of log-probabilities before it is exponentiated, so that nothing overflows


class Policy(Objective):
    """The loss of labels that the model has drawn, from their advantage A and their log-probabilities.

    With r = exp(log p - log p_old) of a label, and [r] for r clipped to 1 - clip_low ... 1 + clip_high:

    | loss | of a label |
    |---|---|
    | reinforce | -A log p |
    | grpo | -min(r A, [r] A), with r at most `ratio_limit` in the first term |
    | gspo | as grpo, with exp(mean of log p - log p_old over the sequence) for r |
    | rloo | as grpo, with exp(sum of log p - log p_old over the sequence) for r |
    | cispo | -A log p min(r, 1 + clip_high), and that factor is a constant |
    | dppo | -A r with the sampler's p for p_old. 0 where p has left it by more than `trust` in the direction of A |

    A divergence from the reference, beta times k1, k2 or k3, is added to each.

    `mean: label` is the mean over all labels of a step. `sequence` is the mean over sequences of the means over their
    labels. `constant` is the mean over sequences of their sums divided by `length`. The last two need weights of labels
    whose sum over each sequence is 1, as the source "rollouts" gives them.

    A correction multiplies the loss of a label by w = exp(log p_old - log p_sampler), of the label or of its sequence.
    `clamp` limits w, and `mask` sets it to 0 beyond its limits.

    Args:
        anchored: labels have the column TRAINER: log-probabilities by the weights of p_old, as a training pass reads
            the text. NaN: this pass is that one. Then log p is log p_old plus the change of the pass since, so that r
            is exactly 1 before the first update, and w compares with the training pass.
    """

    def __init__(self, *, anchored: bool = False, **options: Any) -> None:
        self.options = {name: option.default for name, option in OBJECTIVE.options.items()} | options
        mean, low, high, self.ratio = LOSSES[self.options["loss"]]
        for name, default in (("mean", mean), ("clip_low", low), ("clip_high", high)):
            self.options[name] = default if self.options[name] is None else self.options[name]
        self.sequences, self.loss = self.options["sequences"], self.options["loss"]
        reads = {
            SEQUENCE: True,
            ADVANTAGE: True,
            OLD: True,
            SAMPLER: self.loss == "dppo"
            or self.options["correction"] != "none"
            or self.options["stale_limit"] is not None,
            REFERENCE: self.options["beta"] > 0,
            TRAINER: anchored,
        }
        self.columns = tuple(name for name, read in reads.items() if read)
        self.reports = ("policy_change", "policy_clipped", *(("policy_kl",) if reads[REFERENCE] else ()))
        self.anchored, self.reports = anchored, (*self.reports, *(("policy_rounding",) if anchored else ()))

    @classmethod
    def build(cls, config: Config) -> Self:
        made = cls(anchored=config.data.synthetic == ROLLOUTS, **OBJECTIVE.options_of(config))
        if made.options["replay"]:
            made.columns += tuple(name for names in route_columns(config.model).values() for name in names)
        return made

    def counted(self, weights: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {LABEL: (columns[SEQUENCE] >= 0) & (weights != 0)} if self.options["mean"] == LABEL else {}

    def cost_of_labels(self, labels: Labels) -> Tensor:
        if self.anchored:
            labels = self.from_old(labels)
        old_BS = labels.columns[SAMPLER if self.loss == "dppo" else OLD]
        change_BS = (labels.log_p_BS - old_BS).clamp(max=LARGEST)
        labels.report("policy_change", change_BS.abs())
        cost_BS = self.of_ratios(labels, change_BS) * self.correction(labels)
        if self.options["beta"]:
            cost_BS = cost_BS + self.options["beta"] * self.divergence(labels, change_BS)
        inside_BS = labels.columns[SEQUENCE] >= 0
        cost_BS = cost_BS.masked_fill(~inside_BS, 0.0)
        if self.options["mean"] == LABEL:
            return labels.mean(cost_BS, LABEL)
        if self.options["mean"] == BY_SEQUENCE:
            return cost_BS
        assert self.options["mean"] == CONSTANT
        return cost_BS * labels.spread(labels.lengths_BK) / self.options["length"]

    @staticmethod
    def from_old(labels: Labels) -> Labels:
        """The labels with log p_old plus the change of the training pass."""
        import torch

        old_BS, now_BS, given_BS = labels.columns[OLD], labels.log_p_BS, labels.columns[TRAINER]
        trainer_BS = torch.where(given_BS.isnan(), now_BS.detach(), given_BS)
        labels.report("policy_rounding", (trainer_BS - old_BS).abs())
        return replace(labels, log_p_BS=old_BS + (now_BS - trainer_BS), columns={**labels.columns, TRAINER: trainer_BS})

    def of_ratios(self, labels: Labels, change_BS: Tensor) -> Tensor:
        """The loss of each label, before corrections."""
        import torch

        advantage_BS, low, high = labels.columns[ADVANTAGE], self.options["clip_low"], self.options["clip_high"]
        if self.loss == "reinforce":
            labels.report("policy_clipped", torch.zeros_like(change_BS))
            return -advantage_BS * labels.log_p_BS
        if self.ratio != "label":
            of_sequence = labels.sum(change_BS)
            if self.ratio == "mean":
                of_sequence = of_sequence / labels.lengths_BK.clamp(min=1)
            change_BS = labels.spread(of_sequence.clamp(max=LARGEST))
        ratio_BS = change_BS.exp()
        if self.loss == "cispo":
            labels.report("policy_clipped", (ratio_BS > 1 + high).to(ratio_BS.dtype))
            return -advantage_BS * labels.log_p_BS * ratio_BS.detach().clamp(max=1 + high)
        if self.loss == "dppo":
            moved_BS = (labels.log_p_BS.exp() - labels.columns[SAMPLER].exp()) * advantage_BS.sign()
            left_BS = moved_BS.detach() > self.options["trust"]
            labels.report("policy_clipped", left_BS.to(ratio_BS.dtype))
            return (-advantage_BS * ratio_BS).masked_fill(left_BS, 0.0)
        clipped_BS = ratio_BS.clamp(1 - low, 1 + high)
        beyond_BS = torch.where(advantage_BS > 0, ratio_BS > 1 + high, ratio_BS < 1 - low)
        labels.report("policy_clipped", beyond_BS.to(ratio_BS.dtype))
        limited_BS = (
            ratio_BS if self.options["ratio_limit"] is None else ratio_BS.clamp(max=self.options["ratio_limit"])
        )
        return -torch.minimum(limited_BS * advantage_BS, clipped_BS * advantage_BS)

    def divergence(self, labels: Labels, change_BS: Tensor) -> Tensor:
        """The estimator of KL(policy || reference) of each label."""
        x_BS = (labels.columns[REFERENCE] - labels.log_p_BS).clamp(max=LARGEST)
        kind = self.options["kl"]
        if kind in ("k1", "abs"):
            found = -x_BS if kind == "k1" else x_BS.abs()
        else:
            found = x_BS.square() / 2 if kind == "k2" else x_BS.exp() - x_BS - 1
        labels.report("policy_kl", found)
        return found * change_BS.exp() if self.options["kl_ratio"] else found

    def correction(self, labels: Labels) -> Tensor | float:
        """The factor of each label's loss for the difference between sampler and trainer, without gradient."""
        kind, factor_BS = self.options["correction"], None
        if kind != "none":
            apart_BS = labels.columns[TRAINER if self.anchored else OLD] - labels.columns[SAMPLER]
            if kind.startswith("sequence"):
                apart_BS = labels.spread(labels.sum(apart_BS))
            factor_BS = apart_BS.clamp(max=LARGEST).exp().detach()
            low, high = self.options["correction_low"], self.options["correction_high"]
            if kind.endswith("clamp"):
                factor_BS = factor_BS.clamp(low, high)
            else:
                factor_BS = factor_BS.masked_fill((factor_BS < low) | (factor_BS > high), 0.0)
        if self.options["stale_limit"] is not None:
            behind_BK = labels.sum(labels.columns[SAMPLER] - labels.log_p_BS.detach()) / labels.lengths_BK.clamp(min=1)
            stale_BS = labels.spread(behind_BK) > self.options["stale_limit"]
            kept_BS = (~(stale_BS & (labels.columns[ADVANTAGE] < 0))).to(labels.log_p_BS.dtype)
            factor_BS = kept_BS if factor_BS is None else factor_BS * kept_BS
        return 1.0 if factor_BS is None else factor_BS
