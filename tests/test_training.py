"""Training: recipes by hand, augmentation against a loop, and runs that their seed repeats to the last bit."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import kstest
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import kedge
from kedge.errors import InputError, KedgeError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import RECIPES, Recipe, recipe, statistics, train
from kedge.training.augment import augment, crop_and_flip, uniforms
from kedge.training.loader import Numbered, make_feed

quick = settings(max_examples=60, derandomize=True, deadline=None)
SHORT = Recipe(epochs=2, batch=16, lr=0.05, crop=1)


def colours(n=64, seed=0, classes=3) -> kedge.ImageSet:
    """Red, green and blue images under noise, which a small network learns in seconds."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % classes
    images[torch.arange(n), labels % 3] += 100
    return kedge.ImageSet(images, labels, name="colours", classes=("red", "green", "blue"))


def network(kind="plain", name="compact", seed=0, **options) -> nn.Module:
    sizes = {"compact": {"width": 4}, "wrn": {"depth": 10, "width": 1, "dropout": 0.3}}[name]
    with seeded(seed):
        net = build(name, classes=3, **sizes)
    return kedge.anchor(net, every=2, **options) if kind == "anchored" else net


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in net.state_dict().values()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, two, strict=True))


# Runs.


@pytest.mark.parametrize(("kind", "name"), [("plain", "compact"), ("anchored", "compact"), ("plain", "wrn")])
def test_the_seed_fixes_a_run_to_the_last_bit(kind, name):
    runs = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(noise)  # of torch's own generator nothing may depend, dropout included
        runs.append(weights(train(network(kind, name), colours(), SHORT, seed=seed)))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_training_leaves_torch_s_own_generator_where_it_was():
    state = torch.get_rng_state()
    train(network("anchored"), colours(), SHORT)
    train(network("plain", "wrn"), colours(), SHORT)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_a_network_learns_what_is_easy(kind):
    how = Recipe(epochs=8, batch=16, lr=0.1, schedule="one-cycle", crop=1)
    net = train(network(kind), colours(96), how)
    test = colours(60, seed=1)
    assert not net.training
    with torch.no_grad():
        accuracy = (net(test.images).argmax(dim=1) == test.labels).double().mean()
    assert accuracy > 0.9


def test_a_network_is_trained_in_place_and_returned_as_a_classifier():
    plain = network()
    before = weights(plain)
    returned = train(plain, colours(), SHORT)
    assert isinstance(returned, kedge.Classifier)
    assert returned.network is plain
    assert not same(before, weights(plain))
    for wrapped in (kedge.Classifier(network()), network("anchored")):
        assert train(wrapped, colours(), SHORT) is wrapped
    by_name = train(network(), colours(64), recipe("demo", epochs=1))
    assert by_name.has_statistics


def naive_sgd(net, data, how, losses):
    """Whole batches of SGD with momentum and weight decay, line by line as the definition has it."""
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"nesterov": True},
        {"weight_decay": 0.1},
        {"label_smoothing": 0.3},
        {"milestones": (2, 3), "gamma": 0.5},
        {"schedule": "one-cycle"},
    ],
)
def test_training_is_sgd_on_the_cross_entropy(options):
    """One batch holds the whole set and nothing is augmented, so every step can be done by hand."""
    data, losses, reported = colours(24), [], []
    how = Recipe(epochs=4, batch=24, lr=0.2, crop=0, flip=False, **options)
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    oracle = copy.deepcopy(net)
    naive_sgd(oracle, data, how, losses)
    train(net, data, how, progress=lambda p: reported.append(p.loss))
    assert reported == pytest.approx(losses, rel=1e-5)
    for mine, theirs in zip(net.parameters(), oracle.parameters(), strict=True):
        assert mine.allclose(theirs, atol=1e-5)


