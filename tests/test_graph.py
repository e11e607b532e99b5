"""Stored graphs: a network of any library runs from a file without its code."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from helpers import images, labelled
from kedge.detectors.registry import registered
from kedge.errors import ArchitectureError, FileFormatError, InputError, KedgeWarning
from kedge.export import OnnxDetector, export_onnx
from kedge.models.capture import capture
from kedge.models.features import read_features
from kedge.models.graph import StoredGraph


class SamePadding(nn.Conv2d):
    """A convolution with a forward of its own, as in TensorFlow's networks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class Foreign(nn.Module):
    """A small network with what makes graphs hard: in-place layers, a skip, dropout, a constant, an output object."""

    def __init__(self, classes: int = 4, output_object: bool = False) -> None:
        super().__init__()
        self.stem = SamePadding(3, 8, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8).view(8, 1, 1), persistent=False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, classes)
        self.output_object = output_object

    def forward(self, x: Tensor) -> object:
        x = F.relu_(self.norm(self.stem(x)))
        x = x + self.block(x) * self.scale + torch.tensor([0.25])
        logits = self.head(self.drop(x.mean(dim=(2, 3)).reshape(x.shape[0], -1)))
        return type("Output", (), {"logits": logits})() if self.output_object else logits


@pytest.fixture(scope="module")
def foreign() -> nn.Module:
    torch.manual_seed(0)
    net = Foreign()
    net.train()(torch.rand(64, 3, 8, 8))  # gives the batch norm statistics
    return net.eval()


def stored(net: nn.Module, **options: object) -> StoredGraph:
    document, constants = capture(net, torch.rand(2, 3, 8, 8), **options)
    graph = StoredGraph(json.loads(json.dumps(document)))
    graph.load_state_dict({**net.state_dict(), **constants})
    return graph


def test_a_graph_computes_what_the_network_computes(foreign: nn.Module) -> None:
    graph = stored(foreign, keep=["head", "stem"])
    for size in (1, 2, 7):
        x = torch.rand(size, 3, 8, 8)
        assert torch.equal(graph(x), foreign(x))
    assert torch.equal(graph.double()(x.double()), foreign.double()(x.double()))
    foreign.float()


def test_a_graph_has_gradients(foreign: nn.Module) -> None:
    graph = stored(foreign)
    x = torch.rand(3, 3, 8, 8)
    grads = []
    for net in (foreign, graph):
        image = x.clone().requires_grad_()
        net(image).logsumexp(1).sum().backward()
        grads.append(image.grad)
    torch.testing.assert_close(*grads)


def test_layers_are_read_by_their_names(foreign: nn.Module) -> None:
    x, names = torch.rand(3, 3, 8, 8), ["stem", "norm", "block.0", "block", "head:in"]
    expected = read_features(foreign, x, names)
    result = read_features(stored(foreign, keep=["head"]), x, names)
    assert torch.equal(result[0], expected[0])
    for name in names:
        assert torch.equal(result[1][name], expected[1][name]), name


def test_an_output_object_gives_its_logits() -> None:
    net = Foreign(output_object=True).eval()
    x = torch.rand(3, 3, 8, 8)
    assert torch.equal(stored(net)(x), net(x).logits)


class Careful(Foreign):
    """Looks at the layers that are kept, and switches autocast and gradients off for some of its operations."""

    def forward(self, x: Tensor) -> object:
        x = x.to(self.stem.weight.dtype)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
        return super().forward((x - low) / (high - low + 1))


def test_a_network_may_look_at_its_layers_and_switch_autocast_and_gradients_off() -> None:
    net, x = Careful().eval(), torch.rand(5, 3, 8, 8)
    graph = stored(net, keep=["stem", "head"])
    assert isinstance(graph.head, nn.Linear)
    torch.testing.assert_close(graph(x), net(x))


def test_a_forward_that_depends_on_the_images_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1)) * (2 if x.sum() > 0 else 1)

    with pytest.raises(ArchitectureError, match="recorded"):
        capture(Branching(), torch.rand(2, 3, 2, 2))


def test_only_listed_operations_run(foreign: nn.Module) -> None:
    document, _ = capture(foreign, torch.rand(2, 3, 8, 8))
    evil = [
        "aten.from_file.default",
        "operator.attrgetter",
        "builtins.eval",
        "aten.save.default",
        "prim.device.default",
    ]
    for target in evil:
        changed = json.loads(json.dumps(document))
        changed["nodes"][0][1] = target
        with pytest.raises(FileFormatError, match="not allowed"):
            StoredGraph(changed)
    for key, value in {
        "schema": 99,
        "nodes": 3,
        "tensors": {"a": [[-1], "float32", True]},
        "layers": {"a": {}},
    }.items():
        with pytest.raises(FileFormatError):
            StoredGraph({**document, key: value})


