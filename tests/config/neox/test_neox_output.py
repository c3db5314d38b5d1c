"""GPT-NeoX's keys of layouts, launching, checkpoints, evaluation and logs."""

from __future__ import annotations

import pytest

from tests.config.neox.neox_cases import at, flat, no_effect, noted, problem_of

# --- layout ---


@pytest.mark.parametrize(
    "changes, stage, word",
    [
        ({}, 0, None),
        ({"fp16": {"enabled": True}}, 1, "sums fp16"),
        ({"precision": "bfloat16", "zero_optimization": {"stage": 0}}, 1, "sums bf16"),
        ({"pipe_parallel_size": 2}, 1, "own gradients"),
        ({"pipe_parallel_size": 2, "gradient_clipping": 0}, 0, None),
        ({"zero_optimization": {"stage": 3}}, 3, None),
    ],
)
def test_zero_stage(changes, stage, word):
    translation = flat(**changes)
    assert translation.problems == []
    assert at(translation, "zero.stage") == stage
    assert noted(translation, "zero.stage: 1", word or "") == (word is not None)


def test_zero_options():
    options = {
        "stage": 3,
        "reduce_bucket_size": 1e6,
        "allgather_bucket_size": 2e6,
        "overlap_comm": True,
        "reduce_scatter": False,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 5,
        "stage3_max_live_parameters": 7,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "cpu"},
    }
    translation = flat(zero_optimization=options)
    assert translation.problems == []
    assert translation.values["zero"] == {
        "stage": 3,
        "bucket_size": 1_000_000,
        "overlap": True,
        "prefetch_size": 5,
        "offload_optimizer": {"device": "nvme", "path": "/x", "pin_memory": True},
        "offload_parameters": {"device": "cpu"},
    }
    assert translation.values["deepspeed"] == {
        "zero_optimization": {
            "stage3_max_live_parameters": 7,
            "reduce_scatter": False,
            "offload_optimizer": {"buffer_count": 4},
        }
    }
    assert noted(translation, "allgather_bucket_size")
    assert at(flat(zero_optimization={"stage": 1, "cpu_offload": True}), "zero.offload_optimizer.device") == "cpu"


@pytest.mark.parametrize(
    "options", [{"stage": 4}, {"stgae": 1}, {"offload_param": {"device": "disk"}}, {"reduce_bucket_size": "big"}]
)
def test_zero_options_that_cannot_be_had(options):
    assert problem_of(flat(zero_optimization=options), "zero_optimization")


@pytest.mark.parametrize(
    "stages, method, native",
    [
        (0, "parameters", None),
        (1, "uniform", None),
        (2, None, "uniform"),
        (2, "parameters", "parameters"),
        (2, "type:mlp", "uniform"),
    ],
)
def test_pipeline(stages, method, native):
    parallel = flat(pipe_parallel_size=stages, pipe_partition_method=method, gradient_clipping=0).values["parallel"]
    assert parallel["pipeline"] == max(1, stages)
    assert parallel.get("pipeline_split") == native


def test_recomputation():
    assert flat(checkpoint_num_layers=4).values["training"]["activation_checkpointing"] == {"mode": "none"}
    translation = flat(checkpoint_activations=True, checkpoint_num_layers=4)
    assert translation.values["training"]["activation_checkpointing"] == {"mode": "full", "every": 1}
    assert noted(translation, "chunks of 4")


def test_a_hostfile_that_is_not_there_means_this_machine():
    """local_setup.yml names /mock_path: GPT-NeoX warns and uses the local devices."""
    translation = flat(launcher="pdsh", hostfile="/mock_path")
    assert "launch" not in translation.values and noted(translation, "no file /mock_path")


