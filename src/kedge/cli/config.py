"""Options out of a file: what stands in it need not be typed."""

import tomllib
from pathlib import Path
from typing import Any

from kedge.errors import InputError


def read_config(path: Path, commands: Any) -> dict[str, Any]:
    """The options of a TOML file by command, checked against the options that the commands have.

    Args:
        path: A file with a table for each command, such as ``[train]``, and in it options by their long names, with
            hyphens or underscores.
        commands: The command line: a group, with its commands by name.
    """
    try:
        with path.open("rb") as file:
            written = tomllib.load(file)
    except OSError as error:
        raise InputError(f"config must be a file that can be read; {path} cannot: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"config must be TOML; {path} is not: {error}") from error
    return _checked(path, written, commands)


def _checked(path: Path, written: dict[str, Any], commands: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in written.items():
        command = commands.commands.get(name)
        if command is None or not isinstance(options, dict):
            raise InputError(
                f"config must have a table for each command, of {', '.join(commands.commands)}; {path} has {name!r}"
            )
        if hasattr(command, "commands"):  # a group itself
            found[name] = _checked(path, options, command)
            continue
        # By the name of the option as it is typed; the argument behind it may have another.
        known = {
            flag.removeprefix("--").replace("-", "_"): parameter
            for parameter in command.params
            for flag in parameter.opts
            if flag.startswith("--")
        }
        plain = {key.replace("-", "_"): value for key, value in options.items()}
        unknown = [key for key in plain if key not in known]
        if unknown:
            raise InputError(f"{path}: {name} has the options {', '.join(sorted(known))}; got {', '.join(unknown)}")
        for key, value in plain.items():
            if getattr(known[key], "multiple", False) and not isinstance(value, list):
                raise InputError(f"{path}: {key} of {name} must be a list; got {value!r}: write {key} = [{value!r}]")
        found[name] = {known[key].name: value for key, value in plain.items()}
    return found
