"""Import and export are inverse: an imported folder that is exported again differs in nothing that a user could
meet."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.companions import COUNT, differing, real_texts, write_tokenizer
from megatron.checkpoint.hf.config import hf_config
from megatron.checkpoint.hf.export import export, prove
from megatron.checkpoint.hf.importer import import_model
from megatron.checkpoint.read.reader import config_of
from megatron.config import resolve
from megatron.config.sections.data import TokenizerSection
from megatron.config.tree import thaw
from megatron.testing import train_on_ranks
from tests.checkpoint.hf.test_hf_tools import MODELS, checkpoint_of, tool
from tests.checkpoint.published import FORMS, TEMPLATE, publish, tokenizer_json
from tests.model.test_parity import CASES
from tests.paths import ROOT

PYTHON = "DEEPY_TRANSFORMERS_4"  # names a Python with transformers 4.57 and torch
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}
FAMILIES = {config.model_type: name for name, config in reversed(CASES.items())}
MORE = {
    "gemma4_text with experts": "gemma4 experts",
    "gemma4_text with inputs": "gemma4 inputs of each layer, shared keys",
}
PYTHONS = [
    pytest.param(sys.executable, id="5"),
    pytest.param(
        os.environ.get(PYTHON, ""),
        id="4",
        marks=pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no Python with transformers 4"),
    ),
]


def opened(python: str, place: Path, folders: list[Path]) -> dict[Path, dict]:
    """Results of a version of transformers on folders."""
    (place / "texts.json").write_text(json.dumps(real_texts()), encoding="utf-8")
    words = [python, str(ROOT / "tests/checkpoint/hf/opened.py"), str(place / "found.json"), str(place / "texts.json")]
    done = subprocess.run([*words, *map(str, folders)], capture_output=True, text=True, cwd=place, env=OFFLINE)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((place / "found.json").read_text())["found"]
    return {folder: found[str(folder)] for folder in folders}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, list[str]]]:
    """Of every family that is imported: a folder, the export of its import, and what the export said."""
    place, found = tmp_path_factory.mktemp("pairs"), {}
    for family, case in {**FAMILIES, **MORE}.items():
        before, after = place / family / "before", place / family / "after"
        publish(before, CASES[case])
        import_model(before, place / family / "checkpoint", sequence_length=24)
        found[family] = before, after, export(open_checkpoint(place / family / "checkpoint"), after).notes
    return found


@pytest.mark.tour
@pytest.mark.parametrize("python", PYTHONS)
def test_what_goes_in_comes_out(python: str, pairs: dict, tmp_path: Path) -> None:
    assert len(real_texts()) == COUNT
    known = opened(python, tmp_path, [folder for before, after, _ in pairs.values() for folder in (before, after)])
    missing = [family for family, (before, _, _) in pairs.items() if "unknown" in known[before]]
    new = {
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "gemma4_text",
        *MORE,
        "kimi_linear",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "glm4_moe_lite",
        "minimax_m2",
    }
    assert set(missing) <= {"zaya", "olmo_hybrid", "nemotron_h", *new}
    for family, (before, after, _) in pairs.items():
        one, other = known[before], known[after]
        if family not in missing:
            assert one["class"] == other["class"] and one["chat"].startswith("<|begin|>user: What"), family
            assert len(one["config"]["eos_token_id"]) == 2 and one["tokenizer model_max_length"] == 8192
        # a setting that version 4 has no name for may be added
        config = {name: other["config"].get(name) for name in one.get("config", ())}
        assert other | ({"config": config} if config else {}) == one, family


def plain_ids(form: str) -> str:
    """A digest of the ids that a form of tokenizer gives real texts, without special ones."""
    texts = Tokenizer.from_str(tokenizer_json(form)).encode_batch(real_texts(), add_special_tokens=False)
    return hashlib.sha256(json.dumps([each.ids for each in texts]).encode()).hexdigest()


@pytest.mark.tour
@pytest.mark.parametrize("python", PYTHONS)
def test_a_runs_own_tokenizer_is_opened_as_it_is(python: str, tmp_path: Path) -> None:
    """Every form of tokenizer next to every architecture whose type says something of tokenizers."""
    folders = {}
    for number, (family, case) in enumerate(FAMILIES.items()):
        listed = family in ("qwen2", "mistral", "qwen3_5_text", "qwen3_5_moe_text")
        for form in FORMS if listed else (FORMS[number % len(FORMS)],):
            folder = tmp_path / f"{family}-{form}"
            CASES[case].save_pretrained(folder)
            (tmp_path / form).mkdir(exist_ok=True)
            (tmp_path / form / "tokenizer.json").write_text(tokenizer_json(form), encoding="utf-8")
            settings = {
                "bos_token": "<|begin|>",
                "pad_token": "<|pad|>",
                "chat_template": TEMPLATE,
                "mask_token": "<m>",
            }
            settings |= {"eos_token": "<|end|>", "tokenizer_class": "LlamaTokenizerFast"}
            (tmp_path / form / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            section = TokenizerSection(path=str(tmp_path / form))
            ids, notes = write_tokenizer(folder, section, family, 77)
            assert None not in ids.values() and notes == [
                "the special token '<m>' was not written: tokenizer.json has no id for it"
            ]
            folders[folder] = form, ids
    found = opened(python, tmp_path, list(folders))
    wanted = {form: plain_ids(form) for form in FORMS}
    for folder, (form, ids) in folders.items():
        if (one := found[folder]).keys() == {"unknown"}:
            continue
        assert one["plain ids"] == wanted[form], folder.name
        assert {f"tokenizer {name}": one[f"tokenizer {name}"] for name in ids} == {
            f"tokenizer {name}": value for name, value in ids.items()
        }
        assert one["tokenizer model_max_length"] == 77 and one["chat"].startswith("<|begin|>user: What")


@pytest.mark.tour
def test_an_export_of_an_import_says_nothing_but_what_version_it_needs(pairs: dict) -> None:
    other = {
        family: [note for note in notes if "needs transformers" not in note] for family, (_, _, notes) in pairs.items()
    }
    assert not any(other.values()), other


def imported(place: Path, family: str = "qwen2") -> Path:
    publish(place / "before", CASES[FAMILIES[family]])
    import_model(place / "before", place / "checkpoint", sequence_length=24)
    return place / "checkpoint"


def test_a_run_that_starts_from_an_import_keeps_what_belongs_to_it(tmp_path: Path) -> None:
    source = open_checkpoint(imported(tmp_path))
    config = config_of(source)
    values = {
        "model": thaw(config.model.model_dump(exclude_defaults=True)),
        "tokenizer": {"path": config.tokenizer.path},
        "training": {"steps": 2, "sequence_length": 24, "global_batch_size": 2, "micro_batch_size": 2},
    }
    more = [f"run.dir={tmp_path / 'run'}", f"checkpoint.initialize_from={source.path}", "data.synthetic=copy"]
    train_on_ranks(1, values, [*more, "checkpoint.every=1", "training.stop_at_step=1"])
    train_on_ranks(1, values, more)  # resumed
    assert tool("to_hf").main([str(tmp_path / "run"), str(tmp_path / "after"), "--verify"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    one, other = (json.loads((tmp_path / each / "generation_config.json").read_text()) for each in ("before", "after"))
    assert one == other
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    assert config["eos_token_id"] == one["eos_token_id"] and config["our_note"] == "kept"


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(imported(tmp_path))
    with (tmp_path / "before" / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    done = export(checkpoint, tmp_path / "after")
    assert any(note.endswith("or changed since the import: tokenizer_config.json") for note in done.notes)
    assert json.loads((tmp_path / "after" / "config.json").read_text())["pad_token_id"] == 3
    (tmp_path / "before" / "tokenizer.json").unlink()
    done = export(checkpoint, tmp_path / "again")
    assert any("Not kept: bos_token_id, eos_token_id" in note for note in done.notes)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_each_weight_keeps_its_own_type(tmp_path: Path, dtype: str | None) -> None:
    """Published files mix types: DeepSeek's have the biases of routing in fp32 between weights in bf16."""
    before, after = tmp_path / "before", tmp_path / "after"
    publish(before, CASES[FAMILIES["deepseek_v3"]], torch.bfloat16)
    weights = load_file(before / "model.safetensors")
    wide = [name for name in weights if name.endswith(("e_score_correction_bias", "norm.weight"))]
    weights |= {name: torch.rand(weights[name].shape) for name in wide}
    save_file(weights, before / "model.safetensors", {"format": "pt"})
    import_model(before, tmp_path / "checkpoint", sequence_length=24)
    words = [str(tmp_path / "checkpoint"), str(after), "--verify", *([f"--dtype={dtype}"] if dtype else [])]
    assert tool("to_hf").main(words) == 0
    written = load_file(after / "model.safetensors")
    assert wide and written.keys() == weights.keys()
    for name, tensor in weights.items():
        wanted = tensor.float() if dtype else tensor
        assert written[name].dtype == wanted.dtype and written[name].equal(wanted), name
    assert json.loads((after / "config.json").read_text())["dtype"] == (dtype or "bfloat16")


