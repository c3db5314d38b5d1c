"""Output of the run: checkpoints, evaluation, logs, profiles."""

from typing import Literal

from ..features.feature import extended
from ..registry import HOOK, METRIC
from ..section import Addition, Derivable, Derived, Section, key

RUN_NAME = "{run.name}"  # what stands for it in the URL of a level


class RunSection(Section):
    name: Derivable[str] = key(
        None,
        "Name of the run. That of a file in a folder begins with the folder's name (configs/llama/7b.yml: llama-7b).",
        derived=Derived("the first configuration file's name", lambda own, at: at.name, ()),
    )
    dir: Derivable[str] = key(
        None,
        "The run's directory.",
        derived=Derived("runs/<run.name>", lambda own, at: f"runs/{own['name']}", ("run.name",)),
    )
    notes: str = key("", "Free text kept with the run.")


class LevelSection(Section):
    place: Literal["memory", "disk", "store"] = key(
        ...,
        "memory: a file system in memory of each host (/dev/shm), which outlives ranks and agents. disk: a folder "
        "of each host's own (path). store: an object store (url), for copies of finished checkpoints.",
    )
    path: str | None = key(None, "Of a disk: folder on each host. {host} stands for the host's name.")
    url: str | None = key(None, f"Of a store: any fsspec URL (s3://, gs://, file://). {RUN_NAME} is the run's name.")
    every: int | Literal["auto"] = key(
        ...,
        "Save every n steps. auto: the interval that loses the least time, by the cost of a save here and the "
        "failures after which a run would begin from here (Young/Daly). A store, which costs the steps nothing, "
        "then gets each checkpoint.",
        unit="steps",
    )
    keep: int | Literal["all"] = key(2, "Keep the newest k saves. all is for a store.")
    neighbours: int = key(
        0, "Hosts after each host that have its files: this many neighbours may be lost together.", unit="hosts", ge=0
    )

    @property
    def title(self) -> str:
        """The level's name in messages and folders."""
        return f"{self.place} of {self.neighbours + 1} hosts" if self.neighbours else self.place


@extended("checkpoint")
class CheckpointSection(Section):
    dir: Derivable[str] = key(
        None,
        "Folder of checkpoints.",
        derived=Derived("<run.dir>/checkpoints", lambda own, at: f"{at['run.dir']}/checkpoints", ("run.dir",)),
    )
    every: int | None = key(None, "Save every n steps.", unit="steps", gt=0)
    minutes: float | None = key(None, "Save this much wall time after the last save.", unit="minutes", gt=0)
    auto: bool = key(
        False,
        "Save at the interval that loses the least time, by the cost of earlier saves and the failures that were "
        "seen (Young/Daly).",
    )
    steps: list[int] = key(list, "Save at these steps too.", unit="steps")
    log_spaced: bool = key(False, "Save at steps 0, 1, 2, 4, ..., 512 too (Pythia).")
    at_end: bool = key(True, "Save after the last step.")
    keep_last: int | None = key(None, "Keep only the newest k checkpoints, and the checkpoints of keep_every.", gt=0)
    keep_every: int | None = key(None, "Always keep checkpoints whose step is a multiple of this.", unit="steps", gt=0)
    resume: str = key(
        "auto",
        "auto: the newest intact checkpoint in checkpoint.dir if there is one. none: start without one. Otherwise "
        "the path or fsspec URL of one.",
    )
    allow_changes: list[str] = key(
        list,
        "Keys, or sections, in which a resumed run may differ from its checkpoint although they make it another "
        "run: training.seed, model, tokenizer, or optimizer.options.weights for another file of that name.",
    )
    initialize_from: str | None = key(
        None, "Take only the weights of this checkpoint (path or fsspec URL) or Hugging Face folder."
    )
    initialize_map: dict[str, str] = key(
        dict,
        "With initialize_from: tensors of this model that are made of other tensors of the checkpoint, as in "
        "'layers.*.moe.experts.down.weight: layers.*.mlp.down.weight', or with their initial values "
        "('layers.*.moe.router.weight: new'). `*` is a word.",
    )
    initialize_layers: list[int | Literal["identity"]] = key(
        list,
        "With initialize_from: the number of the checkpoint's block that each block of this model starts as. '[0, "
        "1, 0, 1]' is a stack of twice the depth. identity: the block adds nothing at first.",
    )
    initialize_vocabulary: Literal["same", "mean", "initial"] = key(
        "same",
        "With initialize_from: the rows of new tokens. same: there are none. mean: each starts as the mean of the "
        "known ones. initial: by model.init. Known tokens must have the ids that they had.",
    )
    prove: bool = key(
        False,
        "Save with each checkpoint the loss of its weights on the batch of the last step. A resumed run computes "
        "it again, and stops if it differs: on the same layout in any bit, on other layouts beyond rounding.",
    )
    optimizer_state: bool = key(True, "Save optimizer state, without which a checkpoint cannot be resumed.")
    asynchronous: bool = key(False, "Write in the background after a copy to host memory.")
    levels: list[LevelSection] = key(
        list, "Further copies that a restart may begin from: on the hosts, the nearest first, and in an object store."
    )

    @property
    def near(self) -> list[LevelSection]:
        """The levels on the hosts, nearer than `dir`."""
        return [each for each in self.levels if each.place != "store"]

    @property
    def store(self) -> LevelSection | None:
        """The level in an object store, farther than `dir`."""
        return next((each for each in self.levels if each.place == "store"), None)

    @property
    def store_every(self) -> int | None:
        """Steps between the saves of the store, or None where it copies every save."""
        return None if self.store is None or self.store.every == "auto" else self.store.every


