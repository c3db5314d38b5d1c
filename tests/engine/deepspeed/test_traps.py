"""Traps of DeepSpeed 0.19.8 and torch 2.13 that would silently go wrong, each next to its remedy here.

A test that fails after an upgrade says that a trap is gone or has changed: then check what is built around it. Traps
that the configuration refuses are in tests/config/broken. Exact gradient norms and losses on all layouts, which need
several of the corrections below, are in test_layouts_*.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from megatron.config import resolve
from megatron.config.rules.deepspeed import KNOWN
from megatron.engine.deepspeed.options import deepspeed_options
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.training import runs
from tests.training.matrix import merged, read
from tests.workers import run


def values_of(architecture: str, **sections: dict[str, Any]) -> dict[str, Any]:
    matrix = read()
    own = {name: value for name, value in matrix["architectures"][architecture].items() if name != "about"}
    return merged(matrix["common"], own, {"optimizer": {"type": "sgd", "lr": 0.5, "gradient_clipping": 0.3}}, sections)


# Names


def test_names_that_deepspeed_knows_are_in_its_source():
    """It ignores a mistyped option without a word. rules/deepspeed.py has the names that it reads."""
    import deepspeed

    source = "".join(path.read_text(errors="ignore") for path in Path(deepspeed.__file__).parent.rglob("*.py"))
    literals = set(re.findall(r"""["']([a-z_0-9]+)["']""", source))
    assert KNOWN <= literals, KNOWN - literals
    config = resolve(values_of("llama"))
    assert deepspeed_options(config, Layout.of(config, 1)).keys() <= KNOWN
    assert "coms_logger" not in literals


# Clipping


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_clipping_is_always_written(stage, limit):
    """DeepSpeed clips at 1.0 by default, also in runs that do not clip."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    assert GRADIENT_CLIPPING_DEFAULT == 1.0
    config = resolve(values_of("neox", zero={"stage": stage}, optimizer={"gradient_clipping": limit}), ranks=2)
    assert deepspeed_options(config, Layout(data=2, zero_stage=stage))["gradient_clipping"] == (limit if stage else 0.0)


def clipped_by_deepspeed() -> float:
    """The norm of the whole gradient after DeepSpeed has clipped it at 0.01, at ZeRO 0 over two stages."""
    config = resolve(
        values_of(
            "llama",
            zero={"stage": 0},
            parallel={"pipeline": 2},
            training={"micro_batch_size": 2},
            optimizer={"gradient_clipping": 0.0},
        ),
        ranks=2,
    )
    theirs = config.model_copy(update={"deepspeed": {"gradient_clipping": 0.01}})  # the configuration refuses this
    return runs.steps(config, runs.build(theirs, 2), 0, 1)[1][0]


def test_zero_0_does_not_clip_by_the_norm_of_all_stages():
    """The whole gradient should end with norm 0.01, and is larger. Hence `engine.clipping`."""
    for norm in run(2, clipped_by_deepspeed):
        assert 0.0102 < norm < 0.1


def two_stages_of_unequal_groups() -> list[float]:
    """Norms of a step with ZeRO 1, where only the first stage has a group of the embedding."""
    values = values_of(
        "llama",
        zero={"stage": 1, "bucket_size": 10**6},
        parallel={"pipeline": 2},
        training={"micro_batch_size": 2},
        optimizer={"groups": {"embedding": {"weight_decay": 0.3}}},
    )
    config, engine = runs.start(values, 4)
    return [float(engine.mesh.pipeline.rank), len(engine.optimizer.param_groups), *runs.steps(config, engine, 0, 1)[1]]


def test_stages_may_have_different_groups():
    """DeepSpeed's ZeRO 1 adds up one group after the other over all stages, and hangs. Hence
    `training.expert_groups`."""
    expected = runs.plainly(values_of("llama"))
    found = run(4, two_stages_of_unequal_groups)
    assert {(stage, groups) for stage, groups, _ in found} == {(0.0, 3), (1.0, 2)}
    assert [norm for *_, norm in found] == pytest.approx([expected.norms[0]] * 4, rel=1e-5)


def losses_that_deepspeed_prints() -> list[float]:
    values = values_of("llama", parallel={"pipeline": 2}, deepspeed={"steps_per_print": 1})
    return runs.steps(*runs.start(values, 2), 0, 1)[0]


def test_a_pipeline_prints_losses_where_it_is_asked():
    """DeepSpeed's pipeline formats the mean loss, which the engine otherwise does not compute."""
    assert run(2, losses_that_deepspeed_prints) == [pytest.approx(runs.plainly(values_of("llama")).losses[:1])] * 2


# Types in which gradients are summed


def wrapper(accumulate: bool) -> tuple[str, str]:
    """DeepSpeed's optimizer for bf16 at ZeRO 1, and the type of its sums, with our options or without types."""
    from megatron.engine.deepspeed.process import prepare_deepspeed

    prepare_deepspeed(torch.device("cpu"))
    import deepspeed

    options = deepspeed_options(resolve(values_of("neox", precision={"compute": "bf16"})), Layout(zero_stage=1))
    options |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    if not accumulate:
        del options["data_types"]
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=options, dist_init_required=False)[0]
    return type(engine.optimizer).__name__, str(engine.get_data_types()[1])


