"""Exchange with DeepSpeed: its own loader reads what we write, and we read what its own converter writes."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch

from megatron.checkpoint import CheckpointError, Meta, open_checkpoint, save
from megatron.config import load, read_resolved, to_yaml
from megatron.testing.ranks import PATIENCE
from tests.checkpoint.brute import local_shard
from tests.checkpoint.exchange_with_deepspeed import TINY, tool, values_of
from tests.checkpoint.model import Model, fragments
from tests.paths import ROOT
from tests.workers import run as on_ranks


def native(folder: str, config_file: str, ranks: int) -> tuple[dict[str, str], list[tuple]]:
    """Train with ZeRO 1 on these workers, save with DeepSpeed, convert with DeepSpeed.

    Returns:
        Our names of the parameters and DeepSpeed's, and what this rank owns: name, shape, state, start, values.
    """
    from argparse import Namespace

    import torch.distributed as dist
    from deepspeed.checkpoint import ds_to_universal

    from megatron.config import load
    from megatron.data.loader import build_loader
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config = load([config_file], [], ranks=ranks).config
    device = torch.device("cpu")
    prepare_deepspeed(device)
    mesh = Mesh.build(Layout.of(config, ranks))
    engine = build_engine(config, mesh, device, values=True)
    loader = build_loader(config, data_rank=mesh.data.rank, data_ranks=ranks)
    for step in range(config.training.steps):
        engine.step(loader.step(step), 1e-2)
    loader.close()
    theirs = engine.state.engine
    theirs.save_checkpoint(folder, tag="native", client_state={"universal_checkpoint_info": {}})
    dist.barrier()
    if mesh.rank == 0:
        ds_to_universal.main(
            Namespace(
                input_folder=f"{folder}/native",
                output_folder=f"{folder}/universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
    dist.barrier()
    names = {parameter.logical.name: name for name, parameter in theirs.module.named_parameters()}
    return names, [
        (each.tensor.name, each.tensor.shape, each.state, each.start, each.data.numpy().copy())
        for each in engine.state.fragments()
    ]


def test_what_deepspeeds_converter_writes_becomes_a_checkpoint_that_resumes(tmp_path: Path, capsys) -> None:
    config, names = tmp_path / "tiny.yml", tmp_path / "names.yml"
    config.write_text(TINY)
    found = on_ranks(2, native, str(tmp_path), str(config), 2)
    names.write_text(json.dumps(found[0][0]))
    words = [str(tmp_path / "universal"), str(tmp_path / "ours"), "--config", str(config), "--names", str(names)]
    assert tool("from_deepspeed").main(words) == 0, capsys.readouterr().err
    ours, compared = values_of(tmp_path / "ours"), 0
    for name, shape, state, start, values in (each for _, own in found for each in own):
        assert ours[name, state].shape == shape
        assert ours[name, state].flatten()[start : start + len(values)].equal(torch.from_numpy(values))
        compared += len(values)
    assert compared == sum(value.numel() for value in ours.values())
    meta = open_checkpoint(tmp_path / "ours").meta
    assert (meta.step, meta.optimizer, meta.resumable) == (3, {"step": 3.0}, True)
    resolved = load([config], ranks=2)  # as a run's directory has it
    (tmp_path / "resolved.yml").write_text(to_yaml(resolved))
    words[1], words[3] = str(tmp_path / "again"), str(tmp_path / "resolved.yml")
    assert tool("from_deepspeed").main(words) == 0, capsys.readouterr().err
    (tmp_path / "taken.yml").write_text(open_checkpoint(tmp_path / "again").meta.config)
    assert (
        read_resolved(tmp_path / "taken.yml").training.global_batch_size == resolved.config.training.global_batch_size
    )


def parameter_names(config_file: str, ranks: int, *overrides: str) -> dict[str, str]:
    """Our names of the parameters, and the names in the module that DeepSpeed gets."""
    from megatron.model.stack import Model, ModelPlan
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config = load([config_file], overrides, ranks=ranks).config
    model = Model(ModelPlan(config, Mesh.build(Layout.of(config, ranks)), values=False))
    return {parameter.logical.name: name for name, parameter in model.named_parameters()}


def written(folder: str, config_file: str, ranks: int, *overrides: str) -> str:
    """Run to_native.py on these workers."""
    import torch.distributed as dist

    from megatron.checkpoint import GroupCommunicator
    from megatron.config import load
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.start.native import write_native
    from megatron.training.world import World

    config = load([config_file], [f"run.dir={folder}", *overrides], ranks=ranks).config
    prepare_deepspeed(torch.device("cpu"))
    world = World(
        torch.device("cpu"),
        Mesh.build(Layout.of(config, ranks)),
        GroupCommunicator(),
        GroupCommunicator(dist.new_group(backend="gloo", timeout=PATIENCE)),
    )
    return str(write_native(config, world, lambda _: None))


def refusal(*given) -> str:
    """Why to_native.py writes nothing on these workers, which stay alive: their imports take seconds."""
    try:
        written(*given)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 2])
def test_native_files_there_and_back_are_bitwise(tmp_path: Path, stage: int, capsys) -> None:
    from tests.training.test_run import job

    (tmp_path / "tiny.yml").write_text(
        TINY + f"run: {{dir: {tmp_path}/run}}\nlogging: {{console: quiet, curve: false}}\n"
    )
    on_ranks(2, job, str(tmp_path), 2, "parallel.tensor=2")
    config, before = str(tmp_path / "tiny.yml"), tmp_path / "run" / "checkpoints" / "step_00000003"
    folder = on_ranks(2, written, f"{tmp_path}/run", config, 2, f"zero.stage={stage}")[0]
    assert Path(folder).name == "global_step3" and any(Path(folder).glob("*zero_pp_rank_1*"))
    words = [folder, str(tmp_path / "back"), "--config", config, "--names", f"{tmp_path}/run/deepspeed/names.yml"]
    assert tool("from_deepspeed").main(words) == 2 and "--trust" in capsys.readouterr().err
    assert tool("from_deepspeed").main([*words, "--trust"]) == 0, capsys.readouterr().err
    back, there = values_of(tmp_path / "back"), values_of(before)
    assert back.keys() == {key for key in there if key[1] != "weight"}
    assert all(value.equal(there[key]) for key, value in back.items())
    assert open_checkpoint(tmp_path / "back").step == 3
    for said in on_ranks(2, refusal, f"{tmp_path}/run", config, 2, f"zero.stage={stage}"):
        assert "exists already" in said
    for said in on_ranks(2, refusal, f"{tmp_path}/run", config, 2, "parallel.tensor=2"):
        assert "do not say how tensors are cut" in said


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("mixtral", ["parallel.expert=2"], "experts that are spread"),
        ("moe", [], "corrections"),
        ("llama", ["model.residual.block_scale=true"], "the blocks' scales"),
    ],
)
def test_native_files_of_such_models_are_refused(tmp_path: Path, model, overrides, message) -> None:
    words = [str(ROOT / f"configs/test/tiny_{model}.yml"), 2, *overrides]
    assert all(message in said for said in on_ranks(2, refusal, f"{tmp_path}/{model}", *words))
    assert not (tmp_path / model).exists()


def test_corrections_go_there_and_back_for_a_run_with_spread_experts(tmp_path: Path, capsys) -> None:
    from tests.training.test_run import job

    text = (
        (ROOT / "configs/test/tiny_moe.yml")
        .read_text()
        .replace("extends: tiny.yml", f"extends: {ROOT}/configs/test/tiny.yml")
    )
    (tmp_path / "tiny.yml").write_text(
        text + f"run: {{dir: {tmp_path}/run}}\nlogging: {{console: quiet, curve: false}}\nparallel: {{expert: 2}}\n"
    )
    on_ranks(2, job, str(tmp_path), 2, "training.steps=2", "schedule.warmup_steps=1")
    before = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert tool("to_deepspeed").main([str(before), str(tmp_path / "theirs")]) == 0
    words = [str(tmp_path / "theirs"), str(tmp_path / "back"), "--config", str(tmp_path / "tiny.yml")]
    assert tool("from_deepspeed").main(words) == 0, capsys.readouterr().err
    back, there = values_of(tmp_path / "back"), values_of(before)
    assert there["layers.1.moe.router.correction", "master"].abs().max() > 0
    assert back.keys() == {key for key in there if key[1] != "weight"}
    assert all(value.equal(there[key]) for key, value in back.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_there_and_back_is_bitwise(tmp_path: Path, optimizer: str) -> None:
    from megatron.checkpoint.universal import Universal, restore
    from megatron.parallel.layout.layout import Layout

    model = Model(optimizer=optimizer)
    path = save(tmp_path, 7, fragments(model, Layout(), 0), Meta(step=7, optimizer={"step": 7.0}))
    assert tool("to_deepspeed").main([str(path), str(tmp_path / "theirs")]) == 0
    tensors = open_checkpoint(path).tensors
    restore(Universal(tmp_path / "theirs"), tmp_path / "back", tensors, "", names=None)
    back, before = values_of(tmp_path / "back"), values_of(path)
    assert back.keys() == {key for key in before if key[1] != "weight"}
    assert all(value.equal(before[key]) for key, value in back.items())
    for file in (tmp_path / "theirs").rglob("step.pt"):
        file.unlink()
    counted = restore(Universal(tmp_path / "theirs"), tmp_path / "counted", tensors, "", names=None, step=9)
    assert (counted.step, counted.optimizer) == (9, {"step": 9.0}), "moments of 9 updates are corrected for as many"


def without_room(limit: int, words: list[str]) -> tuple[int, str]:
    """Status and standard error of to_deepspeed.py where no file may be longer."""
    error, before = io.StringIO(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler, sys.dont_write_bytecode = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with redirect_stderr(error):
            return tool("to_deepspeed").main(words), error.getvalue()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        sys.dont_write_bytecode = False


@pytest.mark.parametrize("limit", [100, 1500])
def test_no_room_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """In another process: the limit stays with it."""
    from megatron.parallel.layout.layout import Layout

    path = save(tmp_path, 7, fragments(Model(), Layout(), 0), Meta(step=7, optimizer={"step": 7.0}))
    ((status, error),) = on_ranks(1, without_room, limit, [str(path), str(tmp_path / "theirs")])
    assert status == 2 and "Traceback" not in error and os.strerror(errno.EFBIG) in error, error
    assert [each.name for each in tmp_path.iterdir()] == ["step_00000007"]


def test_deepspeeds_own_loader_cuts_it_as_our_layouts_do(tmp_path: Path) -> None:
    from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state

    from megatron.parallel.layout.layout import Layout

    model = Model()
    path = save(tmp_path, 7, fragments(model, Layout(), 0), Meta(step=7, optimizer={"step": 7.0}))
    assert tool("to_deepspeed").main([str(path), str(tmp_path / "theirs")]) == 0
    compared = 0
    for tensor in (each for each in model.tensors if each.shape):  # its loader knows no scalars
        for ranks in (1, 2, 3):
            parts = (tensor.shard.parts or (tensor.shape[tensor.shard.dim],)) if tensor.shard else ()
            if len(set(parts)) > 1 or any(part % ranks for part in parts):
                continue  # DeepSpeed's loader only knows equal cuts of equal parts
            for rank in range(ranks):
                wanted = model.shard(tensor, "master", rank, ranks)
                state, step = loaded(load_hp_checkpoint_state, tmp_path / "theirs", model, tensor, rank, ranks)
                assert step == 7 and state["fp32"].equal(wanted[1:])
                assert state["exp_avg"].equal(model.shard(tensor, "exp_avg", rank, ranks)[1:])
                compared += 1
    assert compared > 60


def loaded(load, folder: Path, model: Model, tensor, rank: int, ranks: int):
    """Values that DeepSpeed's loader gives a rank whose fragment begins at the second element of its shard."""
    whole = model.values[tensor.name, "master"]
    shape = local_shard(whole.numpy(), tensor, rank, ranks).shape
    length = max(whole.numel() and int(torch.Size(shape).numel()) - 1, 0)
    parameter = torch.nn.Parameter(torch.empty(shape))
    target = torch.empty(length)
    parameter._hp_mapping = SimpleNamespace(
        lp_fragment_address=SimpleNamespace(start=1 if length else 0, numel=length), get_hp_fragment=lambda: target
    )
    step = MethodType(load, parameter)(str(folder / "zero" / tensor.name), rank, ranks)
    return {"fp32": target, **parameter._hp_mapping.optim_fragment}, step


