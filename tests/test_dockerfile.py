"""The Dockerfile builds out of files that are there, and starts commands that are there."""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import typer

from kedge.cli import app

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text()).splitlines()


def after(instruction):
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(f"{instruction} ")]


def ignored(path):
    """Whether the last rule of .dockerignore that matches a path leaves it out."""
    out = False
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").removeprefix("**/")
            if fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(Path(path).name, pattern):
                out = not rule.startswith("!")
    return out


def copied():
    return [name for line in after("COPY") for name in line.split()[:-1]]


def test_it_copies_all_that_the_build_reads_and_the_rest_is_ignored():
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied())
    for name in copied():
        assert (ROOT / name).exists()
        assert not ignored(name)
    assert all(ignored(name) for name in ("tests", "runs", ".venv", ".git", "docs", "__pycache__"))


def test_it_installs_extras_that_are_there_within_the_constraints():
    (install,) = (line for line in after("RUN") if "pip install" in line)
    extras = re.search(r'"\.\[(.*?)\]"', install)[1].split(",")
    known = PROJECT["optional-dependencies"]
    assert "serve" in extras
    assert set(extras) <= set(known)
    assert "-c constraints.txt" in install
    pinned = dict(re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    needed = [re.split(r"[\[>=<]", name)[0] for extra in extras for name in known[extra]]
    needed, pinned = ({name.lower().replace("-", "_") for name in names} for names in (needed, pinned))
    assert (needed | {"torch"}) - {"kedge"} <= pinned


def test_it_serves_as_an_ordinary_user_on_the_port_that_it_exposes():
    serve = typer.main.get_command(app).commands["serve"].loaded
    words = json.loads(after("ENTRYPOINT")[0]) + json.loads(after("CMD")[0])
    assert words[:2] == ["kedge", "serve"]
    parsed = serve.make_context("serve", words[2:])
    assert parsed.params["host"] == "0.0.0.0"
    assert [str(parsed.params["port"])] == after("EXPOSE")
    assert after("USER") not in ([], ["root"], ["0"])
    assert f"127.0.0.1:{parsed.params['port']}/healthz" in after("HEALTHCHECK")[0]


def test_the_base_image_has_a_python_that_the_package_takes():
    (base,) = after("FROM")
    version = re.search(r":(\d+\.\d+)", base)[1]
    needed = PROJECT["requires-python"].removeprefix(">=")
    assert [int(part) for part in version.split(".")] >= [int(part) for part in needed.split(".")]
