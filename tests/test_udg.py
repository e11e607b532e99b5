"""Unsupervised dual grouping: groups before each epoch, pseudo-labels in pure ones, and the loss of all three parts."""

import copy
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import kedge
from kedge import scores
from kedge.detectors import Cost
from kedge.detectors.kmeans import kmeans
from kedge.detectors.registry import DETECTORS
from kedge.detectors.udg import UDG, GroupHead, _of_first_process, filter_known
from kedge.errors import ArchitectureError, InputError
from kedge.models import build
from kedge.models.head import head_name
from kedge.seeds import mix_seed, seeded
from kedge.training import Recipe
from kedge.training.losses import Step

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)
RULE = kedge.Preprocess((1, 8, 8))


def images(n=48, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)


def labelled(n=48, seed=0, name="toy", classes=2) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), torch.arange(n) % classes, name)


def beside(n=40, seed=100, name="beside") -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), name=name)


def bright(n: int, level: int, seed=0) -> torch.Tensor:
    """Images about as bright as a level."""
    return (images(n, seed) // 16 + level).to(torch.uint8)


def plain(classes=2, seed=0) -> nn.Module:
    with seeded(seed):
        return build("compact", width=4, classes=classes, channels=1)


def grouped(classes=2, seed=0, groups=6) -> nn.Module:
    return UDG.prepare(plain(classes, seed), groups=groups)


def tiny(classes=3, seed=0, groups=4, dtype=torch.float64) -> kedge.Classifier:
    """Without batch norm, so that a loss is the same however its images are passed."""
    with seeded(seed):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, classes)).to(dtype)
    net = UDG.prepare(kedge.Classifier(network, mean=0.5, std=0.25), groups=groups)
    net.network[3].groups.weight.data.mul_(50)  # for groups that differ
    return net


def mean_of_pixels(classes=2, groups=4) -> kedge.Classifier:
    """Its only feature is how bright an image is."""
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, classes))
    return kedge.Classifier(UDG.prepare(network, groups=groups), mean=0.0, std=1.0)


def step_of(net, data, numbers, outliers, outlier_numbers, *, epoch=0, label_smoothing=0.0) -> Step:
    x, o = (s.images[list(n)].to(net.mean) / 255 for s, n in ((data, numbers), (outliers, outlier_numbers)))
    index, outlier_index = torch.tensor(numbers), torch.tensor(outlier_numbers)
    y = data.labels[index]
    return Step(net, net, x, y, index, o, outlier_index, {}, 0.0, epoch, len(data), label_smoothing)


def naive_filter(groups, labels, unlabelled, purity):
    """The rule in words: in each group, count every class among all of its images."""
    found = []
    for group in unlabelled:
        size = sum(g == group for g in groups) + sum(g == group for g in unlabelled)
        chosen = -1
        for c in sorted(set(labels)):
            of_class = sum(g == group and y == c for g, y in zip(groups, labels, strict=True))
            if of_class / size > purity:
                chosen = c
        found.append(chosen)
    return found


def log_softmax(logits):
    total = math.log(sum(math.exp(z) for z in logits))
    return [z - total for z in logits]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# The group head.


def test_prepare_puts_a_head_for_groups_beside_the_head():
    net, state = plain(classes=3), torch.get_rng_state()
    made = UDG.prepare(net, groups=7)
    assert torch.get_rng_state().equal(state)
    assert isinstance(net.fc, nn.Linear)
    assert isinstance(made.fc, GroupHead)
    assert made.fc.classes.weight.equal(net.fc.weight)
    assert made.fc.groups.weight.shape == (7, 32)
    assert 0.005 < made.fc.groups.weight.std() < 0.02
    output = made.eval()(torch.rand(2, 1, 8, 8))
    assert output.logits.shape == (2, 3)
    assert output.extra[0].shape == (2, 7)
    assert kedge.Classifier(made)(images(4)).equal(kedge.Classifier(net.eval())(images(4)))
    assert head_name(made) == "fc.classes"  # so that methods that read the head find the one of the classes
    assert UDG.prepare(net).fc.groups.out_features == 1000
    assert UDG.prepare(net, groups=7).fc.groups.weight.equal(made.fc.groups.weight)
    assert not UDG.prepare(net, groups=7, seed=1).fc.groups.weight.equal(made.fc.groups.weight)


