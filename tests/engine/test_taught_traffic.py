"""Messages of a step that learns from a teacher follow the formulas, to the byte: the teacher's forward pass, its
part of the loss, and the mean divergence."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import resolve
from megatron.parallel.messages.traffic import Tally
from megatron.plan.messages.predict import predict
from tests.engine.test_traffic import account_of
from tests.objectives.teachers import write_teacher
from tests.training.matrix import merged
from tests.workers import run

WORDS = 48
STUDENT = {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": WORDS, "attention": {"heads": 4}}
TEACHERS = {
    "state space": {
        "layers": "attention/mlp mamba2 attention/mlp", "hidden_size": 48, "vocab_size": WORDS,
        "attention": {"heads": 4, "kv_heads": 2}, "mamba2": {"head_dim": 16, "groups": 2, "state_size": 8},
    },
    "experts": {
        "layers": "(attention/moe) x2", "hidden_size": 32, "vocab_size": WORDS, "attention": {"heads": 4},
        "moe": {"experts": 4, "top_k": 2, "hidden_size": 32, "losses": {"balance": 0.01}},
    },
    "recurrent": {
        "layers": "attention/mlp recurrent(attention/mlp) attention/mlp", "hidden_size": 32, "vocab_size": WORDS,
        "attention": {"heads": 4}, "recurrence": {"evaluation": 3},
    },
}  # fmt: skip
TRAINING = {"steps": 4, "sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "loss_chunk": 7}
OWN = {"data": {"synthetic": "copy"}, "tokenizer": {"type": "none"}}
LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"tensor": 2, "sequence": True}, "zero": {"stage": 0}},
    "chunks": {"parallel": {"tensor": 2}, "training": {"sequence_chunks": 2, "loss_chunk": 3}},
    "data": {"zero": {"stage": 2}, "precision": "bf16"},
    "context": {"parallel": {"context": 2}},
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    training = {**TRAINING, "seed": 7, "sequence_length": 8}
    return {
        name: write_teacher(tmp_path_factory.mktemp("teacher"), {"model": model, "training": training, **OWN})
        for name, model in TEACHERS.items()
    }


def taught(values: dict[str, Any], ranks: int) -> list[list]:
    """The account of the second step."""
    import torch

    from megatron.checkpoint import GroupCommunicator
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.engine.parts.teacher import Teacher
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    prepare_deepspeed(torch.device("cpu"))
    config = resolve(values, ranks=ranks)
    mesh = Mesh.build(Layout.of(config, ranks))
    teacher = Teacher.of(config, mesh)
    engine = build_engine(config, mesh, "cpu", teacher=teacher)
    teacher.load(GroupCommunicator())
    return account_of(config, engine, 2)[-1]


@pytest.mark.parametrize(
    ("teacher", "layout"),
    [("state space", "tensor"), ("state space", "sequence"), ("state space", "context"), ("experts", "context"),
     ("experts", "sequence"), ("recurrent", "tensor"), ("state space", "chunks"), ("experts", "data")],
)  # fmt: skip
def test_counted_and_predicted_are_equal(teachers, teacher: str, layout: str):
    objective = {"type": "distillation", "teacher": teachers[teacher], "alpha": 0.7, "temperature": 2.0}
    values = merged({"model": STUDENT, "training": TRAINING, "objective": objective, **OWN}, LAYOUTS[layout])
    config = resolve(values, ranks=2)
    own = [predict(config, 2, rank, weighted=True).at(1) for rank in range(2)]
    assert [each.rows() for each in own] == run(2, taught, values, 2)
    alone = resolve({name: each for name, each in values.items() if name != "objective"}, ranks=2)
    plain = predict(alone, 2, 0, weighted=True).at(1)
    assert total(own[0]) > total(plain), "the teacher sends something"


def total(tally: Tally) -> int:
    return sum(size for *_, size in tally)
