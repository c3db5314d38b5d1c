"""Experts on ranks, such that the experts that tokens use one layer after another are on one rank (ExFlow, Yao et al.
2024, arXiv 2401.08383).

From traces of routers follow the numbers N_l(e, e') of tokens that go from expert e of a layer to expert e' of the next
one. A placement gives each rank E / G experts of each layer. It maximises the transitions within a rank:

    max sum N_l(e, e') z(l, e, e', g)    with z <= x(l, e, g), z <= x(l + 1, e', g), sum_g x = 1, sum_e x = E / G

x is 0 or 1. The numbers of one layer, given its neighbours' places, are an assignment with capacities. Sweeps of such
assignments over the layers never lower the sum. They begin the search, and the integer program ends it.

Shapes: L layers, E experts, G ranks, T tokens, k experts of a token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.file_access import read_json
from megatron.config.problems import UserError

Numbers = NDArray[Any]
ENOUGH = 50  # sweeps, far more than any that changed something


@dataclass(frozen=True)
class Placement:
    """Ranks of experts."""

    ranks_LE: Numbers  # the rank of each expert
    proven: bool  # whether no placement has more transitions within a rank


def transitions(experts: Sequence[Numbers], count: int) -> Numbers:
    """N [L - 1, E, E] of the chosen experts [T, k] of each layer. A pair of k choices counts 1 / k².

    Args:
        count: E. Choices of no expert, which have larger numbers, do not count.
    """
    found = np.zeros((len(experts) - 1, count + 1, count + 1))
    for layer, (before, after) in enumerate(zip(experts, experts[1:])):
        for first in np.minimum(before, count).T:
            for second in np.minimum(after, count).T:
                np.add.at(found[layer], (first, second), 1 / (before.shape[1] * after.shape[1]))
    return found[:, :count, :count]


def within(counts: Numbers, ranks_LE: Numbers) -> float:
    """Transitions within a rank."""
    same = ranks_LE[:-1, :, None] == ranks_LE[1:, None, :]
    return float((counts * same).sum())


def in_order(layers: int, experts: int, ranks: int) -> Numbers:
    """The placement of `parallel.expert`, [L, E]: equal runs of experts."""
    return np.tile(np.arange(experts) // (experts // ranks), (layers, 1))


def swept(counts: Numbers, ranks: int) -> Numbers:
    """A placement [L, E] that no change of a single layer improves."""
    from scipy.optimize import linear_sum_assignment

    layers, experts = len(counts) + 1, counts.shape[1]
    places, slots = in_order(layers, experts, ranks), np.arange(experts) // (experts // ranks)
    for _ in range(ENOUGH):
        before = within(counts, places)
        for layer in [*range(1, layers), *range(layers - 2, -1, -1)]:
            gain = np.zeros((experts, ranks))
            for rank in range(ranks):
                if layer:
                    gain[:, rank] += counts[layer - 1][places[layer - 1] == rank].sum(0)
                if layer < layers - 1:
                    gain[:, rank] += counts[layer][:, places[layer + 1] == rank].sum(1)
            places[layer] = slots[linear_sum_assignment(gain[:, slots], maximize=True)[1]]
        if within(counts, places) <= before:
            break
    return places


def placed(counts: Numbers, ranks: int, seconds: float = 60.0) -> Placement:
    """The best placement that is found in the time, for transitions [L - 1, E, E].

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    experts = counts.shape[1]
    if experts % ranks:
        raise ValueError(f"the number of ranks must divide the {experts} experts of a layer, not {ranks}")
    start = swept(counts, ranks)
    found = _program(counts, ranks, seconds)
    if found is None or within(counts, found.ranks_LE) < within(counts, start) - 1e-9 * counts.sum():
        return Placement(start, False)
    return found


