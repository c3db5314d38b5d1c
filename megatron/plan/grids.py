"""Grids of tensor parallel ranks: rows, columns and depth of the same devices, by the numbers that each rank sends.

A sum over n ranks sends 2 (n - 1) / n of its size. A rank with t tokens has these sums (Singh et al. 2023). Of a matrix
[out, in] that reads the stream, t out / rows over columns (forward) and t in / columns over rows (backward). Of one
that writes it, t out / columns over rows (forward) and t in / rows over columns (backward). Depth d sends
(d - 1) / d of out in / (rows columns), in two gathers and a sum.

The script that was published with the paper (comm_model.py of Megatron-AxoNN) exchanges `in` and `out` of a matrix that
writes the stream. That changes the down projection, whose `in` is several times its `out`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.model.stack import ModelPlan
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import Role
from megatron.parallel.messages.traffic import SIZES

from .advice import align_lines
from .candidate import Candidate, apply, layout_of
from .devices import Network, known_devices
from .search import Answers, Plan
from .step import collective, groups

LINKS = (1, 4, 16)  # the table of networks has the device's links and these parts of their bandwidth
Shape = tuple[int, int, bool]  # outputs, inputs, whether the matrix writes the residual stream


def numbers_sent(
    matrices: Iterable[Shape], sides: tuple[int, int, int], tokens: float, passes: int = 1, script: bool = False
) -> tuple[float, float, float]:
    """Numbers that a rank sends over rows, over columns and over depth for a pass and its gradients.

    Args:
        sides: rows, columns and depth.
        tokens: of the rank.
        passes: forward passes, 2 where whole blocks are recomputed.
        script: count as the published script.
    """
    rows, columns, depth = sides
    over_rows = over_columns = over_depth = 0.0
    for outputs, inputs, writes in matrices:
        forward, backward = (inputs, outputs) if writes and script else (outputs, inputs)
        if writes:
            over_rows, over_columns = over_rows + passes * forward / columns, over_columns + backward / rows
        else:
            over_rows, over_columns = over_rows + backward / columns, over_columns + passes * forward / rows
        over_depth += (passes + 2) * outputs * inputs / (rows * columns)
    around = [2 * (ranks - 1) / ranks * tokens for ranks in (rows, columns)]
    return around[0] * over_rows, around[1] * over_columns, (depth - 1) / depth * over_depth


def sides(choice: Candidate) -> tuple[int, int, int]:
    """Rows, columns and depth of a layout."""
    return choice.tensor, choice.columns, choice.depth


@dataclass(frozen=True)
class Grid:
    """The first plan of a grid, and its counts."""

    plan: Plan
    sent: tuple[float, float, float]  # numbers that a rank sends over rows, columns and depth in a step, in blocks
    by_script: tuple[float, float, float]  # the same as the published script counts them
    seconds_by_script: float  # of a step with these

    def to_json(self) -> dict[str, Any]:
        names = ("rows", "columns", "depth")
        counts = {"sent": self.sent, "sent_by_script": self.by_script}
        return {
            **self.plan.to_json(),
            **{name: dict(zip(names, each)) for name, each in counts.items()},
            "seconds_by_script": self.seconds_by_script,
        }


class Grids:
    """The grids among the layouts of a search that fit.

    Args:
        networks: to compare, by name. None: the built-in ones.
    """

    def __init__(self, answers: Answers, networks: Mapping[str, Network] | None = None) -> None:
        self.answers, self.question = answers, answers.question
        self._networks = known_devices()[1] if networks is None else networks

    @cached_property
    def matrices(self) -> list[Shape]:
        """Matrices of all blocks."""
        plan = ModelPlan(self.question.base, Mesh.describe(Layout(), 0), "meta", values=False)
        found = [
            (logical_of(each).shape, logical_of(each).role is Role.OUTPUT)
            for index in range(len(self.question.base.model.blocks))
            for each in plan.block(index).parameters()
            if logical_of(each).role in (Role.HIDDEN, Role.OUTPUT)
        ]
        return [(*shape, writes) for shape, writes in found if len(shape) == 2]

    @cached_property
    def ranking(self) -> list[Grid]:
        """The first plan of each grid, the fastest first."""
        first: dict[tuple[int, int, int], Plan] = {}
        for plan in self.answers.plans:
            first.setdefault(sides(plan.choice), plan)
        return [self._counted(plan) for plan in first.values()]

    def _counted(self, plan: Plan) -> Grid:
        choice, question = plan.choice, self.question
        config = apply(question.base, choice, question.at.devices)
        size, count = SIZES[config.precision.compute], config.training.accumulation or 1
        tokens = choice.micro_batch * config.training.sequence_length / choice.context
        passes = 2 if choice.recompute == "full" else 1
        sent, by_script = (
            numbers_sent(self.matrices, sides(choice), tokens, passes, script) for script in (False, True)
        )
        at, more = groups(layout_of(choice, question.at.devices), question.at.per_host), 0.0
        for axis, *both in zip(("rows", "columns"), sent, by_script):
            ranks = at[axis].ranks
            right, wrong = (each * size * ranks / (2 * max(1, ranks - 1)) for each in both)
            messages = 2 * len(question.base.model.blocks)
            seconds = [collective(question.at, at[axis], "all_reduce", each, messages) for each in (right, wrong)]
            more += count / choice.pipeline * (seconds[1] - seconds[0])
        times = count / choice.pipeline
        scaled = [(rows * times, columns * times, depth * times) for rows, columns, depth in (sent, by_script)]
        return Grid(plan, scaled[0], scaled[1], plan.step.seconds + more)

    def networks(self) -> list[dict[str, Any]]:
        """Fastest layouts on slower links of a host and on each network: with rows only, with rows and depth, and of
        all grids."""
        at, found = self.question.at, []
        link = at.device.link
        for part in LINKS:
            slower = link.model_copy(update={"bandwidth": link.bandwidth / part})
            device = at.device.model_copy(update={"link": slower})
            for name, network in self._networks.items() if at.hosts > 1 else [("", at.network)]:
                there = self.question.on(replace(at, device=device, network=network))
                best: dict[str, tuple[float, Candidate]] = {}
                for plan in self.answers.plans:
                    choice = plan.choice
                    seconds = there.seconds_of(choice)
                    without = {"depth": choice.columns == 1, "rows": choice.columns == choice.depth == 1}
                    for kind in ("all", *(name for name, fits in without.items() if fits)):
                        best[kind] = min(best.get(kind, (seconds, choice)), (seconds, choice), key=lambda each: each[0])
                host = network.bandwidth * network.adapters if name else None
                found.append({"link": slower.bandwidth, "network": name, "host": host, "best": best})
        return found

    def difference(self) -> str:
        """The published script's mistake, in this run's numbers."""
        first = self.ranking[0]
        theirs = min(self.ranking, key=lambda each: each.seconds_by_script)
        down = max((each for each in self.matrices if each[2]), key=lambda each: each[1] / each[0], default=None)
        if down is None or down[0] == down[1]:
            return ""
        outputs, inputs, _ = down
        words = (
            "AxoNN's published script (comm_model.py of Megatron-AxoNN) has the down projection's factor on the wrong "
            f"side. Per token it counts {inputs:,} / columns numbers over rows, where {outputs:,} / columns are sent, "
            f"and {outputs:,} / rows over columns, where {inputs:,} / rows are sent. "
        )
        if theirs is first:
            return words + "Its ranking has the same first grid."
        slower = theirs.plan.step.seconds / first.plan.step.seconds
        return words + (
            f"It would rank {theirs.plan.choice} first, which takes {slower:.2f} times the step of {first.plan.choice}."
        )

    def document(self) -> dict[str, Any]:
        """One JSON document."""
        networks = []
        for each in self.networks():
            best = {
                kind: {"seconds": seconds, "layout": vars(choice)} for kind, (seconds, choice) in each["best"].items()
            }
            networks.append({**each, "best": best})
        ranking = [each.to_json() for each in self.ranking]
        return {"grids": ranking, "difference": self.difference(), "networks": networks}

    def text(self, shown: int) -> str:
        """The ranking, the script's difference, and the table of networks."""
        rows = [["layout", "over rows", "over columns", "over depth", "step s", "script: rows", "columns", "step s"]]
        for each in self.ranking[:shown]:
            ours = [f"{number / 1e9:,.2f}" for number in each.sent]
            theirs = [f"{number / 1e9:,.2f}" for number in each.by_script[:2]]
            times = (f"{each.plan.step.seconds:,.3f}", f"{each.seconds_by_script:,.3f}")
            rows.append([str(each.plan.choice), *ours, times[0], *theirs, times[1]])
        table = [["link GB/s", "network", "GB/s of a host", "rows only", "s", "all grids", "s", "times as fast"]]
        for row in self.networks():
            line = [f"{row['link']:,.0f}", row["network"], "" if row["host"] is None else f"{row['host']:,.0f}"]
            best = row["best"]
            for kind in ("rows", "all"):
                seconds, choice = best.get(kind, (None, None))
                line += ["none fits", "-"] if seconds is None else [str(choice), f"{seconds:,.3f}"]
            line.append(f"{best['rows'][0] / best['all'][0]:.2f}" if "rows" in best else "-")
            table.append(line)
        return "\n".join([
            "Billions of numbers that a rank sends in a step, in blocks, for the fastest layout of each grid:",
            "",
            *align_lines(rows),
            "",
            self.difference(),
            "",
            "Predicted seconds of a step on other links within a host and other networks between hosts:",
            "",
            *align_lines(table),
        ])
