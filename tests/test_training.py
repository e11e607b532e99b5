"""Training: recipes by hand, augmentation against a loop, and runs that their seed repeats to the last bit."""

import copy
import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import kstest
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import kedge
from helpers import colors, flat, labelled, same_weights
from kedge.errors import InputError, KedgeError, KedgeWarning
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import RECIPES, Recipe, recipe, statistics, train
from kedge.training.augment import augment, crop_and_flip, uniforms
from kedge.training.loader import AugmentedDataset, make_loader

SHORT = Recipe(epochs=2, batch=16, lr=0.05, crop=1)
KINDS = ("unanchored", "anchored")


def network(kind="unanchored", name="compact", classes=3, **options) -> nn.Module:
    sizes = {"compact": {"width": 4}, "wrn": {"depth": 10, "width": 1, "dropout": 0.3}}[name]
    with seeded(0):
        net = build(name, classes=classes, **sizes)
    return kedge.anchor(net, every=2, **options) if kind == "anchored" else net


class Watch(nn.Module):
    """A linear network that keeps its inputs."""

    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(192, 3), []

    def forward(self, x):
        self.seen.append(x.detach())
        return self.fc(x.flatten(1))

    def pixels(self):
        return [image.numpy().tobytes() for image in (torch.cat(self.seen) * 255).round().to(torch.uint8)]


# Runs.


RUNS = [*((kind, name, {}) for kind in KINDS for name in ("compact", "wrn"))]
RUNS += [("anchored", "compact", {"variant": "recommended"})]


