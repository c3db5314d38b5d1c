"""bench/communication.py: what is timed is what it says, in groups that work at once, and the file it makes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from bench import runner
from bench.communication import read_options, started
from bench.messages.account_cost import added, ratios, way_of
from bench.messages.collectives import Measured, axes_of, measure, operation_of, sizes, slowest
from bench.messages.curves import compared, draw, foreign, present, put, table
from bench.messages.tuning import Tuned, draw_tuned, tune, tuned_table
from bench.plan import machine
from megatron.config.arithmetic.algorithm_table import OPERATIONS as TUNABLE
from megatron.config.arithmetic.algorithm_table import candidates, read_table
from megatron.config.problems import ConfigError, UserError
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from megatron.parallel.messages.curve import OPERATIONS, CostCurve, choose_curve, line, read_curves
from megatron.plan.devices import cluster, known_devices, measured
from megatron.plan.step import Group, collective
from tests.workers import run


def four_ranks() -> tuple:
    """Two tensor groups and two data groups: the names of the groups, bytes of every operation, and the curves."""
    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.training.world import World

    mesh = Mesh.build(Layout(tensor=2, data=2), None)
    world = World(torch.device("cpu"), mesh, GroupCommunicator(), SOLO)
    counted = {}
    for name, axis in axes_of(world).items():
        for operation in OPERATIONS:
            recorder = Recorder(mesh)
            once, size = operation_of(operation, axis, 1000, world.device)
            recorder.install()
            once()
            recorder.remove()
            counted[name, operation] = (size, recorder.tally.by("group", "operation"))
    found = measure(world, ["all_reduce", "send"], 1024, 4096, 1e-4)
    return list(axes_of(world)), counted, found.document(), dist.get_rank()


def islands_of_two() -> Tuned:
    """Two hosts that are pretended. Tensor groups are inside, the data groups and all ranks go over both."""
    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.training.world import World

    mesh = Mesh.build(Layout(tensor=2, data=2), None)
    world = World(torch.device("cpu"), mesh, GroupCommunicator(), SOLO)
    return tune(world, "aabb", 4096, 16384, 1e-4, ["gloo"])


@pytest.mark.tour
def test_algorithms_are_tuned(tmp_path):
    """Each in every form of group over several hosts. The account's bytes follow the formulas in the docs."""
    tuned = run(4, islands_of_two)
    assert all(each.table == tuned[0].table for each in tuned), "all ranks choose the same"
    found = tuned[0]
    assert {(each.hosts, each.ranks) for each in found.points} == {(1, 2), (2, 2), (2, 4)}, "one host for gloo again"
    assert [(each.operation, each.size) for each in found.points if each.ranks == 4] == [
        (operation, size) for operation in TUNABLE for size in (4096, 16384)
    ]
    for each in found.points:
        size, over, groups = each.size, each.ranks, 4 // each.ranks
        assert set(each.seconds) == {*candidates(each.operation, each.hosts, pairs=False), "backend:gloo"}
        assert all(len(times) == 5 and min(times) > 0 for times in each.rounds.values())
        ring = {"all_reduce": 4 * (over - 1) * size // over, "all_to_all": over // 2 * size}
        levels = {"all_reduce": 2 * size, "all_to_all": over // 2 * size}
        for name, crossing in each.crossing.items():
            plain = name in ("backend", "backend:gloo")
            expected = ring.get(each.operation, 2 * (over - 1) * size // over) if plain else size
            expected = expected if plain else levels.get(each.operation, size)
            assert crossing == (groups * expected if each.hosts == 2 else 0), (each.operation, name)
        fastest = min(each.seconds.values())
        chosen = each.seconds[found.table.choose(each.operation, each.hosts, each.ranks, size)]
        assert chosen <= fastest / 0.95, "the fastest, or the backend's own within 5 %"
    assert set(found.table.joins) == {("all_gather", *form) for form in ((1, 2), (2, 2), (2, 4))}
    assert all(below in (4096, 16384, 16385) for below in found.table.joins.values()), "a size, or beyond the last"
    file = tmp_path / "machine.yml"
    put(file, found.document())
    assert read_table(file) == found.table
    assert "4 on 2" in tuned_table(found) and "times faster" in tuned_table(found)
    draw_tuned(tmp_path / "tuned.png", found)
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def of_ranks() -> list[tuple]:
    return run(4, four_ranks)


def test_operations_are_those_that_they_are_called(of_ranks):
    """Each on its own group, by the account's count. S is a thousand bytes, rounded to equal parts of four bytes."""
    for names, counted, _, _ in of_ranks:
        assert names == ["tensor", "data", "world"]
        for (name, operation), (size, seen) in counted.items():
            assert 1000 <= size < 1000 + 4 * 4 and size % 4 == 0
            if operation == "send":  # to the neighbour and back
                kinds = [(kind, count) for (_, kind), count in seen.items()]
                assert sorted(kinds) == [("recv", (1, size)), ("send", (1, size))]
            else:
                assert seen == {(name, operation): (1, size)}


def test_groups_are_measured_alone_and_at_once(of_ranks):
    documents = [document for *_, document, _ in of_ranks]
    assert all(each["collectives"] and each == documents[0] for each in documents), "all ranks know the same"
    curves = [CostCurve.of(each) for each in documents[0]["collectives"]]
    assert [(each.operation, each.group, each.ranks, each.together) for each in curves] == [
        *((operation, group, 2, together) for group in ("tensor", "data") for together in (1, 2)
          for operation in ("all_reduce", "send")),
        ("all_reduce", "world", 4, 1), ("send", "world", 2, 2),
    ]  # fmt: skip
    for curve in curves:
        assert [size for size, *_ in curve.points] == [1024, 4096] and curve.hosts == 1
        assert all(0 < low <= median <= high for _, low, median, high in curve.points)
    facts = documents[0]["measured"]
    assert facts["backend"] == "gloo" and facts["ranks"] == 4 and facts["layout"] == {"tensor": 2, "data": 2}


def test_a_point_is_that_of_the_slowest_group():
    """Means over the ranks of a group: 2, 3, ... 11 in one group and 1.5 in the other."""
    first = [[8, 1.0 + n] for n in range(10)], [[8, 3.0 + n] for n in range(10)]
    found = [((0, 1), first[0]), ((2, 3), [[8, 1.5]] * 10), ((0, 1), first[1]), ((2, 3), [[8, 1.5]] * 10)]
    assert slowest(found) == (8, 3.0, 7.0, 11.0)
    assert sizes(1024, 70000) == [1024, 4096, 16384, 65536]


def curve(operation: str = "all_reduce", ranks: int = 4, together: int = 1, group: str = "data") -> CostCurve:
    """By the ring's formula, with 20 us and 1 GB/s: t = 2 (n - 1) (alpha + S / (n beta))."""
    points = [(size, 2 * (ranks - 1) * (20e-6 + size / (ranks * 1e9))) for size in sizes(2**10, 2**24)]
    return CostCurve(operation, group, ranks, 1, together, tuple((size, 0.9 * t, t, 1.1 * t) for size, t in points))


def test_a_line_is_found_again():
    alpha, beta = curve().fit()
    assert alpha == pytest.approx(120e-6) and beta == pytest.approx(4e9 / 6)
    assert line([(1, 2.0), (10, 2.0)]) == (2.0, math.inf)
    alpha, beta = line([(100, 1.0), (1000, 11.0)])  # a line through both would begin below zero
    assert alpha == 0 and beta == pytest.approx((100**2 + 1000**2 / 121) / (100 + 1000 / 11))


def test_times_between_points_and_beyond():
    found = curve()
    assert found.seconds(2**10) == found.seconds(1) == found.points[0][2]
    assert found.seconds(2**20) == pytest.approx(120e-6 + 6 * 2**20 / 4e9)
    assert found.bus_bandwidth(10**6) == pytest.approx(0.926e9, rel=0.05), "1 MB of 4 ranks, between two points"
    assert found.seconds(2**26) == pytest.approx(120e-6 + 6 * 2**26 / 4e9), "the last two points' bandwidth"
    several = [curve(), curve(together=2), curve(group="tensor"), curve("all_gather")]
    assert choose_curve(several, "all_reduce", 4, 1).together == 2
    assert choose_curve(several, "all_reduce", 4, 1, "tensor").group == "tensor"
    assert choose_curve(several, "all_reduce", 4, 2) is None and choose_curve(several, "all_reduce", 2, 1) is None


def test_a_plan_takes_measured_times(tmp_path):
    file = tmp_path / "machine.yml"
    put(file, Measured({"device": "cpu"}, (curve(),)).document())
    at = cluster(8, "h100", path=str(file))
    group = Group(4, 4)
    assert collective(at, group, "all_reduce", 2**21, 2) == pytest.approx(2 * curve().seconds(2**20), rel=1e-3)
    plain = cluster(8, "h100")
    for operation, other in (("all_gather", group), ("all_reduce", Group(8, 8))):
        assert collective(at, other, operation, 2**20) == collective(plain, other, operation, 2**20)


def test_what_is_in_the_file_stays(tmp_path):
    file = tmp_path / "machine.yml"
    network = "networks:\n  mine: {bandwidth: 1, adapters: 1, latency: 1}\n"
    file.write_text(network)
    found = Measured({"device": "cpu", "processor": "x", "backend": "gloo", "torch": "2", "ranks": 4, "hosts": 1,
                      "date": "2026-01-01"}, (curve(), curve("send", 2, 2)))  # fmt: skip
    put(file, found.document())
    put(file, found.document())
    assert set(present(file)) == {"networks", "measured", "collectives"}
    again = read_curves(file)
    assert len(again) == 2
    for one, other in zip(again, found.curves):
        assert one.fit() == pytest.approx(other.fit(), rel=1e-3) and one.together == other.together
    printed = table(found)
    assert "all_reduce  data x1" in printed and "send        data x2" in printed
    draw(tmp_path / "curves.png", found)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    file.write_text("model: {}\n")
    with pytest.raises(UserError, match="no file of a machine"):
        put(file, found.document())
    assert file.read_text() == "model: {}\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operation": "sum"}, "operation must be one of"),
        ({"ranks": 1}, "ranks"),
        ({"hosts": "2"}, "whole numbers"),
        ({"points": []}, "points must be"),
        ({"points": [[1024, 1.0, 1.0]]}, "a point must be"),
        ({"points": [[1024, 0.1, float("nan"), 1.0]]}, "a point must be"),
        ({"points": [[1024, 0.1, 0.1, 0.1], [1024, 0.1, 0.1, 0.1]]}, "in the order"),
    ],
)
def test_damaged_curves_are_refused(tmp_path, change, said):
    file = tmp_path / "machine.yml"
    file.write_text(yaml.safe_dump({"collectives": [curve().document() | change]}))
    with pytest.raises(ValueError, match=said):
        read_curves(file)
    with pytest.raises(ConfigError, match=said):
        measured(str(file))


