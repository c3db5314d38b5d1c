"""Algorithms in levels: what the backend would give, what is sent, and who is let through. Hosts are pretended."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.config.arithmetic.algorithm_table import (
    BACKEND,
    DOUBLING,
    LEVELS,
    OPERATIONS,
    RECURSIVE,
    RING,
    THREE,
    TWO_LEVEL,
    AlgorithmTable,
    best,
    candidates,
)
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import ALONE, Axis, Mesh
from megatron.parallel.messages.account import METHODS, Recorder
from megatron.parallel.messages.traffic import crossing_bytes
from megatron.parallel.transport import hierarchy
from megatron.parallel.transport.hierarchy import HostGrid, places_by_host
from megatron.parallel.transport.routes import Router, Routes, groups_of
from tests.workers import run

RANKS = 4
EIGHT = 8
HOSTS = {"2x2": "aabb", "2x2 in turns": "abab", "4x1": "abcd"}
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def table(algorithm: str, hosts: int, least: int = 0) -> AlgorithmTable:
    known = (each for each in OPERATIONS if algorithm in candidates(each, hosts) or algorithm.startswith("backend:"))
    return AlgorithmTable({}, {(each, hosts, RANKS): ((0, BACKEND), (least or 1, algorithm)) for each in known})


def own(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 100).to(dtype)


def everyones(size: int, dtype: torch.dtype, ranks: int = RANKS) -> torch.Tensor:
    """[ranks, size] of `own`."""
    found = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return torch.stack([(torch.randn(size, generator=each, dtype=torch.float64) * 100).to(dtype) for each in found])


def results(dtype: torch.dtype, length: int) -> dict[str, torch.Tensor]:
    """Every operation, by the names of torch.distributed. The sums of 37 elements divide by no number of ranks."""
    odd, whole = own(37, dtype), own(length, dtype)
    largest, handled = odd.clone(), odd.clone()
    gathered, exchanged = torch.empty(RANKS * length, dtype=dtype), torch.empty_like(whole)
    part, smallest = torch.empty(length // RANKS, dtype=dtype), torch.empty(length // RANKS, dtype=dtype)
    summed = whole.clone()
    dist.all_reduce(summed)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    handle = dist.all_reduce(handled, async_op=True)
    handle.wait()
    assert handle.is_completed()
    dist.all_gather_into_tensor(gathered, whole)
    dist.all_to_all_single(exchanged, whole)
    dist.reduce_scatter_tensor(part, whole)
    dist.reduce_scatter_tensor(smallest, whole, op=dist.ReduceOp.MIN)
    return {"sum": summed, "odd": handled, "largest": largest, "gathered": gathered, "exchanged": exchanged,
            "part": part, "smallest": smallest}  # fmt: skip


def off_by(found: torch.Tensor, terms: torch.Tensor) -> float:
    """The error of a sum over ranks, as a share of the bound of its roundings. Each of n - 1 additions is off by at
    most half a last digit of a partial sum, which is at most the sum of magnitudes."""
    wide = terms.double()
    magnitude = wide.abs().sum(0)
    unit = 0.0 if not terms.is_floating_point() else torch.finfo(terms.dtype).eps / 2
    bound = (len(terms) - 1) * unit * (1 + unit) ** len(terms) * magnitude
    exact = unit < 1e-12  # float64 cannot be judged by float64: against its own bound twice over
    return ((found.double() - wide.sum(0)).abs() / (bound * (2 if exact else 1)).clamp(min=1e-300)).max().item()


def four_ranks() -> dict:
    mesh, counted = Mesh.build(Layout(data=RANKS), None), {}
    rank, length = mesh.rank, 24
    before = {name: vars(ProcessGroup).get(name) for name in METHODS}
    for name, hosts in HOSTS.items():
        count = len(set(hosts))
        for algorithm in LEVELS:
            router = Router(Routes(table(algorithm, count), hosts), groups_of(mesh.layout, mesh.at), rank)
            recorder = Recorder(mesh, hosts=hosts)
            recorder.install()  # before the router: what is counted is what it sends
            for dtype in TYPES:
                plain = results(dtype, length)
                recorder.tally.take(), recorder.crossing.take()
                with router.installed():
                    found, again = results(dtype, length), results(dtype, length)
                case, terms = (name, algorithm, str(dtype)), everyones(length, dtype)
                block = slice(rank * length // RANKS, (rank + 1) * length // RANKS)
                counted[case] = {
                    "bitwise": all(
                        torch.equal(found[each], plain[each])
                        for each in ("largest", "gathered", "exchanged", "smallest")
                    ),
                    "again": all(torch.equal(found[each], again[each]) for each in found),
                    "off": max(
                        off_by(found["sum"], terms),
                        off_by(found["odd"], everyones(37, dtype)),
                        off_by(found["part"], terms[:, block]),
                    ),
                    "sums": (found["sum"].double().tolist(), found["odd"].double().tolist()),
                    "sent": recorder.tally.take().by("group", "ranks", "operation"),
                    "crossing": sum(size for *_, size in recorder.crossing.take()),
                }
            recorder.remove()
    assert before == {name: vars(ProcessGroup).get(name) for name in METHODS}
    return counted


@pytest.fixture(scope="module")
def counted() -> list[dict]:
    return run(RANKS, four_ranks)


def test_gathers_are_the_backends_and_sums_as_good(counted):
    for ranks in zip(*(each.items() for each in counted)):
        (case, first), *_ = ranks
        for _, each in ranks:
            assert each["bitwise"], case
            assert each["again"], f"{case}: the same twice"
            assert each["off"] <= 1, f"{case}: {each['off']}"
            assert each["sums"] == first["sums"], f"{case}: all ranks have the same sum"


def test_what_is_sent_goes_through_the_levels(counted):
    """Two hosts of two: an all-gather of S = 4 * 24 numbers is one of S / 2 between hosts, and one of S inside."""
    sent = counted[0]["2x2", TWO_LEVEL, "torch.float32"]["sent"]
    assert sent["data/between", 2, "all_gather"] == (2, 2 * 2 * 24 * 4)  # twice: `results` were asked for twice
    inside = {kind: count for (group, _, kind), count in sent.items() if group == "data/inside"}
    # four sums in a round: of 24, and of 37 three times (padded to 38). Two more reduce-scatters
    assert inside["all_gather"][1] == 2 * 4 * (4 * 24 + 24 + 2 * 38)
    assert inside["reduce_scatter"][1] == 2 * 4 * (24 + 2 * 38 + 2 * 24)
    ring = counted[0]["4x1", RING, "torch.float32"]["sent"]
    # an all-gather of four in three messages of a block. A sum in three of a quarter and three more
    blocks = 24 + 2 * (24 // 4) + 2 * (24 // 4 + 2 * 40 // 4)
    assert ring["data/between", 2, "send"] == ring["data/between", 2, "recv"] == (2 * 3 * 9, 2 * 3 * 4 * blocks)
    short = counted[0]["4x1", RECURSIVE, "torch.float32"]["sent"]
    assert short["data/between", 2, "send"] == (2 * 2 * 9, 2 * 3 * 4 * blocks), (
        "as many bytes in two messages for three"
    )


def test_bytes_to_other_hosts(counted):
    """Of all ranks: a block of b crosses n - 1 times in a gather or scatter over n hosts, and twice that in a sum."""
    for hosts, count in (("2x2", 2), ("2x2 in turns", 2), ("4x1", 4)):
        for algorithm in (TWO_LEVEL, RING, RECURSIVE):
            found = sum(each[hosts, algorithm, "torch.float32"]["crossing"] for each in counted)
            padded = 37 if algorithm == TWO_LEVEL and count == 4 else 38 if algorithm == TWO_LEVEL else 40
            gather, scatters, sums = RANKS * 24, 2 * 24, 24 + 2 * padded
            elements = (count - 1) * (gather + scatters + 2 * sums)
            exchange = RANKS * 24 * (RANKS - RANKS // count) // RANKS
            # a sum of 37 in four parts is no whole number of bytes per rank: each is rounded
            assert found == pytest.approx(2 * 4 * (elements + exchange), abs=2 * 2 * RANKS), (hosts, algorithm)


def test_doubling_sends_whole_parts_to_log_n_hosts(counted):
    """M bytes on n hosts of l ranks: M / l in each of log n sends of a rank, and nothing else between hosts."""
    whole = 2 * 4 * (24 + 2 * 37)  # `results` twice. Three sums
    for hosts, n, size in (("4x1", 4, whole), ("2x2", 2, 2 * 4 * (24 + 2 * 38) // 2)):
        for each in counted:
            found = each[hosts, DOUBLING, "torch.float32"]["sent"]
            sends = 2 * 3 * (n.bit_length() - 1)
            assert sum(at[0] for (name, *_, kind), at in found.items() if kind == "send") == sends, hosts
            assert sum(at[1] for (*_, kind), at in found.items() if kind == "send") == size * (n.bit_length() - 1)
            assert {kind for (name, *_, kind) in found if name.endswith("between")} == {"send", "recv"}


def tree(terms: list[torch.Tensor]) -> torch.Tensor:
    """((0 + 1) + (2 + 3)) + ..., with the terms beyond a power of two added to the first ones before."""
    even = 1 << len(terms).bit_length() - 1
    folded = [each + terms[at + even] if at + even < len(terms) else each for at, each in enumerate(terms[:even])]
    while len(folded) > 1:
        folded = [a + b for a, b in zip(folded[::2], folded[1::2])]
    return folded[0]


def hosts_beyond_a_power_of_two(counted: dict) -> None:
    """Sums over 3, 5, 6, 7 and 8 hosts of one rank."""
    for n in (3, 5, 6, 7, 8):
        group = dist.new_group(list(range(n)))
        if (rank := dist.get_rank()) < n:
            x, axis = own(37, torch.bfloat16), Axis(rank, n, group, tuple(range(n)))
            hierarchy.all_reduce(x, HostGrid(ALONE, axis, None), DOUBLING, dist.ReduceOp.SUM)
            counted["folded", n] = torch.equal(x, tree(list(everyones(37, torch.bfloat16, n))))
            signed = torch.tensor([-0.0 if rank >> at & 1 else 0.0 for at in range(3)])
            hierarchy.all_reduce(signed, HostGrid(ALONE, axis, None), DOUBLING, dist.ReduceOp.MAX)
            counted["signs", n] = signed.signbit().tolist()


def eight_ranks() -> dict:
    """Two hosts of two pairs, in order and in turns: what the backend gives, and what three levels do."""
    mesh, counted = Mesh.build(Layout(data=EIGHT), None), {}
    for hosts, pairs in (("aaaabbbb", "aabbccdd"), ("abababab", "acacbdbd")):
        for algorithm in THREE:
            known = [each for each in OPERATIONS if algorithm in candidates(each, 2)]
            always = AlgorithmTable({}, {(each, 2, EIGHT): ((0, algorithm),) for each in known})
            router = Router(Routes(always, hosts, pairs), groups_of(mesh.layout, mesh.at), mesh.rank)
            recorder = Recorder(mesh, hosts=hosts)
            recorder.install()
            for dtype in (torch.float32, torch.int64):
                plain = eight_results(dtype)
                recorder.tally.take(), recorder.crossing.take()
                with router.installed():
                    found = eight_results(dtype)
                    sent = recorder.tally.take().by("group", "operation")
                    crossing = sum(size for *_, size in recorder.crossing.take())
                    again = eight_results(dtype)
                terms = everyones(40, dtype, EIGHT)
                block = slice(5 * mesh.rank, 5 * mesh.rank + 5)
                counted[hosts, algorithm, str(dtype)] = {
                    "bitwise": all(torch.equal(found[at], plain[at]) for at in (0, 1, 4)),
                    "again": all(map(torch.equal, found, again)),
                    "off": max(off_by(found[2], terms), off_by(found[3], terms[:, block])),
                    "sum": found[2].double().tolist(),
                    "sent": sent,
                    "crossing": crossing,
                }
            recorder.remove()
    hosts_beyond_a_power_of_two(counted)
    return counted


def eight_results(dtype: torch.dtype) -> list[torch.Tensor]:
    """Gathered, exchanged, summed, this rank's part of the sum, and the largest of 37 numbers."""
    whole, largest = own(40, dtype), own(37, dtype)
    gathered, exchanged, part = whole.new_empty(EIGHT * 40), torch.empty_like(whole), whole.new_empty(5)
    dist.all_gather_into_tensor(gathered, whole)
    dist.all_to_all_single(exchanged, whole)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(whole)
    return [gathered, exchanged, whole, part, largest]


