"""kedge's detectors under pytorch-ood's protocol and the other way round; stand-ins follow pytorch-ood 0.4's api.py."""

import copy
import math
import sys
from abc import ABC, abstractmethod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import kedge
from helpers import flat, images, labelled, network, same_weights
from kedge.adapters import FromPytorchOOD, pytorch_ood
from kedge.errors import InputError, NotReadyError
from kedge.pixels import to_unit

CLASSES = 4
KINDS = ["unanchored", "anchored"]


def unit(n=40, seed=0) -> torch.Tensor:
    return to_unit(images(n, seed=seed))


class RequiresFittingError(Exception):
    pass


class PeerDetector(ABC):
    requires_fit = False
    hyperparameter_space: dict = {}
    info = None

    def __call__(self, *args, **kwargs):
        return self.predict(*args, **kwargs)

    def fit(self, data_loader):
        if self.requires_fit:
            raise NotImplementedError
        return self

    @abstractmethod
    def predict(self, x):
        raise NotImplementedError


class GradientDetector(PeerDetector):
    pass


class MaxSoftmax(PeerDetector):
    def __init__(self, model):
        self.model = model

    def predict(self, x):
        return -self.model(x).softmax(dim=1).max(dim=1).values


class Recorder(MaxSoftmax):
    """Keeps what `fit` and `predict` were given."""

    requires_fit = True

    def __init__(self, model):
        super().__init__(model)
        self.batches = self.length = None
        self.modes = []

    def fit(self, data_loader):
        assert isinstance(data_loader, DataLoader)
        self.length = len(data_loader)
        self.batches = list(data_loader)
        self.modes.append(self.model.training)
        assert torch.is_grad_enabled()  # pytorch-ood's TemperatureScaling needs them here
        return self

    def predict(self, x):
        if self.batches is None:
            raise RequiresFittingError
        self.modes.append(self.model.training)
        return super().predict(x)


class Distance(PeerDetector):
    """Like Mahalanobis(encoder): knows an encoder, no model. Scores in float64, as KNN does."""

    requires_fit = True

    def __init__(self, encoder):
        self.encoder = encoder
        self.mu = None

    def fit(self, data_loader):
        z, y = zip(*((self.encoder(x), y) for x, y in data_loader if (y >= 0).any()), strict=True)
        z, y = torch.cat(z).detach().double(), torch.cat(y)
        self.mu = torch.stack([z[y == c].mean(dim=0) for c in range(int(y.max()) + 1)])
        return self

    def predict(self, x):
        return torch.cdist(self.encoder(x).double(), self.mu).min(dim=1).values


class GradNorm(GradientDetector):
    """The norm of the gradient with respect to the image; leaves gradients on the parameters."""

    def __init__(self, model):
        self.model = model

    def predict(self, x):
        x = x.detach().requires_grad_()
        self.model(x).logsumexp(dim=1).sum().backward()
        return x.grad.flatten(1).norm(dim=1)


class Dropout(MaxSoftmax):
    """Like MCD: a pass in training mode."""

    def predict(self, x):
        self.model.train()
        scores = super().predict(x)
        self.model.eval()
        return scores


