"""Classifier: images in [0, 1] go in, logits come out, and the normalisation is part of the network."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kedge
from kedge import Classifier
from kedge.errors import InputError
from kedge.models.classifier import evaluating, logits_of

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


class Returns(nn.Module):
    """A network that returns whatever the test says."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


def images(n=4, channels=3, dtype=torch.float32):
    return torch.rand(n, channels, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


def flat(channels=3, classes=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 30, classes))


# --- normalisation ---------------------------------------------------------------------------------------------------


def test_without_statistics_the_network_sees_the_images_as_they_are():
    network, x = flat(), images()
    net = Classifier(network)
    assert not net.has_statistics
    assert torch.equal(net(x), network(x))
    assert torch.equal(net.normalise(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_channel_is_normalised_by_its_own_mean_and_deviation(dtype):
    network, x = flat().to(dtype), images(dtype=dtype)
    net = Classifier(network, mean=MEAN, std=STD)
    expected = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], dim=1)
    assert net.has_statistics
    assert net.normalise(x).dtype == dtype
    torch.testing.assert_close(net.normalise(x), expected)
    torch.testing.assert_close(net(x), network(expected))


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_one_value_serves_any_number_of_channels(channels):
    x = images(channels=channels)
    torch.testing.assert_close(Classifier(flat(), mean=0.3, std=0.2).normalise(x), (x - 0.3) / 0.2)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 7), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_vectors_signals_images_and_volumes_are_normalised_along_their_channels(shape):
    x = torch.rand(shape)
    y = Classifier(nn.Flatten(), mean=MEAN, std=STD).normalise(x)
    for c in range(3):
        torch.testing.assert_close(y[:, c], (x[:, c] - MEAN[c]) / STD[c])


def test_one_of_the_two_alone_leaves_the_other_out():
    x = images()
    torch.testing.assert_close(Classifier(flat(), mean=0.3).normalise(x), x - 0.3)
    torch.testing.assert_close(Classifier(flat(), std=0.2).normalise(x), x / 0.2)


def test_a_mean_per_channel_goes_with_one_deviation_for_all():
    x = images()
    y = Classifier(flat(), mean=MEAN, std=0.5).normalise(x)
    torch.testing.assert_close(y, (x - torch.tensor(MEAN)[:, None, None]) / 0.5)


def test_bytes_are_the_floats_they_stand_for():
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    for net in (Classifier(flat()), Classifier(flat(), mean=MEAN, std=STD)):
        assert torch.equal(net(x), net(x.float() / 255))


def test_bytes_become_the_precision_of_the_network():
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    assert Classifier(flat().double())(x).dtype == torch.float64


def test_statistics_can_be_set_again():
    net, x = Classifier(flat(), mean=MEAN, std=STD), images()
    net.set_statistics(0.5, 0.5)
    torch.testing.assert_close(net.normalise(x), (x - 0.5) / 0.5)


def test_statistics_are_a_copy_of_what_was_given():
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    net = Classifier(flat(), mean=mean, std=std)
    mean.zero_()
    std.fill_(1)
    torch.testing.assert_close(net.mean, torch.tensor(MEAN))
    torch.testing.assert_close(net.std, torch.tensor(STD))


def test_an_anchored_copy_has_statistics_of_its_own():
    plain = Classifier(flat(), mean=MEAN, std=STD)
    anchored = kedge.anchor(plain)
    plain.mean.zero_()
    torch.testing.assert_close(anchored.mean, torch.tensor(MEAN))


def test_statistics_keep_the_precision_of_the_network():
    net = Classifier(flat().double(), mean=MEAN, std=STD)
    assert net.mean.tolist() == MEAN
    assert net.std.tolist() == STD


def test_statistics_move_with_the_network():
    net = Classifier(flat(), mean=MEAN, std=STD).double()
    assert net.mean.dtype == net.std.dtype == torch.float64
    assert net(images(dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("channels", "shape"), [(1, (4, 1, 5, 6)), (5, (4, 5, 5, 6)), (1, (3, 5, 6)), (1, (3,))], ids=str
)
def test_images_with_other_channels_than_the_statistics_are_an_error(channels, shape):
    net = Classifier(flat(channels), mean=MEAN, std=STD)
    with pytest.raises(InputError, match=r"\(B, 3, \.\.\.\).*3 values of mean.*x\[None\]"):
        net(torch.rand(shape))


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        ([0.1, 0.2], [0.1, 0.2, 0.3], "one value or one per channel, got 2 and 3"),
        ([], [], "one value or one per channel, got 0 and 0"),
        (0.5, 0.0, "std positive"),
        (0.5, [0.1, -0.1, 0.1], "std positive"),
        (float("nan"), 1.0, "finite"),
        (0.5, float("inf"), "finite"),
    ],
)
def test_statistics_that_make_no_sense_are_an_error(mean, std, text):
    with pytest.raises(InputError, match=text):
        Classifier(flat(), mean=mean, std=std)


def test_a_network_without_parameters_can_be_wrapped():
    assert Classifier(nn.Flatten())(images()).shape == (4, 90)


# --- the network's output --------------------------------------------------------------------------------------------


def test_the_logits_of_an_output_object_are_understood():
    logits = torch.rand(4, 2)
    net = Classifier(Returns(SimpleNamespace(logits=logits, hidden_states=None)))
    assert net(images()) is logits


