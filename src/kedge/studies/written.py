"""What a study on features leaves behind: metrics.json and tables.md."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import NotReadyError
from kedge.evaluation.summary import TextTable
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.photographs import photographs_in_words, used_photographs
from kedge.studies.study import Setting


@dataclass(frozen=True)
class Written:
    """The tables of a study, and what was left out for want of data, with how to get it."""

    tables: tuple[TextTable, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


def in_files(tables: Iterable[TextTable], setting: Setting) -> str:
    """The text of tables.md, with a line on the photographs that were there."""
    parts = [*(table.markdown() for table in tables), photographs_in_words(setting.data_dir)]
    return "\n\n".join(filter(None, parts)) + "\n"


def write_results(
    out: Path,
    results: Mapping[str, Any],
    tables: Sequence[TextTable],
    setting: Setting,
    command: str,
    missing: Mapping[str, str],
) -> Written:
    """Write the two files; results that are empty are an error that says what is missing."""
    if not results:
        raise NotReadyError(f"the study needs data: {'; '.join(missing.values())}")
    record = {
        "command": command, "scale": setting.scale, "seeds": list(setting.seeds), "missing": dict(missing),
        "made with": provenance(), "photographs": used_photographs(setting.data_dir),
    }  # fmt: skip
    files = {
        "metrics.json": json.dumps({"record": record, **results}, indent=1),
        "tables.md": in_files(tables, setting),
    }
    for name, text in files.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Written(tuple(tables), missing)
