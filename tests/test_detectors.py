"""Detectors: what goes in, calibration, and the options of AMP. What all of them keep is in test_contract.py."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from helpers import images, labelled, network
from kedge import calibration, scores
from kedge.detectors import Detector, registered
from kedge.errors import InputError, NotReadyError
from kedge.models import build

DETECTORS = registered()
LOGITS = ["msp", "max_logit", "entropy", "energy", "gen", "kl_uniform"]
EVERY = [(name, "unanchored") for name in LOGITS] + [(name, "anchored") for name in ["amp", *LOGITS]]


def fitted(name="amp", kind="anchored", data=None, **options) -> Detector:
    data = labelled() if data is None else data
    return DETECTORS[name](network(kind, channels=data.images.shape[1]), **options).fit(data)


def anchors_of(detector) -> torch.Tensor:
    return (detector.net.anchors * 255).round().to(torch.uint8)


def classes_of(anchors: torch.Tensor, data: kedge.ImageSet) -> list[int]:
    """The class of each anchor, which is one of the training images."""
    return [int(data.labels[(data.images == a).flatten(1).all(dim=1).nonzero()[0, 0]]) for a in anchors]


def by_color(*, anchored: bool) -> nn.Module:
    """Classifies red, green and blue by how much of each there is."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[0].weight.data = 20 * torch.eye(3)[:, :, None, None]
    return kedge.anchor(net) if anchored else net


