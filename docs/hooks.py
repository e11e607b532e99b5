"""What mkdocs does besides the pages in docs: see mkdocs.yml.

Pages are made of the files beside docs (README.md is the first one), of the examples, and of the public names in
kedge's stub; links to source files become names, since the site holds no source.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BESIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "src/kedge/shipped/cifar10.md": "cifar10.md",
}
TITLES = {
    "anchoring": "Anchoring",
    "data": "Data",
    "detectors": "Detectors",
    "evaluation": "Evaluation",
    "metrics": "Metrics",
    "models": "Networks",
    "scores": "Scores",
    "training": "Training",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def references() -> dict[str, list[str]]:
    """The public names by the part of kedge that defines them, from the stub; a module stands for its ``__all__``."""
    parts: dict[str, list[str]] = {title: [] for title in TITLES.values()} | {"More": []}
    for node in ast.parse((ROOT / "src/kedge/__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                part = (node.module or alias.name).split(".")[0]
                target = ".".join(filter(None, ["kedge", node.module, alias.name]))
                parts[TITLES.get(part, "More")].append(target)
    return {title: names for title, names in parts.items() if names}


def on_config(config: Any) -> Any:
    """Fill in the pages of the reference, and leave out pages that do not exist."""
    made = {*BESIDE.values(), "examples.md"}

    def kept(entry: Any) -> Any:
        if isinstance(entry, str):
            return entry if entry in made or (ROOT / "docs" / entry).exists() else None
        ((title, value),) = entry.items()
        if value == ["reference"]:
            pages = [{name: f"reference/{name.lower()}.md"} for name in references()]
            return {title: pages}
        value = [each for each in map(kept, value) if each] if isinstance(value, list) else kept(value)
        return {title: value} if value else None

    config.nav = [each for each in map(kept, config.nav) if each]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files."""
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=_moved((ROOT / source).read_text(), source, name)))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for title, names in references().items():
        page = f"# {title}\n\n" + "".join(f"::: {name}\n{_members(name)}\n" for name in names)
        files.append(File.generated(config, f"reference/{title.lower()}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links out of docs into links to the pages made of these files, or into names."""
    source = page.file.src_uri
    return markdown if source in BESIDE.values() else _moved(markdown, f"docs/{source}", source)


def _moved(markdown: str, source: str, name: str) -> str:
    """The text of a file of the repository as the page ``name``: links lead to pages, or become names."""

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in BESIDE:
            page = BESIDE[path]
        elif path.startswith("examples/"):
            page, anchor = "examples.md", f"#{Path(path).stem.replace('_', '-')}"
        elif path.startswith("docs/") and (ROOT / path).is_file():
            page = path.removeprefix("docs/")
        else:
            return text if text.startswith("`") else f"`{path}`" if text == Path(path).name else f"{text} (`{path}`)"
        relative = posixpath.relpath(page, posixpath.dirname(name) or ".")
        return f"{image}[{text}]({relative}{anchor or ''})"

    return LINK.sub(link, markdown)


def _members(name: str) -> str:
    """The options of an entry: of a single method only what the user calls, since `Detector` documents the verbs."""
    module, _, last = name.rpartition(".")
    if module != "kedge.detectors" or last in ("Detector", "Detection") or not last[0].isupper():
        return ""
    return "    options:\n      members: [prepare, loss]\n"


def _examples() -> str:
    """The files in examples: what each does, and its code."""
    parts = ["# Examples", "Each is a file in `examples` that a test runs."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        words = ast.get_docstring(ast.parse(source)) or ""
        code = source.split('"""', 2)[2].strip()
        title = path.stem.replace("_", "-")
        parts += [f"## {path.stem.replace('_', ' ').capitalize()} {{: #{title} }}", words, f"```python\n{code}\n```"]
    return "\n\n".join(parts)
