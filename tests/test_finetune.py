"""Fine-tuning a pretrained network on photographs: rates by layer, automatic batches, crops, and the command."""

import copy
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import kedge
from helpers import StopError, TwoHeads, colors, labelled, network, run_cli, same_weights, stop_at
from kedge.data import Preprocess
from kedge.errors import InputError
from kedge.io import artifact
from kedge.models.classifier import Classifier
from kedge.seeds import seeded
from kedge.training import RECIPES, Recipe, recipe, train
from kedge.training.augment import resized_crops, uniforms
from kedge.training.engine import make_engine
from kedge.training.loader import AugmentedDataset, SetLoader
from kedge.training.optimizers import make_optimizer
from kedge.training.probe import activation_bytes, auto_batch, layer_depths


def small(classes: int = 3) -> Classifier:
    """Two convolutions with batch norms whose statistics are not those of a fresh network."""
    with seeded(0):
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
        for norm in (net[1], net[4]):
            norm.running_mean.uniform_(-0.2, 0.2)
    return Classifier(net, mean=0.4, std=0.25)


# Learning rates.


def test_layers_are_ordered_as_a_pass_calls_them_not_as_they_are_registered():
    depths = layer_depths(Classifier(TwoHeads()), (4,))
    assert depths == {f"network.{name}": depth for name, depth in (
        ("head.weight", 1), ("head.bias", 1), ("body.weight", 0), ("body.bias", 0)
    )}  # fmt: skip


def test_parameters_that_no_layer_of_their_own_uses_count_with_the_module_around_them():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.embed = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)  # does not call its out_proj
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), 1, 4), self.embed(x)], dim=1)
            return self.head(self.attention(x, x, x)[0][:, 0])

    depths = layer_depths(Classifier(Attention()), (3, 4))
    assert depths["network.token"] == 0
    assert depths["network.embed.weight"] == 1
    assert depths["network.attention.out_proj.weight"] == depths["network.attention.in_proj_weight"] == 2
    assert depths["network.head.bias"] == 3


def test_rates_rise_geometrically_from_the_first_layer_and_the_head_has_the_highest():
    net = small()
    how = Recipe(epochs=1, lr=0.1, optimizer="adam", weight_decay=0.3, layer_rates=(0.01, 0.08))
    groups = make_optimizer(net, how, (3, 8, 8)).param_groups
    names = {id(weight): name for name, weight in net.network.named_parameters()}
    found = {
        names[id(weight)]: (group["scale"], group["weight_decay"]) for group in groups for weight in group["params"]
    }
    expected = {"0": 0.01, "1": 0.02, "3": 0.04, "4": 0.08, "8": 1.0}
    assert found.keys() == {f"{layer}.{kind}" for layer in expected for kind in ("weight", "bias")}
    for name, (scale, decay) in found.items():
        assert scale == pytest.approx(expected[name[0]])
        assert decay == (0.3 if name in ("0.weight", "3.weight", "8.weight") else 0.0)


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_looking_at_a_network_changes_nothing_in_it(kind):
    net = network(kind, classes=3).train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    depths = layer_depths(net, (3, 8, 8))
    assert activation_bytes(net, (3, 8, 8)) > 0
    first, head = min(depths, key=depths.get), max(depths, key=depths.get)
    assert first.startswith(f"network.{net.layer}" if kind == "anchored" else "network.")
    assert head.startswith("network.fc")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_training_follows_these_rates():
    """One step of AdamW moves each weight by its rate, whatever the gradient's size."""
    net, before = small(), small()
    how = recipe("finetune", epochs=1, lr=0.01, weight_decay=0.0, layer_rates=(0.02, 0.3), ema=None, head_first=False)
    train(net, colors(12), how)
    rate = how.rate(0.5)
    moved = {
        name: float((after - start).detach().abs().max())
        for (name, after), start in zip(net.network.named_parameters(), before.network.parameters(), strict=True)
    }
    low, high = how.layer_rates
    assert moved["0.weight"] == pytest.approx(rate * low, rel=0.01)
    assert moved["4.weight"] == pytest.approx(rate * high, rel=0.01)
    assert moved["8.weight"] == pytest.approx(rate, rel=0.01)


def test_a_recipe_checks_the_new_fields():
    for options in (
        {"batch": "all"}, {"layer_rates": (0.1, 1.0)}, {"layer_rates": (0.0, 1.0), "optimizer": "adam"},
        {"layer_rates": (1.0,), "optimizer": "adam"}, {"smallest_crop": 2},
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"{next(iter(options))} must"):
            Recipe(**{"epochs": 1} | options)
    assert Recipe(epochs=1, optimizer="adam", layer_rates=[0.1, 0.2]).layer_rates == (0.1, 0.2)


# Batches.


def test_activations_are_the_tensors_that_the_gradients_need():
    layers = nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
    assert activation_bytes(Classifier(nn.Sequential(*layers)), (3, 2, 2)) == 4 * (12 + 8)


@pytest.mark.parametrize(("images", "batch"), [(2, 2), (5, 5), (16, 16), (300, 16), (1000, 31), (5000, 64)])
def test_the_automatic_batch_follows_the_number_of_images(images, batch):
    assert auto_batch(images, small(), (3, 8, 8)) == batch