def test_bf16_gradients_are_summed_in_fp32():
    assert run(1, wrapper, True) == [("BF16_Optimizer", "torch.float32")]
    assert run(1, wrapper, False) == [("DeepSpeedZeroOptimizer", "torch.bfloat16")]


def zero_0_in_bf16() -> str:
    from megatron.engine.deepspeed.process import prepare_deepspeed

    prepare_deepspeed(torch.device("cpu"))
    import deepspeed

    options = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    model = nn.Linear(4, 4).bfloat16()
    try:
        deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters()), config=options, dist_init_required=False
        )
    except NotImplementedError as error:
        return str(error)
    return "works"


def test_no_fp32_sums_at_zero_0():
    """Why the configuration asks for ZeRO 1 with bf16, on one rank too."""
    assert run(1, zero_0_in_bf16)[0] != "works"


def initialised_type() -> tuple[bool, str, str]:
    """Whether DeepSpeed finds fp16 here, and the types of a weight that must be fp32: by its own option, and by our
    options."""
    from megatron.engine.deepspeed.process import prepare_deepspeed

    prepare_deepspeed(torch.device("cpu"))
    import deepspeed

    with deepspeed.zero.Init(dtype=torch.float32):
        told = nn.Linear(4, 4).weight.dtype
    options = deepspeed_options(resolve(values_of("neox", zero={"stage": 3})), Layout(zero_stage=3))
    options |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    with deepspeed.zero.Init(config_dict_or_path=options):
        configured = nn.Linear(4, 4).weight.dtype
    del nn.Module.__init_subclass__  # which zero.Init leaves, and with which later tests could make no generic class
    return deepspeed.get_accelerator().is_fp16_supported(), str(told), str(configured)


def test_zero_init_rounds_to_bf16_what_it_is_told_to_keep_in_fp32():
    """Its `dtype` is replaced on devices without fp16 (most CPUs), so that fp32 runs would be in bf16. The options are
    respected everywhere.
    """
    ((has_fp16, told, configured),) = run(1, initialised_type)
    assert told == ("torch.float32" if has_fp16 else "torch.bfloat16")
    assert configured == "torch.float32"


# The pipeline


class Last(nn.Module):
    """A head whose loss is computed inside forward, or leaves it to DeepSpeed's loss_fn."""

    def __init__(self, inside: bool):
        super().__init__()
        self.inside = inside
        self.weight = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.ones(8))

    def loss(self, x, _labels=None):
        return (x * self.weight).float().square().mean()

    def forward(self, x):
        x = x + self.bias
        return self.loss(x) if self.inside else x


def small_pipeline(inside: bool, stage: int):
    """DeepSpeed's engine for a linear layer on one rank and a `Last` on another."""
    from megatron.engine.deepspeed.process import prepare_deepspeed

    prepare_deepspeed(torch.device("cpu"))
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    last = Last(inside)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    module = PipelineModule(
        [nn.Linear(8, 8), last], num_stages=2, loss_fn=None if inside else last.loss, partition_method="uniform"
    )
    options = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return last, deepspeed.initialize(model=module, optimizer=optimizer, config=options, dist_init_required=False)[0]


def head_moves(inside: bool) -> tuple[bool, bool]:
    """Whether a step changes the head's weight (used in the loss) and its bias (used in forward)."""
    last, engine = small_pipeline(inside, 1)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    engine.train_batch(iter([(x, x), (x, x)]))
    return tuple(bool((p.detach().float() - 1).abs().max() > 0) for p in (last.weight, last.bias))


def test_what_runs_after_the_last_layer_gets_no_bf16_gradient():
    """DeepSpeed clears gradients when its backward pass reaches the module's output. So our head computes the loss."""
    assert run(2, head_moves, False)[1] == (False, True)
    assert run(2, head_moves, True)[1] == (True, True)


def pipeline_at_zero(stage: int) -> str:
    try:
        small_pipeline(True, stage)
    except AssertionError as error:
        return str(error)
    return "works"


@pytest.mark.parametrize("stage", [2, 3])
def test_pipelines_refuse_zero_2_and_3(stage):
    """Why the configuration refuses both together."""
    for answer in run(2, pipeline_at_zero, stage):
        assert "incompatible with pipeline parallelism" in answer


def test_stages_exchange_whole_tensors():
    """Partitioned ones carry a single tensor with a gradient, and that is the default."""
    pipeline = deepspeed_options(resolve(values_of("neox")), Layout())["pipeline"]
    assert pipeline["pipe_partitioned"] is False and pipeline["grad_partitioned"] is False


def groups_after_tied_stages() -> tuple[int, int]:
    """How many groups this process is in after a pipeline with tied ends. Then groups of every axis are made again."""
    import torch.distributed.distributed_c10d as c10d

    before = len(c10d._world.pg_names)
    runs.start(values_of("qwen3", parallel={"pipeline": 4}), 4)
    count = len(c10d._world.pg_names) - before
    mesh = Mesh.build(Layout(pipeline=2, data=2))
    ones = torch.ones(1)
    for axis in (mesh.pipeline, mesh.data):
        torch.distributed.all_reduce(ones, group=axis.group)
    return count, int(ones)


