"""Every detector behind the same six verbs: build, fit, score, calibrate, call, save."""

import copy
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge import calibration, scores
from kedge.detectors import Detector, Outputs
from kedge.detectors.registry import DETECTORS
from kedge.errors import InputError, KedgeWarning, NotReadyError
from kedge.models import build
from kedge.seeds import seeded

PLAIN = ["msp", "max_logit", "entropy", "energy"]  # tests/test_methods.py has the rest
EVERY = [(name, "plain") for name in PLAIN] + [(name, "anchored") for name in ["amp", *PLAIN]]
VARIANTS = ["paper", "authors"]


def images(n=40, channels=3, side=8, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def labelled(n=40, classes=4, **kwargs) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, **kwargs), torch.arange(n) % classes, classes=tuple("abcdefgh"[:classes]))


def network(kind="plain", *, classes=4, channels=3, seed=0, dtype=torch.float32) -> kedge.Classifier:
    """A compact network whose weights and batch statistics are drawn large enough for scores to vary."""
    with seeded(seed):
        net = build("compact", width=4, classes=classes, channels=channels)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(5)
    net = net.to(dtype).eval()
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", seed=seed, mean=[0.5] * channels, std=[0.25] * channels)
    return kedge.Classifier(net, mean=[0.5] * channels, std=[0.25] * channels)


def fitted(name="amp", kind="anchored", data=None, **options) -> Detector:
    data = labelled() if data is None else data
    return DETECTORS[name](network(kind, channels=data.images.shape[1]), **options).fit(data)


def colourful(*, anchored: bool) -> nn.Module:
    """Knows red, green and blue by how much of each there is."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[0].weight.data = 20 * torch.eye(3)[:, :, None, None]
    return kedge.anchor(net) if anchored else net


# The six verbs.


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_build_fit_score_calibrate_call_save_and_load(name, kind, tmp_path):
    detector = DETECTORS[name](network(kind))
    assert isinstance(detector.net, kedge.Classifier)
    assert detector.fit(labelled(seed=1)) is detector
    assert detector.calibrate(labelled(60, seed=2)) is detector
    x = images(9, seed=3)
    found = detector(x)
    assert len(found) == 9
    assert found.score.equal(detector.score(x))
    assert found.label.equal(found.logits.argmax(dim=1))
    assert found.logits.shape == found.probability.shape == (9, 4)
    assert found.probability.sum(dim=1).allclose(torch.ones(9))
    assert found.is_ood.dtype == torch.bool
    assert (found.tau is not None) == (name == "amp")
    assert len(set(found.score.tolist())) == 9
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert type(again) is type(detector)
    assert again(x).score.equal(found.score)


def test_the_names_are_the_detectors_own():
    assert all(kind.name == name for name, kind in DETECTORS.items())
    assert set(DETECTORS) >= {"amp", "msp", "max_logit", "entropy", "energy"}


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_larger_score_is_further_out(name, kind):
    """Black and white images hold no colour more than another; red, green and blue ones are in distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 40, (60, 3, 8, 8), dtype=torch.uint8, generator=generator)
    inside = noise.clone()
    inside[torch.arange(60), torch.arange(60) % 3] += 200
    net = colourful(anchored=kind == "anchored")
    detector = DETECTORS[name](net).fit(inside[:30]).calibrate(inside[:30])
    assert detector.score(noise).min() > detector.score(inside[30:]).max()
    assert detector(noise).is_ood.all()
    assert detector(inside[30:]).label.equal(torch.arange(30) % 3)
    assert detector(inside[30:]).is_ood.double().mean() <= 0.3


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_step_that_was_skipped_is_named(name, kind, tmp_path):
    detector = DETECTORS[name](network(kind))
    kindname = type(detector).__name__
    for early in (lambda: detector.score(images()), lambda: detector.calibrate(images())):
        with pytest.raises(NotReadyError, match=rf"not fitted: call {kindname}\(net\)\.fit\(train_set\) first"):
            early()
    with pytest.raises(NotReadyError, match=rf"unfitted {kindname} has nothing to save: call fit\(train_set\) first"):
        detector.save(tmp_path / "x")
    detector.fit(images())
    with pytest.raises(NotReadyError, match=r"no threshold yet: call calibrate\(held_out\).*or score\(images\)"):
        detector(images())
    assert detector.score(images()).shape == (40,)