def test_a_graph_refuses_other_sizes_and_stays_in_evaluation_mode(foreign: nn.Module) -> None:
    graph = stored(foreign)
    with pytest.raises(InputError, match=r"\(B, 3, 8, 8\)"):
        graph(torch.rand(2, 3, 9, 9))
    assert not graph.train().training


def test_a_detector_from_a_file_can_be_sent_to_another_process(foreign: nn.Module, tmp_path: Path) -> None:
    kedge.MSP(kedge.Classifier(foreign, mean=0.5, std=0.2)).fit(labelled(20)).save(tmp_path / "a.kedge")
    loaded, x = kedge.load(tmp_path / "a.kedge"), images(4)
    for copied in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert torch.equal(copied.score(x), loaded.score(x))


def test_a_graph_that_would_fill_the_memory_is_refused(foreign: nn.Module) -> None:
    document, _ = capture(foreign, torch.rand(2, 3, 8, 8))
    name = document["nodes"][-1][0]
    many = ["many", "aten.repeat.default", [{"node": name}, [1 << 20, 1 << 20]], {}]
    graph = StoredGraph({**document, "nodes": [*document["nodes"], many], "output": {"node": "many"}})
    with pytest.raises(FileFormatError, match="many in the graph"):
        graph.check_sizes()
    wrong = ["wrong", "aten.view.default", [{"node": name}, [7, 7, 7]], {}]
    with pytest.raises(FileFormatError, match="damaged"):
        StoredGraph({**document, "nodes": [*document["nodes"], wrong], "output": {"node": "wrong"}}).check_sizes()
    stored(foreign).check_sizes()


# Files.


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("method", ["knn", "energy", "odin", "gram", "mahalanobis", "react"])
def test_a_file_opens_without_the_networks_code(
    foreign: nn.Module, method: str, anchored: bool, tmp_path: Path
) -> None:
    net = kedge.Classifier(foreign, mean=0.4, std=0.3)
    net = kedge.anchor(net) if anchored else net
    detector = registered()[method](net).fit(labelled(60)).calibrate(labelled(40, seed=1))
    x = torch.rand(7, 3, 8, 8)
    expected = detector(x)
    for _ in range(2):  # a loaded detector is saved and loaded again
        detector.save(tmp_path / "a.kedge")
        detector = kedge.load(tmp_path / "a.kedge")
        assert isinstance(detector.net.network, StoredGraph)
        result = detector(x)
        for name in ("label", "score", "p_value", "is_ood"):
            assert torch.equal(getattr(result, name), getattr(expected, name)), name
    own = kedge.load(tmp_path / "a.kedge", model=Foreign())
    assert isinstance(own.net.network, Foreign)
    torch.testing.assert_close(own.score(x), expected.score)


def test_a_network_that_cannot_be_recorded_is_saved_with_a_warning(tmp_path: Path) -> None:
    class Branching(Foreign):
        def forward(self, x: Tensor) -> object:
            return super().forward(x) * (2 if x.mean() > 0.5 else 1)

    detector = (
        kedge.MSP(kedge.Classifier(Branching(), mean=0.4, std=0.3)).fit(labelled(60)).calibrate(labelled(40, seed=1))
    )
    with pytest.warns(KedgeWarning, match="no graph"):
        detector.save(tmp_path / "a.kedge")
    with pytest.raises(InputError, match="model must be given"):
        kedge.load(tmp_path / "a.kedge")
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(kedge.load(tmp_path / "a.kedge", model=Branching()).score(x), detector.score(x))


def test_a_graph_can_be_exported_but_not_trained(foreign: nn.Module, tmp_path: Path) -> None:
    detector = (
        kedge.Energy(kedge.Classifier(foreign, mean=0.4, std=0.3)).fit(labelled(60)).calibrate(labelled(40, seed=1))
    )
    detector.save(tmp_path / "a.kedge")
    opened = kedge.load(tmp_path / "a.kedge")
    export_onnx(opened, tmp_path / "a.onnx")
    x = images(5, seed=2)
    result = OnnxDetector(tmp_path / "a.onnx")(x)
    torch.testing.assert_close(torch.as_tensor(result["score"]), opened.score(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="graph"):
        kedge.train(opened.net, labelled(80), "demo")
