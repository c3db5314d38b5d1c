"""The learned optimizer of PyLO on one process: against the package by itself. Which files of weights it takes."""

from __future__ import annotations

import importlib.util
import io
import socket
import sys
import zipfile

import pytest
import safetensors.torch
import torch
from more_optimizers.small_fc_lopt.network import Network
from more_optimizers.small_fc_lopt.update import read_network
from torch import nn

from megatron.config import resolve
from megatron.config.problems import UserError
from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.model.stack import build_model
from megatron.parallel.layout.mesh import Axis
from megatron.parallel.layout.shard import Role
from megatron.testing.ranks import on_ranks
from tests.engine.optimizers.test_optimizers import gradients, model, parameter
from tests.paths import ROOT
from tests.training import runs
from tests.training.matrix import merged, read
from tests.training.settings import settings

WEIGHTS = ROOT / "tests/stand_ins/small_fc_lopt.safetensors"
OUTSIDE = {"extensions": ["more_optimizers"]}
RATES = [1.0, 0.5, 0.25, 1.0, 0.1]


def tensors() -> list[nn.Parameter]:
    """Wide, high and square matrices, fused ones, experts, vectors, and a tensor of three dimensions."""
    return [
        *model(),
        parameter("stack", Role.HIDDEN, 3, 8, 5, matrices=(4, 4)),
        parameter("taps", Role.CONVOLUTION, 7, 1, 4),
    ]


