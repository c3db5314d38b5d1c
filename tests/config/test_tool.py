"""tools/config.py as a user calls it, its documents, and what it writes."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron.config import load, read_resolved
from megatron.config.arithmetic.tokenizer_size import SizeUnknown, tokenizer_size
from megatron.config.schema import ANY, catalog, describe_type, pattern_of
from megatron.config.show.reference import explain
from megatron.config.source.structure import nearest_key
from tests.config.test_merge import BASE_TEXT
from tests.paths import ROOT, shared
from tools.config import main


@pytest.fixture
def tool(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a.yml. Gives (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(BASE_TEXT)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(list(arguments))
        except SystemExit as leave:
            status = leave.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_show_prints_what_can_be_read_again(tool, tmp_path):
    status, out, err = tool("show", "a.yml", "training.steps=500", "--ranks", "2")
    assert status == 0
    (tmp_path / "resolved.yml").write_text(out)
    assert read_resolved("resolved.yml") == load(["a.yml"], ["training.steps=500"], ranks=2).config
    assert "override: training.steps = 500 (argument training.steps=500) over 10 (a.yml:3)" in err


def test_show_as_json(tool):
    status, out, _ = tool("show", "a.yml", "optimizer.epsilon=1e-8", "--json", "--ranks", "2")
    found = json.loads(out)
    assert status == 0 and found["config"]["optimizer"]["epsilon"] == 1e-8 and found["ranks"] == 2
    assert found["origins"]["training.steps"] == {"kind": "file", "file": "a.yml", "line": 3}
    assert found["origins"]["training.global_batch_size"]["kind"] == "derived"


@pytest.mark.parametrize(
    "key, says",
    [
        (
            "training.steps",
            [
                "training.steps = 9",
                "from:    argument training.steps=9",
                "over 10 (a.yml:3)",
                "in steps",
                "default: whole batches of training.epochs",
            ],
        ),
        (
            "model.attention.head_dim",
            ["= 16", "derived: model.hidden_size / model.attention.heads", "Channels per head."],
        ),
        ("optimizer.lr", ["optimizer.lr = 0.0003", "from:    default", "Peak learning rate.", "a number in [0, 1000]"]),
        ("optimizer.groups.norm.weight_decay", ["= 0.0", "from:    default"]),
        ("logging.peak_tflops", ["= null", "at start: from the device's name", "in TFLOP/s"]),
        ("data.train", ["data.train = []"]),
        (
            "zero.offload_optimizer",
            ["zero.offload_optimizer.device = 'none'", "zero.offload_optimizer.pin_memory = false"],
        ),
    ],
)
def test_explain(tool, key, says):
    status, out, _ = tool("explain", key, "a.yml", "training.steps=9")
    assert status == 0
    for fragment in says:
        assert fragment in out


def test_explain_without_a_run(tool):
    status, out, _ = tool("explain", "optimizer.lr", "--json")
    found = json.loads(out)
    assert (
        status == 0
        and found["default"] == 3e-4
        and found["meaning"] == "Peak learning rate."
        and found["value"] is None
    )


def test_explain_an_unknown_key(tool):
    status, out, err = tool("explain", "optimizer.learning")
    assert status == 2 and out == "" and "no such key" in err


def test_every_key_can_be_explained():
    for key in catalog().values():
        for entry in explain(key.name.replace(ANY, "0"), None):
            assert entry.text().count("meaning: ") == 1 and entry.to_json()["type"]


def test_check(tool):
    status, out, err = tool("check", "a.yml", "--ranks", "4", "parallel.tensor=2")
    assert status == 0 and err == ""
    assert out == (
        "a: no problems on 4 ranks (tensor 2 x pipeline 1 x data 2, ZeRO 1): "
        "2 samples per step = micro-batch 1 x accumulation 1 x data 2\n"
        "10 steps = 320 tokens (give --gpu NAME for days and GPU-hours)\n"
    )
    assert tool("check", "a.yml", "--ranks", "1")[1].startswith("a: no problems on 1 rank (")
    out = tool("check", "a.yml", "--ranks", "4", "parallel.tensor={rows: 2, columns: 2}")[1]
    assert "(tensor 2 x columns 2 x pipeline 1 x data 1, ZeRO 1)" in out
    status, out, _ = tool("check", "a.yml")
    assert status == 0 and "not checked (give --ranks)" in out
    found = json.loads(tool("check", "a.yml", "--ranks", "4", "--json")[1])
    assert found["ok"] and found["layout"]["data"] == 4 and found["batch"]["global_batch_size"] == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("check", "a.yml", "--ranks", "0"),
        ("check", "a.yml", "--ranks", "two"),
        ("check", "a.yml", "--fast"),
        ("nonsense",),
        (),
        ("check", "training.steps=5"),
        ("docs", "a.yml"),
        ("convert", "a.yml"),
        ("show", "gone.yml"),
    ],
)
def test_misuse_has_status_2(tool, arguments):
    status, out, err = tool(*arguments)
    assert status == 2 and out == "" and err


def test_schedule(tool):
    status, out, _ = tool("schedule", "a.yml", "training.steps=100", "schedule.warmup_steps=10", "--json")
    points = {each["step"]: each["lr"] for each in json.loads(out)["points"]}
    assert (
        status == 0
        and points[0] == 0.0
        and points[10] == pytest.approx(3e-4)
        and points[5] == pytest.approx(1.5e-4)
        and max(points) == 99
    )
    status, out, _ = tool("schedule", "a.yml", "training.steps=100", "schedule.warmup_steps=10")
    assert status == 0 and "peak 0.0003, step 0: 0, last step 99:" in out
    status, _, err = tool("schedule", "a.yml", "schedule.warmup_tokens=64")
    assert status == 2 and "give --ranks" in err


def test_layers(tool):
    """The table of what the layers count, a line for each, and the sums."""
    status, out, _ = tool("layers", "a.yml", "--json")
    document = json.loads(out)
    assert status == 0 and document["parameters"] == sum(row["parameters"] for row in document["layers"])
    assert document["training_flops"] == 3 * sum(row["flops"] for row in document["layers"])
    status, out, _ = tool("layers", "a.yml")
    lines = out.splitlines()
    names = [name.removesuffix("_bytes") for name in document["layers"][0]]
    assert status == 0 and lines[0].split() == [*names[:2], "layers", *names[2:]]
    rows = [line.split("  ") for line in lines[1:-2]]
    assert [row[0] for row in rows] == ["embedding", "layers.0 ... layers.1", "head"]
    assert lines[2].split()[4] == "2" and "KiB" in lines[2]  # two equal layers on one line
    assert lines[-2].startswith(f"parameters: {document['parameters']:,} (")
    assert lines[-1] == (
        f"FLOPs per token: {document['forward_flops']:,} forward, {document['training_flops']:,} forward and backward"
    )
    status, out, _ = tool("layers", "a.yml", "training.activation_checkpointing.mode=full")
    assert status == 0 and out.splitlines()[-1].endswith("with recomputation")
    status, out, err = tool("layers", "a.yml", "model.vocab_size=null")
    assert status == 2 and out == "" and "model.vocab_size" in err


def test_convert(tool, tmp_path):
    flat = {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 16,
        "max-position-embeddings": 16,
        "train-iters": 7,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "adam", "params": {"lr": 0.001}},
    }
    (tmp_path / "old.yml").write_text(json.dumps(flat, indent=1))
    status, out, _ = tool("convert", "old.yml")
    assert status == 0 and yaml.safe_load(out)["model"]["hidden_size"] == 64
    assert tool("convert", "old.yml", "-o", "new.yml")[0] == 0
    more = ["model.vocab_size=100"]
    assert (
        load(["new.yml"], more, ranks=1, check_inputs=False).config.model
        == load(["old.yml"], more, ranks=1, check_inputs=False).config.model
    )
    assert json.loads(tool("convert", "old.yml", "--json")[1])["yaml"] == out
    (tmp_path / "bad.yml").write_text(json.dumps({**flat, "pos-emb": "rpe"}, indent=1))
    status, out, err = tool("convert", "bad.yml")
    assert status == 2 and out == "" and "bad.yml:" in err and "pos-emb" in err


def test_documentation_is_up_to_date(tool):
    status, out, err = tool("docs", "--check")
    assert status == 0, err


def test_documentation_has_every_key():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "configuration").glob("*.md"))
    for key in catalog().values():
        assert key.sentence and key.sentence.endswith((".", ")")), key.name
        assert key.section or f"| `{key.name}` |" in text or key.name == "deepspeed"


def test_editor_schema_judges_as_the_loader_does(tmp_path):
    import jsonschema

    schema = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    good = yaml.safe_load(BASE_TEXT)
    for more in (
        {},
        {"precision": "bf16"},
        {"precision": {"compute": "fp16"}},
        {"extends": ["a.yml"]},
        {"data": {"train": ["a", {"path": "b"}]}},
        {"data": {"validation": {"web": "a"}}},
        {"optimizer": {"betas": [0.9, 0.95]}},
        {"optimizer": {"groups": {"norm": {"lr_scale": 2.0}}}},
    ):
        assert check.is_valid({**good, **more}), more
    for more in (
        {"precision": "fp8"},
        {"zero": {"stage": 4}},
        {"modle": {}},
        {"optimizer": {"lr": "1e-3"}},
        {"training": {"stepps": 5}},
        {"optimizer": {"groups": {"nrom": {}}}},
    ):
        assert not check.is_valid({**good, **more}), more


def test_words_for_types():
    words = {
        name: describe_type(
            catalog()[pattern_of(tuple(name.split(".")))].annotation,
            catalog()[pattern_of(tuple(name.split(".")))].limits,
        )
        for name in (
            "zero.stage",
            "training.steps",
            "model.dropout",
            "optimizer.betas",
            "parallel.pipeline_split",
            "data.split",
        )
    }
    assert words == {
        "zero.stage": "one of 0, 1, 2, 3",
        "training.steps": "a whole number in [0, 1000000000000]",
        "model.dropout": "a number in [0, 1)",
        "optimizer.betas": "a list of 2 numbers",
        "parallel.pipeline_split": "one of uniform, parameters, flops or a list of whole numbers",
        "data.split": "a list of numbers",
    }


@pytest.mark.parametrize(
    "key, advice",
    [
        ("model.num_heads", ""),
        ("training.lr", "optimizer.lr"),
        ("optimizer.weight-decay", "optimizer.weight_decay"),
        ("zero_stage", "zero.stage"),
        ("model.attention_heads", "model.attention.heads"),
        ("training.seq_length", "training.sequence_length"),
        ("micro_batch_size", "training.micro_batch_size"),
        ("model.window", "model.attention.window"),
        ("parallel.tensr", "parallel.tensor"),
    ],
)
def test_advice_about_unknown_keys(key, advice):
    assert advice in nearest_key(tuple(key.split(".")))


def sized(**section) -> int:
    return tokenizer_size({"type": "huggingface", "path": None, **section})


def test_tokenizer_sizes_are_those_of_the_tokenizers(tmp_path):
    """Facts that are read only from files agree with the tokenizer itself."""
    from megatron.config.sections.data import TokenizerSection
    from megatron.data.tokenizer import build_tokenizer

    (tmp_path / "letters.json").write_text(json.dumps(list("abcdef")))
    sections = [
        {"type": "bytes"},
        {"type": "characters"},
        {"type": "characters", "path": str(tmp_path / "letters.json")},
    ]
    pythia = shared("data/20B_tokenizer.json")
    sections += [{"type": "huggingface", "path": str(pythia)}] if pythia else []
    for section in sections:
        assert sized(**section) == build_tokenizer(TokenizerSection(**section)).size, section


@pytest.mark.parametrize("content", ["{}", "not json", '{"model": {}}', "[]"])
def test_a_damaged_tokenizer_has_no_size(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(SizeUnknown):
        sized(path=str(tmp_path / "t.json"))
    with pytest.raises(SizeUnknown):
        sized(path="EleutherAI/gpt-neox-20b")


def test_vocabulary_follows_the_tokenizer(tool, tmp_path):
    (tmp_path / "t.json").write_text(
        json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 300}]})
    )
    config = load(["a.yml"], ["tokenizer.path=t.json", "model.vocab_size=null"], ranks=1).config
    assert config.model.vocab_size == 384, "301 ids, rounded up to a multiple of 128"


@pytest.mark.parametrize(
    "name, meant", [("optimiser.lr", "optimizer.lr"), ("model.atention.heads", "model.attention.heads")]
)
def test_explain_finds_the_key_that_is_meant(name, meant, capsys):
    assert main(["explain", name]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