def test_lengths_and_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    publish(tmp_path / "before", CASES[FAMILIES["llama"]])
    import_model(tmp_path / "before", tmp_path / "checkpoint", sequence_length=10_000)
    notes = export(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "after").notes
    assert any("model_max_length of the tokenizer is 8192" in note and "10000 tokens" in note for note in notes)
    _, notes = write_tokenizer(tmp_path / "after", TokenizerSection(path=str(tmp_path / "before")), "llama", 77)
    assert notes == ["model_max_length is 77, the run's length. The tokenizer's folder says 8192"]


def test_ids_of_a_class_beyond_a_vocabulary_are_named(tmp_path: Path) -> None:
    """glm4's own defaults are ids of its published vocabulary."""
    config = transformers.Glm4Config(**CASES[FAMILIES["glm4"]].to_diff_dict() | {"eos_token_id": [151329, 2]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "before")
    import_model(tmp_path / "before", tmp_path / "checkpoint", sequence_length=24)
    done = export(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "after")
    said = "eos_token_id=[151329, 2] is beyond the vocabulary of 61 ids, as in the imported model"
    assert said in done.notes
    assert json.loads((tmp_path / "after" / "config.json").read_text())["eos_token_id"] == [151329, 2]


def test_verify_fails_where_transformers_makes_other_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Qwen2 model with another tokenizer, as distilled models have it: version 5 opens it by Qwen2's rules."""
    publish(tmp_path / "before", CASES[FAMILIES["qwen2"]])
    (tmp_path / "before" / "tokenizer.json").write_text(tokenizer_json("llama3"), encoding="utf-8")
    words = [str(tmp_path / "before"), str(tmp_path / "checkpoint"), "--sequence-length=24", "--verify"]
    assert tool("from_hf").main(words) == 1
    said = capsys.readouterr().out
    assert "NOT verified" in said and "Qwen2Tokenizer of transformers 5" in said and "of 1000 texts" in said


def test_a_model_in_the_hubs_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "models--lab--model"
    publish(root / "snapshots" / "abc", CASES[FAMILIES["llama"]])
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted((root / "snapshots" / "abc").iterdir())):
        file.rename(root / "blobs" / f"{number:040x}")
        file.symlink_to(root / "blobs" / f"{number:040x}")
    assert tool("from_hf").main([str(root), str(tmp_path / "out")]) == 2
    assert str(root / "snapshots" / "abc") in capsys.readouterr().err
    assert tool("from_hf").main([str(root / "snapshots" / "abc"), str(tmp_path / "out")]) == 0
    path = yaml.safe_load(open_checkpoint(tmp_path / "out").meta.config)["tokenizer"]["path"]
    assert path == str(root / "snapshots" / "abc" / "tokenizer.json")


