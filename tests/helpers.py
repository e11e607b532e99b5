"""Images, sets and networks that tests share. Import from here: ``from helpers import images, labelled, network``."""

import contextlib
import copy
import io
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import kedge
from kedge.models import build
from kedge.seeds import seeded

CLASSES = ("ant", "bee", "cow", "dog", "eel", "fox", "gnu", "hen")


def images(n: int = 40, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    """Noise, uint8 (n, channels, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def labelled(n: int = 40, classes: int = 4, name: str = "toy", **shape: int) -> kedge.ImageSet:
    """Noise with labels 0, 1, ... in turn, and names of the classes."""
    return kedge.ImageSet(images(n, **shape), torch.arange(n) % classes, name, CLASSES[:classes])


def flat(inputs: int = 192, classes: int = 4, seed: int = 0) -> nn.Module:
    """The smallest network: one linear layer."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def network(
    kind: str = "unanchored", *, classes: int = 4, channels: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> kedge.Classifier:
    """A compact network, ``"unanchored"`` or ``"anchored"``, with weights drawn large enough for scores to vary."""
    with seeded(seed):
        net = build("compact", width=4, classes=classes, channels=channels)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        net.fc.weight.data.mul_(20)
    statistics = {"mean": [0.4] * channels, "std": [0.25] * channels}
    made = kedge.anchor(net, init="fresh", seed=seed, **statistics) if kind == "anchored" else None
    return (made or kedge.Classifier(net, **statistics)).to(dtype).eval()


def layer_maps(
    net: nn.Module, x: Tensor, layers: Sequence[str], anchors: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits (N, C) of images in [0, 1] and each layer's maps (N, channels, positions), with gradients.

    An oracle: one image and one anchor at a time, by hooks of its own; with anchors, the means.
    """
    if isinstance(net, kedge.Anchored):
        parts, single = [], copy.deepcopy(net)
        for anchor in net.anchors if anchors is None else anchors:
            single.set_anchors(anchor[None])
            parts.append(_read_layers(single, x, layers))
        logits, maps = zip(*parts, strict=True)
        return torch.stack(logits).mean(dim=0), [torch.stack(each).mean(dim=0) for each in zip(*maps, strict=True)]
    return _read_layers(net, x, layers)


def _read_layers(net: nn.Module, x: Tensor, layers: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    outputs: dict[str, Tensor] = {}
    network = net.network if isinstance(net, kedge.Classifier) else net
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: outputs.update({name: out}))
        for name in layers
    ]
    logits, rows = [], []
    for image in x:
        anchored = isinstance(net, kedge.Anchored)
        logits.append(net.per_anchor_logits(image[None])[0, 0] if anchored else net(image[None])[0])
        rows.append([outputs[name][0].reshape(outputs[name].shape[1], -1) for name in layers])
    for hook in hooks:
        hook.remove()
    return torch.stack(logits), [torch.stack(column) for column in zip(*rows, strict=True)]


@torch.no_grad()
def penultimate(net: kedge.Classifier, x: Tensor) -> np.ndarray:
    """A compact network's features (N, d) of uint8 images, in float64; the mean over anchors."""
    return layer_maps(net, x.to(net.mean.dtype) / 255, ["flatten"])[1][0][:, :, 0].double().numpy()


def vector_network(weight, bias=None) -> nn.Module:
    """A network whose features are its inputs and whose head is W x + b, in float64."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    head = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=torch.float64)
    head.weight.data = weight
    if bias is not None:
        head.bias.data = torch.as_tensor(bias, dtype=torch.float64)
    return nn.Sequential(nn.Identity(), head)


class Function(nn.Module):
    """A network of named layers and a forward."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.run(self, x)


class TwoHeads(nn.Module):
    """A network whose head is registered before another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Linear(4, 5)
        self.head.bias.data += 5

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3) of vectors (B, 4)."""
        return self.head(self.body(x).relu())


def wide_weight(net: kedge.Anchored) -> Tensor:
    """The weight of the one layer that computes what the anchored pair does on the concatenation [c, x - c]."""
    return torch.cat([net.anchored_layer.layer_c.weight, net.anchored_layer.layer_x.weight], dim=1)


def colors(n: int = 64, classes: int = 3, side: int = 8, seed: int = 0) -> kedge.ImageSet:
    """Red, green and blue images under noise, which a small network learns in seconds."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 120, (n, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % classes
    pixels[torch.arange(n), labels % 3] += 100
    names = ("red", "green", "blue") if classes <= 3 else ()
    return kedge.ImageSet(pixels, labels, name="colors", classes=names)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same state to the last bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StopError(Exception):
    """Ends a training in a test."""


def stop_at(step: int):
    """A ``progress`` of `kedge.train` that ends the training after a step."""

    def stop(progress):
        if progress.step == step:
            raise StopError

    return stop


def small_amp(classes: int = 3, side: int = 12, k: int = 3) -> kedge.AMP:
    """A calibrated AMP on an untrained network."""
    train = labelled(60, classes, side=side)
    return kedge.AMP(network("anchored", classes=classes), k=k).fit(train).calibrate(images(50, side=side, seed=1))


def picture(seed: int = 0, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Image.Image:
    """Noise as a PIL image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A PIL image as the bytes of a file."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def run_cli(*arguments: Any, columns: int = 160, **env: str) -> Any:
    """The result of a command, with ``exit_code``, ``output`` and ``exception``."""
    from typer.testing import CliRunner

    from kedge.cli import app

    return CliRunner(env={"COLUMNS": str(columns)} | env).invoke(app, [str(argument) for argument in arguments])


@contextlib.contextmanager
def service_process(detector: Any, folder: Path, *options: str, files: int = 1024) -> Iterator[Any]:
    """A process of ``kedge serve`` that may open so many files, its port, and the path of its log."""
    detector.save(folder / "detector.kedge")
    command = ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(files), sys.executable, "-m", "kedge", "serve"]
    command += [str(folder / "detector.kedge"), "--port", "0", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (address := re.search(r"http://127.0.0.1:(\d+)\n", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield process, int(address[1]), folder / "log"
    finally:
        process.kill()
        process.wait(timeout=10)


@contextlib.contextmanager
def served(detector: Any, *, timeout: float = 600, **limits: Any) -> Iterator[int]:
    """The port of a service in a thread, as `kedge serve` starts it; no thread is left behind."""
    from kedge.serving import Settings, create_app
    from kedge.serving.server import Server

    others, settings = set(threading.enumerate()), Settings(timeout=timeout, **limits)
    server = Server(create_app(detector, settings), settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
    assert set(threading.enumerate()) <= others


def refused(error: type[Exception], message: str, call: Any, *arguments: Any, **options: Any) -> None:
    """Check that a call raises an error whose message matches."""
    import pytest

    with pytest.raises(error, match=message):
        call(*arguments, **options)
