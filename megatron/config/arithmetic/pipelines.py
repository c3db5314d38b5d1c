"""Pipeline schedules as tables of instructions.

A model is cut into S = p * v stages for p ranks (v is `parallel.stages_per_rank`). Stage s is on rank s mod p, or in a
V: of two stages per rank, rank r has r and 2p - 1 - r. A table has one list of instructions per rank: the forward pass
(F) or the backward pass (B) of a micro-batch in a stage. B may be split: I computes the gradients of the stage's
inputs, and W later the gradients of its weights.
Sources: PipeDream-Flush (arXiv:2006.09503) for 1F1B, Megatron-LM (arXiv:2104.04473) for the interleaved schedule, Qi et
al. (arXiv:2401.10241, arXiv:2405.15362) for ZB-H1 and ZB-V, DeepSeek-AI and Sea AI Lab (2025) for DualPipe-V."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
GATHER, RELEASE, REDUCE = "UNSHARD", "RESHARD", "REDUCE_GRAD"  # of a stage between its replicas, by torch's names
OF_ZERO = (GATHER, RELEASE, REDUCE)
V_SHAPED = ("zbv", "dualpipe_v")
ASYNCHRONOUS = "asynchronous"  # its table is that of 1F1B, which it follows if all passes take the same time
SCHEDULES = ("1f1b", "interleaved", "zb_h1", *V_SHAPED, ASYNCHRONOUS)
_LARGEST = 2**26  # bytes of a file


class Instruction(NamedTuple):
    stage: int
    kind: str
    micro_batch: int

    @property
    def result(self) -> "Instruction":
        """The instruction under which others find its result: I passes a gradient on, as B does."""
        return self._replace(kind=BACKWARD) if self.kind == INPUTS else self

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = list[list[Instruction]]


class Message(NamedTuple):
    """The result of an instruction, from the rank that has executed it to the rank that needs it, which may be the
    same."""

    made: Instruction
    source: int
    to: int


class ScheduleError(ValueError):
    """A table that cannot be executed. The text names the rank and the instruction.

    Attributes:
        rank: of the pipeline, where one is at fault.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class HasSchedule(Protocol):
    """Keys of the section `parallel` that decide about a table."""

    @property
    def pipeline(self) -> int: ...
    @property
    def stages_per_rank(self) -> int: ...
    @property
    def schedule(self) -> str: ...


def by_table(parallel: HasSchedule, zero_stage: int) -> bool:
    """Whether the stages execute a table, and not DeepSpeed's own schedule, which is 1F1B up to ZeRO 1."""
    return parallel.pipeline > 1 and (parallel.schedule != "1f1b" or zero_stage > 1)


def is_file(schedule: str) -> bool:
    return schedule.lower().endswith(".csv")


def in_rounds(parallel: HasSchedule) -> bool:
    """Whether the number of micro-batches must be a multiple of the ranks."""
    return parallel.pipeline > 1 and parallel.schedule in ("interleaved", "zb_h1")


def least_micro_batches(parallel: HasSchedule) -> int:
    """The fewest micro-batches that a schedule can have."""
    return 2 * parallel.pipeline if parallel.schedule == "dualpipe_v" else 1


def ranks_of_stages(parallel: HasSchedule) -> list[int]:
    """The rank of each stage."""
    ranks, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule in V_SHAPED or (is_file(parallel.schedule) and each == 2 and _is_v(parallel)):
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * each)]


def _is_v(parallel: HasSchedule) -> bool:
    """Whether the first rank of a file has the last stage."""
    with Path(parallel.schedule).open(encoding="utf-8", errors="replace") as lines:
        first = next((line for line in iter(lambda: lines.readline(_LARGEST), "") if line.strip()), "")
    return re.search(rf"(?<!\d){2 * parallel.pipeline - 1}[FBIW]", first) is not None


def is_split(parallel: HasSchedule, micro_batches: int) -> bool:
    """Whether some backward passes are in two parts."""
    if not is_file(parallel.schedule):
        return parallel.schedule in ("zb_h1", *V_SHAPED)
    return any(it.kind == WEIGHTS for own in table_of(parallel, micro_batches) for it in own)


