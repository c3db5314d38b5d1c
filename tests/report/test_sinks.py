"""TensorBoard and Weights & Biases receive the numbers. Only rank 0 has sinks. Peaks of devices."""

from __future__ import annotations

import json
import sys

import pytest

from megatron.report.jsonl import read_lines, supersede
from megatron.report.peaks import device_peak
from megatron.report.sinks import open_sinks
from megatron.report.tensorboard import tagged
from megatron.report.weights_and_biases import _known
from tests.training.settings import settings

RECORDS = [
    {"step": 0, "loss": 4.25, "batch_hash": "00ff"},
    {"step": 1, "loss": 3.125, "batch_hash": "01ff"},
    {"step": 2, "validation": {"pile": {"loss": 3.0, "perplexity": 20.0855, "tokens": 64}}},
]


def config(tmp_path, **logging):
    return settings(run={"dir": str(tmp_path / "run"), "name": "trial"}, logging={"console": "quiet", **logging})


def write(sinks) -> None:
    for record in RECORDS:
        sinks.write(record)
    sinks.close()


def test_jsonl_is_always_there_and_only_on_rank_0(tmp_path):
    write(open_sinks(config(tmp_path), rank=1))
    assert not (tmp_path / "run").exists()
    write(open_sinks(config(tmp_path)))
    assert list(read_lines(tmp_path / "run/metrics.jsonl")) == RECORDS


def test_tensorboard_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(open_sinks(config(tmp_path, tensorboard=True)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(0, 4.25), (1, 3.125)]
    assert [(e.step, e.value) for e in events.Scalars("loss/pile")] == [(2, 3.0)]
    assert "step" not in events.Tags()["scalars"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"id": 3}', b'{"id": "a", "last_step": "x"}'])
def test_a_damaged_note_of_the_wandb_run_is_a_new_run(tmp_path, capsys, content):
    (tmp_path / "wandb.json").write_bytes(content)
    assert set(_known(tmp_path / "wandb.json")) == {"id"}
    assert "wandb.json is damaged" in capsys.readouterr().err


@pytest.mark.tour
def test_wandb_offline_keeps_one_run_over_a_resume(tmp_path, monkeypatch, capfd):
    """And says nothing: its closing table would cover our summary."""
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    wanted = config(tmp_path, wandb={"mode": "offline", "project": "tests"})
    write(open_sinks(wanted, settings={"training": {"steps": 3}}))
    first = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{first}.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"perplexity/pile" in content and b"3.125" in content
    sinks = open_sinks(wanted, start=3)
    sinks.write({"step": 3, "loss": 2.0})
    sinks.close()
    assert capfd.readouterr() == ("", "")
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == first


def test_wandb_loses_nothing_of_a_run_that_goes_back(tmp_path, monkeypatch):
    """Offline, where nothing can be rewound, the steps that come again are of another run in the same group."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    wanted = config(tmp_path, wandb={"mode": "offline", "project": "tests"})
    write(open_sinks(wanted))
    first = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert first["last_step"] == 2 and first["last_training_step"] == 1
    sinks = open_sinks(wanted, start=1)
    sinks.write({"step": 1, "loss": 2.71875})
    sinks.close()
    second = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert second["id"] != first["id"] and second["last_step"] == 1
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{second['id']}.wandb")
    assert b"2.71875" in file.read_bytes() and b"trial" in file.read_bytes()


def test_a_plain_resume_loses_no_evaluation(tmp_path, monkeypatch):
    """A run that stopped after an evaluation continues from there: the point stays, and W&B has one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_SILENT", "true")
    wanted = config(tmp_path, tensorboard=True, wandb={"mode": "offline", "project": "tests"})
    write(open_sinks(wanted))
    first = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    supersede(tmp_path / "run" / "metrics.jsonl", 2)
    sinks = open_sinks(wanted, start=2)
    sinks.write({"step": 2, "loss": 2.5})
    sinks.write({"step": 4, "validation": {"pile": {"loss": 2.75}}})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/pile")] == [(2, 3.0), (4, 2.75)]
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(0, 4.25), (1, 3.125), (2, 2.5)]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == first


@pytest.mark.parametrize("rewinds", [True, False])
def test_wandb_online_rewinds_where_the_server_can(tmp_path, monkeypatch, rewinds):
    """A stand-in for the service: it notes how runs are opened, and refuses to rewind like an older server."""
    import wandb

    opened, logged = [], []

    class Run:
        def __init__(self, name):
            self.id = name
            self.log = lambda values, step: logged.append((step, "loss/train" in values))
            self.define_metric = self.finish = lambda *_, **__: None

    def init(**given):
        opened.append(given)
        if "resume_from" in given and not rewinds:
            raise wandb.errors.CommError("rewind is not available")
        return Run(given["resume_from"].partition("?")[0] if "resume_from" in given else given["id"])

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    wanted = config(tmp_path, wandb={"mode": "online", "project": "tests"})
    write(open_sinks(wanted))
    first = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    sinks = open_sinks(wanted, start=2)
    sinks.write({"step": 2, "loss": 2.5})
    sinks.close()
    now = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert opened[1]["resume_from"] == f"{first}?_step=1" and now["last_step"] == 2
    assert logged[-2:] == [(2, False), (2, True)], "the evaluation again, then the next training step"
    assert (now["id"] == first) == rewinds
    if not rewinds:
        assert opened[2]["id"] == now["id"] and opened[2]["group"] == opened[0]["group"] == "trial"
    else:
        assert len(opened) == 2
    open_sinks(wanted, start=3).close()
    assert opened[-1]["id"] == now["id"] and opened[-1]["resume"] == "allow" and "resume_from" not in opened[-1]


def test_tags_are_grouped_and_keep_lists():
    record = {"step": 1, "loss": 2.0, "lr": 0.1, "odd": 3, "moe": {"4": {"dead": 0, "load": [0.25, 0.75]}}}
    assert tagged(record) == {
        "loss/train": 2.0,
        "optimizer/lr": 0.1,
        "train/odd": 3,
        "experts/layer_4/dead": 0,
        "experts/layer_4/load/0": 0.25,
        "experts/layer_4/load/1": 0.75,
    }
    assert tagged(RECORDS[2]) == {"loss/pile": 3.0, "perplexity/pile": 20.0855, "tokens/pile": 64}


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="logging.wandb.mode: offline"):
        open_sinks(config(tmp_path, wandb={"mode": "offline"}))


@pytest.mark.parametrize(
    "name, compute, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA GH200 480GB", "fp16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_peaks_by_the_names_that_torch_gives(name, compute, tflops):
    peak = device_peak(name, compute)
    assert peak.tflops == tflops and name in peak.source


def test_unknown_peaks_say_why():
    for name, compute in (("cpu", "bf16"), ("NVIDIA GeForce RTX 9999", "bf16"), ("Tesla V100-SXM2-32GB", "bf16")):
        peak = device_peak(name, compute)
        assert peak.tflops is None and name in peak.source and "logging.peak_tflops" in peak.source
    assert device_peak("cpu", "fp32", given=1.5).tflops == 1.5
