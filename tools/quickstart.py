#!/usr/bin/env python
"""Train a small language model from nothing: corpus, tokenizer, token files, samples.

    deepy quickstart
    deepy quickstart --model rwkv7
    deepy quickstart training.steps=2000 optimizer.lr=2e-3
    deepy quickstart launch.peers=4

`make quickstart` runs this. Each step is a printed command that can be typed. A finished step is not repeated unless
its inputs have changed.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

import argparse  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("def parse(", "class Error(", "import os\n", "    def __init__(self,")
MODELS = {"pythia": "quickstart", **{name: f"quickstart_{name}" for name in ("mamba2", "rwkv7", "hybrid", "moe")}}
LENGTH = 60  # tokens of a sample
FAR_BELOW = 0.8  # the validation loss has to be below this share of the unigram entropy


class Failed(Exception):
    """A step that failed. `status` is the exit status of its command."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


def escaped(text: str) -> str:
    """A text with its line breaks and quotes as bash's $'...' has them."""
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


def call(words: Sequence[str], *, capture: bool = False) -> str:
    """Run a command of this project in the repository's root, shown as one would type it.

    Ctrl-C goes to the command, which ends itself. No process is killed.

    Raises:
        Failed: its exit status is not 0.
    """
    shown = " ".join(f"$'{escaped(word)}'" if "\n" in word else shlex.quote(word) for word in words)
    print(f"$ {'' if words[0].startswith('./') else 'python '}{shown}", flush=True)
    sink = subprocess.PIPE if capture else None
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, encoding="utf-8", stdout=sink)
    output = ""
    while True:
        try:
            output += process.communicate()[0] or ""
            break
        except KeyboardInterrupt:
            continue
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if status:
        raise Failed(f"{words[0]} ended with status {status}", status)
    return output


def digest(*parts: object) -> str:
    """A hash of words and of files' contents (of each `Path`)."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:
                part = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(repr(str(part)).encode())
    return total.hexdigest()


@dataclass
class Record:
    """Finished steps with their keys, hashes of all inputs, in a file next to the outputs."""

    path: Path
    steps: dict[str, dict] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Record:
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def holds(self, name: str, key: str, outputs: Sequence[Path]) -> bool:
        """Whether the step was done with this key, and its outputs are unchanged."""
        known = self.steps.get(name)
        return (
            known is not None
            and known["key"] == key
            and all(path.exists() and known["sizes"].get(path.name) == path.stat().st_size for path in outputs)
        )

    def put(self, name: str, key: str, outputs: Sequence[Path], **facts: object) -> None:
        self.steps[name] = {"key": key, "sizes": {path.name: path.stat().st_size for path in outputs}, **facts}
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(json.dumps(self.steps, indent=1, ensure_ascii=False), encoding="utf-8")
        new.replace(self.path)


@dataclass(frozen=True)
class Settings:
    """Options of the command line, see `--help`."""

    config: str
    data: Path
    vocabulary: int
    validation: float
    documents: int | None
    overrides: tuple[str, ...]


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def prepare(settings: Settings) -> None:
    """Corpus, tokenizer and token files in `settings.data`."""
    folder = settings.data
    folder.mkdir(parents=True, exist_ok=True)
    record = Record.load(folder / "quickstart.json")
    texts = {part: folder / f"stdlib_{part}.jsonl" for part in ("train", "validation")}
    tokenizer = folder / "tokenizer.json"
    limit = [] if settings.documents is None else ["--limit", str(settings.documents)]
    heading("1/5  Corpus: the sources and documentation texts of Python's standard library")
    words = ["tools/data/prepare.py", "stdlib", "--output", _name(folder)]
    _step(record, list(texts.values()), [], [*words, "--validation", f"{settings.validation:g}", *limit])
    heading("2/5  Tokenizer: byte-level BPE, learned from the training texts")
    words = ["tools/data/train_tokenizer.py", "--input", _name(texts["train"]), "--output", _name(tokenizer)]
    _step(record, [tokenizer], [texts["train"]], [*words, "--size", str(settings.vocabulary), "--overwrite"])
    heading("3/5  Token files: what training reads")
    for part, path in texts.items():
        words = ["tools/data/tokenize.py", "--input", _name(path), "--output", _name(folder / part)]
        words += ["--tokenizer", _name(tokenizer), "--overwrite", "--quiet"]
        _step(record, [folder / f"{part}.bin", folder / f"{part}.idx"], [path, tokenizer], words)


def _step(record: Record, outputs: list[Path], inputs: list[Path], command: list[str]) -> None:
    """Run a command unless it was run before on the same inputs and its outputs are still there."""
    key = digest(platform.python_version(), *command, *inputs)
    name = outputs[0].name
    if record.holds(name, key, outputs):
        print(f"done before: {', '.join(map(_name, outputs))}")
        return
    call(command)
    record.put(name, key, outputs)


def _name(path: Path) -> str:
    """A path as one would type it in the repository's root."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@dataclass(frozen=True)
class Machine:
    """How many ranks train here, and the files and overrides that fit the machine."""

    ranks: int
    extra: tuple[str, ...]
    about: str


