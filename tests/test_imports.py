"""The layers of the package: a module imports from its own part of kedge or from strictly lower ones."""

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
    {"checks", "display", "files", "pixels", "progress", "provenance", "seeds"},
    {"scores", "metrics", "calibration", "threads"},
    {"data", "models"},
    {"anchoring"},
    {"io"},
    {"training"},
    {"detectors"},
    {"evaluation", "hub", "protect"},
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


def dotted(path):
    """A file's name as Python imports it: kedge/data/__init__.py is kedge.data."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {dotted(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE}
SOURCES |= {dotted(path): path.read_text() for path in PACKAGE.glob("*.py") if path.stem != FRONT_DOOR}
PACKAGES = {dotted(path) for path in PACKAGE.rglob("__init__.py")}


def part(module):
    """The name below kedge that a module belongs to."""
    return [*module.split("."), FRONT_DOOR][1]


def imported(source, module):
    """The modules of kedge that a source imports, at its top or inside functions."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if module in PACKAGES else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            inside = [alias.name for alias in node.names if base == "kedge" and alias.name in RANK]
            names += [f"{base}.{name}" for name in inside] + [base] * (len(node.names) - len(inside))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return [name for name in names if name.split(".")[0] == "kedge"]


def violations(source, module):
    """The imports that a module may not make."""

    def is_allowed(other):
        if other == FRONT_DOOR:
            return part(module) in ("cli", "studies")
        return other == part(module) or RANK.get(other, len(LAYERS)) < RANK[part(module)]

    return [name for name in imported(source, module) if not is_allowed(part(name))]


def prints(source):
    """The lines on which a source calls print."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


# --- the package ----------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_in_the_layers():
    unplaced = set(map(part, SOURCES)) - set(RANK)
    assert not unplaced, f"place {sorted(unplaced)} in LAYERS"


def test_imports_go_one_way():
    wrong = {module: violations(source, module) for module, source in SOURCES.items()}
    assert {module: imports for module, imports in wrong.items() if imports} == {}


def test_only_reports_pages_studies_and_commands_print():
    lower = {module: prints(source) for module, source in SOURCES.items() if part(module) not in MAY_PRINT}
    assert {module: lines for module, lines in lower.items() if lines} == {}


def test_no_device_is_chosen_for_the_user():
    assert [module for module, source in SOURCES.items() if ".cuda(" in source] == []


def test_a_public_name_is_defined_once():
    homes = defaultdict(set)
    for module, source in SOURCES.items():
        if not {"cli", "commands"} & set(module.split(".")):  # a command has the name of the function that it calls
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    homes[node.name].add(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_detector_does_not_import_the_readers_of_data_sets():
    code = "import sys, kedge.detectors.logits; print([m for m in sys.modules if m.startswith('kedge.data.sources')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


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
        ("kedge.data.batches", "from ..models import build"),
        ("kedge.detectors.amp", "class A:\n    def f(self):\n        import kedge.evaluation"),
    ],
)
def test_the_rule_finds_imports_that_go_the_other_way(module, source):
    assert violations(source, module)


def test_the_rule_allows_imports_of_lower_layers_and_of_the_own_part():
    allowed = {
        "kedge.scores": "import math, torch\nfrom kedge.checks import one_of",
        "kedge.data.batches": "from kedge.data.imageset import ImageSet\nfrom .imageset import ImageSet",
        "kedge.detectors.amp": "from kedge import models, scores",
        "kedge.studies.commands.demo": "from kedge import __version__",
    }
    assert all(violations(source, module) == [] for module, source in allowed.items())
    assert imported("from .batches import batches", "kedge.data") == ["kedge.data.batches"]
    assert imported("from ..checks import one_of", "kedge.data.batches") == ["kedge.checks"]


def test_a_print_in_a_docstring_is_no_print():
    assert prints('def f():\n    """\n    >>> print(1)\n    """') == []
    assert prints("def f():\n    print(1)") == [2]