def test_the_automatic_batch_fits_into_memory(monkeypatch):
    needed = activation_bytes(small(), (3, 8, 8))
    monkeypatch.setattr("kedge.training.probe.memory", lambda: 4 * 21 * needed)
    assert auto_batch(5000, small(), (3, 8, 8)) == 21
    assert auto_batch(5000, small(), (3, 8, 8), world=2) == 42
    monkeypatch.setattr("kedge.training.probe.memory", lambda: 1)
    assert auto_batch(5000, small(), (3, 8, 8)) == 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("in_memory", [True, False])
def test_automatic_batches_hold_every_image_once_and_are_of_equal_size(world, in_memory):
    data = labelled(53, classes=4)
    data = data if in_memory else list(data)
    how = recipe("finetune", resized_crop=False, flip=False)
    loaders = [SetLoader(data, how, 0, rank, world, 0, Preprocess((3, 8, 8)), 16) for rank in range(world)]
    steps = list(zip(*(loader.epoch(1, 0) for loader in loaders), strict=True))
    assert [sum(len(part.x) for part in step) for step in steps] == [14, 13, 13, 13]
    assert torch.cat([part.index for step in steps for part in step]).sort().values.tolist() == list(range(53))
    for step in steps:
        for part in step:
            assert torch.equal(part.among[part.first : part.first + len(part.x)], part.x)
            assert torch.equal(part.x, torch.stack([data[int(i)][0] for i in part.index]) / 255)
    assert loaders[0].batch == 14


# Crops.


def test_crops_of_tensors_show_the_part_that_the_draw_chooses():
    """An image whose pixels are their own coordinates shows where the crop was taken."""
    ramp = (torch.arange(32) + 0.5).expand(32, 32)
    image = torch.stack([ramp, ramp.T])[None] / 32  # (1, 2, H, W): column and row of each pixel, in [0, 1]
    draws = torch.tensor([[0.25, 0.5, 0.5, 0.2]])  # area, aspect ratio, left, top
    side = math.sqrt(0.2 + 0.8 * 0.25)  # aspect ratio 1
    inside = (torch.arange(32) + 0.5) / 32 * side
    crop = resized_crops(image, draws, 0.2)[0]
    torch.testing.assert_close(crop[0, 9], 0.5 * (1 - side) + inside, atol=1e-5, rtol=0)
    torch.testing.assert_close(crop[1, :, 9], 0.2 * (1 - side) + inside, atol=1e-5, rtol=0)
    whole = labelled(4).images
    assert torch.equal(resized_crops(whole, torch.tensor([[1.0, 0.5, 0.0, 0.0]]).expand(4, 4), 0.5), whole)


def test_pictures_are_cropped_once_and_upright():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (60, 90, 3), dtype=np.uint8)
    how = Recipe(epochs=1, crop=0, flip=False, resized_crop=True)
    plain, closer = (
        AugmentedDataset([(Image.fromarray(pixels), 0)], Preprocess((3, 16, 16), crop=crop), how, seed=0)
        for crop in (1.0, 0.5)
    )
    assert torch.equal(plain[3, 0][0], closer[3, 0][0])
    gray = AugmentedDataset([(Image.fromarray(pixels).convert("P"), 0)], Preprocess((1, 16, 16)), how, seed=0)
    assert gray[3, 0][0].shape == (1, 16, 16)


def test_sets_in_memory_and_tensors_are_cropped_too():
    how, to = Recipe(epochs=1, crop=0, flip=False, resized_crop=True), Preprocess((3, 8, 8))
    data = labelled(6)
    batch = AugmentedDataset(data, to, how, seed=2).__getitems__([(1, 4), (1, 5)])[0]
    single = AugmentedDataset(list(data), to, how, seed=2)[1, 4][0]
    expected = resized_crops(data.images[4:5], uniforms(2, 1, torch.tensor([4]), 40), 0.08)[0]
    assert torch.equal(single, expected)
    assert torch.equal(batch[0], expected / 255)
    assert not torch.equal(expected, data.images[4])


# Training.


def test_frozen_norms_keep_their_statistics_and_take_a_single_image():
    net = small()
    before = copy.deepcopy(net.state_dict())
    train(net, colors(17), recipe("finetune", epochs=2), validation=colors(20, seed=1))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]) == (
            "running" in name or "num_batches" in name or name in ("mean", "std")
        )
    train(small(), colors(9), recipe("finetune", epochs=1, batch=2))
    moved = train(small(), colors(17), recipe("finetune", epochs=1, freeze_norms=False))
    assert not torch.equal(moved.network[1].running_mean, before["network.1.running_mean"])


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_a_stopped_run_resumes_with_bit_identical_weights(tmp_path, kind):
    def net():
        return kedge.anchor(small()) if kind == "anchored" else small()

    data, how = colors(53), recipe("finetune", epochs=2)
    with pytest.raises(StopError):
        train(net(), data, how, directory=tmp_path, checkpoint_seconds=0.0, progress=stop_at(6))
    resumed = train(net(), data, how, directory=tmp_path)
    assert same_weights(resumed, train(net(), data, how))
    assert (resumed.record["recipe"]["batch"], resumed.record["batch"]) == ("auto", 14)


