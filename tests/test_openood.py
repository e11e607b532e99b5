"""OpenOOD v1.5: its image lists, its checkpoints, its full spectrum and its leaderboard."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

import kedge
from helpers import picture, run_cli
from kedge.detectors.registry import named_methods, post_hoc
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import SeedSummary, evaluate
from kedge.evaluation.protocol import full_spectrum
from kedge.models.named import load_weights
from kedge.studies import STUDIES, Setting
from kedge.studies.leaderboard import STANDARD_TRAINING, group_tables, leaderboard, leaderboard_methods
from kedge.studies.openood import BENCHMARKS
from kedge.studies.plan import Board, MethodPlan, NetworkPlan, Suite
from kedge.studies.run import SuiteRun
from kedge.studies.study import smoke_data

reproduce = partial(run_cli, "reproduce", columns=400)
BOARDS = (*BENCHMARKS, "imagenet200 full-spectrum", "imagenet full-spectrum")


def write_list(home, benchmark, stem, labels, *, root="images_classic", size=(32, 32), seed=0):
    """A list of OpenOOD and its images; every set has other images."""
    lines = []
    for number, label in enumerate(labels):
        file = home / root / stem / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(1000 * (seed + sum(map(ord, stem))) + number, size).save(file)
        lines.append(f"{stem}/{number}.png {label}\n")
    path = home / "benchmark_imglist" / benchmark / f"{stem}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


@pytest.fixture
def cifar(tmp_path):
    """OpenOOD's data folder for CIFAR-10 with a few images of each set."""
    home = tmp_path / "data"
    for split, count in (("train", 40), ("val", 20), ("test", 20)):
        write_list(home, "cifar10", f"{split}_cifar10", [n % 10 for n in range(count)])
    for name in ("cifar100", "tin", "mnist", "svhn", "texture", "places365"):
        write_list(home, "cifar10", f"test_{name}", [-1] * 6, size=(64, 64) if name == "tin" else (32, 32))
    write_list(home, "cifar10", "test_cifar10c", [n % 10 for n in range(20)])
    write_list(home, "cifar10", "val_tin", [-1] * 6, size=(64, 64))
    return home


def data_of(name, home, scale="full", **setting):
    (suite,) = STUDIES[f"openood-{name}"](Setting(scale, data_dir=home, **setting)).suites
    return suite.data(0)


# Lists.


def test_sets_are_those_of_the_official_lists(cifar):
    data = data_of("cifar10", cifar)
    assert [len(data.train), len(data.held_out), len(data.test)] == [40, 20, 20]
    assert data.test.labels.tolist() == [n % 10 for n in range(20)]
    assert [s.name for s in data.ood] == ["cifar100", "tin", "mnist", "svhn", "texture", "places365"]
    assert all(s.labels is None and s.images.shape == (6, 3, 32, 32) for s in data.ood)
    assert [(s.name, len(s.labels)) for s in data.shifted] == [("cifar10c", 20)]
    assert (data.outliers.name, len(data.outliers), data.missing) == ("tin validation", 6, {})


