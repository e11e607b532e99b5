"""Two processes on one global batch train as one process does."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
import kedge.files
from kedge.seeds import seeded
from kedge.training import Recipe, train

pytestmark = pytest.mark.skipif(
    find_spec("lightning_fabric") is None, reason="lightning_fabric is missing: kedge[fabric]"
)
KINDS = ("anchored", "plain")


def train_in(directory, kind):
    """Train without batch statistics, which each process would take of its own half."""
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
        net = kedge.anchor(net, every=2, mask=0.2, init="fresh") if kind == "anchored" else net
    recipe = Recipe(epochs=4, batch=32, lr=0.05, crop=2, weight_decay=1e-3)
    train(net, kedge.ImageSet(images, labels, "toy"), recipe, seed=5, directory=directory)


def tell_who_writes(log):
    """Note the rank of this process whenever it opens one of kedge's files to write."""
    opened = os.open

    def spying(path, *args, **options):
        if str(path).endswith(".part"):
            with log.open("a") as file:
                file.write(os.environ["RANK"] + "\n")
        return opened(path, *args, **options)

    kedge.files.os.open = spying


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """What one process wrote, in one/, and what two did, in two/; torchrun starts them once for both kinds."""
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
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.011)  # two of 192 images may fall on the edge
    assert alone[-1]["loss"] < 0.9 * alone[0]["loss"]


def test_there_were_two_and_only_the_first_wrote(home):
    assert [json.loads((home / "two" / kind / "record.json").read_text())["processes"] for kind in KINDS] == [2, 2]
    assert set((home / "two" / "writers.txt").read_text().split()) == {"0"}


if __name__ == "__main__":  # in each process that torchrun starts
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    tell_who_writes(folder / "writers.txt")
    for kind in KINDS:
        train_in(folder / kind, kind)