def test_three_levels():
    """Gathers and maxima are the backend's. Sums are near, alike on all ranks and alike again. Of 40 numbers an
    all-gather crosses to the other host once, half of all."""
    counted = run(EIGHT, eight_ranks)
    signs = [{at: each.pop(at) for at in list(each) if at[0] == "signs"} for each in counted]
    assert all(each.items() <= signs[0].items() for each in signs), "maxima of 0 and -0 have other bits elsewhere"
    for rank, each in enumerate(counted):
        folded = {at: each.pop(at) for at in list(each) if at[0] == "folded"}
        assert folded == {("folded", n): True for n in (3, 5, 6, 7, 8) if rank < n}, "the bits of the fixed tree"
    for case, first in counted[0].items():
        for each in counted:
            assert each[case]["bitwise"] and each[case]["again"] and each[case]["off"] <= 1, case
            assert each[case]["sum"] == first["sum"], case
        groups = {group for group, _ in first["sent"]}
        backend = set() if case[1] == "three_level" else {"data"}  # an all-to-all has one algorithm in levels
        assert groups == {"data/pair", "data/inside", "data/between"} | backend, (case, groups)
        size, padded = (4 if "32" in case[2] else 8), 40
        gather, scatter, sums = EIGHT * 40, 40, 2 * (padded + 40)
        exchange = EIGHT * 40 // 2  # half of what each rank has is for the other host
        crossing = sum(each[case]["crossing"] for each in counted)
        if case[1] == "three_level":
            assert crossing == size * (gather + scatter + sums + exchange), case
    two = counted[0]["aaaabbbb", "three_level", "torch.float32"]["sent"]
    # 80 with the other host, 160 with the other pair, 320 in the end. The two sums have 40 and 37, padded to 38
    assert two["data/between", "all_gather"][1] == 4 * 2 * 40
    assert two["data/inside", "all_gather"][1] == 4 * (4 * 40 + 2 * 20)
    assert two["data/pair", "all_gather"][1] == 4 * (8 * 40 + 40 + 38)


