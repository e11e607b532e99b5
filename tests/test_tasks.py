"""Tasks of frozen features, and the comparison of methods on them."""

import dataclasses
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy import stats
from sklearn.metrics import roc_auc_score

import kedge
from helpers import images, network, picture, run_cli
from kedge.errors import InputError, NotReadyError
from kedge.evaluation.summary import SeedValues
from kedge.models import build
from kedge.seeds import seeded
from kedge.studies import photo_tasks, sets, tasks
from kedge.studies.calibration_cost import flagged_shares, share_law
from kedge.studies.comparison import Fitted, MethodTable, Row, by_set, cell, interval, run_rows, single_methods
from kedge.studies.default import leave_one_out
from kedge.studies.photographs import photos, used_photographs
from kedge.studies.shifts import SHIFTS, shifted_images
from kedge.studies.study import Setting

CLASSES = ("ash", "bay", "cox", "dog")  # ash and cox are known
ROWS = {"MSP": Row("msp"), "Energy": Row("energy"), "KNN": Row("knn", {"k": 3})}


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """A data folder with ten tiny photographs of each class, and a small backbone for them."""
    for name in (*photo_tasks.PHOTOS, *photo_tasks.UNLABELLED):
        for number in range(40 if name in photo_tasks.PHOTOS else 8):
            part = CLASSES[number % 4] if name in photo_tasks.PHOTOS else "."
            folder = tmp_path / "photos" / name / part
            folder.mkdir(parents=True, exist_ok=True)
            pixels = images(1, side=16, seed=1000 * len(name) + number)[0].permute(1, 2, 0) // 3
            pixels[..., number % 4 % 3] += 120
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    monkeypatch.setattr(photo_tasks, "lite0", partial(network, classes=7))
    monkeypatch.setattr(photo_tasks, "CENTER", kedge.Preprocess((3, 12, 12)))
    return Setting(data_dir=tmp_path)


def test_a_photo_task_knows_the_classes_at_even_positions(photographs, tmp_path):
    task = tasks.TASKS["pets"](photographs, tmp_path / "features", 0)
    assert task.train.classes == ("ash", "cox")
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [12, 4, 4]
    assert task.groups == {
        "near": ("pets, other classes",),
        "far": ("flowers", "caltech101", "textures", "imagenet-others"),
    }
    prints = torch.cat([part.prints for part in (task.train, task.held_out, task.test, *task.near)])
    assert len(prints.unique(dim=0)) == 40  # no image is in two parts
    other = tasks.TASKS["pets"](photographs, tmp_path / "features", 1)
    assert not other.test.prints.equal(task.test.prints)
    assert "imagenet-others" not in tasks.TASKS["caltech101"](photographs, tmp_path / "features", 0).groups["far"]


def test_its_features_are_those_of_its_network_for_the_images(photographs, tmp_path):
    task = tasks.TASKS["flowers"](photographs, tmp_path / "features", 0)
    (near,) = task.near
    again = kedge.extract(
        task.network, photo_tasks.photos("flowers", tmp_path).subset(torch.arange(40) >= 30), preprocess=near.preprocess
    )  # the last class, dog
    torch.testing.assert_close(near.logits[10:], again.logits, rtol=1e-4, atol=1e-4)
    assert near.network == again.network
    assert torch.equal(near.prints[10:], again.prints)


def test_photographs_are_extracted_once(photographs, tmp_path, monkeypatch):
    first = tasks.TASKS["pets"](photographs, tmp_path / "features", 0)
    monkeypatch.setattr(kedge.Classifier, "features", None)
    again = tasks.TASKS["pets"](photographs, tmp_path / "features", 0)
    assert again.identity == first.identity


