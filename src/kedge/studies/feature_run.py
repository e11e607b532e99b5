"""One run of a study on extracted features: what it is asked for, and the files that it leaves."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import NotReadyError
from kedge.evaluation.summary import TextTable
from kedge.files import write_json, write_text
from kedge.provenance import provenance
from kedge.studies.comparison import MethodTable, Row, run_rows
from kedge.studies.photographs import photographs_in_words, used_photographs
from kedge.studies.study import Setting
from kedge.studies.task import Task


@dataclass(frozen=True)
class Written:
    """The tables of a study, and what was left out for want of data, with how to get it."""

    tables: tuple[TextTable, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureRun:
    """What a study on features is asked for.

    Args:
        setting: Scale, seeds, data and weights.
        out: Folder for the finished cells and the tables.
        features: Folder of networks and extracted features, which studies on the same tasks share.
        patterns: Only rows whose label matches one of these, in which ``*`` is any text.
        only: Names of tasks, parts or networks of the study; by default all.
        precision: Of all trainings, by Fabric's name; by default single.
        command: The command to run it again, for the record.
        progress: Called with what is running, the number of cells done and the number in all.
    """

    setting: Setting
    out: Path
    features: Path
    patterns: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    precision: str | None = None
    command: str = ""
    progress: Callable[[str, int, int], None] | None = None

    @property
    def cells(self) -> Path:
        """The folder of what is done."""
        return self.out / "cells"

    def rows(self, rows: Mapping[str, Row], tasks: Mapping[str, Callable[[int], Task]]) -> MethodTable:
        """Every row on every task and seed; what is done is read."""
        return run_rows(rows, tasks, self.setting.seeds, self.cells, self.progress)

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What a function returns, as plain data; if it is in a file already, that is read."""
        path = self.cells / f"{name}.json"
        if not path.exists():
            write_json(path, measure())
        return json.loads(path.read_text())

    def write(self, results: Mapping[str, Any], tables: Iterable[TextTable], missing: Mapping[str, str]) -> Written:
        """Write the two files; results that are empty are an error that says what is missing."""
        if not results:
            raise NotReadyError(f"the study needs data: {'; '.join(missing.values())}")
        shown = tuple(tables)
        record = {
            "command": self.command, "scale": self.setting.scale, "seeds": list(self.setting.seeds),
            "missing": dict(missing), "made with": provenance(), "photographs": used_photographs(self.setting.data_dir),
        }  # fmt: skip
        write_json(self.out / "metrics.json", {"record": record, **results})
        write_text(self.out / "tables.md", in_files(shown, photographs_in_words(self.setting.data_dir)))
        return Written(shown, missing)


def in_files(tables: Sequence[TextTable], note: str) -> str:
    """The text of tables.md, with a line on the photographs that were there."""
    return "\n\n".join(filter(None, [*(table.markdown() for table in tables), note])) + "\n"
