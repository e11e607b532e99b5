"""Maximum classifier discrepancy: two heads, the loss that divides them, and the distance that scores."""

import copy
import math

import pytest
import torch
from torch import nn

import kedge
from kedge.detectors import Cost
from kedge.detectors.discrepancy import ClassifierDiscrepancy, TwoHeads
from kedge.detectors.registry import DETECTORS
from kedge.errors import ArchitectureError, InputError
from kedge.models import build
from kedge.models.head import HeadOutput
from kedge.seeds import seeded
from kedge.training import Recipe
from kedge.training.losses import Step

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


def images(n=48, seed=0, channels=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, 8, 8), dtype=torch.uint8, generator=generator)


def labelled(n=48, seed=0, name="toy", classes=2) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), torch.arange(n) % classes, name)


def beside(n=40, seed=100, name="beside") -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), name=name)


def plain(classes=2, seed=0) -> nn.Module:
    with seeded(seed):
        return build("compact", width=4, classes=classes, channels=1)


def two(classes=2, seed=0) -> nn.Module:
    return ClassifierDiscrepancy.prepare(plain(classes, seed), seed=seed)


def tiny(classes=4, seed=0, dtype=torch.float64) -> kedge.Classifier:
    with seeded(seed):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, classes)).to(dtype)
    net = ClassifierDiscrepancy.prepare(kedge.Classifier(network, mean=0.5, std=0.25), seed=seed)
    for parameter in net.network[3].parameters():
        parameter.data.mul_(4)  # for softmaxes that differ
    return net


def step_of(net, x, y, outliers, *, done=0.0, label_smoothing=0.0) -> Step:
    return Step(net, net, x, y, None, outliers, None, {}, done, 0, len(x), label_smoothing)


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(z) for z in logits)
    return [math.exp(z) / total for z in logits]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# The two heads.


def test_prepare_puts_two_different_heads_in_the_place_of_one():
    net, state = plain(classes=3), torch.get_rng_state()
    before = copy.deepcopy(net.state_dict())
    made = ClassifierDiscrepancy.prepare(net)
    assert torch.get_rng_state().equal(state)
    assert isinstance(net.fc, nn.Linear)
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())
    heads = made.fc
    assert isinstance(heads, TwoHeads)
    assert heads.first.weight.shape == heads.second.weight.shape == (3, 32)
    assert not heads.first.weight.equal(heads.second.weight)
    assert not heads.first.weight.equal(net.fc.weight)
    assert all(made.state_dict()[key].equal(before[key]) for key in before if not key.startswith("fc."))
    assert ClassifierDiscrepancy.prepare(net).fc.first.weight.equal(heads.first.weight)
    assert not ClassifierDiscrepancy.prepare(net, seed=1).fc.first.weight.equal(heads.first.weight)


def test_prepare_takes_a_network_of_any_kind():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False), nn.Identity()).double()
    made = ClassifierDiscrepancy.prepare(kedge.Classifier(network, mean=0.5, std=0.25))
    assert isinstance(made, kedge.Classifier)
    assert made.network[1].first.bias is None
    assert made.network[1].first.weight.dtype == torch.float64
    assert made(images(2)).shape == (2, 3)
    two_layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert isinstance(ClassifierDiscrepancy.prepare(two_layers, head="0")[0], TwoHeads)


def test_prepare_says_what_it_cannot_take():
    with pytest.raises(InputError, match=r"head must name a linear layer, one of \['fc'\]; got 'stage1'"):
        ClassifierDiscrepancy.prepare(plain(), head="stage1")
    with pytest.raises(ArchitectureError, match="no linear layer"):
        ClassifierDiscrepancy.prepare(nn.Sequential(nn.Flatten()))
    with pytest.raises(InputError, match="net must have one head, to be replaced by two; it has two already"):
        ClassifierDiscrepancy.prepare(two())


def test_the_logits_are_the_mean_and_give_the_geometric_mean_of_the_softmaxes():
    net = tiny()
    output = net(images(6), raw=True)
    assert isinstance(output, HeadOutput)
    first, second = output.extra
    features = net.network[2](net.network[1](net.network[0](net.normalise(images(6)))))
    assert first.allclose(features @ net.network[3].first.weight.T + net.network[3].first.bias)
    assert second.allclose(features @ net.network[3].second.weight.T + net.network[3].second.bias)
    assert output.logits.allclose((first + second) / 2)
    assert net(images(6)).equal(output.logits)
    both = (first.softmax(dim=1) * second.softmax(dim=1)).sqrt()
    assert output.logits.softmax(dim=1).allclose(both / both.sum(dim=1, keepdim=True))