def test_a_checkpoint_from_before_the_new_fields_resumes(tmp_path):
    how = Recipe(epochs=2, batch=16, lr=0.05)
    with pytest.raises(StopError):
        train(small(), colors(64), how, directory=tmp_path, checkpoint_seconds=0.0, progress=stop_at(6))
    header, tensors = artifact.read(tmp_path / "last.ckpt")
    for name in ("layer_rates", "head_first", "freeze_norms", "smallest_crop"):
        del header["run"]["recipe"][name]
    artifact.write(tmp_path / "last.ckpt", header, tensors)
    assert same_weights(train(small(), colors(64), how, directory=tmp_path), train(small(), colors(64), how))
    with pytest.raises(InputError, match=r"recipe\.freeze_norms was False and is True"):
        train(small(), colors(64), recipe(how, freeze_norms=True), directory=tmp_path)


def test_the_best_device_takes_networks_from_the_cpu_alone(monkeypatch):
    moves = []
    net = small()
    monkeypatch.setattr(net, "to", moves.append)
    make_engine(1, 1, "auto", None).place(net)
    make_engine(1, 1, "cpu", None).place(net)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    make_engine(1, 1, "auto", None).place(net)
    make_engine(1, 1, "cpu", None).place(net)
    elsewhere = small().to("meta")
    make_engine(1, 1, "auto", None).place(elsewhere)
    assert moves == ["cpu", "cuda", "cpu"]
    assert elsewhere.mean.device.type == "meta"


def test_the_head_is_trained_first_and_on_its_own():
    alone = kedge.training.frozen.train_head(small(), colors(60), preprocess=Preprocess((3, 8, 8)), seed=4)
    first = train(small(), colors(60), recipe("finetune", epochs=1, lr=1e-12), seed=4)
    for one, other in zip(alone.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert first.record["before"] == []
    without = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.Identity(), nn.Softplus())  # not a linear last layer
    assert train(without, colors(30), recipe("finetune", epochs=1)).record["epochs"] == 1


# The command.


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Three hundred photographs of three colors, larger than sets in memory, and a small network to import."""
    for number, (image, label) in enumerate(colors(300, side=24)):
        folder = tmp_path / "photos" / "rgb"[label]
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((70, 80 + number % 9))
        picture.save(folder / f"{number:03}.jpg")
    (tmp_path / "tiny_factory.py").write_text(
        "from test_finetune import small\n\n\ndef build():\n    return small(5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return ["train", f"folder:{tmp_path}/photos", "--network", "tiny_factory:build", "--size", 32, "--workers", 2]


def test_three_hundred_photographs_are_enough(photos, tmp_path):
    for number in (3, 100):
        (next((tmp_path / "photos").glob(f"*/{number:03}.jpg"))).write_bytes(b"damaged")
    done = run_cli(*photos, "--pretrained", "--epochs", 1, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.exception
    for words in ("held-out accuracy", "flagged", "kedge score", "kedge serve", "003.jpg", "100.jpg"):
        assert words in done.output
    detector = kedge.load(tmp_path / "run" / "detector.kedge")
    record = detector.net.record
    assert record["recipe"] | {"epochs": 1, "batch": "auto", "resized_crop": True} == record["recipe"]
    assert (record["batch"], record["data"]["images"]) == (16, 240)
    assert record["held_out"]["judged"] in (29, 30)
    assert not isinstance(detector.net, kedge.Anchored)
    assert detector.preprocess.shape == (3, 32, 32)
    assert detector.classes == ("b", "g", "r")


def test_the_defaults_depend_on_whether_the_network_is_trained_already(photos, tmp_path):
    save_file(small(3).network.state_dict(), tmp_path / "a.safetensors")
    weights = ("--weights", tmp_path / "a.safetensors", "--epochs", 1)
    frozen = run_cli(*photos, *weights, "--freeze", "--out", tmp_path / "frozen")
    assert frozen.exit_code == 0, frozen.exception
    assert "held-out accuracy" in frozen.output
    assert kedge.load(tmp_path / "frozen" / "detector.kedge").net.record["recipe"]["freeze"]
    anchored = run_cli(*photos, "--pretrained", "--anchor", "--epochs", 1, "--out", tmp_path / "anchored")
    assert anchored.exit_code == 0, anchored.exception
    detector = kedge.load(tmp_path / "anchored" / "detector.kedge")
    assert isinstance(detector, kedge.AMP)
    assert detector.net.record["recipe"]["layer_rates"] == list(RECIPES["finetune"].layer_rates)
    fresh = run_cli(*photos, "--epochs", 1, "--batch", 64, "--out", tmp_path / "fresh")
    assert fresh.exit_code == 0, fresh.exception
    detector = kedge.load(tmp_path / "fresh" / "detector.kedge")
    assert (type(detector), detector.net.record["recipe"]["optimizer"]) == (kedge.AMP, "sgd")
