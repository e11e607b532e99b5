"""The studies cifar10-trained and imagenet, on images and networks that are made up."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score, roc_auc_score

import kedge
from helpers import images, labelled, network, run_cli
from kedge.anchoring import Anchored
from kedge.errors import NotReadyError
from kedge.models import build
from kedge.seeds import seeded
from kedge.studies import cifar10_trained, imagenet, imagenet_images, imagenet_tables, sets
from kedge.studies.cifar10_trained import NETWORKS
from kedge.studies.comparison import Fitted, MethodTable, Row, cell
from kedge.studies.feature_run import FeatureRun
from kedge.studies.study import Setting
from kedge.training import recipe


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Sets of noise for those of CIFAR-10, and a file of random weights for the public ones."""

    def load(name, *, side, data_dir, split=None):
        return labelled({"train": 24, None: 20}[split], classes=4, side=side, name=name, seed=len(name))

    monkeypatch.setattr(sets, "load_set", load)
    monkeypatch.setattr(cifar10_trained, "MOST_OTHERS", 6)
    with seeded(0):
        save_file(build("resnet20").state_dict(), tmp_path / "a_resnet20.safetensors")
    return Setting(weights=(tmp_path / "a_resnet20.safetensors",))


@pytest.fixture
def trainings(monkeypatch):
    """The arguments of the trainings, none of which is run."""
    given = {}

    def record(net, data, recipe, *, seed, directory, precision):
        given[directory.name] = net, {"recipe": recipe, "seed": seed, "images": data.checksum}
        return net.eval()

    monkeypatch.setattr(cifar10_trained, "train", record)
    return given


def test_a_tuned_network_starts_as_the_public_one_and_is_trained_alike_anchored_or_not(cifar10, tmp_path, trainings):
    public = NETWORKS["resnet20"].load(cifar10, tmp_path, 3)
    for name in ("resnet20, 10 epochs", "resnet20, anchored, 10 epochs"):
        NETWORKS[name].load(cifar10, tmp_path, 3)
    assert list(trainings) == ["resnet20-10-epochs-seed-3", "resnet20-anchored-10-epochs-seed-3"]
    (unanchored, how), (anchored, same) = trainings.values()
    assert how == same
    assert how["recipe"].epochs == 10
    x = images(4, side=32)
    anchored.set_anchors(images(2, side=32, seed=9))
    with torch.no_grad():
        torch.testing.assert_close(unanchored(x), public(x))
        torch.testing.assert_close(anchored(x), public(x), rtol=1e-3, atol=1e-4)


def test_networks_from_scratch_are_trained_by_the_papers_recipe(cifar10, tmp_path, trainings):
    for name in ("compact, 200 epochs", "compact, anchored, 200 epochs"):
        NETWORKS[name].load(cifar10, tmp_path, 0)
    (_, how), (anchored, same) = trainings.values()
    assert how == same
    assert how["recipe"] == recipe("cifar")
    pair = anchored.anchored_layer
    assert not pair.layer_c.weight.equal(pair.layer_x.weight)  # drawn, as in the paper


def test_networks_are_calibrated_on_half_of_the_test_images(cifar10, tmp_path):
    task = cifar10_trained.task(NETWORKS["resnet20"], cifar10, tmp_path, 1)
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [24, 10, 10]
    assert len(torch.cat([task.held_out.prints, task.test.prints]).unique(dim=0)) == 20
    assert [len(part) for part in (*task.near, *task.far)] == [6] * len(sets.FILES)
    with pytest.raises(NotReadyError, match="pass --weights FILE with resnet56"):
        NETWORKS["resnet56, 10 epochs"].load(cifar10, tmp_path, 0)


def test_the_study_of_trained_networks_runs_at_the_smoke_scale(tmp_path):
    networks = ("resnet20", "compact, anchored, 200 epochs")
    words = [word for name in networks for word in ("--tasks", name)] + ["--rows", "msp", "--out", tmp_path]
    result = run_cli("reproduce", "cifar10-trained", "--scale", "smoke", *words, columns=200)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert "AMP" in record[networks[1]]["results"]
    assert list(record[networks[0]]["results"]) == ["msp"]
    assert "| AMP |  |" in (tmp_path / "tables.md").read_text()  # none for the network that is not anchored


def test_gains_are_differences_of_means_over_the_sets_of_a_group_by_seed():
    def table(name, by_seed):
        sets = {"near": ("a",), "far": ("b", "c")}
        seeds = {
            str(seed): {"groups": sets, "sets": {key: {"auroc": value, "fpr95": 0.5} for key, value in found.items()}}
            for seed, found in enumerate(by_seed)
        }
        labels = (*cifar10_trained.COMPARED, "AMP")
        return MethodTable.from_record({"single": ["msp"], "results": {label: {name: seeds} for label in labels}})

    plain, anchored = "resnet20, 10 epochs", "resnet20, anchored, 10 epochs"
    found = cifar10_trained.gains(
        {
            plain: table(plain, [{"a": 0.5, "b": 0.6, "c": 0.8}, {"a": 0.5, "b": 0.7, "c": 0.7}]),
            anchored: table(anchored, [{"a": 0.52, "b": 0.65, "c": 0.85}, {"a": 0.49, "b": 0.7, "c": 0.72}]),
            "resnet56, 10 epochs": table("resnet56, 10 epochs", [{"a": 0.5, "b": 0.6, "c": 0.8}]),
        }
    )
    assert found.heads == ("method", plain)
    assert {row[1:] for row in found.rows} == {("+2.0, -1.0 / +5.0, +1.0",)}


@pytest.fixture
def few(tmp_path):
    return imagenet_images.features_of_pictures(imagenet_images.toy_pictures(), tmp_path)