NCCL_TESTS = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    33.21    0.00    0.00      0    32.98    0.00    0.00      0
     1048576        262144     float     sum      -1    81.05   12.94   19.41      0    80.95   12.95   19.43      0
# Out of bounds values : 0 OK
"""
OSU = """\
# OSU MPI Allgather Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)
1                       1.50
262144                 90.25
"""


def test_output_of_other_programs(tmp_path):
    for text, operation, times in (
        (NCCL_TESTS, "all_reduce", {8: 33.21e-6, 2**20: 81.05e-6}),
        (OSU, "all_gather", {4: 1.5e-6, 2**20: 90.25e-6}),  # its size is that of one rank's part
    ):
        assert dict(foreign(text, operation, 4)) == pytest.approx(times)
    file = tmp_path / "nccl.txt"
    file.write_text(NCCL_TESTS)
    found = compared([curve(), curve(ranks=2)], f"all_reduce={file}")
    (row,) = found["rows"]
    assert found["ranks"] == 4 and row["bytes"] == 2**20
    assert row["ratio"] == pytest.approx((120e-6 + 6 * 2**20 / 4e9) / 81.05e-6)
    file.write_text("hello\n1 2\n")
    for word, said in (
        (f"all_reduce={file}", "nccl-tests"),
        (f"send={file}", "OPERATION=FILE"),
        ("x", "OPERATION=FILE"),
    ):
        with pytest.raises(UserError, match=said):
            compared([curve()], word)


@pytest.mark.parametrize("words", [["--least", "1K", "--most", "512"], ["--operations", "sum"], ["--most", "1T"],
                                   ["--seconds", "0"], ["--backends", "ucc"]])  # fmt: skip
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as error:
        read_options(words)
    assert error.value.code == 2 and "must" in capsys.readouterr().err


def test_a_measured_device(tmp_path):
    """One type whose products reach 1 and 2 TFLOP/s, attention half of that peak, and the plan reads it."""
    like = known_devices()[0]["cpu"]
    products = [(100, 200, 300, 2 * 100 * 200 * 300 / 1e12), (10, 20, 30, 2 * 10 * 20 * 30 / 2e12)]
    found = machine.MeasuredMachine("cpu", 8 << 30, 30e9, 4e-6, {"fp32": products}, {"fp32": 1e12})
    made = machine.entry(found, like)
    assert made["tflops"] == {"fp32": 2.0} and made["efficiency"] == {"matrix": 0.75, "attention": 0.5, "memory": 1.0}
    assert (made["memory"], made["bandwidth"], made["launch"], made["units"]) == (8.0, 30.0, 4.0, like.units)
    file = tmp_path / "machine.yml"
    put(file, {"devices": {"mine": made}})
    put(file, {"devices": {"other": made}} | Measured({}, (curve(),)).document())
    at = cluster(2, "mine", path=str(file))
    assert at.device.peak("fp32") == 2e12 and len(at.curves) == 1 and cluster(2, "other", path=str(file))


def test_measuring_a_device_and_writing_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "COPIED", 1 << 16)
    monkeypatch.setattr(machine, "ATTENTION", (1, 1, 8, 4))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "machine.yml"
    words = ["--name", "mine", "--widths", "8", "--tokens", "4", "--repeat", "3", "--output", str(file), "--types"]
    assert runner.run("machine", [*words, "fp32,bf16", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [product[:3] for product in made["products"]["bf16"]] == [[4, 24, 8], [4, 32, 8], [4, 8, 32]]
    assert known_devices(str(file))[0]["mine"].model_dump(exclude_none=True) == made["device"]
    assert runner.run("machine", [*words, "fp32", "--like", "abacus"]) == 2
    assert "--like must be one of" in capsys.readouterr().err
    assert runner.run("machine", [*words, "fp8"]) == 2


def test_the_cost_of_an_account_is_that_of_neighbouring_steps():
    """Every way comes first in turn. A machine that becomes twice as slow from round to round changes no ratio."""
    assert [way_of(step) for step in range(9)] == [
        "off", "counts", "times", "counts", "times", "off", "times", "off", "counts",
    ]  # fmt: skip
    cost = {"off": 1.0, "counts": 1.25, "times": 1.5}
    found = [[way_of(step), 2.0 ** (step // 3) * cost[way_of(step)], 1.0] for step in range(30)]
    assert ratios(found, 1) == {"counts": (1.25, 1.25, 1.25), "times": (1.5, 1.5, 1.5)}
    blocks = [[way_of(turn), 0.0, 4.0 * (turn // 3) + cost[way_of(turn)]] for turn in range(30)]
    assert added(blocks) == {"counts": (0.25, 0.25, 0.25), "times": (0.5, 0.5, 0.5)}
    assert ratios(found, 2) == {"counts": (1.0, 1.0, 1.0), "times": (1.0, 1.0, 1.0)}


def test_options():
    found = read_options(["--least", "4K", "--most", "1M", "--operations", "send,all_reduce"])
    assert (found.least, found.most, found.operations) == (4096, 2**20, ["send", "all_reduce"])
    assert Path(found.output) == Path("machine.yml")


def test_files_behind_options_are_named():
    """The ranks would take them for options, and miss a configuration."""
    with pytest.raises(UserError, match="must come before the options: move a.yml zero.stage=1 to the front"):
        started(["--hosts", ":2", "--most", "1M", "a.yml", "zero.stage=1"], ":2")