def test_groups_can_be_made_after_tied_stages():
    """torch names a group that only its members know of by how many groups they are in: all must be in equally many."""
    counts = run(4, groups_after_tied_stages)
    assert len({count for count, _ in counts}) == 1 and {total for _, total in counts} == {4}


# Extensions


def extension() -> tuple[bool, bool, bool]:
    import deepspeed.ops
    from deepspeed.comm.torch import build_shm_op

    known = "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    from megatron.engine.deepspeed.process import prepare_deepspeed

    prepare_deepspeed(torch.device("cpu"))
    return known, deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"], build_shm_op() is None


def test_no_extension_is_compiled():
    """It would take most of a minute in init_distributed, and its lock file hangs later runs if a rank is killed."""
    assert run(1, extension) == [(True, False, True)]


# Recomputation


def selective_at_zero_3() -> list[float]:
    """Losses of two steps."""
    config = resolve(values_of("neox", zero={"stage": 3, "persistent_size": 0}))
    mode = config.training.activation_checkpointing.model_copy(update={"mode": "selective"})
    training = config.training.model_copy(update={"activation_checkpointing": mode})  # the configuration refuses this
    return runs.steps(config, runs.build(config.model_copy(update={"training": training}), 1), 0, 2)[0]


def test_selective_recomputation_is_wrong_at_zero_3():
    """torch counts operations, and DeepSpeed's gathering adds some: it takes one result for another."""
    first, second = run(1, selective_at_zero_3)[0]
    plain = run(1, plain_losses)[0]
    assert first == pytest.approx(plain[0], rel=1e-5) and second != pytest.approx(plain[1], rel=1e-4)


def with_layers_not_yet_imported(values: dict[str, Any]) -> list[float]:
    """As in a process of its own, which a run's ranks are, and then a class of modules that is imported later."""
    import sys

    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name == "megatron.kinds.rwkv.rwkv5"}
    try:
        config, engine = runs.start(values, 2)
        losses = runs.steps(config, engine, 0, 1)[0]
    finally:
        sys.modules.update(before)
    Option = TypeVar("Option")

    class Later(nn.Module, Generic[Option]):
        pass

    class OfNumbers(Later[int]):
        pass

    return losses


def test_zero_3_does_not_change_how_classes_are_made():
    """RWKV-6's class is made of a generic one."""
    assert run(2, with_layers_not_yet_imported, values_of("rwkv6", zero={"stage": 3}))[0][0] > 0


def plain_losses() -> list[float]:
    config, engine = runs.start(values_of("neox"), 1)
    return runs.steps(config, engine, 0, 2)[0]


def without_reductions(values: dict[str, Any], ranks: int) -> tuple[list[float], list[float]]:
    config, engine = runs.start(values, ranks)

    def refuse(*_args, **_options):
        raise AssertionError("gradients of one data parallel rank were copied into buckets to be reduced")

    engine.deepspeed.buffered_allreduce_fallback = refuse
    return runs.steps(config, engine, 0, 2)


@pytest.mark.parametrize(
    "layout", [{}, {"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}], ids=["one", "tp2", "pp2"]
)
def test_one_data_rank_reduces_nothing(layout):
    """DeepSpeed flattens all gradients, reduces them over a group of one, and copies them back."""
    ranks = 2 if layout else 1
    values = values_of("llama", **layout, zero={"stage": 0})
    losses, norms = run(ranks, without_reductions, values, ranks)[0]
    expected = run(1, without_reductions, values_of("llama", zero={"stage": 0}), 1)[0]
    assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(expected[1], rel=1e-5)


# Steps that do not end


def failed_and_again(values: dict[str, Any], ranks: int) -> list[str]:
    """Errors of a step that fails in its backward pass, or is dropped by all stages, and of the step after it."""
    config, engine = runs.start(values, ranks)
    runs.steps(config, engine, 0, 1)
    errors = []

    def fail(*_: Any) -> None:
        raise MemoryError("no memory is left")

    first = next(engine.module.parameters())
    hook = None if ranks > 1 else first.register_hook(fail)
    batch = runs.local_batch(config, 1, engine.mesh.data.rank, engine.mesh.data.size)
    for look in (None if hook else fail, None):
        try:
            engine.step(batch, 0.1, look)
        except (MemoryError, RuntimeError) as error:
            errors.append(str(error))
        if hook is not None:
            hook.remove()
    return errors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (1, 2), (1, 3), (2, 1)])
def test_an_engine_with_gradients_of_a_failed_step_makes_no_other(ranks, stage, precision):
    """They would be added to the next step's. DeepSpeed sees that at ZeRO 2 only."""
    values = values_of("llama", parallel={"pipeline": ranks}, zero={"stage": stage}, precision={"compute": precision})
    for errors in run(ranks, failed_and_again, values, ranks):
        assert errors[0] == "no memory is left" and "build the engine again" in errors[1]
