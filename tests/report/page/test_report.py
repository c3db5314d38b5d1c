"""The HTML report: what it is made from, what stands on it, and that a browser shows it without a network."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from pathlib import Path

import pytest
from bokeh.resources import Resources

from megatron.config import load, save_resolved
from megatron.report.ledger import KINDS
from megatron.report.page.charts import Charts, thinned
from megatron.report.page.history import RunHistory, StepAxis, named_runs, numbers
from megatron.report.page.sections import noise_scales, sections
from tests.config.broken import BASE
from tests.report.page.browser import opened
from tools.report import main

HOSTILE = "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title='taken over'\">"


def lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def record(step: int, loss: float | None) -> dict:
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3 / (1 + step),
        "grad_norm": 1.0 + step % 3,
        "tokens": 64 * (step + 1),
        "tokens_per_second": 100.0,
        "tflops": 0.5,
        "mfu": 0.25,
        "peak_tflops": 2.0,
        "step_seconds": 36.0,
        "data_seconds": 1.0,
        "memory_bytes": 2**30,
        "eta_seconds": None,
        "moe": {"1": {"max_over_mean": 1.5, "load": [0.25, 0.75], "dead": 0}},
        "guests": {HOSTILE: 3.0},
        "statistics": {f"layers.{layer}": {"weight": 2.0, "activation": 0.5} for layer in range(12)},
        "noise_scale": {"noise": 4.0 + step % 5, "signal": step % 3 - 0.5},
        "communication": {"data": {"all_reduce": {"messages": 2, "bytes": 2**20}}},
    }


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Runs a and b. B went back once from step 80 to step 60, and its texts try to take over the page."""
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text(BASE)
    for name in ("a", "b"):
        rate = "optimizer.lr=0.002" if name == "b" else "optimizer.lr=0.001"
        resolved = load(["base.yml"], [f"run.dir={name}", rate], ranks=2, check_inputs=False)
        save_resolved(resolved, Path(name, "config.yml"))
        records: list[dict] = [record(step, 5.0 - step / 50) for step in range(100)]
        records.insert(
            50, {"step": 50, "validation": {"pile": {"loss": 3.5, "perplexity": math.exp(3.5), "tokens": 9}}}
        )
        records.append({"step": 100, "tasks": {"arc_easy": {"acc": 0.5, "acc_stderr": 0.1}}})
        lines(Path(name, "metrics.jsonl"), records)
        events = [{"event": "start", "time": "2026-01-02T03:04:05.678+00:00", "step": 0, "ranks": 2}]
        events += [{"event": "batches", "first_step": 0, "hashes": ["0" * 16]}]
        lines(Path(name, "ledger.jsonl"), [*events, {"event": "end", "time": "2026-01-02T04:00:00", "step": 100}])
    lines(Path("b", "metrics.superseded.jsonl"), [record(step, 9.0) for step in range(60, 80)])
    lines(Path("b", "samples.jsonl"), [{"step": 100, "prompt": HOSTILE, "text": "<b>bold</b>"}])
    return tmp_path


def test_a_run_is_read_as_it_was(runs):
    a, b = named_runs(["a", "b"])
    assert a.metric("loss").values == [5.0 - step / 50 for step in range(100)] and a.abandoned == []
    assert [each.steps for each in b.abandoned] == [list(range(60, 80))] and set(b.abandoned[0].values) == {9.0}
    assert b.validation["pile"]["loss"].steps == [50] and b.tasks["arc_easy"]["acc"].values == [0.5]
    assert [each["event"] for each in b.events] == ["start", "end"]
    assert b.metric("moe/1/max_over_mean").values == [1.5] * 100 and b.metric("moe/1/load").values == []


def test_the_noise_scale_is_a_quotient_of_means(runs):
    a, _ = named_runs(["a", "b"])
    noise, signal = ([4.0 + step % 5 for step in range(100)], [step % 3 - 0.5 for step in range(100)])
    found = noise_scales(a, None)  # the first two signals have a mean of 0, so there is no scale
    assert found.steps == list(range(2, 100))
    means = [statistics.mean(noise[: end + 1]) / statistics.mean(signal[: end + 1]) for end in found.steps]
    assert found.values == pytest.approx(means)
    recent = noise_scales(a, 30)
    assert recent.values[-1] == pytest.approx(statistics.mean(noise[-30:]) / statistics.mean(signal[-30:]))
    assert noise_scales(a, 1).steps == [step for step in range(100) if signal[step] > 0]