def test_amp_on_a_plain_network_says_what_to_do():
    for net in (network("plain"), nn.Linear(2, 2)):
        with pytest.raises(InputError, match=r"AMP needs an anchored network, got \w+; make one with kedge\.anchor"):
            kedge.AMP(net)
    for kind in DETECTORS.values():
        with pytest.raises(InputError, match=r"got str"):
            kind("resnet18")


@pytest.mark.parametrize("name", PLAIN)
def test_logit_detectors_score_the_network_s_own_logits(name):
    for kind in ("plain", "anchored"):
        detector = fitted(name, kind)
        with torch.no_grad():
            logits = detector.net.eval()(images())
        assert detector.score(images()).allclose(scores.SCORES[name](logits), atol=1e-6)
        assert detector.config() == ({"centred": False} if name == "energy" else {})


@pytest.mark.parametrize("name", ["amp", *PLAIN])
def test_an_anchored_network_without_anchors_gets_them_from_the_training_set(name):
    data = labelled()
    detector = fitted(name, "anchored", data)
    anchors = (detector.net.anchors * 255).round().to(torch.uint8)
    assert len(anchors) == 5
    assert all((data.images == anchor).flatten(1).all(dim=1).any() for anchor in anchors)
    energy = kedge.Energy(network("anchored")).fit(data)
    assert energy.net.anchors.equal(detector.net.anchors)  # the same five for every detector


# What goes in.


def test_the_same_images_get_the_same_scores_whatever_holds_them(tmp_path):
    x = images(9)
    rows = x.permute(0, 2, 3, 1).numpy()
    pil = [Image.fromarray(row) for row in rows]
    for i, image in enumerate(pil):
        image.save(tmp_path / f"{i}.png")
    detector = fitted()
    expected = detector.score(x)
    sources = {
        "ImageSet": kedge.ImageSet(x),
        "(N, H, W, D) array": rows,
        "(N, D, H, W) array": x.numpy(),
        "list": list(x),
        "PIL images": pil,
        "paths": [tmp_path / f"{i}.png" for i in range(9)],
        "strings": [str(tmp_path / f"{i}.png") for i in range(9)],
        "TensorDataset": TensorDataset(x),
        "pairs": [(image, 0) for image in x],
        "loader": DataLoader(x, batch_size=4),
        "loader of pairs": DataLoader(TensorDataset(x, torch.arange(9)), batch_size=4),
        "loader of dicts": DataLoader([{"pixel_values": image} for image in x], batch_size=4),
        "float32": x.float() / 255,
        "float array": rows.astype(np.float32) / 255,
        "loader of floats": DataLoader(TensorDataset(x.float() / 255, torch.arange(9)), batch_size=4),
        "double": x.double() / 255,
        "transposed memory": x.to(memory_format=torch.channels_last),
    }
    for name, source in sources.items():
        assert detector.score(source, batch_size=4).allclose(expected, atol=1e-6), name
    for one in (pil[3], tmp_path / "3.png", str(tmp_path / "3.png"), x[3:4]):
        assert detector.score(one).allclose(expected[3:4], atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_grey_arrays_need_no_channel_axis(variant):
    data = labelled(channels=1)
    detector = fitted(data=data, variant=variant)
    expected = detector.score(data.images)
    assert detector.score(data.images[:, 0].numpy()).allclose(expected, atol=1e-6)
    assert detector.score(data.images.permute(0, 2, 3, 1).numpy()).allclose(expected, atol=1e-6)
    array = data.images[:, 0].numpy()
    assert fitted(data=data, variant=variant).fit(array).score(array).shape == (40,)


def test_pictures_of_any_size_are_brought_to_the_stored_one():
    rng = np.random.default_rng(0)
    detector = fitted()
    rule = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    other = DETECTORS["amp"](detector.net).fit(labelled(), preprocess=rule)
    for mode in ("RGB", "L", "RGBA", "P", "CMYK", "1"):
        picture = Image.fromarray(rng.integers(0, 256, (30, 21, 3), dtype=np.uint8)).convert(mode)
        cropped = ImageOps.fit(picture.convert("RGB"), (8, 8), Image.Resampling.BICUBIC)
        assert detector.score(picture).equal(detector.score(np.array(cropped)[None]))
        stretched = picture.convert("RGB").resize((8, 8), Image.Resampling.NEAREST)
        assert other.score(picture).equal(other.score(np.array(stretched)[None]))


def test_a_rule_that_is_given_replaces_the_one_before():
    detector = fitted()
    assert detector.preprocess == kedge.Preprocess((3, 8, 8))
    assert detector.fit(labelled(side=16)).preprocess == kedge.Preprocess((3, 8, 8))  # its own, once it has one
    rule = kedge.Preprocess((3, 8, 8), fit="stretch")
    assert detector.fit(labelled(), preprocess=rule).preprocess == rule


def test_training_pictures_need_a_size_to_be_brought_to():
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (9 + i, 12, 3), dtype=np.uint8)) for i in range(8)]
    with pytest.raises(InputError, match=r"pass preprocess=Preprocess\(\(D, H, W\)\)"):
        kedge.AMP(network("anchored")).fit(pictures)
    detector = kedge.AMP(network("anchored")).fit(pictures, preprocess=kedge.Preprocess((3, 8, 8)))
    assert detector.score(pictures).shape == (8,)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(2, 1, 8, 8), r"images must be \(B, 3, 8, 8\), got \(2, 1, 8, 8\)"),
        (torch.zeros(3, 8, 8), r"got \(3, 8, 8\); for one image pass x\[None\]"),
        (torch.full((2, 3, 8, 8), math.nan), "images must be finite.*: drop or repair these images"),
        (torch.full((2, 3, 8, 8), 128.0), r"must lie in \[0, 1\], got values from 128 to 128; pass images before"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "uint8 or floating point .*got torch.int64"),
        (torch.zeros(0, 3, 8, 8), "at least one; the source is empty"),
        ([], "at least one; the source is empty"),
        (DataLoader(TensorDataset(torch.zeros(0, 3, 8, 8))), "at least one; the source is empty"),
        ("no file.png", r"no file\.png cannot be read as an image: No such file"),
        (3, "images must be an ImageSet, .*; got int"),
    ],
)
@pytest.mark.parametrize("name", ["amp", "energy"])
def test_what_a_detector_cannot_take(name, source, message):
    detector = fitted(name).calibrate(images())
    for verb in (detector.score, detector, detector.calibrate):
        with pytest.raises(InputError, match=message):
            verb(source)
    assert detector.calibration is not None  # a failed calibration leaves the old one


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_holds_at_least_one_image(size):
    for source in (images(), labelled(), list(images())):
        with pytest.raises(InputError, match="batch_size must be a whole number of at least 1"):
            fitted().score(source, batch_size=size)


