"""Pruned training: that of dense matrices which are multiplied by a mask in each step, in one process of plain PyTorch.

The oracle sorts all magnitudes, multiplies weights and gradients by the mask, and has neither engine nor DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint import CheckpointError, FragmentSpec, open_checkpoint
from megatron.config import ConfigError, resolve
from megatron.config.features.feature import for_reading
from megatron.config.problems import UserError
from megatron.config.tree import thaw
from megatron.config.variants import overlay
from megatron.features.pruning import check
from megatron.features.pruning.options import wanted
from megatron.model.stack import build_model
from megatron.testing.runs import train_on_ranks
from tests.training import runs
from tests.workers import run

H, LAYERS, VOCAB = 16, 2, 64
KEEP = 0.2
PLAIN: dict[str, Any] = {
    "model": {
        **{"layers": f"(attention/mlp) x{LAYERS}", "hidden_size": H, "vocab_size": VOCAB},
        **{"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"gated": True, "hidden_size": 32, "bias": True}},
    },
    "training": {"steps": 3, "sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2},
    # the epsilon is far above rounding: an element with a gradient of 0 in exact sums would else move by its noise
    "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "epsilon": 1e-4, "gradient_clipping": 0.05},
    "schedule": {"type": "constant"},
    "data": {"synthetic": "copy"},
    "pruning": {"keep": KEEP},
}
SGD = {"optimizer": {"type": "sgd", "momentum": 0.9, "epsilon": 1e-8}}
BOTH = {"parallel": {"tensor": 2}, "training": {"micro_batch_size": 1}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, ZeRO 0": (1, {"zero": {"stage": 0}}),
    "one process, ZeRO 1, SGD, by matrix": (1, {**SGD, "pruning": {"scope": "matrix"}}),
    "tp2 · dp2, ZeRO 0": (4, {**BOTH, "zero": {"stage": 0}}),
    "tp2 · dp2, ZeRO 1": (4, {**BOTH, "zero": {"stage": 1}}),
    "tp2 · dp2, ZeRO 0, SGD, by matrix": (4, {**BOTH, **SGD, "zero": {"stage": 0}, "pruning": {"scope": "matrix"}}),
    "pp2 · dp2, ZeRO 0": (4, {"parallel": {"pipeline": 2}, "zero": {"stage": 0}}),
    "tp2 · pp2, ZeRO 1": (4, {"parallel": {"tensor": 2, "pipeline": 2}, "zero": {"stage": 1}}),
    "pp2 interleaved · dp2, ZeRO 1, SGD, by matrix": (
        4,
        {
            **SGD,
            "model": {"layers": "(attention/mlp) x4"},
            "parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved"},
            "training": {"micro_batch_size": 1},
            "zero": {"stage": 1},
            "pruning": {"scope": "matrix"},
        },
    ),
    "tp2 sequence · dp2, ZeRO 1, bf16": (
        4, {"parallel": {"tensor": 2, "sequence": True}, "precision": {"compute": "bf16"}, "zero": {"stage": 1}},
    ),
}  # fmt: skip
PRUNED = ("query.weight", "key_value.weight", "output.weight", "gate_up.weight", "up.weight", "down.weight")


def masks_of(config: Any) -> dict[str, np.ndarray]:
    """By brute force: the largest magnitudes of the initial values, the first of equal ones."""
    model = build_model(config, dtype=torch.float32)
    found = {p.logical.name: p.detach().numpy() for p in model.parameters() if p.logical.name.endswith(PRUNED)}
    options = config.pruning
    sets = [[name] for name in sorted(found)] if options.scope == "matrix" else [sorted(found)]
    masks = {}
    for names in sets:
        values = np.concatenate([np.abs(found[name]).ravel() for name in names])
        mask = np.zeros(len(values), bool)
        mask[np.argsort(-values, kind="stable")[: round(options.keep * len(values))]] = True
        for name in names:
            masks[name], mask = np.split(mask, [found[name].size])
    return masks


def plainly(config: Any) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and weights of dense training with masks."""
    narrow = torch.bfloat16 if config.precision.compute == "bf16" else torch.float32
    model, masks = build_model(config, dtype=narrow), masks_of(config)
    parameters = list(dict.fromkeys(model.parameters()))
    kept = [
        torch.from_numpy(masks.get(p.logical.name, np.ones(p.numel(), bool))).view(p.shape).float() for p in parameters
    ]
    masters = [
        (p.detach().float() + torch.from_numpy(runs.noise(p.logical))) * mask for p, mask in zip(parameters, kept)
    ]
    optimizer = runs.PlainOptimizer(config, [p.logical for p in parameters], masters)
    losses, norms = [], []
    for step in range(config.training.steps):
        runs.load(parameters, masters, narrow)
        loss, gradients = runs.plain_gradients(config, model, parameters, step)
        gradients = [gradient * mask for gradient, mask in zip(gradients, kept)]
        norm = float(torch.sqrt(sum(g.double().square().sum() for g in gradients)))
        optimizer.step([g * min(1.0, config.optimizer.gradient_clipping / (norm + 1e-6)) for g in gradients])
        for master, mask in zip(masters, kept):
            master *= mask
        losses.append(loss)
        norms.append(norm)
    return losses, norms, {p.logical.name: m.numpy().ravel() for p, m in zip(parameters, masters)}


