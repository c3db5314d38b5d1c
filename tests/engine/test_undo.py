"""State that a step changes: everything that can be reached from an engine is checked before and after, also state that
is in no list."""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.engine.protocol import NORM, SKIP, Spike
from tests.training.runs import local_batch, start
from tests.workers import run

LARGEST = 1_000_000  # elements of a tensor that is checked: only DeepSpeed's buckets have more
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Enum)
# State that a step leaves and no later step reads, by the whole path without indices where it is reached.
WRITTEN_ANEW = {
    r"engine\.(clipping\.norm|losses\.\w+)": "numbers of the step",
    r".*\.(_gate|parts|self)\.(_prints(\.grad)?|_trial|_size|prepared|found\.\w+)": "what the gate found of the step",
    r"engine\.undo\._feedback\.(_next|_keep)": "where the step writes what it leaves out, and whether it does",
    r".*\._global_grad_norm": "the norm of the step",
    r"engine\.deepspeed\.(global_samples|global_steps|micro_steps|skipped_steps)": "counts that name files",
    r"engine\.deepspeed\.(timers\..*|agg_train_loss|dp_group_loss)": "numbers that DeepSpeed would log",
    r"engine\.deepspeed\.(pipe_buffers|_grad_layer_buf|fwd_outputs|loss|total_loss)(\..*)?": "what stages send",
    r"engine\.pipeline\.micro_offset": "for draws of DeepSpeed, which no layer makes",
    r".*\.(ipg_buckets\.buffer|grad_partitions_flat_buffer|\w+param_id_to_grad_partition)": "gradients at ZeRO 3",
    r".*\.(fp32_groups_\w*gradients_flat|_hp_grad|_hp_mapping\.gradient_dict|_averages\.grad)": "gradients in bf16",
    r".*\._get_preflattened_grad_partition\.kept": "gradients at ZeRO 1",
    r".*\.(post_backward_callback_graph_task_id|\w+n_available_params|applied_pre_backward_ref_cnt)": "place in a pass",
}


