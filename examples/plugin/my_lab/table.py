"""A metrics sink that keeps chosen numbers as a table, for programs that read CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError
from megatron.report.jsonl import flatten


class Table:
    """Writes a row for each record that has all the columns: the step, then these numbers.

    A run that goes back to an earlier step does its steps again. Their first rows are removed then, so that the table
    has each step once.

    Args:
        folder: the run's directory, given to every sink.
        columns: numbers of a record of metrics.jsonl, numbers of inner mappings as `validation/validation/loss`.
        file: the table's name in the run's directory.
    """

    def __init__(self, folder: Path, columns: Sequence[str], file: str = "table.csv") -> None:
        if isinstance(columns, str) or not columns or not all(isinstance(each, str) for each in columns):
            raise UserError("logging.sinks: options.columns of Table must be a list of names, such as [loss, lr]")
        if os.path.basename(file) != file or not file.endswith(".csv"):
            raise UserError(f"logging.sinks: options.file of Table must be the name of a .csv file, not {file!r}")
        self.path, self.columns = folder / file, ["step", *columns]
        rows = self._rows()
        if rows and rows[0] != self.columns:
            raise UserError(f"logging.sinks: {self.path} has other columns: give Table another options.file")
        self.last = int(rows[-1][0]) if len(rows) > 1 else -1

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = flatten(record)
        if not all(name in numbers for name in self.columns):
            return
        step = int(numbers["step"])
        if self.last < 0 or step <= self.last:
            self._replace([self.columns, *(row for row in self._rows()[1:] if int(row[0]) < step)])
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([step, *(numbers[name] for name in self.columns[1:])])
        self.last = step

    def close(self) -> None:
        """Every row is in the file already."""

    def _rows(self) -> list[list[str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def _replace(self, rows: list[list[str]]) -> None:
        """Write the whole table: it is the old or the new one at every moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        new.replace(self.path)
