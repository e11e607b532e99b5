"""The code of the docs runs as pasted, and their commands have the options that they are given."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import kedge
import kedge.data
from helpers import labelled
from kedge import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "src/kedge/shipped/cifar10.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
HAVE_CODE = (  # test_readme.py runs the others
    "anchoring", "calibrating", "comparing", "data", "default", "deploy", "methods", "networks", "ntk", "photos",
    "suites/openood", "training", "watching",
)  # fmt: skip


def blocks(page: Path, languages: str) -> list[str]:
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The arguments of each call of kedge in lines of shell."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        tokens = shlex.shlex(line, posix=True, punctuation_chars=";|&")
        tokens.whitespace_split = True
        words = list(tokens)
        for place, word in enumerate(words):
            before = words[place - 1] if place else ";"
            if word == "kedge" and (before in (";", "|", "&&", "do") or "=" in before):
                rest = words[place + 1 :]
                end = next((i for i, each in enumerate(rest) if each in (";", "|", "&&")), len(rest))
                found.append(rest[:end])
    return found


def parse(command, arguments: list[str]) -> None:
    """Parse a command as the command line would, without running it."""
    context = command.make_context("kedge", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
        command = getattr(command, "loaded", command)
    command.make_context(name, list(arguments), parent=context)


def documented() -> list[tuple[str, list[str]]]:
    """Every call of kedge in the docs and in the help of the commands."""
    found = [(page.name, each) for page in PAGES for block in blocks(page, "bash|sh") for each in commands(block)]
    for path in [*(ROOT / "src/kedge/cli").glob("*.py"), *(ROOT / "src/kedge/studies/commands").glob("*.py")]:
        lines = re.findall(r"^ {8}((?:[A-Z_]+=\S+ )?kedge .*)$", path.read_text(), flags=re.MULTILINE)
        found += [(path.name, each) for line in lines for each in commands(line)]
    return found


def test_documented_commands_exist_with_their_options():
    found, root = documented(), typer.main.get_command(cli.app)
    assert len(found) > 80
    for place, arguments in found:
        try:
            parse(root, arguments)
        except Exception as error:
            raise AssertionError(f"{place}: kedge {shlex.join(arguments)}: {error}") from error


class Mine(nn.Module):
    """A network with the layers that the pages name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer4 = nn.Sequential(nn.Sequential())
        self.layer4[0].conv1 = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer4[0].conv1(x).relu().mean(dim=(2, 3)))


def photographs(folder: Path, classes: tuple[str, ...], n: int = 24) -> None:
    random = np.random.default_rng(len(str(folder)))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(n):
            side = 8 + number % 3 if name == "dots" else 8
            pixels = random.integers(0, 256, (side, side, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with photographs, small networks under the names of large ones, one epoch for every recipe, a hub."""
    timm = pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    for folder in ("flowers/train", "flowers/val", "photos", "pets"):
        photographs(tmp_path / folder, ("ant", "bee", "cow", "dog"))
    photographs(tmp_path / "other/textures", ("dots",))
    Image.new("RGB", (40, 40), "teal").save("photo.jpg")
    create, train, load = timm.create_model, kedge.train, kedge.data.load_dataset
    small = {"resnet50": "test_resnet", "vit_tiny_patch16_224": "test_vit", "efficientnet_lite0": "test_efficientnet"}

    def build(name, pretrained=False, **options):
        return create(small[name], **options)

    def once(net, data, recipe="fast", **options):
        options.pop("workers", None)
        return train(net, data, kedge.training.recipe(recipe, epochs=1, batch=16, lr=1e-3), **options)

    def lite0():
        return kedge.Classifier(create("test_resnet", num_classes=10), mean=0.5, std=0.5)

    def public(name, *arguments, **options):
        known = {"places365": "folder:other/textures"}  # of several sizes, so that it stays on disk
        if ":" in known.get(name, name):
            return load(known.get(name, name), *arguments, **options)
        return labelled(40, side=32)

    monkeypatch.setattr(timm, "create_model", build)
    monkeypatch.setattr(kedge, "train", once)
    monkeypatch.setattr(kedge.data, "load_dataset", public)
    monkeypatch.setitem(sys.modules, "pretrained", SimpleNamespace(lite0=lite0))
    save_file(create("test_resnet", num_classes=200).state_dict(), "birds.safetensors")
    hub = {}
    monkeypatch.setattr(kedge, "push_to_hub", lambda detector, name: hub.update({name: detector}))
    monkeypatch.setattr(kedge, "from_pretrained", hub.__getitem__)
    return tmp_path


def names() -> dict:
    """What the pages call the things that a reader has."""
    net = kedge.Classifier(kedge.models.build("compact", width=4, classes=4), mean=0.4, std=0.25).eval()
    train_set = labelled(60)
    held_out, more = (labelled(60, seed=seed) for seed in (1, 2))
    detector, mine = kedge.MSP(net).fit(train_set).calibrate(held_out), kedge.Classifier(Mine())
    return {
        "kedge": kedge, "torch": torch, "net": net, "my_network": mine, "detector": detector, "train_set": train_set,
        "train": train_set, "held_out": held_out, "more_held_out": more, "images": labelled(20, seed=3).images,
        "held_out_features": kedge.extract(mine, held_out), "other_species": labelled(20, seed=4, name="species"),
        "textures": labelled(20, seed=5, name="textures"), "other_images": labelled(20, seed=6, name="others"),
        "stream": labelled(300, seed=7).images.split(100), "load_dataset": kedge.data.load_dataset,
        "loader": DataLoader(train_set, batch_size=20),
    }  # fmt: skip


@pytest.mark.parametrize("page", HAVE_CODE)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("place")
def test_every_python_block_of_a_page_runs(page):
    known = {}
    for number, code in enumerate(blocks(ROOT / "docs" / f"{page}.md", "python")):
        known |= names()  # a block may have given one of them to something else
        exec(compile(code, f"{page}.md, block {number}", "exec"), known)


def test_no_page_with_code_is_left_out():
    with_code = {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in PAGES[4:] if blocks(p, "python")}
    assert with_code - {"suites/README"} == set(HAVE_CODE)
