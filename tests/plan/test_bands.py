"""Where a run's time has gone: the bands sum to all of it, and what is planted comes to light in its own."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config.schema import catalog, dotted
from megatron.plan.time_bands import (
    ADVICE,
    HOST,
    TITLES,
    WITHIN,
    Band,
    _fitted,
    _split_matrix,
    advice,
    picture,
    profile,
    text,
)
from megatron.report.trace import FACTS, MARK, read_traces, sum_trace
from tests.paths import ROOT
from tests.training.test_run import TINY, job
from tests.workers import run
from tools.profile import main

# Seconds that each of these takes, on a clock that stands still otherwise.
DATA, FORWARD, EVALUATION, SAVE, LOG, MESSAGE = 7.0, 10.0, 5.0, 3.0, 2.0, 0.5
STEPS = 6


def planted(folder: str, *overrides: str) -> dict[str, float]:
    """On two ranks: a run in which time passes only where it is planted. Returns how much, by band."""
    from megatron.checkpoint.save.saver import Saver
    from megatron.data.loader import Loader
    from megatron.engine.engine import PlainEngine
    from megatron.training.hooks.log import LogHook
    from megatron.worker import beacon

    clock, spent = SimpleNamespace(now=0.0), dict.fromkeys([*TITLES, "forward"], 0.0)
    bands = {beacon.EVALUATE: "evaluation", beacon.SAVE: "save", beacon.START: "start", beacon.SETUP: "start"}
    bands[beacon.END] = "end"

    def plant(patch: pytest.MonkeyPatch, owner: type, name: str, seconds: float, band: str) -> None:
        plain = getattr(owner, name)

        def slow(*arguments, **options):
            where = bands.get(current[0]._phase if current else beacon.SETUP, band)  # validation has its loader, too
            clock.now, spent[where] = clock.now + seconds, spent[where] + seconds
            return plain(*arguments, **options)

        patch.setattr(owner, name, slow)

    leave = beacon.Beacon.leave

    def slow_message(own: beacon.Beacon) -> None:
        band = bands.get(own._phase, "communication")
        clock.now, spent[band] = clock.now + MESSAGE, spent[band] + MESSAGE
        leave(own)

    begin, current = beacon.Beacon.begin, []

    def begins(own: beacon.Beacon, step: int) -> None:
        current[:] = [own]
        begin(own, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beacon, "monotonic", lambda: clock.now)
        patch.setattr(beacon.Beacon, "leave", slow_message)
        patch.setattr(beacon.Beacon, "begin", begins)
        plant(patch, Loader, "step", DATA, "data")
        plant(patch, PlainEngine, "_begin", FORWARD, "forward")
        plant(patch, PlainEngine, "evaluate", EVALUATION, "evaluation")
        plant(patch, Saver, "save", SAVE, "save")
        plant(patch, LogHook, "_speeds", LOG, "hooks")
        job(folder, 2, *overrides)
    return spent


@pytest.fixture(scope="module")
def slowed(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("slowed")
    (folder / "tiny.yml").write_text(TINY)
    return folder / "run", run(2, planted, str(folder))[0]


def test_what_is_planted_is_in_its_own_band(slowed):
    folder, spent = slowed
    found = profile(folder)
    seconds = {each.name: each.seconds for each in found.bands}
    assert spent["evaluation"] > EVALUATION and spent["communication"] > MESSAGE
    for name in ("data", "evaluation", "save", "hooks", "communication", "start"):
        assert seconds[name] == pytest.approx(spent[name], abs=1e-4), name
    passes = sum(seconds.get(name, 0.0) for name in ("matrix", "below", "attention", "memory", "recompute", "host"))
    assert passes == pytest.approx(FORWARD * STEPS, abs=1e-4)
    assert found.wall == pytest.approx(sum(spent.values()), abs=1e-3)
    assert sum(each.seconds for each in found.bands) == pytest.approx(found.wall, rel=1e-12)
    measured = {each.name for each in found.bands if each.measured}
    assert measured == {"optimizer", "communication", "data", "hooks", "start", "evaluation", "save", "restarts", "end"}


def test_it_is_told_and_drawn(slowed, tmp_path, capsys):
    folder, _ = slowed
    assert main([str(folder), "--output", str(tmp_path / "bands.png")]) == 0
    said = capsys.readouterr().out
    assert "waiting for data" in said and "what to change first:" in said and "data.workers" in said
    assert (tmp_path / "bands.png").stat().st_size > 5000
    assert main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(each["share"] for each in found["bands"]) == pytest.approx(1.0, rel=1e-12)
    assert found["mfu"] == pytest.approx(found["flops"] / found["wall"] / found["peak"] / 1e12)
    assert main([str(folder / "nothing")]) == 2 and main([str(folder), "--device", "h10"]) == 2


def traced(folder: str, *overrides: str) -> None:
    with pytest.MonkeyPatch.context():
        job(folder, 1, *overrides)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """A run whose blocks are recomputed, with a trace of two of its steps."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "tiny.yml").write_text(TINY.replace("steps: 6,", "steps: 4, activation_checkpointing: {mode: full},"))
    own = ["logging.profile.start=1", "logging.profile.steps=2", "checkpoint.every=null", "evaluation.every=null"]
    run(1, traced, str(folder), *own)
    return folder / "run"


