"""GPT-NeoX keys that are refused unless they have a value that changes nothing, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused.

    Attributes:
        inert: values that change nothing. null, empty ones and dictionaries with enabled: false never do.
        rule: what holds here.
        fix: the advice.
    """

    inert: tuple[Any, ...]
    rule: str
    fix: str

    def accepts(self, value: Any) -> bool:
        """Whether `value` changes nothing."""
        if value is None or value in ([], {}, ""):
            return True
        if isinstance(value, dict):
            return value.get("enabled") is False
        if isinstance(value, str):
            value = value.lower()
        return any(value == inert and isinstance(value, bool) == isinstance(inert, bool) for inert in self.inert)


def _later(what: str, fix: str, *inert: Any) -> Refusal:
    return Refusal(inert, f"not available yet: {what}", fix)


NO_TUNER = Refusal((), "there is no autotuner", "remove it: deepy config layers shows what each layer costs")
OFF = "set it to false or remove it"
OBSOLETE = "removed from DeepSpeed"

REFUSED: dict[str, Refusal] = {
    "deepspeed": Refusal((True,), "GPT-NeoX refuses it too unless it is true", "remove it"),
    "data_impl": Refusal(
        ("mmap", "infer"), "token files are .bin/.idx pairs of the mmap kind", "tokenize the text again"
    ),
    "eod_mask_loss": Refusal(
        (False,),
        "GPT-NeoX's eod_mask_loss masks the token after an end of document, which is not available",
        "set it to false, or take data.mask_loss_at_eod, which masks the end-of-document token itself",
    ),
    "curriculum_learning": Refusal((), f"{OBSOLETE}: the curriculum over sequence lengths", "remove it"),
    "data_efficiency": _later("DeepSpeed's data efficiency library", "remove it"),
    "opt_pos_emb_offset": _later("learned positions with an offset", "set it to 0", 0),
    "use_qk_layernorm": Refusal(
        (False,),
        "GPT-NeoX normalises over all heads of a tensor parallel rank with one weight for queries and keys, "
        "so the model depends on the layout",
        "take the native model.attention.qk_norm: head (Qwen3) or full (OLMo-2)",
    ),
    "soft_prompt_tuning": Refusal((), "soft prompts are not available (GPT-NeoX fails with them too)", "remove it"),
    "sparse_attention": Refusal(
        (), "block-sparse attention is not available", "remove it: sliding_window_width is available"
    ),
    "save_base_shapes": Refusal(
        (False,), "shapes of a base model are not needed: model.parametrization.base_width says the same", OFF
    ),
    "coord_check": Refusal((False,), "a coordinate check is a command, not a way of training", OFF),
    "te_fp8_mha": Refusal((False,), "FP8 is not available (GPT-NeoX fails with it too)", OFF),
    "elasticity": Refusal((), f"{OBSOLETE}: elasticity", "remove it: a run resumes on any number of ranks"),
    "compression_training": Refusal((), f"{OBSOLETE}: compression", "remove it"),
    "autotuning": NO_TUNER,
    "autotuning_run": NO_TUNER,
    "no_load_optim": Refusal(
        (False,),
        "GPT-NeoX does not train with it: it takes an optimizer with learning rate 0",
        "to start from only the weights set finetune: true",
    ),
    "use_checkpoint_lr_scheduler": Refusal(
        (False,),
        "the learning rate is a function of only this configuration",
        "copy the schedule's keys from the checkpoint",
    ),
}

# Names that GPT-NeoX once had, or that its files have although it knows no such key. The first ones are still read.
RETIRED_READ: dict[str, Any] = {"gas": None, "mlp_type": None, "save_interval": None}
RETIRED: dict[str, str] = {
    "warmup_iters": "set warmup to the fraction warmup_iters / lr_decay_iters, or schedule.warmup_steps natively",
    "decay_lr_to": "set min_lr to the learning rate itself",
    "attention_type": "remove it: num_kv_heads says how many key/value heads there are",
    "autotuning_config": "remove it: deepy config layers shows what each layer costs",
    "zero_allow_untested_optimizer": "put it into deepspeed_extra_args",
    "train_data_path": "take train_data_paths, a list",
    "launcher_args": "remove it: environment variables go to launch.environment natively",
    "context_parallel_size": "set parallel.context natively",
}