class SampleOptions(Section):
    every: int | None = key(None, "Generate samples every n steps.", unit="steps", gt=0)
    prompts: list[str] = key(list, "Texts to continue.")
    tokens: int = key(64, "Length of a sample.", unit="tokens", gt=0)
    temperature: float = key(0.8, "Sampling temperature. 0 is greedy.", ge=0)
    top_k: int = key(0, "Sample from the k likeliest tokens. 0 is all.", ge=0)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability.", gt=0, le=1)


class TaskOptions(Section):
    name: str = key("", "Name of a task, group or tag of the evaluation harness, a task file, or an own task.")
    every: int | None = key(
        None,
        "Run it every n steps. null: after the last step. 0: not during training, only by evaluate.py without "
        "other tasks.",
        unit="steps",
        ge=0,
    )
    few_shot: int | None = key(None, "Examples before each question. null: as the task says.", ge=0)
    limit: float | None = key(None, "Only the first n documents, or below 1 a share of them.", gt=0)


class ProbeOptions(Section):
    name: str = key(..., "Name in records.", min_length=1)
    path: str = key(..., 'File of JSON lines: {"text": ...}, or {"context": ..., "continuation": ...}.')
    every: int | None = key(None, "Score it every n steps, from 0 on. null: with each checkpoint.", unit="steps", gt=0)


class ReadLessOptions(Section):
    loki: str | None = key(None, "File of deepy calibrate: keys are chosen by its components (docs/decoding.md).")
    rank: float = key(0.9, "loki: components by which keys are chosen, or below 1 the share that they explain.", gt=0)
    keys: float = key(0.25, "loki: keys that a head reads, or up to 1 their share of a text.", gt=0)
    sift: float | None = key(None, "Read values whose probability is above this quantile of the head's.", ge=0, lt=1)
    warmup: int = key(16, "sift: tokens of a text with full attention.", unit="tokens", ge=2)

    @property
    def asked(self) -> bool:
        return self.loki is not None or self.sift is not None


@extended("evaluation")
class EvaluationSection(Section):
    every: int | None = key(None, "Evaluate every n steps.", unit="steps", gt=0)
    batches: int = key(10, "Global batches per validation set. 0: all whole batches of each set.", unit="batches", ge=0)
    at_start: bool = key(False, "Evaluate before the first step.")
    at_end: bool = key(True, "Evaluate after the last step.")
    breakdown: list[Literal["source", "position", "frequency"]] = key(
        list,
        "Losses of validation by parts too: by source, by tokens read before, by the token's share of the training "
        "tokens (docs/evaluation.md).",
    )
    samples: SampleOptions = key(SampleOptions, "Samples generated during training.")
    probes: list[ProbeOptions] = key(list, "Texts whose own losses are recorded in training (docs/evaluation.md).")
    tasks: list[TaskOptions] = key(list, "Benchmark tasks that run during training (docs/evaluation.md).")
    task_folders: list[str] = key(list, "Folders with task files of your own, which are tasks under their names.")
    truncate: bool = key(
        False,
        "Cut the beginnings of tasks' contexts that are longer than the model reads, as lm_eval does. Otherwise "
        "such tasks are refused.",
    )
    placement: str | None = key(
        None,
        "File of deepy moe trace. In deepy evaluate experts are on its ranks, and decoded tokens stay with their "
        "experts: one exchange a layer in place of two (docs/decoding.md).",
    )
    exact: bool = key(
        False,
        "Score the texts of tasks with the decoder. On CPUs a score then depends on no other text, and is that with "
        "which the text would be drawn, bit for bit (docs/decoding.md).",
    )
    read_less: ReadLessOptions = key(ReadLessOptions, "Run tasks with fewer keys or values, which changes scores.")