def walk(root: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of all tensors and plain values: through attributes, containers, closures and bound methods."""
    seen, todo = {id(root)}, [("engine", root)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta" and value.numel() < LARGEST:
                yield path, (tuple(value.shape), value.dtype, value.detach().clone())
            parts = [(".grad", value.grad)] if value.is_leaf else []
            parts += [(f".{name}", each) for name, each in vars(value).items()]
        elif isinstance(value, PLAIN):
            yield path, value
            continue
        elif isinstance(value, Mapping):
            parts = [(f"[{place}]", each) for place, each in enumerate([*value.values(), *value.keys()])]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts = [(f"[{place}]", each) for place, each in enumerate(value)]
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or ())
            parts = [(f".{name}", cell.cell_contents) for name, cell in cells if filled(cell)]
        elif isinstance(value, types.MethodType):
            parts = [(".self", value.__self__), (".function", value.__func__)]
        elif isinstance(value, type | types.ModuleType | torch.distributed.ProcessGroup):
            continue
        else:
            parts = [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
        for name, each in parts:
            if isinstance(each, PLAIN) or id(each) not in seen:
                seen.add(id(each))
                todo.append((path + name, each))


def filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def differ(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        same = one[:2] == other[:2] and torch.equal(one[2].nan_to_num(), other[2].nan_to_num())
        return not same
    return not (one == other or one != one)


def changed(before: dict[str, Any], engine: Any) -> list[str]:
    """Paths of what is another value now, or new, without what every step writes again."""
    after = dict(walk(engine))
    found = [path for path, value in after.items() if path not in before or differ(before[path], value)]
    names = [re.sub(r"\[\d+\]", "", path) for path in found]
    return sorted(name for name in names if not any(re.fullmatch(each, name) for each in WRITTEN_ANEW))


def shown(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    config, engine = start(values, ranks)
    data = engine.mesh.data

    def step(number: int) -> Any:
        return engine.step(local_batch(config, number, data.rank, data.size), config.optimizer.lr)

    averages = config.training.weight_average is not None

    def applied(number: int) -> None:
        step(number)
        if averages:
            engine.advance_average(0.5)

    applied(0)
    found: dict[str, Any] = {}
    before = dict(walk(engine))
    tensors = [fragment.data.clone() for fragment in engine.state.targets()]
    kept = engine.undo.kept()
    engine.parts["spikes"].prepare(trial=True)
    step(1)
    found["trial"] = changed(before, engine)
    with mock.patch.object(
        engine.parts["spikes"].rule, "judge", lambda _, norm: (Spike(NORM, float(norm), 0.0, SKIP), None)
    ):
        skipped = step(1)
    found["skip"], found["was skipped"] = changed(before, engine), skipped.spike is not None
    applied(1)
    found["applied"] = changed(before, engine)
    for target, values_before in zip(engine.state.targets(), tensors, strict=True):
        target.data.copy_(values_before)
    engine.undo.restore(kept)
    engine.state.refresh()
    found["return"] = changed(before, engine)
    if engine.undo._feedback is not None:
        found["feedback"] = [path for path in dict(walk(engine)) if "_feedback.left_out" in path]
    return found


VALUES: dict[str, Any] = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 2}},
    "training": {
        "steps": 4,
        "sequence_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "weight_average": 0.5,
    },
    "optimizer": {"lr": 1e-2},
    "schedule": {"warmup_steps": 0},
    "data": {"synthetic": "copy"},
    "tokenizer": {"type": "none"},
    "spikes": {"action": "skip", "window": 4},
}
EXPERTS = {"experts": 4, "router": {"correction_rate": 0.1}}
ATTENTION, TRAINING = VALUES["model"], VALUES["training"]


def sent(wire: str, stage: int, **more: Any) -> dict[str, Any]:
    return {"parallel": {"communication": {"compress": {"data": wire}}}, "zero": {"stage": stage}, **more}


def by(optimizer: str, **more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": optimizer, "lr": 1e-2}, **more}


OFTEN: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "top_k, zero 1": (2, sent("top_k", 1)),
    "int8, bf16": (2, sent("int8_block", 1, precision="bf16")),
    "muon, zero 3": (2, by("muon", zero={"stage": 3})),
    "experts": (1, {"model": {**ATTENTION, "layers": "(attention/moe) x2", "moe": EXPERTS}}),
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **OFTEN,
    "top_k, zero 0": (2, sent("top_k", 0)),
    "top_k, zero 2": (2, sent("top_k", 2)),
    "pipeline": (2, {"parallel": {"pipeline": 2}, "zero": {"stage": 1}}),
    "clipped logits": (1, {"model": {**ATTENTION, "attention": {"heads": 2, "qk_clip": 0.01}}}),
    "AdaGC": (2, {"zero": {"stage": 1}, "spikes": {"action": "adagc", "adagc": {"warmup": 1}}}),
    **{each: (1, by(each)) for each in ("normuon", "dion", "soap", "adafactor", "adam_mini", "adamw_8bit", "ademamix")},
    "schedule_free_adamw": (
        2,
        by(
            "schedule_free_adamw",
            zero={"stage": 1},
            training={**TRAINING, "weight_average": None},
            schedule={"type": "constant", "warmup_steps": 0},
        ),
    ),
}


@pytest.mark.parametrize(
    "case", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_all_that_a_step_changes_is_undone(case: str) -> None:
    ranks, values = CASES[case]
    for found in run(ranks, shown, VALUES | values, ranks):
        assert found["was skipped"] and len(found["applied"]) > 20, found
        assert not (found["trial"] or found["skip"] or found["return"]), found
        assert ("feedback" in found) == ("top_k" in case or "int8" in case)
        assert not found.get("feedback"), "what was left out of steps that are undone"