def trained(cases: dict[str, dict[str, Any]], ranks: int) -> dict[str, tuple]:
    """Of each case, on this rank: losses, norms, fragments, elements of its states, and the account of a step."""
    from megatron.parallel.messages.account import Recorder

    found = {}
    for name, values in cases.items():
        config, engine = runs.start(values, ranks)
        losses, norms = runs.steps(config, engine, 0, config.training.steps)
        fragments = runs.portable(f for f in engine.state.fragments() if f.data.dtype == torch.float32)
        states = sum(each.numel() for own in engine.optimizer.state.values() for each in own.values() if each.ndim > 0)
        recorder, data = Recorder(engine.mesh), engine.mesh.data
        recorder.install()
        try:
            engine.step(runs.local_batch(config, 0, data.rank, data.size), 0.0)
        finally:
            recorder.remove()
        found[name] = losses, norms, fragments, states, recorder.tally.take().rows()
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple]]:
    found: dict[str, list[tuple]] = {}
    for ranks in (1, 4):
        cases = {name: overlay(PLAIN, own) for name, (count, own) in CASES.items() if count == ranks}
        answers = run(ranks, trained, cases, ranks)
        found |= {name: [answer[name] for answer in answers] for name in cases}
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_dense_training_with_masks(outcomes, name):
    ranks, own = CASES[name]
    config = resolve(overlay(PLAIN, own), ranks=ranks)
    losses, norms, weights = plainly(config)
    masks = masks_of(config)
    narrow = config.precision.compute == "bf16"  # 8 bits of precision, rounded in other places on each layout
    bound = 2**-7 if narrow else 1e-5
    for found in outcomes[name]:
        assert np.allclose(found[0], losses, rtol=bound) and np.allclose(found[1], norms, rtol=4 * bound)
    whole = runs.assemble([found[2] for found in outcomes[name]])
    for tensor, mask in masks.items():
        for state in {state for each, state in whole if each == tensor}:
            assert (whole[tensor, state][~mask] == 0).all()
        assert np.count_nonzero(whole[tensor, "master"]) == mask.sum()
    if not narrow:
        for tensor, wanted in weights.items():
            assert np.allclose(whole[tensor, "master"], wanted, atol=2e-6), tensor


@pytest.mark.parametrize("name", CASES)
def test_states_and_sums_are_as_short_as_the_formula_says(outcomes, name):
    """Let a tensor parallel rank have k kept elements and r others, with t tensor and d data parallel ranks. AdamW has
    2 (k + r) / d states at ZeRO 1 and 2 (k + r) at ZeRO 0, SGD half of them, and the sum has k + r numbers of fp32."""
    ranks, own = CASES[name]
    config = resolve(overlay(PLAIN, own), ranks=ranks)
    t, p = config.parallel.tensor, config.parallel.pipeline
    model = {each.logical.name: each for each in build_model(config, dtype=torch.float32).parameters()}
    masks, d = masks_of(config), ranks // (t * p)
    each = {"adamw": 2, "sgd": 1}[config.optimizer.type]
    total = 0
    for tensor, whole in model.items():
        cut = whole.logical.shard is not None
        total += int(masks[tensor].sum()) if tensor in masks else whole.numel() * (1 if cut else t)
    counted = sum(found[3] for found in outcomes[name])
    if config.zero.stage == 1:  # padded to equal parts, in each of at most two groups
        assert each * total <= counted <= each * (total + 2 * 4 * ranks)
    else:
        assert counted == each * total * d
    if d > 1:
        size = sum(row[-1] for found in outcomes[name] for row in found[4] if row[0] == "backward" and row[2] == "data")
        padding = 0 if config.zero.stage == 0 else 4 * d * 2 * 4 * ranks
        assert 4 * d * total <= size <= 4 * d * total + padding