def test_centred_energy_does_not_change_when_all_logits_of_an_image_move_together(tmp_path):
    plain = fitted("energy", "plain")
    detector = kedge.KLUniform(plain.net).fit(images()).calibrate(images())
    logits = detector(images()).logits
    by_hand = [-math.log(sum(math.exp(v - sum(row) / len(row)) for v in row)) for row in logits.double().tolist()]
    assert torch.allclose(detector.score(images()).double(), torch.tensor(by_hand, dtype=torch.float64), atol=1e-5)
    detector.save(tmp_path / "a.kedge")
    assert kedge.load(tmp_path / "a.kedge").centred
    before = detector.score(images()), plain.score(images())
    detector.net.network.fc.bias.data += 3
    assert torch.allclose(detector.score(images()), before[0], atol=1e-5)
    assert torch.allclose(plain.score(images()), before[1] - 3, atol=1e-5)


def test_a_network_that_gives_nan_is_found_out():
    detector = fitted("energy", "plain")
    detector.net.network.fc.bias.data[0] = math.nan
    with pytest.raises(InputError, match=r"scores must be finite; 40 of 40 .*check its weights"):
        detector.score(images())


def test_scoring_changes_nothing_about_the_network():
    for kind in ("plain", "anchored"):
        detector = fitted("energy", kind)
        detector.net.train()
        detector.net.network.stage1.eval()
        modes = [module.training for module in detector.net.modules()]
        before = copy.deepcopy(detector.net.state_dict())
        state = torch.get_rng_state()
        assert not detector.score(images()).requires_grad
        with pytest.raises(InputError):
            detector.score([images()[0], torch.full((3, 8, 8), 7.0)], batch_size=1)
        assert [module.training for module in detector.net.modules()] == modes
        assert torch.get_rng_state().equal(state)
        assert all(value.equal(before[key]) for key, value in detector.net.state_dict().items())
        assert torch.is_grad_enabled()