def test_prepare_takes_a_classifier_and_another_head():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Identity()).double()
    made = UDG.prepare(kedge.Classifier(network, mean=0.5, std=0.25), groups=5)
    assert made.network[1].groups.weight.dtype == torch.float64
    assert made(images(2), raw=True).extra[0].shape == (2, 5)
    assert isinstance(UDG.prepare(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), groups=5, head="0")[0], GroupHead)


def test_prepare_says_what_it_cannot_take():
    with pytest.raises(InputError, match="groups must be a whole number of at least 2; got 1"):
        UDG.prepare(plain(), groups=1)
    with pytest.raises(InputError, match="head must name a linear layer"):
        UDG.prepare(plain(), head="prep")
    with pytest.raises(ArchitectureError, match="no linear layer"):
        UDG.prepare(nn.Sequential(nn.Flatten()))
    with pytest.raises(InputError, match="net must not have a group head yet; it has one"):
        UDG.prepare(grouped())


# Which unlabelled images are known.


def test_filtering_by_hand():
    """Group 0: 4 of 5 of class 1. Group 1: 4 of 6. Group 2: no labels. Group 3: 2 and 2. Group 4: labels alone."""
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 4])
    labels = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2])
    unlabelled = torch.tensor([0, 1, 1, 2, 3])
    assert filter_known(groups, labels, unlabelled, 0.79).tolist() == [1, -1, -1, -1, -1]
    assert filter_known(groups, labels, unlabelled, 0.8).tolist() == [-1] * 5  # more than, not as much as
    assert filter_known(groups, labels, unlabelled, 0.6).tolist() == [1, 0, 0, -1, -1]
    assert filter_known(groups, labels, unlabelled, 1).tolist() == [-1] * 5


@pytest.mark.parametrize("purity", [0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9])
def test_filtering_is_the_rule_in_words(purity):
    taken = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, 60)
        groups = np.where(rng.random(60) < 0.8, 2 * labels, rng.integers(0, 9, 60))
        unlabelled = rng.integers(0, 9, 14)
        expected = naive_filter(groups.tolist(), labels.tolist(), unlabelled.tolist(), purity)
        found = filter_known(*(torch.from_numpy(a) for a in (groups, labels, unlabelled)), purity)
        assert found.tolist() == expected
        taken += sum(label >= 0 for label in expected)
    assert 0 < taken < 30 * 14


def test_a_low_purity_takes_the_larger_class():
    groups, labels = torch.zeros(5, dtype=torch.long), torch.tensor([0, 0, 1, 1, 1])
    assert filter_known(groups, labels, torch.tensor([0]), 0.3).tolist() == [1]


# Before an epoch.


def test_groups_are_those_of_k_means_on_the_features():
    net, data, outliers = tiny(), labelled(30, classes=3), beside(20)
    net.train()
    loss = UDG.loss(purity=0.5, seed=3)
    loss.begin_epoch(net, data, outliers, RULE, epoch=2)
    inner = net.network
    x = torch.cat([data.images, outliers.images]).double() / 255
    features = inner[2](inner[1](inner[0]((x - 0.5) / 0.25))).detach()  # (50, 5)
    expected, _ = kmeans(features, 4, seed=mix_seed(3, 2))
    found = loss.state()
    assert found["groups"].equal(expected[:30])
    assert found["outlier_groups"].equal(expected[30:])
    pseudo = naive_filter(expected[:30].tolist(), data.labels.tolist(), expected[30:].tolist(), 0.5)
    assert found["pseudo_labels"].tolist() == pseudo
    assert len(expected.unique()) == 4
    assert net.training