class WandbOptions(Section):
    mode: Literal["online", "offline", "disabled"] = key("disabled", "Whether to log to Weights & Biases.")
    project: str | None = key(None, "Project.")
    entity: str | None = key(None, "User or team.")
    group: str | None = key(None, "Group of runs.")
    tags: list[str] = key(list, "Tags.")


class ProfileOptions(Section):
    start: int | None = key(None, "First profiled step. Without it nothing is profiled.", unit="steps", gt=0)
    steps: int = key(3, "Number of profiled steps.", unit="steps", gt=0)
    ranks: list[int] = key(lambda: [0], "Ranks that profile.")
    memory: bool = key(False, "Also write a memory snapshot (GPU).")


class SinkSection(Addition):
    type: str = key(..., "Class that takes the records.", role=METRIC)


@extended("logging")
class LoggingSection(Section):
    every: int = key(1, "Log a training line every n steps.", unit="steps", gt=0)
    console: Literal["auto", "live", "plain", "quiet"] = key(
        "auto", "Console style: a line per logged step, and on a terminal a progress bar below the lines (`live`)."
    )
    tensorboard: bool = key(False, "Write TensorBoard events.")
    wandb: WandbOptions = key(WandbOptions, "Weights & Biases.")
    peak_tflops: float | None = key(
        None, "Peak of one device that MFU is a share of.", unit="TFLOP/s", derived="from the device's name", gt=0
    )
    profile: ProfileOptions = key(ProfileOptions, "torch profiler window.")
    communication: Literal["off", "counts", "times"] = key(
        "off",
        "counts: an account of every message of each process group, without waiting. times: also how long messages of "
        "logged steps take (docs/communication.md).",
    )
    curve: bool = key(True, "Draw loss.png at the end.")
    predictions: bool = key(
        True,
        "Print the time and memory that the run will need, and record the actual ones in a file of yours that "
        "corrects later predictions.",
    )
    sinks: list[SinkSection] = key(list, "Further places where metrics go: import paths, or {type, options}.")


class HookSection(Addition):
    type: str = key(..., "Class that is called between the steps.", role=HOOK)


class SlowOptions(Section):
    every: int | None = key(
        10,
        "Compare the ranks' times over n steps each, sent with the numbers of the step after them. null: never.",
        unit="steps",
        gt=0,
    )
    factor: float = key(1.5, "A rank is slow at this multiple of the others' median time, or of its own past.", gt=1)
    windows: int = key(3, "Number of comparisons in a row in which a rank must be slow before it is named.", gt=0)


class WatchSection(Section):
    hang: Literal["auto", "report", "stop", "off"] = key(
        "auto",
        "Reaction to a run that hangs. report: name the rank at fault and keep waiting. stop: also end the run, "
        "and start it again with launch.restarts. auto: stop with launch.restarts, report without.",
    )
    factor: float = key(5.0, "A phase may take this multiple of its longest time in this run.", ge=1)
    step: float = key(180.0, "But forward, backward, reduction and optimizer at least this long.", unit="seconds", gt=0)
    data: float = key(300.0, "The same for reading a batch.", unit="seconds", gt=0)
    evaluation: float = key(900.0, "The same for evaluation, samples and other hooks.", unit="seconds", gt=0)
    save: float = key(1800.0, "The same for saving a checkpoint, and for the end of the run.", unit="seconds", gt=0)
    setup: float = key(1800.0, "The same for the start and first two steps (compile, warm-up).", unit="seconds", gt=0)
    slow: SlowOptions = key(SlowOptions, "Slow ranks.")
