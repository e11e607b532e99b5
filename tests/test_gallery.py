"""The examples run, and docs/gallery holds what they print and draw: the site shows it beside their code.

``make gallery`` writes these files. Numbers may differ a little on another machine; words may not.
"""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kedge
from helpers import served
from kedge.data.digits import digits
from kedge.seeds import seeded

EXAMPLES = Path(__file__).parents[1] / "examples"
GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
WRITES = os.environ.get("KEDGE_GALLERY") == "write"
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)")
MILLISECONDS = r"(?<=  1)  +[\d.]+$"  # the last column of the table of an evaluation
LIBRARIES = ("Loaded pretrained weights", "{'train_runtime")  # lines that do not come from the example
PARTS = {"own_loop": "efficientnet_lite_pytorch", "lightning_module": "lightning", "transformers_trainer": "accelerate"}
PARTS |= {"folder_of_photographs": "efficientnet_lite_pytorch", "timm_network": "timm", "plots": "pandas"}


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Imports an example as if it were run in its folder, with another folder to write into."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
            del sys.modules[name]


def check(name: str, command: str, run) -> None:
    """Compare what an example prints and draws with the files of the gallery, or write these."""
    for part in PARTS.get(name, "torch").split():
        pytest.importorskip(part)
    there = set(Path().glob("*.png"))
    torch.manual_seed(0)  # of the weights of fresh networks
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    lines = [line.rstrip() for line in out.getvalue().splitlines() if not line.startswith(LIBRARIES)]
    text, drawn = "\n".join([f"$ {command}", *lines, ""]), sorted(set(Path().glob("*.png")) - there)
    if WRITES:
        (GALLERY / f"{name}.txt").write_text(text)
        for path in drawn:
            with Image.open(path) as picture:
                small = picture.convert("P", palette=Image.Palette.ADAPTIVE)
                small.save(GALLERY / f"{name}-{path.name}", optimize=True)
    stored = (GALLERY / f"{name}.txt").read_text()
    assert [NUMBER.sub("0", line).split() for line in text.splitlines()] == [
        NUMBER.sub("0", line).split() for line in stored.splitlines()
    ], "run `make gallery`"
    untimed = [re.sub(MILLISECONDS, "", each, flags=re.MULTILINE) for each in (text, stored)]
    shown, kept = ([float(number.replace(",", "")) for number in NUMBER.findall(each)] for each in untimed)
    np.testing.assert_allclose(shown, kept, rtol=0.25, atol=0.1, err_msg="run `make gallery`")
    assert sorted(f"{name}-{path.name}" for path in drawn) == sorted(p.name for p in GALLERY.glob(f"{name}-*.png"))


@pytest.mark.parametrize(
    ("name", "steps", "options"),
    [
        ("own_loop", 25, {}),
        pytest.param(  # test_lightning.py trains smaller networks with the callback
            *("lightning_module", 25, {"enable_progress_bar": False, "enable_model_summary": False}),
            marks=pytest.mark.slow,
        ),
        ("transformers_trainer", 100, {"disable_tqdm": True, "use_cpu": True}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_training_in_loops_of_others(example, name, steps, options):
    made = []
    check(name, f"python {name}.py", lambda: made.append(example(name).main(**options)))
    (detector,) = made
    held_out = example("pretrained").images(example(name).SIZE)[1]
    result = detector(held_out)
    assert isinstance(detector.net, kedge.Anchored)
    assert detector.net.batches_seen == steps
    assert float((result.label == held_out.labels).double().mean()) > 0.5  # of ten classes
    assert 0 < float(result.is_ood.double().mean()) <= 0.05


def test_a_folder_of_photographs(example):
    module = example("folder_of_photographs")
    check("folder_of_photographs", "python folder_of_photographs.py", module.main)
    detection = kedge.load("fabrics.kedge")(sorted(Path("new").rglob("*.jpg")))
    assert detection.is_ood.tolist() == ["sock" in name for name in detection.names]


def test_a_network_of_timm(example):
    check("timm_network", "python timm_network.py", example("timm_network").main)


def test_gray_images_of_sixteen_bits(example):
    shares = {}
    check("gray_images", "python gray_images.py", lambda: shares.update(example("gray_images").main()))
    assert shares.pop("cells") <= 0.15
    assert min(shares.values()) > 0.9


def test_signals(example):
    shares = {}
    check("signals", "python signals.py", lambda: shares.update(example("signals").main()))
    assert shares["sine"] <= 0.12
    assert min(shares["square"], shares["burst"]) > 3 * shares["sine"]


def test_a_notebook_with_plots(example):
    check("plots", "python plots.py", lambda: example("plots").main())
    assert sorted(path.stem for path in Path().glob("*.png")) == ["reliability", "roc", "scores", "verdicts"]


@pytest.fixture(scope="module")
def protected(tmp_path_factory):
    """A folder with a detector of digits and two pictures, a seven and a chequered one."""
    folder = tmp_path_factory.mktemp("protected")
    train_set, held_out = digits()[::3].split(0.8)
    with seeded(0):
        net = kedge.models.build("compact", width=8, channels=1)
    net = kedge.train(net, train_set, kedge.training.recipe("demo", epochs=2))
    seven = held_out.images[held_out.labels == 7][0, 0].numpy()
    Image.fromarray(seven).save(folder / "seven.png")
    Image.fromarray(np.kron(np.indices((7, 7)).sum(axis=0) % 2 * 255, np.ones((4, 4))).astype(np.uint8)).save(
        folder / "chequered.png"
    )
    return kedge.protect(net, train_set, held_out), folder


def test_onnx_alone(example, protected, monkeypatch):
    detector, folder = protected
    monkeypatch.chdir(folder)
    kedge.export.export_onnx(detector, folder / "digits.onnx")
    command = "python onnx_only.py digits.onnx seven.png chequered.png"
    check("onnx_only", command, lambda: example("onnx_only").main(*command.split()[2:]))


def test_the_client_gets_the_verdict_of_the_detector(example, protected):
    detector, folder = protected
    with served(detector) as port:
        address, files = f"http://127.0.0.1:{port}", [str(folder / name) for name in ("seven.png", "chequered.png")]
        answers = [example("service_client").ask(address, file) for file in files]
        command = "python service_client.py http://localhost:8000 seven.png chequered.png"
        os.chdir(folder)
        check("service_client", command, lambda: example("service_client").main(address, *command.split()[3:]))
    for answer, expected in zip(answers, detector(files), strict=True):
        assert (answer["label"], answer["is_ood"]) == (expected["label"], expected["is_ood"])
        assert answer["p_value"] == pytest.approx(expected["p_value"])
    assert [answer["is_ood"] for answer in answers] == [False, True]


def test_the_pretrained_network_knows_its_size_and_normalisation(example):
    pytest.importorskip("efficientnet_lite_pytorch")
    net = example("pretrained").lite0().eval()
    assert net.record["preprocess"]["shape"] == (3, 224, 224)
    black, white = (net.normalise(torch.full((1, 3, 2, 2), value, dtype=torch.uint8)) for value in (0, 255))
    assert torch.allclose(black, torch.tensor(-127 / 128))
    assert torch.allclose(white, torch.tensor(1.0))


def test_transformers_brings_the_normalisation_of_its_image_processor(example, tmp_path):
    pytest.importorskip("accelerate")
    module = example("transformers_trainer")
    module.write_network(tmp_path)
    net = kedge.network(f"hf:{tmp_path}", pretrained=True)
    assert net.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert net.record["preprocess"]["crop"] == 0.875
    assert net.record["preprocess"]["shape"] == (3, module.SIZE, module.SIZE)
