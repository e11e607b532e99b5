"""Networks by name: timm, transformers, torchvision, factories and files of weights."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import kedge
from kedge.data import Preprocess
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.models.head import find_head
from kedge.models.named import load_weights, replace_head

timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network and its image processor, as transformers saves them."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=3, id2label={0: "ant", 1: "bee", 2: "cow"}, label2id={"ant": 0, "bee": 1, "cow": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "do_normalize": true, "image_mean": [0.5, 0.4, 0.3], '
        '"image_std": [0.2, 0.2, 0.25], "resample": 2, "size": {"height": 32, "width": 32}}'
    )
    return folder


def test_timm_brings_its_size_normalisation_and_crop() -> None:
    net = kedge.network("timm:resnet18", classes=5)
    assert net.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert net.record["preprocess"] == {
        "shape": (3, 224, 224),
        "resize": "bicubic",
        "crop": 224 / 235,
        "background": "white",
    }
    assert net(torch.rand(2, 3, 64, 64)).shape == (2, 5)
    assert kedge.network("timm:resnet18", channels=1, size=(32, 48)).record["preprocess"]["shape"] == (1, 32, 48)


@pytest.mark.parametrize("channels", [1, 5])
def test_timm_networks_take_gray_and_multispectral_images(channels: int) -> None:
    net = kedge.network("timm:resnet10t", classes=3, channels=channels)
    assert net.record["preprocess"]["shape"] == (channels, 176, 176)
    assert net(torch.rand(2, channels, 64, 48)).shape == (2, 3)
    if channels == 1:  # a gray image has the same value in three channels
        assert net.mean.tolist() == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    else:
        assert not net.has_statistics
        assert net.bare  # so that a detector warns


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mixer_s32_224", "resnet10t"])
def test_timm_networks_are_built_for_the_size_that_is_wanted(name: str) -> None:
    net = kedge.network(f"timm:{name}", classes=3, size=(64, 96))
    assert net.record["preprocess"]["shape"] == (3, 64, 96)
    assert net(torch.rand(2, 3, 64, 96)).shape == (2, 3)


def test_the_same_seed_gives_the_same_fresh_weights() -> None:
    one, other = (kedge.network("timm:resnet10t", classes=3, seed=seed).network.fc.weight for seed in (4, 4))
    assert torch.equal(one, other)
    assert not torch.equal(one, kedge.network("timm:resnet10t", classes=3, seed=5).network.fc.weight)


def test_published_weights_of_timm_come_from_a_folder(tmp_path: Path) -> None:
    saved = timm.create_model("resnet10t", num_classes=7)
    timm.models.save_for_hf(saved, tmp_path)
    net = kedge.network(f"timm:local-dir:{tmp_path}", pretrained=True)
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(net.network(x), saved.eval()(x))
    assert kedge.network(f"timm:local-dir:{tmp_path}", pretrained=True, classes=4)(x).shape == (2, 4)


def test_transformers_bring_processor_classes_and_weights(hf_folder: Path) -> None:
    from transformers import AutoModelForImageClassification

    net = kedge.network(f"hf:{hf_folder}", pretrained=True)
    x = torch.rand(2, 3, 32, 32)
    own = AutoModelForImageClassification.from_pretrained(hf_folder).eval()
    normalised = (x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.2, 0.25]).view(3, 1, 1)
    torch.testing.assert_close(net(x), own(normalised).logits)
    assert net.record["preprocess"] == {
        "shape": (3, 32, 32),
        "resize": "bilinear",
        "fit": "stretch",
        "background": "white",
    }
    assert net.record["classes"] == ["ant", "bee", "cow"]
    assert kedge.network(f"hf:{hf_folder}", pretrained=True, classes=6)(x).shape == (2, 6)


def test_transformers_networks_take_other_channels_and_sizes(hf_folder: Path) -> None:
    net = kedge.network(f"hf:{hf_folder}", classes=4, channels=5, size=(16, 40))
    assert net.record["preprocess"]["shape"] == (5, 16, 40)
    assert net(torch.rand(2, 5, 16, 40)).shape == (2, 4)
    for wanted, layer in {"channels": "projection", "size": "position_embeddings"}.items():
        with pytest.raises(InputError, match=layer):  # rather than fresh weights beside the published ones
            kedge.network(f"hf:{hf_folder}", pretrained=True, classes=4, **{wanted: 16})


def test_torchvision_brings_its_transform_and_gets_a_new_head() -> None:
    pytest.importorskip("torchvision")
    net = kedge.network("torchvision:resnet18", classes=4)
    assert net.record["preprocess"] == {
        "shape": (3, 224, 224),
        "resize": "bilinear",
        "crop": 224 / 256,
        "background": "white",
    }
    assert net(torch.rand(2, 3, 64, 64)).shape == (2, 4)


def test_a_factory_is_imported_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(
        "import torch, kedge\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))\n"
        "def whole():\n    return kedge.Classifier(build(), mean=0.5, std=0.25)\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert kedge.network("my_net:build", mean=0.4, std=0.2)(torch.rand(2, 3, 8, 8)).shape == (2, 3)
    assert float(kedge.network("my_net:whole").mean) == 0.5
    assert kedge.network("my_net:build", classes=5, size=8)(torch.rand(2, 3, 8, 8)).shape == (2, 5)
    for name, words in {"my_net:number": "returned a int", "my_net:none": "not", "nowhere:build": "not"}.items():
        with pytest.raises(InputError, match=words):
            kedge.network(name)


def test_weights_are_read_from_every_usual_file(tmp_path: Path) -> None:
    saved = timm.create_model("resnet10t", num_classes=3)
    state = saved.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pth")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "b.pth"
    )
    x = torch.rand(2, 3, 64, 64)
    for file in ("a.safetensors", "a.pth", "b.pth"):
        net = kedge.network("timm:resnet10t", classes=3, weights=tmp_path / file)
        assert torch.equal(net.network(x), saved.eval()(x)), file


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    save_file({"0.weight": torch.rand(2, 4), "other": torch.rand(1)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"missing: 0.bias.*not in the network: other.*another shape: 0.weight"):
        load_weights(net, tmp_path / "a.safetensors")


def test_a_file_of_weights_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"0.weight": Evil()}, tmp_path / "evil.pth")
    for name, content in {"evil.pth": None, "text.pth": b"no", "text.safetensors": b"no", "empty.pth": b""}.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="weights must be"):
            load_weights(nn.Sequential(nn.Linear(4, 3)), tmp_path / name)
    with pytest.raises(InputError, match="not one"):
        load_weights(nn.Linear(4, 3), tmp_path / "none.pth")
    assert not (tmp_path / "ran").exists()


def test_unknown_names_get_near_ones() -> None:
    for name, near in {"timm:resnet19": "resnet18", "torchvision:resnet51": "resnet50", "compct": "compact"}.items():
        with pytest.raises(InputError, match=near):
            kedge.network(name)
    with pytest.raises(InputError, match="no published weights"):
        kedge.network("compact", pretrained=True)


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in {"timm:resnet18": "timm", "hf:some/net": "transformers"}.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(NotReadyError, match=rf"kedge\[{package}\]"):
                kedge.network(name)


def test_the_head_is_found_by_running() -> None:
    class Odd(nn.Module):
        """The head is registered first, and another layer has as many outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(3, 3), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.flatten(1)))

    net = kedge.Classifier(Odd())
    assert find_head(net, torch.rand(2, 3, 2, 2)) == "head"
    replace_head(net, 7, torch.rand(2, 3, 2, 2))
    assert net(torch.rand(2, 3, 2, 2)).shape == (2, 7)
    with pytest.raises(ArchitectureError, match="not the output of one linear layer"):
        find_head(
            kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(1))), torch.rand(2, 3, 2, 2)
        )


@pytest.mark.parametrize("size", [(160, 213), (300, 200), (224, 224), (61, 90)])
def test_preprocessing_equals_timms_own(size: tuple[int, int]) -> None:
    from timm.data import create_transform

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    for name in ("vit_tiny_patch16_224", "resnet18", "tf_efficientnet_b0"):
        net = kedge.network(f"timm:{name}")
        expected = timm.data.resolve_model_data_config(net.network)
        own = create_transform(**expected, is_training=False)(image)
        result = net.normalise(Preprocess(**net.record["preprocess"])(image)[None])[0]
        torch.testing.assert_close(result, own, atol=1e-5, rtol=1e-5)