def look() -> Machine:
    """All GPUs (1, 2, 4 or 8, since a step's 8 samples are shared by them), or two processes on CPU cores."""
    from megatron.worker import devices

    if devices.count() > 0:
        import torch

        if torch.cuda.is_available():
            ranks = 1 << min(devices.count(), 8).bit_length() - 1
            bf16 = ["configs/layouts/bf16.yml"] if torch.cuda.is_bf16_supported() else []
            extra = [*bf16, f"training.micro_batch_size={8 // ranks}", "training.compile=off"]
            return Machine(ranks, tuple(extra), f"{ranks} x {torch.cuda.get_device_name(0)}")
    return Machine(2, ("launch.device=cpu",), f"two processes on {len(os.sched_getaffinity(0))} CPU core(s)")


@dataclass(frozen=True)
class TrainingRun:
    """The training run: its directory, its checkpoints, its number of steps, and a hash of all that it depends on."""

    folder: Path
    checkpoints: Path
    steps: int
    key: str

    @property
    def checkpoint(self) -> Path:
        """Where the last checkpoint is when the run has finished."""
        return self.checkpoints / f"step_{self.steps:08d}"


def sources(settings: Settings, machine: Machine) -> tuple[list[str], list[str]]:
    """The files and overrides of the training."""
    files = [settings.config, *(word for word in machine.extra if word.endswith(".yml"))]
    fitting = [word for word in machine.extra if not word.endswith(".yml")]
    return files, [*fitting, *_data_overrides(settings), *settings.overrides]


