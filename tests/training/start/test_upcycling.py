"""Mixtures of experts that start as a dense model: on any layout they compute what the dense model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import MASTER, Fragment, FragmentSpec, Meta, save
from megatron.checkpoint.format.errors import CheckpointError
from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from megatron.training.start.upcycle import fill, of_layer, origin_of
from tests.model.parity import named, randomise
from tests.selection import covering
from tests.training import runs
from tests.workers import run

DENSE = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 32,
    "vocab_size": 50,
    "norm": {"type": "rmsnorm"},
    "attention": {"heads": 4},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": 64},
}
MAP = {
    "layers.*.moe.experts.*.weight": "layers.*.mlp.*.weight",
    "layers.*.moe.router.weight": "new",
    "layers.*.moe.router.correction": "new",
}
TRAINING = {"steps": 1, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4}
EXPERTS = {
    # Each expert is the dense layer, and the weights of a token's experts add up to 1.
    "copies": {"experts": 4, "top_k": 2, "hidden_size": 64, "router": {"normalize": True, "correction": "sign"}},
    # Four experts in a row are the dense layer. All are used, each with a weight of 1.
    "slices": {"experts": 4, "top_k": 4, "hidden_size": 16, "router": {"normalize": True, "scale": 4.0}},
}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "dp2, ZeRO 3": (2, {"zero": {"stage": 3, "persistent_size": 0}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
}


def dense(folder: Path):
    model = build_model(resolve({"model": DENSE, "training": TRAINING}))
    randomise(model, 3)
    fragments = [Fragment(p.logical, MASTER, 0, 1, 0, p.detach().flatten()) for p in named(model).values()]
    return model, save(folder, 5, fragments, Meta(step=5))


def loss_after_start(values: dict, ranks: int, path: str) -> tuple[list, tuple[float, float]]:
    """On every rank: start from the checkpoint. This rank's masters, and the loss of a batch in evaluation."""
    from megatron.checkpoint import SOLO, GroupCommunicator, open_checkpoint
    from megatron.training.start.resume import initialize
    from megatron.training.world import World

    config, engine = runs.start(values, ranks)
    if "slices" in path:  # weights of exactly a quarter, whatever the router would say
        for fragment in engine.state.masters():
            if "router" in fragment.tensor.name:
                fragment.data.zero_()
    communicator = GroupCommunicator() if ranks > 1 else SOLO
    checkpoint = open_checkpoint(path, verify="checksums", communicator=communicator)
    initialize(checkpoint, World(torch.device("cpu"), engine.mesh, communicator, communicator), engine, MAP)
    data = engine.mesh.data
    batch = runs.local_batch(config, 7, data.rank, data.size)
    return runs.portable(f for f in engine.state.fragments() if f.state == MASTER), runs.mean(*engine.evaluate(batch))


def losses_are_of(model, found: list[float]) -> None:
    """Each is the loss that the dense model has on the same batch, in plain PyTorch."""
    config = resolve({"model": DENSE, "training": TRAINING})
    batch = runs.global_batch(config, 7)
    with torch.no_grad():
        ce, _, _ = runs.token_losses(config, model.eval(), batch, slice(None))
    wanted = float((ce * batch.loss_mask[0]).double().sum() / batch.loss_mask.double().sum())
    assert all(loss == pytest.approx(wanted, rel=1e-5) for loss in found)


