"""Images in the report: inside the file, as galleries of the worst errors and as predictions by anchor."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.data import Features, ImageSet, StreamedSet, batches
from kedge.detectors import AMP, Detection
from kedge.detectors.neighbours import Neighbours
from kedge.errors import NotReadyError
from kedge.evaluation import Evaluation
from kedge.evaluation.report.markup import NOTHING, Html, gallery, number, render_template
from kedge.models.classifier import evaluating

SIDE = 96  # pixels of a picture's longer side on the page
ENLARGED = 320  # of the file of one that is enlarged by a click; a report of large photographs stays small
ALARMS, MISSES_PER_SET, NEIGHBOURS = 12, 4, 3
OPENING = 4  # OOD sets with an image at the top of the page
ANCHORS = 12  # shown at most: as many as fit side by side


def data_address(image: Tensor, side: int = SIDE) -> str:
    """An image (D, H, W), uint8 or in [0, 1], as a data: address; unless D is 1 or 3, its mean over channels.

    It is exact up to `SIDE` pixels. A larger one is reduced to at most ``side`` pixels, and stored as JPEG.
    """
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = (255 * pixels.double().clamp(0, 1)).round().to(torch.uint8)
    if len(pixels) not in (1, 3):
        pixels = pixels.double().mean(dim=0, keepdim=True).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).contiguous().numpy()  # (H, W, D)
    drawn = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    kind, options = ("png", {"optimize": True}) if max(drawn.size) <= SIDE else ("jpeg", {"quality": 85})
    drawn.thumbnail((side, side), Image.Resampling.BOX)
    target = io.BytesIO()
    drawn.save(target, format=kind, **options)
    return f"data:image/{kind};base64," + base64.b64encode(target.getvalue()).decode()


def per_anchor_probabilities(detector: AMP, one: ImageSet) -> Tensor:
    """Calibrated probabilities of one image under each anchor, (K, C)."""
    assert detector.preprocess is not None
    assert detector.calibration is not None
    x, _ = next(batches(one, detector.preprocess))
    with evaluating(detector.net), torch.no_grad():
        logits = detector.net.per_anchor_logits(detector.as_input(x), tta=detector.tta)[:, 0]  # (K, C)
    return (logits / detector.calibration.temperature).softmax(dim=-1).cpu()


def pixels(images: ImageSet | StreamedSet, index: int) -> Tensor:
    """One image of a set, (D, H, W), as it is before preprocessing."""
    if isinstance(images, ImageSet):
        return images.images[index]
    array = np.array(images.image(index).convert("RGB"))  # (H, W, D)
    return torch.from_numpy(array).permute(2, 0, 1)


def opening_pictures(evaluation: Evaluation, lead: str) -> Html | None:
    """A typical image of each set and the extreme one of either side, with their verdicts; None without images."""
    if _without_images(evaluation):
        return None
    detections, cards = evaluation.results[lead].detections, []
    shown = (evaluation.id_name, *evaluation.ood_names[:OPENING])
    orders = [(name, detections[name].score.argsort(stable=True)) for name in shown]
    places = [(name, int(order[len(order) // 2]), "a typical image") for name, order in orders]
    _, highest, lowest, _ = _examples(evaluation, lead)
    places[1:1] = [(*highest[1:], "its highest score")]
    places.append((*lowest[1:], "the lowest score of all"))
    for name, index, what in places:
        outside = bool(detections[name].is_ood[index])
        right = "rightly" if outside == (name != evaluation.id_name) else "wrongly"
        verdict = f"{right} {_verdict(detections[name], index)}"
        source = data_address(pixels(evaluation.sets[name], index), ENLARGED)
        alt = f"{name}, image {index}, {verdict}"
        words = {"set": name, "lines": [what], "flagged": outside, "verdict": verdict}
        cards.append({"source": source, "alt": alt, "nearest": []} | words)
    return gallery(cards)


def image_section(
    evaluation: Evaluation, lead: str, detector: AMP | None = None, neighbours: Neighbours | None = None
) -> Html | None:
    """The in-distribution images that score highest and the OOD images that score lowest; None without images.

    With ``neighbours`` each of them has the nearest training images beside it.
    """
    if _without_images(evaluation):
        return None
    detections, id_name, oods = evaluation.results[lead].detections, evaluation.id_name, evaluation.ood_names
    alarms = [(id_name, i) for i in detections[id_name].score.argsort(descending=True, stable=True)[:ALARMS].tolist()]
    misses = [(ood, i) for ood in oods for i in detections[ood].score.argsort(stable=True)[:MISSES_PER_SET].tolist()]
    nearest = {} if neighbours is None else _nearest(evaluation, neighbours, [*alarms, *misses])

    def card(name: str, index: int) -> dict[str, Any]:
        drawn = _card(evaluation, detections[name], name, index, detector)
        return drawn | {"nearest": nearest.get((name, index), [])}

    cards = ([card(name, i) for name, i in each] for each in (alarms, misses))
    outside = torch.cat([detections[name].is_ood for name in oods])
    return render_template(
        "images.html", lead=lead, id_name=id_name, flagged=int(detections[id_name].is_ood.sum()),
        images=len(detections[id_name]), alarms=next(cards), missed=int((~outside).sum()), total=len(outside),
        misses=next(cards), sets=[id_name, *oods],
    )  # fmt: skip


def _without_images(evaluation: Evaluation) -> bool:
    return any(isinstance(images, Features) for images in evaluation.sets.values())


def _nearest(
    evaluation: Evaluation, neighbours: Neighbours, shown: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[dict[str, str]]]:
    """The nearest training images of images, by set and place."""
    found, train_set = {}, neighbours.images
    for name in dict.fromkeys(name for name, _ in shown):
        places = [place for other, place in shown if other == name]
        nearest = neighbours.nearest(evaluation.sets[name].subset(places), NEIGHBOURS).tolist()
        for place, row in zip(places, nearest, strict=True):
            found[name, place] = [
                {
                    "source": data_address(pixels(train_set, i), 2 * SIDE),
                    "alt": label_of(train_set, i),
                }
                for i in row
            ]
    return found


def label_of(images: ImageSet | StreamedSet, index: int) -> str:
    """The class of an image in words, or its place in the set if it has no label."""
    label = -1 if images.labels is None else int(images.labels[index])
    return _class_name(images.classes, label) if label >= 0 else f"image {index}"


def anchor_section(detector: AMP, evaluation: Evaluation, lead: str) -> Html:
    """The anchors as thumbnails, and the prediction under each for a typical and an extreme image of either side."""
    anchors, per_image = detector.net.anchors, detector.net.per_image
    if anchors is None or detector.calibration is None:
        raise NotReadyError("the detector has no anchors to show: call fit(train_set) and calibrate(held_out) first")
    total = len(anchors)
    which = f"Each image draws {per_image} of {total}" if per_image else f"All images share its {total} anchors"
    columns = min(per_image or total, ANCHORS)
    return render_template(
        "anchors.html",
        lead=lead,
        which=which + (f", of which {ANCHORS} are shown" if total > ANCHORS else ""),
        per_image=per_image,
        thumbs=[data_address(image) for image in anchors[:ANCHORS]],
        columns=columns,
        rows=[_anchor_row(detector, evaluation, columns, *example) for example in _examples(evaluation, lead)],
    )


def _examples(evaluation: Evaluation, lead: str) -> list[tuple[str, str, int]]:
    """Images to show: (description, set, place in the set)."""
    detections = evaluation.results[lead].detections
    inside = detections[evaluation.id_name].score.argsort(stable=True)
    places = [(name, i) for name in evaluation.ood_names for i in range(len(detections[name]))]
    outside = torch.cat([detections[name].score for name in evaluation.ood_names]).argsort(stable=True)
    return [
        ("typical ID image", evaluation.id_name, int(inside[len(inside) // 2])),
        ("highest ID score", evaluation.id_name, int(inside[-1])),
        ("lowest OOD score", *places[int(outside[0])]),
        ("typical OOD image", *places[int(outside[len(outside) // 2])]),
    ]


def _anchor_row(
    detector: AMP, evaluation: Evaluation, columns: int, what: str, name: str, index: int
) -> dict[str, Any]:
    classes = detector.classes or evaluation.sets[evaluation.id_name].classes
    one = evaluation.sets[name].subset([index])
    detection = detector(one)
    agreed = int(detection.label[0])
    probabilities = [*per_anchor_probabilities(detector, one)[:columns], detection.probability[0]]
    pairs = [(int(p.argmax()), f"{100 * float(p.max()):.0f}") for p in probabilities]
    votes = [{"name": _class_name(classes, i), "agrees": i == agreed, "percent": share} for i, share in pairs]
    return {
        "source": data_address(one.images[0]),
        "alt": f"Image {index} of {name}",
        "what": f"{what}, {name}",
        "votes": votes,
        "tau": NOTHING if detection.tau is None else number(float(detection.tau[0])),
        "score": number(float(detection.score[0])),
        "verdict": _verdict(detection, 0),
    }


def _card(evaluation: Evaluation, detection: Detection, name: str, index: int, detector: AMP | None) -> dict[str, Any]:
    images, classes = evaluation.sets[name], evaluation.sets[evaluation.id_name].classes
    predicted = f"predicted {_class_name(classes, int(detection.label[index]))}"
    alt = f"Image {index} of {name}, {predicted}"
    truth = -1 if images.labels is None else int(images.labels[index])
    if truth >= 0 and name == evaluation.id_name:  # an OOD set numbers its classes in its own way
        predicted += ", correct" if truth == int(detection.label[index]) else f", true {_class_name(classes, truth)}"
    measured = f"score {number(float(detection.score[index]))}, p {number(float(detection.p_value[index]), 2)}"
    lines = [predicted, measured]
    if detector is not None:
        lines.append(_votes(detector, images.subset([index]), detector.classes or classes))
    flagged = bool(detection.is_ood[index])
    source = data_address(pixels(images, index), ENLARGED)
    verdict = _verdict(detection, index)
    if not flagged:
        verdict += f": {100 * float(detection.p_value[index]):.0f} % of known images score at least as high"
    return {"source": source, "alt": alt, "set": name, "lines": lines, "flagged": flagged, "verdict": verdict}


def _votes(detector: AMP, one: ImageSet, classes: tuple[str, ...]) -> str:
    """The classes predicted by the anchors, the most common first, each with its mean probability."""
    probability, label = per_anchor_probabilities(detector, one).max(dim=1)
    votes = {int(each): probability[label == each] for each in label.unique()}
    order = sorted(votes, key=lambda each: (-len(votes[each]), each))
    return "anchors: " + ", ".join(
        f"{len(votes[each])} {_class_name(classes, each)} ({100 * float(votes[each].mean()):.0f} %)" for each in order
    )


def _class_name(classes: tuple[str, ...], index: int) -> str:
    return classes[index] if index < len(classes) else f"class {index}"


def _verdict(detection: Detection, index: int) -> str:
    reason = None if detection.reasons is None else detection.reasons[index]
    return verdict_words(bool(detection.is_ood[index]), reason)


def verdict_words(flagged: bool, reason: str | None) -> str:
    """Whether an image is flagged, and why if that is known."""
    return f"flagged: {reason}" if reason else "flagged" if flagged else "accepted"