@pytest.mark.parametrize(("kind", "name", "options"), RUNS)
def test_the_seed_alone_determines_a_run_to_the_last_bit(kind, name, options):
    runs = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        runs.append(train(network(kind, name, **options), colors(), SHORT, seed=seed))
        assert torch.get_rng_state().equal(state)  # torch's global generator is restored
    assert same_weights(runs[0], runs[1])
    assert not same_weights(runs[0], runs[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_is_trained_in_place_learns_and_is_returned_as_a_classifier(kind):
    net, test = network(kind), colors(60, seed=1)
    before = copy.deepcopy(net)
    trained = train(net, colors(96), Recipe(epochs=8, batch=16, lr=0.1, schedule="one-cycle", crop=1))
    assert isinstance(trained, kedge.Classifier)
    assert net in (trained, trained.network)
    assert not trained.training
    assert not same_weights(before, net)
    with torch.no_grad():
        assert (trained(test.images).argmax(dim=1) == test.labels).double().mean() > 0.9
    assert train(trained, colors(), SHORT) is trained


def naive_sgd(net, data, how, losses):
    """Full-batch SGD with momentum and weight decay, by its definition."""
    mean, std = (v[:, None, None] for v in statistics(data))
    x = (data.images.double() / 255 - mean) / std
    momentum = [torch.zeros_like(p) for p in net.parameters()]
    for epoch in range(how.epochs):
        log_p = net(x).log_softmax(dim=1)
        right, classes = log_p[torch.arange(len(x)), data.labels], log_p.shape[1]
        smooth = how.label_smoothing
        loss = -((1 - smooth) * right + smooth * log_p.sum(dim=1) / classes).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g, v in zip(net.parameters(), gradients, momentum, strict=True):
                g = g + how.weight_decay * p
                v.mul_(how.momentum).add_(g)
                p -= how.rate(epoch + 0.5) * (g + how.momentum * v if how.nesterov else v)


OPTIONS = [
    {}, {"momentum": 0.0}, {"nesterov": True}, {"weight_decay": 0.1}, {"label_smoothing": 0.3},
    {"milestones": (2, 3), "gamma": 0.5}, {"schedule": "one-cycle"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_sgd_on_the_cross_entropy(options):
    """One batch holds the whole set and nothing is augmented, so every step can be computed by hand."""
    data, losses, reported = colors(24), [], []
    how = Recipe(epochs=4, batch=24, lr=0.2, crop=0, flip=False, **options)
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    oracle = copy.deepcopy(net)
    naive_sgd(oracle, data, how, losses)
    train(net, data, how, progress=lambda p: reported.append(p.loss))
    assert reported == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(net.parameters(), oracle.parameters(), strict=True):
        assert ours.allclose(theirs, atol=1e-5)


def test_training_with_adam_is_torch_s_adamw():
    net, data = flat(classes=3), colors(24)
    ours, theirs = kedge.Classifier(copy.deepcopy(net), mean=0.5, std=0.25), copy.deepcopy(net)
    how = Recipe(epochs=4, batch=24, lr=0.01, optimizer="adam", weight_decay=0.1, crop=0, flip=False)
    train(ours, data, how)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs((data.images.float() / 255 - 0.5) / 0.25), data.labels).backward()
        optimizer.step()
    assert ours.network[1].weight.allclose(theirs[1].weight, atol=1e-5)


def test_every_image_comes_once_per_epoch_in_a_new_order_and_a_new_crop():
    data, still, moved = colors(32), Watch(), Watch()
    train(kedge.Classifier(still, mean=0.0, std=1.0), data, Recipe(epochs=2, batch=8, crop=0, flip=False))
    first, second = still.pixels()[:32], still.pixels()[32:]
    assert sorted(first) == sorted(second) == sorted(image.numpy().tobytes() for image in data.images)
    assert first != second
    train(kedge.Classifier(moved, mean=0.0, std=1.0), data, Recipe(epochs=2, batch=8, crop=2, flip=True))
    assert len(set(moved.pixels())) > 55


@pytest.mark.parametrize("kind", KINDS)
def test_only_missing_statistics_and_anchors_are_taken_from_the_training_images(kind):
    data = colors()
    net = train(network(kind), data, SHORT)
    x = data.images.double() / 255
    assert net.mean.double().allclose(x.mean(dim=(0, 2, 3)), atol=1e-6)
    assert net.std.double().allclose(x.std(dim=(0, 2, 3), correction=0), atol=1e-6)
    if kind == "anchored":
        anchors = (net.anchors * 255).round().to(torch.uint8)
        assert len(anchors) == 5
        assert all((data.images == anchor).flatten(1).all(dim=1).any() for anchor in anchors)
        assert kedge.AMP(net).fit(data).net.anchors is net.anchors
        given = network("anchored", mean=0.1, std=0.9)
        given.set_anchors(torch.full((2, 3, 8, 8), 0.5))
        before = [given.anchors.clone(), given.mean.clone(), given.std.clone()]
        train(given, data, SHORT)
        assert all(map(torch.equal, before, (given.anchors, given.mean, given.std)))


def test_progress_history_and_record():
    seen, data = [], colors(70)
    how = Recipe(epochs=3, batch=16, lr=0.01, milestones=(1, 2), gamma=0.1)
    net = train(network(), data, how, seed=9, progress=seen.append, validation=colors(seed=2))
    record = net.record
    assert (record["seed"], record["skipped"]) == (9, [])
    assert record["data"] == {"name": "colors", "images": 70, "sha256": data.checksum}
    assert record["recipe"] | {"epochs": 3, "gamma": 0.1, "milestones": [1, 2], "flip": True} == record["recipe"]
    assert json.loads(json.dumps(record)) == record  # JSON gives the same record back
    assert {str(torch.__version__), kedge.__version__} <= set(record["made with"].values())
    assert [p.step for p in seen] == list(range(1, 13))  # 70 images make four whole batches
    assert [p.epoch for p in seen] == [1] * 4 + [2] * 4 + [3] * 4
    assert {(p.steps, p.epochs) for p in seen} == {(12, 3)}
    assert all(math.isfinite(p.loss) and 0 <= p.accuracy <= 1 and p.images_per_second > 0 for p in seen)
    history = record["history"]
    assert [line["lr"] for line in history] == pytest.approx([0.01, 0.001, 0.0001])  # from the milestone's epoch on
    right = (net(colors(seed=2).images).argmax(dim=1) == colors(seed=2).labels).double().mean()
    assert history[-1]["validation_accuracy"] == pytest.approx(float(right))


def test_training_returns_the_average_of_the_weights_and_validates_it():
    net, seen, how = network(), [], Recipe(epochs=1, batch=8, lr=0.01, ema=0.3)
    expected = net.fc.weight.detach().clone()
    options = {"validation": colors(), "progress": lambda _: seen.append(net.fc.weight.detach().clone())}
    trained = train(net, colors(32), how, **options)
    for step, weight in enumerate(seen, 1):
        decay = min(0.3, (1 + step) / (10 + step))  # 2/11, 3/12, then 0.3
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(net.fc.weight.detach(), expected)
    right = (trained(colors().images).argmax(dim=1) == colors().labels).double().mean()
    assert trained.record["history"][-1]["validation_accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize(("fraction", "corrupted"), [(0.0, [1] * 8), (0.25, [1] * 6 + [0] * 2)])
def test_anchors_stay_clean_in_the_final_fraction_of_the_steps(fraction, corrupted):
    net, seen = network("anchored", per_sample=True), []
    how = recipe(SHORT, clean_final_fraction=fraction)
    train(net, colors(), how, progress=lambda p: seen.append(int(net.draw.corrupted)))
    assert seen == corrupted
    assert net.corrupting  # restored for a loop of one's own


# Errors.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (kedge.ImageSet(colors().images, name="bare"), "data must have labels to train on; the set 'bare' has none"),
        (kedge.ImageSet(colors().images, torch.zeros(64).long()), r"at least two classes, got \[0\]"),
        (kedge.ImageSet(colors().images, torch.arange(64) % 3 - 1), r"labels must be 0, 1, .*got \[-1, 0, 1\]"),
        (colors(15), "batch of at least 16 images, got 15; lower batch"),
        (
            kedge.ImageSet(colors().images, torch.arange(64) % 4),
            r"labels must lie in 0\.\.2, since the network has 3 outputs; got .*classes=4",
        ),
        (None, r"data must be an ImageSet.*, got NoneType"),
        ([(torch.zeros(3, 8, 8, dtype=torch.uint8), 1)] * 32, "at least two classes; every image has 1"),
        (list(colors().images), "data must give labels"),
        (DataLoader(list(colors().images), batch_size=8), "data must yield labels"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_unsuitable_data_is_refused(kind, data, message):
    with pytest.raises(InputError, match=message):
        train(network(kind), data, SHORT)


def test_options_that_do_not_fit_are_refused():
    for options, message in (
        ({"tensorboard": True}, "tensorboard needs a directory"),
        ({"devices": 0}, "devices and nodes must be at least 1"),
        ({"validation": colors().images}, "validation must have labels"),
        ({"preprocess": kedge.Preprocess((3, 16, 16))}, r"preprocess must have the shape.*got \(3, 16, 16\)"),
        ({"recipe": "demmo"}, r"recipe must be one of .*'demo'.*; got 'demmo'"),
    ):
        with pytest.raises(InputError, match=message):
            train(network(), colors(), **{"recipe": SHORT} | options)
    stretch = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    assert train(network(), colors(), SHORT, preprocess=stretch).record["preprocess"]["fit"] == "stretch"


def test_a_loss_that_is_not_finite_stops_the_training():
    net = network()
    net.fc.bias.data[0] = math.nan
    with pytest.raises(KedgeError, match=r"the loss became NaN or infinite in epoch 1.*rate \(lr=0\.05\)"):
        train(net, colors(), SHORT)
    with pytest.raises(KedgeError, match=r"(the loss|a weight) became NaN or infinite"):
        train(flat(classes=3), colors(), Recipe(epochs=30, batch=16, lr=1e18, momentum=0.99))


# Recipes.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": 200, "milestones": (60, 120, 160)}, {0: 1, 59.99: 1, 60: 0.2, 119.5: 0.2, 120: 0.04, 160: 0.008}),
        ({"epochs": 3}, {2.5: 1}),
        ({"epochs": 10, "schedule": "one-cycle"}, {0: 0, 0.5: 0.25, 2: 1, 4: 0.75, 6: 0.5, 8: 0.25, 10: 0}),
        ({"epochs": 5, "schedule": "linear"}, {0: 1, 2.5: 0.5, 5: 0}),
        ({"epochs": 20, "schedule": "cosine"}, {0: 0, 1: 0.5, 2: 1, 8: 0.75, 11: 0.5, 14: 0.25, 20: 0}),
    ],
)
def test_the_learning_rate_follows_the_schedule(options, expected):
    how = Recipe(lr=0.4, **options)
    assert [how.rate(epoch) for epoch in expected] == pytest.approx([0.4 * rate for rate in expected.values()])


WRONG = [
    {"epochs": 0}, {"epochs": 1.5}, {"batch": 1}, {"crop": -1}, {"schedule": "sine"}, {"optimizer": "lion"},
    {"pad": "wrap"}, {"lr": 0}, {"lr": math.nan}, {"momentum": 1.5}, {"weight_decay": -1e-4}, {"label_smoothing": 2},
    {"clean_final_fraction": 2}, {"ema": 1.0}, {"nesterov": True, "momentum": 0.0}, {"alternate": True, "flip": False},
]  # fmt: skip


def test_a_recipe_checks_itself_is_given_or_named_and_may_be_changed():
    for options in WRONG:
        with pytest.raises(InputError, match=f"{next(iter(options))} (must|needs)"):
            Recipe(**{"epochs": 1} | options)
    assert recipe("demo", epochs=3, lr=0.5) == Recipe(**vars(RECIPES["demo"]) | {"epochs": 3, "lr": 0.5})
    assert recipe(SHORT) == SHORT
    assert recipe(SHORT, batch=9).batch == 9
    assert RECIPES["demo"].epochs == 12  # not changed


# Statistics.


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_statistics_are_the_mean_and_deviation_of_each_channel(channels):
    data = labelled(40, channels=channels, seed=channels)
    data.images[:, 0] //= 3
    values = data.images.numpy().astype(np.float64) / 255
    streamed = statistics(list(data.images), kedge.Preprocess((channels, 8, 8)))
    for mean, std in (statistics(data), streamed):
        assert np.allclose(mean, values.mean(axis=(0, 2, 3)), rtol=0, atol=1e-12)
        assert np.allclose(std, values.std(axis=(0, 2, 3)), rtol=0, atol=1e-12)


def test_the_deviation_of_a_constant_channel_is_one():
    for value in (0, 1, 77, 255):
        mean, std = statistics(kedge.ImageSet(torch.full((9, 2, 4, 4), value, dtype=torch.uint8)))
        assert mean.allclose(torch.tensor(value / 255, dtype=torch.float64))
        assert std.tolist() == [1.0, 1.0]


# Augmentation.


def cropped_one_by_one(images: np.ndarray, draws: np.ndarray, padding: int, flip: bool) -> np.ndarray:
    results = []
    for image, (row, column, mirror) in zip(images, draws, strict=True):
        _, height, width = image.shape
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        top, left = math.floor(row * (2 * padding + 1)), math.floor(column * (2 * padding + 1))
        cut = padded[:, top : top + height, left : left + width]
        results.append(cut[:, :, ::-1] if flip and mirror < 0.5 else cut)
    return np.stack(results)


@given(
    padding=st.integers(0, 4),
    flip=st.booleans(),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 99),
)
def test_crops_and_flips_of_a_batch_are_those_of_one_image_at_a_time(padding, flip, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    draws = torch.rand(shape[0], 3, generator=generator, dtype=torch.float64)
    before = images.clone()
    result = crop_and_flip(images, draws, padding=padding, flip=flip)
    assert result.dtype == torch.uint8
    assert result.numpy().tolist() == cropped_one_by_one(images.numpy(), draws.numpy(), padding, flip).tolist()
    assert images.equal(before)


def test_crops_reach_both_borders_and_no_further_and_reflect_mirrors_the_border():
    edge = torch.tensor([[0.0, 0.0, 0.9], [1 - 2**-53, 1 - 2**-53, 0.9]], dtype=torch.float64)
    result = crop_and_flip(torch.ones(2, 1, 4, 4), edge, padding=2, flip=True)
    assert result[0, 0].tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    assert result[1, 0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]
    digits = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    result = crop_and_flip(digits, edge[:1], padding=1, flip=True, pad="reflect")
    assert result[0, 0].tolist() == [[5, 4, 5], [2, 1, 2], [5, 4, 5]]


def test_alternating_flips_show_each_side_in_every_other_epoch():
    images = torch.arange(40 * 9, dtype=torch.float32).view(40, 1, 3, 3)
    how, index = Recipe(epochs=4, crop=0, alternate=True), torch.arange(40)
    epochs = [augment(images, how, 7, epoch, index) for epoch in range(4)]
    flipped = [(result != images).flatten(1).any(dim=1) for result in epochs]
    first = flipped[0]
    assert [mask.equal(first) for mask in flipped] == [True, False, True, False]
    assert flipped[1].equal(~first)
    assert flipped[3].equal(~first)
    assert 8 < int(first.sum()) < 32  # about half of them start flipped
    assert epochs[0][first].equal(images[first].flip(3))


@given(
    indices=st.lists(st.integers(0, 10**7), min_size=1, max_size=20),
    seed=st.integers(-(2**62), 2**62),
    epoch=st.integers(0, 500),
    n=st.integers(1, 5),
)
def test_the_draw_of_an_image_does_not_depend_on_its_batch(indices, seed, epoch, n):
    together = uniforms(seed, epoch, torch.tensor(indices), n)
    assert together.shape == (len(indices), n)
    assert together.dtype == torch.float64
    assert ((together >= 0) & (together < 1)).all()
    for row, index in zip(together, indices, strict=True):
        assert uniforms(seed, epoch, torch.tensor([index]), n)[0].equal(row)


def test_draws_are_uniform_and_uncorrelated_over_images_epochs_and_seeds():
    index = torch.arange(4000)
    table = torch.stack([uniforms(seed, epoch, index, 3) for seed in range(2) for epoch in range(2)])  # (4, N, 3)
    over_epochs = torch.stack([uniforms(0, epoch, index[:1], 3)[0] for epoch in range(2000)])
    over_seeds = torch.stack([uniforms(seed, 0, index[:1], 3)[0] for seed in range(2000)])
    for column in (*table.permute(0, 2, 1).flatten(0, 1), *over_epochs.T, *over_seeds.T):
        assert kstest(column.numpy(), "uniform").pvalue > 1e-3
    rows = [*table.permute(0, 2, 1).flatten(0, 1), table[0, :, 0].roll(1)]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max() < 4.5 / math.sqrt(4000)
    assert table.unique().numel() == table.numel()


# Data sets and loaders.


def test_image_files_train_by_random_resized_crops_with_any_number_of_workers(tmp_path):
    for number in range(48):
        folder = tmp_path / ("dark" if number % 2 else "light")
        folder.mkdir(exist_ok=True)
        color = (20, 30, 40) if number % 2 else (220, 210, 200)
        Image.new("RGB", (40 + number, 70), color).save(folder / f"{number}.png")
    streamed = kedge.data.sources.load_dataset(f"folder:{tmp_path}")
    assert isinstance(streamed, kedge.data.StreamedSet)
    how = Recipe(epochs=6, batch=16, lr=0.05, crop=0, resized_crop=True)
    shape = kedge.Preprocess((3, 16, 16))
    nets = [train(network("anchored", classes=2), streamed, how, preprocess=shape, workers=n) for n in (0, 2)]
    assert nets[0].record["history"][-1]["accuracy"] > 0.9
    assert same_weights(*nets)


@dataclass(frozen=True)
class Damaged(torch.utils.data.Dataset):
    """A set as `kedge.data.StreamedSet` is one, whose images 3 and 7 cannot be decoded."""

    on_error: str = "raise"
    skipped: list = field(default_factory=list)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index not in (3, 7):
            return colors()[index]
        if self.on_error == "raise":
            raise InputError(f"{index}.jpg cannot be decoded")
        self.skipped.extend({f"{index}.jpg"} - set(self.skipped))
        return self[index + 1]


def test_images_that_cannot_be_decoded_are_skipped_counted_and_listed(tmp_path):
    with pytest.warns(KedgeWarning, match=r"2 images were skipped in training: .*3\.jpg"):
        net = train(network(), Damaged(), recipe(SHORT, batch=20), directory=tmp_path)
    assert sorted(net.record["skipped"]) == ["3.jpg", "7.jpg"]
    assert [line["skipped"] for line in net.record["history"]] == [2, 2]


@pytest.mark.parametrize(
    ("options", "batch", "images"),
    [
        ({"batch_size": 50}, 50, 64),
        ({"batch_size": 50, "drop_last": True}, 50, 50),
        ({"batch_sampler": BatchSampler(RandomSampler(range(64)), 16, False)}, 16, 64),
        ({"batch_size": 20, "sampler": RandomSampler(range(64), num_samples=30)}, 20, 30),
    ],
)
def test_the_images_of_a_data_loader_are_counted(options, batch, images):
    loader = make_loader(DataLoader(colors(64), **options), SHORT, 0, rank=0, world=1, workers=0, preprocess=None)
    assert (loader.batch, loader.images) == (batch, images)
    if batch == 50:
        net = train(network(), DataLoader(colors(64), **options), SHORT)
        assert [line["step"] for line in net.record["history"]] == [loader.steps, 2 * loader.steps]


def test_data_sets_of_pairs_and_mappings_train_and_validate_in_double_precision():
    pairs = [(image.double().numpy() / 255, int(y)) for image, y in colors()]
    net = train(network(), pairs, SHORT, validation=pairs)
    assert 0 <= net.record["history"][-1]["validation_accuracy"] <= 1
    mappings = [{"image": image, "label": int(y)} for image, y in colors()]
    assert train(network(), mappings, SHORT).record["data"]["images"] == 64


def test_anchors_and_statistics_are_taken_from_preprocessed_images():
    pixels = torch.randint(0, 256, (32, 12, 9, 3), dtype=torch.uint8).numpy()
    pictures = [(Image.fromarray(array), number % 2) for number, array in enumerate(pixels)]
    shape = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    net = network("anchored", classes=2)
    train(net, pictures, Recipe(epochs=1, batch=16, crop=0, flip=False), preprocess=shape)
    seen = torch.stack([shape(picture) for picture, _ in pictures])
    anchors = (net.anchors * 255).round().to(torch.uint8)
    assert all((seen == anchor).flatten(1).all(dim=1).any() for anchor in anchors)
    torch.testing.assert_close(net.mean, (seen / 255).mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert kedge.AMP(net).fit(pictures).preprocess == shape


def test_resized_crops_of_paths_differ_by_epoch(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    how, to = Recipe(epochs=1, crop=0, flip=False, resized_crop=True), kedge.Preprocess((3, 16, 16))
    paths, pictures = (
        AugmentedDataset([(image, 0)], to, how, seed=0) for image in (str(tmp_path / "a.png"), Image.fromarray(pixels))
    )
    assert not torch.equal(paths[0, 0][0], paths[1, 0][0])
    assert torch.equal(paths[1, 0][0], pictures[1, 0][0])