def test_images_are_scaled_by_the_bilinear_filter_as_in_openood(cifar):
    tin = next(s for s in data_of("cifar10", cifar).ood if s.name == "tin")
    with Image.open(cifar / "images_classic" / "test_tin" / "0.png") as image:
        expected = np.array(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(tin.images[0].permute(1, 2, 0), expected)


def test_the_data_folder_may_hold_the_lists_in_a_folder_of_their_own(cifar, tmp_path):
    (tmp_path / "sets").mkdir()
    cifar.rename(tmp_path / "sets" / "openood")
    assert len(data_of("cifar10", tmp_path / "sets").test) == 20


def test_an_image_that_is_tested_is_not_calibrated_on(cifar):
    for split in ("val", "test"):
        picture(7, (32, 32)).save(cifar / "images_classic" / f"{split}_cifar10" / "3.png")
    data = data_of("cifar10", cifar)
    assert (len(data.held_out), len(data.test)) == (19, 20)


def test_missing_ood_sets_are_named_and_missing_known_images_are_an_error(cifar, tmp_path):
    (cifar / "benchmark_imglist" / "cifar10" / "test_svhn.txt").unlink()
    (cifar / "images_classic" / "test_mnist" / "0.png").unlink()
    data = data_of("cifar10", cifar)
    assert [s.name for s in data.ood] == ["cifar100", "tin", "texture", "places365"]
    assert "test_svhn.txt is not here" in data.missing["svhn"]
    assert "test_mnist/0.png" in data.missing["mnist"]
    (cifar / "images_classic" / "test_cifar10" / "0.png").unlink()
    with pytest.raises(NotReadyError, match=r"test_cifar10/0\.png"):
        data_of("cifar10", cifar)
    with pytest.raises(NotReadyError, match=r"benchmark_imglist.* --data-dir"):
        data_of("cifar10", tmp_path / "empty")


def test_imagenet_is_cropped_but_for_imagenet_c_and_its_textures_are_among_the_classic_images(tmp_path):
    write = partial(write_list, tmp_path, "imagenet", root="images_largescale")
    for split in ("train", "val", "test"):
        write(f"{split}_imagenet", [0, 999], size=(320, 256))
    for name in ("ssb_hard", "ninco", "inaturalist", "openimage_o"):
        write(f"test_{name}", [-1], size=(256, 256))
    write_list(tmp_path, "imagenet", "test_textures", [-1], size=(256, 256))
    write("val_openimage_o", [-1], size=(256, 256))
    for kind, side in (("v2", 256), ("c", 224), ("r", 256)):
        write(f"test_imagenet_{kind}", [5], size=(side, side))
    data = data_of("imagenet", tmp_path)
    assert [s.name for s in data.ood] == ["ssb_hard", "ninco", "inaturalist", "textures", "openimage_o"]
    assert [s.name for s in data.shifted] == ["imagenet_v2", "imagenet_c", "imagenet_r"]
    assert not data.missing
    assert isinstance(data.train, kedge.data.StreamedSet)  # too large for memory
    for images, file, left, top in (
        (data.test, "test_imagenet/0", 48, 16),
        (data.shifted[1], "test_imagenet_c/0", 0, 0),
        (data.ood[0], "test_ssb_hard/0", 16, 16),
    ):
        with Image.open(tmp_path / "images_largescale" / f"{file}.png") as image:
            cut = image.convert("RGB").crop((left, top, left + 224, top + 224))
        assert np.array_equal(images.images[0].permute(1, 2, 0), np.array(cut))
    assert data.preprocess(data.train.image(0)).shape == (3, 224, 224)


def test_at_the_small_scale_imagenet_is_read_at_the_size_of_the_compact_network(tmp_path):
    write = partial(write_list, tmp_path, "imagenet200", root="images_largescale", size=(80, 60))
    for split in ("train", "val", "test"):
        write(f"{split}_imagenet200", [0, 199])
    data = data_of("imagenet200", tmp_path, "small")
    assert data.test.images.shape == (2, 3, 32, 32) == data.train.images.shape
    assert set(data.missing) >= {"ssb_hard", "textures", "imagenet_c", "openimage_o validation"}


# Checkpoints.


def openood_checkpoint(classes, seed=0):
    """A state dict with the names and shapes of OpenOOD's ResNet18_32x32."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    state = {}

    def norm(name, width):
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.1 * draw(width), 0.1 * draw(width)
        state[f"{name}.running_mean"], state[f"{name}.running_var"] = 0.1 * draw(width), 1 + 0.1 * draw(width).abs()
        state[f"{name}.num_batches_tracked"] = torch.tensor(1)

    def convolution(name, inputs, outputs, side):
        state[f"{name}.weight"] = draw(outputs, inputs, side, side) * (2 / (inputs * side * side)) ** 0.5

    convolution("conv1", 3, 64, 3)
    norm("bn1", 64)
    inputs = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            at = f"layer{layer}.{block}"
            for number, before in ((1, inputs), (2, width)):
                convolution(f"{at}.conv{number}", before, width, 3)
                norm(f"{at}.bn{number}", width)
            if inputs != width:
                convolution(f"{at}.shortcut.0", inputs, width, 1)
                norm(f"{at}.shortcut.1", width)
            inputs = width
    state["fc.weight"], state["fc.bias"] = 0.05 * draw(classes, 512), 0.1 * draw(classes)
    return state


def openood_logits(state, x):
    """The logits of OpenOOD's ResNet18_32x32, by its state dict and functions alone."""

    def step(x, conv, norm, stride=1):
        weight = state[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        parts = (state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts)

    x = F.relu(step(x, "conv1", "bn1"))
    for layer in range(1, 5):
        for block in range(2):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            out = F.relu(step(x, f"{at}.conv1", f"{at}.bn1", stride))
            out = step(out, f"{at}.conv2", f"{at}.bn2")
            x = F.relu(out + (step(x, f"{at}.shortcut.0", f"{at}.shortcut.1", stride) if stride == 2 else x))
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def test_openood_s_resnet18_checkpoints_load_into_kedge_s_network(tmp_path):
    state = openood_checkpoint(10)
    torch.save(state, tmp_path / "best.ckpt")
    net = kedge.models.build("resnet18-cifar").eval()
    load_weights(net, tmp_path / "best.ckpt")
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(net(x), openood_logits(state, x))


def test_weights_take_the_place_of_training_and_cells_belong_to_them(cifar, tmp_path):
    files = [tmp_path / f"s{seed}.ckpt" for seed in range(2)]
    for seed, file in enumerate(files):
        torch.save(openood_checkpoint(10, seed), file)
    run = ("openood-cifar10", "--scale", "full", "--rows", "MSP", "--data-dir", cifar, "--out", tmp_path / "out")
    result = reproduce(*run, "--weights", files[0])
    assert result.exit_code == 0, result.output
    assert "training" not in result.output
    assert not list(tmp_path.rglob("networks/*"))
    numbers = json.loads((tmp_path / "out" / "cifar10" / "metrics.json").read_text())
    assert list(numbers["summary"]) == ["MSP"]
    tables = (tmp_path / "out" / "cifar10" / "tables.md").read_text()
    assert all(f"({number})" in tables for number in (88.03, 90.73, 95.06))
    assert "full-spectrum, in distribution: cifar10, cifar10c" in tables
    with torch.no_grad():
        test = data_of("cifar10", cifar).test
        mean, std = (torch.tensor(values)[:, None, None] for values in BENCHMARKS["cifar10"].statistics)
        logits = openood_logits(openood_checkpoint(10), (test.images / 255 - mean) / std)
    accuracy = float((logits.argmax(1) == test.labels).double().mean())
    assert numbers["seeds"]["0"]["results"]["MSP"]["accuracy"] == pytest.approx(accuracy)
    assert "use --overwrite" in str(reproduce(*run, "--weights", files[0]).exception)
    other = reproduce(*run, "--weights", files[1], "--overwrite")
    assert "msp.cell was made with other networks" in str(other.exception)
    (suite,) = STUDIES["openood-cifar10"](Setting("full", (0, 1), cifar, tuple(files))).suites
    elsewhere = SuiteRun(suite, tmp_path / "meta", training={"accelerator": "meta"})
    assert elsewhere.network("unanchored", 0).network.fc.weight.is_meta
    last = [suite.networks["unanchored"].loaded(seed).network.fc.weight for seed in suite.seeds]
    assert [torch.equal(weight, openood_checkpoint(10, 1)["fc.weight"]) for weight in last] == [False, True]


def test_a_study_that_trains_its_networks_refuses_weights(tmp_path):
    result = reproduce("ablation", "--scale", "smoke", "--out", tmp_path, "--weights", tmp_path / "best.ckpt")
    assert isinstance(result.exception, InputError)
    assert "--weights is for the openood studies" in str(result.exception)


# Methods.


def test_rows_are_the_registered_methods_that_read_one_network_as_it_is():
    (suite,) = STUDIES["openood-cifar10"](Setting("full")).suites
    kinds = {plan.kind.name for plan in suite.methods.values()}
    assert kinds >= {"amp", "msp", "energy", "knn", "vim", "odin", "mahalanobis", "gram", "react"}
    assert not kinds & {"ensemble", "mc_dropout", "svi", "duq", "outlier_exposure", "student", "early_exit"}
    (given,) = STUDIES["openood-cifar10"](Setting("full", weights=("s0",))).suites
    assert {plan.kind.name for plan in given.methods.values()} == kinds - {"amp"}
    assert {plan.networks for plan in given.methods.values()} == {("unanchored",)}


def test_rows_have_their_names_on_the_leaderboard():
    (suite,) = STUDIES["openood-cifar10"](Setting("full")).suites
    named = {label: plan.paper for label, plan in suite.methods.items()}
    assert (named["MSP"], named["Energy"], named["MaxLogit"], named["ViM"]) == ("MSP", "EBO", "MLS", "VIM")
    assert named["Mahalanobis"] is named["AMP (anchored)"] is None


def test_variants_that_differ_by_a_plus_have_cells_of_their_own(tmp_path):
    data = smoke_data(0)
    rows = {label: MethodPlan(kind, ("base",)) for label, kind in (("mds", kedge.MSP), ("mds++", kedge.Energy))}
    base = {"base": NetworkPlan("compact", Setting("smoke").recipe(), {"width": 4, "classes": 4})}
    SuiteRun(Suite("variants", "Variants", base, rows, lambda seed: data), tmp_path).run()
    assert len(list(tmp_path.rglob("*.cell"))) == 2


# The full spectrum and groups.


@pytest.fixture(scope="module")
def evaluation():
    data = smoke_data(0)
    shifted = replace(smoke_data(1).test.subset(range(40)), name="shifted")
    net = kedge.models.build("compact", width=4, classes=4)
    energy = kedge.Energy(net).fit(data.train).calibrate(data.held_out)
    return evaluate({"Energy": energy}, data.test, data.ood, shifted=[shifted])


def test_in_the_full_spectrum_shifted_images_count_as_in_distribution(evaluation):
    every, result = full_spectrum(evaluation).results["Energy"], evaluation.results["Energy"]
    for ood in evaluation.ood_names:
        parts = [result.detections[name].score for name in (evaluation.id_name, "shifted", ood)]
        truth = [0] * (len(parts[0]) + len(parts[1])) + [1] * len(parts[2])
        assert every.detection_value("auroc", ood) == pytest.approx(roc_auc_score(truth, torch.cat(parts)))
    right = [
        int((result.detections[name].label == evaluation.sets[name].labels).sum())
        for name in (evaluation.id_name, "shifted")
    ]
    assert every.accuracy == pytest.approx(sum(right) / (96 + 40))


def test_groups_have_means_of_their_own_beside_the_leaderboard(evaluation):
    (suite,) = STUDIES["openood-imagenet"](Setting("smoke")).suites
    suite = replace(suite, groups={"near": ("toy noise", "toy clouds"), "far": ("toy clouds",)})
    summary = SeedSummary({0: evaluation})
    standard, spectrum = group_tables(summary, replace(suite, board=Board("imagenet", "ResNet50")))
    values = [evaluation.results["Energy"].detection_value("auroc", ood) for ood in ("toy noise", "toy clouds")]
    assert standard.heads[1:3] == ("near AUROC ↑", "far AUROC ↑")
    assert standard.rows[0][1:3] == (f"{50 * sum(values):.1f} (75.89)", f"{100 * values[1]:.1f} (89.47)")
    assert standard.rows[0][-1].endswith("(76.18)")
    assert "(" not in standard.rows[0][3]  # the leaderboard has no other metric
    assert spectrum.rows[0][1].endswith("(56.61)")
    assert spectrum.rows[0][-1].endswith("(54.35)")
    assert "leaderboard of 2025-07-19, ResNet50" in standard.caption
    missing, _ = group_tables(summary, replace(suite, groups={"near": ("toy noise", "svhn"), "far": ("toy clouds",)}))
    assert (missing.rows[0][1], missing.rows[0][2]) == ("", f"{100 * values[1]:.1f}")


# The leaderboard's numbers.


@pytest.mark.parametrize(
    ("board", "training", "method", "network", "near", "far"),
    [
        ("cifar10", "CrossEntropy", "MSP", "ResNet18", 88.03, 90.73),
        ("cifar10", "CrossEntropy", "ASH", "ResNet18", 75.27, 78.49),
        ("cifar10", "RotPred + PixMix", "RotPred", "ResNet18", 94.86, 98.18),
        ("imagenet", "CrossEntropy", "SCALE", "ResNet50", 81.36, 96.53),
        ("imagenet", "CrossEntropy", "ASH", "ViT-B/16", 53.21, 51.56),
        ("imagenet full-spectrum", "CrossEntropy", "ReAct", "ResNet50", 59.93, 82.78),
    ],
)
def test_the_leaderboard_s_numbers_are_as_published(board, training, method, network, near, far):
    (row,) = [r for r in leaderboard(board) if (r.training, r.method, r.network) == (training, method, network)]
    assert (row.near[0], row.far[0]) == (near, far)


@pytest.mark.parametrize("board", BOARDS)
def test_a_board_has_one_row_for_each_method_training_and_network(board):
    rows = leaderboard(board)
    assert len({(r.training, r.method, r.network) for r in rows}) == len(rows) > 50
    for row in rows:
        assert all(20 < values[0] < 100 for values in (row.near, row.far, row.accuracy or (50,)))
    benchmark = BENCHMARKS[board.partition(" ")[0]]
    standard = {r.method for r in rows if (r.training, r.network) == (STANDARD_TRAINING, benchmark.board)}
    assert {"MSP", "KNN", "VIM", "ReAct"} <= standard


def test_every_post_hoc_method_of_the_leaderboard_is_mapped_or_not_in_kedge():
    listed = {r.method for board in BOARDS for r in leaderboard(board) if r.training == STANDARD_TRAINING}
    assert listed - set(leaderboard_methods()) == {"CombOOD", "MDSEns", "OTOD", "OpenGAN", "Relation", "i-ODIN"}
    assert set(leaderboard_methods()) <= listed
    for method in leaderboard_methods().values():
        if method in named_methods():
            assert method in post_hoc()
