"""Saved on one layout, resumed on another: the same state bit for bit, and the run continues as if unbroken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.paths import ROOT
from tests.training import runs
from tests.training.matrix import merged, read
from tests.workers import run

pytestmark = pytest.mark.layouts

BEFORE, AFTER = 2, 2  # steps before the save, and after

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "zero": {"stage": 0}},
    "dp2 ZeRO 0": {"ranks": 2, "zero": {"stage": 0}},
    "dp2 ZeRO 1": {"ranks": 2, "zero": {"stage": 1}},
    "dp2 ZeRO 2": {"ranks": 2, "zero": {"stage": 2}},
    "dp2 ZeRO 3": {"ranks": 2, "zero": {"stage": 3, "persistent_size": 100}},
    "tp2": {"ranks": 2, "parallel": {"tensor": 2}},
    "pp2 of 1 and 4": {"ranks": 2, "parallel": {"pipeline": 2, "pipeline_split": [1, 4]}},
    "pp3 of 1, 3 and 1": {"ranks": 3, "parallel": {"pipeline": 3, "pipeline_split": [1, 3, 1]}},
    "pp4 of 1, 2, 1, 1": {"ranks": 4, "parallel": {"pipeline": 4, "pipeline_split": [1, 2, 1, 1]}},
    "pp2 ZB-V": {"ranks": 2, "parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "zbv"}},
    "pp2 dp2 zero bubble ZeRO 3": {
        "ranks": 4,
        "parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "zb_h1"},
        "zero": {"stage": 3},
    },
    "tp2 dp2 ZeRO 3": {
        "ranks": 4,
        "parallel": {"tensor": 2, "sequence": True},
        "zero": {"stage": 3, "persistent_size": 0},
    },
    "dp2 ep2 ZeRO 0": {"ranks": 2, "parallel": {"expert": 2}, "zero": {"stage": 0}},
    "dp2 ep2 ZeRO 1": {"ranks": 2, "parallel": {"expert": 2}},
    "dp4 ep2 ZeRO 1": {"ranks": 4, "parallel": {"expert": 2}},
    "dp4 ep4 ZeRO 2": {"ranks": 4, "parallel": {"expert": 4}, "zero": {"stage": 2}},
    "tp2 ep2": {"ranks": 4, "parallel": {"tensor": 2, "expert": 2, "sequence": True}},
    "tp2 ep4 folded": {"ranks": 4, "parallel": {"tensor": 2, "expert": 4, "expert_tensor": 1}},
    "tp2 ep2 folded ZeRO 2": {
        "ranks": 4,
        "parallel": {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence": True},
        "zero": {"stage": 2},
    },
    "tp2 ep1 folded ZeRO 0": {"ranks": 2, "parallel": {"tensor": 2, "expert_tensor": 1}, "zero": {"stage": 0}},
    "tp2 pp2": {"ranks": 4, "parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
    "cp2 ZeRO 1": {"ranks": 2, "parallel": {"context": 2}},
    "cp4 ZeRO 3": {"ranks": 4, "parallel": {"context": 4}, "zero": {"stage": 3, "persistent_size": 0}},
    "fold2 ZeRO 0": {"ranks": 2, "parallel": {"folded": 2}, "zero": {"stage": 0}},
    "fold2 dp2 ZeRO 1": {"ranks": 4, "parallel": {"folded": 2}},
    "fold2 pp2": {"ranks": 4, "parallel": {"folded": 2, "pipeline": 2}},
    "fold4 ZeRO 2": {"ranks": 4, "parallel": {"folded": 4}, "zero": {"stage": 2}},
    "tp2 depth2 ZeRO 0": {"ranks": 4, "parallel": {"tensor": 2, "depth": 2}, "zero": {"stage": 0}},
    "depth2 pp2": {"ranks": 4, "parallel": {"depth": 2, "pipeline": 2}},
    "tp2 col2": {"ranks": 4, "parallel": {"tensor": 2, "columns": 2}},
    "col2 depth2 ZeRO 0": {"ranks": 4, "parallel": {"columns": 2, "depth": 2}, "zero": {"stage": 0}},
    "col2 dp2 ep2 ZeRO 1": {"ranks": 4, "parallel": {"columns": 2, "expert": 2}},
    "depth4 ep4": {"ranks": 4, "parallel": {"depth": 4, "expert": 4}},
    "fold2 ep2": {"ranks": 4, "parallel": {"folded": 2, "expert": 2}},
    "cp2 ep2 by ring": {"ranks": 2, "parallel": {"context": 2, "context_method": "ring", "expert": 2}},
}
ADAMW = {"optimizer": {"type": "adamw", "lr": 0.01, "epsilon": 1e-3}}
MUON = {"optimizer": {"type": "muon", "lr": 0.01, "muon_lr": 0.02, "epsilon": 1e-3}}
SOAP = {"optimizer": {"type": "soap", "lr": 0.01, "epsilon": 1e-3, "options": {"frequency": 2}}}
OUTSIDE = {"model": {"extensions": ["more_optimizers"]}}
JORGE = OUTSIDE | {"optimizer": {"type": "jorge", "lr": 0.01, "epsilon": 1e-3, "options": {"frequency": 2, "lr": 0.3}}}
BITS = {"optimizer": {"type": "adamw_8bit", "lr": 0.01, "epsilon": 1e-3, "options": {"smallest": 256}}}
NETWORK = {"weights": str(ROOT / "tests/stand_ins/small_fc_lopt.safetensors")}
LEARNED = OUTSIDE | {"optimizer": {"type": "small_fc_lopt", "lr": 1.0, "options": NETWORK}}
MINI = {"optimizer": {"type": "adam_mini", "lr": 0.01, "epsilon": 1e-3}}
FREE = {"schedule": {"type": "constant"}, "optimizer": {"type": "schedule_free_adamw", "lr": 0.01, "epsilon": 1e-3}}
BF16 = {"precision": "bf16"}
MAMBA = {"model": {"layers": "mamba2 mamba attention/mlp mamba2/mlp mamba"}}
ZAMBA = {"model": {"layers": "mamba2 mamba2+shared_attention x3 mamba2+shared_attention/mlp"}}
RWKV7 = {"model": {"layers": "(rwkv7/rwkv7_ffn) x3 (rwkv7/mlp) x2"}}
MOE = {"model": {"layers": "attention/mlp (attention/moe) x4"}}
# A tie of two experts may fall either way, and small_fc_lopt begins at one. The case chooses all experts.
ALL_EXPERTS = {"model": {"moe": {"top_k": 8, "router": {"top_groups": 4}}}}
MLA = {"model": {"layers": "mla/mlp mla@plain/moe (mla/moe) x3"}}
CORE = {"model": {"layers": "(attention/mlp) x2 recurrent(attention/mlp x2) attention/mlp"}}

# (architecture, recipe, saved on, resumed on, largest relative error of losses)
PAIRS = [
    *[("qwen3", MUON, "dp2 ZeRO 1", to, 1e-5) for to in ("one", "pp2 of 1 and 4")],
    *[("qwen3", merged(MUON, BF16), "dp2 ZeRO 2", to, 1e-2) for to in ("dp2 ZeRO 1", "pp2 of 1 and 4")],
    *[("neox", merged(ADAMW, BF16), "tp2 pp2", to, 1e-2) for to in ("dp2 ZeRO 3", "tp2")],
    *[("state space", merged(ADAMW, MAMBA), "tp2 pp2", to, 1e-5) for to in ("one", "dp2 ZeRO 3")],
    *[("state space", merged(ADAMW, MAMBA, BF16), "dp2 ZeRO 3", to, 1e-2) for to in ("dp2 ZeRO 1", "pp2 of 1 and 4")],
    *[("zamba2", merged(ADAMW, ZAMBA), "pp4 of 1, 2, 1, 1", to, 1e-5) for to in ("dp2 ZeRO 3", "tp2 pp2")],
    ("zamba2", merged(ADAMW, ZAMBA, BF16), "dp2 ZeRO 3", "pp2 of 1 and 4", 1e-2),
    *[("rwkv7", merged(ADAMW, RWKV7), "tp2 pp2", to, 1e-5) for to in ("one", "dp2 ZeRO 3")],
    *[("moe", merged(ADAMW, MOE), "tp2 pp2", to, 1e-5) for to in ("one", "dp2 ZeRO 3")],
    ("moe", merged(ADAMW, MOE, BF16), "dp2 ZeRO 1", "pp2 of 1 and 4", 1e-2),
    ("moe", merged(MUON, MOE), "dp2 ZeRO 1", "one", 1e-5),
    *[("qwen3", ADAMW, "pp2 ZB-V", to, 1e-5) for to in ("pp2 dp2 zero bubble ZeRO 3", "pp2 of 1 and 4")],
    *[("qwen3", ADAMW, "pp2 dp2 zero bubble ZeRO 3", to, 1e-5) for to in ("pp2 ZB-V", "one")],
    ("llama", SOAP, "dp2 ZeRO 1", "tp2 pp2", 1e-5),
    ("recurrent depth", merged(ADAMW, CORE), "tp2 pp2", "dp2 ZeRO 3", 1e-5),
    ("further tokens", ADAMW, "tp2 pp2", "dp2 ZeRO 3", 1e-5),
    ("llama", FREE, "dp2 ZeRO 1", "tp2 dp2 ZeRO 3", 1e-5),
    ("llama", FREE, "tp2 pp2", "dp2 ZeRO 1", 1e-5),
    ("moe", merged(MINI, MOE), "dp4 ep2 ZeRO 1", "one", 1e-5),
    ("llama", MINI, "tp2 dp2 ZeRO 3", "dp2 ZeRO 0", 1e-5),
    ("moe", merged(BITS, MOE), "dp4 ep2 ZeRO 1", "one", 1e-4),
    ("llama", BITS, "tp2 dp2 ZeRO 3", "dp2 ZeRO 0", 1e-4),
    ("moe", merged(LEARNED, MOE, ALL_EXPERTS), "dp4 ep2 ZeRO 1", "one", 1e-5),
    ("llama", LEARNED, "tp2 dp2 ZeRO 3", "dp2 ZeRO 0", 1e-5),
    ("gpt2", LEARNED, "tp2 pp2", "dp2 ZeRO 1", 1e-5),
    ("moe", merged(SOAP, MOE), "dp4 ep2 ZeRO 1", "one", 1e-5),
    ("qwen3", JORGE, "tp2 dp2 ZeRO 3", "dp2 ZeRO 1", 1e-5),
    *[("moe", merged(ADAMW, MOE), "dp2 ep2 ZeRO 1", to, 1e-5) for to in ("one", "dp4 ep4 ZeRO 2", "tp2 ep2")],
    *[("moe", merged(ADAMW, MOE), "dp4 ep4 ZeRO 2", to, 1e-5) for to in ("dp2 ep2 ZeRO 0", "dp2 ZeRO 3")],
    *[("moe", merged(MUON, MOE), "dp4 ep2 ZeRO 1", to, 1e-5) for to in ("dp2 ep2 ZeRO 0", "tp2 ep2")],
    *[("moe", merged(ADAMW, MOE, BF16), "tp2 ep2", to, 1e-2) for to in ("dp2 ep2 ZeRO 1", "dp2 ZeRO 3")],
    *[
        ("moe, even vocabulary", merged(ADAMW, MOE), "tp2 ep4 folded", to, 1e-5)
        for to in ("tp2 ep2 folded ZeRO 2", "dp4 ep2 ZeRO 1", "dp2 ZeRO 3")
    ],
    ("moe, even vocabulary", merged(ADAMW, MOE), "tp2 ep2 folded ZeRO 2", "tp2 ep1 folded ZeRO 0", 1e-5),
    ("moe, even vocabulary", merged(ADAMW, MOE), "dp2 ep2 ZeRO 1", "tp2 ep4 folded", 1e-5),
    ("moe, even vocabulary", merged(ADAMW, MOE, BF16), "dp2 ep2 ZeRO 1", "tp2 ep4 folded", 1e-2),
    *[("state space", merged(ADAMW, MAMBA), "cp2 ZeRO 1", to, 1e-5) for to in ("cp4 ZeRO 3", "one", "tp2 pp2")],
    ("rwkv7", merged(ADAMW, RWKV7), "one", "cp2 ZeRO 1", 1e-5),
    ("rwkv7", merged(ADAMW, RWKV7), "cp4 ZeRO 3", "dp2 ZeRO 1", 1e-5),
    *[("even vocabulary", ADAMW, "fold2 dp2 ZeRO 1", to, 1e-5) for to in ("one", "tp2 pp2", "fold4 ZeRO 2")],
    ("even vocabulary", merged(ADAMW, BF16), "fold2 dp2 ZeRO 1", "dp2 ZeRO 3", 1e-2),
    ("even vocabulary", MUON, "fold2 pp2", "fold2 ZeRO 0", 1e-5),
    ("even vocabulary, tied", ADAMW, "tp2 dp2 ZeRO 3", "fold2 pp2", 1e-5),
    ("rwkv7", merged(ADAMW, RWKV7), "fold4 ZeRO 2", "cp2 ZeRO 1", 1e-5),
    ("moe, even vocabulary", merged(ADAMW, MOE), "fold2 ep2", "tp2 ep4 folded", 1e-5),
    *[("mqa", MUON, "tp2 depth2 ZeRO 0", to, 1e-5) for to in ("one", "depth2 pp2")],
    ("mqa", MUON, "depth2 pp2", "tp2 depth2 ZeRO 0", 1e-5),
    ("mqa", MUON, "tp2 col2", "depth2 pp2", 1e-5),
    ("mqa", MUON, "col2 depth2 ZeRO 0", "tp2 col2", 1e-5),
    ("neox", ADAMW, "tp2 pp2", "tp2 col2", 1e-5),
    ("state space", merged(ADAMW, MAMBA), "tp2 col2", "col2 depth2 ZeRO 0", 1e-5),
    ("rwkv7", merged(ADAMW, RWKV7), "col2 depth2 ZeRO 0", "tp2 col2", 1e-5),
    ("rwkv7", merged(ADAMW, RWKV7), "tp2 col2", "tp2 pp2", 1e-5),
    ("moe", merged(MUON, MOE), "tp2 col2", "col2 dp2 ep2 ZeRO 1", 1e-5),
    ("moe", merged(ADAMW, MOE), "col2 dp2 ep2 ZeRO 1", "tp2 pp2", 1e-5),
    ("deepseek", merged(ADAMW, MLA), "dp4 ep2 ZeRO 1", "tp2 col2", 1e-5),
    ("moe", merged(SOAP, MOE), "tp2 col2", "dp4 ep2 ZeRO 1", 1e-5),
    ("moe", merged(MINI, MOE), "dp4 ep2 ZeRO 1", "col2 dp2 ep2 ZeRO 1", 1e-5),
    ("moe", merged(ADAMW, MOE), "depth4 ep4", "tp2 pp2", 1e-5),
    ("moe", merged(MUON, MOE), "tp2 depth2 ZeRO 0", "dp4 ep2 ZeRO 1", 1e-5),
    *[("moe", merged(ADAMW, MOE), "cp2 ep2 by ring", to, 1e-5) for to in ("dp4 ep4 ZeRO 2", "cp2 ZeRO 1")],
]
# From each of these to each of these.
MATRIX = ["one", "dp2 ZeRO 1", "dp2 ZeRO 2", "dp2 ZeRO 3", "tp2", "pp3 of 1, 3 and 1", "tp2 dp2 ZeRO 3", "tp2 pp2"]
MUON_MATRIX = ["one", "dp2 ZeRO 0", "dp2 ZeRO 2", "pp3 of 1, 3 and 1", "tp2 dp2 ZeRO 3"]
# (name, architecture, recipe, layouts, relative difference of losses allowed)
MATRICES = [
    ("tied", "gpt2", ADAMW, MATRIX, 1e-5),
    ("untied", "llama", ADAMW, MATRIX, 1e-5),
    ("muon", "qwen3", MUON, MUON_MATRIX, 1e-5),
]
# Whatever is loaded into, from every layout: what is loaded by other code. The others wait for `-m slow`.
TARGETS = {"tied": ["pp3 of 1, 3 and 1", "tp2 dp2 ZeRO 3"], "untied": [], "muon": ["dp2 ZeRO 2"]}
SAME = [
    ("gpt2", ADAMW, "dp2 ZeRO 1"),
    ("gpt2", merged(ADAMW, BF16), "dp2 ZeRO 3"),
    ("llama", ADAMW, "dp2 ZeRO 3"),
    ("llama", ADAMW, "dp2 ZeRO 0"),
    ("qwen3", ADAMW, "pp4 of 1, 2, 1, 1"),
    ("mqa", ADAMW, "tp2 dp2 ZeRO 3"),
    ("qwen3", MUON, "dp2 ZeRO 1"),
    ("llama", merged(FREE, BF16), "dp2 ZeRO 1"),
    ("qwen3", merged(MUON, BF16), "pp2 of 1 and 4"),
    ("neox", merged(ADAMW, BF16), "tp2 pp2"),
    ("qwen3", merged(ADAMW, BF16), "dp2 ZeRO 2"),
    ("state space", merged(ADAMW, MAMBA, BF16), "dp2 ZeRO 3"),
    ("moe", merged(ADAMW, MOE, BF16), "dp2 ZeRO 3"),
    ("moe", merged(ADAMW, MOE, BF16), "tp2 ep2"),
    ("moe, even vocabulary", merged(ADAMW, MOE, BF16), "tp2 ep4 folded"),
]


def one_after_the_other(values: dict[str, Any], ranks: int, sources: list[str]) -> list[tuple]:
    """On every rank, with one engine: resume from each checkpoint and train a step. Losses, norms, state before it."""
    import torch.distributed as dist

    from megatron.checkpoint import SOLO, GroupCommunicator, open_checkpoint
    from megatron.training.start.resume import resume
    from megatron.training.world import World

    config, engine = runs.start(values, ranks)
    communicator = GroupCommunicator() if dist.get_world_size() > 1 else SOLO
    world = World(torch.device("cpu"), engine.mesh, communicator, communicator)
    found = []
    for source in sources:
        resume(open_checkpoint(source, communicator=communicator), world, engine)
        begin = runs.portable(engine.state.fragments())
        found.append((*runs.steps(config, engine, BEFORE, 1), begin))
    return found


def either(chosen: bool) -> list:
    return [] if chosen else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("matrix", "target"),
    [
        pytest.param(each, to, id=f"{each[0]}-{to}", marks=either(to in TARGETS[each[0]]))
        for each in MATRICES
        for to in each[3]
    ],
)
def test_from_any_layout(matrix, target, saved):
    _, architecture, recipe, layouts, bound = matrix
    legs = {source: saved(architecture, recipe, source, BEFORE) for source in layouts}
    values, ranks = values_of(architecture, recipe, target)
    results = run(ranks, one_after_the_other, values, ranks, [str(checkpoint) for _, checkpoint, _ in legs.values()])
    expected = next(iter(results[0]))  # all sources agree, and with a run that was not broken
    unbroken = saved(architecture, recipe, "one")[2]
    np.testing.assert_allclose(expected[0], unbroken.losses[BEFORE : BEFORE + 1], rtol=bound)
    for place, (source, (first, *_)) in enumerate(legs.items()):
        identical(runs.assemble([rank[place][2] for rank in results]), first.end)
        for losses, norms, _ in (rank[place] for rank in results):
            np.testing.assert_allclose(losses, expected[0], rtol=bound, err_msg=source)
            np.testing.assert_allclose(norms, expected[1], rtol=5 * bound, err_msg=source)


@dataclass
class Leg:
    """Part of a run: losses and norms of its steps, and all logical tensors before and after it."""

    losses: list[float]
    norms: list[float]
    begin: dict[tuple[str, str], np.ndarray]
    end: dict[tuple[str, str], np.ndarray]


def leg(values: dict[str, Any], ranks: int, count: int, source: str | None, target: str | None):
    """On every rank: resume from the checkpoint `source` or start again, train `count` steps, save into `target`."""
    import torch.distributed as dist

    from megatron.checkpoint import SOLO, GroupCommunicator, Meta, open_checkpoint, save
    from megatron.training.start.resume import resume
    from megatron.training.world import World

    config, engine = runs.start(values, ranks)
    communicator = GroupCommunicator() if dist.get_world_size() > 1 else SOLO
    world = World(torch.device("cpu"), engine.mesh, communicator, communicator)
    first = 0
    if source is not None:
        checkpoint = open_checkpoint(source, communicator=communicator)
        resume(checkpoint, world, engine)
        first = checkpoint.step
    begin = runs.portable(engine.state.fragments())
    losses, norms = runs.steps(config, engine, first, count)
    if target is not None:
        meta = Meta(step=first + count, optimizer=engine.state.counters())
        save(target, first + count, engine.state.fragments(), meta, communicator)
    return losses, norms, begin, runs.portable(engine.state.fragments())


def together(values: dict[str, Any], ranks: int, count: int, source: Path | None, target: Path | None) -> Leg:
    results = run(ranks, leg, values, ranks, count, source and str(source), target and str(target))
    for losses, norms, *_ in results:
        assert losses == results[0][0] and norms == pytest.approx(results[0][1], rel=1e-6)
    begin, end = (runs.assemble([result[place] for result in results]) for place in (2, 3))
    return Leg(results[0][0], results[0][1], begin, end)


def values_of(architecture: str, recipe: dict[str, Any], layout: str) -> tuple[dict[str, Any], int]:
    matrix = read()
    own = {
        name: value for name, value in matrix["architectures"][architecture].items() if name not in ("about", "apart")
    }
    cut = {name: value for name, value in LAYOUTS[layout].items() if name != "ranks"}
    small = {"model": {"layers": "(attention/mlp) x5"}, "training": {"micro_batch_size": 2}}
    return merged(matrix["common"], own, small, recipe, cut), LAYOUTS[layout]["ranks"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(architecture, recipe, layout) -> the leg that ends with a save, its checkpoint, and the leg of a number of
    steps."""
    begun: dict[str, tuple] = {}
    whole: dict[str, Leg] = {}

    def make(architecture: str, recipe: dict[str, Any], layout: str, steps: int = BEFORE + AFTER):
        key = f"{architecture} {recipe} {layout}"
        values, ranks = values_of(architecture, recipe, layout)
        if key not in begun:
            folder = tmp_path_factory.mktemp("saved")
            first = together(values, ranks, BEFORE, None, folder)
            begun[key] = (first, next(folder.glob("step_*")))
        if steps > BEFORE and key not in whole:
            whole[key] = together(values, ranks, steps, None, None)
        return (*begun[key], whole.get(key, begun[key][0]))

    return make