def test_progress_counts_the_images():
    seen = []
    fitted().score(images(10), batch_size=4, progress=seen.append)
    assert seen == [4, 8, 10]
    seen.clear()
    fitted().calibrate(images())(images(10), batch_size=4, progress=seen.append)
    assert seen == [4, 8, 10]


# Scores belong to the image, not to its batch.


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [(name, kind, {}) for name, kind in EVERY if name != "amp"]
    + [("amp", "anchored", {"variant": variant, "score": score}) for variant in VARIANTS for score in ("amp", "energy")]
    + [("amp", "anchored", {"score": "mutual_information"}), ("amp", "anchored", {"rescale": "plain"})],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_batch_size_or_order(name, kind, options, dtype, tolerance):
    x = images(70, seed=5)
    detector = DETECTORS[name](network(kind, dtype=dtype), **options).fit(labelled()).calibrate(labelled())
    found = detector(x, batch_size=64)
    allowed = tolerance * float(found.logits.abs().max())
    if options.get("rescale") == "plain":
        allowed /= float(found.temperature.min())  # the division magnifies every rounding
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    for size in (1, 7, 70):
        assert detector.score(x, batch_size=size).sub(found.score).abs().max() <= allowed
        assert detector.score(x[order], batch_size=size).sub(found.score[order]).abs().max() <= allowed
    assert found.score.dtype == dtype


# AMP's options.


def anchors_of(detector) -> torch.Tensor:
    return (detector.net.anchors * 255).round().to(torch.uint8)


def classes_of(anchors: torch.Tensor, data: kedge.ImageSet) -> list[int]:
    """The class of each anchor, which is one of the training images."""
    return [int(data.labels[(data.images == a).flatten(1).all(dim=1).nonzero()[0, 0]]) for a in anchors]


def streams(data: kedge.ImageSet) -> dict[str, object]:
    pairs = list(zip(data.images, data.labels, strict=True))
    return {"set": data, "loader": DataLoader(data, batch_size=7), "pairs": pairs}


@pytest.mark.parametrize("source", ["set", "loader", "pairs"])
@pytest.mark.parametrize("how", ["random", "balanced"])
def test_anchors_are_training_images_drawn_by_the_seed(source, how):
    data = labelled()
    drawn = [
        anchors_of(kedge.AMP(network("anchored"), anchors=how, k=6, seed=seed).fit(streams(data)[source]))
        for seed in (0, 1, 0)
    ]
    assert drawn[0].equal(drawn[2])
    assert not drawn[0].equal(drawn[1])
    for anchors in drawn:
        counts = np.bincount(classes_of(anchors, data), minlength=4)
        assert counts.sum() == 6
        assert len({a.numpy().tobytes() for a in anchors}) == 6
        if how == "balanced":
            assert sorted(counts) == [1, 1, 2, 2]


def test_given_anchors_are_taken_as_they_are():
    mine = images(3, seed=9)
    for given in (mine, mine.float() / 255):
        detector = kedge.AMP(network("anchored"), anchors=given).fit(labelled())
        assert anchors_of(detector).equal(mine)
    larger = images(3, side=16, seed=9)
    detector = kedge.AMP(network("anchored"), anchors=larger).fit(labelled())
    assert anchors_of(detector).equal(detector.preprocess.batch(larger))


def test_k_is_the_number_of_per_anchor_logits():
    for k in (2, 3, 11):
        detector = fitted(k=k)
        assert detector.net.per_anchor_logits(images(2).float() / 255).shape == (k, 2, 4)
    authors = fitted(variant="authors", k=3)
    assert len(authors.net.anchors) == 40  # a pool of 128, but the training set is smaller
    assert authors.net.per_anchor_logits(images(2).float() / 255).shape == (3, 2, 4)
    assert len(fitted(variant="authors", pool=10).net.anchors) == 10


def test_without_a_wish_the_network_keeps_its_own_anchors():
    net, own = network("anchored"), images(4, seed=8)
    net.set_anchors(own)
    for options in ({}, {"score": "msp"}, {"tau": "mean"}, {"rescale": "plain"}):
        assert anchors_of(kedge.AMP(net, **options).fit(labelled())).equal(own)
    assert anchors_of(kedge.Energy(net).fit(labelled())).equal(own)