def test_each_way_back_is_a_branch_of_its_own(tmp_path):
    lines(tmp_path / "metrics.jsonl", [record(0, 1.0)])
    abandoned = [record(step, 1.0) for step in (3, 4, 5, 4, 5, 6)] + [{"step": 6, "validation": {}}, record(7, None)]
    lines(tmp_path / "metrics.superseded.jsonl", abandoned)
    found = RunHistory.read(tmp_path, "run").abandoned
    assert [each.steps for each in found] == [[3, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, True, "text", [1.0]])
def test_what_is_no_number_is_not_drawn(bad):
    assert numbers({"a": {"b": bad, "c/d": 2}}) == {"a/c/d": 2.0}


def test_tokens_and_hours_between_records():
    """Records of every tenth step: 36 s a step are a hundredth of an hour."""
    clock = StepAxis.of([{"step": step, "tokens": 64 * (step + 1), "step_seconds": 36.0} for step in (0, 10, 20)])
    for step in (0, 1, 5, 11, 16, 21):
        assert clock.at(step) == pytest.approx((64 * step, step / 100))
    assert StepAxis.of([]).at(5) == (0.0, 0.0)


def test_a_thinned_curve_keeps_its_spikes():
    values = [math.sin(step / 100) for step in range(100_000)]
    values[70_001], values[12_345] = 50.0, -50.0
    points = thinned(range(100_000), values, 1000)
    assert len(points) <= 1000 and points == sorted(points)
    assert {(70_001, 50.0), (12_345, -50.0), (0, values[0]), (99_999, values[-1])} <= set(points)
    assert thinned([1, 2], [3.0, 4.0], 1000) == [(1, 3.0), (2, 4.0)]


def test_names_of_runs_are_the_shortest_that_differ(tmp_path):
    for folder in ("x/run", "y/run", "y/other"):
        (tmp_path / folder).mkdir(parents=True)
        lines(tmp_path / folder / "metrics.jsonl", [record(0, 1.0)])
    found = named_runs([str(tmp_path / folder) for folder in ("x/run", "y/run", "y/other")])
    assert [run.name for run in found] == ["x/run", "y/run", "y/other"]
    assert [run.name for run in named_runs([str(tmp_path / "x/run")])] == ["run"]


@pytest.mark.tour
def test_a_browser_shows_every_section_without_a_network(runs, capsys):
    assert main(["a", "b", "--output", "both.html"]) == 0
    text = Path("both.html").read_text()
    own = text.replace(Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render_js(), "")
    assert len(text) < 5e6 and len(own) < 1e6 and not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    script = """
        const result = document.createElement("pre")
        result.id = "result"
        const buttons = []
        const inside = (node) => {
            if (node.shadowRoot) inside(node.shadowRoot)
            for (const child of node.children ?? []) inside(child)
            if (node.tagName === "BUTTON") buttons.push(node)
        }
        inside(document.body)
        const document_ = Bokeh.documents[0]
        const charts = document_._roots.filter((each) => each.type === "Figure")
        const ends = () => charts.filter((each) => each.x_range.type === "DataRange1d")
            .map((each) => Math.round(100 * each.x_range.end))
        // Bokeh finds the ends of an axis when it draws, some frames after the change.
        const drawn = async (changed) => {
            for (let frame = 0; frame < 1000 && !changed(Math.max(...ends())); frame++)
                await new Promise((next) => requestAnimationFrame(() => setTimeout(next, 20)))
            return ends()
        }
        const change = async () => {
            const before = await drawn((end) => end > 0)
            buttons.find((each) => each.textContent.trim() === "tokens").click()
            const after = await drawn((end) => end !== Math.max(...before))
            result.textContent = JSON.stringify({
                buttons: buttons.length, charts: charts.length, before, after,
                labels: [...new Set(charts.map((each) => each.below[0].axis_label))],
            })
            document.body.append(result)
        }
        change()
    """
    shown = opened(Path("both.html"), script=script)
    assert "<title>a, b</title>" in shown and "taken over</title>" not in shown
    titles = re.findall(r"<h2 id=\"(\w+)\"", shown)
    first = ["overview", "loss", "validation", "tasks", "recipe", "norms", "noise", "speed", "memory"]
    assert titles == [*first, "communication", "data", "experts", "other", "samples", "events", "configuration"]
    result = json.loads(re.search(r'<pre id="result">(.*?)</pre>', shown).group(1))
    assert result["buttons"] >= 3 and result["charts"] >= 14
    assert set(result["labels"]) >= {"tokens", "expert"} and "hours of training" not in result["labels"]
    # The axis has gone from 100 steps to 6,400 tokens, with the room that Bokeh leaves at the ends.
    assert 99_00 <= max(result["before"]) <= 120_00 and 6_300_00 <= max(result["after"]) <= 7_700_00


