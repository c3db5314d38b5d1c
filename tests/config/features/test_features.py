"""Declarations of a feature: keys at their places, the order of parts and hooks, memory and messages in plans."""

from __future__ import annotations

import itertools

import pytest

from megatron.config import ConfigError, resolve
from megatron.config.features.feature import Feature, Keys, features_of, in_order, with_keys
from megatron.config.registry import FEATURE, INSIDE, RegistryError
from megatron.config.section import Section, key
from megatron.model.costs.traffic import NotPredicted
from megatron.plan.candidate import Candidate
from megatron.plan.memory import rank_memory
from megatron.plan.messages.predict import predict
from megatron.plan.shapes import Shapes

NUMBERS = itertools.count()
OPTIONS = """
from megatron.config.features.feature import Feature, Keys, Message
from megatron.config.section import Section, Derived, Derivable, key

class Depth(Section):
    amount: int = key(2, "How much.", ge=0)
    twice: Derivable[int] = key(
        None, "Twice as much.", derived=Derived("twice", lambda own, at: 2 * own["amount"], (".amount",))
    )

class Inner(Section):
    tidiness: Depth = key(Depth, "A section.")
    tidy_every: int | None = key(None, "A key.", unit="steps", gt=0)

TIDY = Keys("evaluation.samples", Inner, after="tokens")

def traffic(config):
    own = TIDY.of(config)
    if own.tidiness.amount == 13:
        return "bad luck"
    return [Message("exchange", "replicas", "all_reduce", "fp64", own.tidiness.amount)]

FEATURE = Feature(
    about="Tidies up.",
    wanted=lambda config: TIDY.of(config).tidy_every is not None,
    keys=(TIDY,),
    memory=lambda config, layout, weights: {"tidied": 8.0 * weights.total, "states": 1.0},
    traffic=traffic,
)
"""
VALUES = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 4}},
    "training": {"steps": 2, "global_batch_size": 2, "sequence_length": 16},
    "data": {"synthetic": "copy"},
}


@pytest.fixture
def guest(tmp_path, monkeypatch):
    """The name of an extension with the feature `tidy`."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"tidy_{next(NUMBERS)}"
    extension = f"EXTENSION = {{'feature': {{'tidy': '{name}:FEATURE'}}}}\n"
    (tmp_path / f"{name}.py").write_text(extension + OPTIONS)
    return name


def with_guest(guest, **samples):
    return {**VALUES, "model": {**VALUES["model"], "extensions": [guest]}, "evaluation": {"samples": samples}}


def test_keys_stand_where_the_feature_says(guest):
    config = resolve(with_guest(guest, tidiness={"amount": 3}, tidy_every=5), ranks=1)
    dumped = config.model_dump()["evaluation"]["samples"]
    assert list(dumped)[2:6] == ["tokens", "tidiness", "tidy_every", "temperature"]
    assert dumped["tidiness"] == {"amount": 3, "twice": 6} and dumped["tidy_every"] == 5
    plain = resolve(VALUES, ranks=1).model_dump()
    del dumped["tidiness"], dumped["tidy_every"]
    assert dumped == plain["evaluation"]["samples"]


def test_wrong_values_of_such_keys_are_ordinary_problems(guest):
    with pytest.raises(ConfigError) as caught:
        resolve(with_guest(guest, tidiness={"amount": -1}, tidy_every=0), ranks=1)
    assert {each.key for each in caught.value.problems} == {
        "evaluation.samples.tidiness.amount",
        "evaluation.samples.tidy_every",
    }
    with pytest.raises(ConfigError, match="unknown key in evaluation.samples"):
        resolve({**VALUES, "evaluation": {"samples": {"tidy_every": 5}}}, ranks=1)


def test_a_key_that_is_there_already_is_refused():
    class Taken(Section):
        b: int = key(1, "Another b.")

    class Core(Section):
        a: int = key(1, "The first.")
        b: int = key(2, "The second.")

    feature = Feature("About.", lambda config: True, keys=(Keys("core", Taken),))
    with pytest.raises(RegistryError, match=r"feature mine must not add the key core\.b, which is there already"):
        with_keys(Core, "core", {"mine": feature})


def test_plans_add_its_memory_and_its_messages(guest):
    def parts(config):
        shapes = Shapes(config, 2)
        return rank_memory(config, shapes, Candidate(), 0).parts

    off = resolve(with_guest(guest), ranks=2)
    on = resolve(with_guest(guest, tidy_every=1, tidiness={"amount": 7}), ranks=2)
    without, with_it = parts(off), parts(on)
    assert "tidied" not in without and with_it["states"] == without["states"] + 1.0
    assert with_it["tidied"] > 0 and with_it["tidied"] % 8 == 0
    sums = [
        sum(size for call, _, size in predict(each, 2, 0).step if (call.phase, call.dtype) == ("exchange", "fp64"))
        for each in (off, on)
    ]
    assert sums[1] - sums[0] == 7 * 8
    unlucky = resolve(with_guest(guest, tidy_every=1, tidiness={"amount": 13}), ranks=2)
    with pytest.raises(NotPredicted, match="there is no formula for bad luck"):
        predict(unlucky, 2, 0)


def test_names_are_put_before_the_first_that_is_there():
    inside = ("first", "middle", "last")
    assert in_order(inside, {"mine": ()}) == ["first", "middle", "last", "mine"]
    assert in_order(inside, {"mine": ()}, "last") == ["first", "middle", "mine", "last"]
    assert in_order(inside, {"mine": ("gone", "last", "middle"), "yours": ("mine",)}) == [
        "first",
        "yours",
        "mine",
        "middle",
        "last",
    ]
    assert in_order(inside, {"mine": ("gone",)}, "last") == ["first", "middle", "mine", "last"]


def test_every_feature_inside_declares_itself():
    assert tuple(features_of()) == tuple(INSIDE[FEATURE])
