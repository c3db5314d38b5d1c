"""Results of an evaluation: as numbers for logs, as a table, and as the harness's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.file_access import read_json, replace_file
from megatron.config.problems import aligned

Results = Mapping[str, Any]  # of `lm_eval.simple_evaluate`
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")


def numbers(results: Results) -> dict[str, dict[str, float]]:
    """task -> metric -> value, with standard errors (`acc_stderr`) and groups.

    The harness writes `acc,none`, where `none` is the filter. Metrics of other filters keep their names.
    """
    found: dict[str, dict[str, float]] = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        found[task] = {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            if name.partition(",")[0] not in NOT_METRICS and isinstance(value, (int, float))
        }
    return found


def table(results: Results) -> str:
    """One line per task and metric: value, standard error, documents, examples in the prompt, the task's version."""
    rows = [("task", "metric", "value", "stderr", "documents", "few-shot", "version")]
    for task, values in numbers(results).items():
        for metric, value in values.items():
            if "_stderr" in metric:
                continue
            name, _, filtered = metric.partition(",")
            error = values.get(f"{name}_stderr,{filtered}" if filtered else f"{name}_stderr")
            count = results.get("n-samples", {}).get(task, {}).get("effective", "")
            shots, version = results.get("n-shot", {}).get(task, ""), results.get("versions", {}).get(task, "")
            rows.append((
                task,
                metric,
                f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}",
                "" if error is None else f"{error:.4f}",
                str(count),
                str(shots),
                str(version),
            ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head, *lines = aligned(rows, left=2)
    return "\n".join([head, "  ".join("-" * width for width in widths), *lines])


def text(results: Results) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"


def write(path: Path, results: Results) -> None:
    """The whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text(results))


def read(path: Path) -> dict[str, Any] | None:
    """The results in a file. None if it is missing or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("results"), dict) else None
