"""A run can be killed at any moment; resumed, it ends with bit-identical weights."""

import contextlib
import itertools
import json
import math
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kedge
from helpers import StopError, labelled, same_weights, stop_at
from kedge.anchoring.corruption import Corruption
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.io import artifact
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, checkpoint, train
from processes import FRESH, die_in
from test_artifact import mutants, signed

LEGACY = Path(__file__).parent / "legacy"


def whole_run(directory, report=lambda step: None):
    """A training with everything that has a state: dropout, masks, T, synthetic outliers, a schedule, an average."""
    torch.set_num_threads(1)
    data = labelled(96, classes=3, channels=1, side=12)
    with seeded(0):
        net = build("wrn", depth=10, width=1, classes=3, channels=1, dropout=0.3)
    net = kedge.anchor(net, mask=0.25, mask_target="uniform", every=3, synthetic_outliers=0.2)
    recipe = Recipe(epochs=6, batch=16, lr=0.05, nesterov=True, schedule="one-cycle", crop=2, ema=0.9)
    train(
        net, data, recipe, seed=3, directory=directory, checkpoint_seconds=0.0, validation=data,
        progress=lambda p: report(p.step),
    )  # fmt: skip
    kedge.AMP(net).fit(data).save(directory / "detector.kedge")


def run_until(directory, stop_after):
    """The same, killed in the middle of a step after ``stop_after`` steps."""
    steps = itertools.count(1)

    def report(step):
        if next(steps) >= stop_after:
            die_in(0.001 * stop_after)

    whole_run(directory, report)


def history(directory):
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_a_run_killed_several_times_ends_with_bit_identical_weights(tmp_path):
    once, often = tmp_path / "once", tmp_path / "often"
    whole_run(once)

    for stop_after in (1, 7):  # steps before each kill; then a process that may finish
        process = FRESH.Process(target=run_until, args=(often, stop_after))
        process.start()
        process.join(timeout=60)
        assert process.exitcode == -signal.SIGALRM
    last = FRESH.Process(target=whole_run, args=(often,))
    last.start()
    last.join(timeout=120)
    assert last.exitcode == 0

    assert same_weights(*(kedge.load(folder / "detector.kedge").net for folder in (once, often)))
    assert len(history(once)) == 6
    assert history(once) == history(often)
    assert not list(often.glob(".*.part"))


def toy(n=64):
    return labelled(n, classes=2, channels=1)


def network(classes=2):
    with seeded(0):
        return build("compact", width=4, classes=classes, channels=1)


RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"recipe": Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)}, r"\(recipe\.epochs"),
        ({}, {"seed": 1}, "seed"),
        ({}, {"data": toy(n=80)}, r"data\.images"),
        ({"anchor": {"corruption": Corruption(crop=False)}}, {"anchor": {"corruption": None}}, r"corruption\.crop"),
        ({"anchor": {}}, {}, r"network\.anchored"),
    ],
)
def test_a_directory_with_another_run_is_refused_and_kept(tmp_path, first, second, named):
    def run(anchor=None, **changed):
        net = network() if anchor is None else kedge.anchor(network(), **anchor)
        return train(net, directory=tmp_path, **{"data": toy(), "recipe": RECIPE} | changed)

    run(**first)
    before = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(InputError, match=rf"{named}.* was .*resume=False"):
        run(**second)
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_resume_false_discards_the_old_run_at_once(tmp_path):
    train(network(), toy(), RECIPE, seed=1, directory=tmp_path)
    with pytest.raises(StopError):
        train(network(), toy(), RECIPE, seed=1, directory=tmp_path, resume=False, progress=stop_at(1))
    assert not (tmp_path / "last.ckpt").exists()
    assert train(network(), toy(), RECIPE, seed=2, directory=tmp_path).record["seed"] == 2


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    train(network(), toy(), RECIPE, directory=tmp_path)
    path = tmp_path / "last.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileFormatError, match=r"last\.ckpt"):
        train(network(), toy(), RECIPE, directory=tmp_path)
    artifact.write(path, {}, {})
    with pytest.raises(FileFormatError, match=r"last\.ckpt is a kedge file, but not a checkpoint"):
        train(network(), toy(), RECIPE, directory=tmp_path)
    with pytest.raises(InputError, match="writable"):
        train(network(), toy(), RECIPE, directory=path / "run")


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_runs(tmp_path):
    refusals = []

    def meanwhile(progress):
        with pytest.raises(InputError, match=rf"pid {os.getpid()} on .* since \d{{4}}-") as refusal:
            train(network(), toy(), RECIPE, seed=5, directory=tmp_path, resume=False)
        refusals.append(refusal)

    first = train(network(), toy(), RECIPE, directory=tmp_path, progress=meanwhile)
    assert len(refusals) == 8
    # Free again, not overwritten, and not trained again.
    assert same_weights(first, train(network(), toy(), RECIPE, directory=tmp_path, progress=pytest.fail))