def test_public_networks_are_calibrated_on_half_of_the_test_images(tmp_path):
    def save(name, n, **more):
        np.savez(tmp_path / name, x=images(n, side=32, seed=n).permute(0, 2, 3, 1).numpy(), **more)

    for number, file in enumerate(sets.FILES.values()):
        save(file, 5 + number)
    (tmp_path / "cifar10").mkdir()
    known = {f"{part}_x": images(n, side=32, seed=n).permute(0, 2, 3, 1).numpy() for part, n in SIZES.items()}
    known |= {f"{part}_y": np.arange(n) % 10 for part, n in SIZES.items()}
    np.savez(tmp_path / "cifar10" / "cifar10.npz", **known)
    with seeded(0):
        save_file(build("resnet20").state_dict(), tmp_path / "a_resnet20.safetensors")
    setting = Setting(data_dir=tmp_path, weights=(tmp_path / "a_resnet20.safetensors",))
    task = tasks.TASKS["cifar10-resnet20"](setting, tmp_path / "features", 3)
    assert [len(part) for part in (task.train, task.held_out, task.test, *task.near)] == [30, 10, 10, 5]
    assert [len(part) for part in task.far] == [6, 7, 8, 9, 10]
    assert len(torch.cat([task.held_out.prints, task.test.prints]).unique(dim=0)) == 20
    for name in sets.PRIVATE:
        (tmp_path / sets.FILES[name]).unlink()
    without = tasks.TASKS["cifar10-resnet20"](setting, tmp_path / "features", 3)
    assert [each.name for each in without.far] == ["traffic signs", "MNIST (RGB)"]  # the others cannot be had
    (tmp_path / sets.FILES["MNIST (RGB)"]).unlink()
    with pytest.raises(NotReadyError, match="or its source"):
        tasks.TASKS["cifar10-resnet20"](setting, tmp_path / "features", 3)
    with pytest.raises(NotReadyError, match="pass --weights FILE with resnet56"):
        tasks.TASKS["cifar10-resnet56"](setting, tmp_path / "features", 0)


SIZES = {"train": 30, "test": 20}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return partial(tasks.TOYS["toy"], Setting("smoke"), folder)


def test_a_cell_is_what_the_detector_gives_for_the_features(toy, tmp_path):
    task = toy(0)
    done = cell("KNN", ROWS["KNN"], Fitted(task), tmp_path)
    detector = kedge.KNN(task.network, k=3).fit(task.train).calibrate(task.held_out)
    known, (near,) = detector(task.test), task.near
    unknown = detector.score(near)
    truth = [0] * len(known) + [1] * len(unknown)
    assert done.result["sets"][near.name]["auroc"] == pytest.approx(
        roc_auc_score(truth, torch.cat([known.score, unknown]))
    )
    assert done.result["id"]["flagged"] == float(known.is_ood.double().mean())
    assert done.result["id"]["accuracy"] == float((known.label == task.test.labels).double().mean())
    torch.testing.assert_close(done.scores[near.name], unknown)


