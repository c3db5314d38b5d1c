"""The planned memory of a rank equals a rehearsed rank of the real program."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config, resolve
from megatron.plan.candidate import layout_of, on_device
from megatron.plan.devices import Cluster, known_devices
from megatron.plan.memory import memory, states
from megatron.plan.messages.predict import predict
from megatron.plan.prediction import choice_of
from megatron.plan.shapes import Shapes
from megatron.plan.step import StepEstimator
from megatron.rehearsal.command import in_own_process
from tests.training.matrix import merged

# LayerNorm has one fused kernel on every device. RMSNorm has none on CPUs, where a rehearsal finds more.
BASE = {
    "model": {
        "layers": "(attention/moe) x2", "hidden_size": 64, "vocab_size": 96, "norm": {"type": "layernorm"},
        "attention": {"heads": 4}, "moe": {"experts": 4, "top_k": 2, "hidden_size": 96},
    },
    "training": {"steps": 1, "sequence_length": 256, "micro_batch_size": 1, "global_batch_size": 4},
    "precision": {"compute": "bf16"},
    "data": {"synthetic": "copy"},
}  # fmt: skip


def kept(values: dict[str, Any], ranks: int) -> int:
    """Bytes of activations that live at the fullest moment, which is in the backward pass of the last block."""
    seen = in_own_process(resolve(values, ranks=ranks), ranks, 0)
    return sum(each.size for each in seen.allocations if each.place.phase == "forward" and not each.part)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [({"model": {"moe": {"shared_size": 32}}}, 1), ({"parallel": {"tensor": 2, "expert": 2, "sequence": True}}, 4)],
    ids=["shared expert", "tensor and expert parallel"],
)
def test_activations_of_a_block_with_experts(more, ranks):
    values = merged(BASE, more)
    three = merged(values, {"model": {"layers": "(attention/moe) x3"}})
    config = resolve(values, ranks=ranks)
    planned = Shapes(config, ranks).layer(1, choice_of(config)).saved["none"] * config.training.sequence_length
    assert kept(three, ranks) - kept(values, ranks) == pytest.approx(planned, rel=0.02)


DENSE = merged(BASE, {
    "model": {"layers": "(attention/mlp) x4"},
    "training": {"micro_batch_size": 2, "global_batch_size": 8, "steps": 8},
    "zero": {"bucket_size": 2000},
})  # fmt: skip


def planned(values: dict[str, Any], ranks: int, *others: str) -> float:
    """Bytes of tensors by the formulas, but for other parts."""
    config = resolve(values, ranks=ranks)
    at = Cluster(known_devices()[0]["h100"], known_devices()[1]["ib400"], ranks, ranks)
    parts = memory(config, Shapes(config, ranks), choice_of(config), at).parts
    return sum(size for name, size in parts.items() if name not in ("runtime", "fragments", *others))


def rehearsed(values: dict[str, Any], ranks: int) -> tuple[int, int]:
    """Bytes of tensors at the fullest moment, and between steps."""
    seen = in_own_process(resolve(values, ranks=ranks), ranks, 0)
    return seen.peak, seen.kept


@pytest.mark.parametrize("sequence", [False, True])
def test_sums_that_tensor_parallel_ranks_begin(sequence):
    """Selective recomputation keeps the results of products. Of summed products each rank has a whole summand."""
    more = {"parallel": {"tensor": 4, "sequence": sequence},
            "training": {"activation_checkpointing": {"mode": "selective"}}}  # fmt: skip
    values = merged(DENSE, more)
    longer = merged(values, {"model": {"layers": "(attention/mlp) x6"}})
    config = resolve(values, ranks=4)
    tokens = config.training.sequence_length * config.training.micro_batch_size
    planned = 2 * tokens * Shapes(config, 4).layer(1, choice_of(config)).saved["selective"]
    assert kept(longer, 4) - kept(values, 4) == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("columns", [{"columns": 2}, {"tensor": 2, "columns": 2}])
def test_norms_over_columns_keep_their_inputs_only(columns):
    """In their own type of 16 bits. The result is the input of a matrix, which the others share too."""
    ranks = 2 * columns.get("tensor", 1)
    values = merged(DENSE, {"parallel": columns, "model": {"norm": {"type": "rmsnorm"}}})
    longer = merged(values, {"model": {"layers": "(attention/mlp) x6"}})
    config = resolve(values, ranks=ranks)
    tokens = config.training.sequence_length * config.training.micro_batch_size
    planned = 2 * tokens * Shapes(config, ranks).layer(1, choice_of(config)).saved["none"]
    assert kept(longer, ranks) - kept(values, ranks) == pytest.approx(planned, rel=0.03)


def test_what_compressed_gradients_leave_out():
    values = merged(DENSE, {"parallel": {"communication": {"compress": {"data": "int8_block"}}}})
    passing = "buckets", "gradients"  # whose sums are equal, and all else is gone between steps
    more = planned(values, 2, *passing) - planned(DENSE, 2, *passing)
    assert rehearsed(values, 2)[1] - rehearsed(DENSE, 2)[1] == pytest.approx(more, rel=0.02)


def test_a_mask_halves_no_attention():
    small = {"heads": 4, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "value_dim": 8, "index_heads": 2, "index_dim": 8}
    config = resolve(merged(BASE, {"model": {"layers": "attention/mlp dsa/mlp", "dsa": small}}), ranks=1)
    shapes, choice = Shapes(config, 1), choice_of(config)
    assert [shapes.layer(place, choice).attends for place in range(shapes.places)] == [False, True, False, False]


def test_every_second_block_is_recomputed():
    """The others keep what they keep without recomputation. The fullest moment is in the head, which has it all."""
    values = merged(DENSE, {"training": {"activation_checkpointing": {"mode": "full", "every": 2}}})
    config = resolve(values, ranks=1)
    shapes, choice = Shapes(config, 1), choice_of(config)
    modes = [shapes.recomputes(config, choice, place) for place in range(shapes.places)]
    assert modes == ["full", "full", "none", "full", "none", "full"]
    at = Cluster(known_devices()[0]["h100"], known_devices()[1]["ib400"], 1, 1)
    found = memory(config, shapes, choice, at).parts["activations"]
    seen = in_own_process(config, 1, 0)
    assert seen.at.place.layer == "head"
    made = [each for each in seen.allocations if each.place.phase == "forward" and each.place.layer != "head"]
    assert sum(each.size for each in made if not each.part) == pytest.approx(found, rel=0.03)


def sums(config: Config) -> float:
    """Planned seconds of the sums of two tensor parallel ranks on GPUs."""
    at = Cluster(known_devices()[0]["h100"], known_devices()[1]["ib400"], 2, 2)
    return StepEstimator(config, Shapes(config, 2), at).step(config, choice_of(config)).parts["tensor"]


def test_chunks_of_the_loss_are_longer_on_gpus():
    """As if the device's value had been given: here 8192 tokens, and with a vocabulary of 128,256 a quarter of it."""
    long = {"sequence_length": 4096, "micro_batch_size": 4, "global_batch_size": 8}
    for vocabulary, chunk in ((96, 8192), (128_256, 2048)):
        values = merged(DENSE, {"model": {"vocab_size": vocabulary}, "training": long})
        given = merged(values, {"training": {"loss_chunk": chunk}})
        assert planned(values, 2) == planned(given, 2) > planned(merged(given, {"training": {"loss_chunk": 1024}}), 2)
        config, wanted = resolve(merged(values, {"parallel": {"tensor": 2}}), ranks=2), {}
        for gpu, tokens in ((False, 1024), (True, chunk)):
            step = predict(on_device(config, gpu), 2, 0).step
            wanted[gpu] = step.by("layer", "phase")["head", "forward"][0]
            given = merged(values, {"parallel": {"tensor": 2}, "training": {"loss_chunk": tokens}})
            assert step == predict(resolve(given, ranks=2), 2, 0).step
            wanted[tokens] = sums(resolve(given, ranks=2))
        assert wanted[True] < wanted[False]
        assert sums(config) == wanted[chunk] < wanted[1024]


