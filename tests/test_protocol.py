"""The protocol of the Energy paper: fewer OOD images than ID images, drawn again and again."""

import numpy as np
import pytest
import torch

import kedge
from kedge.errors import InputError
from kedge.evaluation import evaluate
from kedge.evaluation.protocol import redrawn
from kedge.metrics import detection_metrics
from test_summary import images


@pytest.fixture(scope="module")
def evaluation():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    kinds = (kedge.MSP, kedge.Energy)
    detectors = {kind.__name__: kind(net).fit(images(20, "train", 1)).calibrate(images(30, "c", 2)) for kind in kinds}
    return evaluate(detectors, images(50, "test", 3), [images(40, "many", 4), images(7, "few", 5)])


def test_the_metrics_are_means_over_draws_of_the_same_images_for_every_detector(evaluation):
    again = redrawn(evaluation, ood_ratio=0.2, draws=3, seed=5)
    rng = np.random.default_rng(5)
    picks = {name: [rng.permutation(n)[:10] for _ in range(3)] for name, n in (("many", 40), ("few", 7))}
    for label, result in evaluation.results.items():
        inside = result.detections["test"].score
        for name, each in picks.items():
            drawn = [detection_metrics(inside, result.detections[name].score[pick]) for pick in each]
            for metric, estimate in again.results[label].metrics[name].items():
                assert estimate.value == pytest.approx(sum(d[metric].value for d in drawn) / 3)
                assert estimate.low is None


def test_fewer_outliers_raise_in_distribution_precision_and_leave_the_rest(evaluation):
    again = redrawn(evaluation, ood_ratio=0.2, draws=20)
    for label, result in evaluation.results.items():
        after = again.results[label]
        assert after.metrics["many"]["aupr_in"].value > result.metrics["many"]["aupr_in"].value
        for metric in ("auroc", "fpr95", "aupr_in"):  # a set with fewer images is taken whole
            assert after.metrics["few"][metric].value == pytest.approx(result.metrics["few"][metric].value)
        assert after.accuracy == result.accuracy
        assert after.detections is result.detections


def test_bad_arguments(evaluation):
    for bad in ({"ood_ratio": 0.0}, {"draws": 0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            redrawn(evaluation, **{"ood_ratio": 0.2} | bad)