def others() -> dict:
    """Calls that no algorithm in levels does, small ones, and a second backend."""
    mesh = Mesh.build(Layout(tensor=2, data=2), None)
    recorder = Recorder(mesh)
    groups = groups_of(mesh.layout, mesh.at)
    router = Router(Routes(table(TWO_LEVEL, 2, least=1024), "aabb"), groups, mesh.rank)
    again = Router(Routes(table("backend:gloo", 2), "aabb"), groups, mesh.rank)
    recorder.install()
    counted = {}
    with router.installed():
        with pytest.raises(RuntimeError, match="installed already"), again.installed():
            pass
        dist.all_reduce(torch.ones(255))  # one number less than the table's size
        dist.all_reduce(torch.ones(512)[::2].contiguous(), group=mesh.tensor.group)  # within a host
        dist.all_reduce(torch.ones(256), op=dist.ReduceOp.PRODUCT)
        uneven = [100 * (1 + each) for each in range(RANKS)]
        received = [100 * (1 + mesh.rank)] * RANKS
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(1000), received, uneven)
        dist.all_gather([torch.empty(256) for _ in range(RANKS)], torch.ones(256))
        dist.all_reduce(torch.empty(0))
        counted["let through"] = recorder.tally.take().by("group", "ranks")
        dist.all_reduce(torch.ones(256))
        world = dist.new_group(list(range(RANKS)))  # such as DeepSpeed makes for itself
        dist.all_reduce(torch.ones(256), group=world)
        counted["taken"] = recorder.tally.take().by("group", "operation")
    with again.installed():
        x = own(256, torch.float32)
        dist.all_reduce(x)
        gathered = torch.empty(RANKS * 8)
        dist.all_gather_into_tensor(gathered, own(8, torch.float32))
        counted["other backend"] = recorder.tally.take().by("group", "operation")
        counted["sum"] = off_by(x, everyones(256, torch.float32))
    recorder.remove()
    return counted