@pytest.mark.slow
def test_stages_of_sequence_length_need_what_the_longest_does():
    values = merged(DENSE, {"training": {"sequence_schedule": [{"until": 4, "sequence_length": 64}]}})
    assert planned(values, 2) == planned(DENSE, 2) and rehearsed(values, 2) == rehearsed(DENSE, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({"training": {"sequence_chunks": 4}}, 2),
        ({"model": {"layers": "attention/mlp recurrent((attention/mlp) x2) attention/mlp",
                    "recurrence": {"mean": 4, "backward": 2}}}, 2),
        ({"parallel": {"context": 2}}, 2),
        ({"parallel": {"context": 4, "context_method": "ring"}}, 4),
        ({"parallel": {"folded": 4}}, 4),
        ({"parallel": {"tensor": 2, "depth": 2}}, 4),
        ({"parallel": {"tensor": 2, "columns": 2}}, 4),
    ],
    ids=["chunks", "recurrent depth", "context", "ring", "folded", "depth", "columns"],
)  # fmt: skip
def test_formulas_are_near_a_rehearsal(more, ranks):
    """Within the 20 % that temporary copies of so small a model take, which the formulas do not count."""
    values = merged(DENSE, more)
    assert planned(values, ranks) == pytest.approx(rehearsed(values, ranks)[0], rel=0.2)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [({"folded": 4}, 4), ({"folded": 4}, 8), ({"tensor": 2, "depth": 2}, 4)],
    ids=["one has each run", "two have each run", "depth"],
)
def test_rows_of_matrices_that_ranks_share(parallel, ranks):
    """Memory of two blocks between steps: weights in bf16, sums of gradients in fp32, and the optimizer's states.

    Nothing of these depends on tokens, so they are few: rings of rows make many calls for each micro-batch.
    """
    few = {"sequence_length": 32, "micro_batch_size": 1, "global_batch_size": ranks // 2}
    expected, found = [], []
    for blocks in (1, 3):
        layers = {"layers": f"(attention/mlp) x{blocks}"}
        values = merged(DENSE, {"model": layers, "training": few, "parallel": parallel})
        config = resolve(values, ranks=ranks)
        shapes, choice = Shapes(config, ranks), choice_of(config)
        weights = shapes.weights(choice, range(shapes.places))
        parts = states(config, layout_of(choice, ranks), weights)
        expected.append(parts["weights"] + 4 * weights.total + parts["states"])
        found.append(rehearsed(values, ranks)[1])
    assert found[1] - found[0] == pytest.approx(expected[1] - expected[0], rel=0.02)