@pytest.mark.parametrize(
    ("output", "came"),
    [
        (torch.rand(4, 2, 3), r"\(4, 2, 3\)"),
        (torch.rand(4), r"\(4,\)"),
        ((torch.rand(4, 2), torch.rand(4, 8)), "tuple"),
        ({"logits": torch.rand(4, 2)}, "dict"),
        (SimpleNamespace(logits=torch.rand(4, 2, 3)), r"\(4, 2, 3\)"),
        (SimpleNamespace(logits=None), "SimpleNamespace"),
        (None, "NoneType"),
    ],
    ids=["feature map", "vector", "tuple", "dict", "object with a map", "object without", "nothing"],
)
def test_any_other_output_is_an_error_that_says_what_came(output, came):
    with pytest.raises(InputError, match=rf"logits \(B, C\).*\.logits; got {came}; wrap it"):
        Classifier(Returns(output))(images())


def test_logits_of_passes_a_tensor_through():
    logits = torch.rand(4, 2)
    assert logits_of(logits) is logits


# --- state dicts -----------------------------------------------------------------------------------------------------


def test_the_statistics_come_along_with_the_weights():
    saved, x = Classifier(flat(), mean=MEAN, std=STD), images()
    torch.manual_seed(1)
    fresh = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(90, 2)))
    fresh.load_state_dict(saved.state_dict())
    assert fresh.has_statistics
    assert torch.equal(fresh(x), saved(x))


@pytest.mark.parametrize(
    ("before", "after"),
    [((0.5, 0.5), (MEAN, STD)), ((MEAN, STD), (0.5, 0.25)), ((MEAN, STD), (MEAN, 0.5)), ((0.1, 0.1), (0.5, 0.5))],
)
def test_statistics_of_another_shape_can_be_loaded(before, after):
    saved = Classifier(flat(), mean=after[0], std=after[1])
    net = Classifier(flat(), mean=before[0], std=before[1])
    net.load_state_dict(saved.state_dict())
    assert torch.equal(net.mean, saved.mean)
    assert torch.equal(net.std, saved.std)


@pytest.mark.parametrize("given", [{"mean": 0.5}, {"std": 0.5}])
def test_one_of_the_two_comes_along_as_well(given):
    net, x = Classifier(flat()), images()
    saved = Classifier(flat(), **given)
    net.load_state_dict(saved.state_dict())
    assert net.has_statistics
    assert torch.equal(net(x), saved(x))


def test_loading_copies_what_it_loads():
    saved = Classifier(flat(), mean=MEAN, std=STD)
    net = Classifier(flat())
    net.load_state_dict(saved.state_dict())
    saved.mean.zero_()
    torch.testing.assert_close(net.mean, torch.tensor(MEAN))


def test_loaded_statistics_take_the_precision_of_the_network():
    net = Classifier(flat().double())
    net.load_state_dict(Classifier(flat(), mean=MEAN, std=STD).state_dict())
    assert net.mean.dtype == net.std.dtype == torch.float64


def test_a_network_saved_without_statistics_still_has_none_when_loaded():
    net = Classifier(flat())
    net.load_state_dict(Classifier(flat()).state_dict())
    assert not net.has_statistics  # so that kedge.train takes them from its training images


def test_statistics_are_loaded_as_a_part_of_a_larger_module():
    saved = nn.ModuleDict({"a": Classifier(flat(), mean=MEAN, std=STD), "b": Classifier(flat())})
    fresh = nn.ModuleDict({"a": Classifier(flat()), "b": Classifier(flat())})
    fresh.load_state_dict(saved.state_dict())
    assert fresh["a"].has_statistics
    assert torch.equal(fresh["a"].mean, saved["a"].mean)
    assert not fresh["b"].has_statistics


def test_a_deep_copy_is_independent():
    net, x = Classifier(flat(), mean=MEAN, std=STD), images()
    twin = copy.deepcopy(net)
    net.set_statistics(0.1, 0.1)
    assert torch.equal(twin(x), Classifier(flat(), mean=MEAN, std=STD)(x))


# --- evaluating ------------------------------------------------------------------------------------------------------


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
    with evaluating(network):
        assert not any(modes(network))
    assert modes(network) == before
    assert True in before
    assert False in before


def test_evaluating_puts_the_modes_back_after_an_error():
    network = mixed()
    before = modes(network)
    with pytest.raises(RuntimeError), evaluating(network):
        network(torch.rand(2, 99))
    assert modes(network) == before


def test_a_network_in_evaluation_mode_keeps_the_modules_that_are_not():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    network[1].train()  # dropout at test time, on purpose
    with evaluating(network):
        assert modes(network) == [False, False, True]
    assert modes(network) == [False, False, True]


def test_evaluating_can_be_nested():
    network = mixed()
    before = modes(network)
    with evaluating(network), evaluating(network):
        assert not any(modes(network))
    assert modes(network) == before


def test_a_first_layer_that_works_in_place_does_not_change_the_caller_s_images():
    net, x = nn.Sequential(nn.Hardtanh(0, 0.5, inplace=True), nn.Flatten(), nn.Linear(90, 2)), images()
    kedge.Energy(net).fit(x).score(x)
    assert torch.equal(x, images())
    assert kedge.ODIN(net).fit(x).score(x).shape == (4,)
