"""How objects show themselves: one line, tables, frames and figures."""

import pickle

import matplotlib.figure
import pytest
import torch

import kedge
from helpers import images, labelled, network
from kedge.evaluation import evaluate
from kedge.metrics import Estimate


@pytest.fixture(scope="module")
def detector():
    return kedge.MSP(network()).fit(labelled()).calibrate(labelled(seed=1))


@pytest.fixture(scope="module")
def evaluation(detector):
    others = [kedge.ImageSet(images(20, seed=s), name=f"other {s}") for s in (5, 6)]
    return evaluate({"MSP": detector}, labelled(seed=3, name="test"), others, resamples=20)


def test_objects_are_one_line(detector, evaluation):
    large = kedge.ImageSet(
        torch.zeros(2000, 3, 8, 8, dtype=torch.uint8), torch.arange(2000), "n", tuple(map(str, range(2000)))
    )
    detections = detector(images(9)), detector(images(1))
    of_one = evaluation.results["MSP"]
    for thing in (detector, detector.net, detector.calibration, large, *detections, evaluation, of_one):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 200
    assert repr(large) == "ImageSet('n', 2,000 images, 3 x 8 x 8, 2,000 classes)"
    assert "alpha 0.05, on 40 images" in repr(detector)
    assert "not fitted" in repr(kedge.Energy(network()))


def test_notebooks_show_tables_with_escaped_text(detector, evaluation):
    evil = kedge.ImageSet(images(), name="<script>")
    for thing in (detector, evil, detector(images(30)), evaluation):
        shown = thing._repr_html_()
        assert shown.startswith("<table>")
        assert "<script>" not in shown
    assert detector(images(30))._repr_html_().count("<tr>") == 11  # ten rows and the head


def test_sets_are_sliced():
    whole = labelled(20)
    part = whole[2:10:3]
    assert part.images.equal(whole.images[[2, 5, 8]])
    assert part.labels.tolist() == [2, 1, 0]
    assert len(whole[15:99]) == len(whole[-5:]) == 5
    assert len(whole[20:]) == 0


def test_a_detection_knows_the_names_of_files_and_classes(detector, tmp_path):
    from PIL import Image

    files = [tmp_path / f"{i}.png" for i in range(3)]
    for i, file in enumerate(files):
        Image.new("RGB", (8, 8), (80 * i, 10, 10)).save(file)
    detection = detector(files)
    assert detection.names == tuple(map(str, files))
    assert [row["name"] for row in detection] == list(map(str, files))
    assert {row["class"] for row in detection} <= {"ant", "bee", "cow", "dog"}
    assert detection[1:].names == tuple(map(str, files[1:]))
    assert detector(images(2)).names == ()


def test_rows_become_frames(detector, evaluation):
    pandas = pytest.importorskip("pandas")
    frame = detector(images(9)).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["score"].tolist() == pytest.approx(detector.score(images(9)).tolist())
    numbers = evaluation.to_pandas()
    assert numbers.index.tolist() == [("MSP", "other 5"), ("MSP", "other 6")]
    estimate = evaluation.results["MSP"].metrics["other 6"]["auroc"]
    row = numbers.loc[("MSP", "other 6")]
    assert (row["auroc"], row["auroc_low"], row["auroc_high"]) == (estimate.value, estimate.low, estimate.high)


def test_print_shows_the_table_of_an_evaluation(evaluation):
    head, _, row, *_ = str(evaluation).splitlines()
    assert head.split()[0] == "method"
    assert len(head) == len(row)
    auroc = head.split("  ")
    assert row.startswith("MSP")
    assert f"{100 * evaluation.results['MSP'].mean('auroc'):.1f}" in row
    assert any("AUROC" in cell for cell in auroc)


@pytest.mark.parametrize("kind", ["roc", "scores", "reliability"])
def test_an_evaluation_is_plotted_by_one_call(evaluation, kind):
    assert isinstance(evaluation.plot(kind), matplotlib.figure.Figure)
    with pytest.raises(kedge.errors.InputError, match="kind must be one of"):
        evaluation.plot("pie")


def test_a_detector_plots_its_verdicts(detector):
    figure = detector.plot(images(5), most=3)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 3
    assert all("distribution" in title.lower() for title in titles)


def test_the_nearest_training_images_stand_below_the_verdicts(detector):
    train_set = kedge.ImageSet(images(20), torch.arange(20) % 4, classes=("ant", "bee", "cow", "dog"))
    one, *near = detector.plot(train_set.subset([6]), train_set=train_set).axes
    assert "distribution" in one.get_title()
    assert len(near) == 3
    assert near[0].get_title() == "cow"
    assert (near[0].images[0].get_array() == one.images[0].get_array()).all()  # the image itself


def test_an_estimate_is_a_number():
    auroc = Estimate(0.912, 0.9, 0.92)
    assert (f"{auroc:.1%}", auroc + 1, max(auroc, 0.5), float(auroc)) == ("91.2%", 1.912, auroc, 0.912)
    assert Estimate(0.5) < auroc
    copy = pickle.loads(pickle.dumps(auroc))
    assert (copy.value, copy.low, copy.high) == (0.912, 0.9, 0.92)
    assert vars(copy) == {"value": 0.912, "low": 0.9, "high": 0.92}


def test_completion_shows_verbs_and_options(detector, evaluation):
    shown = set(dir(detector))
    assert {"fit", "calibrate", "score", "save", "plot", "shape", "net"} <= shown
    assert not [name for name in shown if name.startswith("_")]
    assert {"label", "is_ood", "to_pandas"} <= set(dir(detector(images(2))))
    assert {"network", "features", "eval", "set_anchors"} <= set(dir(kedge.anchor(network())))
    assert not {"register_buffer", "flexible_buffers"} & set(dir(detector.net))
    assert {"results", "ood_names", "plot", "to_pandas"} <= set(dir(evaluation))
    assert all(hasattr(evaluation, name) for name in dir(evaluation))
    assert not {"drawn", "apart", "known_in"} & set(dir(evaluation))
