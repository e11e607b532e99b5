"""Two processes on one global batch train as one process does."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kedge
import kedge.files
from helpers import colors, run_cli
from kedge.seeds import seeded
from kedge.training import Recipe, SyntheticOutliers, train

pytestmark = pytest.mark.skipif(
    find_spec("lightning_fabric") is None, reason="lightning_fabric is missing: kedge[fabric]"
)
ANCHORED = {"every": 2, "mask": 0.2, "init": "fresh"}
KINDS = {
    "anchored": ANCHORED,
    "unanchored": None,
    "anchored, synthetic outliers": {**ANCHORED, "synthetic_outliers": 0.3},
    "unanchored, synthetic outliers": None,
}


def command_in(folder):
    """Run the command, which joins the processes that there are."""
    data = colors(64)
    path = folder / f"colors-{os.environ['RANK']}.npz"
    np.savez(path, x=data.images.permute(0, 2, 3, 1).numpy(), y=data.labels.numpy())
    short = ("--network", "compact", "--epochs", 1, "--batch", 16, "--hold-out", 0.4, "--no-anchor")
    done = run_cli("train", f"npz:{path}", *short, "--devices", 2, "--accelerator", "cpu", "--out", folder / "command")
    assert done.exit_code == 0, (done.output, done.exception)


def train_in(directory, kind):
    """Train a network without batch norms, whose statistics would be those of each process's own half."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(192) % 3
    images = torch.randint(0, 128, (192, 3, 12, 12), dtype=torch.uint8, generator=generator)
    images += (labels * 60).to(torch.uint8)[:, None, None, None]
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 3),
        )  # fmt: skip
        net = net if KINDS[kind] is None else kedge.anchor(net, **KINDS[kind])
    loss = SyntheticOutliers(0.3) if kind == "unanchored, synthetic outliers" else None
    recipe = Recipe(epochs=4, batch=32, lr=0.05, crop=2, weight_decay=1e-3)
    train(net, kedge.ImageSet(images, labels, "toy"), recipe, seed=5, directory=directory, loss=loss)


def log_writers(log):
    """Log the rank of this process whenever it opens one of kedge's files for writing."""
    opened = os.open

    def spying(path, *args, **options):
        if str(path).endswith(".part"):
            with log.open("a") as file:
                file.write(os.environ["RANK"] + "\n")
        return opened(path, *args, **options)

    kedge.files.os.open = spying


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The files of one process, in one/, and of two, in two/; torchrun starts them once for all kinds."""
    home = tmp_path_factory.mktemp("distributed")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, __file__, str(home / "two")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in KINDS:
        train_in(home / "one" / kind, kind)
    return home


def curve(directory):
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_loss_curve_of_one(home, kind):
    alone, together = curve(home / "one" / kind), curve(home / "two" / kind)
    assert [line["step"] for line in together] == [6, 12, 18, 24]
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.011)  # of two images of 192
    assert alone[-1]["loss"] < 0.9 * alone[0]["loss"]


def test_the_command_trains_in_two_processes(home):
    assert kedge.load(home / "two" / "command" / "detector.kedge").net.record["processes"] == 2


def test_only_the_first_of_two_processes_writes(home):
    assert {json.loads((home / "two" / kind / "record.json").read_text())["processes"] for kind in KINDS} == {2}
    assert set((home / "two" / "writers.txt").read_text().split()) == {"0"}


if __name__ == "__main__":  # in each process that torchrun starts
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    log_writers(folder / "writers.txt")
    for kind in KINDS:
        train_in(folder / kind, kind)
    command_in(folder)