def trained_on(folder: str, config_file: str, ranks: int, tag: str, *overrides: str) -> list[float]:
    """DeepSpeed's engine loads a universal checkpoint over other values, by its own `load_checkpoint`, and trains on.

    Returns:
        The losses of the steps that follow.
    """
    from megatron.data.loader import build_loader
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    words = ["training.seed=77", "deepspeed.checkpoint.load_universal=true", *overrides]
    config = load([config_file], words, ranks=ranks).config
    data = load([config_file], overrides, ranks=ranks).config  # of the seed that the run had
    device = torch.device("cpu")
    prepare_deepspeed(device)
    mesh = Mesh.build(Layout.of(config, ranks))
    engine = build_engine(config, mesh, device, values=True)
    theirs = engine.state.engine
    path, _ = theirs.load_checkpoint(folder, tag=None if tag == "latest" else tag)
    assert path is not None and theirs.global_steps == 3
    if config.zero.stage == 3:
        # Its ZeRO 3 gives all groups of parameters one tensor of steps, which an optimizer of torch adds to per group.
        states = theirs.optimizer.optimizer.state.values()
        assert len({id(state["step"]) for state in states}) == 1 < len(states)
        for state in states:
            state["step"] = state["step"].clone()
    loader = build_loader(data, data_rank=mesh.data.rank, data_ranks=mesh.data.size)
    found = [float(engine.step(loader.step(step), 1e-2).loss) for step in range(3, config.training.steps)]
    loader.close()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        ("zero.stage=1",),
        ("zero.stage=2",),
        ("zero.stage=3",),
        ("zero.stage=1", "precision=bf16"),
        ("zero.stage=1", "parallel.tensor=2", "precision=bf16"),
    ],
    ids=lambda words: " ".join(words),
)
def test_deepspeeds_own_engine_loads_it_whole_and_trains_on_as_we_do(tmp_path: Path, layout, capsys) -> None:
    """Learning rates are constant, and given to both. Nothing is clipped, since norms are sums in another order."""
    from tests.training.test_run import job

    layout = [*layout, "optimizer.gradient_clipping=1000"]
    text = TINY.replace("steps: 3", "steps: 7") + f"run: {{dir: {tmp_path}/run}}\nschedule: {{type: constant}}\n"
    text += "logging: {console: quiet, curve: false}\ncheckpoint: {every: 3}\n"
    (tmp_path / "tiny.yml").write_text(text)
    lines = on_ranks(2, job, str(tmp_path), 2, *layout)[0]
    ours = [line["loss"] for line in lines if line["step"] >= 3 and "loss" in line]
    path = tmp_path / "run" / "checkpoints" / "step_00000003"
    names = on_ranks(2, parameter_names, str(tmp_path / "tiny.yml"), 2, *layout)[0]
    (tmp_path / "names.yml").write_text(json.dumps(names))
    words = [str(path), str(tmp_path / "global_step3_universal"), "--names", str(tmp_path / "names.yml")]
    assert tool("to_deepspeed").main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "latest_universal").read_text() == "global_step3_universal"
    found = on_ranks(2, trained_on, str(tmp_path), str(tmp_path / "tiny.yml"), 2, "latest", *layout)
    reporting = [losses for losses in found if any(losses)]
    theirs = [sum(losses) / len(reporting) for losses in zip(*reporting)]
    assert len(ours) == len(theirs) == 4
    assert theirs == pytest.approx(ours, rel=1e-12), "the same sums in the same order"


def test_what_does_not_fit_is_named(tmp_path: Path, capsys) -> None:
    from megatron.checkpoint.universal import Universal

    config = tmp_path / "tiny.yml"
    config.write_text(TINY)
    folder = tmp_path / "theirs" / "zero"
    (folder / "final_norm.weight").mkdir(parents=True)
    (folder / "other").mkdir()
    torch.save({"param": torch.ones(3)}, folder / "final_norm.weight" / "fp32.pt")
    torch.save({"param": torch.ones(3)}, folder / "other" / "fp32.pt")

    def complaint() -> str:
        assert tool("from_deepspeed").main([str(folder.parent), str(tmp_path / "out"), "--config", str(config)]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    said = complaint()
    assert "left over: other" in said and "missing: embedding.tokens.weight" in said
    torch.save({"param": Path("x")}, folder / "other" / "fp32.pt")
    with pytest.raises(CheckpointError, match="can run code"):
        Universal(folder.parent).read("other", "master")
    (folder / "other" / "fp32.pt").unlink(), (folder / "final_norm.weight" / "fp32.pt").unlink()
    assert "ds_to_universal" in complaint()
