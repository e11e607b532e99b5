"""The protocol of the Energy paper: OOD sets cut down to a share of the ID test set, drawn again and again."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from kedge.checks import at_least, between
from kedge.evaluation.result import Evaluation, Result
from kedge.metrics import Estimate, detection_metrics


def redrawn(evaluation: Evaluation, *, ood_ratio: float, draws: int = 10, seed: int = 0) -> Evaluation:
    """The evaluation with metrics that are means over draws of fewer OOD images.

    AUPR depends on how many OOD images there are for each ID image, so numbers of different ratios do not compare.
    A set with fewer images than asked for is taken whole.

    Args:
        evaluation: With the scores of all images.
        ood_ratio: OOD images for each ID image; 0.2 in the Energy paper.
        draws: How often to draw; the images drawn are the same for every detector.
        seed: Of the draws.
    """
    between("ood_ratio", ood_ratio, 0, float("inf"), open_ends=True)
    at_least("draws", draws, 1)
    number = max(1, round(ood_ratio * len(evaluation.sets[evaluation.id_name])))
    rng = np.random.default_rng(seed)
    picks = {
        ood: [rng.permutation(len(evaluation.sets[ood]))[:number] for _ in range(draws)] for ood in evaluation.ood_names
    }

    def again(label: str, result: Result) -> Result:
        metrics = {
            ood: _means(evaluation.inside(label, ood), result.detections[ood].score, each)
            for ood, each in picks.items()
        }
        return replace(result, metrics=metrics)

    return replace(evaluation, results={label: again(label, result) for label, result in evaluation.results.items()})


def _means(
    inside: Tensor, outside: Tensor, picks: list["np.ndarray[tuple[int], np.dtype[np.int64]]"]
) -> dict[str, Estimate]:
    drawn = [detection_metrics(inside, outside[pick]) for pick in picks]
    return {name: Estimate(float(np.mean([each[name].value for each in drawn]))) for name in drawn[0]}