def test_every_image_comes_once_an_epoch_in_a_new_order_and_a_new_crop():
    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = nn.Linear(192, 3), []

        def forward(self, x):
            self.seen.append(x.detach())
            return self.fc(x.flatten(1))

    data = colours(32)
    watch = Watch()
    train(kedge.Classifier(watch, mean=0.0, std=1.0), data, Recipe(epochs=2, batch=8, crop=0, flip=False))
    pixels = (torch.cat(watch.seen) * 255).round().to(torch.uint8)
    first, second = ([image.numpy().tobytes() for image in part] for part in pixels.split(32))
    assert sorted(first) == sorted(second) == sorted(image.numpy().tobytes() for image in data.images)
    assert first != second
    moved = Watch()
    train(kedge.Classifier(moved, mean=0.0, std=1.0), data, Recipe(epochs=2, batch=8, crop=2, flip=True))
    crops = {image.numpy().tobytes() for image in (torch.cat(moved.seen) * 255).round().to(torch.uint8)}
    assert len(crops) > 55


# What is set and what is kept.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_statistics_and_anchors_are_set_where_they_are_absent(kind):
    data = colours()
    net = train(network(kind), data, SHORT)
    x = data.images.double() / 255
    assert net.mean.double().allclose(x.mean(dim=(0, 2, 3)), atol=1e-6)
    assert net.std.double().allclose(x.std(dim=(0, 2, 3), correction=0), atol=1e-6)
    if kind == "anchored":
        anchors = (net.anchors * 255).round().to(torch.uint8)
        assert len(anchors) == 5
        assert all((data.images == anchor).flatten(1).all(dim=1).any() for anchor in anchors)
        assert kedge.AMP(net).fit(data).net.anchors is net.anchors


def test_statistics_and_anchors_are_kept_where_they_are_present():
    net = network("anchored", mean=0.1, std=0.9)
    net.set_anchors(torch.full((2, 3, 8, 8), 0.5))
    train(net, colours(), SHORT)
    assert net.mean.allclose(torch.tensor(0.1))
    assert net.std.allclose(torch.tensor(0.9))
    assert net.anchors.shape == (2, 3, 8, 8)
    assert net.anchors.eq(0.5).all()


def test_the_record_says_how_the_network_came_about():
    data, how = colours(), Recipe(epochs=2, batch=16, milestones=(1,), gamma=0.3)
    net = train(network("anchored"), data, how, seed=9)
    record = net.record
    assert record["seed"] == 9
    assert record["data"] == {"name": "colours", "images": 64, "sha256": data.checksum}
    for name, value in {"epochs": 2, "batch": 16, "gamma": 0.3, "milestones": [1], "flip": True}.items():
        assert record["recipe"][name] == value
    assert json.loads(json.dumps(record)) == record  # plain data, the same after a file as before it
    assert str(torch.__version__) in json.dumps(record)
    assert kedge.__version__ in json.dumps(record)
    again = train(network("anchored"), colours(seed=5), how, seed=9).record
    assert again["data"]["sha256"] != record["data"]["sha256"]


def test_progress_comes_once_a_step():
    seen = []
    train(network(), colours(70), Recipe(epochs=3, batch=16), progress=seen.append)
    assert [p.step for p in seen] == list(range(1, 13))  # 70 images make four whole batches
    assert [p.epoch for p in seen] == [1] * 4 + [2] * 4 + [3] * 4
    assert {(p.steps, p.epochs) for p in seen} == {(12, 3)}
    assert all(math.isfinite(p.loss) and 0 <= p.accuracy <= 1 and p.images_per_second > 0 for p in seen)