def train(settings: Settings) -> TrainingRun:
    """Train, continue an interrupted training, or do nothing if it is finished."""
    from megatron.config import config_hash, load

    heading("4/5  Training")
    machine = look()
    files, overrides = sources(settings, machine)
    config = load(files, overrides, ranks=machine.ranks).config
    inputs = [settings.data / name for name in ("tokenizer.json", "train.bin", "validation.bin")]
    key = digest(config_hash(config), *inputs)
    run = TrainingRun(Path(config.run.dir), Path(config.checkpoint.dir), config.training.steps, key)
    if _trained(run):
        print(f"done before: {_name(run.checkpoint)}")
        return run
    _make_room(run)
    peers = config.launch.peers or 1
    print(f"on {machine.about}" if peers == 1 else f"{peers} peers on this machine (docs/peers.md)", flush=True)
    call(["./deepy.py", "--ranks", str(max(machine.ranks // peers, 1)), "train.py", *files, *overrides])
    if not run.checkpoint.is_dir():
        raise Failed(f"training stopped before step {run.steps}: the same command resumes from its newest checkpoint")
    Record.load(run.folder / "quickstart.json").put("training", run.key, [], finished=True)
    return run


def _data_overrides(settings: Settings) -> list[str]:
    """The paths of the data, if they differ from the configuration's."""
    if settings.data == ROOT / "data" / "quickstart":
        return []
    return [
        f"data.train={_name(settings.data / 'train')}",
        f"data.validation={_name(settings.data / 'validation')}",
        f"tokenizer.path={_name(settings.data / 'tokenizer.json')}",
    ]


def _trained(run: TrainingRun) -> bool:
    known = Record.load(run.folder / "quickstart.json").steps.get("training", {})
    return known.get("key") == run.key and known.get("finished", False) and run.checkpoint.is_dir()


def _make_room(run: TrainingRun) -> None:
    """Move a run with other settings or data aside, so that this one starts again, and mark the directory as this
    run's."""
    record = Record.load(run.folder / "quickstart.json")
    if run.folder.exists() and record.steps.get("training", {}).get("key") != run.key:
        number = next(n for n in range(1, 10**6) if not run.folder.with_name(f"{run.folder.name}.{n}").exists())
        aside = run.folder.with_name(f"{run.folder.name}.{number}")
        run.folder.rename(aside)
        print(f"the settings or the data have changed: {_name(run.folder)} is now {_name(aside)}")
        record = Record(record.path)
    run.folder.mkdir(parents=True, exist_ok=True)
    record.put("training", run.key, [], finished=False)


def samples(run: TrainingRun) -> None:
    """Print samples of the model. They are kept with the run, so that the next call shows the same texts at once."""
    heading("5/5  What it writes")
    record = Record.load(run.folder / "quickstart.json")
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = ["generate.py", _name(run.folder), *prompts, "--tokens", str(LENGTH), "--temperature", "0.7", "--json"]
    key = digest(run.key, *command)
    if not record.holds("samples", key, []):
        texts = [json.loads(line) for line in call(command, capture=True).splitlines()]
        record.put("samples", key, [], texts=texts)
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    for number, each in enumerate(record.steps["samples"]["texts"], 1):
        print(f"--- sample {number}, given {each['prompt']!r}\n{bold}{each['prompt']}{plain}{each['text'].rstrip()}")


def unigram_entropy(prefix: Path) -> float:
    """Entropy of the distribution of the tokens in a token file, from their exact counts, in nats per token."""
    import numpy as np

    from megatron.data.token_file import TokenFile

    counts = np.bincount(np.fromfile(f"{prefix}.bin", dtype=TokenFile(prefix).dtype)).astype(np.float64)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def verdict(settings: Settings, run: TrainingRun, seconds: float) -> bool:
    """Print the model's loss, and whether it is far below that of token frequencies."""
    from megatron.report.curve import History

    history = History.read(run.folder / "metrics.jsonl")
    step, loss = history.validation["validation"][-1]
    if step != run.steps:
        raise Failed(f"{_name(run.folder)}/metrics.jsonl ends with the validation loss of step {step}, not {run.steps}")
    entropy = {part: unigram_entropy(settings.data / part) for part in ("train", "validation")}
    bar = FAR_BELOW * min(entropy.values())
    heading("Result")
    print(f"validation loss   {loss:.4f} nats per token")
    print(
        f"unigram entropy   {entropy['train']:.4f} nats per token of the training corpus, "
        f"{entropy['validation']:.4f} of the validation texts:"
    )
    print("                  the lowest loss of a model that knows only how often each token occurs")
    good = loss < bar
    relation = "far below that: the model has learned" if good else f"NOT far below that (it should be under {bar:.4f})"
    print(f"the loss is       {loss / min(entropy.values()):.0%} of the entropy, {relation}")
    print(f"loss curve        {_name(run.folder / 'loss.png')}")
    if find_spec("bokeh"):
        print(f"report            {_name(run.folder / 'report.html')}")
    print(f"checkpoints       {_name(run.checkpoints)}")
    print(f"this took         {int(seconds) // 60} min {int(seconds) % 60:02d} s")
    return good


def advice(settings: Settings, run: TrainingRun) -> None:
    """Print the next steps."""
    heading("What next?")
    rows = (
        (". .venv/bin/activate", "so that `python` is the one with everything installed, then:"),
        (f"python generate.py {_name(run.folder)}", "write with the model: you begin, it continues"),
        (f"python tools/config.py layers {settings.config}", "where its parameters and operations are"),
        (
            f"python tools/config.py explain optimizer.lr {settings.config}",
            "what a key means, and where its value comes from",
        ),
        (
            f"python tools/quickstart.py --model {'mamba2' if 'rwkv7' in settings.config else 'rwkv7'}",
            "another model on the same data, or edit a line of the file above",
        ),
        ("less README.md", "your own text, more GPUs, more hosts, export"),
    )
    width = max(len(command) for command, _ in rows)
    for command, meaning in rows:
        print(f"  {command:{width}}   {meaning}")


def main() -> int:
    """Run the whole quick start and return the exit status."""
    settings = _settings()
    begin = time.monotonic()
    os.chdir(ROOT)  # paths of a configuration are seen from here
    from megatron.config import ConfigError, load

    try:
        machine = look()
        load(*sources(settings, machine), ranks=machine.ranks, check_inputs=False)  # before anything is made
        prepare(settings)
        run = train(settings)
        samples(run)
        page, metrics = run.folder / "report.html", run.folder / "metrics.jsonl"
        if find_spec("bokeh") and not (page.exists() and page.stat().st_mtime > metrics.stat().st_mtime):
            call(["tools/report.py", _name(run.folder)])
        good = verdict(settings, run, time.monotonic() - begin)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Failed as error:
        print(f"\nquick start: {error}", file=sys.stderr)
        if error.status > 128:  # a signal
            print("the same command resumes where this one was stopped", file=sys.stderr)
        return error.status
    if good:
        advice(settings, run)
    return 0 if good else 1


def _settings() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = (
        ("--config", str, None, "FILE", "configuration of the model and its training, in place of --model"),
        ("--data", str, "data/quickstart", "FOLDER", "folder of corpus and tokens (default: %(default)s)"),
        ("--vocabulary", int, 4096, "TOKENS", "size of the tokenizer (default: %(default)s)"),
        ("--validation", float, 0.02, "SHARE", "share of the files for validation (default: %(default)s)"),
        ("--documents", int, None, "N", "use only the first N documents"),
    )
    for name, kind, default, what, meaning in options:
        parser.add_argument(name, type=kind, default=default, metavar=what, help=meaning)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes of the configuration")
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="attention and MLPs (pythia, the default), Mamba-2, RWKV-7, RWKV-7 and attention, experts",
    )
    given = parser.parse_intermixed_args()
    if given.model and given.config:
        parser.error("--model and --config both name a model")
    config = given.config or f"configs/{MODELS[given.model or 'pythia']}.yml"
    if not 0 < given.validation < 1:
        parser.error(f"--validation must be a share between 0 and 1, not {given.validation:g}")
    if min(given.vocabulary, 1 if given.documents is None else given.documents) < 1:
        parser.error("--vocabulary and --documents must be at least 1")
    if strange := [word for word in given.overrides if "=" not in word]:
        parser.error(f"{strange[0]!r} must be key.path=value, and --config names a file")
    data = (ROOT / given.data).resolve()
    return Settings(config, data, given.vocabulary, given.validation, given.documents, tuple(given.overrides))


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
