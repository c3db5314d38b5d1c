"""Start of a run: a new one, its newest checkpoint, a named checkpoint, or only weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint import Checkpoint, CheckpointError, Fragment, FragmentSpec, Meta
from megatron.checkpoint.format.durable import number_of
from megatron.checkpoint.format.fragment import MASTER, WEIGHT
from megatron.checkpoint.format.manifest import IMPORTED
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.read.reader import refuse_adapters
from megatron.checkpoint.save.store import Resume, Store
from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.sequences import stages_of
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.data.plan import SampleSet
from megatron.data.skipped_batches import LeftOut
from megatron.engine.base import BaseEngine
from megatron.engine.undo import OPTIMIZER, SCALER
from megatron.objectives.named import objective_of
from megatron.parallel.layout.precision import COMPUTE_TYPES
from megatron.parallel.layout.shard import LogicalTensor
from megatron.report.ledger import Ledger, read_ledger
from megatron.report.ledger import left_out as left_out_of
from megatron.worker.place import StartError

from ..hooks.guard import NonFinite
from ..world import World
from .fetch import FOLDER, LEDGER, leave_later, ledger_of, local_path, or_uploaded
from .same_run import changes, last_sample, refuse_other_files, refuse_other_runs, refuse_other_shards
from .upcycle import MEAN, extend, extended, mapped, upcycle

MOST = 3  # starts that diverge at one step. With the same data and program a fourth would too


@dataclass(frozen=True)
class Divergence:
    """The latest starts, which all diverged at one step. Their run resumes further back, and finally stops.

    The newest checkpoint may be intact, but of a run that was already lost: finite weights far from their range.
    Resuming from it would fail again with each restart."""

    step: int
    starts: tuple[int, ...]  # completed updates that each began from, the latest last
    error: str


def divergence(entries: Iterable[Mapping[str, Any]], attempts: int) -> Divergence | None:
    """The common divergence of the last `attempts` starts in a ledger, if they diverged at one step."""
    ends: list[tuple[int, int, str] | None] = []
    start = None
    for entry in entries:
        if entry["event"] in ("start", "resume"):
            if start is not None:
                ends.append(None)  # killed without a word
            start = entry["step"]
        elif entry["event"] in ("error", "end", "stop") and start is not None:
            diverged = str(entry.get("error", "")).startswith(f"{NonFinite.__name__}: ")
            ends.append((start, entry.get("step") or 0, entry["error"]) if diverged else None)
            start = None
    if start is not None:
        ends.append(None)
    alike: list[tuple[int, int, str]] = []
    for end in reversed(ends[-attempts:] if attempts else []):
        if end is None or (alike and end[1] != alike[0][1]):
            break
        alike.append(end)
    if not alike:
        return None
    return Divergence(alike[0][1], tuple(begin for begin, _, _ in reversed(alike)), alike[0][2])


def of_run(folder: Path, attempts: int) -> list[Any] | None:
    """The `Divergence` of a run's ledger as JSON values, if it happened at least twice."""
    ledger = folder / "ledger.jsonl"
    found = divergence(read_ledger(ledger), attempts) if attempts > 1 and ledger.exists() else None
    return None if found is None or len(found.starts) < 2 else [found.step, list(found.starts), found.error]


REWARD = "reward.weight"  # the head of a reward model


@dataclass(frozen=True)
class StartPoint:
    """Start of a run. Both checkpoints are None for a new run."""

    checkpoint: Checkpoint | None = None  # to be resumed, opened and verified
    weights: Checkpoint | None = None  # a checkpoint for its weights only, likewise
    facts: dict[str, Any] = field(default_factory=dict)  # for the ledger
    left_out: LeftOut = LeftOut()  # batches that the run skips

    @property
    def new(self) -> bool:
        return self.checkpoint is None and self.weights is None

    @property
    def imported(self) -> dict[str, Any]:
        """For the meta data of each checkpoint: data of an imported model in addition to weights."""
        found = self.checkpoint or self.weights
        return {name: value for name, value in found.meta.extra.items() if name == IMPORTED} if found else {}