def loader(n=40, seed=0, batch=16) -> DataLoader:
    return DataLoader(TensorDataset(unit(n, seed), torch.arange(n) % CLASSES), batch_size=batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kedge_detector_fits_on_a_loader_and_predicts_its_own_scores(kind):
    net, x = network(kind), unit(9, seed=1)
    adapted = pytorch_ood(kedge.Energy(net))
    assert adapted.requires_fit
    with pytest.raises(NotReadyError, match="not fitted"):
        adapted.predict(x)
    assert adapted.fit(loader()) is adapted
    assert not adapted.requires_fit
    scores = adapted.predict(x)
    assert scores.device == x.device
    assert not scores.requires_grad
    with torch.no_grad():
        assert scores.allclose(-net(x).logsumexp(dim=1), atol=1e-5)
    for same in (adapted(x), adapted.detector.score(x), pytorch_ood(adapted.detector)(x)):
        assert same.equal(scores)
    with pytest.raises(InputError, match=r"must lie in \[0, 1\].*before normalisation"):
        adapted(9 * x)


def test_fit_leaves_out_images_with_negative_labels_and_needs_others():
    class Seen(kedge.MSP):
        def fit_method(self, train_set, preprocess):
            for _ in range(2):  # a method may read the training set more than once
                self.seen = [(x, y) for x, y in self.inputs(train_set, preprocess)]

    x, y = unit(), torch.arange(40) % CLASSES
    y[::3] = -1
    y[16:32] = -7  # a whole batch
    adapted = pytorch_ood(Seen(network())).fit(DataLoader(TensorDataset(x, y), batch_size=16))
    assert torch.cat([x for x, _ in adapted.detector.seen]).equal(x[y >= 0])
    assert torch.cat([y for _, y in adapted.detector.seen]).equal(y[y >= 0])
    few = torch.where(torch.arange(40) < 5, y.abs(), -1)  # so that the five anchors are the images with labels
    amp = pytorch_ood(kedge.AMP(network("anchored"))).fit(DataLoader(TensorDataset(x, few), batch_size=16)).detector
    assert sorted(amp.net.anchors.flatten(1).sum(dim=1).tolist()) == sorted(x[:5].flatten(1).sum(dim=1).tolist())
    for batches, message in (
        ([(unit(4), -torch.ones(4, dtype=torch.long))], "labels of 0 and above"),
        ([], "labels of 0 and above; it holds none"),
        ([(unit(4), torch.zeros(4, 8, 8))], r"a label per image, \(4,\); it gives \(4, 8, 8\)"),
        ([(unit(4), [0, 1, 2, 0])], r"a label per image, \(4,\); it gives list"),
    ):
        with pytest.raises(InputError, match=message):
            adapted.fit(batches)


def test_any_stream_of_batches_fits_and_torch_s_generator_is_left_alone():
    batches = [(unit(8, seed=i), torch.arange(8) % CLASSES) for i in range(3)]
    labelled, alone = (pytorch_ood(kedge.AMP(network("anchored"))) for _ in range(2))
    state = torch.get_rng_state()
    labelled.fit(batches).predict(unit(4))
    alone.fit([x for x, _ in batches])
    assert torch.get_rng_state().equal(state)
    assert labelled.detector.net.anchors.equal(alone.detector.net.anchors)


def test_the_rest_of_the_protocol(monkeypatch):
    class Base(ABC):  # noqa: B024 -- as the real one, it is used for isinstance only
        pass

    assert not [name for name in sys.modules if name.startswith("pytorch_ood")]  # it is not imported
    assert not isinstance(pytorch_ood(kedge.MSP(network())), Base)
    monkeypatch.setitem(sys.modules, "pytorch_ood.api", SimpleNamespace(Detector=Base))
    adapted = pytorch_ood(kedge.MSP(network().double()))
    assert isinstance(adapted, Base)
    assert adapted.info is None
    assert adapted.hyperparameter_space == adapted.get_hyperparameters() == {}
    assert adapted.set_hyperparameters() is adapted
    with pytest.raises(InputError, match=r"MSP takes \['k'\] when it is built, not later; build another MSP"):
        adapted.set_hyperparameters(k=3)
    for call in (lambda: adapted.fit_features(unit(3), None), lambda: adapted.predict_features(unit(3))):
        with pytest.raises(InputError, match="MSP does not take features"):
            call()
    assert adapted.device == torch.device("cpu")
    assert adapted.fit(loader()).predict(unit(3)).dtype == torch.float64
    assert adapted.to("meta") is adapted
    assert adapted.device == torch.device("meta")
    assert all(p.device == torch.device("meta") for p in adapted.detector.net.parameters())
    adapted.detector = SimpleNamespace(score=lambda x, batch_size: torch.zeros(len(x)))
    assert adapted.predict(torch.empty(3, 3, 8, 8, device="meta")).device == torch.device("meta")  # the images' device


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_runs_behind_the_verbs(kind, tmp_path):
    net, x = network(kind), images(9, seed=3)
    peer, msp = pytorch_ood(MaxSoftmax(net)), kedge.MSP(net)
    for detector in (peer, msp):
        assert detector.fit(labelled(seed=1)).calibrate(labelled(60, seed=2)) is detector
    for name, expected in vars(msp(x)).items():
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(vars(peer(x))[name], expected)
    sets = labelled(30, seed=4, name="test"), [labelled(30, seed=5, name="other")]
    results = kedge.evaluate({"MaxSoftmax": peer, "MSP": msp}, *sets).results
    assert results["MaxSoftmax"].mean("auroc") == results["MSP"].mean("auroc")
    assert results["MaxSoftmax"].accuracy == results["MSP"].accuracy
    assert isinstance(peer, FromPytorchOOD)
    assert peer.config() == {}
    with pytest.raises(InputError, match="MaxSoftmax cannot be saved"):
        peer.save(tmp_path / "x.kedge")
    assert not list(tmp_path.iterdir())


def test_a_peer_that_needs_fitting_gets_the_training_images_with_labels_in_batches():
    peer, data = Recorder(network().train()), labelled(600)
    detector = pytorch_ood(peer).fit(data)
    assert [len(x) for x, _ in peer.batches] == [256, 256, 88]
    assert peer.length == 3
    x, y = (torch.cat(parts) for parts in zip(*peer.batches, strict=True))
    assert x.dtype == torch.float32
    assert x.mul(255).round().to(torch.uint8).equal(data.images)
    assert y.equal(data.labels)
    detector.fit(labelled(10)).score(images(5))
    assert sum(len(x) for x, _ in peer.batches) == 10  # a new fit forgets the old
    assert peer.modes == [False] * 3  # it sees the network in evaluation mode
    assert peer.model.training


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(unit(20), torch.arange(20) % CLASSES, strict=True))


