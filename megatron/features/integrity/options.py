"""Keys and rules of checks for hardware errors, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from megatron.config.features.feature import Feature, Keys
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

AtRest = Literal["off", "due", "always"]


class AuditKeys(Section):
    audit: int | None = key(
        None, "Compute every n-th step twice, and compare losses and gradients to the last bit.", unit="steps", gt=0
    )
    audit_action: Literal["report", "restart"] = key(
        "report", "Consequence of a difference: a message, or status 17 and a restart from the newest checkpoint."
    )


class HashesKeys(Section):
    hashes: int | None = key(
        None,
        "Every n steps, and before each save, ranks that must hold equal bits compare hashes of them "
        "(docs/reliability.md).",
        unit="steps",
        gt=0,
    )
    hashes_at_rest: AtRest = key(
        "due",
        "With training.hashes, each rank also hashes its own state after an update and again before the next. due: "
        "state that only it holds, before updates that a comparison follows. always: everything, before all updates.",
    )


AUDIT_KEYS = Keys("training", AuditKeys, after="deterministic")
HASHES_KEYS = Keys("training", HashesKeys, after="deterministic")


def hashes_see_the_state(context: RuleContext) -> Iterator[Problem]:
    training = HASHES_KEYS.of(context.config)
    if training.hashes is None:
        if training.hashes_at_rest != "due":
            yield context.problem(
                "training.hashes_at_rest training.hashes",
                rule="must go with training.hashes, the steps after which ranks report differences",
                fix="add training.hashes=100, or remove it",
            )
        return
    for name in ("offload_optimizer", "offload_parameters"):
        if getattr(context.config.zero, name).device != "none":
            yield context.problem(
                f"training.hashes zero.{name}.device",
                rule="must be off with offloading: the state would have to return to the device for each comparison",
                fix="remove training.hashes",
            )


def audits_can_act(context: RuleContext) -> Iterator[Problem]:
    training = AUDIT_KEYS.of(context.config)
    if training.audit_action != "report" and training.audit is None:
        yield context.problem(
            "training.audit_action training.audit",
            rule="must go with training.audit, which computes steps twice",
            fix="add training.audit=100, or remove it",
        )


AUDIT = Feature(
    about="Steps that are computed twice.",
    wanted=lambda config: AUDIT_KEYS.of(config).audit is not None,
    keys=(AUDIT_KEYS,),
    rules=(audits_can_act,),
    hook="megatron.features.integrity.audit:AuditHook",
    hook_before=("stop",),
    needs=lambda config: ("spikes",),
)
HASHES = Feature(
    about="Hashes of the state, compared between ranks and over time.",
    wanted=lambda config: HASHES_KEYS.of(config).hashes is not None,
    keys=(HASHES_KEYS,),
    rules=(hashes_see_the_state,),
    # It hashes masters in `before_update`, which a prevented update does not reach: its place is free.
    engine="megatron.features.integrity.part:StateAtRest",
    hook="megatron.features.integrity.hook:HashesHook",
    hook_before=("stop",),
)
