"""Features that are extracted once take the place of images, for every detector that reads only those."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import StopError, labelled, network
from kedge.detectors.registry import make, named_methods
from kedge.errors import FileFormatError, InputError, NotReadyError

SIDE = 12
KINDS = ("unanchored", "anchored")


def ready(kind: str) -> kedge.Classifier:
    net = network(kind)
    if kind == "anchored":
        net.set_anchors(torch.rand(3, 3, SIDE, SIDE))
    return net


def takers(net: kedge.Classifier) -> dict[str, kedge.Detector]:
    """One of each method that takes features of this network."""
    made = {}
    for name in named_methods():
        try:
            detector = make(name, net)
        except (InputError, TypeError):  # made of several networks, or of one prepared or anchored for it
            continue
        if detector.takes_features:
            made[name] = detector
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_detector_that_takes_features_gives_what_it_gives_for_images(kind):
    net = ready(kind)
    train, held_out, test = (labelled(n, side=SIDE, seed=seed) for n, seed in ((60, 0), (50, 1), (20, 2)))
    stored = [kedge.extract(net, each) for each in (train, held_out, test)]
    detectors = takers(net)
    assert {"msp", "energy", "gen", "knn", "vim", "react", "mds", "rmds++", "temperature_scaling"} <= set(detectors)
    assert ("amp" in detectors) == (kind == "anchored")
    for name, detector in detectors.items():
        expected = detector.fit(train).calibrate(held_out)(test)
        result = make(name, net).fit(stored[0]).calibrate(stored[1])(stored[2])
        for key in ("score", "p_value", "label", "is_ood", "probability"):
            torch.testing.assert_close(getattr(result, key), getattr(expected, key), rtol=2e-4, atol=2e-4, msg=name)


def test_what_is_extracted_is_the_logits_and_the_heads_input():
    net, images = network(), labelled(10, side=SIDE)
    features = kedge.extract(net, images, batch_size=3)
    with torch.no_grad():
        logits, layers = net.features(net.as_input(images.images), ["flatten"])
    torch.testing.assert_close(features.logits, logits)
    torch.testing.assert_close(features.features, layers["flatten"])
    assert features.head == "fc"
    assert features.labels.equal(images.labels)
    assert (features.classes, features.name, features.checksum) == (images.classes, "toy", images.checksum)


def test_a_folder_is_written_resumed_and_opened_again(tmp_path, monkeypatch):
    net, images = network(), labelled(50, side=SIDE)
    expected, passes = kedge.extract(net, images), []
    forward = kedge.Classifier.features

    def counted(self, x, *args, **options):
        if len(x) > 2:  # fewer are read to find the head
            passes.append(len(x))
        if len(passes) == 4:
            raise StopError
        return forward(self, x, *args, **options)

    monkeypatch.setattr("kedge.detectors.extraction.SAVE_SECONDS", 0.0)
    monkeypatch.setattr(kedge.Classifier, "features", counted)
    with pytest.raises(StopError):
        kedge.extract(net, images, tmp_path / "f", batch_size=10)
    with pytest.raises(InputError, match="30 of 50 images"):
        kedge.Features.open(tmp_path / "f")
    result = kedge.extract(net, images, tmp_path / "f", batch_size=10)
    assert passes == [10, 10, 10, 10, 10, 10]
    kedge.extract(net, images, tmp_path / "f")
    assert len(passes) == 6
    for again in (result, kedge.Features.open(tmp_path / "f")):
        torch.testing.assert_close(again.features, expected.features)
        torch.testing.assert_close(again.logits, expected.logits)
        assert again.labels.equal(images.labels)
        assert again.prints.equal(expected.prints)
        assert again.preprocess == expected.preprocess


def test_of_an_anchored_network_the_logits_under_each_anchor_are_kept(tmp_path):
    net, images = ready("anchored"), labelled(20, side=SIDE)
    for features in (kedge.extract(net, images), kedge.extract(net, images, tmp_path / "f", batch_size=7)):
        with torch.no_grad():
            per_anchor = net.per_anchor_logits(net.as_input(images.images))  # (K, N, C)
        torch.testing.assert_close(features.per_anchor, per_anchor.transpose(0, 1))
        torch.testing.assert_close(features.logits, per_anchor.mean(dim=0))
        assert features.subset([3, 1]).per_anchor.shape == (2, 3, 4)
    shared = (
        kedge.AMP(net, shared_tau=True).fit(features).calibrate(kedge.extract(net, labelled(60, side=SIDE, seed=1)))
    )
    expected = kedge.AMP(net, shared_tau=True).fit(images).calibrate(labelled(60, side=SIDE, seed=1))
    torch.testing.assert_close(shared.score(features), expected.score(images))
    with pytest.raises(InputError, match="train_set must be images, from which AMP draws anchors"):
        kedge.AMP(net, k=2).fit(features)
    with pytest.raises(InputError, match="reads more"):
        kedge.AMP(net, tta=2).fit(features)
    plain = kedge.extract(network(), images)
    assert plain.per_anchor is None
    with pytest.raises(InputError, match="must hold per-anchor logits"):
        next(plain.anchor_batches(5))


def test_half_precision_is_half_as_large_and_close(tmp_path):
    net, images = network(), labelled(20, side=SIDE)
    whole = kedge.extract(net, images)
    for half in (kedge.extract(net, images, half=True), kedge.extract(net, images, tmp_path / "h", half=True)):
        assert half.features.dtype == torch.float16
        torch.testing.assert_close(half.features.float(), whole.features, rtol=1e-3, atol=1e-3)
        assert kedge.KNN(net, k=3).fit(half).score(half).dtype == torch.float32


def test_features_of_another_network_or_folder_are_refused(tmp_path):
    net, other, images = network(), network(seed=1), labelled(40, side=SIDE)
    features = kedge.extract(net, images, tmp_path / "f")
    for verb in (kedge.MSP(other).fit, kedge.KNN(other).fit(images).score):
        with pytest.raises(InputError, match="extracted from another"):
            verb(features)
    with pytest.raises(InputError, match="differs in network"):
        kedge.extract(other, images, tmp_path / "f")
    with pytest.raises(InputError, match="Gram reads more"):
        kedge.Gram(net).fit(features)
    with pytest.raises(InputError, match="reads more"):
        kedge.KNN(net, layer="stage1").fit(features)
    with pytest.raises(InputError, match="held_out must not hold images that the detector was fitted on"):
        strict_calibrate(kedge.KNN(net).fit(features), features)
    with pytest.raises(NotReadyError, match="no anchors"):
        kedge.extract(network("anchored"), images)


def strict_calibrate(detector, held_out):
    from kedge.detectors import training_images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_images, "SHARED", 0.005)
        detector.calibrate(held_out)


def test_a_damaged_folder_is_an_error(tmp_path):
    folder = tmp_path / "f"
    kedge.extract(network(), labelled(20, side=SIDE), folder)
    manifest = (folder / "features.json").read_text()
    for wrong in (
        "",
        "[]",
        "{}",
        json.dumps({**json.loads(manifest), "images": 21}),
        manifest.replace('"half"', '"x"'),
    ):
        (folder / "features.json").write_text(wrong)
        with pytest.raises((FileFormatError, InputError)):
            kedge.Features.open(folder)
    (folder / "features.json").write_text(manifest)
    whole = (folder / "logits.npy").read_bytes()
    for wrong in (b"", whole[:100], b"\x93NUMPY" + whole[20:]):
        (folder / "logits.npy").write_bytes(wrong)
        with pytest.raises(FileFormatError, match=r"logits\.npy"):
            kedge.Features.open(folder)
    np.save(folder / "logits.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileFormatError, match=r"logits\.npy"):
        kedge.Features.open(folder)
    with pytest.raises(InputError, match="it has no features"):
        kedge.Features.open(tmp_path)


def test_evaluate_takes_features():
    net = network()
    sets = {
        name: labelled(40, side=SIDE, seed=seed, name=name)
        for seed, name in enumerate(("train", "held", "test", "ood"))
    }
    stored = {name: kedge.extract(net, images) for name, images in sets.items()}
    knn = kedge.KNN(net, k=3).fit(stored["train"]).calibrate(stored["held"])
    expected = kedge.evaluate({"KNN": knn}, sets["test"], [sets["ood"]]).results["KNN"]
    result = kedge.evaluate({"KNN": knn}, stored["test"], [stored["ood"]])
    assert result.results["KNN"].mean("auroc") == pytest.approx(expected.mean("auroc"))
    assert result.results["KNN"].accuracy == expected.accuracy
    with pytest.raises(InputError, match="among the calibration images"):
        kedge.evaluate({"KNN": knn}, stored["test"], [stored["held"]])


def test_a_network_without_a_linear_head_is_refused():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(1))
    with pytest.raises(kedge.errors.ArchitectureError, match="not the output of one linear layer"):
        kedge.extract(net, torch.rand(5, 3, 2, 2))