def find(
    config: Config, world: World, log: Callable[[str], None], attempt: int = 0, levels: Levels | None = None
) -> StartPoint:
    """Find the checkpoint of `checkpoint.resume` and `checkpoint.initialize_from`, before anything is built.

    A run that returns to a named checkpoint, or to its beginning, puts later checkpoints of its folder aside: `auto`
    would otherwise resume from them later.

    Args:
        attempt: number of restarts after failures. A restart continues from the run's own newest checkpoint, whatever
            the first start was given.

    Raises:
        CheckpointError: on every rank, if it is missing or damaged.
    """
    store = Store(config.checkpoint.dir, world.communicator)
    for line in store.clean():
        log(line)
    how = config.checkpoint.resume
    if how not in ("auto", "none"):
        how = local_path(how, store.directory, world.communicator)
    diverged = world.communicator.broadcast(of_run(Path(config.run.dir), attempt) if world.is_main else None)
    if diverged:
        found = _further_back(store, *diverged)
    else:
        found, _ = or_uploaded(lambda: _chosen(store, how, attempt, levels), store, config, world)
    log(found.reason)
    if how != "auto" or diverged:
        after = found.checkpoint.step if found.checkpoint else -1
        for line in [*(levels.drop(after) if levels else ()), *store.set_aside(after=after)]:
            log(line)
        if world.is_main:
            leave_later(config, after)
    if found.checkpoint is not None:
        return _continued(found.checkpoint, found.skipped, config, world, log)
    if config.checkpoint.initialize_from:
        path = local_path(config.checkpoint.initialize_from, store.directory, world.communicator, config)
        return _initialised(config, store.weights(path), log)
    return StartPoint(None, None, _fact(LeftOut.given(config)), LeftOut.given(config))


def _continued(
    checkpoint: Checkpoint, skipped: Sequence[tuple[Path, str]], config: Config, world: World, log: Callable[[str], Any]
) -> StartPoint:
    changed = changes(checkpoint.meta.config, config, checkpoint.step)
    for line in changed:
        log(f"changed since the checkpoint: {line}")
    refuse_other_runs(checkpoint.title, changed, config)
    refuse_other_shards(checkpoint.title, checkpoint.meta.config, config)
    if checkpoint.step >= config.training.steps:
        log(f"nothing to do: the checkpoint has {checkpoint.step} steps, and training.steps is {config.training.steps}")
    facts = {
        "checkpoint": checkpoint.title,
        "skipped": [str(path) for path, _ in skipped],
        "changed": changed,
        "ledger": checkpoint.meta.ledger,
    }
    left_out = LeftOut.of(world.communicator.broadcast(_left_out(checkpoint, config).pairs if world.is_main else None))
    return StartPoint(checkpoint, None, facts | _fact(left_out), left_out)


def _initialised(config: Config, found: Resume, log: Callable[[str], None]) -> StartPoint:
    weights = found.checkpoint
    assert weights is not None  # one was named
    refuse_adapters(weights)
    log(f"{found.reason}. Optimizer, schedule and data start from the beginning")
    changed = changes(weights.meta.config, config, weights.step, start=0)
    # Many models come without their tokenizer.
    known = not any(line.startswith("tokenizer.type: 'none'") for line in changed)
    other = [line for line in changed if line.startswith(("model.", "tokenizer.") if known else "model.")]
    for line in other:
        log(f"differs from the checkpoint the weights come from: {line}")
    facts = {"initialize_from": str(weights.path), "changed": other}
    return StartPoint(None, weights, facts | _fact(LeftOut.given(config)), LeftOut.given(config))


def _fact(left_out: LeftOut) -> dict[str, Any]:
    return {"left_out": [list(pair) for pair in left_out.pairs]} if left_out else {}


def _left_out(checkpoint: Checkpoint, config: Config) -> LeftOut:
    """Batches that the run has skipped so far, from the ledger of the run that saved the checkpoint: that run may
    have returned to it since. Without a ledger, from the checkpoint."""
    folder, path = Path(config.checkpoint.dir).resolve(), checkpoint.path.resolve()
    named = {Path(config.checkpoint.resume).resolve(), folder / FOLDER} & {path, *path.parents}
    own = config.checkpoint.resume == "auto" or path.parent == folder or not named
    ledger = Path(config.run.dir) / LEDGER if own else ledger_of(path)
    since = checkpoint.meta.ledger.get("bytes", 0)
    told = left_out_of(ledger, since, checkpoint.step) if ledger else None
    if told is None:  # no entry since it was saved. Earlier parts of the ledger may be damaged
        told = checkpoint.meta.data.get("left_out", [] if own and since else None)
    return LeftOut.of(told) if told or (own and told is not None) else LeftOut.given(config)


