"""The protocol of the Energy paper: fewer OOD images than ID images, drawn again and again."""

import numpy as np
import pytest
import torch

import kedge
from kedge.errors import InputError
from kedge.evaluation import evaluate
from kedge.evaluation.protocol import redrawn
from kedge.metrics import detection_metrics


def images(n, name, seed) -> kedge.ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return kedge.ImageSet(pixels, torch.arange(n) % 2, name=name)


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
            for metric, found in again.results[label].metrics[name].items():
                assert found.value == pytest.approx(sum(d[metric].value for d in drawn) / 3)
                assert found.low is None


def test_a_set_with_fewer_images_is_taken_whole(evaluation):
    again = redrawn(evaluation, ood_ratio=0.2, draws=2)
    for label, result in evaluation.results.items():
        for metric in ("auroc", "fpr95", "aupr_in"):
            assert again.results[label].metrics["few"][metric].value == pytest.approx(
                result.metrics["few"][metric].value
            )


def test_fewer_outliers_make_in_distribution_precision_higher_and_leave_the_rest(evaluation):
    again = redrawn(evaluation, ood_ratio=0.1, draws=20)
    for label, result in evaluation.results.items():
        assert again.results[label].metrics["many"]["aupr_in"].value > result.metrics["many"]["aupr_in"].value
        assert again.results[label].accuracy == result.accuracy
        assert again.results[label].detections is result.detections


def test_bad_arguments(evaluation):
    with pytest.raises(InputError, match="ood_ratio"):
        redrawn(evaluation, ood_ratio=0.0)
    with pytest.raises(InputError, match="draws"):
        redrawn(evaluation, ood_ratio=0.2, draws=0)