def test_what_has_no_other_way_is_the_backends():
    for counted in run(RANKS, others):
        assert set(counted["let through"]) == {("world", 4), ("tensor", 2)}
        assert counted["taken"] == {
            ("data/between", "all_reduce"): (2, 2 * 512),
            ("tensor/inside", "all_gather"): (2, 2 * 1024),
            ("tensor/inside", "reduce_scatter"): (2, 2 * 1024),
        }
        assert counted["other backend"] == {("world", "all_gather"): (1, 128), ("world", "all_reduce"): (1, 1024)}
        assert counted["sum"] <= 1


def joined() -> dict:
    """Gathers of three types and sizes, all asked for before anybody waits. Twice, the second time in levels."""
    mesh, counted = Mesh.build(Layout(data=RANKS), None), {}
    recorder = Recorder(mesh)
    recorder.install()
    sizes = {torch.float32: (3, 40, 5, 1), torch.bfloat16: (8, 2)}

    def ask() -> list[torch.Tensor]:
        blocks = [own(size, dtype, seed) for dtype, each in sizes.items() for seed, size in enumerate(each)]
        results = [block.new_empty(RANKS * block.numel()) for block in blocks]
        handles = [dist.all_gather_into_tensor(*pair, async_op=True) for pair in zip(results, blocks)]
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
        return results

    plain = ask()
    counted["plain"] = recorder.tally.take().by("operation", "dtype")
    key = ("all_gather", 2, RANKS)
    for name, steps in (("backend", ((0, BACKEND),)), ("levels", ((0, BACKEND), (100, TWO_LEVEL)))):
        router = Router(Routes(AlgorithmTable({}, {key: steps}, {key: 40 * 16}), "aabb"), [(0, 1, 2, 3)], mesh.rank)
        with router.installed():
            found = ask()
            counted[name] = recorder.tally.take().by("group", "dtype")
            alone = plain[0].new_empty(RANKS * 3)
            dist.all_gather_into_tensor(alone, own(3, torch.float32))
            counted[name, "waited for"] = recorder.tally.take().by("operation")["all_gather",]
        counted[name, "bitwise"] = all(map(torch.equal, found, plain)) and torch.equal(alone, plain[0])
    recorder.remove()
    return counted