def table_of(parallel: HasSchedule, micro_batches: int) -> Table:
    """The table of a configuration.

    Raises:
        ScheduleError: there is none for this number of micro-batches, or the file has no table.
        OSError: the file cannot be read.
    """
    if is_file(parallel.schedule):
        if Path(parallel.schedule).stat().st_size > _LARGEST:
            raise ScheduleError(f"the file must have at most {_LARGEST:,} bytes")
        return read_table(Path(parallel.schedule).read_text(encoding="utf-8"), parallel.pipeline)
    if parallel.schedule in ("interleaved", "zb_h1"):
        split = parallel.schedule == "zb_h1"
        return interleaved(parallel.pipeline, parallel.stages_per_rank, micro_batches, split)
    if parallel.schedule in V_SHAPED:
        return (zero_bubble_v if parallel.schedule == "zbv" else dualpipe_v)(parallel.pipeline, micro_batches)
    return one_forward_one_backward(parallel.pipeline, micro_batches)


def one_forward_one_backward(ranks: int, micro_batches: int) -> Table:
    """Each rank does forward passes until the first gradient arrives, and then backward and forward passes in turn."""
    table: Table = []
    for rank in range(ranks):
        first = min(micro_batches, ranks - rank)
        table.append(
            _in_turn(
                [Instruction(rank, FORWARD, each) for each in range(micro_batches)],
                [Instruction(rank, BACKWARD, each) for each in range(micro_batches)],
                first - 1,
            )
        )
    return table


