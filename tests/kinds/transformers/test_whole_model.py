"""Classes of transformers as models of runs: against a plain loop of torch, on layouts, through checkpoints and
exports, and refused settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.export import export, prove
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError, resolve
from megatron.config.tree import thaw
from megatron.decoding.one_text import complete, generate
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.evaluation.scoring import Scorer
from megatron.kinds.transformers import check, facts
from megatron.kinds.transformers.build import hf_model
from megatron.kinds.transformers.facts import FactsError
from megatron.kinds.transformers.inspection import inspect
from megatron.kinds.transformers.options import TransformersOptions
from megatron.model.stack import ModelPlan, build_model, make_model
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.testing import check_layouts, on_ranks, train_on_ranks
from megatron.worker.place import StartError
from tests.kinds.transformers.steps import by_engine, by_torch, differences, values_of
from tests.kinds.transformers.tiny import tiny
from tests.paths import ROOT
from tests.selection import toured
from tests.training.runs import build

SLICED = ("qwen3", "gpt2", "gpt_oss", "gemma2", "cohere", "bart", "qwen3_next")  # with a plan, or by common names
# Forms of attention, a recurrence, experts, a scale and a cap of logits, a learned table, an encoder's decoder.
SAMPLE = ("qwen3", "gpt2", "mamba", "gpt_oss", "gemma2", "cohere", "bart", "qwen3_next")
BOUND = 1e-5  # four steps in fp32, whose sums are in other orders


@pytest.mark.parametrize("name", toured(SAMPLE, "layouts"))
def test_four_steps_are_those_of_a_plain_loop(name):
    """On one rank, with ZeRO 3 on two, in two pipeline stages, and in slices of two."""
    options = tiny(name)
    losses, weights = by_torch(values_of(name, options))
    sliced = [(2, 0, {"tensor": 2})] if name in SLICED else []
    for ranks, stage, parallel in ((1, 0, {}), (2, 3, {}), (2, 0, {"pipeline": 2}), *sliced):
        values = values_of(name, options, stage, parallel)
        found = differences(on_ranks(ranks, by_engine, values, ranks), losses, weights)
        assert max(found[:2]) <= BOUND, (ranks, found)


@pytest.mark.layouts
def test_gradients_do_not_depend_on_the_layout():
    values = values_of("qwen3", tiny("qwen3"))
    stages = {"parallel": {"pipeline": 2}}
    check_layouts(values, [{"zero": {"stage": stage}} for stage in (1, 2, 3)])
    check_layouts(values, [{**stages, "zero": {"stage": stage}, "ranks": 4} for stage in (1, 2, 3)])
    recomputed = {"training": {**values["training"], "loss_chunk": 5, "activation_checkpointing": {"mode": "full"}}}
    slices = {"parallel": {"tensor": 2}}
    check_layouts({**values, **recomputed}, [{"zero": {"stage": 0}}, {"zero": {"stage": 3}}, stages, slices])
    both = {"parallel": {"tensor": 2, "pipeline": 2}, "ranks": 4}
    check_layouts(values, [both, *({**slices, "zero": {"stage": stage}, "ranks": 4} for stage in (1, 3))])


def test_documents_of_a_sample_are_apart():
    """Gradients of samples of several documents, on layouts, and each document by itself in transformers."""
    values = values_of("gemma2", tiny("gemma2"))
    values["data"] = {**values["data"], "reset_attention_at_eod": True}
    values["tokenizer"] = {"type": "none", "eod_id": 0}
    check_layouts(values, [{"zero": {"stage": 3}}, {"parallel": {"pipeline": 2}}])
    model, tokens = build_model(resolve(values)).eval(), torch.randint(1, 96, (2, 12))
    positions = torch.tensor([*range(5), *range(7)]).expand(2, -1)
    with torch.no_grad():
        found = model.logits(tokens, positions)
        theirs = model.as_saved(torch.float32)
        wanted = torch.cat([theirs(part).logits for part in tokens.split([5, 7], 1)], 1)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_run_resumes_on_another_layout_and_is_exported(tmp_path):
    """Dropout too is the same after a resume."""
    options = {**tiny("gpt2"), "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    values = {**values_of("gpt2", options), "checkpoint": {"every": 2}}
    whole = train_on_ranks(1, {**values, "run": {"dir": str(tmp_path / "whole")}})
    half = {**values, "run": {"dir": str(tmp_path / "half")}}
    train_on_ranks(1, {**half, "training": {**values["training"], "stop_at_step": 2}})
    both = train_on_ranks(2, {**half, "zero": {"stage": 3}})
    losses, wanted = ([each["loss"] for each in records if "loss" in each] for records in (both, whole))
    assert len(wanted) == 4 and losses == pytest.approx(wanted, rel=BOUND)
    ends = [next(each["validation"] for each in reversed(records) if "validation" in each) for records in (both, whole)]
    assert ends[0]["validation"]["loss"] == pytest.approx(ends[1]["validation"]["loss"], rel=BOUND)
    checkpoint = open_checkpoint(find_checkpoint(tmp_path / "half"))
    export(checkpoint, tmp_path / "hf")
    assert prove(checkpoint, tmp_path / "hf", None).holds


@pytest.mark.parametrize("before, after", (({"pipeline": 2}, {"tensor": 2}), ({"tensor": 2}, {})))
def test_a_run_resumes_with_another_cut(tmp_path, before, after):
    """gemma2 has tied embeddings. Two stages have copies."""
    values = {**values_of("gemma2", tiny("gemma2")), "checkpoint": {"every": 2}, "run": {"dir": str(tmp_path)}}
    losses, weights = by_torch(values)
    first = {**values, "parallel": before, "training": {**values["training"], "stop_at_step": 2}}
    train_on_ranks(max([1, *before.values()]), first)
    train_on_ranks(max([1, *after.values()]), {**values, "parallel": after})
    checkpoint = open_checkpoint(find_checkpoint(tmp_path))
    assert set(checkpoint.tensors) == set(weights)
    export(checkpoint, tmp_path / "hf")
    assert prove(checkpoint, tmp_path / "hf", None).holds


def refusals(values):
    """Lines of a start on this rank."""
    with pytest.raises(StartError) as caught:
        by_engine(values, 2)
    return str(caught.value)


def test_a_class_that_is_another_function_in_stages_is_refused():
    values = values_of("xlnet", tiny("xlnet"), parallel={"pipeline": 2})
    assert "has a stream of another form" in on_ranks(2, refusals, values)[0]


WHOLE_PLAN = LlamaConfig.base_model_tp_plan
PLANS = {
    "o_proj of every block stays whole": (
        {name: style for name, style in WHOLE_PLAN.items() if "o_proj" not in name},
        "LlamaForCausalLM cannot compute model.layers.0.self_attn.o_proj",
    ),
    "gates by their inputs": (
        {**WHOLE_PLAN, "layers.*.mlp.gate_proj": "rowwise_split_input"},
        "LlamaForCausalLM cannot compute model.layers.0.mlp",
    ),
    "queries twice": (
        {**WHOLE_PLAN, "layers.*.self_attn.*_proj": "rowwise", "layers.0.self_attn.q_proj": "rowwise"},
        "has a plan that cuts model.layers.0.self_attn.q_proj twice: colwise, and rowwise",
    ),
    "a weight and its layer": (
        {**WHOLE_PLAN, "layers.*.mlp.up_proj.weight": "rowwise"},
        "has a plan that cuts model.layers.0.mlp.up_proj.weight twice",
    ),
    "a style of tomorrow": ({**WHOLE_PLAN, "layers.*.mlp.up_proj": "spiral"}, "that is unknown here: spiral"),
}


def refused_plans(values):
    """Lines of a start about each plan on this rank."""
    said = {}
    try:
        for case, (plan, _) in PLANS.items():
            LlamaConfig.base_model_tp_plan = plan
            facts._found.cache_clear()
            facts._known.clear()
            with pytest.raises((StartError, ConfigError)) as caught:
                by_engine(values, 2)
            said[case] = str(caught.value)
    finally:
        LlamaConfig.base_model_tp_plan = WHOLE_PLAN
        facts._found.cache_clear()
        facts._known.clear()
    return said


def test_plans_that_leave_a_parameter_uncut_or_cut_it_twice_are_refused():
    said = on_ranks(2, refused_plans, values_of("llama", tiny("llama"), parallel={"tensor": 2}))[0]
    for case, (_, rule) in PLANS.items():
        assert rule in said[case] and "use parallel.tensor: 1" in said[case].replace(
            "use 1:", "use parallel.tensor: 1"
        ), said


def test_slices_and_stages_in_bf16_round_as_one_process_does():
    """Distances from fp32 after four steps: of the same number of roundings in other places, so about one process's
    distance."""
    values = values_of("qwen3", tiny("qwen3"), 1)
    (_, exact), half = by_torch(values), {**values, "precision": {"compute": "bf16"}}

    def distance(ranks, parallel):
        found = {name: np.full(each.size, np.nan) for name, each in exact.items()}
        for _, parts in on_ranks(ranks, by_engine, {**half, "parallel": parallel}, ranks):
            for name, places, data in parts:
                found[name][places] = data
        return np.sqrt(sum(np.square(found[name] - each).sum() for name, each in exact.items()))

    one = distance(1, {})
    assert 0 < one and all(distance(2, {axis: 2}) < 2 * one for axis in ("tensor", "pipeline"))


def test_experts_that_are_called_in_parts_are_not_partitioned():
    """JetMoe's attention calls two parts of its experts, whose gradients ZeRO 3 would lose."""
    said = on_ranks(2, refusals, values_of("jetmoe", tiny("jetmoe"), 3))
    assert "zero.stage must be at most 2: JetMoeForCausalLM calls parts of" in said[0]


