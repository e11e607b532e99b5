"""Protocols of papers: OOD sets cut down to a share of the ID test set (Energy), and the full spectrum (OpenOOD)."""

from dataclasses import replace

import numpy as np
import torch

from kedge.checks import at_least, between
from kedge.evaluation.result import Evaluation, EvaluationResult
from kedge.metrics import Estimate, detection_metrics


def redrawn(evaluation: Evaluation, *, ood_ratio: float, draws: int = 10, seed: int = 0) -> Evaluation:
    """The evaluation with metrics that are means over draws of fewer OOD images.

    AUPR depends on how many OOD images there are for each ID image, so numbers of different ratios do not compare.
    A set with fewer images than that is used whole.

    Args:
        evaluation: With the scores of all images.
        ood_ratio: OOD images for each ID image; 0.2 in the Energy paper.
        draws: How often to draw; the images drawn are the same for every detector.
        seed: Random seed of the draws.
    """
    between("ood_ratio", ood_ratio, 0, float("inf"), open_ends=True)
    at_least("draws", draws, 1)
    number = max(1, round(ood_ratio * len(evaluation.sets[evaluation.id_name])))
    rng = np.random.default_rng(seed)
    picks = {
        ood: [rng.permutation(len(evaluation.sets[ood]))[:number] for _ in range(draws)] for ood in evaluation.ood_names
    }

    def again(label: str, result: EvaluationResult) -> EvaluationResult:
        metrics = {}
        for ood, each in picks.items():
            inside, outside = evaluation.inside(label, ood), result.detections[ood].score
            drawn = [detection_metrics(inside, outside[pick], evaluation.right(label, ood)) for pick in each]
            metrics[ood] = {m: Estimate(float(np.mean([d[m].value for d in drawn]))) for m in drawn[0]}
        return replace(result, metrics=metrics)

    return replace(evaluation, results={label: again(label, result) for label, result in evaluation.results.items()})


def full_spectrum(evaluation: Evaluation) -> Evaluation:
    """The evaluation with its shifted sets counted as in distribution, as full-spectrum OOD detection defines it.

    Accuracy is that on all of these images; other metrics of the classifier are left out.
    """
    names = (evaluation.id_name, *evaluation.shifted_names)
    sizes = [len(evaluation.sets[name]) for name in names]

    def again(result: EvaluationResult) -> EvaluationResult:
        inside = torch.cat([result.detections[name].score for name in names])
        metrics = {ood: detection_metrics(inside, result.detections[ood].score) for ood in evaluation.ood_names}
        shifted = [result.shifted[name].accuracy for name in evaluation.shifted_names]
        right = None if result.accuracy is None else float(np.average([result.accuracy, *shifted], weights=sizes))
        return replace(result, metrics=metrics, classifier={} if right is None else {"accuracy": right})

    return replace(evaluation, results={label: again(result) for label, result in evaluation.results.items()})
