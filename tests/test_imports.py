"""The design's one direction: a module imports from its own package or from strictly lower layers."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import kedge

# From the bottom up. Modules of one layer are siblings and do not import each other. A new module must be placed here.
LAYERS = [
    {"errors"},
    {"checks", "files", "pixels", "provenance", "seeds"},
    {"scores", "metrics", "calibration", "threads"},
    {"data", "models"},
    {"anchoring"},
    {"io"},
    {"training"},
    {"detectors"},
    {"evaluation", "hub"},
    {"experimental", "adapters"},
    {"drift"},
    {"export", "scoring", "serving"},
    {"cli"},
    {"studies"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FRONT_DOOR = "__init__"  # kedge/__init__.py imports everything, so only the top may import from it
MAY_PRINT = {"evaluation", "serving", "studies", "cli"}

PACKAGE = Path(kedge.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def dotted(path):
    """Name a file as Python would: kedge/data/__init__.py is kedge.data."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module):
    """Give the name below kedge that a module belongs to."""
    return [*module.split("."), FRONT_DOOR][1]


def imported(source, module, is_package=False):
    """List the modules of kedge that a source imports, wherever in it the statement stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            known = (alias.name in RANK for alias in node.names)
            found += [
                f"{base}.{alias.name}" if base == "kedge" and submodule else base
                for alias, submodule in zip(node.names, known, strict=True)
            ]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return [name for name in found if name.split(".")[0] == "kedge"]


def violations(source, module, is_package=False):
    """List the imports that a module may not make."""
    own = part(module)
    rank = RANK[own]
    wrong = []
    for name in imported(source, module, is_package):
        other = part(name)
        allowed = (
            own in ("cli", "studies") if other == FRONT_DOOR else other == own or RANK.get(other, len(LAYERS)) < rank
        )
        if not allowed:
            wrong.append(name)
    return wrong


def prints(source):
    """List the lines on which a source calls print."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


# --- the package ----------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_in_the_layers():
    unplaced = {part(dotted(path)) for path in FILES} - set(RANK)
    assert not unplaced, f"place {sorted(unplaced)} in LAYERS"


def test_imports_go_one_way():
    wrong = {dotted(path): violations(path.read_text(), dotted(path), path.name == "__init__.py") for path in FILES}
    assert {module: imports for module, imports in wrong.items() if imports} == {}


def test_only_reports_pages_studies_and_commands_print():
    lower = [path for path in FILES if part(dotted(path)) not in MAY_PRINT]
    assert {dotted(path): lines for path in lower if (lines := prints(path.read_text()))} == {}


def test_no_device_is_chosen_for_the_user():
    assert [dotted(path) for path in FILES if ".cuda(" in path.read_text()] == []


def test_a_public_name_is_defined_once():
    homes = defaultdict(list)
    for path in FILES:
        if not {"cli", "commands"} & set(path.parts):  # a command has the name of the function that it calls
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    homes[node.name].append(dotted(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_detector_does_not_import_the_readers_of_data_sets():
    code = "import sys, kedge.detectors.logits; print([m for m in sys.modules if m.startswith('kedge.data.sources')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# --- the rule itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kedge.scores", "from kedge.models import build"),
        ("kedge.scores", "import kedge.models.classifier as c"),
        ("kedge.scores", "def f():\n    from kedge import models"),
        ("kedge.scores", "from kedge.metrics import auroc"),
        ("kedge.scores", "import importlib\nimportlib.import_module('kedge.models')"),
        ("kedge.scores", "from kedge import anchor"),
        ("kedge.scores", "import kedge"),
        ("kedge.scores", "from . import metrics"),
        ("kedge.scores", "from kedge.elsewhere import thing"),
        ("kedge.data.batches", "from kedge.models import build"),
        ("kedge.data.batches", "from ..models import build"),
        ("kedge.models.classifier", "from kedge.data import ImageSet"),
        ("kedge.anchoring.widen", "from kedge.detectors.amp import AMP"),
        ("kedge.training.train", "from kedge.detectors import AMP"),
        ("kedge.detectors.amp", "class A:\n    def f(self):\n        import kedge.evaluation"),
        ("kedge.evaluation", "from kedge.drift import page"),
        ("kedge.evaluation.report", "from kedge.cli import app"),
    ],
)
def test_the_rule_finds_imports_that_go_the_other_way(module, source):
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kedge.scores", "import math, torch\nfrom kedge.checks import one_of"),
        ("kedge.checks", "from kedge.errors import InputError"),
        ("kedge.data.batches", "from kedge.data.imageset import ImageSet"),
        ("kedge.data.batches", "from .imageset import ImageSet"),
        ("kedge.anchoring.widen", "from kedge.models.classifier import Classifier"),
        ("kedge.detectors.amp", "from kedge import models, scores"),
        ("kedge.studies.demo", "from kedge.training import train"),
        ("kedge.studies.commands.demo", "from kedge import __version__"),
    ],
)
def test_the_rule_lets_imports_of_lower_layers_pass(module, source):
    assert violations(source, module) == []


def test_a_package_resolves_relative_imports_from_itself():
    assert imported("from .batches import batches", "kedge.data", is_package=True) == ["kedge.data.batches"]
    assert imported("from ..checks import one_of", "kedge.data.batches") == ["kedge.checks"]


def test_a_print_in_a_docstring_is_no_print():
    assert prints('def f():\n    """\n    >>> print(1)\n    """') == []
    assert prints("def f():\n    print(1)") == [2]