# What cannot be trained.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (kedge.ImageSet(colours().images, name="bare"), "data must have labels to train on; the set 'bare' has none"),
        (kedge.ImageSet(colours().images, torch.zeros(64).long()), r"at least two classes, got \[0\]"),
        (kedge.ImageSet(colours().images, torch.arange(64) % 3 - 1), r"labels must be 0, 1, .*got \[-1, 0, 1\]"),
        (colours(15), "at least one batch of 16 images, got 15; lower batch"),
        (colours(classes=4), r"labels must lie in 0\.\.2, since the network has 3 outputs; got .*classes=4"),
        (colours(classes=60), r"labels must lie in 0\.\.2, since the network has 3 outputs; got "),
        (None, r"data must be an ImageSet.*, got NoneType"),
        (17, r"data must be an ImageSet.*, got int"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_data_that_cannot_be_trained_on(kind, data, message):
    with pytest.raises(InputError, match=message):
        train(network(kind), data, SHORT)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_a_loss_that_is_no_number_stops_the_training(kind):
    net = network(kind)
    fc = net.network.fc if kind == "anchored" else net.fc
    fc.bias.data[0] = math.nan
    with pytest.raises(KedgeError, match=r"the loss became NaN or infinite in epoch 1.*rate \(lr=0\.05\)"):
        train(net, colours(), SHORT)


def test_a_learning_rate_out_of_all_bounds_is_found_out():
    how = Recipe(epochs=30, batch=16, lr=1e18, momentum=0.99)
    with pytest.raises(KedgeError, match=r"(the loss|a weight) became NaN or infinite"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 3)), colours(), how)


# Recipes.


def test_steps_multiply_the_rate_at_each_milestone():
    how = Recipe(epochs=200, lr=0.1, milestones=(60, 120, 160), gamma=0.2)
    expected = {0: 0.1, 59.99: 0.1, 60: 0.02, 119.5: 0.02, 120: 0.004, 160: 0.0008, 200: 0.0008}
    for epoch, rate in expected.items():
        assert how.rate(epoch) == pytest.approx(rate)
    assert Recipe(epochs=3, lr=0.3).rate(2.5) == pytest.approx(0.3)


def test_one_cycle_rises_for_a_fifth_and_falls_to_zero():
    how = Recipe(epochs=10, lr=0.4, schedule="one-cycle")
    expected = {0: 0, 0.5: 0.1, 1: 0.2, 2: 0.4, 4: 0.3, 6: 0.2, 8: 0.1, 9.9: 0.005, 10: 0}
    for epoch, rate in expected.items():
        assert how.rate(epoch) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1; got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1; got 1.5"),
        ({"batch": 1}, "batch must be a whole number of at least 2; got 1"),
        ({"crop": -1}, "crop must be a whole number of at least 0; got -1"),
        ({"schedule": "cosine"}, "schedule must be one of 'steps', 'one-cycle', 'linear'; got 'cosine'"),
        ({"lr": 0}, r"lr must lie in \(0, inf\); got 0"),
        ({"lr": math.nan}, r"lr must lie in \(0, inf\); got nan"),
        ({"momentum": 1.5}, r"momentum must lie in \[0, 1\]; got 1.5"),
        ({"weight_decay": -1e-4}, r"weight_decay must lie in \[0, inf\]; got -0.0001"),
        ({"label_smoothing": 2}, r"label_smoothing must lie in \[0, 1\]; got 2"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0; got momentum=0.0"),
    ],
)
def test_a_recipe_checks_itself(options, message):
    with pytest.raises(InputError, match=message):
        Recipe(**{"epochs": 1} | options)


def test_a_recipe_is_named_or_given_and_may_be_changed():
    assert recipe("demo") is not None
    assert recipe("demo", epochs=3, lr=0.5) == Recipe(**vars(RECIPES["demo"]) | {"epochs": 3, "lr": 0.5})
    assert recipe(SHORT) == SHORT
    assert recipe(SHORT, batch=9).batch == 9
    assert RECIPES["demo"].epochs == 12  # changes make another recipe
    with pytest.raises(InputError, match=r"recipe must be a Recipe or one of .*'demo'.*; got 'demmo'"):
        train(network(), colours(), "demmo")
    with pytest.raises(InputError, match="epochs must be"):
        recipe("demo", epochs=0)


# Statistics.


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_statistics_are_the_mean_and_deviation_of_each_channel(channels):
    generator = torch.Generator().manual_seed(channels)
    images = torch.randint(0, 256, (40, channels, 6, 7), dtype=torch.uint8, generator=generator)
    images[:, 0] //= 3
    mean, std = statistics(kedge.ImageSet(images))
    values = images.numpy().astype(np.float64) / 255
    assert np.allclose(mean, values.mean(axis=(0, 2, 3)), rtol=0, atol=1e-12)
    assert np.allclose(std, values.std(axis=(0, 2, 3)), rtol=0, atol=1e-12)