def test_launcher_counts_with_several_hosts_only(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=4\n")
    assert "launch" not in flat(launcher="slurm", deepspeed_slurm=True).values
    launch = flat(
        launcher="mvapich", hostfile=str(hosts), include="a@b", num_gpus=4, master_addr="n1", master_port=3
    ).values["launch"]
    assert launch == {
        "runner": "mpich",
        "hostfile": str(hosts),
        "include": "a@b",
        "ranks": 4,
        "master_address": "n1",
        "master_port": 3,
    }
    assert problem_of(flat(num_nodes=2, hostfile=str(hosts)), "num_nodes")


def test_deepspeed_gets_what_is_raw():
    extra = {"comms_logger": {"enabled": True}, "zero_allow_untested_optimizer": True, "gather_output": 3}
    translation = flat(deepspeed_extra_args=extra, flops_profiler={"enabled": True})
    assert translation.problems == []
    assert translation.values["deepspeed"] == {"gather_output": 3, "flops_profiler": {"enabled": True}}
    assert noted(translation, "zero_allow_untested_optimizer")
    assert problem_of(flat(deepspeed_extra_args=extra, comms_logger={"enabled": False}), "deepspeed_extra_args")


def test_the_logger_of_communication_is_ours():
    """DeepSpeed's waits after every operation."""
    raw = {"enabled": True, "verbose": True, "prof_all": True}
    for translation in (flat(comms_logger=raw), flat(deepspeed_extra_args={"comms_logger": raw})):
        assert translation.problems == [] and "deepspeed" not in translation.values
        assert translation.values["logging"]["communication"] == "counts"
        assert noted(translation, "logging.communication")
    assert "communication" not in flat(comms_logger={"enabled": False}).values.get("logging", {})


# --- output ---


@pytest.mark.parametrize(
    "factor, scale, extra, every, steps",
    [
        (10, "linear", None, 10, None),
        (10.0, None, [0, 1, 2], 10, [0, 1, 2]),
        (2, "log", None, None, [1, 2, 4, 8, 16, 32, 64]),
        (1.5, "log", [0], None, [0, 1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86]),
        (None, None, [5], None, [5]),
    ],
)
def test_when_checkpoints_are_saved(factor, scale, extra, every, steps):
    checkpoint = flat(checkpoint_factor=factor, checkpoint_scale=scale, extra_save_iters=extra).values["checkpoint"]
    assert checkpoint.get("every") == every
    assert checkpoint.get("steps") == steps
    assert checkpoint["at_end"] is True


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"checkpoint_factor": 2.5}, "checkpoint_factor"),
        ({"checkpoint_factor": 1, "checkpoint_scale": "log"}, "checkpoint_factor"),
        ({"save": "a"}, "save"),
        ({"save_interval": 5, "checkpoint_factor": 5}, "save_interval"),
        ({"extra_save_iters": [-1]}, "extra_save_iters"),
    ],
)
def test_checkpoints_that_cannot_be_saved(changes, key):
    assert problem_of(flat(**changes), key)


def test_old_name_of_checkpoint_factor():
    assert at(flat(save_interval=50), "checkpoint.every") == 50


@pytest.mark.parametrize(
    "save, load, finetune, resume, weights",
    [
        ("a", None, None, "auto", None),
        ("a/", "a", None, "auto", None),
        ("a", "b", None, "b", None),
        (None, "b", None, "b", None),
        ("a", "b", True, "auto", "b"),
        ("a", "a", True, "none", "a"),
    ],
)
def test_where_a_run_starts_from(save, load, finetune, resume, weights):
    translation = flat(save=save, load=load, finetune=finetune, checkpoint_factor=10)
    checkpoint = translation.values["checkpoint"]
    assert (checkpoint["resume"], checkpoint.get("initialize_from")) == (resume, weights)
    assert noted(translation, "a missing checkpoint stops the run") == (resume == "b")


def test_evaluation():
    assert flat(eval_interval=7, eval_iters=3).values["evaluation"] == {"at_end": True, "every": 7, "batches": 3}
    assert flat(eval_iters=0).values["evaluation"] == {"at_end": False}  # 0 batches would read everything here


def test_tasks_are_those_of_eval_and_not_of_training():
    translation = flat(eval_tasks=["piqa", "lambada"])
    assert at(translation, "evaluation.tasks") == [{"name": "piqa", "every": 0}, {"name": "lambada", "every": 0}]
    assert noted(translation, "evaluation.tasks", "not by training")
    assert "tasks" not in flat(eval_tasks=[]).values["evaluation"]
    assert problem_of(flat(eval_tasks="piqa"), "eval_tasks") and problem_of(flat(eval_tasks=[3]), "eval_tasks")
    listed = no_effect(flat(char_level_ppl=True, eval_results_prefix="x"))
    assert "bits_per_byte" in listed and "--output" in listed


def test_wandb():
    keys = {"wandb_group": "g", "wandb_team": "t", "wandb_run_name": "r", "wandb_host": "https://w.example"}
    values = flat(use_wandb=True, **keys).values
    assert values["logging"]["wandb"] == {"mode": "online", "project": "neox", "group": "g", "entity": "t"}
    assert values["run"] == {"name": "r"}
    assert values["launch"] == {"environment": {"WANDB_BASE_URL": "https://w.example"}}
    off = flat(wandb_group="g")
    assert off.values["logging"]["wandb"] == {"mode": "disabled"}
    assert "wandb_group (use_wandb is not true)" in no_effect(off)


def test_profiles():
    assert flat(profile=True).values["logging"]["profile"] == {"start": 10, "steps": 2, "memory": False}
    assert flat(memory_profiling=True, profile_step_start=3, profile_step_stop=9).values["logging"]["profile"] == {
        "start": 3,
        "steps": 6,
        "memory": True,
    }
    assert problem_of(flat(profile=True, profile_step_stop=10), "profile_step_stop")


def test_other_outputs():
    translation = flat(
        tensorboard_dir="tb",
        log_interval=5,
        peak_theoretical_tflops=312,
        keep_last_n_checkpoints=4,
        s3_path="bucket/x",
        exit_interval=50,
    )
    assert at(translation, "logging.tensorboard") is True
    assert (at(translation, "logging.every"), at(translation, "logging.peak_tflops")) == (5, 312.0)
    assert at(translation, "checkpoint.keep_last") == 4
    assert at(translation, "checkpoint.levels") == [
        {"place": "store", "url": "s3://bucket/x", "every": "auto", "keep": "all"}
    ]
    assert at(translation, "training.stop_at_step") == 50
