"""Parts of a set by class."""

import dataclasses

import pytest
import torch
from PIL import Image

import kedge
from helpers import labelled, network
from kedge.data import class_split
from kedge.data.classes import of_classes
from kedge.data.sources import folder
from kedge.errors import InputError


def test_classes_are_renumbered_in_the_given_order():
    data = labelled(12, name="ants and more")
    part = of_classes(data, (2, 0), name="two")
    assert part.labels.tolist() == [1, 0] * 3
    assert (part.name, part.classes) == ("two", ("cow", "ant"))
    assert part.images[0].equal(data.images[0])
    assert part.images[1].equal(data.images[2])


def test_even_positions_of_the_sorted_names_are_known_and_odd_ones_near():
    data = dataclasses.replace(labelled(10, classes=5), classes=("e", "b", "a", "d", "c"))
    data.labels[7] = -1  # an image without a label is in neither
    known, near = class_split(data)
    assert known.classes == ("a", "c", "e")
    assert known.labels.tolist() == [2, 0, 1, 2, 1]  # of the labels 0, 2, 4, 0, 4
    assert known.images.equal(data.images[[0, 2, 4, 5, 9]])
    assert near.images.equal(data.images[[1, 3, 6, 8]])
    assert (near.labels, near.classes, near.name) == (None, (), "toy, other classes")


def test_a_set_on_disk_and_its_features_are_split_alike(tmp_path):
    for number, name in enumerate(("pug", "cat", "ant", "pug", "cat", "ant")):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", (12, 12), (40 * number, 9, 9)).save(tmp_path / name / f"{number}.png")
    photos = folder(tmp_path)
    known, near = class_split(photos)
    assert known.classes == ("ant", "pug")
    assert [name.split("/")[0] for name in known.store.names] == ["ant", "ant", "pug", "pug"]
    assert [name.split("/")[0] for name in near.store.names] == ["cat", "cat"]
    net, rule = network(), kedge.Preprocess((3, 12, 12))
    features = class_split(kedge.extract(net, photos, preprocess=rule))
    for part, expected in zip(features, (known, near), strict=True):
        assert part.prints.equal(kedge.extract(net, expected, preprocess=rule).prints)
    assert features[0].labels.equal(known.labels)


def test_labels_with_names_of_three_classes_are_needed():
    with pytest.raises(InputError, match=r"three classes.* has 2"):
        class_split(labelled(4, classes=2))
    with pytest.raises(InputError, match="must have labels"):
        class_split(dataclasses.replace(labelled(4), labels=None))
    assert torch.equal(class_split(labelled(6, classes=3))[0].labels, torch.tensor([0, 1, 0, 1]))
