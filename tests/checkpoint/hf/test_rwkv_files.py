"""Published RWKV files: there and back, read by an independent model, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch

from megatron.checkpoint import WEIGHT, CheckpointError, FragmentSpec, open_checkpoint
from megatron.checkpoint.hf.rwkv_files import export_published, import_published
from megatron.checkpoint.reshape import parse_layout, reshape
from megatron.training.text import load_model
from tests.checkpoint.hf.test_hf_tools import checkpoint_of, tool
from tests.float64 import FP32
from tests.kinds.rwkv import rwkv_reference as reference
from tests.model.parity import named, relative

LOW = {"decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5}
MODELS = {
    "rwkv5": {"rwkv5": {"head_dim": 16}},
    "rwkv6": {"rwkv6": {"head_dim": 16, "mix_rank": 3, "decay_rank": 5}},
    "rwkv7": {"rwkv7": {"head_dim": 16, **LOW}},
}


def change(name: str, **more) -> dict:
    return {"layers": f"({name}/{name}_ffn) x3", "embedding": {"norm": True}, **MODELS[name], **more}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_through_another_layout(name: str, tmp_path, capsys):
    """Saved by one rank, cut for four, written as a published file, which another model reads, and back, bit by bit."""
    source, model = checkpoint_of(tmp_path, change(name))
    reshape(source, tmp_path / "cut" / "step_00000007", parse_layout("tensor=2,pipeline=2"))
    file = tmp_path / "model.pth"
    assert tool("to_rwkv").main([str(tmp_path / "cut" / "step_00000007"), str(file), "--dtype", "float32"]) == 0
    tensors = torch.load(file, weights_only=True)
    tokens = torch.randint(61, (12,), generator=torch.Generator().manual_seed(0))
    wanted = reference.logits(
        {key: value.double() for key, value in tensors.items()}, tokens.tolist(), int(name[-1]), 2
    )
    assert relative(model.eval().logits(tokens.unsqueeze(0))[0].double(), wanted) < FP32

    assert tool("from_rwkv").main([str(file), str(tmp_path / "again"), "--sequence-length", "24"]) == 0
    again = open_checkpoint(tmp_path / "again", verify="checksums")
    assert set(again.tensors) == set(named(model))
    for key, parameter in named(model).items():
        assert again.read(FragmentSpec.whole(again.tensors[key], WEIGHT)).data.equal(parameter.detach().flatten()), key
    loaded, _ = load_model(tmp_path / "again", torch.device("cpu"))
    assert loaded.logits(tokens.unsqueeze(0)).equal(model.logits(tokens.unsqueeze(0)))
    assert "wrote" in capsys.readouterr().out


def test_unused_tensors_of_the_first_layer_are_left_out(tmp_path):
    source, _ = checkpoint_of(tmp_path, change("rwkv7"))
    export_published(source, tmp_path / "model.pth")
    tensors = torch.load(tmp_path / "model.pth", weights_only=True)
    assert "blocks.1.att.v1" in tensors and "blocks.0.att.v1" not in tensors
    torch.save(
        {**tensors, **{f"blocks.0.att.v{n}": tensors[f"blocks.1.att.v{n}"] for n in range(3)}}, tmp_path / "more.pth"
    )
    import_published(tmp_path / "more.pth", tmp_path / "again", sequence_length=24)
    torch.save({**tensors, "blocks.0.att.x_z": tensors["head.weight"]}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="left over: blocks.0.att.x_z"):
        import_published(tmp_path / "other.pth", tmp_path / "third", sequence_length=24)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    "model, says",
    [
        ({"layers": "(rwkv7/mlp) x2", "rwkv7": MODELS["rwkv7"]["rwkv7"]}, "in every layer"),
        (change("rwkv6", embedding={}), "model.embedding.norm"),
        (change("rwkv7", rwkv7={"head_dim": 16, "norm_epsilon": 1e-5, **LOW}), "model.rwkv7.norm_epsilon"),
        (change("rwkv7", embedding={"norm": True, "tied": True}), "model.embedding.tied"),
    ],
)
def test_what_the_files_cannot_hold(model: dict, says: str, tmp_path):
    source, _ = checkpoint_of(tmp_path, model)
    with pytest.raises(CheckpointError, match=says):
        export_published(source, tmp_path / "model.pth")
    assert not (tmp_path / "model.pth").exists()


class Trap:
    def __reduce__(self):
        return print, ("code of the file was run",)


def test_nothing_in_a_file_is_run(tmp_path, capsys):
    (tmp_path / "trap.pth").write_bytes(pickle.dumps({"emb.weight": Trap()}))
    torch.save({"emb.weight": Trap()}, tmp_path / "zip.pth")
    torch.save({"emb.weight": torch.ones(3, 4)}, tmp_path / "other.pth")
    for name, says in (("trap", "cannot be read"), ("zip", "can run code"), ("other", "it is none of rwkv7")):
        with pytest.raises(CheckpointError, match=says):
            import_published(tmp_path / f"{name}.pth", tmp_path / "out", sequence_length=8)
    assert "was run" not in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_vectors_by_head_have_their_shape(tmp_path):
    """As one row they are the same. The first layer's says how wide heads are."""
    source, _ = checkpoint_of(tmp_path, change("rwkv7"))
    export_published(source, tmp_path / "model.pth")
    tensors = torch.load(tmp_path / "model.pth", weights_only=True)
    name = "blocks.1.att.r_k"
    heads, width = tensors[name].shape
    assert heads != width
    torch.save({**tensors, name: tensors[name].T.contiguous()}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError) as caught:
        import_published(tmp_path / "other.pth", tmp_path / "out", sequence_length=24)
    assert f"{name} has the shape ({width}, {heads}), and must have ({heads}, {width})" in str(caught.value)
    assert not (tmp_path / "out").exists()