def test_the_loader_that_a_peer_gets_has_a_length():
    pairs = list(zip(unit(20), (torch.arange(20) % CLASSES).tolist(), strict=True))
    for source, length in (
        (loader(20, batch=8), 3),
        (pairs, 1),
        (Stream(), 1),
        (DataLoader(Stream(), batch_size=8), 3),
    ):
        peer = Recorder(network())
        pytorch_ood(peer).fit(source)
        assert peer.length == length
        assert torch.cat([x for x, _ in peer.batches]).allclose(unit(20))


def test_images_without_a_label_are_left_out_of_a_peer_s_fit():
    class Eager(MaxSoftmax):
        def fit(self, data_loader):
            raise AssertionError

    peer = Recorder(network())
    pytorch_ood(peer).fit([(x, -1 if i % 2 == 0 else i) for i, x in enumerate(unit(12))])
    assert torch.cat([y for _, y in peer.batches]).tolist() == [1, 3, 5, 7, 9, 11]
    with pytest.raises(InputError, match="train_set must hold images with labels of 0 and above; it holds none"):
        pytorch_ood(Recorder(network())).fit(images())
    pytorch_ood(Eager(network())).fit(images())  # needs no fit and no labels


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_with_an_encoder_takes_its_labels_from_net(kind):
    net = network(kind)

    def encoder(x):
        return net.features(x, ["flatten"])[1]["flatten"]

    detector = pytorch_ood(Distance(encoder), net=net).fit(labelled())  # anchors are there before the peer is fitted
    x, y = unit(), labelled().labels.numpy()
    with torch.no_grad():
        train, test = encoder(x).double().numpy(), encoder(unit(7, seed=1)).double().numpy()
    centres = [train[y == c].mean(axis=0) for c in range(CLASSES)]
    expected = [min(np.linalg.norm(z - centre) for centre in centres) for z in test]
    scores = detector.score(images(7, seed=1))
    assert scores.dtype == torch.float64
    assert np.allclose(scores, expected, rtol=1e-4)
    logits = detector.calibrate(labelled(60, seed=2))(images(7, seed=1)).logits
    assert logits.allclose(net(unit(7, seed=1)), atol=1e-4)
    own = network(seed=1)
    with torch.no_grad():  # net takes precedence over a model of the peer
        outputs = pytorch_ood(MaxSoftmax(own), net=net).fit(images()).outputs(unit(4))
        assert outputs.logits.allclose(net(unit(4)))
        assert outputs.score.allclose(-own(unit(4)).softmax(dim=1).amax(dim=1))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_there_for_a_peer_that_needs_them_and_leave_no_trace(kind):
    net = network(kind)
    detector = pytorch_ood(GradNorm(net)).fit(labelled())
    own = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        parameter.grad = own[name].clone()
    scores = detector.score(images(5))
    assert all(p.grad.equal(own[name]) for name, p in net.named_parameters())
    x = unit(5).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).logsumexp(dim=1).sum(), x)
    assert scores.allclose(gradient.flatten(1).norm(dim=1), rtol=1e-4)
    assert not scores.requires_grad

    class Failing(MaxSoftmax):
        def predict(self, x):
            assert not torch.is_grad_enabled()  # others score without gradients
            raise RequiresFittingError

    with pytest.raises(RequiresFittingError):
        pytorch_ood(Failing(net)).fit(images()).score(images(3))
    assert all(p.grad.equal(own[name]) for name, p in net.named_parameters())


