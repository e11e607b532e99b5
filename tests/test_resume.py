"""A run can be killed at any moment; started again it ends with the very same weights."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import kedge
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.models import build
from kedge.training import Recipe, train
from kedge.transforms import seeded

SCRIPT = textwrap.dedent(
    """
    import sys, torch, kedge
    from kedge.models import build
    from kedge.training import Recipe, train
    from kedge.transforms import seeded

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 1, 12, 12), dtype=torch.uint8, generator=generator)
    data = kedge.ImageSet(images, torch.arange(96) % 3, "noise")
    with seeded(0):
        net = build("wrn", depth=10, width=1, classes=3, channels=1, dropout=0.3)
    net = kedge.anchor(net, mask=0.25, mask_target="uniform", every=3)
    recipe = Recipe(epochs=6, batch=16, lr=0.05, nesterov=True, schedule="one-cycle", crop=2, ema=0.9)

    def slow(p):
        print(p.step, flush=True)

    train(net, data, recipe, seed=3, directory=sys.argv[1], checkpoint_seconds=0.0, validation=data, progress=slow)
    kedge.AMP(net).fit(data).save(sys.argv[1] + "/detector.kedge")
    """
)
STEPS = 6 * 6


def start(script, directory):
    env = os.environ | {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"}
    command = [sys.executable, str(script), str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def weights(directory):
    return kedge.load(directory / "detector.kedge").net.state_dict()


def test_a_run_killed_several_times_ends_with_bit_identical_weights(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    whole = start(script, tmp_path / "whole")
    assert whole.wait(timeout=120) == 0, whole.stderr.read()

    kills = 0
    for stop_after in (1, 6, 9, 14):  # steps of this life before SIGKILL; then one life that may finish
        life = start(script, tmp_path / "killed")
        for _ in range(stop_after):
            assert life.stdout.readline(), life.stderr.read()
        time.sleep(0.003 * stop_after)  # so that the kill falls into different parts of a step
        life.send_signal(signal.SIGKILL)
        life.wait(timeout=30)
        kills += life.returncode == -signal.SIGKILL
    last = start(script, tmp_path / "killed")
    assert last.wait(timeout=120) == 0, last.stderr.read()

    assert kills == 4
    once, often = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert once.keys() == often.keys()
    assert all(torch.equal(once[name], often[name]) for name in once)
    lines = [(tmp_path / run / "history.jsonl").read_text().splitlines() for run in ("whole", "killed")]
    first, second = ([json.loads(line) for line in run] for run in lines)
    assert len(first) == len(second) == 6
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in first] == [
        {k: v for k, v in line.items() if k != "seconds"} for line in second
    ]
    assert not list((tmp_path / "killed").glob(".*.part"))


def toy(n=64, classes=2):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(images, torch.arange(n) % classes, "toy")


def network(classes=2):
    with seeded(0):
        return build("compact", width=4, classes=classes, channels=1)


RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(network(), toy(), RECIPE, directory=tmp_path)
    steps = []
    second = train(network(), toy(), RECIPE, directory=tmp_path, progress=steps.append)
    assert steps == []
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


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
    pairs = zip(healed.state_dict().values(), straight.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_disk_that_is_full_in_mid_checkpoint_loses_nothing(tmp_path):
    script = tmp_path / "run.py"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    script.write_text(SCRIPT)
    whole = start(script, tmp_path / "run")
    for _ in range(8):
        whole.stdout.readline()
    whole.kill()
    whole.wait(timeout=30)
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    full = tmp_path / "full.py"
    full.write_text(ignore + limit + SCRIPT)
    failed = start(full, tmp_path / "run")
    _, errors = failed.communicate(timeout=120)
    assert failed.returncode == 1
    assert errors.splitlines()[-1].startswith("kedge.errors.KedgeError")
    assert "last.ckpt could not be written" in errors.splitlines()[-1]
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.endswith(".part")] == []
    healed = start(script, tmp_path / "run")
    assert healed.wait(timeout=120) == 0


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

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.step == 9:
            raise StopError

    with pytest.raises(StopError):
        train(network(), data, how, directory=tmp_path / "stopped", checkpoint_seconds=0.0, progress=stop)
    resumed = train(network(), data, how, directory=tmp_path / "stopped")
    pairs = zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


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
