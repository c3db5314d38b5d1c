"""The numbers of the experts in a run: counted once, summed over all ranks, in the record, the picture and the
trace.
"""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine.part import Update
from megatron.engine.parts.expert_load import ExpertLoad
from megatron.kinds.moe.router import scores_of
from megatron.kinds.moe.trace import moe_layers, traced
from megatron.model.stack import build_model
from megatron.model.stream import Stream
from megatron.parallel.layout.mesh import Mesh
from megatron.report.curve import save_expert_load
from tests.paths import ROOT
from tests.training import runs
from tests.training.matrix import merged, read
from tests.workers import run


def values(**layout) -> dict:
    matrix = read()
    own = {name: value for name, value in matrix["architectures"]["moe"].items() if name not in ("about", "apart")}
    recipe = {"optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "gradient_clipping": 0.0}}
    return merged(matrix["common"], own, recipe, layout)


def report(settings: dict, ranks: int) -> dict:
    """On every rank: the numbers of one step."""
    config, engine = runs.start(settings, ranks)
    data = engine.mesh.data
    result = engine.step(runs.local_batch(config, 0, data.rank, data.size), config.optimizer.lr)
    return dict(result.extras)["moe"]


LAYOUTS = {
    "dp2, four micro-batches, ZeRO 2": (2, {"zero": {"stage": 2}, "training": {"micro_batch_size": 1}}),
    "pp2, recomputation": (
        2,
        {
            "parallel": {"pipeline": 2},
            "training": {"micro_batch_size": 2, "activation_checkpointing": {"mode": "full"}},
        },
    ),
    "tp2, selective recomputation": (
        2,
        {"parallel": {"tensor": 2, "sequence": True}, "training": {"activation_checkpointing": {"mode": "selective"}}},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reports_the_same(name: str):
    """Loads are counts of the global batch: recomputation counts no token twice, no rank's are missing."""
    ranks, layout = LAYOUTS[name]
    (wanted,) = run(1, report, values(), 1)
    assert list(wanted) == ["1", "2", "3"]
    for found in run(ranks, report, values(**layout), ranks):
        assert found.keys() == wanted.keys()
        for layer, numbers in wanted.items():
            assert found[layer]["load"] == numbers["load"] and found[layer]["correction"] == numbers["correction"]
            for each in ("max_over_mean", "entropy", "sequence", "z"):
                assert found[layer][each] == pytest.approx(numbers[each], rel=1e-5), each
            assert found[layer]["dead"] == numbers["dead"] and found[layer]["dropped"] == 0


def test_a_stage_without_experts_sums_on_the_device():
    """Its share of the sums lies where the other stages' sums do: a process group has one kind of device."""
    config = resolve(values())
    load = ExpertLoad()
    load.use(torch.nn.Linear(2, 2), config, Mesh.single(), torch.device("meta"))
    assert load.after_update(Update(True, torch.zeros(()))).source.device.type == "meta"


def test_numbers_by_hand():
    """Load, loss per sequence, z-loss and the correction's step of the first moe layer, from its inputs and weights."""
    (found,) = run(1, report, values(), 1)
    config = resolve(values())
    model, own = build_model(config), config.model.moe
    with torch.no_grad():
        for tensor in [*model.parameters(), *(moe.balance.correction for moe in moe_layers(model).values())]:
            tensor += torch.from_numpy(runs.noise(tensor.logical))
        batch: StepBatch = runs.global_batch(config, 0)
        stream = model.embedding(batch.inputs[0])
        stream = model.blocks[0](stream)
        block = model.blocks[1]
        x = stream.hidden + block.mixer(block.mixer_norm(stream.hidden), stream)
        logits = (block.ffn_norm(x) @ block.ffn.router.weight.T).double()
        scores = scores_of(logits, "sigmoid")
        wanted = scores + block.ffn.balance.correction.double()
    counts, sequence = np.zeros(8), []
    B, S = batch.inputs[0].shape
    for b in range(B):
        here = np.zeros(8)
        for s in range(S):
            groups = [sorted(wanted[b, s, 2 * g : 2 * g + 2].tolist())[-2:] for g in range(4)]
            best = sorted(range(4), key=lambda g: -sum(groups[g]))[: own.router.top_groups]
            allowed = [e for e in range(8) if e // 2 in best]
            for e in sorted(allowed, key=lambda e: -wanted[b, s, e])[:2]:
                here[e] += 1
        share = (scores[b] / scores[b].sum(-1, keepdim=True)).mean(0).numpy()
        sequence.append(8 * (here / here.sum() * share).sum())
        counts += here
    layer = found["1"]
    np.testing.assert_allclose(layer["load"], counts / counts.sum(), atol=1e-5)
    assert layer["sequence"] == pytest.approx(np.mean(sequence), rel=1e-5)
    assert layer["z"] == pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-5)
    assert layer["max_over_mean"] == pytest.approx(counts.max() / counts.mean(), rel=1e-5)
    moved = block.ffn.balance.correction.numpy() + 0.05 * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(layer["correction"], moved, atol=1e-6)


def used_experts(mode: str) -> torch.Tensor:
    """Which experts got a gradient, where the router's weights change between the forward and the backward pass."""
    model = {"layers": "moe", "hidden_size": 16, "vocab_size": 8, "moe": {"hidden_size": 8, "top_k": 1}}
    training = {"steps": 1, "sequence_length": 3, "activation_checkpointing": {"mode": mode}}
    block = build_model(resolve({"model": model, "training": training})).blocks[0]
    y = block(Stream(torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1)))).hidden
    block.ffn.router.weight.data = block.ffn.router.weight.roll(1, 0)
    y.square().sum().backward()
    assert block.ffn.balance.tally[-1] == 1  # counted once
    return block.ffn.experts.down.weight.grad.ne(0).flatten(1).any(1)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_replays_the_choice(mode: str, monkeypatch):
    assert used_experts(mode).equal(used_experts("none"))
    monkeypatch.setattr("megatron.kinds.moe.layer.decide_once", lambda make: make())
    assert not used_experts("full").equal(used_experts("none"))  # so the comparison can fail


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputed_tokens_count_once(mode: str):
    """The norm after the layer makes the repetition run through all of it."""
    model = {
        "layers": "(attention/moe) x2",
        "hidden_size": 16,
        "vocab_size": 8,
        "attention": {"heads": 2},
        "residual": {"norm": "post"},
        "moe": {"hidden_size": 8, "top_k": 3, "losses": {"z": 0.1}},
    }
    training = {"steps": 1, "sequence_length": 6, "activation_checkpointing": {"mode": mode}}
    built, tokens = build_model(resolve({"model": model, "training": training})), torch.arange(12).view(2, 6) % 8
    built(tokens, tokens, torch.ones(2, 6))[0].backward()
    for moe in moe_layers(built).values():
        assert moe.balance.tally[-1] == 1 and moe.balance.tally[:8].sum() == 12 * 3


def trace_tool():
    spec = spec_from_file_location("trace_tool", ROOT / "tools" / "moe" / "trace.py")
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_picture_and_trace(tmp_path, capsys):
    """experts.png of a run's metrics. The trace of a model agrees with what the layer itself counts."""
    metrics = tmp_path / "metrics.jsonl"
    loads = [[0.25, 0.25, 0.5, 0.0], [0.3, 0.3, 0.2, 0.2]]
    metrics.write_text(
        "".join(
            json.dumps({
                "step": step,
                "loss": 1.0,
                "moe": {
                    str(2 * index): {"max_over_mean": max(load) * 4, "load": load} for index, load in enumerate(loads)
                },
            })
            + "\n"
            for step in range(3)
        )
    )
    assert save_expert_load(metrics, tmp_path / "experts.png", "run")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    metrics.write_text('{"step": 0, "loss": 1.0}\n')
    assert not save_expert_load(metrics, tmp_path / "none.png", "run") and not (tmp_path / "none.png").exists()

    config = resolve(values())
    model = build_model(config)
    tokens = torch.randint(99, (2, 16), generator=torch.Generator().manual_seed(0))
    found = traced(model, tokens)
    assert list(found) == [1, 2, 3] and found[1][0].shape == (2, 16, 2)
    model.train().logits(tokens)
    for layer, moe in moe_layers(model).items():
        assert np.array_equal(np.bincount(found[layer][0].flatten(), minlength=8), moe.balance.tally[:8].numpy())
        assert torch.allclose(found[layer][1].sum(-1), torch.tensor(1.5))  # normalised, times the scale

    tool = trace_tool()
    rows = list(tool.rows(model, tokens))
    assert len(rows) == 3 * 32 and rows[0]["layer"] == 1 and rows[0]["token"] == int(tokens[0, 0])
    told = tool.summary(rows, {1: 8, 2: 8, 3: 8})
    load = np.bincount(found[1][0].flatten(), minlength=8)
    assert told[0] == (
        f"layer 1: largest load over an even share {load.max() / load.mean():.3f}, "
        f"{(load == 0).sum()} of 8 experts unused"
    )
    assert tool.main([str(tmp_path)]) == 2


def test_trace_of_tokens_that_use_no_expert_and_of_documents():
    """The class of no expert is in the rows and no expert's load. Attention ends where the run's documents end."""
    matrix = read()
    own = {name: value for name, value in matrix["architectures"]["zaya1"].items() if name not in ("about", "apart")}
    config = resolve(merged(matrix["common"], own))
    model = build_model(config)
    with torch.no_grad():
        for moe in moe_layers(model).values():
            moe.router.out.mul_(100)
            moe.balance.correction[4] = 0.05
    batch = runs.global_batch(config, 0)
    tokens, extras = batch.inputs[0], {"positions": batch.positions[0], "documents": batch.documents[0]}
    tool = trace_tool()
    rows = list(tool.rows(model, tokens, **extras))
    told = tool.summary(rows, {layer: 4 for layer in range(4)})
    model.train().stream(tokens, samples=batch.sample_ids[0], **extras)
    for layer, moe in moe_layers(model).items():
        counts, skipped = moe.balance.tally[:4].numpy(), int(moe.balance.tally[4])
        found = [row["experts"][0] for row in rows if row["layer"] == layer]
        assert np.array_equal(np.bincount(found, minlength=5), [*counts, skipped])
        assert told[layer].startswith(
            f"layer {layer}: largest load over an even share {counts.max() / counts.mean():.3f}, "
        )
        assert (f"{skipped} choices of no expert" in told[layer]) == bool(skipped)
    assert any("of no expert" in line for line in told)
    alone = list(tool.rows(model, tokens))
    assert [row["experts"] for row in alone] != [row["experts"] for row in rows]  # so that the documents are seen


def trained(correction: str) -> tuple[list[float], float]:
    """Losses of a short training in plain PyTorch whose router starts skewed, and the largest load over an even share
    in the last ten steps together."""
    router = {"score": "sigmoid", "normalize": True, "bias": True, "correction": correction, "correction_rate": 0.02}
    config = resolve({
        "model": {
            "layers": "attention/moe",
            "hidden_size": 32,
            "vocab_size": 32,
            "attention": {"heads": 4},
            "norm": {"type": "rmsnorm"},
            "moe": {"experts": 8, "hidden_size": 16, "router": router},
        },
        "training": {"steps": 1, "sequence_length": 16},
    })
    model, draw, losses, counts = build_model(config), torch.Generator().manual_seed(1), [], []
    (moe,) = moe_layers(model).values()
    moe.router.bias.data = torch.linspace(0, 2, 8)
    optimizer, following = torch.optim.Adam(model.parameters(), lr=1e-2), torch.randperm(32, generator=draw)
    for _ in range(60):
        tokens = [torch.randint(32, (16, 1), generator=draw)]
        for _ in range(16):
            noise = torch.randint(32, (16, 1), generator=draw)
            tokens.append(torch.where(torch.rand(16, 1, generator=draw) < 0.9, following[tokens[-1]], noise))
        batch = torch.cat(tokens, 1)
        loss, _ = model(batch[:, :-1], batch[:, 1:], torch.full((16, 16), 1 / 256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append(moe.balance.tally[:8].clone())
        moe.balance.tally.zero_()
        moe.balance.finish(counts[-1])
    late = torch.stack(counts[-10:]).sum(0)
    return losses, (late.max() / late.mean()).item()


def test_the_correction_evens_the_load():
    (losses, even), (_, skewed) = trained("sign"), trained("none")
    assert losses[-1] < 0.4 * losses[0]
    assert even < 1.3 < 2.0 < skewed