def test_a_case_by_hand():
    """Dark images are of class 0 and some unlabelled ones are too; the bright ones, of class 1, are as many beside."""
    data = kedge.ImageSet(torch.cat([bright(9, 0), bright(5, 200)]), torch.tensor([0] * 9 + [1] * 5), "toy")
    outliers = kedge.ImageSet(torch.cat([bright(2, 0, 1), bright(5, 200, 1), bright(4, 100, 1)]), name="beside")
    loss = UDG.loss()
    loss.begin_epoch(mean_of_pixels(groups=3), data, outliers, RULE, epoch=0)
    found = loss.state()
    dark, light, grey = (int(found["outlier_groups"][i]) for i in (0, 2, 7))
    assert found["groups"].tolist() == [dark] * 9 + [light] * 5
    assert found["outlier_groups"].tolist() == [dark] * 2 + [light] * 5 + [grey] * 4
    assert found["pseudo_labels"].tolist() == [0] * 2 + [-1] * 9  # 9 of 11 are more than 0.8; 5 of 10 are not


def test_features_are_taken_in_evaluation_mode_and_without_a_trace():
    net = kedge.Classifier(grouped(), mean=0.5, std=0.25).train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    loss = UDG.loss()
    loss.begin_epoch(net, labelled(), beside(), RULE, epoch=0)
    after = net.state_dict()
    assert all(after[key].equal(before[key]) for key in before if not key.startswith("network.fc.groups"))
    assert all(module.training for module in net.modules())
    assert torch.get_rng_state().equal(state)
    assert all(parameter.grad is None for parameter in net.parameters())
    with torch.no_grad():
        features = net.eval().features(torch.cat([labelled().images, beside().images]), ["fc.classes:in"])[1]
    expected, _ = kmeans(features["fc.classes:in"], 6, seed=mix_seed(0, 0))
    assert torch.cat([loss.state()[key] for key in ("groups", "outlier_groups")]).equal(expected)


def test_the_group_head_is_drawn_anew_before_each_epoch():
    net = tiny()
    loss = UDG.loss(seed=1)
    drawn = []
    for epoch in (0, 1, 1):
        net.network[3].groups.bias.data.fill_(1.0)
        loss.begin_epoch(net, labelled(classes=3), beside(), RULE, epoch)
        drawn.append(net.network[3].groups.weight.detach().clone())
        assert not net.network[3].groups.bias.any()
    assert not drawn[0].equal(drawn[1])
    assert drawn[1].equal(drawn[2])
    many = UDG.prepare(plain(), groups=500)
    many.fc.draw(0)
    assert many.fc.groups.weight.mean().item() == pytest.approx(0, abs=4e-4)
    assert many.fc.groups.weight.std().item() == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize("kind", ["pictures", "floats", "random"])
def test_data_sets_are_grouped_as_sets_of_their_pixels_are(kind):
    data, outliers = labelled(classes=3), beside()

    class Noisy:
        """Adds noise of its own to the images."""

        def __len__(self):
            return 48

        def __getitem__(self, index):
            return (data.images[index] / 255 * 0.9 + torch.rand(1, 8, 8) / 10).float(), index % 3

    source = {
        "pictures": [(Image.fromarray(image[0].numpy()), int(label)) for image, label in data],
        "floats": [(image / 255, int(label)) for image, label in data],
        "random": Noisy(),
    }[kind]
    runs = []
    for draw in (1, 2):
        torch.manual_seed(draw)
        loss = UDG.loss()
        loss.begin_epoch(tiny(dtype=torch.float32), source, outliers, RULE, epoch=0)
        runs.append(loss.state())
    assert all(runs[0][key].equal(runs[1][key]) for key in runs[0])
    if kind != "random":
        loss.begin_epoch(tiny(dtype=torch.float32), data, outliers, RULE, epoch=0)
        assert all(loss.state()[key].equal(runs[0][key]) for key in runs[0])


def test_half_precision_features_are_grouped_in_single_precision():
    net = tiny(dtype=torch.bfloat16)
    loss = UDG.loss()
    loss.begin_epoch(net, labelled(classes=3), beside(), RULE, epoch=0)
    with torch.no_grad():
        x = torch.cat([labelled().images, beside().images]).to(torch.bfloat16) / 255
        features = net.features(x, ["3.classes:in"])[1]["3.classes:in"]
    assert loss.state()["groups"].equal(kmeans(features.float(), 4, seed=mix_seed(0, 0))[0][:48])


