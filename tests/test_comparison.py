"""`kedge.compare` and its command: every method that applies, on features that are extracted once."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import kedge
from helpers import CLASSES, labelled, network
from helpers import run_cli as run
from kedge.detectors.registry import make, post_hoc
from kedge.errors import InputError
from kedge.evaluation.summary import grouped_table
from kedge.metrics import METRICS

SIDE = 12
SETS = {"train": 60, "held": 60, "test": 40, "dim": 30, "odd": 30}  # images


def sets() -> dict[str, kedge.ImageSet]:
    return {name: labelled(n, side=SIDE, seed=seed, name=name) for seed, (name, n) in enumerate(SETS.items())}


def compared(net=None, **options):
    given = sets()
    arguments = {"near": [given["dim"]], "far": [given["odd"]], "test": given["test"], "resamples": 20} | options
    return kedge.compare(net or network(), given["train"], given["held"], **arguments)


@pytest.fixture(scope="module")
def whole():
    return compared()


def test_each_method_gets_what_it_gets_alone(whole):
    given, net = sets(), network()
    for name in ("knn", "energy", "mds", "ash", "temperature_scaling"):
        alone = make(name, net).fit(given["train"]).calibrate(given["held"])
        expected = kedge.evaluate({name: alone}, given["test"], [given["dim"], given["odd"]]).results[name]
        result = whole.results[name]
        for ood in ("dim", "odd"):
            for metric, estimate in expected.metrics[ood].items():
                assert result.metrics[ood][metric].value == pytest.approx(estimate.value, abs=2e-3), (name, metric)
        assert result.classifier == pytest.approx(expected.classifier, abs=1e-4)
        assert result.flagged == pytest.approx(expected.flagged)
        assert result.cost == expected.cost


def test_every_method_has_a_row_or_a_reason(whole):
    assert set(whole.results) | set(whole.left_out) == set(post_hoc())
    assert {"msp", "gen", "knn", "vim", "rmds++", "dice", "gradnorm", "combined"} <= set(whole.results)
    assert whole.left_out["default"] == "it is combined by another name"
    assert "passes of its own" in whole.left_out["odin"]
    assert "anchor" in whole.left_out["amp"]
    best = [
        np.mean([result.groups[group]["auroc"].value for group in ("near", "far")]) for result in whole.results.values()
    ]
    assert best == sorted(best, reverse=True)


def test_every_metric_can_be_a_column(whole):
    table = grouped_table(whole, tuple(METRICS))
    heads = [f"{group} {METRICS[m].head}" for group in ("near", "far") for m in METRICS if METRICS[m].of_counts]
    heads += [metric.head for metric in METRICS.values() if metric.of_predictions]
    assert table.heads == ("method", *heads, "passes", "ms")
    assert all(len(row) == len(table.heads) for row in table.rows)
    assert len(str(whole).splitlines()) > len(whole.results)


def test_images_pass_through_the_network_once(monkeypatch, tmp_path):
    seen, forward = [], kedge.Classifier.features

    def counted(self, x, *args, **options):
        seen.append(len(x))
        return forward(self, x, *args, **options)

    monkeypatch.setattr(kedge.Classifier, "features", counted)
    first = compared(directory=tmp_path)
    images = sum(SETS.values()) + 2  # two images show which the last layer is
    assert sum(seen) == images, seen
    again = compared(directory=tmp_path)  # resumed: nothing is left to extract
    assert sum(seen) == images
    for name, result in first.results.items():
        assert again.results[name].metrics == result.metrics


def test_methods_share_the_classifiers_outputs(whole):
    tensors = {id(result.detections["odd"].probability) for result in whole.results.values()}
    assert len(tensors) == 1


def test_methods_with_passes_of_their_own_are_run_on_request():
    table = compared(methods=["odin", "msp"])
    assert set(table.results) == {"odin", "msp"}
    assert table.results["odin"].cost.backward == 1
    given, net = sets(), network()
    alone = kedge.ODIN(net).fit(given["train"]).calibrate(given["held"])
    expected = kedge.evaluate({"odin": alone}, given["test"], [given["dim"]]).results["odin"]
    assert table.results["odin"].metrics["dim"]["auroc"].value == pytest.approx(expected.metrics["dim"]["auroc"].value)
    assert table.results["odin"].detections["odd"].logits is table.results["msp"].detections["odd"].logits


def test_a_method_that_fails_is_listed_with_its_reason(monkeypatch):
    def broken(self, train_set, preprocess):
        raise ZeroDivisionError("no features")

    monkeypatch.setattr(kedge.KNN, "fit_method", broken)
    unlabelled = {name: kedge.ImageSet(images.images, name=name) for name, images in sets().items()}
    table = kedge.compare(
        network(),
        unlabelled["train"],
        unlabelled["held"],
        [unlabelled["odd"]],
        methods=["msp", "knn", "mds"],
        resamples=0,
    )
    assert list(table.results) == ["msp"]
    assert table.left_out["knn"] == "ZeroDivisionError: no features"
    assert "must have a label for each image" in table.left_out["mds"]
    assert table.results["msp"].accuracy is None
    with pytest.raises(InputError, match="methods must hold at least one that applies; knn: ZeroDivisionError"):
        compared(methods=["knn"])


def test_intervals_hold_the_values_and_are_those_of_the_groups_mean():
    given = sets()
    table = kedge.compare(
        network(), given["train"], given["held"], far=[given["dim"], given["odd"]], test=given["test"], methods=["msp"],
        resamples=1000,
    )  # fmt: skip
    (result,) = table.results.values()
    mean, each = result.groups["far"]["auroc"], [result.metrics[ood]["auroc"] for ood in ("dim", "odd")]
    assert mean.value == pytest.approx(sum(e.value for e in each) / 2)
    assert mean.low < mean.value < mean.high
    assert mean.high - mean.low < max(e.high - e.low for e in each)
    # The naive bootstrap: redraw images, compute the AUROC of both sets by its definition, and average.
    rng = np.random.default_rng(1)
    scores = [result.detections[name].score.numpy() for name in ("test", "dim", "odd")]
    drawn = []
    for _ in range(1000):
        inside, *outside = (rng.choice(s, len(s)) for s in scores)
        drawn.append(np.mean([(o[:, None] > inside).mean() + (o[:, None] == inside).mean() / 2 for o in outside]))
    assert np.quantile(drawn, [0.025, 0.975]) == pytest.approx([mean.low, mean.high], abs=0.02)


def test_half_of_the_held_out_images_are_tested_by_default():
    given = sets()
    table = kedge.compare(network(), given["train"], given["held"], [given["odd"]], methods=["msp"], resamples=0)
    held, test = given["held"].split(0.5, seed=0)
    assert table.sets["held"].images.equal(test.images)
    alone = kedge.MSP(network()).fit(given["train"]).calibrate(held)
    assert table.results["msp"].flagged["odd"] == pytest.approx(float(alone(given["odd"]).is_ood.double().mean()))


def test_classes_are_matched_by_name():
    given, net = sets(), network()
    net.record["classes"] = list(CLASSES[:4])
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {
        name: kedge.ImageSet(s.images, order.argsort()[s.labels], name, tuple(CLASSES[i] for i in order))
        for name, s in given.items()
    }
    expected, result = (
        kedge.compare(net, s["train"], s["held"], far=[s["odd"]], test=s["test"], methods=["mds", "msp"], resamples=0)
        for s in (given, shuffled)
    )
    for name in ("mds", "msp"):
        assert result.results[name].accuracy == expected.results[name].accuracy
        assert result.results[name].mean("auroc") == expected.results[name].mean("auroc")


def test_features_take_the_place_of_images():
    net, given = network(), sets()
    stored = {name: kedge.extract(net, images) for name, images in given.items()}
    table = kedge.compare(
        net,
        stored["train"],
        stored["held"],
        far=[stored["odd"]],
        test=stored["test"],
        methods=["knn", "odin"],
        resamples=0,
    )
    assert (
        table.results["knn"].mean("auroc")
        == compared(net, methods=["knn"]).results["knn"].metrics["odd"]["auroc"].value
    )
    assert "features of them" in table.left_out["odin"]


def test_an_anchored_network_gets_anchors_in_a_copy():
    net = network("anchored")
    table = compared(net, methods=["amp", "knn"], resamples=0)
    assert set(table.results) == {"amp", "knn"}
    assert net.anchors is None
    assert table.results["knn"].cost.forward == 5


def test_images_of_calibration_among_those_tested_are_refused():
    given = sets()
    with pytest.raises(InputError, match=r"at least one that applies; msp: .*among the calibration"):
        kedge.compare(network(), given["train"], given["held"], [given["odd"]], test=given["held"], methods=["msp"])


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved detector, and photographs of different sizes in folders."""
    home = tmp_path_factory.mktemp("compare")
    given = sets()
    kedge.MSP(network()).fit(given["train"]).calibrate(given["held"]).save(home / "msp.kedge")
    for name, images in given.items():
        for i, (image, label) in enumerate(images):
            place = home / ("other/held" if name == "odd" else name) / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            pixels = image.permute(1, 2, 0).numpy()
            Image.fromarray(pixels).resize((80 + i, 60)).save(place / f"{i}.png")
    return home