@pytest.mark.parametrize(
    "options", [{"k": 4}, {"seed": 0}, {"anchors": "random"}, {"anchors": "balanced"}, {"variant": "authors"}]
)
def test_a_wish_draws_anew(options):
    net, own = network("anchored"), images(4, seed=8)
    net.set_anchors(own)
    data = labelled()
    anchors = anchors_of(kedge.AMP(net, **options).fit(data))
    assert not anchors.equal(own)
    assert len(classes_of(anchors, data)) == len(anchors)


def test_detectors_that_share_a_network_notice_changed_anchors():
    net, data = network("anchored"), labelled()
    first, energy = kedge.AMP(net).fit(data).calibrate(data), kedge.Energy(net).fit(data).calibrate(data)
    kedge.AMP(net, score="msp").fit(data)  # keeps the anchors
    before = first.score(images()), energy.score(images())
    apart = copy.deepcopy(first)
    kedge.AMP(net, k=3).fit(data)
    for stale in (first, energy):
        for verb in (stale.score, stale, stale.calibrate):
            with pytest.raises(NotReadyError, match=r"anchors changed after this detector was fitted.*copy\.deepcopy"):
                verb(images())
    assert apart.score(images()).equal(before[0])
    for stale in (first, energy):
        stale.fit(data)
        assert stale.calibration is None
        assert not stale.score(images()).equal(before[0])
    assert len(net.anchors) == 3


def test_the_two_variants_differ_in_tau_and_in_whose_the_anchors_are():
    paper, authors = fitted(), fitted(variant="authors")
    assert (paper.tau, paper.per_image, paper.net.per_image) == ("sum", False, None)
    assert (authors.tau, authors.per_image, authors.net.per_image) == ("mean", True, 5)
    summed = fitted(variant="authors", tau="sum").calibrate(images())(images(5))
    mean = authors.calibrate(images())(images(5))
    assert summed.tau.allclose(4 * mean.tau)


@pytest.mark.parametrize("tau", ["sum", "mean"])
@pytest.mark.parametrize("rescale", ["none", "plain", "exp"])
@pytest.mark.parametrize("score", ["amp", "msp", "max_logit", "entropy", "energy"])
def test_a_score_is_taken_of_the_rescaled_mean(tau, rescale, score):
    detector = fitted(tau=tau, rescale=rescale, score=score).calibrate(images())
    x = images(6, seed=4)
    with torch.no_grad():
        hypotheses = detector.net.per_anchor_logits(x.float() / 255).double()
    mean, t = hypotheses.mean(dim=0), scores.tau(hypotheses, tau)
    divisor = {"none": torch.ones_like(t), "plain": t, "exp": 1 + t.exp()}[rescale]
    found = detector(x)
    assert found.score.double().allclose(scores.SCORES[score](mean / divisor[:, None]), atol=1e-4)
    assert found.tau.double().allclose(t, atol=1e-5)
    assert found.logits.double().allclose(mean, atol=1e-4)  # H itself, whatever the score is taken of


def test_two_scores_read_the_hypotheses_alone():
    x = images(6, seed=4)
    for score, function in (("temperature", scores.tau), ("mutual_information", scores.mutual_information)):
        detector = fitted(score=score)
        with torch.no_grad():
            assert detector.score(x).allclose(function(detector.net.per_anchor_logits(x.float() / 255)), atol=1e-6)


def test_a_score_of_the_user_s_own_sees_what_the_named_ones_see():
    for rescale in ("none", "plain", "exp"):
        own = fitted(rescale=rescale, score=lambda logits: -logits.amax(dim=1))
        assert own.score(images()).equal(fitted(rescale=rescale, score="max_logit").score(images()))