def network(width: int = 32, layers: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(width + layers)
    shapes = Network(width, layers).shapes
    return {name: torch.randn(shape, generator=draw) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def folder_of(tmp_path, weights: dict[str, torch.Tensor], width: int = 32, layers: int = 1):
    """As Hugging Face's hub gives it."""
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    sizes = {"input_size": 39, "hidden_size": width, "hidden_layers": layers}
    (tmp_path / "config.json").write_text(str(sizes).replace("'", '"'))
    return tmp_path


def parts(p: nn.Parameter, values: torch.Tensor) -> list[torch.Tensor]:
    """Tensors by the package's rules: each expert, and each matrix of a fused one."""
    stack = list(values) if p.logical.stacked else [values]
    fused = list(p.logical.matrices or ()) if p.dim() > 1 else []
    return [part for each in stack for part in (each.split(fused) if fused else [each])]


@pytest.fixture
def offline(monkeypatch):
    """Whatever asks for an address has failed."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("it asks the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("width, layers", [(32, 1), (8, 0), (5, 2)])
def test_it_is_the_packages(width, layers, tmp_path, offline):
    """Each step is that of the package by itself on the same tensors, to the last digits of the weights."""
    from pylo.optim import AdafacLO_naive

    folder = folder_of(tmp_path, network(width, layers), width, layers)
    chosen = {"lr": 1.0, "weight_decay": 0.02, "groups": {}, "options": {"weights": str(folder)}}
    ours = tensors()
    optimizer = build_optimizer(settings(model=OUTSIDE, optimizer={"type": "small_fc_lopt", **chosen}), ours)
    copies = [nn.Parameter(part.clone()) for p in ours for part in parts(p, p.detach())]
    reference = AdafacLO_naive(copies, weight_decay=0.02, hf_key=str(folder))
    start = [copy.detach().clone() for copy in copies]
    for step, lr in enumerate(RATES):
        gradients(ours, step)
        for copy, gradient in zip(copies, (part for p in ours for part in parts(p, p.grad)), strict=True):
            copy.grad = gradient.clone()
        set_learning_rate(optimizer, lr)
        reference.param_groups[0]["lr"] = lr
        optimizer.step()
        reference.step()
    found = [part for p in ours for part in parts(p, p.detach())]
    for own, wanted, begin in zip(found, copies, start, strict=True):
        assert float((wanted.detach() - begin).norm()) > 1e-3 * float(begin.norm())
        # one rounding of a weight per step more than the package has: of its step, which is a difference of weights
        assert float((own - wanted.detach()).abs().max()) <= 2 * len(RATES) * 2**-24 * float(
            wanted.detach().abs().max()
        )


def test_the_stand_in_is_the_package(tmp_path):
    """Where the real one is in the path, as with `PYTHONPATH` and a clone of it."""
    here = ROOT / "tests/stand_ins/pylo"
    import pylo

    if pylo.__file__ == str(here / "__init__.py"):
        pytest.skip("PyLO is not here: git clone https://github.com/Belilovsky-Lab/pylo, and put it in PYTHONPATH")
    spec = importlib.util.spec_from_file_location("stand_in", here / "optim/AdafacLO_naive.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    folder = folder_of(tmp_path, network())
    sides = []
    for module in (stand_in, sys.modules["pylo.optim"]):
        copies = [nn.Parameter(part.clone()) for p in tensors() for part in parts(p, p.detach())]
        optimizer = module.AdafacLO_naive(copies, weight_decay=0.02, hf_key=str(folder))
        for step in range(5):
            ours = tensors()
            gradients(ours, step)
            for copy, gradient in zip(copies, (part for p in ours for part in parts(p, p.grad)), strict=True):
                copy.grad = gradient
            optimizer.step()
        sides.append(copies)
    for own, wanted in zip(*sides):
        torch.testing.assert_close(own.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)


def test_under_mup_it_is_mulo():
    """MuLO divides the rates of matrices whose both sides grow by the width. No other one is."""
    section = {
        **OUTSIDE,
        "layers": "(attention/mlp) x1",
        "hidden_size": 8,
        "parametrization": {"type": "mup", "base_width": 2},
    }
    config = resolve({
        "model": {**section, "vocab_size": 16, "attention": {"heads": 2}},
        "training": {"steps": 2, "sequence_length": 8, "micro_batch_size": 1},
        "data": {"synthetic": "copy"},
        "optimizer": {"type": "small_fc_lopt", "lr": 1.0, "options": {"weights": str(WEIGHTS)}},
    })
    optimizer = build_optimizer(config, list(dict.fromkeys(build_model(config, dtype=torch.float32).parameters())))
    set_learning_rate(optimizer, 1.0)
    rates = {p.logical.name: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    inside = ("attention.query", "attention.key_value", "attention.output", "mlp.up", "mlp.down")
    matrices = [f"layers.0.{name}.weight" for name in inside]
    assert {name: rate for name, rate in rates.items() if rate != 1.0} == dict.fromkeys(matrices, 0.25)


@pytest.mark.parametrize("form", ["folder", "safetensors", "pt"])
def test_weights_are_read_from_a_file_or_folder(form, tmp_path):
    made = network()
    path = folder_of(tmp_path, made)
    if form == "safetensors":
        path = path / "model.safetensors"
    if form == "pt":
        path = tmp_path / "a.pt"
        torch.save({name: each.double() for name, each in made.items()}, path)
    found = read_network(str(path))
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(made, torch.float32)
    assert all(torch.equal(found[name], made[name]) for name in made)


class Planted:
    def __reduce__(self):
        return print, ("run",)


def broken() -> dict:
    made, nan, wide = network(), network(), network()
    nan["network.linear_0.bias"][3] = float("nan")
    wide["network.output.weight"] = torch.zeros(3, 32)
    less = {name: each for name, each in made.items() if name != "network.input.bias"}
    return {
        "has values in network.linear_0.bias that are not": nan,
        "has network.output.weight of the shape \\[3, 32\\], not \\[2, 32\\]": wide,
        "has no tensor network.input.bias": less,
        "has a tensor 'more'": {**made, "more": torch.zeros(1)},
        "names to tensors": {**made, "network.input.bias": 3},
        "to tensors of floating": {**made, "network.input.bias": made["network.input.bias"].to_sparse()},
        "mapping from names": {**made, 7: made["network.input.bias"]},
        "has more than 64 MiB": {
            name: torch.zeros(1).expand(shape) for name, shape in Network(2**14, 1).shapes.items()
        },
        "cannot be read as tensors": Planted(),
    }


def in_safetensors(content) -> bool:
    """Whether that format has it at all: it stores each value of a tensor."""
    return isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(each, torch.Tensor) and not each.is_sparse and each.is_contiguous()
        for name, each in content.items()
    )


@pytest.mark.parametrize(
    "reason, suffix",
    [(reason, ".pt") for reason in broken()]
    + [(reason, ".safetensors") for reason, content in broken().items() if in_safetensors(content)],
)
def test_weights_of_anything_else_are_refused(reason, suffix, tmp_path, capsys):
    content, file = broken()[reason], tmp_path / f"a{suffix}"
    save = torch.save if suffix == ".pt" else safetensors.torch.save_file
    save(content, file)
    with pytest.raises(UserError, match=f"optimizer.options.weights = .*{reason}"):
        read_network(str(file))
    assert "run" not in capsys.readouterr().out


# Each lacks something else: an opcode, a stack, what was remembered, bytes of a number, a key, a mark, text.
PICKLES = (b"", *(b"\x80\x02" + end for end in (b".", b"h\x07.", b"K", b"}s.", b"(t\x85b.", b"X\xff\xff\xff\x7f")))


def archive(pickled: bytes) -> bytes:
    """In the form of torch.save, with a pickle of one's own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/version", "3\n")
        made.writestr("archive/byteorder", "little")
    return file.getvalue()


@pytest.mark.parametrize("pickled", PICKLES)
def test_archives_whose_pickle_is_broken_are_refused(pickled, tmp_path):
    file = tmp_path / "a.pt"
    file.write_bytes(archive(pickled))
    with pytest.raises(UserError, match="a.pt cannot be read as tensors"):
        read_network(str(file))


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.safetensors", b"", "cannot be read as tensors"),
        ("a.safetensors", b"\xff" * 64, "cannot be read as tensors"),
        ("a.pt", b"no archive", "a.pt cannot be read as tensors"),
        *[("a.pt", content, "a.pt cannot be read as tensors") for content in PICKLES],
        ("a.txt", b"", "must be a file .safetensors, .pt"),
        (None, b"", "must be a file that exists"),
    ],
)
def test_damaged_files_are_refused(name, content, reason, tmp_path):
    file = tmp_path / (name or "absent.pt")
    if name:
        file.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_network(str(file))


