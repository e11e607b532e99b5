"""What a study on features leaves behind: metrics.json and tables.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import NotReadyError
from kedge.evaluation.summary import TextTable
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.study import Setting


@dataclass(frozen=True)
class Written:
    """The tables of a study, and what was left out for want of data, with how to get it."""

    tables: tuple[TextTable, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


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
        "made with": provenance(),
    }  # fmt: skip
    files = {
        "metrics.json": json.dumps({"record": record, **results}, indent=1),
        "tables.md": "\n\n".join(table.markdown() for table in tables) + "\n",
    }
    for name, text in files.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Written(tuple(tables), missing)