def test_small_gathers_are_joined():
    """Below 640 bytes (4 ranks of less than 40 fp32 each): one message of each type, and the larger one by itself."""
    for counted in run(RANKS, joined):
        assert counted["plain"] == {("all_gather", "bf16"): (2, 4 * 2 * 10), ("all_gather", "fp32"): (4, 4 * 4 * 49)}
        assert counted["backend"] == {("data", "bf16"): (1, 80), ("data", "fp32"): (2, 4 * 4 * 49)}
        assert counted["backend", "waited for"] == (1, 4 * 4 * 3)
        # 144 and 640 bytes go in levels, half of them between hosts. 80 do not
        assert counted["levels"] == {
            ("data", "bf16"): (1, 80),
            ("data/between", "fp32"): (2, 2 * 4 * 49),
            ("data/inside", "fp32"): (2, 4 * 4 * 49),
        }
        assert counted["backend", "bitwise"] and counted["levels", "bitwise"]


def test_hosts_of_unequal_ranks_have_no_levels():
    assert places_by_host((0, 1, 2, 3), "aabb") == ((0, 1), (2, 3))
    assert places_by_host((3, 1, 2), "aaab") is None
    assert places_by_host((4, 0, 5, 1), "aabbcc") == ((0, 2), (1, 3))