def test_intervals_are_those_of_the_bootstrap_over_images(few, tmp_path):
    rows = {"MSP": Row("msp")}
    found = imagenet_tables.bootstrap(few.pictures, rows, [few.task(0), few.task(1)], tmp_path / "cells", 20)["MSP"]
    rng = np.random.default_rng(0)
    n, m = len(few.known), len(few.others[0])
    inside = [np.ones(n, int), *(rng.multinomial(n, np.full(n, 1 / n)) for _ in range(20))]
    outside = {
        each.name: [np.ones(m, int), *(rng.multinomial(m, np.full(m, 1 / m)) for _ in range(20))] for each in few.others
    }
    scored = []
    for seed in (0, 1):
        tested = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[n // 2 :]
        scored.append((cell("MSP", rows["MSP"], Fitted(few.task(seed)), tmp_path / "cells").scores, tested))
    for name in ("toy noise", "blur 5"):
        values = {"auroc": [], "aupr_out": []}
        for draw in range(21):
            by_seed = []
            for scores, tested in scored:
                times = inside[draw][tested], outside[name][draw] if name in outside else inside[draw][tested]
                drawn = [np.repeat(scores[each].numpy(), t) for each, t in zip(("toy", name), times, strict=True)]
                truth = np.repeat([0, 1], [len(each) for each in drawn])
                by_seed.append([of(truth, np.concatenate(drawn)) for of in (roc_auc_score, average_precision_score)])
            for metric, value in zip(values, np.mean(by_seed, axis=0), strict=True):
                values[metric].append(value)
        for metric, (whole, *redrawn) in values.items() if name == "blur 5" else [("auroc", values["auroc"])]:
            assert found[name][metric] == pytest.approx([whole, *np.quantile(redrawn, (0.025, 0.975))])


def test_labels_are_those_of_the_numbers_in_the_names(tmp_path, monkeypatch):
    numbers = {"imagenet-others": "ILSVRC2012_val_0000000{}.png", "flowers": "{}.png", "textures": "{}.png"}
    for name, pattern in numbers.items():
        for number in (2, 4, 1):
            part = {"flowers": {2: "14", 4: "15", 1: "49"}[number]}.get(name, "all")
            folder = tmp_path / "photos" / name / part
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images(1, side=8, seed=number + len(name))[0].permute(1, 2, 0).numpy()).save(
                folder / pattern.format(number)
            )
    monkeypatch.setattr(imagenet_images, "lite0", network)
    monkeypatch.setattr(imagenet_images, "PREPROCESS", kedge.Preprocess((3, 8, 8)))
    with pytest.raises(NotReadyError, match="package tensorflow-datasets"):
        imagenet_images.read_pictures(tmp_path)
    (tmp_path / imagenet_images.LABELS).write_text("n02\nn01\nn02\nn03\n")
    found = imagenet_images.features_of_pictures(imagenet_images.read_pictures(tmp_path), tmp_path / "features")
    assert found.known.labels.tolist() == [1, 0, 2]  # of numbers 1, 2 and 4
    assert [len(each) for each in found.others] == [1, 3]  # flowers without the spear thistle and the oxeye daisy
    assert [len(each) for each in found.blurred.values()] == [3] * 5
    assert {each.preprocess for each in (*found.others, *found.blurred.values())} == {found.known.preprocess}


def test_methods_that_learn_from_labels_or_need_many_images_are_left_out():
    rows = imagenet.label_free()
    assert {"msp", "energy", "gen", "knn", "temperature_scaling"} <= set(rows)
    assert not {"mds", "mds++", "rmds", "openmax", "she", "vim"} & set(rows)


def test_the_study_of_imagenet_runs_at_the_smoke_scale(tmp_path):
    words = ["--rows", "msp", "--rows", "knn + gen", "--seeds", "2", "--out", tmp_path]
    result = run_cli("reproduce", "imagenet", "--scale", "smoke", *words, columns=200)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "metrics.json").read_text())
    value, low, high = record["bootstrap"]["knn + gen"]["toy clouds"]["auroc"]
    assert low <= value <= high
    assert {"tuned: msp", "first layer: AMP", "last convolution: AMP"} <= set(record["bootstrap"])
    assert "tuned: AMP" not in record["bootstrap"]
    accuracies = record["accuracy by level of blur"]
    assert list(accuracies) == ["as it is", "tuned", "first layer", "last convolution"]
    assert [len(by_seed) for by_seed in accuracies["tuned"].values()] == [2] * 6
    assert "| paper, ResNet-50: AMP | 99.1 |" in (tmp_path / "tables.md").read_text()


def test_networks_tuned_on_imagenet_s_images_start_alike_and_leave_the_one_as_it_is(tmp_path, monkeypatch):
    trainings = []

    def train(net, fit, how, *, seed, directory, preprocess):
        if isinstance(net, Anchored):
            net.set_anchors(fit.images[:2])
        trainings.append((net, net.eval()(net.as_input(pictures.known.images[:2])), fit.images))
        return net

    monkeypatch.setattr(imagenet, "train", train)
    pictures = imagenet_images.toy_pictures()
    run = FeatureRun(Setting("smoke"), tmp_path / "out", tmp_path / "features")
    for name, layer in imagenet.SMOKE_TUNED.items():
        task = imagenet.tuned_task(run, pictures, name, layer, 1)
        assert (task.train.per_anchor is not None) == bool(layer)
        assert task.test.labels.equal(pictures.known.labels[pictures.parts(1)[2]])
    (plain, logits, seen), *anchored = trainings
    assert plain is not pictures.net
    for _, others, same in anchored:
        torch.testing.assert_close(others, logits)
        assert same.equal(seen)
