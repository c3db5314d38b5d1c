"""The command-line tools, on checkpoints of several layouts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron.checkpoint import CheckpointError, open_checkpoint, save
from megatron.checkpoint.reshape import owned, parse_layout
from megatron.checkpoint.save.progress import now_and_then
from megatron.config import resolve
from megatron.model.stack import ModelPlan
from megatron.parallel.layers.parameters import is_spread, logical_of, shard_start
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.brute import local_shard
from tests.checkpoint.model import Model, Together, fragments, meta

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = spec_from_file_location(f"checkpoint_tool_{name}", ROOT / "tools" / "checkpoint" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(directory: Path, model: Model, layout: Layout, step: int = 10) -> Path:
    return Together(layout.world_size).run(
        lambda member: save(directory, step, fragments(model, layout, member.rank), meta(step), member)
    )[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("source"), Model(seed=1), Layout(tensor=2, pipeline=3, data=2, zero_stage=1))


def test_script_starts_with_the_standard_library_intact(source):
    """Next to a file called inspect.py."""
    for name, arguments in (("inspect", [str(source), "--json"]), ("diff", [str(source), str(source)])):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/checkpoint" / f"{name}.py"), *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
    assert "tensors are equal" in done.stdout


@pytest.mark.parametrize(
    "to",
    [
        "tensor=4,pipeline=2,zero=1",
        "tensor=3,data=3,zero=3",
        "pipeline=3",
        "data=5,zero=2",
        "tensor=8,pipeline=2,data=2",
        "folded=2,pipeline=2,data=2,zero=1",
        "tensor=2,depth=2,data=2,zero=1",
    ],
)
def test_reshape(source, tmp_path, capsys, to):
    out = tmp_path / "out"
    assert tool("reshape").main([str(source), str(out), "--to", to, "--verify", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model, layout = Model(seed=1), parse_layout(to)
    sums = json.loads((out / "sha256.json").read_text())
    assert sums == printed["sha256"]
    expected = {
        (name, state): hashlib.sha256(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for (name, state), values in model.values.items()
    }
    found = {(name, state): both["after"] for name, states in sums.items() for state, both in states.items()}
    assert found == expected
    checkpoint = open_checkpoint(out, verify="checksums")
    assert len(checkpoint.records) <= layout.world_size
    assert checkpoint.meta.data == {"samples": 80} and checkpoint.meta.layout["tensor"] == layout.tensor
    assert set(checkpoint.index.rows["tensor_ranks"]) <= {1, layout.tensor}
    for fragment in fragments(model, Layout(), 0):
        assert torch.equal(checkpoint.read(fragment.spec).data, fragment.data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_reshape_refuses(source, tmp_path, capsys):
    reshape = tool("reshape")
    (tmp_path / "there").mkdir()
    for arguments, message in (
        ([source, tmp_path / "there", "--to", "tensor=2"], "exists already"),
        (
            [source, tmp_path / "new", "--to", "tensors=2"],
            "is not one of tensor=N, context=N, data=N, pipeline=N, zero=N, expert=N, ",
        ),
        ([source, tmp_path / "new", "--to", "zero=4"], "the ZeRO stage must be 0 to 3"),
        ([tmp_path / "nothing", tmp_path / "new", "--to", "tensor=2"], "there is no such checkpoint"),
    ):
        assert reshape.main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("layout", "biggest"),
    [
        (Layout(data=4, zero_stage=1), {"master": 0.25, "weight": 1.0}),
        (Layout(data=4, zero_stage=3), {"master": 0.25, "weight": 0.25}),
        (Layout(tensor=2, data=2), {"master": 0.6, "weight": 0.6}),
    ],
)
def test_zero_shares_evenly(layout, biggest):
    """No rank has more than its share of a state, and together the ranks have each element once."""
    model = Model()
    stored = {key: values.dtype for key, values in model.values.items()}
    tensors = {tensor.name: tensor for tensor in model.tensors}
    items = owned(layout, stored, tensors)
    for state, share in biggest.items():
        total = sum(values.numel() for (_, other), values in model.values.items() if other == state)
        sizes = [sum(spec.length for spec, _ in mine if spec.state == state) for mine in items]
        assert sum(sizes) == total and max(sizes) <= share * total + 2


@pytest.mark.parametrize(
    ("to", "experts"),
    [
        ("data=4,expert=2,zero=1", [(0, 4), (4, 8), (0, 4), (4, 8)]),
        ("data=4,expert=4", [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("tensor=2,data=2,expert=2,zero=2", [(0, 4), (0, 4), (4, 8), (4, 8)]),
        ("tensor=2,data=2,expert=4,expert_tensor=1,zero=1", [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("tensor=2,data=2,expert=2,expert_tensor=1,zero=1", [(0, 4), (4, 8), (0, 4), (4, 8)]),
    ],
)
def test_experts_fall_to_their_ranks(to, experts):
    """Each rank has only elements of its experts, all ranks together each element of each tensor once."""
    tensors = {
        tensor.name: tensor
        for tensor in (
            LogicalTensor("moe.experts.down.weight", (8, 6, 4), Role.OUTPUT, Shard(2), matrices=(6,)),
            LogicalTensor("moe.experts.gate_up.weight", (8, 8, 6), Role.HIDDEN, Shard(1, (4, 4)), matrices=(4, 4)),
            LogicalTensor("mlp.up.weight", (10, 3), Role.HIDDEN, Shard(0)),
            LogicalTensor("norm.weight", (7,), Role.NORM),
        )
    }
    stored = {(name, state): torch.float32 for name in tensors for state in ("master", "exp_avg")}
    counts = {key: np.zeros(tensors[key[0]].shape, int).reshape(-1) for key in stored}
    for rank, items in enumerate(owned(parse_layout(to), stored, tensors)):
        first, last = experts[rank]
        for spec, _ in items:
            index = np.arange(len(counts[spec.tensor.name, spec.state])).reshape(spec.tensor.shape)
            found = local_shard(index, spec.tensor, spec.tensor_rank, spec.tensor_ranks)[spec.start : spec.stop]
            counts[spec.tensor.name, spec.state][found] += 1
            if "experts" in spec.tensor.name:
                of = found // (index.size // 8)
                assert first <= of.min() and of.max() < last
        assert any("experts" in spec.tensor.name for spec, _ in items) or "zero" not in to
    assert all((each == 1).all() for each in counts.values())


@pytest.mark.parametrize(
    ("to", "ranks"),
    [("folded=4", 4), ("folded=2,data=2,zero=1", 4), ("depth=2,data=4,zero=1", 4), ("tensor=2,depth=2,data=2", 4)],
)
def test_rows_fall_to_the_ranks_of_a_run(to, ranks):
    """Each rank writes the rows that the same rank of a run on that layout has in its modules."""
    layout, tensors, held = parse_layout(to), dict[str, LogicalTensor](), []
    values = {
        "model": {"layers": "attention/mlp mamba2", "hidden_size": 32, "vocab_size": 96, "attention": {"heads": 4},
                  "mamba2": {"head_dim": 8}},
        "training": {"steps": 1, "sequence_length": 32, "micro_batch_size": 1, "global_batch_size": layout.data},
        "parallel": {"folded": layout.context, "tensor": layout.tensor, "depth": layout.depth},
    }  # fmt: skip
    config = resolve(values, ranks=ranks)
    for rank in range(ranks):
        plan = ModelPlan(config, Mesh.describe(Layout.of(config, ranks), rank), "meta", values=False)
        modules = [plan.embedding(), plan.block(0), plan.block(1), plan.head()]
        parameters = [each for module in modules for each in module.parameters()]
        tensors |= {logical_of(each).name: logical_of(each) for each in parameters}
        shared = filter(is_spread, parameters)
        held.append({logical_of(each).name: (shard_start(each), each.numel()) for each in shared})
    stored = {(name, "master"): torch.float32 for name in tensors}
    written = owned(layout, stored, tensors)
    for name, tensor in tensors.items():
        found = [[(spec.start, spec.length) for spec, _ in items if spec.tensor.name == name] for items in written]
        assert sum(length for spans in found for _, length in spans) == math.prod(tensor.shape)
        if name in held[0]:
            for rank, spans in enumerate(found):
                first, length = held[rank][name]
                assert all(first <= start and start + size <= first + length for start, size in spans)
    assert len(held[0]) > 6


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("folded=2,context=4", "context and expert must be omitted or equal folded=2"),
        ("folded=2,expert=4", "context and expert must be omitted or equal folded=2"),
        ("folded=0", "sizes must be at least 1"),
        ("folded=2,tensor=2", "tensor must be 1 where ranks share rows"),
        ("depth=2,data=2,expert=4", "expert must be omitted or equal depth=2"),
        ("depth=2,data=3", "3 ranks cannot form groups of 2"),
        ("folded=2,zero=3", "with ZeRO 3 expert, folded and depth must be 1"),
    ],
)
def test_rows_on_layouts_that_no_run_has(to, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(to)


def test_experts_that_do_not_divide():
    tensor = LogicalTensor("moe.experts.down.weight", (6, 4, 4), Role.OUTPUT, Shard(2), matrices=(4,))
    with pytest.raises(CheckpointError, match="6 experts must be divisible by 4 ranks"):
        owned(parse_layout("data=4,expert=4"), {(tensor.name, "master"): torch.float32}, {tensor.name: tensor})
    for to, message in (
        ("data=4,expert=3", "4 ranks cannot form groups of 3"),
        ("expert=0", "at least 1"),
        ("tensor=4,expert_tensor=2", "1 \\(folded\\) or equal tensor=4"),
        ("data=2,expert=2,zero=3", "with ZeRO 3 expert, folded and depth must be 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_layout(to)


def test_diff_equal_and_different(source, tmp_path, capsys):
    diff = tool("diff")
    model = Model(seed=1)
    same = write(tmp_path / "same", model, Layout(tensor=3), step=10)
    assert diff.main([str(source), str(same)]) == 0
    assert f"{len(model.values)} of {len(model.values)} tensors are equal" in capsys.readouterr().out

    changed = Model(seed=1)
    master = changed.values["layers.1.mlp.down.weight", "master"]
    before = master.clone()
    master[3, 4] += 0.5
    master[0, 0] -= 0.25
    del changed.values["norm.weight", "exp_avg"]
    changed.values["norm.weight", "weight"] = changed.values["norm.weight", "weight"].float()
    other = write(tmp_path / "other", changed, Layout(pipeline=2), step=10)
    assert diff.main([str(source), str(other), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    unequal = {(item["tensor"], item["state"]): item for item in printed["tensors"] if not item["equal"]}
    assert set(unequal) == {
        ("layers.1.mlp.down.weight", "master"),
        ("norm.weight", "exp_avg"),
        ("norm.weight", "weight"),
    }
    found = unequal["layers.1.mlp.down.weight", "master"]
    assert found["differing"] == 2 and found["largest"] == pytest.approx(0.5, rel=1e-6)
    assert found["relative"] == pytest.approx(float((master - before).norm() / before.norm()), rel=1e-5)
    assert unequal["norm.weight", "exp_avg"]["problem"] == "only in A"
    assert unequal["norm.weight", "weight"]["dtypes"] == ["bfloat16", "float32"]
    assert diff.main([str(source), str(other), "--state", "master", "--tolerance", "0.9"]) == 0
    assert diff.main([str(source), str(other), "--only", "layers.2.*"]) == 0
    assert diff.main([str(source), str(other), "--only", "nothing"]) == 2


def test_diff_shows_configuration_and_step(source, tmp_path, capsys):
    changed = replace(meta(11), config="model: {hidden_size: 13}\n")
    other = save(tmp_path, 11, fragments(Model(seed=1), Layout(), 0), changed)
    assert tool("diff").main([str(source), str(other)]) == 0
    printed = capsys.readouterr().out
    assert "step: 10 in A, 11 in B" in printed and "hidden_size: 13" in printed


def test_inspect(source, capsys):
    inspect, model = tool("inspect"), Model(seed=1)
    assert inspect.main([str(source), "--norms", "--json", "--config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 10 and printed["damage"] == [] and printed["config"] == meta(10).config
    masters = [values for (_, state), values in model.values.items() if state == "master"]
    assert printed["parameters"] == sum(values.numel() for values in masters)
    assert len(printed["tensors"]) == len(model.tensors)
    for tensor in printed["tensors"]:
        for state, facts in tensor["states"].items():
            values = model.values[tensor["name"], state].double()
            assert facts["norm"] == pytest.approx(float(values.norm()))
            assert facts["largest"] == float(values.abs().max())
    assert inspect.main([str(source), "--only", "*qkv*"]) == 0
    text = capsys.readouterr().out
    assert "layers.0.attention.qkv.weight [20, 12]: exp_avg float32" in text and "intact" in text
    assert "embedding" not in text


def test_inspect_shows_values_that_are_not_finite(tmp_path, capsys):
    model = Model()
    model.values["norm.weight", "master"][3] = float("nan")
    path = save(tmp_path, 1, fragments(model, Layout(), 0), meta(1))
    assert tool("inspect").main([str(path), "--norms"]) == 0
    assert "1 NOT FINITE" in capsys.readouterr().out


def test_inspect_damage_and_folders(tmp_path, capsys):
    inspect = tool("inspect")
    good, bad = (write(tmp_path, Model(seed=1), Layout(tensor=2), step) for step in (1, 2))
    os.truncate(bad / "data/0000/rank_00001.safetensors", 100)
    assert inspect.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step_00000001: intact") and "rank_00001.safetensors has 100 bytes" in lines[1]
    assert inspect.main([str(bad), "--json"]) == 1
    assert "rank_00001" in json.loads(capsys.readouterr().out)["damage"][0]
    (good / "manifest.json").unlink()
    assert inspect.main([str(good)]) == 1
    assert "not a complete checkpoint" in capsys.readouterr().err
    assert inspect.main([str(tmp_path / "nothing")]) == 1


def test_inspect_of_a_run_and_of_what_is_none(tmp_path, capsys):
    inspect = tool("inspect")
    write(tmp_path / "run" / "checkpoints", Model(seed=1), Layout())
    assert inspect.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("step_00000010: intact")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("empty", "neither a checkpoint nor a folder with one"),
        ("nowhere", "there is no such checkpoint"),
    ):
        assert inspect.main([str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert words in error and error.count(str(tmp_path)) == 1


def test_a_difference_that_is_damage_is_called_so(tmp_path, capsys):
    one, other = (write(tmp_path / name, Model(seed=1), Layout()) for name in ("one", "other"))
    file = other / "data/0000/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert tool("diff").main([str(one), str(other)]) == 2
    told = capsys.readouterr()
    assert "do not have their checksum" in told.err and str(other) in told.err and not told.out


def test_progress_is_a_line_now_and_then(capsys):
    seconds = iter(range(0, 10_000, 1))
    tell = now_and_then(clock=lambda: next(seconds))
    for rank in range(100):
        tell(f"rank {rank} of 100")
    lines = capsys.readouterr().err.splitlines()
    assert 10 < len(lines) < 25 and lines[0].endswith("of 100")
    now_and_then(quiet=True, clock=lambda: next(seconds) * 100)("something")
    assert not capsys.readouterr().err


def test_a_fragment_larger_than_a_chunk_is_streamed(tmp_path, monkeypatch):
    from megatron.checkpoint.read import logical
    from megatron.checkpoint.reshape import reshape

    model = Model(seed=1)
    path = write(tmp_path, model, Layout(tensor=2))
    monkeypatch.setattr(logical, "CHUNK", 100)
    reshape(open_checkpoint(path), tmp_path / "out", Layout(tensor=3), verify=True)
    checkpoint = open_checkpoint(tmp_path / "out", verify="checksums")
    for fragment in fragments(model, Layout(), 0):
        assert torch.equal(checkpoint.read(fragment.spec).data, fragment.data)


def test_reshape_takes_nothing_from_a_damaged_checkpoint(tmp_path, capsys):
    path = save(tmp_path, 1, fragments(Model(), Layout(), 0), meta(1))
    file = path / "data/0000/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert tool("reshape").main([str(path), str(tmp_path / "out"), "--to", "tensor=2"]) == 2
    assert "do not have their checksum" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_reshape_refuses_a_layout_that_no_run_can_have():
    """Two layers, four heads: the rules of a run's configuration, whatever layout and batch wrote the checkpoint."""
    from megatron.config import load, to_yaml
    from megatron.config.problems import ConfigError

    overrides = ["parallel.pipeline=2", "parallel.pipeline_split=[1, 1]", "training.global_batch_size=8"]
    text = to_yaml(load([ROOT / "configs" / "test" / "tiny_neox.yml"], overrides, ranks=2, check_inputs=False))
    refuse = tool("reshape").refuse_illegal
    for fine in ("tensor=2,data=3", "pipeline=2,zero=2", "data=7,zero=3", "folded=2,data=3", "depth=2,data=4"):
        refuse(text, parse_layout(fine), "x")
    for to, key in (("tensor=3", "parallel.tensor"), ("pipeline=99", "parallel.pipeline")):
        with pytest.raises(ConfigError, match=key) as error:
            refuse(text, parse_layout(to), "x")
        assert all(each.fatal for each in error.value.problems)
    text = to_yaml(load([ROOT / "configs" / "test" / "tiny_moe.yml"], [], ranks=1, check_inputs=False))
    refuse(text, parse_layout("tensor=2,data=2,expert=4,expert_tensor=1,zero=1"), "x")
    refuse(text, parse_layout("folded=2,zero=1"), "x")
    refuse(text, parse_layout("depth=2,data=2,zero=1"), "x")
    with pytest.raises(ConfigError, match="use 6 or 9 experts"):
        refuse(text, parse_layout("data=3,expert=3"), "x")