def test_texts_of_a_run_stay_texts(runs):
    assert main(["b"]) == 0
    text = Path("b", "report.html").read_text()
    assert HOSTILE not in text and "&lt;b&gt;bold&lt;/b&gt;" in text
    assert text.count("<script") == text.count("</script>")


def test_a_difference_of_the_configurations_is_listed(runs):
    assert main(["a", "b", "--output", "both.html"]) == 0
    row = re.search(r"<tr><td>optimizer.lr</td>(.*?)</tr>", Path("both.html").read_text()).group(1)
    assert re.findall(r"<td>(.*?)</td>", row) == [
        "0.001",
        "0.002",
        "argument optimizer.lr=0.001",
        "argument optimizer.lr=0.002",
    ]


def test_bad_input_is_refused(runs, capsys):
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged", "metrics.jsonl").write_text("{\n{}\n")
    for folder, words in (("nothing", "No such file"), ("empty", "No such file"), ("damaged", "damaged")):
        assert main([folder]) == 2
        assert words in capsys.readouterr().err and not Path(folder, "report.html").exists()
    before = Path("a", "metrics.jsonl").read_bytes()
    assert main(["a", "--output", "a/metrics.jsonl"]) == 2
    assert Path("a", "metrics.jsonl").read_bytes() == before


ODD = (None, True, -1, 2**70, 1e308, 0.5, "", "text", [], [None], [1.0, "a"], {}, {"a": None}, {"a": {"b": []}})


def changed(value, draw: random.Random):
    """A JSON value with one part of it, at any depth, in another shape."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.3:
        return draw.choice(ODD)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if draw.random() < 0.2:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        kept = [(name, each) for name, each in pairs if name != key]
        return dict(kept) if isinstance(value, dict) else [each for _, each in kept]
    other = value.copy()
    other[key] = changed(value[key], draw)
    return other


@pytest.mark.parametrize("seed", range(8))
def test_odd_shapes_cost_lines_and_never_the_report(runs, seed, capsys):
    """Lines that are JSON, and not what a run writes: sections, charts and tables are made of the others."""
    draw = random.Random(seed)
    spent = {"since": 1.0, "attempt": 0, "completed": 9} | dict.fromkeys(KINDS, 1.5) | {"within": {"forward": 1.0}}
    with Path("b", "ledger.jsonl").open("a") as file:
        file.write(json.dumps({"event": "checkpoint", "step": 9, "stall_seconds": 0.5, "spent": spent}) + "\n")
        file.write(json.dumps({"event": "restart", "attempt": 1, "since": 1.0, "failed": 2.0, "ended": 3.0}) + "\n")
    for name in ("metrics.jsonl", "metrics.superseded.jsonl", "ledger.jsonl", "samples.jsonl"):
        path = Path("b", name)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for place in draw.choices(range(len(records)), k=5):
            records[place] = changed(records[place], draw)
        lines(path, records)
    made = sections(named_runs(["a", "b"]), Charts())
    assert {"overview", "loss", "events"} <= {each.name for each in made}
    assert "damaged and skipped" in capsys.readouterr().err