def test_a_tokenizer_without_files_is_named(tmp_path: Path) -> None:
    for section, name in ((TokenizerSection(type="bytes"), "(bytes)"), (TokenizerSection(path="x"), "(huggingface x)")):
        _, (note,) = write_tokenizer(tmp_path, section, "llama", 77)
        assert f"the tokenizer {name} is no local tokenizer.json" in note


def test_without_a_tokenizer_there_are_no_special_ids(tmp_path: Path) -> None:
    """glm4's own defaults are ids of its published vocabulary."""
    source, _ = checkpoint_of(tmp_path, MODELS["glm4"])
    export(source, tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [], None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id is None and model.generate(
        torch.tensor([[1, 2]]), max_new_tokens=5
    ).shape == (1, 7)


def test_an_inner_size_that_is_the_derived_one_is_no_difference() -> None:
    values = {"layers": "mamba2 x2", "hidden_size": 32, "vocab_size": 61, "norm": {"type": "rmsnorm"}}
    values["mamba2"] = {"head_dim": 8, "state_size": 8, "inner_size": 64}
    model = resolve({"model": values, "training": {"steps": 1, "sequence_length": 16}})
    assert hf_config(model)[0].name == "mamba2"


def test_a_deep_model_is_verified(tmp_path: Path) -> None:
    """Its rounding is more than 1e-5 of the largest logit."""
    model = MODELS["olmo_hybrid"] | {"layers": "(gated_delta/mlp gated_delta/mlp gated_delta/mlp attention/mlp) x2"}
    source, _ = checkpoint_of(tmp_path, model)
    export(source, tmp_path / "out")
    proof = prove(source, tmp_path / "out", None)
    assert proof.holds and proof.relative < proof.bound / 2
    assert not replace(proof, difference=proof.largest * proof.bound * 1.01).holds


def test_each_tokenizer_without_rules_in_json_is_compared_by_its_own_ids(tmp_path):
    """Two of one class and equal settings, whose vocabularies are in files of another name."""
    for name, words in (("one", "A\nB"), ("two", "B\nA")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vocab.txt").write_text(f"<cls>\n<pad>\n<eos>\n<unk>\n{words}\n<mask>")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert getattr(theirs, "backend_tokenizer", None) is None
        ids = theirs(list(real_texts()), add_special_tokens=False)["input_ids"]
        ours = SimpleNamespace(hash=name, encode_batch=lambda texts, ids=ids: ids)
        assert differing(folder, ours) == ""
    assert theirs("A B", add_special_tokens=False)["input_ids"] == [5, 4]