def test_a_finished_cell_is_read_and_one_of_other_options_or_images_is_refused(toy, tmp_path, monkeypatch):
    first = cell("KNN", ROWS["KNN"], Fitted(toy(0)), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(kedge.KNN, "fit", None)
        assert cell("KNN", ROWS["KNN"], Fitted(toy(0)), tmp_path).result == first.result
        with pytest.raises(InputError, match="other row than"):
            cell("KNN", Row("knn", {"k": 4}), Fitted(toy(0)), tmp_path)
        changed = dataclasses.replace(toy(0), test=toy(0).test.subset(range(9)))
        with pytest.raises(InputError, match="other images than"):
            cell("KNN", ROWS["KNN"], Fitted(changed), tmp_path)


def test_columns_means_and_shortfalls_are_those_of_the_definition(toy, tmp_path):
    rows = ROWS | {"both": Row("both", parts=("msp", "knn"))}
    results = run_rows(ROWS, {"toy": toy}, (0, 1), tmp_path).results
    results = {**results, "both": results["Energy"]}
    table = MethodTable(results, tuple(ROWS))
    assert table.columns == (("toy", "near"), ("toy", "far"))

    def value(label, seed, group):
        result = results[label]["toy"][str(seed)]
        return np.mean([result["sets"][name]["auroc"] for name in result["groups"][group]])

    expected = {
        label: max(
            max(np.mean([value(other, seed, group) for seed in (0, 1)]) for other in ROWS)
            - np.mean([value(label, seed, group) for seed in (0, 1)])
            for group in ("near", "far")
        )
        for label in rows
    }
    for label in rows:
        assert table.worst(label)[1] == pytest.approx(expected[label])
        means = [np.mean([value(label, seed, group) for group in ("near", "far")]) for seed in (0, 1)]
        assert table.mean(label).values == pytest.approx(means)
    assert [row[0] for row in table.summary().rows] == sorted(expected, key=expected.get)
    again = MethodTable.from_record(json.loads(json.dumps(table.as_dict())))
    assert again.by_column() == table.by_column()


def made_up(aurocs):
    """A table of rows by task and seed with these AUROCs, near and far alike."""

    def result(value):
        sets = {group: {"auroc": value, "fpr95": 1 - value} for group in ("near", "far")}
        return {"sets": sets, "groups": {group: [group] for group in sets}}

    rows = {
        label: {
            task: {str(seed): result(value) for seed, value in enumerate(values)} for task, values in by_task.items()
        }
        for label, by_task in aurocs.items()
    }
    return MethodTable(rows, ("knn", "gen"))


def test_private_sets_are_in_no_table_but_their_own():
    values = {"tiny-imagenet (OpenOOD)": 0.7, "traffic signs": 0.8, "scenes": 0.5, "MNIST (RGB)": 0.9}
    near, *far = values
    result = {
        "sets": {name: {"auroc": auroc, "fpr95": 1 - auroc} for name, auroc in values.items()},
        "groups": {"near": [near], "far": far},
    }
    table = MethodTable({"knn": {"cifar10-resnet20": {"0": result}}}, ("knn",))
    assert table.public().mean("knn").values == (pytest.approx((0.7 + 0.85) / 2),)
    assert table.as_dict()["summary"]["knn"]["mean auroc"] == table.public().mean("knn").values
    shown = by_set(table)
    assert shown.heads[-2:] == ("cifar10-resnet20: scenes (private)", "cifar10-resnet20: MNIST (RGB)")
    assert shown.rows == (("knn", "70.0 / 30", "80.0 / 20", "50.0 / 50", "90.0 / 10"),)
    assert by_set(made_up({"knn": {"pets": [0.9]}})) is None


@pytest.mark.parametrize("n", [19, 50, 100, 1000])
def test_the_share_that_a_threshold_flags_has_a_beta_law(n):
    k = int(0.05 * (n + 1) + 1e-9)
    law = stats.beta(k, n + 1 - k)
    assert share_law(n) == pytest.approx((law.mean(), law.std()))


def test_shares_flagged_are_those_of_detectors_calibrated_on_draws(toy):
    (found,) = flagged_shares({"MSP": ROWS["MSP"]}, toy, (1,), draws=3).values()
    assert list(found) == ["50"]  # there are no 100 images
    task = toy(1)
    drawn = torch.randperm(len(task.held_out), generator=torch.Generator().manual_seed(1))[:50]
    detector = kedge.MSP(task.network).fit(task.train).calibrate(task.held_out.subset(drawn))
    assert found["50"]["flagged"][0] == float(detector(task.test).is_ood.double().mean())
    assert len(found["50"]["flagged"]) == 3
    assert found["50"]["threshold on"] == 50
    with_default = flagged_shares({"both": Row("combined", parts=("msp", "knn"))}, toy, (1,), draws=3)
    assert with_default["both"]["50"]["threshold on"] == 20  # 30 standardise


def test_a_rule_is_judged_on_tasks_whose_images_it_was_not_chosen_on():
    table = made_up(
        {
            "knn": {"pets": [0.9], "pets, 5 classes": [0.9], "flowers": [0.6], "120 classes": [0.5], "digits": [0.8]},
            "gen": {"pets": [0.7], "pets, 5 classes": [0.8], "flowers": [0.9], "120 classes": [0.9], "digits": [0.75]},
            "mds++ + gen": {each: [0.8] for each in ("pets", "pets, 5 classes", "flowers", "120 classes", "digits")},
        }
    )
    rows = {row[0]: row[1:] for row in leave_one_out(table).rows}
    assert list(rows) == ["pets", "flowers", "digits"]
    # on flowers and digits gen is 5 points behind at most, the default 10, and knn 30
    assert rows["pets"][:3] == ("gen", "75.0", "20.0")
    # on pets and digits knn is the best
    assert rows["flowers"] == ("knn", "60.0", "30.0", "mds++ + gen", "80.0", "10.0")
    assert rows["digits"] == ("mds++ + gen", "80.0", "0.0", "mds++ + gen", "80.0", "0.0")


def test_differences_are_paired_by_seed():
    table = made_up({"knn": {"pets": [0.8, 0.9]}, "gen": {"pets": [0.7, 0.8]}})
    (row,) = table.less("gen").rows
    assert row[1:] == ("10.00 ± 0.00",) * 3 + ("-10.00 ± 0.00",) * 3


def test_an_interval_is_students():
    values = (0.81, 0.84, 0.9, 0.83, 0.82)
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert interval(SeedValues(values)) == f"{100 * np.mean(values):.1f} ± {50 * (high - low):.1f}"
    assert interval(SeedValues((0.5,))) == "50.0"


def test_single_methods_are_all_that_take_features():
    names = set(single_methods())
    assert {"msp", "energy", "gen", "knn", "vim", "mds++", "rmds", "react"} <= names
    assert not {"odin", "gram", "amp", "tta", "mc_dropout"} & names


def test_the_study_runs_at_the_smoke_scale_and_reads_what_is_there(tmp_path, monkeypatch):
    options = ["default", "--scale", "smoke", "--seeds", "2", "--out", tmp_path]
    options += [word for pattern in ("m*", "gen", "mds++ + gen") for word in ("--rows", pattern)]
    result = run_cli("reproduce", *options, columns=200)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert list(record["results"]["gen"]["toy"]) == ["0", "1"]
    assert record["record"]["seeds"] == [0, 1]
    assert "| mds++ |" in (tmp_path / "tables.md").read_text()
    assert "mds++ + gen" in record["summary"]
    assert "mds++ + gen" not in record["single"]
    assert (tmp_path / "worst-against-mean.svg").read_text().startswith("<?xml")
    monkeypatch.setattr(kedge.detectors.MSP, "fit", None)
    assert "tables.md does: choose another name" in str(run_cli("reproduce", *options).exception)
    again = run_cli("reproduce", *options, "--overwrite", columns=200)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "metrics.json").read_text())["summary"] == record["summary"]