def test_blocks_of_two_stages_share_no_parameters():
    """In one process their gradients are summed, but each stage would have a copy with its own."""
    model = hf_model(TransformersOptions(config="llama", options=tiny("llama")).model_dump())
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(FactsError, match=r"shares model\.layers\.0\.mlp\.\w+\.weight among blocks"):
        check.stages_of(model, [(0, 1), (1, 2)])
    check.stages_of(model, [(0, 2)])


def of_a_large_class(values, ranks):
    """`by_engine`, where only some gradients are compared before the first step."""
    check.SMALL = 0
    return by_engine(values, ranks)


@pytest.mark.parametrize("parallel", ({"tensor": 2}, {"pipeline": 2}))
def test_a_large_class_without_vectors_is_cut(parallel):
    """The norms of OLMo have no parameters."""
    values = values_of("olmo", tiny("olmo"))
    found = on_ranks(2, of_a_large_class, {**values, "parallel": parallel}, 2)
    assert max(differences(found, *by_torch(values))[:2]) <= BOUND


def test_weights_of_a_folder_are_the_start(tmp_path):
    torch.manual_seed(5)
    settings = {**tiny("llama"), "eos_token_id": 1}
    values = values_of("llama", settings)
    theirs = build_model(resolve(values)).as_saved(torch.float32)
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(torch.randn_like(each) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_model(resolve(values_of(str(tmp_path / "theirs"), {}, weights=True))).eval()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    tokens = torch.randint(0, 96, (2, 9))
    third = values_of(str(tmp_path / "theirs"), {}, 3, weights=True)  # only one rank reads them
    assert max(differences(on_ranks(2, by_engine, third, 2), *by_torch(third))[:2]) <= BOUND
    with torch.no_grad():
        assert torch.allclose(model.logits(tokens), again(tokens).logits, rtol=1e-5, atol=1e-5)


def test_folders_without_a_weight_are_refused(tmp_path):
    build_model(resolve(values_of("llama", tiny("llama")))).as_saved(torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"lacks 1, such as model\.norm\.weight"):
        build_model(resolve(values_of(str(tmp_path), {}, weights=True)))


def test_settings_need_no_folder_and_have_precedence(tmp_path):
    folder = tmp_path / "theirs"
    build_model(resolve(values_of("llama", tiny("llama")))).as_saved(torch.float32).save_pretrained(folder)
    config = resolve(values_of(str(folder), {}, weights=True))
    settings = thaw(config.model.model_dump()["transformers"]["settings"])
    assert "transformers_version" not in settings  # a run resumes with another version
    shutil.rmtree(folder)
    build_model(resolve(values_of(str(folder), {}, weights=True, settings=settings)), values=False)
    with pytest.raises(ConfigError, match="num_hidden_layers must be 2, as in settings"):
        resolve(values_of("llama", {**tiny("llama"), "num_hidden_layers": 3}, settings=settings))


@pytest.mark.parametrize("name, factor", (("dbrx", 0.01), ("jetmoe", 0.01), ("qwen3_moe", 0.001), ("llama", 0.0)))
def test_the_loss_of_routers_has_the_factor_of_the_class(name, factor):
    assert build_model(resolve(values_of(name, tiny(name)))).balance == factor


def test_a_cap_is_found_where_initial_logits_are_tiny():
    model = build_model(resolve(values_of("gemma2", {**tiny("gemma2"), "initializer_range": 1e-4})))
    assert model.head.options.softcap == 30


@pytest.mark.parametrize("name", toured((*SAMPLE, "marian", "rwkv", "xlnet"), "layouts"))
def test_text_is_that_of_transformers(name):
    """Its last pass reads one token, but in a class that cannot continue a text."""
    hybrid = {"layer_types": ["linear_attention", "full_attention"]} if name == "qwen3_next" else {}
    model = build_model(resolve(values_of(name, {**tiny(name), **hybrid}))).eval()
    prompt, lengths = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), []
    model.inner.register_forward_pre_hook(
        lambda _, __, more: lengths.append(more["input_ids"].shape[1]), with_kwargs=True
    )
    cached, again = (
        torch.stack(list(generate(model, prompt, 8, Sampling(temperature=0), cache=cache)), 1)
        for cache in (True, False)
    )
    assert cached.equal(again)
    assert lengths[-10:-9] == [13 if name in ("xlnet", "rwkv") else 1], lengths
    theirs = model.as_saved(torch.float32)
    if name not in ("xlnet", "rwkv"):  # their `generate` needs more arguments
        plain = {"eos_token_id": None, "forced_eos_token_id": None, "pad_token_id": 0}
        wanted = theirs.generate(prompt, max_new_tokens=8, do_sample=False, **plain)
        assert cached.equal(wanted[:, 5:])