def test_a_channel_that_never_varies_has_no_zero_deviation():
    for value in (0, 1, 77, 255):
        mean, std = statistics(kedge.ImageSet(torch.full((9, 2, 4, 4), value, dtype=torch.uint8)))
        assert mean.allclose(torch.tensor(value / 255, dtype=torch.float64))
        assert std.tolist() == [1.0, 1.0]  # so that what differs later is not blown up


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
@quick
def test_crops_and_flips_are_those_of_one_image_at_a_time(padding, flip, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    draws = torch.rand(shape[0], 3, generator=generator, dtype=torch.float64)
    before = images.clone()
    result = crop_and_flip(images, draws, padding=padding, flip=flip)
    assert result.dtype == torch.uint8
    assert result.numpy().tolist() == cropped_one_by_one(images.numpy(), draws.numpy(), padding, flip).tolist()
    assert images.equal(before)


def test_crops_reach_both_borders_and_no_further():
    images = torch.ones(2, 1, 4, 4)
    edge = torch.tensor([[0.0, 0.0, 0.9], [1 - 2**-53, 1 - 2**-53, 0.9]], dtype=torch.float64)
    result = crop_and_flip(images, edge, padding=2, flip=True)
    assert result[0, 0].tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    assert result[1, 0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]
    assert crop_and_flip(images, edge, padding=0, flip=False).equal(images)


def test_a_mirrored_border_moves_in_where_the_recipe_says_so():
    images = torch.tensor([[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]], dtype=torch.uint8)
    corner = torch.tensor([[0.0, 0.0, 0.9]])
    assert crop_and_flip(images, corner, padding=1, flip=True, pad="reflect")[0, 0].tolist() == [
        [5, 4, 5],
        [2, 1, 2],
        [5, 4, 5],
    ]


def test_alternating_flips_show_each_side_in_every_other_epoch():
    images = torch.arange(40 * 9, dtype=torch.float32).view(40, 1, 3, 3)
    how, index = Recipe(epochs=4, crop=0, alternate=True), torch.arange(40)
    epochs = [augment(images, how, 7, epoch, index) for epoch in range(4)]
    flipped = [(made != images).flatten(1).any(dim=1) for made in epochs]
    assert flipped[0].equal(flipped[2])
    assert flipped[1].equal(~flipped[0])
    assert flipped[3].equal(flipped[1])
    assert 8 < int(flipped[0].sum()) < 32  # about half of them begin so
    assert epochs[0][flipped[0]].equal(images[flipped[0]].flip(3))


@given(
    indices=st.lists(st.integers(0, 10**7), min_size=1, max_size=20),
    seed=st.integers(-(2**62), 2**62),
    epoch=st.integers(0, 500),
    n=st.integers(1, 5),
)
@quick
def test_an_image_s_draw_does_not_depend_on_its_batch(indices, seed, epoch, n):
    together = uniforms(seed, epoch, torch.tensor(indices), n)
    assert together.shape == (len(indices), n)
    assert together.dtype == torch.float64
    assert ((together >= 0) & (together < 1)).all()
    for row, index in zip(together, indices, strict=True):
        assert uniforms(seed, epoch, torch.tensor([index]), n)[0].equal(row)


def test_draws_are_uniform_and_unrelated():
    """Over images, over epochs and over seeds; columns, neighbours and repetitions do not go together."""
    index = torch.arange(4000)
    table = torch.stack([uniforms(seed, epoch, index, 3) for seed in range(2) for epoch in range(2)])  # (4, N, 3)
    for column in table.permute(0, 2, 1).flatten(0, 1):
        assert kstest(column.numpy(), "uniform").pvalue > 1e-3
    over_epochs = torch.stack([uniforms(0, epoch, index[:1], 3)[0] for epoch in range(2000)])
    over_seeds = torch.stack([uniforms(seed, 0, index[:1], 3)[0] for seed in range(2000)])
    for column in torch.cat([over_epochs, over_seeds], dim=1).T:
        assert kstest(column.numpy(), "uniform").pvalue > 1e-3
    rows = [*table.permute(0, 2, 1).flatten(0, 1), table[0, :, 0].roll(1)]
    related = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert related.abs().max() < 4.5 / math.sqrt(4000)
    assert table.unique().numel() == table.numel()


def test_a_set_that_is_read_from_disk_trains_by_random_resized_crops(tmp_path):
    for number in range(48):
        folder = tmp_path / ("dark" if number % 2 else "light")
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (40 + number, 70), (20, 30, 40) if number % 2 else (220, 210, 200)).save(
            folder / f"{number}.png"
        )
    streamed = kedge.data.load_dataset(f"folder:{tmp_path}")
    assert isinstance(streamed, kedge.data.StreamedSet)
    how = Recipe(epochs=6, batch=16, lr=0.05, crop=0, resized_crop=True)
    shape = kedge.Preprocess((3, 16, 16))
    nets = []
    for workers in (0, 2):
        with seeded(0):
            net = kedge.anchor(build("compact", width=4, classes=2))
        nets.append(kedge.train(net, streamed, how, preprocess=shape, workers=workers))
    assert nets[0].record["history"][-1]["accuracy"] > 0.9
    states = [net.state_dict().values() for net in nets]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_data_loader_of_the_user_s_own_trains():
    data = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2, "toy")
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    net = kedge.train(build("compact", width=4, classes=2, channels=1), loader, Recipe(epochs=2, lr=0.01))
    assert [line["step"] for line in net.record["history"]] == [4, 8]