def placed_on_hosts(counts: Numbers, hosts: int, ranks: int, seconds: float = 60.0) -> Placement:
    """As `placed`, with the most transitions within a host first, and of such placements within a rank.

    Args:
        ranks: of all hosts together, numbered host by host.

    Raises:
        ValueError: the hosts do not divide the ranks, or the ranks the experts.
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    if ranks % hosts or experts % ranks:
        raise ValueError(f"{hosts} hosts must divide {ranks} ranks, and these the {experts} experts of a layer")
    if hosts == 1:
        return placed(counts, ranks, seconds)
    outer, own = placed(counts, hosts, seconds / 2), ranks // hosts
    found, proven = np.empty((layers, experts), dtype=np.int64), outer.proven
    for host in range(hosts):
        there = np.stack([np.flatnonzero(places == host) for places in outer.ranks_LE])
        inside = np.stack([counts[at][np.ix_(there[at], there[at + 1])] for at in range(layers - 1)])
        inner = placed(inside, own, seconds / 2 / hosts)
        np.put_along_axis(found, there, host * own + inner.ranks_LE, 1)
        proven = proven and inner.proven
    return Placement(found, proven)


def _program(counts: Numbers, ranks: int, seconds: float) -> Placement | None:
    """By the integer program. None where the time ends before a placement is found."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    layers, experts = len(counts) + 1, counts.shape[1]
    x = np.arange(layers * experts * ranks).reshape(layers, experts, ranks)
    layer, first, second = (each.repeat(ranks) for each in counts.nonzero())
    rank = np.tile(np.arange(ranks), len(layer) // ranks)
    z = x.size + np.arange(len(layer))
    size = x.size + len(z)

    def rows(columns: Sequence[Numbers], values: Sequence[float]) -> Any:
        """A matrix with a row for each entry of the columns."""
        count = len(columns[0])
        at = np.tile(np.arange(count), len(columns))
        return coo_array((np.repeat(values, count), (at, np.concatenate(columns))), (count, size)).tocsr()

    one = rows([x[:, :, g].ravel() for g in range(ranks)], [1.0] * ranks)
    even = rows([x[:, e, :].ravel() for e in range(experts)], [1.0] * experts)
    here, there = rows([z, x[layer, first, rank]], [1.0, -1.0]), rows([z, x[layer + 1, second, rank]], [1.0, -1.0])
    lower = np.zeros(size)
    lower[x[0, 0, 0]] = 1  # ranks are alike
    solved = milp(
        -np.concatenate([np.zeros(x.size), counts[layer, first, second]]),
        integrality=np.arange(size) < x.size,
        bounds=Bounds(lower, np.ones(size)),
        constraints=[
            LinearConstraint(one, 1, 1),
            LinearConstraint(even, experts // ranks, experts // ranks),
            LinearConstraint(here, -np.inf, 0),
            LinearConstraint(there, -np.inf, 0),
        ],
        options={"time_limit": seconds},
    )
    if solved.x is None:
        return None
    return Placement(solved.x[: x.size].reshape(x.shape).argmax(-1), solved.status == 0)


def crossings(experts: Sequence[Numbers], ranks_LE: Numbers) -> tuple[float, float]:
    """Rows that go to another rank, per token and layer, with two all-to-alls a layer and with one.

    With two, each row comes back to the rank of its token, which is t mod G for token t. With one, a token stays with
    its best expert, and the next layer begins there.

    Args:
        experts: the chosen ones [T, k] of each layer.
    """
    ranks = int(ranks_LE.max()) + 1
    there = [np.pad(places, (0, 1), constant_values=-1)[chosen] for places, chosen in zip(ranks_LE, experts)]
    home = np.arange(len(there[0])) % ranks
    two = sum(2.0 * ((each != home[:, None]) & (each >= 0)).sum() for each in there)
    one, now = 0.0, home
    for each in there:
        best = np.where(each[:, 0] >= 0, each[:, 0], now)
        others = (each[:, 1:] != best[:, None]) & (each[:, 1:] >= 0)
        one += (best != now).sum() + 2.0 * others.sum()
        now = best
    rows = len(home) * len(there)
    return two / rows, one / rows


def read_places(path: Path, layers: Mapping[int, int], ranks: int) -> dict[int, list[list[int]]]:
    """The experts of each rank, by layer, of a file of `deepy moe trace --placement`.

    Args:
        layers: number of a layer with experts -> number of its experts.

    Raises:
        UserError: the file is damaged, or for other layers, experts or ranks.
    """
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"evaluation.placement: {path} cannot be read: {error}") from error
    experts = document.get("experts") if isinstance(document, dict) else None
    if not isinstance(experts, dict) or set(experts) != {str(each) for each in layers}:
        raise UserError(f"evaluation.placement: {path} must have the experts of layers {', '.join(map(str, layers))}")
    for name, count in layers.items():
        own = experts[str(name)]
        sound = isinstance(own, list) and all(isinstance(each, list) for each in own)
        flat = [expert for each in own for expert in each] if sound else []
        whole = all(type(each) is int for each in flat) and sorted(flat) == list(range(count))
        if not whole or [len(each) for each in own] != [count // ranks] * ranks:
            rule = f"layer {name} must have {count} experts, equally many on each of {ranks} ranks"
            raise UserError(f"evaluation.placement: {path}: {rule}")
    return {name: experts[str(name)] for name in layers}
