"""A run can be killed at any moment; started again it ends with the very same weights."""

import contextlib
import itertools
import json
import resource
import signal

import pytest
import torch

import kedge
from kedge.anchoring.corruption import Corruption
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, train
from processes import FRESH, die_in


def whole_run(directory, report=lambda step: None):
    """A training with all that has a state: dropout, masks, corrupted anchors, a schedule, an average; its detector."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 1, 12, 12), dtype=torch.uint8, generator=generator)
    data = kedge.ImageSet(images, torch.arange(96) % 3, "noise")
    with seeded(0):
        net = build("wrn", depth=10, width=1, classes=3, channels=1, dropout=0.3)
    net = kedge.anchor(net, mask=0.25, mask_target="uniform", every=3)
    recipe = Recipe(epochs=6, batch=16, lr=0.05, nesterov=True, schedule="one-cycle", crop=2, ema=0.9)
    train(
        net, data, recipe, seed=3, directory=directory, checkpoint_seconds=0.0, validation=data,
        progress=lambda p: report(p.step),
    )  # fmt: skip
    kedge.AMP(net).fit(data).save(directory / "detector.kedge")


def run_until(directory, stop_after):
    """The same, dead in the middle of one of the steps that follow so many."""
    steps = itertools.count(1)

    def report(step):
        if next(steps) >= stop_after:
            die_in(0.001 * stop_after)

    whole_run(directory, report)


def weights(directory):
    return kedge.load(directory / "detector.kedge").net.state_dict()


def history(directory):
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_a_run_killed_several_times_ends_with_bit_identical_weights(tmp_path):
    once, often = tmp_path / "once", tmp_path / "often"
    whole_run(once)

    for stop_after in (1, 4, 7, 10):  # steps of this life before its death; then one life that may finish
        life = FRESH.Process(target=run_until, args=(often, stop_after))
        life.start()
        life.join(timeout=60)
        assert life.exitcode == -signal.SIGALRM
    last = FRESH.Process(target=whole_run, args=(often,))
    last.start()
    last.join(timeout=120)
    assert last.exitcode == 0

    expected, found = weights(once), weights(often)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert len(history(once)) == 6
    assert history(once) == history(often)
    assert not list(often.glob(".*.part"))


def toy(n=64, classes=2):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(images, torch.arange(n) % classes, "toy")


def network(classes=2):
    with seeded(0):
        return build("compact", width=4, classes=classes, channels=1)


def same_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(network(), toy(), RECIPE, directory=tmp_path)
    steps = []
    second = train(network(), toy(), RECIPE, directory=tmp_path, progress=steps.append)
    assert steps == []
    assert same_weights(first, second)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"recipe": Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)}, r"\(recipe\.epochs"),
        ({"seed": 1}, "seed"),
        ({"data": toy(n=80)}, r"data\.images"),
    ],
)
def test_a_directory_with_another_run_is_refused_and_kept(tmp_path, changed, named):
    train(network(), toy(), RECIPE, directory=tmp_path)
    before = (tmp_path / "last.ckpt").read_bytes()
    arguments = {"data": toy(), "recipe": RECIPE, "seed": 0} | changed
    with pytest.raises(InputError, match=rf"{named} was .*resume=False"):
        train(network(), directory=tmp_path, **arguments)
    assert (tmp_path / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"corruption": Corruption(crop=False)}, {"corruption": None}, r"network\.anchored\.options\.corruption\.crop"),
        ({}, None, r"network\.anchored"),
    ],
)
def test_a_setting_that_is_none_now_is_another_setting(tmp_path, first, second, named):
    train(kedge.anchor(network(), **first), toy(), RECIPE, directory=tmp_path)
    with pytest.raises(InputError, match=named):
        train(network() if second is None else kedge.anchor(network(), **second), toy(), RECIPE, directory=tmp_path)


def test_resume_false_starts_anew(tmp_path):
    train(network(), toy(), RECIPE, seed=1, directory=tmp_path)
    again = train(network(), toy(), RECIPE, seed=2, directory=tmp_path, resume=False)
    assert again.record["seed"] == 2


def test_a_damaged_checkpoint_is_named(tmp_path):
    train(network(), toy(), RECIPE, directory=tmp_path)
    path = tmp_path / "last.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileFormatError, match=r"last\.ckpt"):
        train(network(), toy(), RECIPE, directory=tmp_path)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    net = network()
    calls = []

    def poison(progress):
        calls.append(progress.step)
        if progress.step == 6:  # in the second epoch, after the first one's checkpoint
            with torch.no_grad():
                net.fc.weight.fill_(float("nan"))

    with pytest.raises(KedgeError, match=r"last good checkpoint is .*last\.ckpt.*lower learning rate"):
        train(net, toy(), RECIPE, directory=tmp_path, progress=poison)
    healed = train(network(), toy(), RECIPE, directory=tmp_path)
    straight = train(network(), toy(), RECIPE)
    assert same_weights(healed, straight)


class StopError(Exception):
    pass


def stop_at(step):
    def stop(progress):
        if progress.step == step:
            raise StopError

    return stop


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
    straight = train(network(), toy(), RECIPE)
    with pytest.raises(StopError):
        train(network(), toy(), RECIPE, directory=tmp_path, checkpoint_seconds=0.0, progress=stop_at(5))
    before = (tmp_path / "last.ckpt").read_bytes()
    assert len(before) > 4096
    with full_disk(), pytest.raises(KedgeError, match=r"last\.ckpt could not be written"):
        train(network(), toy(), RECIPE, directory=tmp_path, checkpoint_seconds=0.0)
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
    healed = train(network(), toy(), RECIPE, directory=tmp_path)
    assert same_weights(healed, straight)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="writable"):
        train(network(), toy(), RECIPE, directory=tmp_path / "file" / "run")


class Noisy(torch.utils.data.Dataset):
    """A data set whose own transform is random."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return (torch.rand(1, 8, 8) + index % 2) / 2, index % 2


@pytest.mark.parametrize("kind", ["loader", "data set"])
def test_shuffled_loaders_and_random_transforms_go_on_as_if_never_stopped(tmp_path, kind):
    data = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True) if kind == "loader" else Noisy()
    how = Recipe(epochs=3, batch=8, lr=0.02, crop=0, flip=False)
    straight = train(network(), data, how, directory=tmp_path / "straight")
    with pytest.raises(StopError):
        train(network(), data, how, directory=tmp_path / "stopped", checkpoint_seconds=0.0, progress=stop_at(9))
    resumed = train(network(), data, how, directory=tmp_path / "stopped")
    assert same_weights(straight, resumed)


def test_weights_that_an_epochs_last_step_ruined_do_not_replace_a_good_checkpoint(tmp_path):
    net = network()

    def poison(progress):
        if progress.step == 8:  # the last of the second epoch, whose loss was still fine
            with torch.no_grad():
                net.fc.weight.fill_(float("nan"))

    with pytest.raises(KedgeError, match="a weight became NaN or infinite"):
        train(net, toy(), RECIPE, directory=tmp_path, progress=poison)
    healed = train(network(), toy(), RECIPE, directory=tmp_path)
    assert all(bool(torch.isfinite(p).all()) for p in healed.parameters())


def test_a_run_begun_anew_does_not_fall_back_to_the_old_one(tmp_path):
    train(network(), toy(), RECIPE, seed=1, directory=tmp_path)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network(), toy(), RECIPE, seed=1, directory=tmp_path, resume=False, progress=stop)
    assert not (tmp_path / "last.ckpt").exists()
