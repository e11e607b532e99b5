"""A pipeline: one row for each of the likeliest classes of an image, with the verdict of the detector in it."""

import json

import numpy as np
import pytest
from PIL import Image

import kedge
from helpers import CLASSES, flat, images, labelled, network
from kedge.errors import InputError, NotReadyError

IMAGES = images(80)
PHOTOS = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in IMAGES[:7]]


@pytest.fixture(scope="module")
def detector():
    return kedge.AMP(network("anchored", classes=3)).fit(labelled(30, classes=3)).calibrate(IMAGES[30:])


def test_one_image_gives_its_likeliest_classes_with_the_verdict_in_each(detector):
    result, detection = kedge.pipeline(detector)(PHOTOS[0]), detector(PHOTOS[0])
    order = np.argsort(-detection.probability[0].numpy())
    assert [(each["label"], each["class"]) for each in result] == [(k, CLASSES[k]) for k in order]
    assert [each["probability"] for each in result] == pytest.approx(detection.probability[0].numpy()[order].tolist())
    (row,) = detection.to_rows(CLASSES)
    assert result[0] == row | {"probability": pytest.approx(row["probability"])}
    for each in result:
        assert {key: each[key] for key in ("name", "tau", "score", "p_value", "is_ood")}.items() <= row.items()
    assert json.loads(json.dumps(result)) == result
    nameless = kedge.MSP(flat(classes=7)).fit(IMAGES[:9]).calibrate(IMAGES[9:])
    likeliest = nameless(PHOTOS[0]).probability[0].argsort(descending=True)[:5]
    result = kedge.pipeline(nameless)(PHOTOS[0])
    assert [(each["label"], each["class"]) for each in result] == [(k, None) for k in likeliest.tolist()]


def test_several_images_give_a_list_for_each_whatever_they_and_the_detector_come_as(detector, tmp_path):
    detector.save(tmp_path / "detector.kedge")
    for source in (tmp_path, str(tmp_path / "detector.kedge")):
        assert kedge.pipeline(source)(PHOTOS[1]) == kedge.pipeline(detector)(PHOTOS[1])
    detect = kedge.pipeline(detector, top_k=1, batch_size=3)
    alone = [detect(photo) for photo in PHOTOS]
    assert all(len(result) == 1 for result in alone)
    paths = [tmp_path / f"{number}.png" for number in range(7)]
    for path, photo in zip(paths, PHOTOS, strict=True):
        photo.save(path)
    assert detect(paths[2]) == detect(str(paths[2]))
    for given in (PHOTOS, tuple(PHOTOS), paths, IMAGES[:7], kedge.ImageSet(IMAGES[:7])):
        result = detect(given)
        assert [each[0]["label"] for each in result] == [each[0]["label"] for each in alone]
        scores = [each[0]["score"] for each in result]
        assert scores == pytest.approx([each[0]["score"] for each in alone], rel=1e-4)


def test_an_iterator_is_read_as_its_results_are(detector):
    read = []
    results = kedge.pipeline(detector, batch_size=2)(read.append(photo) or photo for photo in PHOTOS * 1000)
    assert read == []
    assert next(results)[0]["label"] == kedge.pipeline(detector)(PHOTOS[0])[0]["label"]
    assert len(read) == 2
    assert len([next(results) for _ in range(4)]) == 4
    assert len(read) == 6  # the fifth result is of the third batch


def test_it_needs_a_threshold_and_sensible_numbers(detector):
    with pytest.raises(NotReadyError, match="no threshold yet"):
        kedge.pipeline(kedge.MSP(flat()).fit(IMAGES[:9]))
    with pytest.raises(InputError, match="top_k must be a whole number of at least 1; got 0"):
        kedge.pipeline(detector, top_k=0)
    with pytest.raises(InputError, match="cannot be read as an image"):
        kedge.pipeline(detector)("no such file.png")