def test_a_study_without_data_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.studies.tasks.TASKS", {"pets": tasks.TASKS["pets"]})
    result = run_cli("reproduce", "default", "--out", tmp_path / "out", "--data-dir", tmp_path, "--rows", "msp")
    assert isinstance(result.exception, NotReadyError)
    assert "put them into" in str(result.exception)


def test_few_images_and_other_conditions_are_parts_of_a_photo_task(photographs, tmp_path):
    task = photo_tasks.photo_task(
        "pets", photographs, tmp_path / "features", 0, variant=photo_tasks.Variant(per_class=3), shifted=True
    )
    assert task.train.labels.bincount().tolist() == [3, 3]
    assert [part.name for part in task.shifted] == [f"pets, {name}" for name in SHIFTS]
    for part in task.shifted:
        assert part.labels.equal(task.test.labels)
        assert not part.prints.equal(task.test.prints)
    result = cell("MSP", ROWS["MSP"], Fitted(task), tmp_path / "cells", alpha=0.25).result
    assert list(result["shifted"]) == [f"pets, {name}" for name in SHIFTS]
    assert set(result["sets"]) == {"pets, other classes", *task.groups["far"]}


def test_variants_of_a_photo_task_have_fewer_classes_or_other_features(photographs, tmp_path):
    def task(name="pets", seed=0, **options):
        variant = photo_tasks.Variant(**options)
        return photo_tasks.photo_task(name, photographs, tmp_path / "features", seed, variant=variant, title="varied")

    whole = task()
    grouped = task(groups=2)
    assert grouped.train.classes == ("group 0", "group 1")
    assert grouped.test.prints.equal(whole.test.prints)
    every = task(photo_tasks.TOGETHER)
    assert every.train.classes == tuple(f"{name}: {each}" for name in photo_tasks.PHOTOS for each in ("ash", "cox"))
    assert every.groups == {"near": ("photographs, other classes",), "far": ("textures",)}
    assert len(every.train) == 3 * len(whole.train)
    assert len(every.near[0]) == 60
    few = task(photo_tasks.TOGETHER, classes=2)
    names = [every.train.classes.index(each) for each in few.train.classes]
    assert few.test.labels.bincount().tolist() == every.test.labels.bincount(minlength=6)[names].tolist()
    counts = whole.train.labels.bincount()
    assert task(unbalanced=True).train.labels.bincount().tolist() == [counts[0], -(-counts[1] // 10)]
    projected = task(width=5)
    assert projected.train.features.shape == (len(whole.train), 5)
    assert projected.train.logits.argmax(dim=1).eq(projected.train.labels).float().mean() > 0.8
    assert cell("KNN", ROWS["KNN"], Fitted(projected), tmp_path / "cells", alpha=0.25).result["images"]["fit"] == len(
        whole.train
    )


@pytest.mark.parametrize("layer", ["", "first layer"])
def test_a_fine_tuned_task_trains_the_whole_network_on_the_same_split(photographs, tmp_path, monkeypatch, layer):
    monkeypatch.setattr(photo_tasks, "SIDE", 12)
    monkeypatch.setattr(photo_tasks, "MOST_OTHERS", 7)
    monkeypatch.setitem(photo_tasks.LAYERS, "first layer", "prep.0")
    frozen = photo_tasks.photo_task("pets", photographs, tmp_path / "features", 0)
    task = photo_tasks.finetuned_task("pets", photographs, tmp_path / "features", 0, layer=layer, shifted=True)
    assert task.name == ("pets, fine-tuned, first layer" if layer else "pets, fine-tuned")
    assert task.test.prints.equal(frozen.test.prints)
    assert [len(each) for each in (*task.near, *task.far)] == [7] * 5
    assert isinstance(task.network, kedge.Anchored) == bool(layer)
    assert task.network.record["recipe"]["layer_rates"] is not None
    assert len(task.shifted) == len(SHIFTS)
    row = Row("amp", {"score": "tau"}) if layer else ROWS["MSP"]
    assert 0 <= cell("row", row, Fitted(task), tmp_path / "cells", alpha=0.25).result["id"]["aurc"] <= 1


def test_conditions_change_what_they_name():
    grey = kedge.ImageSet(torch.full((1, 3, 40, 40), 100, dtype=torch.uint8))
    edge = kedge.ImageSet(torch.cat([torch.zeros(1, 3, 40, 20), torch.full((1, 3, 40, 20), 200)], dim=3).byte())
    assert shifted_images(grey, "dimmed").images.unique().tolist() == [40]
    assert shifted_images(grey, "rotated").images.unique().tolist() == [100]  # no black corners
    row = shifted_images(edge, "blurred").images[0, 0, 20].int()
    assert (row[18:22].diff() > 0).all()
    noise = kedge.ImageSet(images(1, side=40))
    assert not shifted_images(noise, "compressed").images.equal(noise.images)


def test_the_study_of_photographs_runs_with_fewer_images_to_fit_and_to_calibrate_on(tmp_path):
    rows = [word for pattern in ("msp", "mds++", "mds++ + gen") for word in ("--rows", pattern)]
    result = run_cli("reproduce", "photos", "--scale", "smoke", "--out", tmp_path, *rows, columns=200)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "metrics.json").read_text())
    few = record["50 held out"]["results"]["msp"]["toy"]["0"]
    assert few["images"]["calibration"] == 50
    assert record["frozen"]["results"]["msp"]["toy"]["0"]["images"]["calibration"] == 96
    flagged = [record["50 held out"]["results"]["msp"][name]["0"]["id"]["flagged"] for name in ("toy", "toys")]
    text = (tmp_path / "tables.md").read_text()
    assert f"/ {50 * sum(flagged):.1f} ± {100 * np.std(flagged, ddof=1):.1f}" in text