def identical(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for label, values in ours.items():
        assert np.array_equal(values.view(np.uint8), theirs[label].view(np.uint8)), f"{label} differs"


def name_of(case) -> str:
    kind, precision = case[1]["optimizer"]["type"], case[1].get("precision", "fp32")
    return f"{case[0]} {kind} {precision}, {' to '.join(case[2:4])}"


# Each kind of optimizer, architecture, precision and expert layout once, on one side.
OFTEN = {
    "qwen3 muon bf16, dp2 ZeRO 2 to pp2 of 1 and 4",
    "neox adamw bf16, tp2 pp2 to tp2",
    "state space adamw fp32, tp2 pp2 to dp2 ZeRO 3",
    "zamba2 adamw bf16, dp2 ZeRO 3 to pp2 of 1 and 4",
    "rwkv7 adamw fp32, tp2 pp2 to dp2 ZeRO 3",
    "qwen3 adamw fp32, pp2 dp2 zero bubble ZeRO 3 to pp2 ZB-V",
    "moe muon fp32, dp4 ep2 ZeRO 1 to dp2 ep2 ZeRO 0",
    "state space adamw fp32, cp2 ZeRO 1 to cp4 ZeRO 3",
    "moe adamw fp32, cp2 ep2 by ring to cp2 ZeRO 1",
    "even vocabulary adamw fp32, fold2 dp2 ZeRO 1 to fold4 ZeRO 2",
    "even vocabulary, tied adamw fp32, tp2 dp2 ZeRO 3 to fold2 pp2",
    "mqa muon fp32, tp2 depth2 ZeRO 0 to depth2 pp2",
    "mqa muon fp32, col2 depth2 ZeRO 0 to tp2 col2",
    "state space adamw fp32, tp2 col2 to col2 depth2 ZeRO 0",
    "rwkv7 adamw fp32, col2 depth2 ZeRO 0 to tp2 col2",
    "moe adamw fp32, dp4 ep4 ZeRO 2 to dp2 ZeRO 3",
    "moe, even vocabulary adamw fp32, tp2 ep4 folded to tp2 ep2 folded ZeRO 2",
    "moe, even vocabulary adamw bf16, dp2 ep2 ZeRO 1 to tp2 ep4 folded",
    "llama adamw fp32, dp2 ZeRO 0 to dp2 ZeRO 0",
    "qwen3 adamw fp32, pp4 of 1, 2, 1, 1 to pp4 of 1, 2, 1, 1",
    "qwen3 adamw bf16, dp2 ZeRO 2 to dp2 ZeRO 2",
    "state space adamw bf16, dp2 ZeRO 3 to dp2 ZeRO 3",
    "moe, even vocabulary adamw bf16, tp2 ep4 folded to tp2 ep4 folded",
}


def named(cases: list) -> list:
    """The cases with their names, the ones that wait for `-m slow` marked."""
    return [pytest.param(case, id=name_of(case), marks=either(name_of(case) in OFTEN)) for case in cases]


def test_what_runs_often_is_there():
    assert {name_of(case) for case in [*PAIRS, *((*case, case[2]) for case in SAME)]} >= OFTEN


@pytest.mark.parametrize("case", named(PAIRS))
def test_resumed_on_another_layout(case, saved):
    architecture, recipe, source, target, error = case
    first, checkpoint, unbroken = saved(architecture, recipe, source)
    values, ranks = values_of(architecture, recipe, target)
    resumed = together(values, ranks, AFTER, checkpoint, None)
    identical(resumed.begin, first.end)
    np.testing.assert_allclose(resumed.losses, unbroken.losses[BEFORE:], rtol=error)
    np.testing.assert_allclose(resumed.norms, unbroken.norms[BEFORE:], rtol=5 * error)


@pytest.mark.parametrize("case", named([(*case, case[2]) for case in SAME]))
def test_resumed_on_the_same_layout(case, saved):
    architecture, recipe, layout, _ = case
    first, checkpoint, unbroken = saved(architecture, recipe, layout)
    values, ranks = values_of(architecture, recipe, layout)
    resumed = together(values, ranks, AFTER, checkpoint, None)
    identical(resumed.begin, first.end)
    assert first.losses + resumed.losses == unbroken.losses
    assert first.norms + resumed.norms == unbroken.norms
    identical(resumed.end, unbroken.end)
