"""Images in the report: thumbnails inside the file, and the galleries of a detector's worst mistakes."""

import base64
import io

import torch
from PIL import Image
from torch import Tensor

from kedge.data import ImageSet, batches
from kedge.detectors import AMP, Detection
from kedge.errors import NotReadyError
from kedge.evaluation import Evaluation
from kedge.evaluation.report.markup import Html, figure, join, section, tag
from kedge.models.classifier import evaluating

SIDE = 96  # pixels of a thumbnail's longer side at most; a report of large photographs stays small
ALARMS, MISSES_PER_SET = 12, 4


def picture(image: Tensor, alt: str) -> Html:
    """An image (D, H, W), uint8 or in [0, 1], as a PNG inside the page; unless D is 1 or 3, its mean over channels.

    Example:
        >>> picture(torch.zeros(1, 8, 8, dtype=torch.uint8), "black")[:42]
        '<img src="data:image/png;base64,iVBORw0KGg'
    """
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = (255 * pixels.double().clamp(0, 1)).round().to(torch.uint8)
    if len(pixels) not in (1, 3):
        pixels = pixels.double().mean(dim=0, keepdim=True).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).contiguous().numpy()  # (H, W, D)
    drawn = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    drawn.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    target = io.BytesIO()
    drawn.save(target, format="png", optimize=True)
    return tag("img", src="data:image/png;base64," + base64.b64encode(target.getvalue()).decode(), alt=alt)


def class_name(classes: tuple[str, ...], index: int) -> str:
    """The name of a class, or its number where it has no name.

    Example:
        >>> class_name(("cat", "dog"), 1), class_name((), 1)
        ('dog', 'class 1')
    """
    return classes[index] if index < len(classes) else f"class {index}"


def number(value: float, digits: int = 3) -> str:
    """A number to a few digits, its last zeros kept, with a true minus sign.

    Example:
        >>> number(2.5), number(1234.5), number(0.0025, 2)
        ('2.50', '1234', '0.0025')
    """
    text = f"{value:.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")
    return text.replace("-", "\N{MINUS SIGN}")


def verdict(is_ood: bool) -> str:
    """What the threshold decided."""
    return "flagged" if is_ood else "accepted"


def galleries(evaluation: Evaluation, lead: str, detector: AMP | None = None) -> Html:
    """The in-distribution images that score highest and the OOD images that score lowest.

    Args:
        evaluation: What was measured.
        lead: The detector whose mistakes are shown.
        detector: That detector, where it has anchors: the cards then tell what each of them predicts.
    """
    said, id_name = evaluation.results[lead].detections, evaluation.id_name
    inside = said[id_name]
    alarms = inside.score.argsort(descending=True, stable=True)[:ALARMS].tolist()
    flagged, n = int(inside.is_ood.sum()), len(inside)
    missed = {name: int((~said[name].is_ood).sum()) for name in evaluation.ood_names}
    misses = [
        _card(evaluation, said[name], name, i, detector)
        for name in evaluation.ood_names
        for i in said[name].score.argsort(stable=True)[:MISSES_PER_SET].tolist()
    ]
    total = sum(len(said[name]) for name in evaluation.ood_names)
    return section(
        "images",
        "The hardest images",
        tag("p", f"Where {lead} errs most, or comes closest to it. p is the conformal p-value of a score."),
        tag("h3", "False alarms"),
        tag("p", f"The highest scores in {id_name}; {flagged} of its {n} images are flagged.", class_="note"),
        tag("div", *(_card(evaluation, inside, id_name, i, detector) for i in alarms), class_="gallery"),
        tag("h3", "Misses"),
        tag(
            "p",
            f"The lowest scores in each OOD set; {sum(missed.values())} of {total} OOD images are accepted.",
            class_="note",
        ),
        tag("div", *misses, class_="gallery"),
    )


def hypotheses(detector: AMP, one: ImageSet) -> Tensor:
    """Calibrated probabilities of one image under each anchor, (K, C)."""
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector has no anchors to show: call fit(train_set) and calibrate(held_out) first")
    x, _ = next(batches(one, detector.preprocess))
    with evaluating(detector.net), torch.no_grad():
        logits = detector.net.per_anchor_logits(detector.as_input(x), tta=detector.tta)[:, 0]  # (K, C)
    return (logits / detector.calibration.temperature).softmax(dim=-1).cpu()


def _votes(detector: AMP, one: ImageSet, classes: tuple[str, ...]) -> str:
    """What the anchors predict, the most common class first, each with its mean probability under those anchors."""
    probability, label = hypotheses(detector, one).max(dim=1)
    votes = {int(each): probability[label == each] for each in label.unique()}
    order = sorted(votes, key=lambda each: (-len(votes[each]), each))
    return "anchors: " + ", ".join(
        f"{len(votes[each])} {class_name(classes, each)} ({100 * float(votes[each].mean()):.0f} %)" for each in order
    )


def _card(evaluation: Evaluation, said: Detection, name: str, index: int, detector: AMP | None) -> Html:
    images = evaluation.sets[name]
    classes = evaluation.sets[evaluation.id_name].classes
    label = class_name(classes, int(said.label[index]))
    predicted = f"predicted {label}"
    alt = f"Image {index} of {name}, {predicted}"
    if images.labels is not None and name == evaluation.id_name:  # an OOD set numbers its classes in its own way
        true = int(images.labels[index])
        predicted += ", rightly" if true == int(said.label[index]) else f", truly {class_name(classes, true)}"
    measured = f"score {number(float(said.score[index]))}, p {number(float(said.p_value[index]), 2)}"
    lines = [tag("strong", name), predicted, measured, verdict(bool(said.is_ood[index]))]
    if detector is not None:
        lines.append(_votes(detector, images.subset([index]), detector.classes or classes))
    return figure(picture(images.images[index], alt), join(lines, tag("br")))