def test_a_signed_checkpoint_with_another_value_is_refused_or_resumes_the_same(tmp_path):
    path, how = tmp_path / "last.ckpt", Recipe(epochs=2, batch=32, lr=1e-3, optimizer="adam", crop=0, ema=0.5)
    with pytest.raises(StopError):
        train(network(), toy(), how, directory=tmp_path, checkpoint_seconds=0.0, progress=stop_at(2))
    content, whole = artifact.read(path), path.read_bytes()
    expected = train(network(), toy(), how, directory=tmp_path)
    rng = random.Random(0)
    for place, value, header, tensors in mutants(*content, rng, every=False):
        if rng.random() < 0.1:
            signed(path, header, tensors)
            with contextlib.suppress(KedgeError):
                again = train(network(), toy(), how, directory=tmp_path)
                assert place[0] != "run" or same_weights(again, expected), (place, value)
    for change in ({"step": -1}, {"step": 10**6}, {"seen": None}, {"loss_sum": math.nan}, {"unheard_of": 1}):
        signed(path, {**content[0], "checkpoint": content[0]["checkpoint"] | change}, content[1])
        with pytest.raises(FileFormatError, match="must"):
            train(network(), toy(), how, directory=tmp_path)
    path.write_bytes(whole)
    (tmp_path / "history.jsonl").write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(FileFormatError, match=r"history\.jsonl is damaged"):
        train(network(), toy(), how, directory=tmp_path)


@pytest.mark.parametrize(("step", "message"), [(6, "the loss became NaN.*last good checkpoint is"), (8, "a weight")])
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path, step, message):
    net = network()

    def poison(progress):
        if progress.step == step:  # in mid-epoch, or after the last step of an epoch whose loss was still finite
            with torch.no_grad():
                net.fc.weight.fill_(float("nan"))

    with pytest.raises(KedgeError, match=message):
        train(net, toy(), RECIPE, directory=tmp_path, progress=poison)
    assert same_weights(train(network(), toy(), RECIPE, directory=tmp_path), train(network(), toy(), RECIPE))


@contextlib.contextmanager
def full_disk():
    """Let no file grow beyond a page, as when the disk fills up in mid-write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_in_mid_checkpoint_loses_nothing(tmp_path):
    options = {"directory": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(StopError):
        train(network(), toy(), RECIPE, progress=stop_at(5), **options)
    before = (tmp_path / "last.ckpt").read_bytes()
    assert len(before) > 4096
    with full_disk(), pytest.raises(KedgeError, match=r"last\.ckpt could not be written"):
        train(network(), toy(), RECIPE, **options)
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))
    assert same_weights(train(network(), toy(), RECIPE, directory=tmp_path), train(network(), toy(), RECIPE))


class Noisy(torch.utils.data.Dataset):
    """A data set whose own transform is random."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return (torch.rand(1, 8, 8) + index % 2) / 2, index % 2


@pytest.mark.parametrize("kind", ["loader", "data set"])
def test_shuffled_loaders_and_random_transforms_resume_exactly(tmp_path, kind):
    data = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True) if kind == "loader" else Noisy()
    how = Recipe(epochs=3, batch=8, lr=0.02, crop=0, flip=False)
    with pytest.raises(StopError):
        train(network(), data, how, directory=tmp_path, checkpoint_seconds=0.0, progress=stop_at(9))
    assert same_weights(train(network(), data, how), train(network(), data, how, directory=tmp_path))


def test_a_checkpoint_of_format_2_resumes(tmp_path):
    """Written in mid-run by the version before the renames; see tests/legacy."""
    for file in (LEGACY / "training").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pixels = load_file(LEGACY / "images.safetensors")["train"]
    data = kedge.ImageSet(pixels, torch.arange(60) % 3, name="train", classes=("a", "b", "c"))
    net = kedge.anchor(build("compact", width=2, classes=3), init="fresh", variant="recommended")
    how, steps = Recipe(epochs=2, batch=20, clean_final_fraction=0.4, ema=0.9), []
    with pytest.raises(InputError, match=r"\(recipe\.clean_final_fraction was 0\.4 and is 0\.0\)"):
        train(net, data, Recipe(epochs=2, batch=20, ema=0.9), seed=3, directory=tmp_path)
    train(net, data, how, seed=3, directory=tmp_path, progress=lambda p: steps.append(p.step))
    assert steps == [4, 5, 6]
    assert [line["epoch"] for line in net.record["history"]] == [1, 2]
    old = load_file(LEGACY / "training-final.safetensors")
    torch.testing.assert_close(net.anchors, old["anchors"])


def test_one_wide_layer_of_format_2_becomes_a_pair_in_weights_average_and_optimizer():
    wide, bias = torch.arange(8.0).view(2, 4), torch.ones(2)
    tensors = {"loss.x": bias, "net._extra_state": bias}
    for prefix in ("net.network.0.", "average.network.0."):
        tensors |= {f"{prefix}weight": wide, f"{prefix}bias": bias}
    tensors |= {"optimiser.0.exp_avg": wide, "optimiser.0.step": torch.tensor(7.0), "optimiser.1.exp_avg": bias}
    tensors["optimiser.2.exp_avg"] = 5 * bias
    names = ["network.0.layer_x.weight", "network.0.layer_x.bias", "network.0.layer_c.weight", "network.10.weight"]
    header = {"optimiser": {"0": {"t": 1}, "2": {"t": 2}}, "run": {"network": {"anchored": {"layer": "0"}}}}
    header, result = checkpoint._upgraded(header, tensors, names)
    assert header["optimizer"] == {names[0]: {"t": 1}, names[2]: {"t": 1}, names[3]: {"t": 2}}
    for prefix in ("net.", "average.", "optimizer.exp_avg."):
        assert result[f"{prefix}{names[0]}"].equal(wide[:, 2:])
        assert result[f"{prefix}{names[2]}"].equal(wide[:, :2])
        assert result[f"{prefix}{names[1]}"].equal(bias)
    assert result[f"optimizer.step.{names[0]}"].equal(result[f"optimizer.step.{names[2]}"])
    assert result[f"optimizer.exp_avg.{names[3]}"].equal(5 * bias)
    assert len(result) == 2 + 6 + 6