@pytest.mark.parametrize(
    ("options", "batch", "images"),
    [
        ({"batch_size": 50}, 50, 64),
        ({"batch_size": 50, "drop_last": True}, 50, 50),
        ({"batch_sampler": BatchSampler(RandomSampler(range(64)), 16, False)}, 16, 64),
        ({"batch_size": 20, "sampler": RandomSampler(range(64), num_samples=30)}, 20, 30),
    ],
)
def test_a_loader_s_images_are_counted(options, batch, images):
    loader = DataLoader(colours(64), **options)
    feed = make_feed(loader, SHORT, 0, rank=0, world=1, workers=0, preprocess=None)
    assert (feed.batch, feed.images) == (batch, images)


def test_the_average_of_the_weights_is_what_training_returns():
    data = kedge.ImageSet(torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8), torch.arange(32) % 2, "toy")
    seen = []

    def note(net):
        return lambda _: seen.append(net.fc.weight.detach().clone())

    with seeded(0):
        net = build("compact", width=4, classes=2, channels=1)
    start = net.fc.weight.detach().clone()
    kedge.train(net, data, Recipe(epochs=1, batch=8, lr=0.01, ema=0.8), progress=note(net))
    expected = start
    for weight in seen:
        expected = 0.8 * expected + 0.2 * weight
    torch.testing.assert_close(net.fc.weight.detach(), expected)


def test_validation_is_measured_after_every_epoch():
    data = kedge.ImageSet(torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8), torch.arange(32) % 2, "toy")
    net = build("compact", width=4, classes=2, channels=1)
    trained = kedge.train(net, data, Recipe(epochs=2, batch=8, lr=0.01), validation=data)
    right = (trained(data.images).argmax(dim=1) == data.labels).double().mean()
    assert trained.record["history"][-1]["validation_accuracy"] == pytest.approx(float(right))


def test_validation_takes_images_in_double_precision_as_training_does():
    data = colours()
    items = [(image.double().numpy() / 255, int(y)) for image, y in zip(data.images, data.labels, strict=True)]
    trained = train(network(), items, SHORT, validation=items)
    assert 0 <= trained.record["history"][-1]["validation_accuracy"] <= 1


def test_the_rate_of_a_milestone_begins_with_its_epoch():
    data = kedge.ImageSet(torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8), torch.arange(32) % 2, "toy")
    how = Recipe(epochs=3, batch=16, lr=0.01, milestones=(1, 2), gamma=0.1)
    net = train(build("compact", width=4, classes=2, channels=1), data, how)
    assert [line["lr"] for line in net.record["history"]] == pytest.approx([0.01, 0.001, 0.0001])


