"""Options from a TOML file."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import InputError

ALIASES = {  # arguments of functions, and the options or arguments of commands with other names
    "id_test": "test", "ood_sets": "ood", "held_out": "images", "rows": "files", "detector": "file", "folder": "photos",
}  # fmt: skip


def flags(command: Any) -> dict[str, str]:
    """The options and arguments of a command as they are typed (``--data-dir``), by their names in Python."""
    long = {name: parameter.name for name, parameter in _parameters(command).items()}  # they may differ: kind, --format
    typed = {name: f"--{name.replace('_', '-')}" for name in long}
    arguments = [each for each in getattr(command, "params", ()) if not _long(each)]
    shown = {each.name: (each.metavar or each.name.upper()).split()[-1] for each in arguments}
    aliases = {argument: (shown | typed)[name] for argument, name in ALIASES.items() if name in shown | typed}
    return shown | aliases | {long[name]: flag for name, flag in typed.items()} | typed


def as_typed(message: str, options: Mapping[str, str]) -> str:
    """An error of the library in the words of the command line: options instead of Python arguments.

    Example:
        >>> as_typed("alpha must lie in (0, 1); got 2: pass resume=False", {"alpha": "--alpha", "resume": "--resume"})
        '--alpha must lie in (0, 1); got 2: use --no-resume'
        >>> as_typed("pass another directory, or resume=False", {"overwrite": "--overwrite"})
        'pass another directory, or use --overwrite'
    """

    def switch(match: re.Match[str]) -> str:
        if match[0].endswith("resume=False") and "overwrite" in options:
            return "use --overwrite"
        flag = options.get(match[2])
        return match[0] if flag is None else f"use {flag if match[3] == 'True' else flag.replace('--', '--no-', 1)}"

    name, *rest = re.split(r"(?= must )", message, maxsplit=1)
    message = options.get(name, name) + "".join(rest) if rest else message
    return re.sub(r"(pass )?\b(\w+)=(True|False)\b", switch, message)


def _long(parameter: Any) -> list[str]:
    return [flag for flag in parameter.opts if flag.startswith("--")]


def _parameters(command: Any) -> dict[str, Any]:
    """The parameters of a command by their long options, with underscores."""
    return {
        flag.removeprefix("--").replace("-", "_"): parameter
        for parameter in getattr(command, "params", ())
        for flag in _long(parameter)
    }


def read_config(path: Path, commands: Any) -> dict[str, Any]:
    """The options of a TOML file by command, checked against the options that the commands have.

    It has one table per command, such as ``[train]``, with options by their long names, hyphens or underscores.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise InputError(f"--config must be a readable file; {path} is not: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config must be TOML; {path} is not: {error}") from error
    return _checked(path, tables, commands)


def _checked(path: Path, tables: dict[str, Any], commands: Any) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, options in tables.items():
        command = commands.commands.get(name)
        if command is None or not isinstance(options, dict):
            names = ", ".join(commands.commands)
            raise InputError(f"--config must have tables named after commands, of {names}; {path} has {name!r}")
        command = getattr(command, "loaded", command)
        if hasattr(command, "commands"):  # a group itself
            checked[name] = _checked(path, options, command)
            continue
        parameters = _parameters(command)
        values = {key.replace("-", "_"): value for key, value in options.items()}
        if unknown := [key for key in values if key not in parameters]:
            raise InputError(
                f"{path}: {name} has the options {', '.join(sorted(parameters))}; got {', '.join(unknown)}"
            )
        for key, value in values.items():
            if getattr(parameters[key], "multiple", False) and not isinstance(value, list):
                raise InputError(f"{path}: {key} of {name} must be a list; got {value!r}: write {key} = [{value!r}]")
        checked[name] = {parameters[key].name: value for key, value in values.items()}
    return checked