# The loss.


@pytest.mark.parametrize("margin", [1.2, 0.0, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_by_hand(margin, smoothing):
    net, x, outliers = tiny(), images(5).double() / 255, images(7, 1).double() / 255
    y = torch.tensor([0, 3, 1, 2, 0])
    with torch.no_grad():
        known, unknown = (net(part, raw=True).extra for part in (x, outliers))
    labels = 0.0
    for head in known:
        for logits, label in zip(head.tolist(), y.tolist(), strict=True):
            targets = [smoothing / 4 + (1 - smoothing) * (c == label) for c in range(4)]
            labels -= sum(t * math.log(p) for t, p in zip(targets, softmax(logits), strict=True)) / 5
    entropies = [[-sum(p * math.log(p) for p in softmax(row)) for row in head.tolist()] for head in unknown]
    apart = sum(a - b for a, b in zip(*entropies, strict=True)) / 7
    loss = ClassifierDiscrepancy.loss(margin=margin, start=0.5)
    early = loss.loss(step_of(net, x, y, outliers, done=0.49, label_smoothing=smoothing))
    late = loss.loss(step_of(net, x, y, outliers, done=0.5, label_smoothing=smoothing))
    assert early.value.item() == pytest.approx(labels, rel=1e-12)
    assert late.value.item() == pytest.approx(labels + max(margin - apart, 0), rel=1e-12)
    assert abs(apart) > 0.01
    for made in (early, late):
        assert made.logits.allclose((known[0] + known[1]) / 2)


@pytest.mark.parametrize(("unsure", "expected"), [("first", 0.0), ("second", 1.2 + math.log(4))])
def test_the_first_head_must_be_the_unsure_one(unsure, expected):
    """Entropies of log 4 and of 0: their difference is more than the margin, or as far from it as can be."""
    net = tiny()
    heads = net.network[3]
    for name in ("first", "second"):
        head = getattr(heads, name)
        nn.init.zeros_(head.weight)
        head.bias.data = torch.tensor([0.0 if name == unsure else 200.0, 0, 0, 0], dtype=torch.float64)
    x, y = images(3).double() / 255, torch.tensor([0, 0, 0])
    labels = math.log(4) + 0.0
    made = ClassifierDiscrepancy.loss(start=0).loss(step_of(net, x, y, x))
    assert made.value.item() == pytest.approx(labels + expected)


def test_a_margin_that_is_met_moves_nothing():
    net, x, y = tiny(), images(5).double() / 255, torch.tensor([0, 3, 1, 2, 0])
    with torch.no_grad():
        first, second = (kedge.scores.entropy(z) for z in net(x, raw=True).extra)
    apart = (first - second).mean().item()
    net.network[3].first, net.network[3].second = (  # so that the difference is positive
        (net.network[3].first, net.network[3].second) if apart > 0 else (net.network[3].second, net.network[3].first)
    )
    parameters = list(net.parameters())
    gradients = {}
    for name, margin, done in [
        ("labels", 0.0, 0.0),
        ("met", 0.9 * abs(apart), 1.0),
        ("not met", 1.1 * abs(apart), 1.0),
    ]:
        loss = ClassifierDiscrepancy.loss(margin=margin, start=0.5)
        value = loss.loss(step_of(net, x, y, x, done=done)).value
        gradients[name] = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
    assert gradients["met"].allclose(gradients["labels"])
    assert not gradients["not met"].allclose(gradients["labels"])


def test_labels_beyond_the_classes_are_named():
    net, x = tiny(), images(2).double() / 255
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.3.*got 1\.\.4"):
        ClassifierDiscrepancy.loss().loss(step_of(net, x, torch.tensor([1, 4]), x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": -1}, r"margin must lie in \[0, inf\]; got -1"),
        ({"start": 1.5}, r"start must lie in \[0, 1\]; got 1\.5"),
        ({"outliers_per_image": 0}, "outliers_per_image must be a whole number of at least 1; got 0"),
    ],
)
def test_what_an_objective_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        ClassifierDiscrepancy.loss(**options)


def test_the_objective_describes_itself():
    loss = ClassifierDiscrepancy.loss(margin=0.5, start=0.9, outliers_per_image=3)
    assert loss.config() == {"margin": 0.5, "start": 0.9, "outliers_per_image": 3}
    assert loss.outliers_per_image == 3
    assert ClassifierDiscrepancy.loss().config()["margin"] == 1.2


# The training.


def test_the_same_as_a_loop_by_hand():
    """Each step takes all images, so that their order does not matter; the first two of four leave the others out."""
    data, outliers = labelled(12, classes=4), beside(24)
    recipe = Recipe(epochs=4, batch=12, lr=0.1, momentum=0.8, weight_decay=0.01, crop=0, flip=False)
    loss = ClassifierDiscrepancy.loss(start=0.5, outliers_per_image=2)
    net, mine = tiny(), tiny()
    trained = kedge.train(net, data, recipe, loss=loss, outliers=outliers)
    x, o = ((s.images.float() / 255).double() for s in (data, outliers))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    for number in range(4):
        p, q = (z.softmax(dim=1) for z in mine(x, raw=True).extra)
        rows = torch.arange(12)
        loss = -p[rows, data.labels].log().mean() - q[rows, data.labels].log().mean()
        if number >= 2:
            p, q = (z.softmax(dim=1) for z in mine(o, raw=True).extra)
            apart = ((q * q.log()).sum(dim=1) - (p * p.log()).sum(dim=1)).mean()
            loss = loss + torch.relu(1.2 - apart)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in mine.named_parameters():
        assert trained.get_parameter(name).allclose(value, rtol=1e-9, atol=1e-12), name


def test_unlabelled_images_are_not_seen_before_their_time():
    snapshots = []
    for seed in (100, 101):
        net = two()

        def keep(progress, net=net):
            if progress.step in (3, 6):
                snapshots.append(copy.deepcopy(net.state_dict()))

        loss = ClassifierDiscrepancy.loss(start=0.5)
        kedge.train(net, labelled(), RECIPE, loss=loss, outliers=beside(seed=seed), progress=keep)
    half, end, other_half, other_end = snapshots
    assert all(half[key].equal(other_half[key]) for key in half)
    assert not all(end[key].equal(other_end[key]) for key in end)


def test_the_heads_part_on_what_they_have_no_labels_for():
    """Left or right is bright where there are labels; above or below in the other images, of which a few are known."""
    data = labelled(96)
    data.images[data.labels == 0, :, :, :4] //= 4
    data.images[data.labels == 1, :, :, 4:] //= 4
    turned = data.images.transpose(2, 3).contiguous()
    mixed = kedge.ImageSet(torch.cat([turned, data.images[:20].flip(2)]), name="mixed")
    recipe = Recipe(epochs=12, batch=16, lr=0.05, crop=0, flip=False)
    loss = ClassifierDiscrepancy.loss(margin=0.6, start=0.5)
    net = kedge.train(two(), data, recipe, loss=loss, outliers=mixed)
    detector = ClassifierDiscrepancy(net).fit(data)
    inside, outside = detector.score(data.images[20:].flip(2)), detector.score(turned.flip(3))
    assert kedge.metrics.auroc(inside, outside) > 0.95
    assert outside.mean() > inside.mean() + 0.3
    assert detector.calibrate(data)(data.images).label.equal(data.labels)
    assert detector.outliers is not None


def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_never_had(tmp_path):
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=2)

    class StopError(Exception):
        pass

    def run(directory, stop_at=None):
        def stop(progress):
            if progress.step == stop_at:
                raise StopError

        options = {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": stop}
        loss = ClassifierDiscrepancy.loss(start=0.4)
        return kedge.train(two(), labelled(), recipe, loss=loss, outliers=beside(), **options)

    straight = run("straight")
    for at in (2, 5, 8):
        with pytest.raises(StopError):
            run(f"stopped {at}", at)
        assert same(run(f"stopped {at}"), straight)


def test_objective_outliers_and_network_must_fit_each_other():
    loss = ClassifierDiscrepancy.loss()
    with pytest.raises(
        InputError, match=r"net must have two heads; it has one: .*ClassifierDiscrepancy\.prepare\(net\)"
    ):
        kedge.train(plain(), labelled(), RECIPE, loss=loss, outliers=beside())
    with pytest.raises(InputError, match=r"'classifier discrepancy' needs outliers"):
        kedge.train(two(), labelled(), RECIPE, loss=loss)
    with pytest.raises(InputError, match=r"'classifier discrepancy' trains plain networks"):
        kedge.train(kedge.anchor(two()), labelled(), RECIPE, loss=loss, outliers=beside())


# The detector.


def test_the_score_is_the_distance_between_the_softmaxes():
    net = tiny()
    detector = ClassifierDiscrepancy(net).fit(labelled())
    x = images(9, 5)
    with torch.no_grad():
        first, second = net(x, raw=True).extra
    expected = []
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        expected.append(sum(abs(p - q) for p, q in zip(softmax(a), softmax(b), strict=True)))
    assert detector.score(x).tolist() == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 9
    assert detector.cost == Cost(forward=1)
    assert detector.config() == {}
    found = detector.calibrate(labelled(seed=1))(x)
    assert found.logits.allclose((first + second) / 2)


def test_heads_that_agree_score_zero_and_heads_that_contradict_score_two():
    net = tiny(classes=2)
    heads = net.network[3]
    heads.second = copy.deepcopy(heads.first)
    assert ClassifierDiscrepancy(net).fit(labelled()).score(images(5)).tolist() == [0.0] * 5
    for head, sign in ((heads.first, 1), (heads.second, -1)):
        nn.init.zeros_(head.weight)
        head.bias.data = sign * torch.tensor([50.0, -50.0], dtype=torch.float64)
    assert ClassifierDiscrepancy(net).fit(labelled()).score(images(5)).tolist() == pytest.approx([2.0] * 5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_the_batch(dtype, tolerance):
    detector = ClassifierDiscrepancy(tiny(dtype=dtype)).fit(labelled())
    x, order = images(30, 5), torch.randperm(30)
    expected = detector.score(x)
    for size in (1, 7):
        assert detector.score(x, batch_size=size).allclose(expected, rtol=tolerance, atol=0)
        assert detector.score(x[order], batch_size=size).allclose(expected[order], rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", ["built-in", "own"])
def test_it_is_saved_and_loaded(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(DETECTORS, "discrepancy", ClassifierDiscrepancy)
    net = kedge.Classifier(two(seed=3).eval(), mean=0.5, std=0.25) if kind == "built-in" else tiny(seed=3)
    detector = ClassifierDiscrepancy(net).fit(labelled()).calibrate(labelled(seed=1))
    detector.save(tmp_path / "saved.kedge")
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 4))
    again = kedge.load(tmp_path / "saved.kedge", **({} if kind == "built-in" else {"model": own}))
    assert isinstance(again, ClassifierDiscrepancy)
    x = images(9, 5)
    assert again(x).score.equal(detector(x).score)
    assert again(x).logits.equal(detector(x).logits)


def test_an_anchored_network_gives_each_head_the_mean_over_its_anchors(tmp_path, monkeypatch):
    monkeypatch.setitem(DETECTORS, "discrepancy", ClassifierDiscrepancy)
    net = kedge.anchor(two(seed=3).eval(), init="fresh", mean=0.5, std=0.25)
    detector = ClassifierDiscrepancy(net).fit(labelled())
    x = images(4, 5)
    sums = [0.0, 0.0]
    anchors = net.anchors
    for anchor in anchors:
        net.set_anchors(anchor[None])
        with torch.no_grad():
            _, found = net.features(x.float() / 255, ["fc.first", "fc.second"])
        sums = [s + found[name] / 5 for s, name in zip(sums, ("fc.first", "fc.second"), strict=True)]
    net.set_anchors(anchors)
    expected = (sums[0].softmax(dim=1) - sums[1].softmax(dim=1)).abs().sum(dim=1)
    detector.fit(labelled())
    assert detector.score(x).allclose(expected, atol=1e-6)
    assert detector.cost == Cost(forward=5)
    detector.save(tmp_path / "saved.kedge")
    assert kedge.load(tmp_path / "saved.kedge").score(x).equal(detector.score(x))


def test_a_network_with_one_head_is_refused():
    for net in (plain(), kedge.Classifier(plain())):
        with pytest.raises(InputError, match=r"net must have two heads; it has one: make them with Classifier"):
            ClassifierDiscrepancy(net)