def test_processes_take_the_groups_of_the_first(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work(rank):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        queue.put((rank, _of_first_process(torch.tensor([rank, 10 + rank])).tolist()))
        torch.distributed.destroy_process_group()

    workers = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(queue.get() for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
    assert found == {0: [0, 10], 1: [0, 10]}
    assert _of_first_process(torch.tensor([1, 11])).tolist() == [1, 11]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(labelled(), batch_size=16), "data must be a set, since its images are grouped .*got a data loader"),
        (list(images()), r"a label in 0\.\.2 for each image, since the network has 3 outputs; got none"),
        ([(image, i % 5) for i, image in enumerate(images())], r"label in 0\.\.2 .*got \[0, 1, 2, 3, 4\]"),
        ([(image, i % 3 - 1) for i, image in enumerate(images())], r"label in 0\.\.2 .*got \[-1, 0, 1\]"),
    ],
)
def test_data_that_cannot_be_grouped(data, message):
    with pytest.raises(InputError, match=message):
        UDG.loss().begin_epoch(tiny(), data, beside(), RULE, epoch=0)


def test_a_data_loader_is_refused_before_epochs_are_spent_on_it():
    with pytest.raises(InputError, match="data must be a set"):
        UDG.loss(start=5).begin_epoch(tiny(), DataLoader(labelled()), beside(), RULE, epoch=0)


def test_one_set_may_be_both():
    data, loss = labelled(classes=3), UDG.loss()
    loss.begin_epoch(tiny(), data, data, RULE, epoch=0)
    assert loss.state()["groups"].equal(loss.state()["outlier_groups"])


def test_more_groups_than_images():
    with pytest.raises(
        InputError, match=r"groups must be at most the number of images, 25 .*; got 26: pass fewer to UDG"
    ):
        UDG.loss().begin_epoch(tiny(groups=26), labelled(15, classes=3), beside(10), RULE, epoch=0)
    UDG.loss().begin_epoch(tiny(groups=25), labelled(15, classes=3), beside(10), RULE, epoch=0)


# The loss.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pseudo", [[2, -1, 0, -1], [-1] * 4, [1] * 4])
def test_the_loss_by_hand(smoothing, pseudo):
    net, data, outliers = tiny(), labelled(10, classes=3), beside(8)
    loss = UDG.loss(weight_groups=0.3, weight_outliers=0.7)
    groups, theirs = torch.arange(10) % 4, (torch.arange(8) * 3) % 4
    labels = torch.full((8,), -1)
    labels[[1, 6, 7, 2]] = torch.tensor(pseudo)
    loss.load_state({"groups": groups, "outlier_groups": theirs, "pseudo_labels": labels})
    numbers, beside_numbers = [3, 9, 5], [1, 6, 7, 2]
    made = loss.loss(step_of(net, data, numbers, outliers, beside_numbers, label_smoothing=smoothing))

    known, uniform, grouping = [], [], []
    for source, index, group_of in [(data, numbers, groups), (outliers, beside_numbers, theirs)]:
        for place, i in enumerate(index):
            output = net(source.images[i : i + 1].double() / 255, raw=True)
            p = log_softmax(output.logits[0].tolist())
            label = int(data.labels[i]) if source is data else pseudo[place]
            if label >= 0:
                targets = [smoothing / 3 + (1 - smoothing) * (c == label) for c in range(3)]
                known.append(-sum(t * q for t, q in zip(targets, p, strict=True)))
            else:
                uniform.append(-sum(p) / 3)
            grouping.append(-log_softmax(output.extra[0][0].tolist())[int(group_of[i])])
    expected = sum(known) / len(known) + 0.3 * sum(grouping) / 7
    expected += 0.7 * sum(uniform) / len(uniform) if uniform else 0
    assert made.value.item() == pytest.approx(expected, rel=1e-12)
    assert made.logits.allclose(net(data.images[numbers].double() / 255))


