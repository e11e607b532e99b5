"""docs/photos.md: its commands and its Python run on drawn photographs, and print what it shows but for numbers."""

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image, ImageDraw

import kedge
from helpers import run_cli
from kedge.serving import Settings, create_app

PAGE = (Path(__file__).parents[1] / "docs" / "photos.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
NETWORK = """
import timm, torch, kedge

def lite0():
    torch.manual_seed(0)
    return kedge.Classifier(timm.create_model("test_efficientnet"), mean=0.5, std=0.25,
                            preprocess=kedge.Preprocess((3, 160, 160), crop=0.875))
"""


def draw(place: Path, count: int, color: str, shape: str, seed: int) -> None:
    """Photographs of a shape of one color, on other backgrounds, in other places and sizes."""
    generator = np.random.default_rng(seed)
    place.mkdir(parents=True)
    for number in range(count):
        noise = generator.integers(0, 90, (3, 4, 3), np.uint8)
        photo = Image.fromarray(noise).resize((96, 72), Image.Resampling.BICUBIC)
        left, top, side = generator.integers((10, 5, 30), (40, 30, 45))
        getattr(ImageDraw.Draw(photo), shape)((left, top, left + side, top + side), fill=color)
        photo.save(place / f"banded_{number:04}.jpg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the page names, and its network as a small one."""
    pytest.importorskip("timm")
    folder = tmp_path_factory.mktemp("photos")
    for part, count in (("train", 50), ("val", 20), ("test", 20)):
        for number, color in enumerate(("red", "gold", "violet")):
            draw(folder / "flowers" / part / color, count, color, "ellipse", seed=10 * count + number)
    draw(folder / "other" / "textures", 40, "white", "rectangle", seed=3)
    (folder / "pretrained.py").write_text(NETWORK)
    return folder


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.delitem(sys.modules, "pretrained", raising=False)
    return folder


def small(text: str) -> str:
    """The page's text for small photographs."""
    return text.replace("160", "48")


def without_numbers(text: str) -> list[str]:
    """The lines of a text, with one sign for each number and for space."""
    lines = (" ".join(re.sub(r"-?\d+([.,]\d+)*(e-?\d+)?", "#", line).split()) for line in text.splitlines())
    return [line for line in lines if line and not set(line) <= {"─", " "}]


def test_the_page_takes_at_most_ten_commands() -> None:
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    assert len(lines) <= 11
    assert max(len(line) for line in lines) <= 120


@pytest.mark.filterwarnings("ignore")
def test_every_command_prints_what_the_page_shows(there: Path) -> None:
    seen = set()
    for (kind, text), (_, shown) in itertools.pairwise(BLOCKS):
        for line in text.splitlines() if kind == "bash" else ():
            program, *arguments = shlex.split(small(line), comments=True)
            if program == "curl":
                (file,) = re.findall(r"images=@(\S+)", line)
                with TestClient(create_app(kedge.load("runs/flowers/detector.kedge"), Settings())) as http:
                    answer = http.post("/v1/score", files={"images": Path(file).read_bytes()}).json()
                assert answer["results"][0].keys() == json.loads(shown)["results"][0].keys()
            elif program == "kedge" and arguments[0] != "serve":
                done = run_cli(*arguments, *(("--workers", 0) if arguments[0] == "train" else ()), columns=110)
                assert done.exit_code == 0, (line, done.exception, done.output)
                lines = without_numbers(done.output)
                expected = without_numbers(small(shown))
                first = {each.split()[0] for each in lines}
                if arguments[0] in ("train", "score", "calibrate", "export"):
                    assert set(expected) <= set(lines), line
                else:  # tables, and a finding that depends on the images
                    assert {each.split()[0] for each in expected} - {"detector", "flowers"} <= first, line
            seen.add(arguments[0])
    assert {"train", "info", "score", "evaluate", "calibrate", "export", "watch", "serve"} <= seen


@pytest.mark.filterwarnings("ignore")
def test_the_python_of_the_page_runs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    assert len(code.strip().splitlines()) <= 15
    exec(compile(small(code), "docs/photos.md", "exec"), {})
    assert (there / "flowers.kedge").is_file()
    assert "tensor" in capsys.readouterr().out
