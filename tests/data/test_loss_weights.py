"""Weights of sources and documents: what each label weighs, by looking its token up, and the loss of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.config import resolve
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.plan_builder import build_plan
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.training.start.same_run import data_changes
from tests.data.make import write_documents
from tests.workers import run

SIZES = [[5, 9, 3, 14, 8, 11, 2, 7] * 4, [6, 13, 4, 10] * 6]


def files(folder: Path) -> None:
    """Two files in which a token's id says where it is from: 100 * (1 + file) + document."""
    draw = np.random.default_rng(4)
    for number, sizes in enumerate(SIZES):
        documents = [[100 * (1 + number) + place] * size for place, size in enumerate(sizes)]
        write_documents(folder / f"file{number}", documents)
        weights = draw.random(len(sizes)).astype(np.float64)
        weights[::5] = 0.0
        np.save(folder / f"weights{number}.npy", weights)


def values(folder: Path, **data) -> dict:
    return {
        "model": {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 200 + 50, "attention": {"heads": 2}},
        "training": {"steps": 6, "sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"type": "sgd"},
        "data": {
            "workers": 0,
            "order": "stream",
            "train": [
                {"path": str(folder / "file0"), "loss_weight": 3.0},
                {"path": str(folder / "file1"), "document_weights": str(folder / "weights1.npy"), "loss_weight": 0.5},
            ],
            **data,
        },
    }


def wanted(folder: Path, labels: np.ndarray) -> np.ndarray:
    document_weights = np.load(folder / "weights1.npy")
    found = [3.0 if token < 200 else 0.5 * document_weights[token - 200] for token in labels.flat]
    return np.array(found).reshape(labels.shape)


def test_each_label_has_the_weight_of_its_document_and_source(tmp_path: Path):
    files(tmp_path)
    loader = build_loader(resolve(values(tmp_path)), data_rank=0, data_ranks=1)
    seen = set()
    for step in range(6):
        batch = loader.step(step)
        np.testing.assert_allclose(batch.loss_mask.numpy(), wanted(tmp_path, batch.labels.numpy()), rtol=1e-6)
        seen |= set((batch.labels // 100).flatten().tolist())
    assert seen == {1, 2}


def test_what_else_a_label_weighs_multiplies(tmp_path: Path):
    """A label file, the goldfish loss, and room that packing leaves."""
    files(tmp_path)
    labels = [[-100 if place % 3 == 0 else 200 + number for place in range(n)] for number, n in enumerate(SIZES[1])]
    write_documents(tmp_path / "labels", labels, np.int32)
    both = values(tmp_path, packing="best_fit")
    both["tokenizer"] = {"type": "none", "eod_id": 249}
    both["data"]["train"] = [{**both["data"]["train"][1], "labels": str(tmp_path / "labels")}]
    both["objective"] = {"type": "goldfish", "k": 4, "h": 2, "mask": "static"}
    plan, plain = (build_plan(resolve(each)) for each in (both, {**both, "objective": {}}))
    weights = np.load(tmp_path / "weights1.npy")
    for number in range(20):
        sample, counted = plan.sample(number), np.zeros(17)
        begin = 0
        for span in sample.spans:
            own = [
                0.0 if (span.start + place) % 3 == 0 else 0.5 * weights[span.document] for place in range(span.length)
            ]
            counted[begin : begin + span.length] = own
            begin += span.length
        np.testing.assert_allclose(plain.sample(number).weights, counted[1:], rtol=1e-6)
        static = np.arange(1, 17) % 4 != 1
        np.testing.assert_allclose(sample.weights, counted[1:] * static, rtol=1e-6)


def test_evaluations_weigh_all_labels_alike(tmp_path: Path):
    """A share of the training file is read without its weights."""
    files(tmp_path)
    split = values(tmp_path, split=[0.5, 0.5])
    split["data"]["train"] = [{"path": str(tmp_path / "file1"), "document_weights": str(tmp_path / "weights1.npy")}]
    config = resolve(split)
    assert build_loader(config, data_rank=0, data_ranks=1, split="validation").step(0).loss_mask is None
    assert build_loader(config, data_rank=0, data_ranks=1).step(0).loss_mask is not None


def test_a_weight_of_one_is_no_weight(tmp_path: Path):
    files(tmp_path)
    one = values(tmp_path, train=[{"path": str(tmp_path / "file0"), "loss_weight": 1.0}])
    assert build_loader(resolve(one), data_rank=0, data_ranks=1).step(0).loss_mask is None


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        (np.ones(3), "one number for each of 24 documents, and has float64"),
        (np.full(24, -1.0), "finite number of at least 0"),
        (np.full(24, np.nan), "finite number of at least 0"),
        (np.full(24, 1e300), "finite number of at least 0"),
        (np.array(["a"] * 24), "one number for each of 24 documents"),
        (np.array([{}] * 24), "cannot be read"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, weights: np.ndarray, rule: str):
    files(tmp_path)
    np.save(tmp_path / "weights1.npy", weights, allow_pickle=True)
    with pytest.raises(DataError, match=rule):
        build_plan(resolve(values(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY"])
def test_damaged_files_of_weights(tmp_path: Path, content: bytes):
    files(tmp_path)
    (tmp_path / "weights1.npy").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        build_plan(resolve(values(tmp_path)))


def test_a_resumed_run_says_that_weights_differ(tmp_path: Path):
    from megatron.checkpoint.format.manifest import Meta

    files(tmp_path)
    config = resolve(values(tmp_path))
    before = build_plan(config)
    meta = Meta(step=1, config="", data={"samples": 8, "document_weights": before.document_weights()})
    assert list(before.document_weights()) == ["1 file1"] and data_changes(meta, config, before) == []
    np.save(tmp_path / "weights1.npy", np.ones(24))
    (line,) = data_changes(meta, config, build_plan(config))
    assert "the weights of documents (document_weights) differ" in line


def losses(given: dict, ranks: int) -> list[float]:
    """On every rank, of three steps of a run: mean loss over all ranks, weight of the labels, gradient norm."""
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine

    config = resolve(given, ranks=ranks)
    prepare_deepspeed(torch.device("cpu"))
    engine = build_engine(config, Mesh.build(Layout.of(config, ranks)), "cpu")
    loader = build_loader(config, data_rank=engine.mesh.data.rank, data_ranks=engine.mesh.data.size)
    found = []
    for step in range(3):
        result = engine.step(loader.step(step), 0.0)
        tokens = float(result.tokens)
        sums = torch.tensor([float(result.loss) * tokens if tokens else 0.0, tokens], dtype=torch.float64)
        if ranks > 1:
            torch.distributed.all_reduce(sums)
        found += [float(sums[0] / sums[1]), float(sums[1]), float(result.grad_norm)]
    return found


def plain(given: dict, folder: Path, dtype: torch.dtype) -> list[float]:
    """The same in plain PyTorch, of the whole batch at once."""
    from megatron.model.stack import build_model

    model = build_model(resolve(given), dtype=dtype).eval()
    loader, found = build_loader(resolve(given), data_rank=0, data_ranks=1), []
    for step in range(3):
        tokens = loader.step(step).tokens.flatten(0, 1)
        logits = model.logits(tokens[:, :-1]).to(dtype)
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weights = torch.from_numpy(wanted(folder, tokens[:, 1:].numpy())).flatten().to(dtype)
        loss = (each * weights).sum() / weights.sum()
        norm = torch.stack([g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()))]).sum().sqrt()
        found += [float(loss.detach()), float(weights.sum()), float(norm)]
    return found


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}, {"context": 2}])
def test_ranks_have_the_weighted_mean(tmp_path: Path, layout: dict):
    """Of all labels of a step, and its gradient: plain PyTorch's in float64, as near as its own fp32 is, times ten."""
    files(tmp_path)
    given = values(tmp_path)
    exact, rounded = (np.array(plain(given, tmp_path, dtype)) for dtype in (torch.float64, torch.float32))
    room = 1e-5 + 10 * np.abs(rounded / exact - 1).max()
    for rank in run(2, losses, {**given, "parallel": layout}, 2):
        assert np.abs(np.array(rank) / exact - 1).max() < room