def answered(values, ranks):
    engine, config = build(resolve(values, ranks=ranks), ranks), resolve(values, ranks=ranks)
    scorer = Scorer(config, engine, engine.mesh, engine.device, texts=2)
    asked = [Request((3, 1, 4, 1, 5)[: 2 + at], 4 + at, at, Sampling(temperature=0), end=7) for at in range(3)]
    found, read = scorer.answer(asked), scorer.tokens
    scorer.continues = False
    return found, scorer.answer(asked), read


@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 2), ("mamba", 1), ("xlnet", 1)])
def test_evaluations_continue_texts_by_the_cache_of_the_class(name, ranks):
    """As by reading the whole text for each token, and each token is read once."""
    total = 0
    for found, whole, read in on_ranks(ranks, answered, values_of(name, tiny(name)), ranks):
        for one, other in zip(found, whole, strict=True):
            assert one.tokens == other.tokens and one.ended == other.ended
            assert one.log_p == pytest.approx(other.log_p, abs=1e-5)
        total += read
    assert total == sum(2 + at + len(each.tokens) - 1 for at, each in enumerate(found))


def test_a_process_without_torch_finds_the_same_facts():
    """As the launcher, which does not import torch."""
    options = TransformersOptions(config="qwen3", options=tiny("qwen3")).model_dump()
    words = [sys.executable, "-m", "megatron.kinds.transformers.inspection"]
    done = subprocess.run(words, input=json.dumps(options), capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1]) == inspect(options)


