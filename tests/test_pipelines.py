"""A pipeline: one row for each of the likeliest classes of an image, with the verdict of the detector in it."""

import json

import numpy as np
import pytest
from PIL import Image

import kedge
from helpers import CLASSES, flat, images, labelled, network
from kedge.adapters.pipeline import Pipeline
from kedge.errors import InputError, NotReadyError

IMAGES = images(80)


@pytest.fixture(scope="module")
def detector():
    return kedge.AMP(network("anchored", classes=3)).fit(labelled(30, classes=3)).calibrate(IMAGES[30:])


@pytest.fixture(scope="module")
def photos():
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in IMAGES[:7]]


def test_one_image_gives_its_likeliest_classes_with_the_verdict_in_each(detector, photos):
    result = kedge.pipeline(detector)(photos[0])
    detection = detector(photos[0])
    order = np.argsort(-detection.probability[0].numpy())
    assert [(each["label"], each["class"]) for each in result] == [(k, CLASSES[k]) for k in order]
    assert [each["probability"] for each in result] == pytest.approx(detection.probability[0].numpy()[order].tolist())
    (row,) = detection.to_rows(CLASSES)
    assert result[0] == row | {"probability": pytest.approx(row["probability"])}
    for each in result:
        assert {key: each[key] for key in ("name", "tau", "score", "p_value", "is_ood")}.items() <= row.items()
    assert json.loads(json.dumps(result)) == result


def test_several_images_give_a_list_for_each(detector, photos, tmp_path):
    detect = kedge.pipeline(detector, top_k=1, batch_size=3)
    alone = [detect(photo) for photo in photos]
    assert all(len(result) == 1 for result in alone)
    paths = []
    for number, photo in enumerate(photos):
        paths.append(tmp_path / f"{number}.png")
        photo.save(paths[-1])
    assert detect(paths[2]) == detect(str(paths[2]))
    for given in (photos, tuple(photos), paths, IMAGES[:7], kedge.ImageSet(IMAGES[:7])):
        result = detect(given)
        assert [each[0]["label"] for each in result] == [each[0]["label"] for each in alone]
        scores = [each[0]["score"] for each in result]
        assert scores == pytest.approx([each[0]["score"] for each in alone], rel=1e-4)


def test_an_iterator_is_read_as_its_results_are(detector, photos):
    read = []

    def stream():
        for photo in photos * 1000:
            read.append(photo)
            yield photo

    results = kedge.pipeline(detector, batch_size=2)(stream())
    assert read == []
    first = next(results)
    assert first[0]["label"] == kedge.pipeline(detector)(photos[0])[0]["label"]
    assert len(read) == 2
    assert len([next(results) for _ in range(4)]) == 4
    assert len(read) == 6  # the fifth result is of the third batch


def test_a_pipeline_comes_from_a_file_a_folder_or_a_detector(detector, photos, tmp_path):
    detector.save(tmp_path / "detector.kedge")
    for given in (tmp_path, str(tmp_path / "detector.kedge"), detector):
        assert kedge.pipeline(given)(photos[1]) == kedge.pipeline(detector)(photos[1])


def test_classes_without_names_have_their_number(photos):
    net = flat(classes=7)
    detector = kedge.MSP(net).fit(IMAGES[:9]).calibrate(IMAGES)
    result = kedge.pipeline(detector)(photos[0])
    likeliest = detector(photos[0]).probability[0].argsort(descending=True)[:5]
    assert [(each["label"], each["class"]) for each in result] == [(k, None) for k in likeliest.tolist()]


def test_it_needs_a_threshold_and_sensible_numbers(detector):
    bare = kedge.MSP(flat()).fit(IMAGES[:9])
    with pytest.raises(NotReadyError, match="no threshold yet"):
        kedge.pipeline(bare)
    with pytest.raises(InputError, match="top_k must be a whole number of at least 1; got 0"):
        kedge.pipeline(detector, top_k=0)
    with pytest.raises(InputError, match="cannot be read as an image"):
        Pipeline(detector)("no such file.png")
