"""GPT-NeoX's traps one by one: what is repaired, what is refused, what the summary says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.config.neox import to_native_yaml, translate
from megatron.config.neox.translate import NAMES
from tests.config.neox.neox_cases import BASE, at, document, flat, no_effect, noted, parameters, problem_of

LLAMA = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-6,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "activation": "swiglu",
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "make_vocab_size_divisible_by": 1,
}


# --- model ---


@pytest.mark.parametrize(
    "hidden, size, multiple, width",
    [
        (4096, 32768, 256, 11008),  # Llama-7B as GPT-NeoX writes it: 8 hidden_size before gating
        (5120, 40960, 256, 13824),  # Llama-13B
        (8192, 65536, 256, 22016),  # Llama-65B
        (8192, 86016, 256, 28672),  # Llama-2-70B: 3 * 28672
        (4096, 14336, 1, 14336),  # Mistral-7B with Hugging Face's meaning. GPT-NeoX fails on its two halves
        (4096, 14336, 14336, 14336),  # Llama-3-8B: the multiple forces both readings to the same width
        (4096, None, 256, 11008),  # CodeLlama-7B omits it
        (8192, None, 256, 22016),  # CodeLlama-34B
        (64, 192, 1, 192),
    ],
)
def test_gated_width(hidden, size, multiple, width):
    translation = flat(hidden_size=hidden, intermediate_size=size, mlp_multiple_of=multiple, **LLAMA)
    assert translation.problems == []
    assert at(translation, "model.mlp.hidden_size") == width
    said = noted(translation, f"model.mlp.hidden_size: {width}")
    assert said == (
        size != multiple
    )  # a note wherever GPT-NeoX since 2024-09 builds something else, or might be misread


def test_llama_7b_and_mistral_7b_have_their_published_sizes():
    shape = LLAMA | {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    assert parameters(flat(**shape, intermediate_size=32768, mlp_multiple_of=256), 32000) == 6_738_415_616
    assert parameters(flat(**shape, intermediate_size=14336, num_kv_heads=8), 32000) == 7_241_732_096
    old = {name: value for name, value in shape.items() if name not in ("activation", "use_bias_in_mlp")}
    old_style = flat(**old, mlp_type="llama", activation="silu")
    assert old_style.problems == []
    assert parameters(old_style, 32000) == 6_738_415_616


@pytest.mark.parametrize(
    "factor, size, multiple, width",
    [(None, None, 1, 256), (None, 100, 1, 100), (None, 100, 32, 128), (3.5, None, 1, 224), (None, 101, 1, 101)],
)
def test_plain_width(factor, size, multiple, width):
    translation = flat(expansion_factor=factor, intermediate_size=size, mlp_multiple_of=multiple)
    assert at(translation, "model.mlp.hidden_size") == width
    assert translation.values["model"]["mlp"]["gated"] is False


def test_two_widths_are_a_problem():
    problem = problem_of(flat(expansion_factor=2.0, intermediate_size=64), "expansion_factor")
    assert "intermediate_size" in problem.rule


@pytest.mark.parametrize(
    "activation, fusion, native, gated",
    [
        ("gelu", False, "gelu", False),
        ("gelu", True, "gelu_tanh", False),
        ("GELU", True, "gelu_tanh", False),
        ("geglu", True, "gelu", True),
        ("swiglu", True, "silu", True),
        ("reglu", False, "relu", True),
        ("bilinear", False, "identity", True),
        ("silu", False, "silu", False),
        ("swish", False, "silu", False),
        ("relu", False, "relu", False),
    ],
)
def test_activations(activation, fusion, native, gated):
    translation = flat(activation=activation, bias_gelu_fusion=fusion)
    mlp = translation.values["model"]["mlp"]
    assert (mlp["activation"], mlp["gated"]) == (native, gated)
    assert noted(translation, "gelu_tanh", "bias_gelu_fusion") == (native == "gelu_tanh")


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"activation": "mish"}, "activation"),
        ({"activation": "glu"}, "activation"),
        ({"norm": "scalenorm"}, "norm"),
        ({"pos_emb": "rpe"}, "pos_emb"),
        ({"pos_emb": "sinusoidal"}, "pos_emb"),
        ({"init_method": "orthogonal"}, "init_method"),
        ({"lr_decay_style": "exponential"}, "lr_decay_style"),
        ({"use_qk_layernorm": True}, "use_qk_layernorm"),
        ({"save_base_shapes": True}, "save_base_shapes"),
        ({"coord_check": True}, "coord_check"),
        ({"train_impl": "ppo"}, "train_impl"),
        ({"dataset_impl": "online"}, "dataset_impl"),
        ({"train_reward_data_paths": ["a"]}, "train_reward_data_paths"),
        ({"data_impl": "cached"}, "data_impl"),
        ({"deepspeed": False}, "deepspeed"),
        ({"train_label_data_paths": ["a"]}, "train_label_data_paths"),
        ({"pos_test_label_data_paths": ["a"]}, "pos_test_label_data_paths"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"eod_mask_loss": True}, "eod_mask_loss"),
        ({"no_load_optim": True}, "no_load_optim"),
        ({"opt_pos_emb_offset": 2}, "opt_pos_emb_offset"),
        ({"use_bnb_optimizer": True, "pos_emb": "learned"}, "use_bnb_optimizer"),
    ],
)
def test_what_is_not_available_is_refused_with_a_fix(changes, key):
    problem = problem_of(flat(**changes), key)
    assert problem.where.startswith("small.yml:") and problem.value == changes[key]
    assert len(problem.fix) > 5


@pytest.mark.parametrize(
    "name, value",
    [
        ("moe_num_experts", 1),
        ("use_mup", False),
        ("train_impl", "normal"),
        ("train_impl", "Normal"),
        ("pack_impl", "packed"),
        ("allow_chopped", False),
        ("data_impl", "mmap"),
        ("data_impl", "infer"),
        ("deepspeed", True),
        ("curriculum_learning", {"enabled": False}),
        ("train_label_data_paths", []),
        ("opt_pos_emb_offset", 0),
        ("dataset_impl", "gpt2"),
    ],
)
def test_refused_keys_are_accepted_at_values_that_change_nothing(name, value):
    translation, plain = flat(**{name: value}), flat()
    assert translation.problems == []
    assert translation.values == plain.values
    assert name in no_effect(translation)


def test_parallel_residual_without_biases_keeps_attention():
    translation = flat(gpt_j_residual=True, use_bias_in_mlp=False, activation="swiglu")
    assert translation.values["model"]["residual"] == {"form": "parallel", "shared_norm": False}
    assert translation.values["model"]["mlp"]["bias"] is False
    assert noted(translation, "gpt_j_residual", "drops the attention output")
    assert not noted(flat(gpt_j_residual=True), "drops the attention output")


def test_residual_forms():
    assert flat().values["model"]["residual"] == {"form": "sequential"}
    assert flat(gpt_j_residual=True, gpt_j_tied=True).values["model"]["residual"] == {
        "form": "parallel",
        "shared_norm": True,
    }
    assert "gpt_j_tied (gpt_j_residual is off)" in no_effect(flat(gpt_j_tied=True))


def test_defaults_that_differ_from_the_native_ones():
    model = flat().values["model"]
    assert model["embedding"] == {"position": "learned", "max_positions": 32, "tied": True}
    assert model["attention"]["position"] == "none"
    assert (model["attention"]["qkv_bias"], model["attention"]["output_bias"], model["mlp"]["bias"]) == (
        True,
        True,
        True,
    )
    assert flat().values["optimizer"]["betas"] == [0.9, 0.999]
    assert flat().values["schedule"]["type"] == "linear"
    assert flat().values["schedule"]["min_lr_ratio"] == 0.0
    assert flat().values["zero"]["stage"] == 0


@pytest.mark.parametrize(
    "norm, native, epsilon",
    [
        ("layernorm", "layernorm", 1e-5),
        ("rmsnorm", "rmsnorm", 1e-8),
        ("te_rmsnorm", "rmsnorm", 1e-8),
        ("te_layernorm", "layernorm", 1e-5),
        ("non_parametric_layernorm", "nonparametric", 1e-5),
    ],
)
def test_norms(norm, native, epsilon):
    translation = flat(norm=norm)
    assert translation.values["model"]["norm"] == {"type": native, "epsilon": epsilon} | (
        {"bias": True} if native == "layernorm" else {}
    )
    assert noted(translation, "rms_norm_epsilon") == (native == "rmsnorm")
    assert flat(norm=norm, layernorm_epsilon=0.25, rms_norm_epsilon=0.5).values["model"]["norm"]["epsilon"] == (
        0.5 if native == "rmsnorm" else 0.25
    )


def test_norm_biases_stay_although_a_file_switches_them_off():
    translation = flat(use_bias_in_norms=False)
    assert translation.values["model"]["norm"]["bias"] is True
    assert "use_bias_in_norms (GPT-NeoX never reads it)" in no_effect(translation)


@pytest.mark.parametrize(
    "kind, embedding, attention",
    [
        ("learned", "learned", "none"),
        ("rotary", "none", "rotary"),
        ("alibi", "none", "alibi"),
        ("none", "none", "none"),
    ],
)
def test_positions(kind, embedding, attention):
    model = flat(pos_emb=kind, rotary_pct=0.5, rotary_emb_base=1e6).values["model"]
    assert (model["embedding"]["position"], model["attention"]["position"]) == (embedding, attention)
    assert model["attention"].get("rotary") == ({"fraction": 0.5, "base": 1e6} if kind == "rotary" else None)


def test_positions_must_cover_the_sequence():
    assert problem_of(flat(max_position_embeddings=16), "max_position_embeddings").fix == "set it to 32"


def test_sliding_window_counts_the_token_itself():
    translation = flat(sliding_window_width=4096)
    assert at(translation, "model.attention.window") == 4097
    assert noted(translation, "sliding_window_width 4096")


@pytest.mark.parametrize(
    "config",
    [
        [[["flash"], "all"]],
        [[["flash"], 4]],
        [[["global", "flash"], 2]],
        ["flash"] * 4,
        [[["global"], 1], [["flash"], 3]],
    ],
)
def test_attention_config_of_dense_layers(config):
    translation = flat(attention_config=config)
    assert translation.problems == []
    assert at(translation, "model.layers") == "(attention/mlp) x4"


@pytest.mark.parametrize(
    "config, word",
    [
        ([[["flash"], 3]], "4 layers"),
        ([[["flash", "global", "flash"], "all"]], "cannot be read"),
        ([["flash", 4]], "cannot be read"),
        (["flash"], "it has 1"),
        ([[["local", "flash"], "all"]], "global and flash"),
        ([[["rwkv"], "all"]], "global and flash"),
    ],
)
def test_attention_config_that_cannot_be_had(config, word):
    assert word in problem_of(flat(attention_config=config), "attention_config").rule


def test_vocabulary_is_padded_as_on_the_layout_of_the_file():
    assert at(flat(make_vocab_size_divisible_by=64, model_parallel_size=4), "model.vocab_multiple") == 256


def test_dropout_of_an_mlp_without_bias():
    assert noted(flat(hidden_dropout=0.1, use_bias_in_mlp=False), "model.dropout")
    assert at(flat(hidden_dropout=0.1, attention_dropout=0.2), "model.attention.dropout") == 0.2


# --- the document as a whole ---


def test_unknown_keys_name_the_nearest_of_both_kinds():
    problem = problem_of(flat(hiden_size=3), "hiden_size")
    assert "hidden_size" in problem.fix and "model.hidden_size" in problem.fix
    assert "schedule.warmup_steps" in problem_of(flat(warmup_step=3), "warmup_step").fix
    assert "file of its own" in problem_of(flat(training={"steps": 3}), "training").fix


@pytest.mark.parametrize(
    "name, word",
    [
        ("warmup_iters", "warmup"),
        ("decay_lr_to", "min_lr"),
        ("attention_type", "num_kv_heads"),
        ("train_data_path", "train_data_paths"),
        ("context_parallel_size", "parallel.context"),
    ],
)
def test_keys_that_only_look_like_gpt_neox(name, word):
    assert word in problem_of(flat(**{name: 3}), name).fix


def test_conflicts_are_found_whatever_the_spelling():
    for spelling in ("num_layers", "num-layers"):
        other = document("other.yml", {spelling: 6}, {spelling: 3})
        translation = translate([document("small.yml", BASE, {"num_layers": 1}), other])
        problem = problem_of(translation, spelling)
        assert (problem.where, problem.value) == ("other.yml:3", 6)
        assert "small.yml:1" in problem.rule
        assert at(translation, "model.layers").endswith("x4")


def test_equal_values_do_not_conflict():
    translation = translate([document("small.yml", BASE), document("other.yml", {"num-layers": 4})])
    assert translation.problems == [] and translation.values == flat().values


def test_both_spellings_in_one_file():
    source = document("small.yml", BASE | {"num-layers": 5}, {"num-layers": 9})
    assert problem_of(translate([source]), "num-layers").where == "small.yml:9"


def test_true_is_not_one():
    source = document("other.yml", {"train_micro_batch_size_per_gpu": True})
    base = BASE | {"train_micro_batch_size_per_gpu": 1}
    assert problem_of(translate([document("small.yml", base), source]), "train_micro_batch_size_per_gpu")


def test_overrides_win():
    override = document("argument", {"train-iters": 7}, override=True)
    translation = translate([document("small.yml", BASE), override])
    assert translation.problems == []
    assert at(translation, "training.steps") == 7
    assert translation.origins["training.steps"].text == "argument"


def test_required_keys_are_reported_together():
    problems = {problem.key for problem in translate([document("empty.yml", {"seed": 1})]).problems}
    assert problems == {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "train_iters",
        "optimizer",
        "train_micro_batch_size_per_gpu",
        "max_position_embeddings",
    }


def test_null_is_not_given():
    source = document("small.yml", BASE | {"seed": None, "fp16": None})
    translation = translate([source])
    assert translation.values == flat().values
    assert "null says nothing" in no_effect(translation)


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("num_layers", "twelve", "a whole number"),
        ("hidden_size", 64.5, "a whole number"),
        ("weight_decay", "high", "a number"),
        ("no_weight_tying", "yes", "true or false"),
        ("no_weight_tying", 1, "true or false"),
        ("fp16", True, "a mapping"),
        ("extra_save_iters", 5, "a list"),
        ("pos_emb", 3, "text"),
        ("mlp_multiple_of", 0, "above 0"),
    ],
)
def test_wrong_types(name, value, kind):
    assert kind in problem_of(flat(**{name: value}), name).rule


def test_numbers_that_yaml_reads_as_text():
    assert at(flat(min_lr="1e-5"), "schedule.min_lr_ratio") == pytest.approx(0.01)
    misspelt = flat(optimizer={"type": "Adam", "params": {"lr": 1e-3, "eps": "1.0e_8"}})
    assert at(misspelt, "optimizer.epsilon") == 1e-8 and noted(misspelt, "1.0e_8 is read as 1.0e-8")
    bad = flat(optimizer={"type": "Adam", "params": {"lr": 1e-3, "eps": "1.0_e8"}})
    assert problem_of(bad, "optimizer")


@pytest.mark.parametrize("params", ["x", True, 3, [1], [["lr", 1e-3]]])
def test_parameters_of_the_optimizer_are_a_mapping(params):
    bad = flat(optimizer={"type": "Adam", "params": params})
    assert problem_of(bad, "optimizer").rule == "optimizer.params must be a mapping"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.sampled_from(["", "x", "flash", "all", "adam", "1e-8"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["enabled", "stage", "type", "params", "lr", "betas", "device", "offload_param", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(NAMES)), values, max_size=12))
def test_nothing_in_a_file_makes_the_reader_fail(changes):
    translation = translate([document("small.yml", BASE | changes)])
    to_native_yaml(translation)
    for problem in translation.problems:
        assert problem.rule and problem.fix


def test_mup_is_what_it_means_and_its_base_is_asked_for():
    """Its multiplier and its scale of initial values are kept, and attention is divided by the head dimension."""
    found = flat(use_mup=True, mup_init_scale=2.0, mup_embedding_mult=10.0, mup_width_scale=4, base_shapes_file="b")
    assert not found.problems
    model = found.values["model"]
    assert model["parametrization"] == {"type": "mup", "base_head_dim": 1}
    assert (model["init"]["std"], model["embedding"]["multiplier"]) == (0.04, 10.0)
    assert noted(found, "model.parametrization.base_width", "GPT-NeoX loses all three")
    assert "mup_width_scale" in no_effect(found) and "base_shapes_file" in no_effect(found)
    assert "mup_init_scale" in no_effect(flat(mup_init_scale=2.0))
