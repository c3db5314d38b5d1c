"""Keys that follow from other keys: one small function each, with its formula in words.

A function reads resolved values through a `View` and returns the value, or None where the key has no meaning or
what it needs is not known (no tokenizer, an unknown number of ranks).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from .catalog import ANY, Path, parse_path
from .origins import Origin
from .pattern import PatternError, parse
from .tokenizer_size import SizeUnknown, tokenizer_size
from .tree import expand, get, put


@dataclass
class View:
    """The values so far, and what is known beside them.

    Attributes:
        values: the nested values of the whole configuration.
        name: the stem of the first configuration file.
        ranks: processes of the whole run, if known.
    """

    values: dict[str, Any]
    name: str = "run"
    ranks: int | None = None

    def __getitem__(self, key: str) -> Any:
        return get(self.values, parse_path(key), None)

    @property
    def data_ranks(self) -> int | None:
        """The data parallel size, if the number of ranks is known and can be cut."""
        inner = self["parallel.tensor"] * self["parallel.pipeline"] * self["parallel.context"]
        return self.ranks // inner if self.ranks and self.ranks % inner == 0 else None

    def uses(self, kind: str) -> bool:
        """Whether the layer pattern has a layer of this kind."""
        return any(each.name == kind for block in self.blocks for each in block.kinds)

    @property
    def blocks(self) -> list:
        """The blocks of the pattern; none if it cannot be read (a rule reports that)."""
        try:
            return parse(self["model.layers"])
        except PatternError:
            return []


@dataclass(frozen=True)
class Derivation:
    """How a key is filled in. A `*` in `key` stands for each member; `function` then gets its path too."""

    key: str
    keys: tuple[str, ...]
    formula: str
    function: Callable[..., Any]


def run_name(at: View) -> str:
    return at.name


def run_dir(at: View) -> str:
    return f"runs/{at['run.name']}"


def checkpoint_dir(at: View) -> str:
    return f"{at['run.dir']}/checkpoints"


def data_cache(at: View) -> str:
    return f"{at['run.dir']}/cache"


def data_seed(at: View) -> int:
    return at["training.seed"]


def source_name(at: View, source: Path) -> str:
    last = PurePath(get(at.values, (*source[:-1], "path"))).name
    return last[:-4] if last.endswith((".bin", ".idx")) else last


def expert_tensor(at: View) -> int | None:
    return at["parallel.tensor"]


def kv_heads(at: View) -> int | None:
    return at["model.attention.heads"]


def head_dim(at: View) -> int | None:
    heads = at["model.attention.heads"]
    return at["model.hidden_size"] // heads or None if heads else None


def attention_scale(at: View) -> float | None:
    channels = at["model.attention.head_dim"]
    return channels**-0.5 if channels else None


def yarn_attention_factor(at: View, section: str = "attention") -> float | None:
    scaling = at[f"model.{section}.rotary.scaling"]
    return 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0 if scaling["type"] == "yarn" else None


def shared_kv_heads(at: View) -> int | None:
    return at["model.shared_attention.heads"]


def shared_head_dim(at: View) -> int | None:
    heads = at["model.shared_attention.heads"]
    return 2 * at["model.hidden_size"] // heads or None if heads else None


def shared_attention_scale(at: View) -> float | None:
    channels = at["model.shared_attention.head_dim"]
    return (channels / 2) ** -0.5 if channels else None


def shared_yarn_factor(at: View) -> float | None:
    return yarn_attention_factor(at, "shared_attention")


def shared_mlp_width(at: View) -> int | None:
    return 4 * at["model.hidden_size"] if at.uses("shared_attention") else None


def mamba_rank(at: View) -> int | None:
    return -(-at["model.hidden_size"] // 16) if at.uses("mamba") else None


def rwkv7_rank(at: View, factor: float) -> int | None:
    return max(32, 32 * round(factor * at["model.hidden_size"] ** 0.5 / 32)) if at.uses("rwkv7") else None


def channel_mix_width(at: View, kind: str, factor: float, multiple: int) -> int | None:
    return max(int(factor * at["model.hidden_size"]) // multiple, 1) * multiple if at.uses(kind) else None


def delta_key_heads(at: View) -> int | None:
    return at["model.gated_delta.heads"]


def delta_key_dim(at: View) -> int | None:
    heads = at["model.gated_delta.key_heads"]
    return 3 * at["model.hidden_size"] // (4 * heads) or None if heads else None


def delta_value_dim(at: View) -> int | None:
    channels = at["model.gated_delta.key_dim"]
    return 2 * channels if channels else None


def delta_norm_epsilon(at: View) -> float | None:
    return at["model.norm.epsilon"] if at.uses("gated_delta") else None


def cca_kv_heads(at: View) -> int | None:
    return at["model.cca.heads"]


def cca_head_dim(at: View) -> int | None:
    heads = at["model.cca.heads"]
    return at["model.hidden_size"] // (2 * heads) or None if heads else None


def cca_attention_factor(at: View) -> float | None:
    scaling = at["model.cca.rotary.scaling"]
    return 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0 if scaling["type"] == "yarn" else None


def mlp_hidden_size(at: View) -> int | None:
    if not at.uses("mlp"):
        return None
    width = at["model.hidden_size"]
    return -(-8 * width // (3 * 256)) * 256 if at["model.mlp.gated"] else 4 * width


def moe_hidden_size(at: View) -> int | None:
    if not at.uses("moe"):
        return None
    width = at["model.hidden_size"]
    return -(-8 * width // (3 * 256)) * 256 if at["model.moe.gated"] else 4 * width


def moe_top_groups(at: View) -> int:
    return at["model.moe.router.groups"]


def max_positions(at: View) -> int | None:
    return at["training.sequence_length"] if at["model.embedding.position"] == "learned" else None


def head_init(at: View) -> str:
    return at["model.init.embedding"]


def head_norm(at: View) -> str:
    return at["model.norm.type"]


def init_layers(at: View) -> int | None:
    return len(at.blocks) or None


def vocab_size(at: View) -> int | None:
    try:
        size = tokenizer_size(at["tokenizer"])
    except SizeUnknown:
        return None
    multiple = at["model.vocab_multiple"]
    return -(-size // multiple) * multiple


def accumulation(at: View) -> int | None:
    total, ranks = at["training.global_batch_size"], at.data_ranks
    if total is None:
        return 1
    per_pass = at["training.micro_batch_size"] * ranks if ranks else None
    return total // per_pass if per_pass and total % per_pass == 0 else None


def global_batch_size(at: View) -> int | None:
    if at.data_ranks is None or at["training.accumulation"] is None:
        return None
    return at["training.micro_batch_size"] * at["training.accumulation"] * at.data_ranks


def group_weight_decay(at: View, _: Path) -> float:
    return at["optimizer.weight_decay"]


def schedule_steps(at: View) -> int:
    return max(at["training.steps"], 1)


def decay_steps(at: View) -> int | None:
    return max(at["schedule.steps"] // 10, 1) if at["schedule.type"] in ("wsd", "infinite") else None


_SIZE, _MICRO = "training.global_batch_size", "training.micro_batch_size"

# In the order of their dependencies.
DERIVATIONS = (
    Derivation("run.name", (), "the first configuration file's name", run_name),
    Derivation("run.dir", ("run.name",), "runs/<run.name>", run_dir),
    Derivation("checkpoint.dir", ("run.dir",), "<run.dir>/checkpoints", checkpoint_dir),
    Derivation("data.cache", ("run.dir",), "<run.dir>/cache", data_cache),
    Derivation("data.seed", ("training.seed",), "training.seed", data_seed),
    Derivation("data.train.*.name", ("data.train.*.path",), "the last part of path", source_name),
    Derivation("data.validation.*.*.name", ("data.validation.*.*.path",), "the last part of path", source_name),
    Derivation("data.test.*.*.name", ("data.test.*.*.path",), "the last part of path", source_name),
    Derivation("data.phases.*.sources.*.name", ("data.phases.*.sources.*.path",), "the last part of path", source_name),
    Derivation("model.attention.kv_heads", ("model.attention.heads",), "model.attention.heads", kv_heads),
    Derivation(
        "model.attention.head_dim",
        ("model.hidden_size", "model.attention.heads"),
        "model.hidden_size / model.attention.heads",
        head_dim,
    ),
    Derivation(
        "model.attention.scale", ("model.attention.head_dim",), "model.attention.head_dim ** -0.5", attention_scale
    ),
    Derivation(
        "model.attention.rotary.scaling.attention_factor",
        ("model.attention.rotary.scaling.factor",),
        "0.1 * ln(factor) + 1",
        yarn_attention_factor,
    ),
    Derivation(
        "model.shared_attention.kv_heads",
        ("model.shared_attention.heads",),
        "model.shared_attention.heads",
        shared_kv_heads,
    ),
    Derivation(
        "model.shared_attention.head_dim",
        ("model.hidden_size", "model.shared_attention.heads"),
        "2 * model.hidden_size / model.shared_attention.heads",
        shared_head_dim,
    ),
    Derivation(
        "model.shared_attention.scale",
        ("model.shared_attention.head_dim",),
        "(model.shared_attention.head_dim / 2) ** -0.5",
        shared_attention_scale,
    ),
    Derivation(
        "model.shared_attention.rotary.scaling.attention_factor",
        ("model.shared_attention.rotary.scaling.factor",),
        "0.1 * ln(factor) + 1",
        shared_yarn_factor,
    ),
    Derivation(
        "model.shared_attention.mlp.hidden_size", ("model.hidden_size",), "4 * model.hidden_size", shared_mlp_width
    ),
    Derivation("model.mamba.rank", ("model.hidden_size",), "model.hidden_size / 16, rounded up", mamba_rank),
    *(
        Derivation(
            f"model.rwkv7.{name}_rank",
            ("model.hidden_size",),
            f"{factor:g} sqrt(model.hidden_size), in steps of 32",
            partial(rwkv7_rank, factor=factor),
        )
        for name, factor in (("decay", 2.5), ("rate", 2.5), ("value", 1.7), ("gate", 5))
    ),
    *(
        Derivation(
            f"model.rwkv{number}_ffn.hidden_size",
            ("model.hidden_size",),
            formula,
            partial(channel_mix_width, kind=f"rwkv{number}_ffn", factor=factor, multiple=multiple),
        )
        for number, factor, multiple, formula in (
            (4, 4, 1, "4 * model.hidden_size"),
            (5, 3.5, 32, "3.5 * model.hidden_size rounded down to 32"),
            (6, 3.5, 32, "3.5 * model.hidden_size rounded down to 32"),
            (7, 4, 1, "4 * model.hidden_size"),
        )
    ),
    Derivation("model.gated_delta.key_heads", ("model.gated_delta.heads",), "model.gated_delta.heads", delta_key_heads),
    Derivation(
        "model.gated_delta.key_dim",
        ("model.hidden_size", "model.gated_delta.key_heads"),
        "3/4 * model.hidden_size / model.gated_delta.key_heads, rounded down",
        delta_key_dim,
    ),
    Derivation(
        "model.gated_delta.value_dim", ("model.gated_delta.key_dim",), "2 * model.gated_delta.key_dim", delta_value_dim
    ),
    Derivation("model.gated_delta.norm_epsilon", ("model.norm.epsilon",), "model.norm.epsilon", delta_norm_epsilon),
    Derivation("model.cca.kv_heads", ("model.cca.heads",), "model.cca.heads", cca_kv_heads),
    Derivation(
        "model.cca.head_dim",
        ("model.hidden_size", "model.cca.heads"),
        "model.hidden_size / (2 * model.cca.heads)",
        cca_head_dim,
    ),
    Derivation(
        "model.cca.rotary.scaling.attention_factor",
        ("model.cca.rotary.scaling.factor",),
        "0.1 * ln(factor) + 1",
        cca_attention_factor,
    ),
    Derivation(
        "model.mlp.hidden_size",
        ("model.hidden_size", "model.mlp.gated"),
        "4 * model.hidden_size (gated: 8/3 * model.hidden_size rounded up to 256)",
        mlp_hidden_size,
    ),
    Derivation(
        "model.moe.hidden_size",
        ("model.hidden_size", "model.moe.gated"),
        "4 * model.hidden_size (gated: 8/3 * model.hidden_size rounded up to 256)",
        moe_hidden_size,
    ),
    Derivation("model.moe.router.top_groups", ("model.moe.router.groups",), "model.moe.router.groups", moe_top_groups),
    Derivation(
        "model.embedding.max_positions", ("training.sequence_length",), "training.sequence_length", max_positions
    ),
    Derivation("model.init.head", ("model.init.embedding",), "model.init.embedding", head_init),
    Derivation("model.head.norm", ("model.norm.type",), "model.norm.type", head_norm),
    Derivation("model.init.layers", ("model.layers",), "the number of blocks in model.layers", init_layers),
    Derivation("parallel.expert_tensor", ("parallel.tensor",), "parallel.tensor", expert_tensor),
    Derivation(
        "model.vocab_size",
        ("tokenizer.path", "model.vocab_multiple"),
        "the tokenizer's size rounded up to a multiple of model.vocab_multiple",
        vocab_size,
    ),
    Derivation(
        "training.accumulation",
        (_SIZE, _MICRO),
        "training.global_batch_size / (training.micro_batch_size * data parallel size), or 1",
        accumulation,
    ),
    Derivation(
        _SIZE,
        (_MICRO, "training.accumulation"),
        "training.micro_batch_size * training.accumulation * data parallel size",
        global_batch_size,
    ),
    Derivation(
        "optimizer.groups.*.weight_decay", ("optimizer.weight_decay",), "optimizer.weight_decay", group_weight_decay
    ),
    Derivation("schedule.steps", ("training.steps",), "training.steps", schedule_steps),
    Derivation("schedule.decay_steps", ("schedule.steps",), "10 % of schedule.steps", decay_steps),
)

# Keys that only the processes, the machine or the tokenizer can fill in.
AT_START = (
    "launch.ranks",
    "launch.master_address",
    "launch.master_port",
    "launch.working_directory",
    "logging.peak_tflops",
    "tokenizer.eod_token",
    "tokenizer.eod_id",
)
# Keys that stay open where the number of ranks, or the tokenizer, is not known.
NEED_RANKS = ("training.global_batch_size", "training.accumulation")
NEED_TOKENIZER = ("model.vocab_size",)


def derive(view: View) -> dict[Path, Origin]:
    """Fill in every derivable key of `view.values` that is None, in place.

    Args:
        view: the values, all defaults present.

    Returns:
        The origins of the keys that were filled in.
    """
    origins: dict[Path, Origin] = {}
    for rule in DERIVATIONS:
        starred = ANY in rule.key.split(".")
        for path in expand(view.values, tuple(rule.key.split("."))):
            if get(view.values, path, None) is not None:
                continue
            value = rule.function(view, path) if starred else rule.function(view)
            if value is not None:
                put(view.values, path, value)
                origins[path] = Origin("derived", text=rule.formula, keys=rule.keys)
    return origins


def unknown_after(unknown: frozenset[str], given: Callable[[str], bool]) -> frozenset[str]:
    """`unknown` keys, and all derived keys that follow from them (unless the user gave those)."""
    spread = set(unknown)
    for rule in DERIVATIONS:
        if spread.intersection(rule.keys) and not given(rule.key):
            spread.add(rule.key)
    return frozenset(spread)