def test_the_commands_extract_and_compare(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    done = run("extract", "msp.kedge", "--data", "folder:train", "-o", tmp_path / "train", "--half")
    assert done.exit_code == 0, done.output
    assert "60 images, 4 logits" in done.output
    assert kedge.Features.open(tmp_path / "train").features.dtype == torch.float16
    command = [
        "compare", "msp.kedge", "--train", f"features:{tmp_path / 'train'}", "--held-out", "folder:held",
        "--near", "folder:dim", "--far", "folder:other/held", "--methods", "msp,knn,odin", "--resamples", 20,
        "-o", tmp_path / "out",
    ]  # fmt: skip
    done = run(*command, "--by-set")
    assert done.exit_code == 0, done.output
    assert "metrics.json does: choose another name, or use --overwrite" in str(run(*command).exception)
    for text in ("near AUROC", "far FPR95", "dim AUROC", "knn", "left out  odin: ", "Accuracy"):
        assert text in done.output.replace("\n", " "), text
    facts = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert facts["groups"] == {"near": ["dim"], "far": ["other/held"]}  # two folders of the same name
    assert set(facts["results"]) == {"msp", "knn"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Groups of sets" in page
    assert "Methods left out" in page
    assert page.count("data:image/jpeg") > 10  # images that are read from disk
    again = run(*command, "--json", "--overwrite")
    printed, before = json.loads(again.stdout)["results"], facts["results"]
    assert {name: each["metrics"] for name, each in printed.items()} == {
        n: each["metrics"] for n, each in before.items()
    }
    other = ("extract", "msp.kedge", "--data", "folder:dim", "-o", tmp_path / "train")
    assert "features.json does: choose another name, or use --overwrite" in str(run(*other).exception)
    assert run(*other, "--overwrite").exit_code == 0
    assert kedge.Features.open(tmp_path / "train").name == "dim"


def test_a_saved_network_has_its_own_options(folder):
    with pytest.raises(InputError, match=r"--size must come without a saved detector"):
        raise run("extract", folder / "msp.kedge", "--data", f"folder:{folder}/dim", "-o", "x", "--size", 3).exception