def stored(run: Path, step: int) -> dict[tuple[str, str], np.ndarray]:
    checkpoint = open_checkpoint(run / "checkpoints" / f"step_{step:08d}")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data.numpy()
        for name, state in checkpoint.stored
    }


def values_of(folder: Path, **more: Any) -> dict[str, Any]:
    return overlay(
        PLAIN,
        {
            "run": {"dir": str(folder)},
            "training": {"steps": 4, "weight_average": 0.5},
            "checkpoint": {"steps": [0, 2]},
            "logging": {"console": "quiet", "curve": False, "predictions": False},
            "evaluation": {"at_end": False},
            **more,
        },
    )


def test_checkpoints_are_dense_and_open_on_another_layout(tmp_path):
    """A resume on its own layout has the same bits, and one on another layout is as close as layouts are."""
    folder = tmp_path / "run"
    train_on_ranks(1, values_of(folder))
    kept, config = stored(folder, 4), resolve(PLAIN)
    for name, mask in masks_of(config).items():
        assert kept[name, "master"].size == mask.size
        assert ((kept[name, "master"] != 0) == mask).all()
        states = [each for (tensor, _), each in kept.items() if tensor == name and each.size == mask.size]
        assert len(states) == 4 and not any(each[~mask].any() for each in states)  # both moments, and the average
    own, other = tmp_path / "own", tmp_path / "other"
    grid = {"parallel": {"tensor": 2, "pipeline": 2}, "zero": {"stage": 1}}
    for place, ranks, layout in ((own, 1, {}), (other, 4, grid)):
        train_on_ranks(
            ranks, overlay(values_of(place), {**layout, "training": {**layout.get("training", {}), "steps": 2}})
        )
        train_on_ranks(ranks, overlay(values_of(place), layout))
    assert all((stored(own, 4)[key] == each).all() for key, each in kept.items())
    resumed = stored(other, 4)
    assert resumed.keys() == kept.keys()
    assert all(np.allclose(resumed[key], each, atol=2e-6) for key, each in kept.items())


def test_a_file_or_a_checkpoint_gives_the_mask(tmp_path):
    config = resolve(PLAIN)
    first = {name: mask for name, mask in masks_of(config).items() if name.startswith("layers.1.")}
    shapes = {p.logical.name: p.logical.shape for p in build_model(config).parameters()}
    file, folder = tmp_path / "mask.safetensors", tmp_path / "run"
    masks = {name: torch.from_numpy(mask).view(shapes[name]) for name, mask in first.items()}
    save_file(masks, file)
    given = {**values_of(folder), "pruning": {"mask": str(file)}}
    train_on_ranks(1, overlay(given, {"training": {"steps": 2}}))
    for (name, state), each in stored(folder, 2).items():
        if state == "master" and name.endswith(PRUNED):
            assert ((each != 0) == first.get(name, np.ones(each.size, bool))).all()
    # another run starts from these weights, and its magnitudes decide about all matrices
    base = str(folder / "checkpoints" / "step_00000002")
    again = overlay(values_of(tmp_path / "again"), {"checkpoint": {"initialize_from": base}, "training": {"steps": 1}})
    train_on_ranks(1, again)
    begun, after = stored(folder, 2), stored(tmp_path / "again", 0)
    names = sorted(name for name, state in begun if state == "master" and name.endswith(PRUNED))
    values = np.concatenate([begun[name, "master"] for name in names])
    order = np.argsort(-np.abs(values), kind="stable")[round(KEEP * len(values)) :]
    values[order] = 0
    assert (np.concatenate([after[name, "master"] for name in names]) == values).all()
    # the mask of a resume must be that of the checkpoint
    masks[next(iter(masks))][:] = True
    save_file(masks, file)
    with pytest.raises(Exception, match="another mask"):
        train_on_ranks(1, given)


@pytest.mark.parametrize(
    "change, rule",
    [
        (lambda masks: {"layers.9.nothing.weight": next(iter(masks.values()))}, "must be the name of"),
        (lambda masks: {name: each.t().contiguous() for name, each in masks.items()}, "must have the shape"),
        (lambda masks: {name: each.to(torch.complex64) for name, each in masks.items()}, "must be of type"),
        (lambda masks: {name: each.float() / 0 for name, each in masks.items()}, "finite numbers"),
        (lambda masks: {name: each & False for name, each in masks.items()}, "must keep an element of layers.0"),
        (lambda masks: {}, "has no tensors"),
        (lambda masks: b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "whole safetensors file"),
    ],
)  # fmt: skip
def test_a_bad_mask_is_refused(tmp_path, change, rule):
    file, name = tmp_path / "mask.safetensors", "layers.0.mlp.down.weight"
    made = change({name: torch.eye(H, 32).bool()})
    file.write_bytes(made) if isinstance(made, bytes) else save_file(made, file)
    with pytest.raises(ConfigError, match=rule) as caught:
        resolve({**PLAIN, "pruning": {"mask": str(file)}}, ranks=1)
    assert "pruning.mask" in str(caught.value) and "fix" in str(caught.value)