def test_a_trace_has_the_products_of_the_shapes(trace):
    found = read_traces(trace)
    assert found.steps == 2 and not found.device
    assert all(found.seconds[name] > 0 for name in ("matrix", "attention", "memory", "recompute", "optimizer", "host"))
    assert sum(found.seconds.values()) == pytest.approx(found.window)
    whole = profile(trace)
    assert found.flops / found.steps == pytest.approx(PRODUCTS, rel=1e-12)
    assert whole.matrix_rate * whole.seconds("matrix", "below") * 1e12 == pytest.approx(PRODUCTS * 4, rel=1e-9)
    sources = {each.name: (each.measured, each.source) for each in whole.bands}
    assert sources["recompute"] == sources["attention"] == sources["host"] == (True, "trace")
    assert sum(each.seconds for each in whole.bands) == pytest.approx(whole.wall, rel=1e-12)


# Forward and twice backward, of 8 x 16 tokens, through 3 blocks and a head of 257 x 32. A block has queries (32 x 32),
# keys and values (16 x 32 each), output (32 x 32) and a network of twice 32 x 128.
PRODUCTS = 3 * 2 * 8 * 16 * (3 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 32 * 128) + 257 * 32)


def span(name: str, category: str, begin: float, end: float, tid: int = 1, **arguments) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": tid, "args": arguments}


def test_kernels_count_for_what_launched_them():
    """A GPU's trace by hand, in microseconds. Its messages overlap with computation."""
    events = [
        span(MARK + "forward", "user_annotation", 0, 100),
        span(MARK + "backward", "user_annotation", 100, 300),
        span(MARK + "optimizer", "user_annotation", 300, 400),
        span("aten::mm", "cpu_op", 1, 5, **{"Input Dims": [[4, 8], [8, 16]]}),
        span("cudaLaunchKernel", "cuda_runtime", 2, 3, correlation=1),
        span("nvjet_tst", "kernel", 10, 40, 7, correlation=1),
        span("recompute", "user_annotation", 110, 130, 2),
        span("aten::mm", "cpu_op", 111, 115, 2, **{"Input Dims": [[4, 8], [8, 16]]}),
        span("cudaLaunchKernel", "cuda_runtime", 112, 113, 2, correlation=2),
        span("nvjet_tst", "kernel", 120, 150, 7, correlation=2),
        span("aten::_flash_attention_backward", "cpu_op", 140, 145, 2),
        span("cudaLaunchKernel", "cuda_runtime", 141, 142, 2, correlation=3),
        span("some_kernel", "kernel", 150, 200, 7, correlation=3),
        span("c10d::allreduce_", "cpu_op", 150, 152, 2),
        span("cudaLaunchKernel", "cuda_runtime", 151, 152, 2, correlation=4),
        span("ncclDevKernel_AllReduce", "kernel", 180, 260, 8, correlation=4),
        span("aten::add", "cpu_op", 201, 203, 2),
        span("cudaLaunchKernel", "cuda_runtime", 202, 203, 2, correlation=5),
        span("elementwise", "kernel", 210, 220, 7, correlation=5),
        span("aten::_foreach_add", "cpu_op", 310, 312),
        span("cudaLaunchKernel", "cuda_runtime", 311, 312, correlation=6),
        span("multi_tensor_apply", "kernel", 320, 380, 7, correlation=6),
    ]
    found = sum_trace({"traceEvents": events, FACTS: {"first": 1, "steps": 1, "waiting": 0.0}})
    assert {name: round(1e6 * seconds, 3) for name, seconds in found.seconds.items() if seconds} == {
        "matrix": 30, "recompute": 30, "attention": 50, "memory": 10, "communication": 50, "optimizer": 60, "host": 170,
    }  # fmt: skip
    assert found.device and found.flops == 2 * 4 * 8 * 16 and found.window == pytest.approx(400e-6)


def test_derived_bands_give_way_to_measured_ones():
    bands = {"data": Band("data", 4.0, True, ""), "matrix": Band("matrix", 9.0, False, ""),
             "memory": Band("memory", 3.0, False, "")}  # fmt: skip
    cut = {name: each.seconds for name, each in _fitted(bands, 10.0, 6.0).items()}
    assert cut == pytest.approx({"data": 4.0, "matrix": 4.5, "memory": 1.5, "host": 0.0})
    rest = _fitted(bands, 20.0, 16.0)["host"]
    assert rest.seconds == pytest.approx(4.0) and not rest.measured
    split, rate = _split_matrix(bands, 4.5e12, 1.0)
    assert rate == 0.5 and (split["matrix"].seconds, split["below"].seconds) == (4.5, 4.5)
    above, _ = _split_matrix(bands, 18e12, 1.0)  # faster than the peak that was given
    assert (above["matrix"].seconds, above["below"].seconds) == (9.0, 0.0)


def test_advice_names_keys_that_exist():
    words = " ".join([*ADVICE.values(), *HOST.values()])
    keys = {dotted(path) for path in catalog()}
    named = {each.rstrip(".") for each in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", words)}
    assert {each for each in named if not each.endswith((".py", ".md", ".jsonl"))} <= keys
    assert set(ADVICE) | {"matrix", "host"} == set(TITLES) and set(WITHIN) < set(TITLES)


def test_the_script_does_not_stand_before_pythons_own_module():
    """Python's cProfile imports `profile`, and a script's folder comes first in the search for modules."""
    before = sys.modules.pop("profile", None)
    spec = importlib.util.spec_from_file_location("profile", ROOT / "tools" / "profile.py")
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["profile"])
        assert hasattr(sys.modules["profile"], "Profile") and hasattr(sys.modules["profile"], "runctx")
    finally:
        sys.modules.pop("profile")
        if before is not None:
            sys.modules["profile"] = before


def test_texts_of_a_run_without_a_peak(slowed, tmp_path):
    found = profile(slowed[0])
    from dataclasses import replace

    unknown = replace(found, peak=None, peak_source="the peak of X is not known", matrix_rate=None)
    assert "MFU is not known: the peak of X" in text(unknown) and unknown.mfu is None and advice(unknown)
    picture(unknown, tmp_path / "x.png")