def test_text_ends_with_the_learned_positions():
    model = build_model(resolve(values_of("gpt2", tiny("gpt2")))).eval()
    assert len(list(complete(model, [1, 2, 3], 100, Sampling(temperature=0)))) == 61


WRONG = {
    "unknown type": ({"config": "qwen33"}, {}, "'qwen33' must be a folder, a file or a model type", "qwen3"),
    "no config": ({"config": None}, {}, "must be a folder, a config.json or a model type", "config: qwen3"),
    "unknown setting": ({"options": {"hidden_sise": 3}}, {}, "'hidden_sise' must be a setting of", "hidden_size"),
    "a setting of another type": ({"options": {"hidden_size": "x"}}, {}, "must be what transformers accepts", ""),
    "no weights": ({"weights": True}, {}, "is no folder with weights", "*.safetensors"),
    "not causal": ({"config": "bert", "options": None}, {}, "must be causal", "is_decoder"),
    "own layers": ({}, {"model": {"norm": {"epsilon": 1e-6}}}, "must not be given with layers", "remove it"),
    "another width": ({}, {"model": {"hidden_size": 48}}, "must be 32, the value of Qwen3ForCausalLM", "hidden_size"),
    "context": ({}, {"parallel": {"context": 2}}, "context must be 1", "ZeRO"),
    "slices without a plan": (
        {"config": "mamba", "options": tiny("mamba")},
        {"parallel": {"tensor": 2}},
        "MambaForCausalLM has no plan that cuts it",
        "ZeRO",
    ),
    "heads that ranks do not divide": (
        {"options": {**tiny("qwen3"), "num_key_value_heads": 1}},
        {"parallel": {"tensor": 2}},
        "must divide num_key_value_heads=1",
        "use 1",
    ),
    "routers of stages": (
        {"config": "qwen3_moe", "options": {**tiny("qwen3_moe"), "output_router_logits": True}},
        {"parallel": {"pipeline": 2}},
        "computes the loss of routers from all its blocks",
        "output_router_logits: false",
    ),
    "documents": (
        {"config": "mamba", "options": tiny("mamba")},
        {"data": {"synthetic": "copy", "reset_attention_at_eod": True}},
        "MambaForCausalLM reads across the ends of documents",
        "remove",
    ),
    "selective": (
        {},
        {"training": {"activation_checkpointing": {"mode": "selective"}}},
        "mode must be none or full",
        "use full",
    ),
    "a variant": (
        {},
        {"model": {"layers": "transformers@x", "hidden_size": 32, "vocab_size": 96, "variants": {"x": {}}}},
        "must be the only layer",
        "layers: transformers",
    ),
    "code of a repository": ({"attention": "some/kernel"}, {}, "attn_implementation must be code of", "trust_remote"),
    "nested code of a repository": (
        {"options": {**tiny("qwen3"), "attn_implementation": {"": "some/kernel"}}},
        {},
        "attn_implementation must be code of",
        "trust_remote",
    ),
    "routers": (
        {"config": "qwen3_moe", "options": {**tiny("qwen3_moe"), "output_router_logits": True}},
        {"training": {"activation_checkpointing": {"mode": "full"}}},
        "the loss of routers of Qwen3MoeForCausalLM has no gradient",
        "output_router_logits: false",
    ),
    "layers that ranks skip": (
        {"config": "opt", "options": {**tiny("opt"), "layerdrop": 0.1}},
        {"zero": {"stage": 3}},
        "ranks skip different layers",
        "layerdrop: 0.0",
    ),
    "positions": (
        {"config": "gpt2", "options": tiny("gpt2")},
        {"training": {"sequence_length": 65}},
        "must be at most 64, the positions that GPT2LMHeadModel",
        "max_position_embeddings",
    ),
    "weights that evaluations change": (
        {"config": "rwkv", "options": {**tiny("rwkv"), "rescale_every": 1}},
        {},
        "an evaluation must keep the weights",
        "rescale_every: 0",
    ),
    "two models": ({}, {"model": {"layers": "transformers x2"}}, "must be the only layer", "layers: transformers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_before_the_start(case):
    own, other, rule, fix = WRONG[case]
    name = own.get("config", "qwen3")
    options = {**tiny("bert"), "is_decoder": False} if name == "bert" else own.get("options", tiny("qwen3"))
    values = values_of(name, options, **{key: own[key] for key in own if key not in ("config", "options")})
    for section, keys in other.items():
        values[section] = {**values.get(section, {}), **keys}
    if case == "another width":
        values["model"]["transformers"]["options"] = tiny("qwen3")
    with pytest.raises(ConfigError) as caught:
        resolve(values, ranks=2)
    assert rule in str(caught.value) and fix in str(caught.value)


def test_code_of_a_folder_does_not_run(tmp_path):
    (tmp_path / "configuration_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    auto = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "configuration_x.X"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x_of_nobody", "auto_map": auto}))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        resolve(values_of(str(tmp_path), {}))
    with pytest.raises(ConfigError, match="--extensions"):  # in a file that somebody else wrote
        resolve(values_of(str(tmp_path), {}, trust_remote_code=True), whose="a checkpoint")
    values = values_of("qwen3", tiny("qwen3"))
    values["model"] |= {"layers": "transformers@x", "hidden_size": 32, "vocab_size": 96}
    values["model"]["variants"] = {"x": {"config": str(tmp_path), "trust_remote_code": True, "options": {}}}
    with pytest.raises(ConfigError, match="--extensions"):
        resolve(values, whose="a checkpoint")
    assert not (tmp_path / "ran").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class XConfig(LlamaConfig):
    model_type = "x_of_nobody"
