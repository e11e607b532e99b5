"""Two processes on one global batch train as one process does."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("lightning_fabric")

# Without batch statistics, which each process would take of its own half.
SCRIPT = textwrap.dedent(
    """
    import sys, torch, kedge
    from torch import nn
    from kedge.training import Recipe, train
    from kedge.transforms import seeded

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(192) % 3
    images = torch.randint(0, 128, (192, 3, 12, 12), dtype=torch.uint8, generator=generator)
    images += (labels * 60).to(torch.uint8)[:, None, None, None]
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 3),
        )
    net = kedge.anchor(net, every=2, mask=0.2, init="fresh") if sys.argv[2] == "anchored" else net
    recipe = Recipe(epochs=4, batch=32, lr=0.05, crop=2, weight_decay=1e-3)
    train(net, kedge.ImageSet(images, labels, "toy"), recipe, seed=5, directory=sys.argv[1])
    """
)


def run(command, directory, kind):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(directory / "run.py"), str(directory / "out"), kind],
        capture_output=True, text=True, env=env, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (directory / "out" / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["anchored", "plain"])
def test_two_processes_give_the_loss_curve_of_one(tmp_path, kind):
    curves = {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, command in {"one": [sys.executable], "two": torchrun}.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "run.py").write_text(SCRIPT)
        curves[name] = run(command, directory, kind)
    assert [line["step"] for line in curves["two"]] == [6, 12, 18, 24]
    for one, two in zip(curves["one"], curves["two"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.011)  # two of 192 images may fall on the edge
    assert curves["one"][-1]["loss"] < 0.9 * curves["one"][0]["loss"]


def test_only_the_first_process_writes(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    spy = textwrap.dedent(
        """
        import os, pathlib, kedge.files
        opened = os.open
        def spying(path, *args, **options):
            if str(path).endswith(".part"):
                with open(pathlib.Path(__file__).parent / "writers.txt", "a") as log:
                    log.write(os.environ["RANK"] + "\\n")
            return opened(path, *args, **options)
        kedge.files.os.open = spying
        """
    )
    (directory / "run.py").write_text(spy + SCRIPT)
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], directory, "plain")
    assert set((directory / "writers.txt").read_text().split()) == {"0"}