def test_crossing_bytes():
    """A ring in the order of the group. An all-to-all from each to each. A message to its receiver."""
    assert [crossing_bytes("all_reduce", (0, 1, 2, 3), "aabb", rank, 400) for rank in range(4)] == [0, 600, 0, 600]
    assert [crossing_bytes("all_to_all", (0, 1, 2), "abb", rank, 300) for rank in range(3)] == [200, 100, 100]
    assert crossing_bytes("send", (0, 1), "ab", 0, 7) == 7 and crossing_bytes("recv", (0, 1), "ab", 1, 7) == 0
    assert crossing_bytes("send", (0, 1), "aa", 0, 7) == 0


def test_the_fastest_is_chosen_and_a_little_faster_is_not():
    points = [
        (1024, {BACKEND: 1.0, RING: 0.96, TWO_LEVEL: 2.0}),
        (4096, {BACKEND: 1.0, RING: 0.9, TWO_LEVEL: 0.5}),
        (2**14, {BACKEND: 1.0, RING: 0.9, TWO_LEVEL: 0.5}),
        (2**16, {BACKEND: 1.0, RING: 0.4, TWO_LEVEL: 0.5}),
    ]
    steps = best(points)
    assert steps == ((0, BACKEND), (4096, TWO_LEVEL), (2**16, RING))
    chosen = AlgorithmTable({}, {("all_reduce", 2, 4): steps})
    assert [chosen.choose("all_reduce", 2, 4, size) for size in (1, 4095, 4096, 2**16, 2**30)] == [
        BACKEND, BACKEND, TWO_LEVEL, RING, RING,
    ]  # fmt: skip
    assert chosen.choose("all_reduce", 4, 4, 2**20) == chosen.choose("all_gather", 2, 4, 2**20) == BACKEND


GOOD = {
    "ranks": 4, "hosts": 2, "backend": "gloo", "device": "x",
    "table": [{"operation": "all_reduce", "hosts": 2, "ranks": 4, "choices": [[0, BACKEND], [64, RING]]}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"table": None}, "must have a table"),
        ({"ranks": "4"}, "whole numbers"),
        ({"backend": None}, "must have the names"),
        ({"table": [1]}, "each entry"),
        ({"operation": "sum"}, "operation must be one of all_reduce"),
        ({"ranks of": 3}, "multiple of its hosts"),
        ({"choices": []}, "must be a list of"),
        ({"choices": [[0, "magic"]]}, "must be one of backend, two_level"),
        ({"choices": [[0, "backend:../x"]]}, "backend:NAME"),
        ({"choices": [[-1, RING]]}, "a choice must be"),
        ({"choices": [[8, RING], [8, BACKEND]]}, "in the order"),
        ({"join_below": "4K"}, "join_below must be a number of bytes"),
        ({"join_below": 64}, "join_below must be of all_gather"),
    ],
)
def test_damaged_tables_are_refused(change, said):
    row = dict(GOOD["table"][0])
    row |= {
        name.removesuffix(" of"): value for name, value in change.items() if name in (*row, "ranks of", "join_below")
    }
    whole = {name: value for name, value in change.items() if name in GOOD}
    if "ranks" in change:
        row["ranks"] = 4
    with pytest.raises(ValueError, match=said):
        AlgorithmTable.of({**GOOD, "table": [row], **whole})


def test_a_table_is_read_again():
    gathers = {"operation": "all_gather", "hosts": 1, "ranks": 4, "choices": [[0, BACKEND]], "join_below": 4096}
    chosen = AlgorithmTable.of({**GOOD, "table": [*GOOD["table"], gathers]})
    assert AlgorithmTable.of(chosen.document()) == chosen and chosen.joins == {("all_gather", 1, 4): 4096}
    assert chosen.differs({"ranks": 4, "hosts": 2}) == []
    assert chosen.differs({"ranks": 8, "backend": "nccl"}) == [
        "ranks: 4 in the table, 8 in this job",
        "the backend: gloo in the table, nccl in this job",
    ]