def test_without_reduced_copies_a_task_reads_the_official_set_and_the_result_says_which(photographs, tmp_path):
    shutil.rmtree(tmp_path / "photos" / "pets")
    with pytest.raises(NotReadyError, match="kedge data get oxford-pets"):
        tasks.TASKS["pets"](photographs, tmp_path / "features", 0)
    home = tmp_path / "oxford-pets"
    for part in ("images", "annotations"):
        (home / part).mkdir(parents=True)
    files = [f"{breed}_{number}" for breed in ("ash", "bay", "cox", "dog") for number in range(10)]
    for number, file in enumerate(files):
        picture(number, (70, 80)).save(home / "images" / f"{file}.jpg")
    lines = [f"{file} 1 1 1" for file in files]
    for part, chosen in (("trainval", lines[::2]), ("test", lines[1::2])):
        (home / "annotations" / f"{part}.txt").write_text("\n".join(chosen))
    task = tasks.TASKS["pets"](photographs, tmp_path / "features", 0)
    assert task.train.classes == ("ash", "cox")
    assert (task.test.name, task.groups["near"]) == ("oxford-pets", ("oxford-pets, other classes",))
    assert task.groups["far"][0] == "flowers"
    used = used_photographs(tmp_path)
    assert used["pets"] == "the official set, oxford-pets"
    assert used["flowers"] == "reduced copies, photos/flowers"


def test_imagenette_stands_for_imagenet_s_other_classes_without_its_dogs(tmp_path):
    for wnid in ("n01440764", "n02102040"):
        (tmp_path / "imagenette-320" / "imagenette2-320" / "val" / wnid).mkdir(parents=True)
        picture(0, (90, 80)).save(tmp_path / "imagenette-320" / "imagenette2-320" / "val" / wnid / f"{wnid}_1.JPEG")
    images = photos("imagenet-others", tmp_path)
    assert (images.name, images.store.names) == ("imagenette-320", ("n01440764/n01440764_1.JPEG",))