@pytest.mark.parametrize(
    ("wrong", "came"),
    [
        (lambda logits: logits, r"\(6, 4\)"),
        (lambda logits: logits.sum(), r"\(\)"),
        (lambda logits: logits.amax(dim=1, keepdim=True), r"\(6, 1\)"),
        (lambda logits: logits[:-1, 0], r"\(5,\)"),
        (lambda logits: 1.0, "float"),
    ],
)
def test_a_score_of_the_wrong_shape_is_refused(wrong, came):
    with pytest.raises(InputError, match=rf"score must map logits \(B, C\) to \(B,\), \(6,\) here; got {came}"):
        fitted(score=wrong).score(images(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "papers"}, "variant must be one of 'paper', 'authors', 'recommended'; got 'papers'"),
        ({"score": "mps"}, "score must be a function or one of 'amp', .*'mutual_information'; got 'mps'"),
        ({"tau": "max"}, "tau must be one of 'sum', 'mean'; got 'max'"),
        ({"rescale": "log"}, "rescale must be one of 'exp', 'plain', 'none'; got 'log'"),
        ({"anchors": "first"}, "anchors must be a tensor of images or one of 'random', .*; got 'first'"),
        ({"anchors": np.zeros((3, 3, 8, 8))}, r"anchors must be a tensor .*; got \(3, 3, 8, 8\)"),
        ({"anchors": images(1)}, r"anchors must be at least two images, \(K, D, \.\.\.\); got \(1, 3, 8, 8\)"),
        ({"anchors": torch.tensor(0.5)}, r"anchors must be at least two images"),
        ({"anchors": images(4), "k": 3}, "k must be the number of anchors given, 4; got 3"),
        ({"k": 1}, "k must be a whole number of at least 2; got 1"),
        ({"k": 2.0}, "k must be a whole number of at least 2; got 2.0"),
        ({"variant": "authors", "k": 10, "pool": 9}, "pool must be a whole number of at least 10; got 9"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        kedge.AMP(network("anchored"), **options)


def test_one_anchor_cannot_disagree():
    net = network("anchored")
    net.set_anchors(images(1))
    with pytest.raises(InputError, match="anchors must be at least two, so that they can disagree; got 1"):
        kedge.AMP(net).fit(labelled())
    assert kedge.Energy(net).fit(labelled()).score(images()).shape == (40,)  # which needs no disagreement


def test_too_few_training_images_for_so_many_anchors():
    with pytest.raises(InputError, match="must have at least 41 images to draw anchors from; it has 40"):
        fitted(k=41)
    with pytest.raises(InputError, match="must have at least 5 images"):
        fitted(variant="authors", data=labelled(4))
    with pytest.raises(InputError, match="per_image must be at most the number of anchors, 3; got 5"):
        fitted(variant="authors", anchors=images(3))


def test_balanced_anchors_need_labels():
    with pytest.raises(InputError, match='anchors="balanced" needs labels'):
        kedge.AMP(network("anchored"), anchors="balanced").fit(images())


# Calibration.


class Known(Detector):
    """Scores that are known: the input itself."""

    name = "known"

    def outputs(self, x):
        return Outputs(self.net(x), x[:, 0])

    def config(self):
        return {}


def known() -> Known:
    return Known(nn.Identity()).fit(torch.zeros(1, 1))


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.95), (60, 0.95), (30, 0.8)])
def test_a_fresh_in_distribution_image_is_flagged_as_seldom_as_promised(n, tpr):
    pool = torch.randn(3000, 1, generator=torch.Generator().manual_seed(n))
    flagged = []
    for draw in range(300):
        order = torch.randperm(3000, generator=torch.Generator().manual_seed(draw))
        found = known().calibrate(pool[order[:n]], tpr=tpr)(pool[order[n : n + 400]])
        flagged.append(float(found.is_ood.double().mean()))
    error = np.std(flagged) / math.sqrt(len(flagged))
    assert 1 - tpr - 1 / (n + 1) - 3 * error <= np.mean(flagged) <= 1 - tpr + 3 * error


def test_with_confidence_nearly_every_calibration_set_keeps_the_promise():
    pool = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0))
    kept = {None: 0, 0.9: 0}
    for draw in range(200):
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(draw))
        for confidence in kept:
            detector = known().calibrate(pool[order[:200]], confidence=confidence)
            kept[confidence] += float(detector(pool).is_ood.double().mean()) <= 0.05
    assert kept[0.9] / 200 >= 0.9 - 3 * math.sqrt(0.09 / 200)
    assert kept[None] / 200 < 0.8


@pytest.mark.parametrize(("alpha", "delta"), [(0.95, None), (0.5, None), (0.9, 0.8)])
def test_p_values_and_flags_are_those_of_the_definition(tpr, confidence):
    """Whole numbers, so that many scores tie."""
    generator = torch.Generator().manual_seed(0)
    held_out, fresh = (torch.randint(0, 12, (n, 1), generator=generator).float() for n in (45, 30))
    detector = known().calibrate(held_out, tpr=tpr, confidence=confidence)
    found = detector(fresh)
    allowed = calibration.allowed(45, tpr, confidence)
    for score, p, flag in zip(fresh[:, 0].tolist(), found.p_value.tolist(), found.is_ood.tolist(), strict=True):
        rank = 1 + sum(c >= score for c in held_out[:, 0].tolist())
        assert p == rank / 46
        assert flag == (rank <= allowed)
        if confidence is None:
            assert flag == (Fraction(rank, 46) <= 1 - Fraction(str(tpr)))
    saved = detector.calibration
    assert saved.scores.equal(held_out[:, 0].double().sort().values)
    assert (saved.tpr, saved.confidence) == (tpr, confidence)
    assert found.is_ood.equal(found.score > saved.threshold)