def test_before_the_first_grouping_the_labels_are_learned_alone():
    net, data, outliers = tiny(), labelled(10, classes=3), beside(8)
    loss = UDG.loss(start=2)
    loss.begin_epoch(net, data, outliers, RULE, epoch=1)
    assert loss.state() == {}
    made = loss.loss(step_of(net, data, [0, 1, 2], outliers, [0, 1], epoch=1))
    p = net(data.images[:3].double() / 255).log_softmax(dim=1)
    assert made.value.item() == pytest.approx(-(p[0, 0] + p[1, 1] + p[2, 2]).item() / 3)
    made.value.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())  # which parallel training waits for
    assert not net.network[3].groups.weight.grad.any()
    loss.begin_epoch(net, data, outliers, RULE, epoch=2)
    assert set(loss.state()) == {"groups", "outlier_groups", "pseudo_labels"}
    loss.begin_epoch(net, data, outliers, RULE, epoch=0)  # of another run
    assert loss.state() == {}


def test_labels_beyond_the_classes_are_named():
    net, data = tiny(), labelled(10, classes=4)
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.2.*got 0\.\.3"):
        UDG.loss().loss(step_of(net, data, [0, 3], beside(), [0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 1}, "groups must be a whole number of at least 2; got 1"),
        ({"purity": 1.1}, r"purity must lie in \[0, 1\]; got 1\.1"),
        ({"weight_groups": -1}, r"weight_groups must lie in \[0, inf\]; got -1"),
        ({"weight_outliers": math.nan}, r"weight_outliers must lie in"),
        ({"outliers_per_image": 0}, "outliers_per_image must be a whole number of at least 1; got 0"),
        ({"start": 0.5}, r"start must be a whole number of at least 0; got 0\.5"),
    ],
)
def test_what_an_objective_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        UDG.loss(**options)


def test_the_objective_describes_itself():
    given = {
        "groups": 9,
        "purity": 0.5,
        "weight_groups": 0.2,
        "weight_outliers": 0.3,
        "outliers_per_image": 2,
        "start": 1,
        "seed": 5,
    }
    assert UDG.loss(**given).config() == given
    assert UDG.loss(**given).outliers_per_image == 2
    assert UDG.loss().config() | given == given


# The training.


def test_objective_outliers_and_network_must_fit_each_other():
    with pytest.raises(InputError, match=r"net must have a group head; it has none: make it with UDG\.prepare\(net\)"):
        kedge.train(plain(), labelled(), RECIPE, loss=UDG.loss(), outliers=beside())
    with pytest.raises(InputError, match=r"groups must be 6, as the network was prepared for; got 7: leave it out"):
        kedge.train(grouped(), labelled(), RECIPE, loss=UDG.loss(groups=7), outliers=beside())
    with pytest.raises(InputError, match="'unsupervised dual grouping' needs outliers"):
        kedge.train(grouped(), labelled(), RECIPE, loss=UDG.loss(groups=6))
    with pytest.raises(InputError, match="'unsupervised dual grouping' trains plain networks"):
        kedge.train(kedge.anchor(grouped()), labelled(), RECIPE, loss=UDG.loss(), outliers=beside())
    loader = DataLoader(labelled(), batch_size=16)
    with pytest.raises(InputError, match=r"data must be a set.*got a data loader"):
        kedge.train(grouped(), loader, RECIPE, loss=UDG.loss(), outliers=beside())


def test_with_no_epoch_grouped_it_is_plain_training():
    trained = kedge.train(plain(), labelled(), RECIPE)
    waiting = kedge.train(grouped(), labelled(), RECIPE, loss=UDG.loss(start=2), outliers=beside())
    for name, value in trained.network.state_dict().items():
        assert waiting.network.state_dict()[name.replace("fc.", "fc.classes.")].equal(value), name


def test_without_weight_on_groups_and_without_filtering_it_is_outlier_exposure():
    options = {"outliers_per_image": 2}
    exposure = kedge.OutlierExposure.loss(weight=0.5, **options)
    exposed = kedge.train(plain(), labelled(), RECIPE, loss=exposure, outliers=beside())
    loss = UDG.loss(purity=1, weight_groups=0, weight_outliers=0.5, **options)
    net = kedge.train(grouped(), labelled(), RECIPE, loss=loss, outliers=beside())
    for name, value in exposed.network.state_dict().items():
        assert net.network.state_dict()[name.replace("fc.", "fc.classes.")].allclose(value, rtol=1e-3, atol=1e-5), name