def test_anchors_and_statistics_are_taken_from_images_as_the_network_sees_them():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (32, 12, 9, 3), dtype=torch.uint8, generator=generator).numpy()
    pictures = [(Image.fromarray(array), number % 2) for number, array in enumerate(pixels)]
    shape = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    net = kedge.anchor(build("compact", width=4, classes=2))
    train(net, pictures, Recipe(epochs=1, batch=16, crop=0, flip=False), preprocess=shape)
    seen = torch.stack([shape(picture) for picture, _ in pictures])
    known = {bytes(image.numpy().tobytes()) for image in seen}
    anchors = (net.anchors * 255).round().to(torch.uint8)
    assert all(bytes(anchor.contiguous().numpy().tobytes()) in known for anchor in anchors)
    torch.testing.assert_close(net.mean, (seen / 255).mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert kedge.AMP(net).fit(pictures).preprocess == shape


def test_a_data_set_of_mappings_trains():
    items = [{"image": torch.full((1, 8, 8), 50 + 100 * (n % 2), dtype=torch.uint8), "label": n % 2} for n in range(32)]
    net = train(build("compact", width=4, classes=2, channels=1), items, Recipe(epochs=1, batch=16, crop=0))
    assert net.record["data"]["images"] == 32


def test_a_data_set_of_one_class_is_refused():
    items = [(torch.zeros(1, 8, 8, dtype=torch.uint8), 1) for _ in range(32)]
    with pytest.raises(InputError, match="at least two classes; every image has 1"):
        train(build("compact", width=4, classes=2, channels=1), items, Recipe(epochs=1, batch=16, crop=0))


def test_resized_crops_need_pictures_to_cut_from():
    data = kedge.ImageSet(torch.zeros(32, 1, 8, 8, dtype=torch.uint8), torch.arange(32) % 2, "toy")
    with pytest.raises(InputError, match="data set of PIL images"):
        train(build("compact", width=4, classes=2, channels=1), data, Recipe(epochs=1, resized_crop=True))
    items = list(zip(data.images, data.labels.tolist(), strict=True))
    with pytest.raises(InputError, match=r"data set of PIL images or paths.*number \d+ is \(1, 8, 8\)"):
        train(build("compact", width=4, classes=2, channels=1), items, Recipe(epochs=1, batch=8, resized_crop=True))


def test_resized_crops_of_paths_differ_by_epoch(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    how, to = Recipe(epochs=1, crop=0, flip=False, resized_crop=True), kedge.Preprocess((3, 16, 16))
    paths, pictures = (
        Numbered([(image, 0)], to, how, seed=0) for image in (str(tmp_path / "a.png"), Image.fromarray(pixels))
    )
    assert not torch.equal(paths[0, 0][0], paths[1, 0][0])
    assert torch.equal(paths[1, 0][0], pictures[1, 0][0])


def test_how_files_become_inputs_can_be_said_for_images_in_memory():
    how = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    assert train(network(), colours(), SHORT, preprocess=how).record["preprocess"]["fit"] == "stretch"
    with pytest.raises(InputError, match=r"preprocess must have the shape of the images.*got \(3, 16, 16\)"):
        train(network(), colours(), SHORT, preprocess=kedge.Preprocess((3, 16, 16)))


@pytest.mark.parametrize(("settle", "corrupted"), [(0.0, [1, 1, 1, 1, 1, 1, 1, 1]), (0.25, [1, 1, 1, 1, 1, 1, 0, 0])])
def test_anchors_stay_clean_in_the_last_share_of_the_steps(settle, corrupted):
    net, seen = network("anchored", per_sample=True), []
    train(
        net,
        colours(),
        recipe(SHORT, clean_final_fraction=settle),
        progress=lambda p: seen.append(int(net.draw.corrupted)),
    )
    assert seen == corrupted
    assert net.corrupting  # in a loop of one's own everything is as the options say