class X(LlamaForCausalLM):
    config_class = XConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.logits_scale
        return output
"""


def test_code_of_a_folder_runs_where_the_key_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    auto = {"AutoConfig": "code.XConfig", "AutoModelForCausalLM": "code.X"}
    settings = {**tiny("llama"), "model_type": "x_of_nobody", "auto_map": auto, "logits_scale": 0.5}
    (folder / "config.json").write_text(json.dumps(settings))
    plain, model = (
        build_model(resolve(each)).eval()
        for each in (values_of("llama", tiny("llama")), values_of(str(folder), {}, trust_remote_code=True))
    )
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.allclose(model.logits(tokens), plain.logits(tokens) / 2, rtol=1e-5, atol=1e-6)


def bytes_on_host(values, ranks):
    """Bytes of the parameters before ZeRO 3 partitions them, and of their elements."""
    config = resolve(values, ranks=ranks)
    model = make_model(ModelPlan(config, Mesh.build(Layout.of(config, ranks))), on_host=True)
    parameters = list(model.parameters())
    return sum(each.untyped_storage().nbytes() for each in parameters), sum(4 * each.numel() for each in parameters)


def test_one_rank_has_the_whole_model_before_zero_3():
    (first, whole), (second, _) = on_ranks(2, bytes_on_host, values_of("gpt2", tiny("gpt2"), 3), 2)
    assert first == whole and second < whole / 100
