"""``kedge fit`` and `kedge.protect`: a classifier that exists already, from a folder of pictures to every command."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import kedge
from helpers import colors, encoded, picture, run_cli
from kedge import metrics
from kedge.data.sources import load_dataset
from kedge.detectors.combined import DEFAULT
from kedge.errors import ArchitectureError, InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.io import graphs
from kedge.models.graph import StoredGraph
from kedge.serving import Settings, create_app
from kedge.training.frozen import train_head

FACTORY = """
import torch, kedge

def build(classes=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(inplace=True), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes))

def whole():
    return kedge.Classifier(build(), mean=0.5, std=0.25)

def wide():
    return kedge.Classifier(build(5), mean=0.5, std=0.25)

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()

    def forward(self, x):
        return self.body(x) * (2 if x.mean() > 0.5 else 1)

class Masked(Branching):
    def forward(self, x, mask):
        return self.body(x * mask)

def masked():
    return Masked()

def maps():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 3))

def soft():
    return torch.nn.Sequential(build(), torch.nn.Softplus())

def branching():
    return kedge.Classifier(Branching(), mean=0.5, std=0.25)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pictures for training and calibration, and a module that builds a network."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 12), ("held", 20), ("fresh", 5)):
        for number, name in enumerate(("red", "green", "blue")):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 120, (14, 18, 3), np.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels).save(place / f"{i}.png")
    (tmp_path / "photo_net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "photo_net", raising=False)
    return tmp_path


def test_a_fitted_file_works_with_every_command_without_the_networks_code(folder: Path) -> None:
    fitted = run_cli(
        "fit", "photo_net:whole", "--train", "folder:train", "--held-out", "folder:held", "--size", 12, "-o", "a.kedge",
        "--method", "knn", "--layer", "5",
    )  # fmt: skip
    assert fitted.exit_code == 0, fitted.output
    assert "accuracy" in fitted.output
    assert kedge.load("a.kedge").layer == "5"
    assert "kedge serve a.kedge" in fitted.output
    sys.modules.pop("photo_net", None)
    (folder / "photo_net.py").unlink()  # nothing below needs the network's code
    detector = kedge.load("a.kedge")
    assert isinstance(detector.net.network, StoredGraph)
    assert detector.classes == ("blue", "green", "red")
    commands = [
        ("info", "a.kedge"),
        ("score", "a.kedge", "held", "-o", "rows.csv", "--no-summary"),
        ("calibrate", "a.kedge", "folder:held", "--alpha", "0.2", "--out", "b.kedge"),
        ("evaluate", "a.kedge", "--test", "folder:fresh", "--ood", "folder:train", "--resamples", 0),
    ]
    for command in commands:
        result = run_cli(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)


@pytest.fixture
def of_timm(folder: Path) -> tuple[str, ...]:
    """The command that protects a small network of timm whose weights are in a file."""
    timm = pytest.importorskip("timm")
    save_file(timm.create_model("test_efficientnet", num_classes=3).state_dict(), folder / "w.safetensors")
    network = ("timm:test_efficientnet", "--weights", "w.safetensors", "--size", 32)
    return ("fit", *network, "--train", "folder:train", "--held-out", "folder:held", "-o", "a.kedge")


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("timm", "transformers", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)


def test_no_command_needs_timm_for_a_network_of_timm(
    of_timm: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train" / "red" / "damaged.png").write_bytes(b"damaged")
    fitted = run_cli(*of_timm)
    assert fitted.exit_code == 0, fitted.output
    assert "damaged.png" in fitted.stderr
    (folder / "train" / "red" / "damaged.png").unlink()
    without_libraries(monkeypatch)
    with pytest.raises(NotReadyError, match=r"kedge\[timm\]"):
        kedge.network("timm:test_efficientnet")
    commands = [
        ("info", "a.kedge"),
        ("score", "a.kedge", "held", "-o", "rows.csv", "--no-summary"),
        ("watch", "a.kedge", "rows.csv"),
        ("calibrate", "a.kedge", "folder:held", "--alpha", "0.2", "--out", "b.kedge"),
        ("evaluate", "b.kedge", "--test", "folder:fresh", "--ood", "folder:train", "--resamples", 0),
    ]
    for command in commands:
        result = run_cli(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)
    detector, image = kedge.load("a.kedge"), picture(3)
    with TestClient(create_app(detector, Settings())) as http:
        (row,) = http.post("/v1/score", content=encoded(image), headers={"Content-Type": "image/png"}).json()["results"]
    assert row["score"] == pytest.approx(float(detector.score([image])), rel=1e-4)
    with pytest.raises(InputError, match="net must be a network that can be trained; this one is the graph of a file"):
        kedge.train(detector.net, colors(20))


def test_without_a_graph_the_recipe_opens_a_file_and_the_command_says_what_it_needs(
    of_timm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArchitectureError("it has a loop")

    monkeypatch.setattr(graphs, "capture", refuse)
    fitted = run_cli(*of_timm)
    assert "opens only with the package of timm:test_efficientnet installed: it has a loop" in fitted.stderr
    images = torch.rand(4, 3, 32, 32)
    detector = kedge.load("a.kedge")
    assert type(detector.net.network).__name__ == "EfficientNet"
    assert detector.score(images).isfinite().all()
    without_libraries(monkeypatch)
    with pytest.raises(NotReadyError, match=r"timm:test_efficientnet needs timm.*kedge\[timm\]"):
        kedge.load("a.kedge")


def test_weights_of_another_number_of_classes_are_refused_by_fit_and_trained_on_by_train(
    of_timm: tuple[str, ...], folder: Path
) -> None:
    result = run_cli(*of_timm, "--classes", 5)
    assert re.search(r"classifier.weight \(3, \d+\) for \(5, .*classes=3, --classes", str(result.exception))
    assert not (folder / "a.kedge").exists()
    (folder / "train" / "white").mkdir()
    for number in range(8):
        Image.fromarray(np.full((14, 18, 3), 225 + number, np.uint8)).save(folder / f"train/white/{number}.png")
    (folder / "train/white/damaged.png").write_bytes(b"damaged")
    done = run_cli(
        "train", "folder:train", "--network", "timm:test_efficientnet", "--weights", "w.safetensors", "--size", 32,
        "--freeze", "--out", "run",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert "white/damaged.png" in done.stderr
    assert kedge.load("run/detector.kedge").classes == ("blue", "green", "red", "white")


def test_accuracy_is_that_of_timms_own_evaluation(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    generator = np.random.default_rng(0)
    for i in range(90):  # photographs of several sizes, of which the centre is not like the rest
        pixels = generator.integers(0, 200, (150 + i, 260 - i, 3), np.uint8)
        pixels[40:-40, 50:-50, i % 3] += 55
        (tmp_path / "abc"[i % 3]).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "abc"[i % 3] / f"{i}.jpg", quality=90)
    photos = load_dataset(f"folder:{tmp_path}")
    train_set, held_out = photos.split(0.5, seed=0)
    net = train_head(kedge.network("timm:test_efficientnet", classes=3), train_set)
    detector = kedge.protect(net, train_set, held_out, method="msp")

    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net.network))
    own = timm.data.ImageDataset(str(tmp_path), transform=transform)
    names = {name: i for i, name in enumerate(own.filenames())}
    chosen = [names[name] for name in held_out.store.names]
    with torch.no_grad():
        logits = net.network.eval()(torch.stack([own[i][0] for i in chosen]))
    labels = torch.tensor([own[i][1] for i in chosen])
    result = detector(held_out)
    torch.testing.assert_close(result.logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(held_out.labels, labels)
    assert metrics.accuracy(result.label, labels) == float((logits.argmax(dim=1) == labels).double().mean())
    assert metrics.accuracy(result.label, labels) > 0.5


def test_a_file_without_a_graph_opens_with_the_networks_own_code(folder: Path) -> None:
    fitted = run_cli(
        "fit", "photo_net:branching", "--train", "folder:train", "--held-out", "folder:held", "--size", 12,
        "-o", "a.kedge",
    )  # fmt: skip
    assert fitted.exit_code == 0
    assert "opens only with the network's own code (--model package.module:factory" in fitted.stderr
    commands: list[tuple[object, ...]] = [
        ("score", "a.kedge", "held", "-o", "rows.csv", "--no-summary"),
        ("calibrate", "a.kedge", "folder:held", "--alpha", "0.2", "--out", "b.kedge"),
        ("evaluate", "a.kedge", "--test", "folder:fresh", "--ood", "folder:train", "--resamples", 0),
        ("export", "a.kedge", "-o", "a.onnx"),
        ("serve", "a.kedge", "--port", 0),
    ]
    for command in commands:
        result = run_cli(*command)
        assert str(result.exception).startswith("--model must be given for this file"), command
        result = run_cli(*command, "--model", "photo_net:nothing")
        assert str(result.exception).startswith("--model must be package.module:factory"), command
    for command in commands[:3]:
        result = run_cli(*command, "--model", "photo_net:branching")
        assert result.exit_code == 0, (command, result.output, result.exception)
    for command in (("watch", "a.kedge", "rows.csv"), ("info", "a.kedge")):  # they run no network
        assert run_cli(*command).exit_code == 0, command
    assert kedge.load("a.kedge", model="photo_net:branching").classes == ("blue", "green", "red")


def test_a_factory_replaces_the_graph_only_where_it_is_named(folder: Path) -> None:
    base = ("--train", "folder:train", "--held-out", "folder:held", "--size", 12, "-o", "a.kedge")
    assert run_cli("fit", "photo_net:whole", *base).exit_code == 0
    del sys.modules["photo_net"]
    assert isinstance(kedge.load("a.kedge").net.network, StoredGraph)
    assert "photo_net" not in sys.modules
    own = kedge.load("a.kedge", model="photo_net:build")
    assert isinstance(own.net.network, nn.Sequential)
    images = torch.rand(5, 3, 12, 12)
    torch.testing.assert_close(own.score(images), kedge.load("a.kedge").score(images))
    with pytest.raises(InputError, match="model must be the Sequential that was saved"):
        kedge.load("a.kedge", model="photo_net:wide")


def test_an_existing_file_is_kept(folder: Path) -> None:
    (folder / "a.kedge").write_text("mine")
    result = run_cli("fit", "photo_net:whole", "--train", "folder:train", "--size", 12, "-o", "a.kedge")
    assert "--overwrite" in str(result.exception)
    assert (folder / "a.kedge").read_text() == "mine"


def test_bad_input_names_the_option(folder: Path) -> None:
    base = ("fit", "photo_net:whole", "--train", "folder:train", "--held-out", "folder:held", "-o", "a.kedge")
    for more, words in {
        ("--method", "knm"): "--method",
        ("--mean", "a,b"): "--mean",
        ("--weights", "none.pth"): "weights",
        ("--method", "msp", "--layer", "1"): "--layer must come with a method that reads one layer",
    }.items():
        result = run_cli(*base, *more)
        assert isinstance(result.exception, InputError)
        assert words in str(result.exception)
        assert not (folder / "a.kedge").exists()


@pytest.mark.parametrize(
    ("network", "size", "words"),
    [
        ("masked", 12, "the network must take one input, images (B, D, H, W); Masked takes x, mask"),
        ("maps", 12, "the network must return logits (B, C), or an object with them as .logits; got (1, 3, 8, 8)"),
        ("whole", 2, "Sequential cannot take inputs of shape (3, 2, 2): Calculated padded input size"),
        ("soft", 12, "are not the output of one linear layer inside it; name another layer"),
    ],
)
def test_a_network_that_cannot_be_used_says_why(folder: Path, network: str, size: int, words: str) -> None:
    base = ("--train", "folder:train", "--held-out", "folder:held", "--mean", 0.5, "--std", 0.25, "-o", "a.kedge")
    method = "msp" if network == "maps" else "knn"
    result = run_cli("fit", f"photo_net:{network}", *base, "--size", size, "--method", method)
    assert isinstance(result.exception, KedgeError), result.exception
    assert words in str(result.exception)
    assert not (folder / "a.kedge").exists()


def small_network(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, classes))


def test_protect_reports_what_held_out_images_show() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    detector = kedge.protect(net, colors(90), colors(80, seed=1), method="knn", k=5)
    record = detector.net.record["held_out"]
    assert (record["images"], record["judged"]) == (80, 40)
    second = colors(80, seed=1).split(0.5, seed=0)[1]
    assert record["accuracy"] == pytest.approx(float((detector(second).label == second.labels).double().mean()))
    assert detector.calibration is not None
    assert len(detector.calibration.scores) == 80


def test_protect_warns_where_the_promise_is_weaker() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    with pytest.warns(KedgeWarning, match="held_out"):
        kedge.protect(net, colors(200), method="knn", k=5)
    with pytest.warns(KedgeWarning, match="5 classes"):
        detector = kedge.protect(
            kedge.Classifier(small_network(5), mean=0.5, std=0.25), colors(90), colors(80, seed=1), method="knn", k=5
        )
    assert detector.net.record["held_out"]["accuracy"] is None
    assert detector.classes == ()
    with pytest.raises(InputError, match="held_out"):
        kedge.protect(net, torch.rand(40, 3, 8, 8))
    with pytest.raises(InputError, match="method"):
        kedge.protect(net, colors(90), method="none")
    for count in (1, 5):
        with pytest.raises(InputError, match=f"held_out must have at least 6 images.*got {count}"):
            kedge.protect(net, colors(90), colors(count, seed=1))


def test_options_are_chosen_on_half_of_the_held_out_images_and_shown(folder: Path) -> None:
    base = ("--train", "folder:train", "--held-out", "folder:held", "--size", 12)
    for by, name in (("classes", "held-out classes"), ("synthetic", "synthetic outliers"), ("folder:fresh", "fresh")):
        fitted = run_cli(
            "fit", "photo_net:whole", *base, "--method", "knn", "--tune", by, "-o", "a.kedge", "--overwrite"
        )
        assert fitted.exit_code == 0, (fitted.output, fitted.exception)
        words = str(kedge.load("a.kedge").tuned)
        assert f"by {name} (AUROC" in words
        assert f"options   {words}" in fitted.output
        assert words in run_cli("info", "a.kedge").output
    refused = run_cli("fit", "photo_net:whole", *base, "--method", "msp", "--tune", "classes", "-o", "b.kedge")
    assert "'msp' has none" in str(refused.exception)


def test_protect_makes_the_default_whose_summary_says_what_was_measured() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    detector = kedge.protect(net, colors(90), colors(160, seed=1))
    assert isinstance(detector, kedge.Combined)
    assert detector.config()["rule"] == DEFAULT["rule"]
    assert [part["name"] for part in detector.config()["parts"]] == list(DEFAULT["parts"])
    record, text = net.record["held_out"], detector.summary
    assert f"{record['flagged']:.1%} of 80 held-out images that the threshold was not set on; at most 5.0%" in text
    assert f"{record['accuracy']:.1%} of 80" in text
    learned = 160 - len(detector.calibration.scores)  # type: ignore[union-attr]
    assert f"160 images, {learned} of them to learn from; the threshold is set on {160 - learned}" in text
    assert "the logits and features inside the network; forward passes for an image: 1" in text
    assert "It cannot promise\n- how many unknown images it finds" in text
    with pytest.raises(NotReadyError, match="sum up"):
        print(kedge.MSP(net).summary)


def test_protect_takes_methods_to_combine_and_images_without_labels() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    both = kedge.protect(net, colors(90), colors(80, seed=1), method="vim,max_logit,knn", rule="fisher")
    assert [type(part) for part in both.parts] == [kedge.ViM, kedge.MaxLogit, kedge.KNN]  # type: ignore[attr-defined]
    unlabelled = kedge.protect(net, colors(90).images, colors(80, seed=1).images)
    assert [type(part) for part in unlabelled.parts] == [kedge.KNN, kedge.GEN]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="'genn'"):
        kedge.protect(net, colors(90), colors(80), method="mds++,genn")


def test_protect_splits_nothing_off_what_the_network_was_trained_on() -> None:
    recipe = kedge.training.Recipe(epochs=1, batch=16, lr=0.02, crop=0, flip=False)
    net = kedge.train(kedge.Classifier(small_network(), mean=0.5, std=0.25), colors(90), recipe)
    with pytest.raises(InputError, match="trained on all of train_set"):
        kedge.protect(net, colors(90))
    with pytest.raises(InputError, match="is the training set of the network"):
        kedge.protect(net, colors(60, seed=2), colors(90))