def test_what_a_peer_draws_is_the_same_every_time():
    class Random(MaxSoftmax):
        requires_fit = True

        def fit(self, data_loader):
            self.shift = torch.rand(())
            return self

        def predict(self, x):
            return super().predict(x) + self.shift + torch.rand(len(x))

    net = network()
    first, second = (pytorch_ood(Random(net)).fit(labelled()) for _ in range(2))
    state = torch.get_rng_state()
    assert first.score(images(5)).equal(first.score(images(5)))
    assert first.score(images(5)).equal(second.score(images(5)))
    assert torch.get_rng_state().equal(state)


def test_training_mode_is_no_way_to_score_an_anchored_network():
    unanchored = pytorch_ood(Dropout(network())).fit(labelled())
    assert unanchored.score(images(5)).shape == (5,)
    net = network("anchored")
    anchored = pytorch_ood(Dropout(net)).fit(labelled())
    with pytest.raises(InputError, match="Dropout puts the anchored network in training mode"):
        anchored.score(images(5))
    assert net.batches_seen == 0


def test_a_peer_leaves_the_network_as_it_was():
    class Careless(Recorder):
        def fit(self, data_loader):
            self.predict(unit(8))
            return super().fit(data_loader)

        def predict(self, x):
            self.model.train().requires_grad_(False)
            return -self.model(x).softmax(dim=1).amax(dim=1)

    net = network()
    before, modes = copy.deepcopy(net), [module.training for module in net.modules()]
    assert pytorch_ood(Careless(net)).fit(labelled()).score(images(5)).shape == (5,)
    assert same_weights(net, before)
    assert [module.training for module in net.modules()] == modes
    assert all(p.requires_grad for p in net.parameters())


def test_a_score_is_one_finite_number_per_image():
    class Odd(MaxSoftmax):
        def predict(self, x):
            return self.scores

    peer = Odd(network())
    detector = pytorch_ood(peer).fit(images())
    for peer.scores in (torch.zeros(5, 8, 8), torch.zeros(5, 1), torch.zeros(()), torch.full((5,), math.nan)):
        with pytest.raises(InputError, match=r"one score per image|scores must be finite"):
            detector.score(images(5))


def test_what_it_costs():
    assert vars(pytorch_ood(MaxSoftmax(network())).cost) == {"forward": 2, "backward": 0}
    assert vars(pytorch_ood(GradNorm(network())).cost) == {"forward": 3, "backward": 1}
    anchored = pytorch_ood(MaxSoftmax(network("anchored"))).fit(labelled())
    assert vars(anchored.cost) == {"forward": 10, "backward": 0}


def test_objects_that_cannot_be_adapted_are_named():
    for given, kind in ((MaxSoftmax, "the class MaxSoftmax"), (kedge.MSP, "the class MSP"), (flat(), "Sequential")):
        with pytest.raises(InputError, match=f"instance with fit and predict, .*; got {kind}"):
            pytorch_ood(given)
    with pytest.raises(InputError, match="net must not be given"):
        pytorch_ood(kedge.MSP(network()), net=network())
    for given in (Distance(None), MaxSoftmax(network().forward)):
        with pytest.raises(InputError, match="net must be given"):
            pytorch_ood(given)