@pytest.mark.parametrize(("layout", "kind"), covering(LAYOUTS, EXPERTS))
def test_computes_what_the_dense_model_does(kind: str, layout: str, tmp_path):
    model, path = dense(tmp_path / kind)
    ranks, cut = LAYOUTS[layout]
    moe = {**DENSE, "layers": "(attention/moe) x2", "moe": EXPERTS[kind]}
    values = {"model": moe, "training": TRAINING, "data": {"synthetic": "copy"}, **cut}
    results = run(ranks, loss_after_start, values, ranks, str(path))
    losses_are_of(model, [loss for _, (loss, _) in results])
    weights = {name: each for (name, _), each in runs.assemble([result[0] for result in results]).items()}
    ours = {name: p.detach().numpy() for name, p in named(model).items()}
    down = weights["layers.1.moe.experts.down.weight"].reshape(4, 32, -1)
    width = down.shape[2]
    for e in range(4):
        part = e % (64 // width) * width
        np.testing.assert_array_equal(down[e], ours["layers.1.mlp.down.weight"][:, part : part + width])
    gate_up = weights["layers.0.moe.experts.gate_up.weight"].reshape(4, 2 * width, 32)
    rows = slice(64 + 3 * width % 64, 64 + 3 * width % 64 + width)
    np.testing.assert_array_equal(gate_up[3, width:], ours["layers.0.mlp.gate_up.weight"][rows])
    np.testing.assert_array_equal(weights["head.weight"].reshape(50, 32), ours["head.weight"])


def grown(values: dict, ranks: int, path: str) -> tuple[list, tuple[float, float]]:
    """On every rank: a deeper model from the checkpoint. This rank's masters, and the loss of a batch."""
    from megatron.checkpoint import SOLO, GroupCommunicator, open_checkpoint
    from megatron.training.start.resume import initialize
    from megatron.training.world import World

    config = resolve(values, ranks=ranks)
    engine = runs.build(config, ranks)
    communicator = GroupCommunicator() if ranks > 1 else SOLO
    checkpoint = open_checkpoint(path, verify="checksums", communicator=communicator)
    world = World(torch.device("cpu"), engine.mesh, communicator, communicator)
    initialize(checkpoint, world, engine, config.checkpoint.initialize_map, config)
    data = engine.mesh.data
    loss = runs.mean(*engine.evaluate(runs.local_batch(config, 7, data.rank, data.size)))
    return runs.portable(f for f in engine.state.fragments() if f.state == MASTER), loss


@pytest.mark.parametrize("layout", ["tp2", "dp2, ZeRO 3"])
def test_a_deeper_model_that_computes_the_same(layout: str, tmp_path):
    """Blocks that are the identity change nothing. Copies are copies."""
    model, path = dense(tmp_path / "dense")
    ranks, cut = LAYOUTS[layout]
    values = {
        "model": {**DENSE, "layers": "(attention/mlp) x4"},
        "training": TRAINING,
        "data": {"synthetic": "copy"},
        "checkpoint": {"initialize_from": str(path), "initialize_layers": [0, "identity", 1, "identity"]},
        **cut,
    }
    results = run(ranks, grown, values, ranks, str(path))
    losses_are_of(model, [loss for _, (loss, _) in results])
    weights = {name: each for (name, _), each in runs.assemble([result[0] for result in results]).items()}
    ours = {name: p.detach().numpy().reshape(-1) for name, p in named(model).items()}
    for name in ("attention.query.weight", "mlp.down.weight", "ffn_norm.weight"):
        np.testing.assert_array_equal(weights[f"layers.2.{name}"], ours[f"layers.1.{name}"])
    assert not weights["layers.3.mlp.down.weight"].any() and weights["layers.3.mlp.gate_up.weight"].any()


def test_a_product_of_two_matrices_is_not_zero_twice():
    """Of latent experts only `down` is 0 in a block that is the identity, so that it gets a gradient."""
    moe = {"experts": 4, "hidden_size": 16, "latent_size": 8}
    model = {**DENSE, "layers": "attention/moe", "moe": moe}
    model = build_model(resolve({"model": model, "training": TRAINING, "data": {"synthetic": "copy"}}))
    outputs = {name for name, p in named(model).items() if p.logical.role is Role.OUTPUT and ".moe." in name}
    assert outputs == {"layers.0.moe.experts.down.weight"}


def test_blocks_of_a_stack():
    names = ["layers.3.mlp.down.weight", "layers.0.mixer_norm.weight", "head.weight"]
    tensors = [LogicalTensor(name, (8,), Role.NORM, None) for name in names]
    assert [of_layer(each, [0, 1, 0, 1]) for each in tensors] == ["layers.1.mlp.down.weight", names[1], None]
    assert of_layer(tensors[0], [0, 1, 0, "identity"]) == "identity" and of_layer(tensors[0], []) is None


def test_names_and_what_cannot_be():
    assert origin_of("layers.7.moe.experts.down.weight", MAP) == "layers.7.mlp.down.weight"
    assert origin_of("layers.7.moe.router.weight", MAP) == "new"
    assert origin_of("layers.7.moe.router.bias", MAP) is None
    assert origin_of("layersX7.moe.experts.down.weight", MAP) is None
    tensor = LogicalTensor("e", (4, 8, 6), Role.OUTPUT, Shard(2))
    target = Fragment.empty(FragmentSpec.whole(tensor, MASTER), torch.float32)
    with pytest.raises(CheckpointError, match="cannot be made"):
        fill(target, torch.zeros(8, 9), "c")