def test_a_file_that_is_too_large_is_not_opened(tmp_path):
    with (tmp_path / "a.pt").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(UserError, match="at most 64 MiB"):
        read_network(str(tmp_path / "a.pt"))


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pylo.optim", None)
    chosen = {"type": "small_fc_lopt", "options": {"weights": str(WEIGHTS)}}
    ours = tensors()
    gradients(ours, 0)
    optimizer = build_optimizer(settings(model=OUTSIDE, optimizer=chosen), ours)
    with pytest.raises(UserError, match=r"needs the package pylo: pip install --no-deps git\+https://github.com"):
        optimizer.step()


def with_other_networks(folder: str) -> list[str]:
    """On two ranks: the error of each if the second one's host has another file under the path. Then with one file."""
    from torch import distributed as dist

    rank, told = dist.get_rank(), []
    for width in (8 + rank, 8):
        path = f"{folder}/{width}.safetensors"
        chosen = {"type": "small_fc_lopt", "lr": 1.0, "options": {"weights": path}}
        optimizer = build_optimizer(settings(model=OUTSIDE, optimizer=chosen), tensors())
        try:
            optimizer.attach([], Axis(rank, 2, dist.group.WORLD, (0, 1)), torch.device("cpu"))
        except UserError as error:
            told.append(str(error))
        else:
            told.append("attached")
    return told


def test_ranks_have_one_network(tmp_path):
    for width in (8, 9):
        safetensors.torch.save_file(network(width), tmp_path / f"{width}.safetensors")
    for refused, alike in on_ranks(2, with_other_networks, str(tmp_path)):
        assert "optimizer.options.weights: must have the same values on all ranks. Rank 1 and rank 0 have" in refused
        assert alike == "attached"


def resumed(values: dict, saved: str, further: dict) -> tuple[str, ...]:
    """On one rank: a checkpoint of a run with `values`, and what each of the other settings finds in it."""
    from megatron.checkpoint import SOLO, CheckpointError, Meta, open_checkpoint, save
    from megatron.training.start.resume import resume
    from megatron.training.world import World

    config, engine = runs.start(values, 1)
    engine.step(runs.local_batch(config, 0, 0, 1), config.optimizer.lr)
    kept = Meta.from_bytes(Meta(step=1, optimizer=engine.state.counters()).to_bytes(), "a test")
    own = str(save(saved, 1, engine.state.fragments(), kept, SOLO))
    told = []
    for more in further.values():
        _, engine = runs.start(merged(values, more), 1)
        try:
            resume(open_checkpoint(own, communicator=SOLO), World(torch.device("cpu"), engine.mesh, SOLO, SOLO), engine)
        except CheckpointError as error:
            told.append(str(error))
        else:
            told.append(f"{engine.state.counters()['step']:.0f} steps")
    return tuple(told)


def test_a_run_goes_on_with_its_network(tmp_path):
    """Of the values, not of the path or the form. With another one only where a key says so."""
    made, other = network(), network()
    other["network.output.bias"][0] += 2**-20
    safetensors.torch.save_file(made, tmp_path / "a.safetensors")
    torch.save({name: each.double() for name, each in made.items()}, tmp_path / "same.pt")
    safetensors.torch.save_file(other, tmp_path / "other.safetensors")

    def weights(name: str) -> dict:
        chosen = {"type": "small_fc_lopt", "lr": 1.0, "options": {"weights": str(tmp_path / name)}}
        return {"model": OUTSIDE, "optimizer": chosen}

    def allowed(key: str) -> dict:
        return {**weights("other.safetensors"), "checkpoint": {"allow_changes": [key]}}

    values = merged(read()["common"], {"model": {"layers": "(attention/mlp) x1"}})
    further = {
        "same": weights("same.pt"),
        "other": weights("other.safetensors"),
        "key": allowed("optimizer.options.weights"),
        "section": allowed("optimizer"),
        "another key": allowed("model"),
    }
    (told,) = on_ranks(1, resumed, merged(values, weights("a.safetensors")), str(tmp_path / "saved"), further)
    assert [each for each in told if "steps" == each.split()[-1]] == ["1 steps"] * 3
    found = dict(zip(further, told, strict=True))
    for name in ("other", "another key"):
        assert "the file of optimizer.options.weights must have the values that the checkpoint's steps" in found[name]
        assert "checkpoint.allow_changes=[optimizer.options.weights]" in found[name]
