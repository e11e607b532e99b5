"""What mkdocs does besides the pages in docs: see mkdocs.yml.

Pages are made of the files beside docs (README.md is the first one), of the examples with what they print and draw
(docs/gallery), and of the public names in kedge's stub. Links to source files become names, since the site holds no
source, and links that show the name of a page get its title.
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
EXAMPLES = {
    "folder_of_photographs": "A folder of photographs",
    "timm_network": "timm",
    "transformers_trainer": "transformers",
    "lightning_module": "Lightning",
    "own_loop": "Your own training loop",
    "plots": "A notebook with plots",
    "gray_images": "Gray images of 16 bits",
    "signals": "Signals (1-d)",
    "service_client": "A client of the service",
    "onnx_only": "ONNX alone",
    "pretrained": "What the examples share",
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
    return {title: sorted(names, key=str.lower) for title, names in parts.items() if names}


def on_config(config: Any) -> Any:
    """Fill in the pages of the reference, and leave out pages that do not exist."""
    made = set(BESIDE.values())

    def kept(entry: Any) -> Any:
        if isinstance(entry, str):
            return entry if entry in made or (ROOT / "docs" / entry).exists() else None
        ((title, value),) = entry.items()
        if value == ["reference"]:
            return {title: [{name: f"reference/{name.lower()}.md"} for name in references()]}
        if value == ["gallery"]:
            return {title: ["gallery/index.md", *({words: f"gallery/{name}.md"} for name, words in EXAMPLES.items())]}
        value = [each for each in map(kept, value) if each] if isinstance(value, list) else kept(value)
        return {title: value} if value else None

    config.nav = [each for each in map(kept, config.nav) if each]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files."""
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=_moved((ROOT / source).read_text(), source, name)))
    for name, content in gallery().items():
        files.append(File.generated(config, f"gallery/{name}.md", content=content))
    for title, names in references().items():
        page = f"# {title}\n\n" + "".join(f"::: {name}\n{_members(name)}\n" for name in names)
        files.append(File.generated(config, f"reference/{title.lower()}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links out of docs into links to the pages made of these files, or into names."""
    source = page.file.src_uri
    made = source in BESIDE.values() or source.startswith("gallery/")
    return markdown if made else _moved(markdown, f"docs/{source}", source)


def title_of(path: str) -> str:
    """The title of a page."""
    return re.sub(r"[`*]", "", re.search(r"^# (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE)[1])


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
            page, text = f"gallery/{Path(path).stem}.md", f"{EXAMPLES[Path(path).stem]} (`{path}`)"
        elif path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".py"):
            page = path.removeprefix("docs/")
            if path.endswith(".md") and text.strip("`") in (path, page, Path(path).name):
                text = title_of(path)
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


def gallery() -> dict[str, str]:
    """The pages of the examples: what each does, its code, what it prints, and what it draws."""
    left = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - set(EXAMPLES))
    if left:
        raise ValueError(f"EXAMPLES in docs/hooks.py must have a title for {', '.join(left)}")
    index = [
        "# Examples",
        "Each runs as it stands, and is run by a test that compares what it prints with these pages.",
    ]
    pages, cards = {}, []
    for name, title in EXAMPLES.items():
        source = (ROOT / "examples" / f"{name}.py").read_text()
        words = _moved(ast.get_docstring(ast.parse(source)) or "", "examples/", f"gallery/{name}.md")
        code = source.split('"""', 2)[2].strip()
        parts = [f"# {title}", words, f'```python title="examples/{name}.py"\n{code}\n```']
        output, drawn = ROOT / f"docs/gallery/{name}.txt", sorted((ROOT / "docs/gallery").glob(f"{name}-*.png"))
        if output.exists():
            parts += ["## Output", f"```text\n{output.read_text()}```"]
        parts += [f"![{path.stem.removeprefix(name)[1:]}]({path.name})" for path in drawn]
        pages[name] = "\n\n".join(parts)
        picture = f"    ![]({drawn[-1].name}){{ loading=lazy }}\n\n" if drawn else ""
        cards.append(f"-   **[{title}]({name}.md)**\n\n{picture}    {words.split(chr(10))[0]}")
    index += ['<div class="grid cards" markdown>', "\n\n".join(cards), "</div>"]
    return {"index": "\n\n".join(index), **pages}
