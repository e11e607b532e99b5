"""A griffe extension: sections of docstrings that are called Example are shown as code, like those called Examples."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Renames the sections."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
