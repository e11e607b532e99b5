"""Architectures of timm and transformers: anchored, trained for a step, scored, saved and opened without their code."""

import re
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import kedge
from helpers import images, labelled
from kedge.errors import ArchitectureError, InputError
from kedge.models.graph import StoredGraph
from kedge.models.head import find_head

timm = pytest.importorskip("timm")

PAGE = (Path(__file__).parents[1] / "docs" / "networks.md").read_text()
SMALL = {  # one of each kind of first layer, on small images and with few blocks where timm takes their number
    "resnet18": {"layers": (1, 1, 1, 1)},
    "tf_mobilenetv3_small_minimal_100": {},
    "resnetv2_50x1_bit": {},
    "vit_tiny_patch16_224": {"depth": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "mixer_s32_224": {},
}


def table(name: str) -> list[list[str]]:
    """The rows of a table of docs/networks.md, without its head."""
    text = PAGE.split(f"<!-- {name} -->\n")[1].split("\n\n")[0]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]]


ROWS = table("architectures")
NOT_ANCHORED = table("not anchored")


def works(net: kedge.Classifier, folder: Path) -> kedge.Anchored:
    """The anchored copy, after a step of training, scores and a file with its graph."""
    shape = net.record["preprocess"]["shape"]
    pixels = torch.randint(0, 256, (4, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = pixels[:2].float() / 255
    anchored = kedge.anchor(net, example=x)
    anchored.set_anchors(pixels[2:])
    with torch.no_grad():
        expected, result = net(x), anchored.eval()(x)
    assert float((result - expected).abs().max()) <= 1e-4 * float(expected.abs().max())

    anchored.train()
    F.cross_entropy(anchored(x), torch.tensor([0, 1])).backward()
    gradient = sum(float(p.grad.abs().sum()) for p in anchored.parameters() if p.grad is not None)
    assert 0 < gradient < float("inf")

    detector = kedge.AMP(anchored.eval(), k=2).fit(pixels)
    detector.save(folder / "a.kedge")
    opened = kedge.load(folder / "a.kedge")
    assert isinstance(opened.net.network, StoredGraph)
    torch.testing.assert_close(opened.score(pixels[:2]), detector.score(pixels[:2]), rtol=1e-4, atol=1e-5)
    return anchored


@pytest.mark.parametrize(
    ("name", "size", "layer", "head"),
    [pytest.param(*row[1:], id=row[1], marks=pytest.mark.slow) for row in ROWS]
    + [pytest.param(*row[1:], id=f"small {row[1]}") for row in ROWS if row[1] in SMALL],
)
def test_an_architecture_of_the_page_works_as_it_says(
    name: str, size: str, layer: str, head: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if "small" in request.node.callspec.id:
        assert timm.get_pretrained_cfg(name).input_size == (3, int(size), int(size))
        with mock.patch.object(timm, "create_model", partial(timm.create_model, **SMALL[name])):
            net = kedge.network(f"timm:{name}", classes=4, size=64)
    else:
        net = kedge.network(f"timm:{name}", classes=4)
        assert net.record["preprocess"]["shape"] == (3, int(size), int(size))
    assert works(net, tmp_path).layer == layer
    x = torch.rand(2, *net.record["preprocess"]["shape"])
    if head == "none":
        with pytest.raises((ArchitectureError, InputError), match="linear layer"):
            find_head(net, x)
    else:
        assert find_head(net, x) == head


def test_the_page_has_at_least_forty_architectures_and_the_small_ones() -> None:
    names = [row[1] for row in ROWS]
    assert len(set(names)) == len(names) >= 40
    assert set(SMALL) <= set(names)


@pytest.mark.parametrize("name", [row[0] for row in NOT_ANCHORED])
def test_networks_that_cannot_be_anchored_say_why(name: str) -> None:
    net = kedge.network(f"timm:{name}", classes=4)
    with pytest.raises(ArchitectureError, match="several layers read the input"):
        kedge.anchor(net, example=images(2, side=net.record["preprocess"]["shape"][1]))


def test_branches_of_a_block_can_be_anchored_once_they_are_fused(tmp_path: Path) -> None:
    net = kedge.network("timm:repvgg_a0", classes=4, size=64).eval()
    x = torch.rand(2, 3, 64, 64)
    expected = net(x)
    net.network = timm.utils.reparameterize_model(net.network)
    torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
    assert works(net, tmp_path).layer == "stem.reparam_conv"


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
CONFIGS = {
    "ResNetConfig": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    "ViTConfig": {**TINY, "image_size": 64},
    "ConvNextConfig": STAGES,
    "SwinConfig": {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "MobileNetV2Config": {"depth_multiplier": 0.35},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_image_classifier_of_transformers_works(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(num_labels=4, **CONFIGS[kind])
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    net = kedge.network(f"hf:{tmp_path}", pretrained=True, mean=0.5, std=0.2, size=64)
    works(net, tmp_path)
    assert kind.removesuffix("Config").lower() in PAGE.lower()


@pytest.mark.parametrize(("name", "channels", "size"), [("resnet10t", 5, (64, 32)), ("test_vit", 1, (32, 64))])
def test_gray_multispectral_and_oblong_images(name: str, channels: int, size: tuple[int, int], tmp_path: Path) -> None:
    works(kedge.network(f"timm:{name}", classes=4, channels=channels, size=size), tmp_path)


@pytest.mark.parametrize("name", ["resnet10t", "test_vit"])
def test_an_anchored_network_of_timm_is_trained_saved_and_opened_without_timm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = labelled(16, side=32)
    net = kedge.anchor(kedge.network(f"timm:{name}", classes=4, size=32))
    before = net.anchored_layer.layer_c.weight.detach().clone()
    recipe = kedge.training.recipe("finetune", epochs=1, batch=8)
    trained = kedge.train(net, data, recipe)
    assert not torch.equal(trained.anchored_layer.layer_c.weight, before)
    detector = kedge.AMP(trained, k=3).fit(data).calibrate(images(20, side=32, seed=1))
    detector.save(tmp_path / "a.kedge")
    expected = detector(data)
    monkeypatch.setitem(sys.modules, "timm", None)
    result = kedge.load(tmp_path / "a.kedge")(data)
    torch.testing.assert_close(result.score, expected.score, rtol=1e-4, atol=1e-5)
    assert torch.equal(result.label, expected.label)


def test_names_on_the_page_are_networks_that_timm_has() -> None:
    for name in re.findall(r"timm:(\w+)", PAGE):
        assert timm.is_model(name) or name in ("hf", "local"), name
