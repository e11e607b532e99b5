"""Classifier: images in [0, 1] go in, logits come out, and the normalisation is part of the network."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import helpers
import kedge
from kedge import Classifier
from kedge.errors import InputError, NormalisationWarning
from kedge.models import build
from kedge.models.classifier import evaluating, logits_of
from kedge.pixels import to_unit

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def images(n=4, channels=3, dtype=torch.float32):
    return torch.rand(n, channels, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


def flat(channels=3):
    return helpers.flat(channels * 30, classes=2)


def test_without_statistics_the_network_gets_the_images_as_they_are():
    network, x = flat(), images()
    net = Classifier(network)
    assert not net.has_statistics
    assert torch.equal(net(x), network(x))
    assert torch.equal(net.normalise(x), x)
    assert Classifier(nn.Flatten())(x).shape == (4, 90)  # a network without parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_channel_is_normalised_by_its_own_mean_and_deviation(dtype):
    network, x = flat().to(dtype), images(dtype=dtype)
    net = Classifier(network, mean=MEAN, std=STD)
    expected = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], dim=1)
    assert net.normalise(x).dtype == net.mean.dtype == net.std.dtype == dtype
    torch.testing.assert_close(net.normalise(x), expected)
    torch.testing.assert_close(net(x), network(expected))
    assert Classifier(flat(), mean=MEAN, std=STD).double().mean.dtype == torch.float64  # moves with the network
    assert all(weight.equal(weight.half().to(dtype)) for weight in net.round_weights().parameters())
    for shape in ((4, 3), (4, 3, 7), (4, 3, 2, 2, 2)):  # vectors, signals and volumes
        x = torch.rand(shape, dtype=dtype)
        for c in range(3):
            torch.testing.assert_close(net.normalise(x)[:, c], (x[:, c] - MEAN[c]) / STD[c])


def test_one_value_serves_all_channels_and_either_may_be_left_out():
    for channels in (1, 3, 5):
        x = images(channels=channels)
        torch.testing.assert_close(Classifier(flat(), mean=0.3, std=0.2).normalise(x), (x - 0.3) / 0.2)
    x = images()
    torch.testing.assert_close(Classifier(flat(), mean=0.3).normalise(x), x - 0.3)
    torch.testing.assert_close(Classifier(flat(), std=0.2).normalise(x), x / 0.2)
    y = Classifier(flat(), mean=MEAN, std=0.5).normalise(x)
    torch.testing.assert_close(y, (x - torch.tensor(MEAN)[:, None, None]) / 0.5)


def test_bytes_are_the_floats_they_stand_for_in_the_precision_of_the_network():
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    for net in (Classifier(flat()), Classifier(flat(), mean=MEAN, std=STD)):
        assert torch.equal(net(x), net(x.float() / 255))
    assert Classifier(flat().double())(x).dtype == torch.float64
    assert Classifier(flat().double()).as_input(x).equal(x.double() / 255)
    assert to_unit(images()).equal(images())
    assert to_unit(images(), torch.float64).dtype == torch.float64


def test_statistics_are_a_copy_and_can_be_set_again():
    mean, std, x = torch.tensor(MEAN), torch.tensor(STD), images()
    net = Classifier(flat(), mean=mean, std=std)
    anchored = kedge.anchor(net)
    mean.zero_()
    std.fill_(1)
    torch.testing.assert_close(net.mean, torch.tensor(MEAN))
    torch.testing.assert_close(net.std, torch.tensor(STD))
    copied = copy.deepcopy(net)
    net.set_statistics(0.5, 0.5)
    torch.testing.assert_close(net.normalise(x), (x - 0.5) / 0.5)
    for other in (anchored, copied):
        torch.testing.assert_close(other.mean, torch.tensor(MEAN))


def test_statistics_that_make_no_sense_or_do_not_match_the_images_are_an_error():
    for mean, std, text in (
        ([0.1, 0.2], [0.1, 0.2, 0.3], "got 2 and 3"),
        ([], [], "got 0 and 0"),
        (0.5, 0.0, "std positive"),
        (0.5, [0.1, -0.1, 0.1], "std positive"),
        (float("nan"), 1.0, "finite"),
        (0.5, float("inf"), "finite"),
    ):
        with pytest.raises(InputError, match=text):
            Classifier(flat(), mean=mean, std=std)
    for shape in ((4, 1, 5, 6), (4, 5, 5, 6), (3, 5, 6), (3,)):
        with pytest.raises(InputError, match=r"\(B, 3, \.\.\.\).*x\[None\]"):
            Classifier(nn.Flatten(), mean=MEAN, std=STD)(torch.rand(shape))


def test_a_classifier_says_what_its_network_expects():
    rule = kedge.Preprocess((3, 8, 8), resize="bilinear", crop=0.5)
    net = kedge.Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), mean=0.5, preprocess=rule, classes=["a", "b"]
    )
    detector = kedge.Energy(net).fit(helpers.images(4, side=20))
    assert detector.preprocess == rule
    assert net.record["classes"] == ["a", "b"]


def test_logits_are_a_matrix_or_in_an_output_object():
    logits = torch.rand(4, 2)
    assert logits_of(logits) is logits
    assert logits_of(SimpleNamespace(logits=logits, hidden_states=None)) is logits
    for output, came in (
        (torch.rand(4, 2, 3), r"\(4, 2, 3\)"),
        (torch.rand(4), r"\(4,\)"),
        ((logits, torch.rand(4, 8)), "tuple"),
        ({"logits": logits}, "dict"),
        (SimpleNamespace(logits=torch.rand(4, 2, 3)), r"\(4, 2, 3\)"),
        (SimpleNamespace(logits=None), "SimpleNamespace"),
        (None, "NoneType"),
    ):
        with pytest.raises(InputError, match=f"got {came}; wrap it"):
            logits_of(output)


def test_a_first_layer_that_works_in_place_does_not_change_the_caller_s_images():
    net, x = nn.Sequential(nn.Hardtanh(0, 0.5, inplace=True), nn.Flatten(), nn.Linear(90, 2)), images()
    kedge.Energy(net).fit(x).score(x)
    assert torch.equal(x, images())
    assert kedge.ODIN(net).fit(x).score(x).shape == (4,)


def test_the_statistics_come_along_with_the_weights():
    per_channel, x = {"mean": MEAN, "std": STD}, images()
    for before, after in (
        ({}, per_channel),
        ({}, {"mean": 0.5}),
        ({}, {"std": 0.5}),
        ({"mean": 0.5, "std": 0.5}, per_channel),
        (per_channel, {"mean": 0.5, "std": 0.25}),
        (per_channel, {"mean": MEAN, "std": 0.5}),
    ):
        saved, net = Classifier(flat(), **after), Classifier(helpers.flat(90, classes=2, seed=1), **before)
        net.load_state_dict(saved.state_dict())
        assert net.has_statistics
        assert torch.equal(net(x), saved(x))
        saved.mean.fill_(9)
        assert not net.mean.eq(9).any()  # a copy


def test_statistics_are_loaded_as_a_part_of_a_larger_module_in_the_precision_of_the_network():
    saved = nn.ModuleDict({"a": Classifier(flat(), mean=MEAN, std=STD), "b": Classifier(flat())})
    fresh = nn.ModuleDict({"a": Classifier(flat().double()), "b": Classifier(flat())})
    fresh.load_state_dict(saved.state_dict())
    assert torch.equal(fresh["a"].mean, saved["a"].mean.double())
    assert fresh["a"].std.dtype == torch.float64
    # None stay none, so that kedge.train takes them from its training images.
    assert [net.has_statistics for net in fresh.values()] == [True, False]


def modes(network):
    return [module.training for module in network.modules()]


def mixed():
    """A network in training mode with a batch norm kept in evaluation mode."""
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 2))).train()
    network[1].eval()
    return network


def test_evaluating_switches_every_module_and_puts_each_back_as_it_was():
    network = mixed()
    before = modes(network)
    assert set(before) == {True, False}
    with evaluating(network), evaluating(network):
        assert not any(modes(network))
    assert modes(network) == before
    with pytest.raises(RuntimeError), evaluating(network):
        network(torch.rand(2, 99))
    assert modes(network) == before
    mostly_evaluating = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    mostly_evaluating[1].train()  # dropout at test time, on purpose: it stays
    with evaluating(mostly_evaluating):
        assert modes(mostly_evaluating) == [False, False, True]
    assert modes(mostly_evaluating) == [False, False, True]


@pytest.mark.parametrize("method", [kedge.MSP, kedge.KNN, lambda net: kedge.DeepEnsemble([net])])
def test_a_network_without_a_known_normalisation_is_a_warning(method):
    def net(*first):
        return nn.Sequential(*first, nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(48, 3))

    class Normalize(nn.Identity):
        pass

    with pytest.warns(NormalisationWarning, match=r"kedge\.Classifier\(net, mean=\.\.\., std="):
        method(net()).fit(images())
    vectors = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in (Classifier(net()), Classifier(net(), mean=0.5), net(nn.BatchNorm2d(3)), net(Normalize())):
            method(known).fit(images())
        method(build("compact", width=4)).fit(helpers.images())
        method(vectors).fit(torch.rand(9, 6))


class TwoInputs(nn.Module):
    def forward(self, image, mask):
        return image + mask


class Options(nn.Module):
    def forward(self, x, scale=2.0, *more, **options):
        return x.flatten(1) * scale


def test_a_network_takes_images_alone():
    with pytest.raises(InputError, match=r"one input, images .*; TwoInputs takes image, mask: wrap it"):
        Classifier(TwoInputs())
    assert Classifier(Options())(images()).shape == (4, 90)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 5)), "Kernel size"),
        (nn.Sequential(nn.MaxPool2d(4), nn.MaxPool2d(4)), "too small"),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), "shapes cannot be multiplied"),
        (nn.Conv2d(4, 2, 1), "channels"),
    ],
)
def test_images_of_a_size_that_a_network_cannot_take_are_an_error_that_says_so(network, reason):
    net = Classifier(network)
    for run in (net, lambda x: net.features(x, [])):
        with pytest.raises(InputError, match=rf"cannot take inputs of shape \(3, 5, 6\): .*{reason}.*--size"):
            run(images())


def test_other_errors_inside_a_network_are_its_own():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match=r"^no such thing$"):
        Classifier(Broken())(images())