def test_too_few_held_out_images_are_a_warning_and_flag_nothing():
    with pytest.warns(KedgeWarning, match=r"18 calibration scores are too few .*calibrate with at least 19"):
        detector = known().calibrate(torch.rand(18, 1))
    assert detector.calibration.threshold == math.inf
    found = detector(torch.tensor([[1e9]]))
    assert not found.is_ood.any()
    assert found.p_value.tolist() == [1 / 19]
    assert known().calibrate(torch.rand(19, 1))(torch.tensor([[1e9]])).is_ood.all()


@pytest.mark.parametrize("argument", ["alpha", "delta"])
@pytest.mark.parametrize("value", [0, 1, -0.1, 95, math.nan])
def test_shares_lie_between_none_and_all(argument, value):
    with pytest.raises(InputError, match=rf"{argument} must lie in \(0, 1\)"):
        known().calibrate(torch.rand(30, 1), **{argument: value})


@pytest.mark.parametrize("name", ["amp", "energy"])
def test_with_labels_the_probability_gets_a_temperature(name):
    held_out, x = labelled(60, seed=2), images(7, seed=3)
    detector = fitted(name)
    plain = detector.calibrate(held_out.images)
    assert plain.calibration.temperature == 1.0
    logits = plain(held_out).logits
    assert plain(x).probability.allclose(plain(x).logits.softmax(dim=1))
    threshold = plain.calibration.threshold
    detector.calibrate(held_out, batch_size=7)
    t = detector.calibration.temperature
    assert t == pytest.approx(calibration.fit_temperature(logits, held_out.labels), rel=1e-4)
    assert t != 1.0
    found = detector(x)
    assert found.probability.allclose((found.logits / t).softmax(dim=1))
    assert detector.calibration.threshold == pytest.approx(threshold, abs=1e-5)  # the score does not know of it
    pairs = DataLoader(TensorDataset(held_out.images, held_out.labels), batch_size=9)
    assert detector.calibrate(pairs).calibration.temperature == pytest.approx(t, rel=1e-4)
    unlabelled = kedge.ImageSet(held_out.images, torch.full((60,), -1))
    assert detector.calibrate(unlabelled).calibration.temperature == 1.0


@pytest.mark.parametrize("batch_size", [7, 30, 256])
def test_the_temperature_is_that_of_the_images_with_a_label(batch_size):
    held_out = labelled(60, seed=2)
    some = held_out.labels.clone()
    some[30:] = -1
    some[3] = -1
    found = fitted("energy").calibrate(kedge.ImageSet(held_out.images, some), batch_size=batch_size).calibration
    kept = fitted("energy").calibrate(held_out.subset(some >= 0)).calibration
    assert len(found.scores) == 60
    assert found.temperature == pytest.approx(kept.temperature, rel=1e-4)


def test_labels_beyond_the_network_s_classes_are_refused():
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.3, got 0\.\.6"):
        fitted().calibrate(kedge.ImageSet(images(40), torch.arange(40) % 7))


@pytest.mark.parametrize("name", ["amp", *PLAIN])
def test_fitting_again_drops_the_calibration(name):
    detector = fitted(name).calibrate(images())
    detector.fit(labelled(seed=6))
    assert detector.calibration is None
    with pytest.raises(NotReadyError, match="no threshold yet"):
        detector(images())


def test_an_iterator_is_no_training_set():
    with pytest.raises(InputError, match=r"can be read more than once.*pass list\(\.\.\.\)"):
        kedge.Energy(network()).fit(iter(list(images())))


@pytest.mark.parametrize("options", [{"score": "temperature"}, {"score": "mutual_information"}, {"rescale": "none"}])
def test_one_temperature_for_all_goes_with_a_score_that_a_temperature_changes(options):
    with pytest.raises(InputError, match="shared_tau=True goes with a score of rescaled logits"):
        kedge.AMP(network("anchored"), shared_tau=True, **options)