def _chosen(store: Store, how: str, attempt: int, levels: Levels | None = None) -> Resume:
    """The given start, or on a restart the newest checkpoint that was saved since."""
    if how == "auto":
        return _nearest(store, levels)
    if not attempt:
        return store.resume(how)
    begin, own = store.resume(how), _nearest(store, levels)
    if own.checkpoint is None or (begin.checkpoint is not None and own.checkpoint.step < begin.checkpoint.step):
        return begin
    return own


def _note(skipped: Sequence[tuple[Any, str]]) -> str:
    return "".join(f". Skipped {bad}: {why}" for bad, why in skipped)


def _nearest(store: Store, levels: Levels | None) -> Resume:
    """The newest whole and undamaged state, from the nearest level that has it, else from the run's folder.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    if levels is None:
        return store.resume("auto")
    paths = store.paths() if store.communicator.rank == 0 else []
    newest = store.communicator.broadcast(number_of(paths[-1]) if paths else -1)
    near, skipped = levels.newest(max(newest, 0))
    if near is None:
        failure, own = None, Resume(None)
        try:
            own = store.resume("auto")
        except CheckpointError as error:
            failure = error
        step = own.checkpoint.step if own.checkpoint else -1
        if step < newest:  # newer ones were damaged
            near, more = levels.newest(step + 1)
            skipped += more
        if near is None and failure is not None:
            raise failure
        if near is None:
            return replace(own, skipped=[*skipped, *own.skipped], reason=f"{own.reason}{_note(skipped)}")
    return Resume(near, skipped, f"resumed from the {near.title}, the newest whole one{_note(skipped)}")


def _further_back(store: Store, step: int, starts: list[int], error: str) -> Resume:
    """The newest intact checkpoint before those from which the run diverged at the same step.

    Raises:
        StartError: there is none, or it was tried often enough: another restart would not help.
    """
    story = f"the run diverged {len(starts)} times at step {step}, begun after {', '.join(map(str, starts))} updates"
    advice = (
        "It is not started again by itself. Change the recipe (optimizer.lr, gradient_clipping) or the data of that "
        f"step, and start from a checkpoint that you choose with checkpoint.resume. The last message was: {error}"
    )
    found = store.resume("auto", before=min(starts)) if len(starts) < MOST else None
    if found is None or found.checkpoint is None:
        raise StartError(f"{story}. {advice}" if found is None else f"{story}, and there is none before them. {advice}")
    return replace(found, reason=f"{story}: going back further. {found.reason}")


def load(source: StartPoint, world: World, engine: BaseEngine) -> int:
    """Fill the engine from the source. Returns the number of completed updates.

    Raises:
        CheckpointError: on every rank, if the checkpoint does not fit the run.
    """
    if source.checkpoint is not None:
        resume(source.checkpoint, world, engine)
        engine.start_at(max(source.checkpoint.step - 1, 0))  # evaluations before the next update
        return source.checkpoint.step
    if source.weights is not None:
        initialize(source.weights, world, engine, engine.config.checkpoint.initialize_map, engine.config)
    engine.start_at(0)
    return 0


def made_in(checkpoint: Checkpoint, config: Config) -> int:
    """An update of the checkpoint's stage of sequence length.

    For a checkpoint of another run, such as an imported model, the stage that the configuration ends with."""
    values, _, _ = parse(checkpoint.meta.config, lambda _line: Origin("values"))
    own = values["training"].get("sequence_schedule") or []
    known = own == config.model_dump(mode="json")["training"]["sequence_schedule"]
    return max(checkpoint.step - 1, 0) if known else stages_of(config)[-1].begin


def resume(checkpoint: Checkpoint, world: World, engine: BaseEngine) -> None:
    """Restore everything: masters, optimizer states, counters, loss scale. Then update the weights from the masters.

    Raises:
        CheckpointError: it does not fit the run, or its optimizer had read another file.
    """
    state = engine.state
    refuse_other_files(checkpoint, engine)
    targets = state.targets()
    checkpoint.check([target.spec for target in targets], communicator=world.communicator)
    checkpoint.read_into(targets, communicator=world.communicator)
    meta = checkpoint.meta
    engine.undo.restore({**meta.extra, OPTIMIZER: meta.optimizer, SCALER: meta.loss_scaler})
    state.refresh()


def initialize(
    checkpoint: Checkpoint,
    world: World,
    engine: BaseEngine,
    mapping: Mapping[str, str] = MappingProxyType({}),
    config: Config | None = None,
) -> None:
    """Take only weights, of any saved type. Some may be made from others by `mapping` (see `upcycle`), and tables of
    tokens may get new rows (see `vocabulary`). The part of the engine that freezes weights reads them itself."""
    if engine.state.has_frozen:
        engine.undo.restore({})
        engine.state.refresh()
        return
    layers = config.checkpoint.initialize_layers if config is not None else ()
    masters, made = mapped(checkpoint, engine.state.masters(), mapping, layers)
    tables: list[tuple[Fragment, LogicalTensor]] = []
    known = 0
    if config is not None:
        log = print if world.is_main else lambda _: None
        masters, tables, known = extended(checkpoint, masters, config, log)
    wanted = [each.spec for each in masters] + [FragmentSpec.whole(origin, MASTER) for _, origin in made + tables]
    spare: tuple[str, ...] = ()
    if config is not None and objective_of(config).scores and REWARD not in checkpoint.tensors:
        # A language model: the run's own head keeps its initial values.
        masters = [each for each in masters if each.tensor.name != REWARD]
        wanted, spare = [each for each in wanted if each.tensor.name != REWARD], ("head.weight", "head.bias")
    checkpoint.check(wanted, communicator=world.communicator, states={MASTER, WEIGHT}, spare=spare)
    checkpoint.read_into(masters, cast={MASTER, WEIGHT}, communicator=world.communicator)
    upcycle(checkpoint, made)
    if config is not None and tables:
        extend(checkpoint, tables, known, config.checkpoint.initialize_vocabulary == MEAN)
    engine.undo.restore({})
    engine.state.refresh()


def tokens_read(source: StartPoint, config: Config) -> Callable[[int], int]:
    """Tokens that the run has read after n steps. Steps before a resume may have had batches of another size."""
    batches, length = batches_of(config), config.training.sequence_length
    start = batches.before(source.checkpoint.step) if source.checkpoint else 0
    before = source.checkpoint.meta.data.get("tokens", start * length) if source.checkpoint else 0
    return lambda steps: before + (batches.before(steps) - start) * length


def contents(
    config: Config,
    config_text: str,
    world: World,
    engine: BaseEngine,
    plan: SampleSet,
    tokens: Callable[[int], int],
    ledger: Ledger | None = None,
    left_out: LeftOut | None = None,
    imported: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[int], tuple[Any, Meta]]:
    """A function from a step to the contents of its checkpoint.

    Args:
        plan: of the training data.
        tokens: see `tokens_read`.
        ledger: the run's, on rank 0, whose meta data are kept.
    """
    layout, state = world.mesh.layout, engine.state
    whole, left_out = config.checkpoint.optimizer_state, left_out or LeftOut()

    def at(step: int) -> tuple[Any, Meta]:
        samples, kept = plan.batches.before(step), engine.undo.kept()
        meta = Meta(
            step=step,
            config=config_text,
            optimizer=kept[OPTIMIZER],
            loss_scaler=kept[SCALER],
            resumable=whole,
            layout=layout.sizes,
            data={
                "samples": samples,
                "tokens": tokens(step),
                "sequence_length": config.training.sequence_length,
                "last_sample": last_sample(plan, samples, left_out),
                **({"document_weights": weights} if (weights := plan.document_weights()) else {}),
                **_fact(left_out),
            },
            ledger={} if ledger is None else {"bytes": ledger.position()},
            extra={**imported, **{name: each for name, each in kept.items() if name not in (OPTIMIZER, SCALER)}},
        )
        return state.fragments() if whole else state.weights(COMPUTE_TYPES[config.precision.compute]), meta

    return at