def started(folder: str) -> str:
    """The error of a rank whose host has a file of its own."""
    file = f"{folder}/{min(1, torch.distributed.get_rank())}.safetensors"
    with pytest.raises(CheckpointError) as caught:
        runs.start({**PLAIN, "pruning": {"mask": file}}, 4)
    return str(caught.value)


def test_hosts_with_different_masks_stop(tmp_path):
    name = "layers.0.mlp.down.weight"
    for number, mask in enumerate((torch.eye(H, 32), torch.eye(H, 32).flip(0))):  # of the same size
        save_file({name: mask.contiguous()}, tmp_path / f"{number}.safetensors")
    assert all("must be the same on every host" in each for each in run(4, started, str(tmp_path)))


def without_a_part(file: str) -> str:
    parallel = {"tensor": 2, "pipeline": 2}
    with pytest.raises(UserError) as caught:
        runs.start({**PLAIN, "pruning": {"mask": file}, "parallel": parallel}, 4)
    return str(caught.value)


def test_all_stages_stop_where_a_rank_of_one_keeps_nothing(tmp_path):
    mask, name = torch.zeros(H, 32), "layers.0.mlp.down.weight"
    mask[:, 0] = 1.0  # the first of two ranks has these columns
    save_file({name: mask}, tmp_path / "mask.safetensors")
    found = run(4, without_a_part, str(tmp_path / "mask.safetensors"))
    assert all(f"no element of {name}" in each for each in found)


def test_whoever_only_reads_weights_prunes_nothing():
    """A mask would cut the weights of another checkpoint, and needs files that may be gone."""
    config = for_reading(resolve(PLAIN))
    assert not wanted(config) and config.model == resolve(PLAIN).model


def test_a_mask_has_the_elements_that_are_to_be_kept(tmp_path):
    """Zeros are not elements of equal magnitude that a mask chose."""
    file, name = tmp_path / "mask.safetensors", "layers.0.mlp.down.weight"
    save_file({name: torch.eye(H, 32)}, file)
    for scope in ("global", "matrix"):
        resolve({**PLAIN, "pruning": {"mask": str(file), "keep": 1 / 32, "scope": scope}}, ranks=1)
        with pytest.raises(ConfigError, match=f"at least 10.00% of elements other than 0 in {name}"):
            resolve({**PLAIN, "pruning": {"mask": str(file), "keep": 0.1, "scope": scope}}, ranks=1)
    config = resolve({**PLAIN, "pruning": {"mask": str(file)}}, ranks=1)
    save_file({"embedding.weight": torch.ones(VOCAB, H)}, file)
    said = check.broken_rule(json.dumps(thaw(config.model_dump())))
    assert said.startswith("'embedding.weight' must be the name of a linear layer's matrix")


@pytest.mark.parametrize(
    "changes, key, rule",
    [
        ({"pruning": {"keep": 0.0}}, "pruning.keep", "in (0, 1]"),
        ({"pruning": {"keep": 1.5}}, "pruning.keep", "in (0, 1]"),
        ({"pruning": {"mask": "nothing.safetensors"}}, "pruning.mask", "must be the folder of a checkpoint"),
        ({"zero": {"stage": 2}}, "zero.stage", "must be 1 with pruning"),
        ({"parallel": {"pipeline": 2, "schedule": "zb_h1"}}, "parallel.schedule", "must be 1f1b or interleaved"),
        ({"optimizer": {"type": "muon"}}, "optimizer.type", "must be adamw, sgd or lion"),
        ({"training": {"hashes": 1}}, "pruning", "must not be used together with hashes"),
        ({"model": {"attention": {"qk_clip": 100.0}}}, "pruning", "outside of the optimizer"),
    ],
)
def test_bad_input_is_refused_before_the_start(changes, key, rule):
    with pytest.raises(ConfigError) as caught:
        resolve(overlay(PLAIN, changes), ranks=2)
    assert key in str(caught.value) and rule in str(caught.value)