# Scores.


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_larger_score_is_further_out(name, kind):
    """Black and white images hold no colour more than another; red, green and blue ones are in distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 40, (60, 3, 8, 8), dtype=torch.uint8, generator=generator)
    inside = noise.clone()
    inside[torch.arange(60), torch.arange(60) % 3] += 200
    net = by_color(anchored=kind == "anchored")
    detector = DETECTORS[name](net).fit(inside[:30]).calibrate(inside[:30])
    assert detector.score(noise).min() > detector.score(inside[30:]).max()
    assert detector(noise).is_ood.all()
    assert detector(inside[30:]).label.equal(torch.arange(30) % 3)
    assert detector(inside[30:]).is_ood.double().mean() <= 0.3


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_logit_detectors_score_the_network_s_own_logits(name, kind):
    detector = fitted(name, kind)
    with torch.no_grad():
        logits = detector.net.eval()(images())
    assert detector.score(images()).allclose(scores.SCORES[name](logits), atol=1e-6)


@pytest.mark.parametrize("name", ["amp", *LOGITS])
def test_an_anchored_network_without_anchors_gets_them_from_the_training_set(name):
    data = labelled()
    detector = fitted(name, "anchored", data)
    assert len(classes_of(anchors_of(detector), data)) == 5
    assert fitted("energy", "anchored", data).net.anchors.equal(detector.net.anchors)  # the same for every detector


# What goes in.


def test_the_same_images_get_the_same_scores_whatever_holds_them(tmp_path):
    x = images(9)
    rows, floats = x.permute(0, 2, 3, 1).numpy(), x.float() / 255
    pil, paths = [Image.fromarray(row) for row in rows], [tmp_path / f"{i}.png" for i in range(9)]
    for image, path in zip(pil, paths, strict=True):
        image.save(path)
    detector = fitted()
    expected = detector.score(x)
    sources = {
        "ImageSet": kedge.ImageSet(x),
        "(N, H, W, D) array": rows,
        "(N, D, H, W) array": x.numpy(),
        "list": list(x),
        "PIL images": pil,
        "paths": paths,
        "strings": [str(path) for path in paths],
        "TensorDataset": TensorDataset(x),
        "pairs": [(image, 0) for image in x],
        "loader": DataLoader(x, batch_size=4),
        "loader of pairs": DataLoader(TensorDataset(x, torch.arange(9)), batch_size=4),
        "loader of dicts": DataLoader([{"pixel_values": image} for image in x], batch_size=4),
        "float32": floats,
        "float array": rows.astype(np.float32) / 255,
        "loader of floats": DataLoader(TensorDataset(floats, torch.arange(9)), batch_size=4),
        "double": x.double() / 255,
        "transposed memory": x.to(memory_format=torch.channels_last),
    }
    for name, source in sources.items():
        assert detector.score(source, batch_size=4).allclose(expected, atol=1e-6), name
    for one in (pil[3], paths[3], str(paths[3]), x[3:4]):
        assert detector.score(one).allclose(expected[3:4], atol=1e-6)


@pytest.mark.parametrize("variant", ["paper", "authors"])
def test_gray_arrays_need_no_channel_axis(variant):
    data = labelled(channels=1)
    detector = fitted(data=data, variant=variant)
    expected, array = detector.score(data.images), data.images[:, 0].numpy()
    for given in (array, data.images.permute(0, 2, 3, 1).numpy()):
        assert detector.score(given).allclose(expected, atol=1e-6)
    assert detector.fit(array).score(array).shape == (40,)


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


def test_a_given_preprocess_replaces_the_one_before():
    detector = fitted()
    assert detector.preprocess == kedge.Preprocess((3, 8, 8))
    assert detector.fit(labelled(side=16)).preprocess == kedge.Preprocess((3, 8, 8))  # its own, once it has one
    rule = kedge.Preprocess((3, 8, 8), fit="stretch")
    assert detector.fit(labelled(), preprocess=rule).preprocess == rule
    pictures = [Image.fromarray(np.full((9 + i, 12, 3), 20 * i, np.uint8)) for i in range(8)]
    detector = kedge.AMP(network("anchored")).fit(pictures, preprocess=kedge.Preprocess((3, 8, 8)))
    assert detector.score(pictures).shape == (8,)
    with pytest.raises(InputError, match=r"pass preprocess=Preprocess\(\(D, H, W\)\)"):
        kedge.AMP(network("anchored")).fit(pictures)


def test_progress_counts_the_images():
    detector = fitted().calibrate(images())
    for verb in (detector.score, detector):
        seen = []
        verb(images(10), batch_size=4, progress=seen.append)
        assert seen == [4, 8, 10]


# AMP's options.


def test_options_of_anchor_go_before_those_of_its_variant():
    assert kedge.anchor(build("compact", width=4), variant="recommended").options.per_sample
    options = kedge.anchor(build("compact", width=4), variant="recommended", mask=0.5, per_sample=False).options
    assert (options.per_sample, options.mask) == (False, 0.5)


@pytest.mark.parametrize("source", ["set", "loader", "pairs"])
@pytest.mark.parametrize("how", ["random", "balanced"])
def test_anchors_are_training_images_drawn_by_the_seed(source, how):
    data = labelled()
    pairs = list(zip(data.images, data.labels, strict=True))
    given = {"set": data, "loader": DataLoader(data, batch_size=7), "pairs": pairs}[source]
    drawn = [anchors_of(kedge.AMP(network("anchored"), anchors=how, k=6, seed=seed).fit(given)) for seed in (0, 1, 0)]
    assert drawn[0].equal(drawn[2])
    assert not drawn[0].equal(drawn[1])
    for anchors in drawn:
        counts = np.bincount(classes_of(anchors, data), minlength=4)
        assert counts.sum() == len(anchors.unique(dim=0)) == 6
        assert how == "random" or sorted(counts) == [1, 1, 2, 2]


def test_given_anchors_are_taken_as_they_are():
    own, larger = images(3, seed=9), images(3, side=16, seed=9)
    for given in (own, own.float() / 255, larger):
        detector = kedge.AMP(network("anchored"), anchors=given).fit(labelled())
        expected = detector.preprocess.batch(larger) if given is larger else own
        assert anchors_of(detector).equal(expected)


def test_k_is_the_number_of_per_anchor_logits():
    for k, options in ((2, {}), (11, {}), (3, {"variant": "authors"})):
        net = fitted(k=k, **options).net
        assert net.per_anchor_logits(images(2).float() / 255).shape == (k, 2, 4)
        assert len(net.anchors) == (40 if options else k)  # a pool of 128, but the training set is smaller
    assert len(fitted(variant="authors", pool=10).net.anchors) == 10
    assert len(fitted(k=200, data=labelled(210)).net.anchors) == 200  # more than a pool holds by default


def test_the_network_keeps_its_anchors_unless_an_option_asks_for_others():
    net, own, data = network("anchored"), images(4, seed=8), labelled()
    net.set_anchors(own)
    for options in ({}, {"score": "msp"}, {"tau": "mean"}, {"rescale": "plain"}, {"variant": "recommended"}):
        assert anchors_of(kedge.AMP(net, **options).fit(data)).equal(own)
    assert anchors_of(kedge.Energy(net).fit(data)).equal(own)
    for options in ({"k": 4}, {"seed": 0}, {"anchors": "random"}, {"anchors": "balanced"}, {"variant": "authors"}):
        net.set_anchors(own)
        anchors = anchors_of(kedge.AMP(net, **options).fit(data))
        assert not anchors.equal(own)
        assert len(classes_of(anchors, data)) == len(anchors)


def test_anchors_may_be_the_means_of_the_classes():
    net, data = network("anchored"), labelled()
    kedge.AMP(net, anchors="means", k=4).fit(data)
    means = torch.stack([(data.images[data.labels == c].double() / 255).mean(dim=0) for c in range(4)])
    assert all(any(torch.allclose(a.double(), mean, atol=1e-6) for mean in means) for a in net.anchors)


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
    paper, authors, summed = fitted(), fitted(variant="authors"), fitted(variant="authors", tau="sum")
    assert (paper.tau, paper.per_image, paper.net.per_image) == ("sum", False, None)
    assert (authors.tau, authors.per_image, authors.net.per_image) == ("mean", True, 5)
    mean, total = (detector.calibrate(images())(images(5)).tau for detector in (authors, summed))
    assert total.allclose(4 * mean)


@pytest.mark.parametrize("tau", ["sum", "mean"])
@pytest.mark.parametrize("rescale", ["none", "plain", "exp"])
@pytest.mark.parametrize("score", LOGITS)
def test_a_score_is_taken_of_the_rescaled_mean(tau, rescale, score):
    detector = fitted(tau=tau, rescale=rescale, score=score).calibrate(images())
    x = images(6, seed=4)
    with torch.no_grad():
        per_anchor = detector.net.per_anchor_logits(x.float() / 255).double()
    mean, t = per_anchor.mean(dim=0), scores.tau(per_anchor, tau)
    divisor = {"none": torch.ones_like(t), "plain": t, "exp": 1 + t.exp()}[rescale]
    detection = detector(x)
    assert detection.score.double().allclose(scores.SCORES[score](mean / divisor[:, None]), atol=1e-4)
    assert detection.tau.double().allclose(t, atol=1e-5)
    assert detection.logits.double().allclose(mean, atol=1e-4)  # H itself, whatever the score is taken of


def test_scores_of_the_per_anchor_logits_and_of_the_user_s_own():
    x = images(6, seed=4)
    for score, function in (("tau", scores.tau), ("mutual_information", scores.mutual_information)):
        detector = fitted(score=score)
        with torch.no_grad():
            assert detector.score(x).allclose(function(detector.net.per_anchor_logits(x.float() / 255)), atol=1e-6)
    for rescale in ("none", "plain", "exp"):
        own = fitted(rescale=rescale, score=lambda logits: -logits.amax(dim=1))
        assert own.score(x).equal(fitted(rescale=rescale, score="max_logit").score(x))


def one_anchor() -> kedge.Anchored:
    net = network("anchored")
    net.set_anchors(images(1))
    return net


def broken() -> Detector:
    detector = fitted("energy", "unanchored")
    detector.net.network.fc.bias.data[0] = math.nan
    return detector


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kedge.AMP(network("unanchored")), r"kedge\.anchor"),
        (lambda: kedge.AMP(nn.Linear(2, 2)), r"kedge\.anchor"),
        (lambda: kedge.anchor(build("compact", width=4), variant="best"), "variant must be one of"),
        (lambda: kedge.AMP(one_anchor()).fit(labelled()), "anchors must be at least two"),
        (lambda: fitted(k=41), "at least 41 images to draw anchors from; it has 40"),
        (lambda: fitted(variant="authors", data=labelled(4)), "must have at least 5 images"),
        (lambda: fitted(variant="authors", anchors=images(3)), "per_image must be at most .* 3; got 5"),
        (lambda: kedge.AMP(network("anchored"), anchors="balanced").fit(images()), '"balanced" needs labels'),
        (lambda: fitted().calibrate(kedge.ImageSet(images(), torch.arange(40))), r"labels must lie in 0\.\.3, got"),
        (lambda: kedge.Energy(network()).fit(iter(list(images()))), r"pass list\(\.\.\.\)"),
        (lambda: kedge.Energy(network()).fit(images().permute(0, 2, 3, 1)), r"channels first.*permute\(0, 3, 1, 2\)"),
        (lambda: fitted().score(images().permute(0, 2, 3, 1)), r"channels come first.*permute\(0, 3, 1, 2\)"),
        (lambda: network()(images().permute(0, 2, 3, 1)), r"permute\(0, 3, 1, 2\)"),
        (lambda: kedge.Energy(network()).fit(images().float().to_sparse()), r"dense .*to_dense"),
        (lambda: broken().score(images()), r"scores must be finite; 40 of 40 .*check its weights"),
        (lambda: fitted(score=lambda logits: logits).score(images(6)), r"score must map .* got \(6, 4\)"),
        (lambda: fitted(score=lambda logits: 1.0).score(images(6)), "score must map .* got float"),
        *((lambda n=n: fitted().score(images(), batch_size=n), "batch_size must be") for n in (0, -1, 2.5)),
    ],
)
def test_what_cannot_be_fitted_or_scored_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


# Calibration.


@pytest.mark.parametrize("name", ["amp", "energy"])
def test_with_labels_the_probability_gets_a_temperature(name):
    held_out, x = labelled(60, seed=2), images(7, seed=3)
    detector = fitted(name)
    for unlabelled in (kedge.ImageSet(held_out.images, torch.full((60,), -1)), held_out.images):
        assert detector.calibrate(unlabelled).calibration.temperature == 1.0
    logits, threshold = detector(held_out).logits, detector.calibration.threshold
    assert detector(x).probability.allclose(detector(x).logits.softmax(dim=1))
    t = detector.calibrate(held_out, batch_size=7).calibration.temperature
    assert t == pytest.approx(calibration.fit_temperature(logits, held_out.labels), rel=1e-4)
    assert t != 1.0
    detection = detector(x)
    assert detection.probability.allclose((detection.logits / t).softmax(dim=1))
    assert detector.calibration.threshold == pytest.approx(threshold, abs=1e-5)  # the score does not depend on it
    pairs = DataLoader(TensorDataset(held_out.images, held_out.labels), batch_size=9)
    assert detector.calibrate(pairs).calibration.temperature == pytest.approx(t, rel=1e-4)
    some = torch.where((torch.arange(60) < 30) & (torch.arange(60) != 3), held_out.labels, -1)
    known = calibration.fit_temperature(logits[some >= 0], some[some >= 0])
    detector.calibrate(kedge.ImageSet(held_out.images, some), batch_size=7)
    assert detector.calibration.temperature == pytest.approx(known, rel=1e-4)
    assert len(detector.calibration.scores) == 60


def test_classes_come_from_the_training_set_and_stay():
    detector = fitted()
    assert detector.classes == detector.fit(images()).classes == ("ant", "bee", "cow", "dog")
    assert kedge.Energy(network()).fit(images()).classes == ()


@pytest.mark.parametrize("name", ["amp", "energy"])
def test_a_detection_is_sliced_as_a_whole(name):
    detection = fitted(name).calibrate(images())(images(9))
    part = detection[2:5]
    assert (len(detection), len(part), len(detection[7:20]), len(detection[::4])) == (9, 3, 2, 3)
    assert (detection.tau is None) == (name == "energy")
    for field, values in vars(detection).items():
        if isinstance(values, torch.Tensor):
            assert getattr(part, field).equal(values[2:5])
    assert list(part) == detection.to_rows()[2:5]
    assert detection[-1] == detection.to_rows()[8]
    with pytest.raises(IndexError):
        detection[9]
    for wrong in (torch.tensor([0, 1]), [0, 1], "a"):
        with pytest.raises(InputError, match="takes a number or a slice"):
            detection[wrong]


def test_networks_on_vectors_and_signals_have_detectors_too():
    vectors, signals = torch.randn(40, 6), torch.randn(40, 2, 16)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    conv = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 3))
    for net, x in ((mlp, vectors), (conv, signals)):
        for detector in (kedge.AMP(kedge.anchor(net, init="fresh")), kedge.Energy(net)):
            detection = detector.fit(x).calibrate(x)(x, batch_size=7)
            assert detection.score.shape == (40,)
            assert detection.is_ood.double().mean() <= 0.05


class Wrapped(nn.Module):
    """Returns an object with logits, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))

    def forward(self, x):
        return SimpleNamespace(logits=self.inner(x))


def test_an_output_object_with_logits_is_understood():
    net = Wrapped()
    wrapped, inner = (kedge.Energy(each).fit(images()).score(images()) for each in (net, net.inner))
    assert wrapped.equal(inner)
    assert kedge.AMP(kedge.anchor(net)).fit(images()).score(images()).shape == (40,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_in_another_precision_takes_inputs_in_it(dtype):
    x = torch.randn(40, 6).to(dtype)
    assert kedge.Energy(nn.Linear(6, 3).to(dtype)).fit(x).calibrate(x)(x).score.dtype == dtype