def test_classes_come_from_the_training_set_and_stay():
    detector = fitted()
    assert detector.classes == ("a", "b", "c", "d")
    assert detector.fit(images()).classes == ("a", "b", "c", "d")
    assert kedge.Energy(network()).fit(images()).classes == ()


@pytest.mark.parametrize("name", ["amp", "energy"])
def test_a_detection_is_sliced_as_a_whole(name):
    found = fitted(name).calibrate(images())(images(9))
    part = found[2:5]
    assert (len(found), len(part), len(found[7:20]), len(found[::4])) == (9, 3, 2, 3)
    for field in ("label", "logits", "probability", "score", "p_value", "is_ood"):
        assert getattr(part, field).equal(getattr(found, field)[2:5])
    assert (part.tau is None) == (found.tau is None) == (name == "energy")
    if part.tau is not None:
        assert part.tau.equal(found.tau[2:5])
    for wrong in (2, torch.tensor([0]), [0, 1]):
        with pytest.raises(InputError, match=r"a Detection takes slices, as d\[2:3\]"):
            found[wrong]


def test_networks_on_vectors_and_signals_have_detectors_too():
    vectors, signals = torch.randn(40, 6), torch.randn(40, 2, 16)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    conv = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 3))
    for net, x in ((mlp, vectors), (conv, signals)):
        for detector in (kedge.AMP(kedge.anchor(net, init="fresh")), kedge.Energy(net)):
            found = detector.fit(x).calibrate(x)(x, batch_size=7)
            assert found.score.shape == (40,)
            assert found.is_ood.double().mean() <= 0.05


def test_an_output_object_with_logits_is_understood():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))

        def forward(self, x):
            return SimpleNamespace(logits=self.inner(x))

    net = Wrapped()
    inner = kedge.Energy(net.inner).fit(images())
    assert kedge.Energy(net).fit(images()).score(images()).equal(inner.score(images()))
    assert kedge.AMP(kedge.anchor(net)).fit(images()).score(images()).shape == (40,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_in_another_precision_takes_inputs_in_it(dtype):
    x = torch.randn(40, 6).to(dtype)
    detector = kedge.Energy(nn.Linear(6, 3).to(dtype)).fit(x).calibrate(x)
    assert detector(x).score.dtype == dtype


def test_many_anchors_need_no_pool():
    net = kedge.anchor(build("compact", width=4, classes=2, channels=1))
    pixels = torch.randint(0, 256, (210, 1, 8, 8), dtype=torch.uint8)
    assert len(kedge.AMP(net, k=200).fit(pixels).net.anchors) == 200


def test_where_every_label_is_right_the_probabilities_stay_as_they_are():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, 1, 1, 1], [-1.0, -1, -1, -1]]))
        net[1].bias.zero_()
    images = torch.rand(30, 1, 2, 2)
    detector = (
        kedge.MSP(net).fit(images).calibrate(kedge.ImageSet((images * 255).to(torch.uint8), torch.zeros(30).long()))
    )
    assert detector.calibration.temperature == 1.0


def test_anchors_that_are_asked_for_take_the_place_of_those_that_the_network_has():
    train = kedge.ImageSet(torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 3)
    net = kedge.anchor(kedge.models.build("compact", width=4, classes=3))
    net.set_anchors(train.images[:5])
    kedge.AMP(net, variant="recommended").fit(train)
    assert torch.equal(net.anchors, train.images[:5] / 255)
    kedge.AMP(net, anchors="means", k=3).fit(train)
    means = torch.stack([(train.images[train.labels == k].double() / 255).mean(dim=0) for k in range(3)])
    assert all(any(torch.allclose(a.double(), mean, atol=1e-6) for mean in means) for a in net.anchors)


def test_what_is_said_goes_before_the_variant():
    assert kedge.anchor(kedge.models.build("compact", width=4), variant="recommended").options.per_sample
    net = kedge.anchor(kedge.models.build("compact", width=4), variant="recommended", mask=0.5, per_sample=False)
    assert (net.options.per_sample, net.options.mask, net.options.made) == (False, 0.5, 0.2)
    with pytest.raises(InputError, match="variant must be one of"):
        kedge.anchor(kedge.models.build("compact", width=4), variant="best")
