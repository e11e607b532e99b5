"""The anchors of an AMP detector, and what each of them makes of a few images."""

import torch
from torch import Tensor

from kedge.detectors import AMP, Detection
from kedge.errors import NotReadyError
from kedge.evaluation import Evaluation
from kedge.evaluation.report.gallery import class_name, hypotheses, number, picture, verdict
from kedge.evaluation.report.markup import NOTHING, Html, section, table, tag

SHOWN = 12  # anchors at most: as many as fit beside each other


def anchors(detector: AMP, evaluation: Evaluation, lead: str) -> Html:
    """The anchors as thumbnails, and a table of the prediction under each.

    Args:
        detector: Fitted and calibrated; the one behind the first result.
        evaluation: Where the images come from.
        lead: The name of that result.
    """
    kept, own = detector.net.anchors, detector.net.per_image
    if kept is None or detector.calibration is None:
        raise NotReadyError("the detector has no anchors to show: call fit(train_set) and calibrate(held_out) first")
    thumbs = [picture(image, f"Anchor {k}") for k, image in enumerate(kept[:SHOWN], start=1)]
    which = f"All images share its {len(kept)} anchors" if own is None else f"Each image draws {own} of {len(kept)}"
    which += f", of which {SHOWN} are shown" if len(kept) > SHOWN else ""
    words = (
        f"{lead} looks at every image relative to its anchors. {which}. Anchors that agree give a low "
        "temperature, anchors that disagree a high one."
    )
    if own is None:
        heads = [tag("th", thumb, tag("small", f"anchor {k}"), scope="col") for k, thumb in enumerate(thumbs, start=1)]
        gallery = Html("")  # they head the columns
    else:
        heads = [tag("th", f"its anchor {k}", scope="col") for k in range(1, min(own, SHOWN) + 1)]
        gallery = tag("ul", *(tag("li", thumb) for thumb in thumbs), class_="anchors")
    body = _table(detector, evaluation, lead, heads)
    return section("anchors", f"Anchors of {lead}", tag("p", words), gallery, body)


def examples(evaluation: Evaluation, lead: str) -> list[tuple[str, str, int]]:
    """A typical and an extreme image from either side: (what it is, its set, its place there)."""
    said = evaluation.results[lead].detections
    inside = said[evaluation.id_name].score.argsort(stable=True)
    places = [(name, i) for name in evaluation.ood_names for i in range(len(said[name]))]
    outside = torch.cat([said[name].score for name in evaluation.ood_names]).argsort(stable=True)
    return [
        ("typical ID image", evaluation.id_name, int(inside[len(inside) // 2])),
        ("highest ID score", evaluation.id_name, int(inside[-1])),
        ("lowest OOD score", *places[int(outside[0])]),
        ("typical OOD image", *places[int(outside[len(outside) // 2])]),
    ]


def _table(detector: AMP, evaluation: Evaluation, lead: str, heads: list[Html]) -> Html:
    classes = detector.classes or evaluation.sets[evaluation.id_name].classes
    last = [tag("th", words, scope="col") for words in ("All anchors", "Temperature", "Score", "Verdict")]
    rows = []
    for what, name, index in examples(evaluation, lead):
        one = evaluation.sets[name].subset([index])
        said = detector(one)
        agreed = int(said.label[0])
        thumb = picture(one.images[0], f"Image {index} of {name}")
        head = tag("th", thumb, tag("small", f"{what}, {name}"), scope="row")
        cells = [_cell(row, classes, agreed) for row in hypotheses(detector, one)[: len(heads)]]
        rows.append(tag("tr", head, *cells, _cell(said.probability[0], classes, agreed), *_rest(said)))
    return table(
        "The class that each anchor predicts and its probability, marked where it differs from that of all anchors.",
        [tag("th", "Image", scope="col"), *heads, *last],
        rows,
        label="Predictions by anchor",
    )


def _cell(probability: Tensor, classes: tuple[str, ...], agreed: int) -> Html:
    label = int(probability.argmax())
    name = class_name(classes, label)
    shown = tag("span", name) if label == agreed else tag("span", f"≠ {name}", class_="differs")
    return tag("td", shown, tag("small", f"{100 * float(probability[label]):.0f} %"))


def _rest(said: Detection) -> list[Html]:
    temperature = NOTHING if said.tau is None else number(float(said.tau[0]))
    words = (temperature, number(float(said.score[0])), verdict(bool(said.is_ood[0])))
    return [tag("td", word) for word in words]