def interleaved(ranks: int, stages_per_rank: int, micro_batches: int, split: bool = False) -> Table:
    """Each rank alternates between its stages, after every `ranks` micro-batches: the bubble is that of 1F1B divided by
    the number of stages of a rank.

    Args:
        split: ZB-H1. Gradients of weights fill the time in which a rank would wait, so fewer forward passes come first.
    """
    if micro_batches % ranks:
        raise ScheduleError(f"the {micro_batches} micro-batches must be a multiple of the {ranks} ranks")
    total, table = stages_per_rank * micro_batches, list[list[Instruction]]()
    for rank in range(ranks):
        first = min((stages_per_rank - 1) * ranks + (1 if split else 2) * (ranks - 1 - rank), total)
        places = [divmod(number // ranks, stages_per_rank) for number in range(total)]  # (round, stage of the rank)
        micros = [begun * ranks + number % ranks for number, (begun, _) in enumerate(places)]
        forward = [
            Instruction(own * ranks + rank, FORWARD, micro) for (_, own), micro in zip(places, micros, strict=True)
        ]
        backward = [
            Instruction((stages_per_rank - 1 - own) * ranks + rank, BACKWARD, micro)
            for (_, own), micro in zip(places, micros, strict=True)
        ]
        table.append(_split(_in_turn(forward, backward, first), rank) if split else _in_turn(forward, backward, first))
    return table


def _split(own: list[Instruction], waiting: int) -> list[Instruction]:
    """Backward passes in two parts. Weights follow as soon as more than `waiting` of them are left."""
    found, left = list[Instruction](), list[Instruction]()
    for it in own:
        found.append(it if it.kind == FORWARD else it._replace(kind=INPUTS))
        if it.kind == BACKWARD:
            left.append(it._replace(kind=WEIGHTS))
            if len(left) > waiting:
                found.append(left.pop(0))
    return found + left


class _TwoStages:
    """Instructions of a rank with one stage on each arm of a V. Each pass takes the next micro-batch of its stage."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.stages, self.own, self.waiting = (rank, 2 * ranks - 1 - rank), list[Instruction](), list[Instruction]()
        self._begun = Counter[tuple[int, str]]()

    def begun(self, kind: str, arm: int) -> int:
        return self._begun[self.stages[arm], kind]

    def add(self, passes: str, times: int = 1) -> None:
        """Passes such as "F0 I1": the forward pass of the first arm, then I of the second. W is the oldest one left."""
        for each in passes.split() * times:
            if each == "W":
                self.own += [self.waiting.pop(0)] if self.waiting else []
                continue
            kind, stage = each[0], self.stages[int(each[1])]
            place = stage, {BACKWARD: INPUTS}.get(kind, kind)
            self.own.append(Instruction(stage, kind, self._begun[place]))
            if kind == INPUTS:
                self.waiting.append(Instruction(stage, WEIGHTS, self._begun[place]))
            self._begun[place] += 1


def zero_bubble_v(ranks: int, micro_batches: int) -> Table:
    """ZB-V: no rank waits between its first and its last instruction if F, I and W take the same time."""
    count, table = max(2 * ranks - 1, micro_batches), list[list[Instruction]]()
    for rank in range(ranks):
        made = _TwoStages(ranks, rank)
        made.add("F0", 2 * (ranks - rank) - 1)
        made.add("F1 F0", rank)
        made.add("F1 I1 W1", ranks - rank)
        while made.begun(FORWARD, 1) < max(made.begun(FORWARD, 0), count):
            made.add("F0" if made.begun(FORWARD, 0) < count else "")
            made.add("I0 W0 F1 I1 W1")
        made.add("I0 I1", rank)
        made.add("I0 W0", ranks - rank)
        for arm in (1, 0):
            made.add(f"W{arm}", count - made.begun(WEIGHTS, arm))
        table.append([it for it in made.own if it.micro_batch < micro_batches])
    return table


def dualpipe_v(ranks: int, micro_batches: int) -> Table:
    """DualPipe-V: forward passes of one arm next to backward passes of the other. Here they follow each other."""
    if micro_batches < 2 * ranks:
        raise ScheduleError(f"there must be at least {2 * ranks} micro-batches, not {micro_batches}")
    table: Table = []
    for rank in range(ranks):
        made, after = _TwoStages(ranks, rank), ranks - rank - 1
        made.add("F0", 2 * after)
        made.add("F0 F1", rank + 1)
        made.add("I1 W F1", after)
        made.add("F0 B1 F1 B0", micro_batches - 2 * ranks + rank + 1)
        made.add("B1 F1 B0", after)
        whole = 2 * ((rank + 1) // 2) + (rank + 1) % 2  # backward passes in one part, of the next 2 (rank + 1)
        for number in range(2 * (rank + 1)):
            made.add(f"{BACKWARD if number < whole else INPUTS}{1 - number % 2}")
        made.add("W I0", after)
        made.add("W", rank + 1)
        table.append(made.own)
    return table


def forward_only(homes: list[int], micro_batches: int) -> Table:
    """All micro-batches through one stage of a rank, and then through its next: for evaluation.

    Args:
        homes: the rank of each stage.
    """
    table: Table = [[] for _ in range(max(homes) + 1)]
    for stage, rank in enumerate(homes):
        table[rank] += [Instruction(stage, FORWARD, micro) for micro in range(micro_batches)]
    return table


def with_zero(own: list[Instruction], zero_stage: int, each: bool) -> list[Instruction]:
    """A rank's instructions, with the ones of ZeRO 2 and 3 between the replicas of its stages.

    Args:
        each: gradients are reduced after each backward pass, and weights are released between passes of other stages.
            Otherwise each stage reduces and gathers once.
    """
    uses = [place for place, it in enumerate(own) if it.kind != WEIGHTS]  # the second part needs no weights
    following = {place: own[after].stage for place, after in zip(uses, uses[1:])}
    last = {own[place].stage: place for place in uses}
    final = {it.stage: place for place, it in enumerate(own) if it.kind in (BACKWARD, WEIGHTS)}
    found, held = list[Instruction](), set[int]()
    for place, it in enumerate(own):
        if zero_stage == 3 and it.kind != WEIGHTS and it.stage not in held:
            held.add(it.stage)
            found.append(it._replace(kind=GATHER))
        found.append(it)
        if it.kind in (BACKWARD, WEIGHTS) and (each or place == final[it.stage]):
            found.append(it._replace(kind=REDUCE))
        done = following.get(place) != it.stage if each else place == last[it.stage]
        if zero_stage == 3 and it.kind != WEIGHTS and done:
            held.remove(it.stage)
            found.append(it._replace(kind=RELEASE))
    return found


def gathers(own: list[Instruction], stages: tuple[int, ...]) -> int:
    """How often a rank gathers weights that these of its stages use."""
    count, held = 0, set[int]()
    for it in (it for it in own if it.stage in stages):
        if it.kind == GATHER:
            count += not held
            held.add(it.stage)
        elif it.kind == RELEASE:
            held.remove(it.stage)
    return count


def _in_turn(forward: list[Instruction], backward: list[Instruction], first: int) -> list[Instruction]:
    """`first` forward passes, then a forward and a backward pass in turn, then what is left."""
    rest = len(forward) - first
    pairs = chain.from_iterable(zip(forward[first:], backward[:rest], strict=True))
    return [*forward[:first], *pairs, *backward[rest:]]


@dataclass(frozen=True)
class Round:
    """One instruction at most per rank, and the messages that are sent after it.

    All ranks post the messages of a round in the same order, and before any message of the next round. So the order is
    the same at both ends, and after a round no message has only one of its ends."""

    instructions: tuple[Instruction | None, ...]  # by rank
    messages: tuple[Message, ...]


def rounds(table: Table, stages: int) -> list[Round]:
    """Simulate a table in which all instructions take the same time.

    Raises:
        ScheduleError: a rank waits for something that no rank will send.
    """
    at, done, found = [0] * len(table), set[Instruction](), list[Round]()
    homes = {it.stage: rank for rank, own in enumerate(table) for it in own}
    while any(place < len(own) for place, own in zip(at, table, strict=True)):
        chosen = [
            own[place] if place < len(own) and needs(own[place], stages) <= done else None
            for place, own in zip(at, table, strict=True)
        ]
        if not any(chosen):
            stuck = {rank: needs(own[at[rank]], stages) - done for rank, own in enumerate(table) if at[rank] < len(own)}
            # a rank that waits for its own later instruction is the cause, and the others wait for it
            causes = (rank for rank, missing in stuck.items() if missing & {it.result for it in table[rank]})
            rank = next(causes, min(stuck))
            missing = ", ".join(map(str, sorted(stuck[rank])))
            raise ScheduleError(f"rank {rank} waits for ever at {table[rank][at[rank]]}, which needs {missing}", rank)
        at = [place + (each is not None) for place, each in zip(at, chosen, strict=True)]
        done |= {each.result for each in chosen if each is not None}
        found.append(Round(tuple(chosen), tuple(_messages(chosen, homes))))
    return found


def needs(it: Instruction, stages: int) -> set[Instruction]:
    if it.kind in OF_ZERO:
        return set()
    if it.kind == FORWARD:
        return {it._replace(stage=it.stage - 1)} if it.stage else set()
    if it.kind == WEIGHTS:
        return {it._replace(kind=BACKWARD)}
    it, own = it.result, {it._replace(kind=FORWARD)}
    return own | ({it._replace(stage=it.stage + 1)} if it.stage + 1 < stages else set())


def _messages(done: list[Instruction | None], homes: dict[int, int]) -> list[Message]:
    found = []
    for rank, it in enumerate(done):
        if it is None or it.kind in (WEIGHTS, *OF_ZERO):
            continue
        stage = it.stage + (1 if it.kind == FORWARD else -1)
        if stage in homes:
            found.append(Message(it.result, rank, homes[stage]))
    return found


def check_table(table: Table, homes: list[int], micro_batches: int) -> list[Round]:
    """The rounds of a table. Every rank must have the instructions of its stages, once each. The passes of a stage must
    be in the order of the micro-batches. The first and the last stage read a batch in that order, and sums of gradients
    then do not depend on the schedule.

    Args:
        homes: the rank of each stage.

    Raises:
        ScheduleError: it cannot be executed.
    """
    for rank, own in enumerate(table):
        stages = [stage for stage, home in enumerate(homes) if home == rank]
        split = {(it.stage, it.micro_batch) for it in own if it.kind in (INPUTS, WEIGHTS)}
        wanted = {
            Instruction(stage, kind, micro)
            for stage in stages
            for micro in range(micro_batches)
            for kind in (FORWARD, *((INPUTS, WEIGHTS) if (stage, micro) in split else (BACKWARD,)))
        }
        times = Counter(own)
        for it in sorted(wanted | times.keys()):
            if times[it] != (it in wanted):
                rule = "must be there once" if it in wanted else "must not be there"
                raise ScheduleError(f"rank {rank}: {it} {rule}, and is there {times[it]} times", rank)
        for stage in stages:
            for kinds in ((FORWARD,), (BACKWARD, INPUTS), (BACKWARD, WEIGHTS)):
                order = [it.micro_batch for it in own if it.stage == stage and it.kind in kinds]
                if order != sorted(order):
                    passes = "forward" if kinds == (FORWARD,) else "backward"
                    rule = f"{passes} passes of stage {stage} must be in the order 0, 1, 2, ..."
                    raise ScheduleError(f"rank {rank}: {rule}", rank)
    return rounds(table, len(homes))


_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")


def read_table(text: str, ranks: int) -> Table:
    """The table of a CSV file: one row per rank with cells such as 0F0 and 2B1 (stage, pass, micro-batch), which may be
    empty. It is torch's `compute_only` form.

    Raises:
        ScheduleError: a cell that is no instruction, or another number of rows.
    """
    table: Table = []
    for number, line in enumerate((line for line in text.splitlines() if line.strip()), 1):
        cells = [cell.strip() for cell in line.split(",")]
        matches = [(cell, _CELL.fullmatch(cell)) for cell in cells if cell]
        wrong = next((cell for cell, match in matches if match is None), None)
        if wrong is not None:
            raise ScheduleError(
                f"row {number}: {wrong[:40]!r} must be a stage, F, B, I or W, and a micro-batch, such as 0F3"
            )
        table.append([Instruction(int(m[1]), m[2], int(m[3])) for _, m in matches if m is not None])
    if len(table) != ranks:
        raise ScheduleError(f"it must have one row per rank of the pipeline: {ranks}, not {len(table)}")
    return table
