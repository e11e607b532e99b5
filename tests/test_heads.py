"""`AnchoredHead`: a head on frozen features, as a network of vectors and behind its backbone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import nn

import kedge
from helpers import colors, run_cli
from kedge import scores
from kedge.errors import InputError
from kedge.export import OnnxDetector, export_onnx
from kedge.export.graph import Graph
from kedge.seeds import seeded
from kedge.training import AnchoredHead

K = 7


def backbone() -> kedge.Classifier:
    with seeded(0):
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    return kedge.Classifier(nn.Sequential(*layers), mean=0.3, std=0.2).eval()


@pytest.fixture(scope="module")
def parts():
    net, train, held_out = backbone(), colors(120), colors(60, seed=1)
    return net, train, held_out, kedge.extract(net, train), kedge.extract(net, held_out)


@pytest.fixture(scope="module")
def head(parts):
    return AnchoredHead(width=24, epochs=30).train(parts[3])


@torch.no_grad()
def by_hand(head, features):
    """Per-anchor logits of a head by its definition, with one anchor after the other."""
    normed = lambda h: h / h.square().mean(dim=-1, keepdim=True).sqrt()  # noqa: E731
    hidden, last = head.anchored_layer, head.network.fc
    rows = []
    for c in head.anchors:
        pair = torch.cat([normed(c).expand_as(features), normed(features) - normed(c)], dim=1)
        weight = torch.cat([hidden.layer_c.weight, hidden.layer_x.weight], dim=1)
        rows.append(last((pair @ weight.T + hidden.layer_x.bias).relu()))
    return torch.stack(rows)


def test_a_head_is_a_layer_on_the_pair_of_anchor_and_residual_of_normalised_features(parts, head):
    features = parts[4].features
    with torch.no_grad():
        logits = head.per_anchor_logits(features)
    torch.testing.assert_close(logits, by_hand(head, features), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"anchored": False}, {"width": 0}, {"normalise": False}, {"init": "preserve"}])
def test_it_learns_with_every_option(parts, options):
    head = AnchoredHead(**{"width": 24, "epochs": 30, **options}).train(parts[3])
    with torch.no_grad():
        assert float((head(parts[4].features).argmax(dim=1) == parts[4].labels).double().mean()) > 0.9
    assert isinstance(head, kedge.Anchored) == options.get("anchored", True)


def test_only_the_scale_of_features_is_lost_by_normalising(parts, head):
    features = parts[4].features
    with torch.no_grad():
        torch.testing.assert_close(head(features * 3), head(features), rtol=1e-3, atol=1e-4)


def test_the_seed_decides(parts):
    weights = [AnchoredHead(width=4, epochs=1, seed=seed).train(parts[3]).network.fc.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_on_features_and_behind_its_network_a_head_gives_the_same_verdicts(parts, head, tmp_path):
    net, train, held_out, known, others = parts
    on_features = kedge.AMP(head, k=K, seed=3).fit(known).calibrate(others)
    whole = kedge.AMP(AnchoredHead.join(head, net), k=K, seed=3).fit(train).calibrate(held_out)
    torch.testing.assert_close(whole.score(held_out), on_features.score(others), rtol=1e-3, atol=1e-4)
    assert torch.equal(whole(held_out).is_ood, on_features(others).is_ood)
    assert whole.cost.forward < 2
    for number, detector in enumerate((on_features, whole)):
        detector.save(tmp_path / f"{number}.kedge")
        loaded, images = kedge.load(tmp_path / f"{number}.kedge"), (others, held_out)[number]
        torch.testing.assert_close(loaded.score(images), detector.score(images), rtol=1e-4, atol=1e-5)


def test_detectors_of_the_head_take_features_too(parts, head):
    for net in (head, AnchoredHead(width=24, epochs=5, anchored=False).train(parts[3])):
        detector = kedge.KNN(net, k=3).fit(parts[3]).calibrate(parts[4])
        assert detector(parts[4]).is_ood.shape == (60,)
        assert detector.classes == parts[3].classes


def test_its_onnx_file_gives_the_same_scores(parts, head, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    net, train, held_out, *_ = parts
    detector = kedge.AMP(AnchoredHead.join(head, net), k=K).fit(train).calibrate(held_out)
    export_onnx(detector, tmp_path / "head.onnx")
    exported = torch.as_tensor(OnnxDetector(tmp_path / "head.onnx")(held_out.images)["score"])
    torch.testing.assert_close(exported, detector.score(held_out), rtol=1e-3, atol=1e-3)
    assert Graph(detector).rows == [0]  # the backbone runs once


def test_t_can_be_the_features_of_augmented_views_of_the_anchor(parts):
    net, train, _, known, _ = parts
    flipped, dimmed = replace(train, images=train.images.flip(-1)), replace(train, images=train.images // 2)
    views = [kedge.extract(net, each) for each in (flipped, dimmed)]
    head = AnchoredHead(width=4, epochs=1, every=1).train(known, views)
    seen = {}
    head.anchored_layer.layer_c.register_forward_pre_hook(lambda _, inputs: seen.update(anchors=inputs[0].detach()))
    head.train()(known.features[:50])
    normalise = head.network.normalise
    for row, image in zip(seen["anchors"], head.draw.permutation, strict=True):
        assert any(torch.equal(row, normalise(view.features[image])) for view in views)
    assert len(
        {tuple(row.tolist()) for row in seen["anchors"]} & {tuple(r) for r in normalise(views[0].features).tolist()}
    )
    with pytest.raises(InputError, match="same 120 images"):
        AnchoredHead().train(known, [views[0].subset(range(50))])
    with pytest.raises(InputError, match="anchored=True"):
        AnchoredHead(anchored=False).train(known, views)


def test_what_does_not_fit_is_refused(parts, head):
    other = backbone()
    other.network[0].weight.data.mul_(2)
    with pytest.raises(InputError, match="net must be the network"):
        AnchoredHead.join(head, other)
    with pytest.raises(InputError, match="features must be of the network"):
        kedge.AMP(head).fit(kedge.extract(other, parts[1]))
    with pytest.raises(InputError, match="label for each"):
        AnchoredHead().train(kedge.extract(parts[0], parts[1].images))
    with pytest.raises(InputError, match="noise"):
        AnchoredHead(noise=-1)


def test_the_command_line_trains_a_head_with_and_without_anchors(tmp_path):
    data = colors(80)
    np.savez(tmp_path / "colors.npz", x=data.images.permute(0, 2, 3, 1).numpy(), y=data.labels.numpy())
    for name, options in {"anchored": ["--anchor", "--init", "preserve"], "baseline": ["--head-width", 16]}.items():
        result = run_cli(
            "train", f"npz:{tmp_path / 'colors.npz'}", "--freeze", "--epochs", 1, "--hold-out", 0.4, *options,
            "--out", tmp_path / name,
        )  # fmt: skip
        assert result.exit_code == 0, result.exception
    anchored, baseline = (kedge.load(tmp_path / name / "detector.kedge") for name in ("anchored", "baseline"))
    assert anchored.name == "amp"
    assert anchored.net.k == 48  # 50, or as many as there are training images
    assert anchored.cost.forward < 2
    assert not isinstance(baseline.net, kedge.Anchored)
    assert anchored.net.record["recipe"]["init"] == "preserve"
    refused = run_cli("train", f"npz:{tmp_path / 'colors.npz'}", "--head-width", 3)
    assert "--head-width must come with --freeze" in str(refused.exception)


# --- readings of the disagreement ------------------------------------------------------------------------------------


def test_the_readings_are_their_definitions():
    z = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    p = z.softmax(dim=-1).numpy()
    for image in range(4):
        deviation = sum(p[:, image, c].std(ddof=1) for c in range(3))
        assert float(scores.probability_deviation(z)[image]) == pytest.approx(deviation)
        information = entropy(p[:, image].mean(axis=0)) - entropy(p[:, image], axis=1).mean()
        assert float(scores.mutual_information(z)[image]) == pytest.approx(information)
        rows = z[:, image].numpy()
        rows = rows - rows.mean(axis=1, keepdims=True)
        relative = rows.var(axis=0, ddof=1).mean() ** 0.5 / (rows.mean(axis=0) ** 2).mean() ** 0.5
        assert float(scores.relative_deviation(z)[image]) == pytest.approx(relative)


def test_what_saturates_the_readings():
    z = torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far_below, scaled = z - 50, z * 100
    assert float(scores.tau(far_below)) < 1e-9 < float(scores.tau(z))
    for reading in (scores.probability_deviation, scores.mutual_information, scores.relative_deviation):
        torch.testing.assert_close(reading(far_below), reading(z))
    torch.testing.assert_close(scores.relative_deviation(scaled), scores.relative_deviation(z))


@pytest.mark.parametrize("reading", ["probability_deviation", "relative_deviation", "mutual_information", "tau"])
def test_a_reading_alone_is_a_score(parts, head, reading):
    detector = kedge.AMP(head, k=K, score=reading).fit(parts[3])
    logits = head.per_anchor_logits(parts[4].features)
    torch.testing.assert_close(detector.score(parts[4]), getattr(scores, reading)(logits).detach())


def test_logits_can_be_divided_by_the_relative_deviation(parts, head):
    detector = kedge.AMP(head, k=K, tau="relative").fit(parts[3])
    logits = head.per_anchor_logits(parts[4].features).detach()
    divided = logits.mean(dim=0) / (1 + scores.relative_deviation(logits).exp())[:, None]
    torch.testing.assert_close(detector.score(parts[4]), scores.kl_uniform(divided), rtol=1e-4, atol=1e-5)