def turned_squares(n=160) -> tuple[kedge.ImageSet, kedge.ImageSet, torch.Tensor]:
    """Left or right is bright where there are labels, above or below in most other images; 20 of those are known."""
    data = labelled(n)
    fresh = images(160, seed=1)
    labels = torch.cat([torch.arange(20) % 2, torch.full((140,), -1)])
    for x, y in ((data.images, data.labels), (fresh[:20], labels[:20])):
        x[y == 0, :, :, :4] //= 8
        x[y == 1, :, :, 4:] //= 8
    fresh[20:90, :, :4] //= 8
    fresh[90:, :, 4:] //= 8
    return data, kedge.ImageSet(fresh, name="mixed"), labels


def test_pseudo_labels_go_to_the_unlabelled_images_of_known_classes():
    data, mixed, labels = turned_squares()
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)
    loss = UDG.loss()
    net = kedge.train(grouped(groups=8), data, recipe, loss=loss, outliers=mixed)
    found = loss.state()["pseudo_labels"]
    assert (found[:20] == labels[:20]).float().mean() > 0.8
    assert (found[20:] >= 0).float().mean() < 0.1
    detector = UDG(net).fit(data)
    test, strange, known = turned_squares()[0].images.flip(2), mixed.images[20:].flip(2), data.labels
    assert kedge.metrics.auroc(detector.score(test), detector.score(strange)) > 0.95
    assert (detector.calibrate(data)(test).label == known).float().mean() > 0.95
    assert detector.outliers is not None


class StopError(Exception):
    pass


@pytest.mark.parametrize("start", [0, 1])
def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_never_had(tmp_path, start):
    recipe = Recipe(epochs=2, batch=32, lr=0.05, crop=2)  # three steps an epoch
    data, mixed, _ = turned_squares(96)

    def run(directory, stop_at=None):
        def stop(progress):
            if progress.step == stop_at:
                raise StopError

        loss = UDG.loss(start=start)
        options = {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": stop}
        net = kedge.train(grouped(), data, recipe, loss=loss, outliers=mixed, **options)
        return net, loss.state()

    straight, state = run("straight")
    for at in (3, 5):
        with pytest.raises(StopError):
            run(f"stopped {at}", at)
        net, again = run(f"stopped {at}")
        assert same(net, straight)
        assert all(again[key].equal(state[key]) for key in state)


# The detector.


@pytest.mark.parametrize("score", list(scores.SCORES))
def test_the_score_is_that_of_the_logits(score, tmp_path, monkeypatch):
    monkeypatch.setitem(DETECTORS, "udg", UDG)
    net = kedge.Classifier(grouped(classes=3, seed=3).eval(), mean=0.5, std=0.25)
    detector = UDG(net, score=score).fit(labelled()).calibrate(labelled(seed=1))
    x = images(30, 5)
    with torch.no_grad():
        logits = net.network.fc.classes(net.features(x, ["fc.classes:in"])[1]["fc.classes:in"])
    assert detector.score(x).allclose(scores.SCORES[score](logits), atol=1e-6)
    assert detector.score(x, batch_size=7).allclose(detector.score(x), rtol=1e-4, atol=1e-6)
    assert detector.cost == Cost(forward=1)
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert isinstance(again, UDG)
    assert again.config() == {"score": score}
    assert again(x).score.equal(detector(x).score)
    assert again.net.network.fc.groups.weight.equal(net.network.fc.groups.weight)


def test_it_scores_by_msp_unless_told_otherwise():
    assert UDG(grouped()).config() == {"score": "msp"}
    with pytest.raises(InputError, match=r"score must be one of 'amp', 'msp'.*got 'best'"):
        UDG(grouped(), score="best")


def test_an_anchored_network_gives_the_mean_over_its_anchors():
    net = kedge.anchor(grouped(seed=3).eval(), init="fresh", mean=0.5, std=0.25)
    detector = UDG(net).fit(labelled())
    x = images(5, 5)
    logits = net.per_anchor_logits(x.float() / 255).mean(dim=0)
    assert detector.score(x).allclose(-logits.softmax(dim=1).amax(dim=1), atol=1e-6)
