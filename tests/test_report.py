"""The report: a page that is sound, safe, complete and honest, on an artificial evaluation."""

import base64
import dataclasses
import io
import itertools
import re
import sys
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kedge import AMP, MSP, Detection, ImageSet, anchor, calibration
from kedge.detectors import Cost, extract
from kedge.detectors.neighbours import KEPT, Neighbours
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import Evaluation, EvaluationResult, ShiftedResult
from kedge.evaluation.paired import best_beyond_noise, difference, redraw, winner
from kedge.evaluation.report import charts, figures, write_report
from kedge.evaluation.report.charts import curve_section, flagging_threshold
from kedge.evaluation.report.document import document
from kedge.evaluation.report.gallery import SIDE, data_address, image_section, opening_pictures
from kedge.evaluation.report.markup import figure, section, table, tag
from kedge.evaluation.report.page import evaluation_finding, guaranteed
from kedge.evaluation.result import Curve
from kedge.metrics import CLASSIFIER_METRICS, Predictions, detection_metrics, ece
from kedge.metrics import DETECTION_METRICS as METRICS
from kedge.metrics import METRICS as ALL
from test_metrics import ORACLES

EVIL = "<script>alert(1)</script>"
VOID = {"br", "img", "input", "meta"}


FEWER = 60  # resamples: pages need not have the last digit; whether marks are right is tested on `best_beyond_noise`


def detection(scores, calibrated, *, alpha=0.05, classes=3, temperatures=True, seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(scores), classes, generator=rng)
    tau = torch.rand(len(scores), generator=rng) if temperatures else None
    p_value, is_ood = calibration.p_values(calibrated, scores), calibration.is_ood(calibrated, scores, alpha)
    return Detection(logits.argmax(dim=1), logits, logits.softmax(dim=1), tau, scores, p_value, is_ood)


def example(
    detectors=("first", "second"), oods=("near", "far"), *, sizes=(60, 40), shifts=(1.0, 3.0), labels=True,
    temperatures=True, resamples=20, shape=(1, 6, 6), classes=("ant", "bee", "cow"), noise=0.2, alpha=0.05,
):  # fmt: skip
    """An evaluation of random scores: each detector sees the images' own scores through noise of its own."""
    rng = torch.Generator().manual_seed(0)
    true = torch.randint(3, (sizes[0],), generator=rng) if labels else None
    sets, own = {}, {}
    for place, name in enumerate(("inside", *oods)):
        images = torch.randint(256, (sizes[place > 0], *shape), generator=rng, dtype=torch.uint8)
        sets[name] = ImageSet(images, None if place else true, name, () if place else classes)
        own[name] = (shifts[(place - 1) % len(shifts)] if place else 0) + torch.randn(len(images), generator=rng)
    results = {}
    for number, label in enumerate(detectors):
        calibrated = torch.randn(99, generator=rng).sort().values
        outputs = {}
        for place, (name, scores) in enumerate(own.items()):
            seen = scores + noise * torch.randn(len(scores), generator=rng)
            seed = 10 * number + place
            outputs[name] = detection(seen, calibrated, temperatures=temperatures, seed=seed, alpha=alpha)
        results[label] = result(outputs, true, resamples)
    return Evaluation(results, sets, "inside", resamples)


def result(detections, true=None, resamples=0):
    inside = detections["inside"]
    predictions = Predictions(inside.label, inside.probability, inside.score, true)
    return EvaluationResult(
        metrics={
            name: detection_metrics(inside.score, d.score, resamples=resamples)
            for name, d in detections.items()
            if name != "inside"
        },
        classifier={} if true is None else {name: metric(predictions) for name, metric in CLASSIFIER_METRICS.items()},
        flagged={name: float(d.is_ood.double().mean()) for name, d in detections.items()},
        milliseconds=0.5,
        cost=Cost(forward=1),
        uses_outliers=False,
        detections=detections,
    )


def amp_detector(**options):
    """An AMP detector whose probabilities have a temperature that is not one."""
    rng = torch.Generator().manual_seed(1)
    held_out = torch.randint(256, (60, 1, 6, 6), generator=rng, dtype=torch.uint8)
    net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), init="fresh", seed=0)
    train = torch.rand(40, 1, 6, 6, generator=rng)
    return AMP(net, **options).fit(train).calibrate(ImageSet(held_out, torch.arange(60) % 3))


def msp_detector():
    """A detector without anchors to show."""
    return MSP(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))).fit(torch.rand(9, 1, 6, 6))


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in turn, and all attributes are kept."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.style = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        elif "script" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, *names):
        return [attrs for tag, attrs in self.tags if tag in names]


def check(text):
    """What must hold for every report."""
    assert text.startswith("<!DOCTYPE html>")
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    assert any(m.get("name") == "viewport" for m in page.all("meta"))
    # Nothing from outside.
    assert not page.all("link", "iframe", "object", "embed", "base")
    assert page.all("script") == [{}]  # sorts tables, and is not needed
    for _, attrs in page.tags:
        for name, value in attrs.items():
            assert not name.startswith("on")
            assert "://" not in (value or "") or name in ("alt", "aria-label")
            if name in ("src", "href"):
                assert value.startswith(("#", "data:image/png;base64,", "data:image/jpeg;base64,"))
    assert "@import" not in page.style
    assert "url(" not in page.style
    # Everything that is seen can be read.
    for attrs in page.all("svg"):
        assert attrs.get("aria-hidden") == "true" or (attrs["role"] == "img" and len(attrs["aria-label"]) > 20)
    assert all(attrs["alt"] for attrs in page.all("img"))
    assert all(attrs["scope"] in ("row", "col") for attrs in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    # Every link and reference has one target.
    ids = Counter(attrs["id"] for _, attrs in page.tags if "id" in attrs)
    assert max(ids.values()) == 1
    used = {v[1:] for _, attrs in page.tags for k, v in attrs.items() if k == "href" and v.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]*)\)", text))
    used |= {attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs}
    assert used <= set(ids)
    # Colours are the page's own: none of the stand-ins, no black that vanishes in the dark.
    assert "#0a0" not in text
    assert "#000000" not in text
    return page


def written(tmp_path, evaluation, **options):
    path = write_report(tmp_path / "report.html", evaluation, **{"title": "A title", "resamples": FEWER} | options)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def test_a_whole_report_is_sound_and_shows_everything(tmp_path):
    record = {"command": "kedge demo", "seed": 3, "versions": {"kedge": "0.1"}, "config": {"deep": {"er": [1, 2]}}}
    evaluation = example()
    read = check(written(tmp_path, evaluation, detector=amp_detector(), record=record, intro="One.\n\nTwo."))
    sections = ["summary", "sets", "scores", "roc", "tau", "reliability", "images", "anchors", "reading", "record"]
    assert [attrs["id"] for attrs in read.all("h2")] == [f"{name}-heading" for name in sections]
    assert len([attrs for attrs in read.all("svg") if "role" in attrs]) == 4 * 2  # scores, ROC, tau, reliability
    for words in ("One.", "Two.", "kedge demo", "kedge: 0.1", "ant", "first", "near", "A title"):
        assert words in read.text
    for metric in ("AUROC", "FPR95"):
        estimate = evaluation.results["second"].metrics["near"][metric.lower()]
        assert f"{100 * estimate.value:.1f} {100 * estimate.low:.1f} to {100 * estimate.high:.1f}" in read.text
    for metric in ALL.values():
        assert f"{metric.head} {metric.meaning}" in read.text
    risk, likelihood = (evaluation.results["second"].value(metric) for metric in ("augrc", "nll"))
    assert all(words in read.text for words in (f" {100 * risk:.1f} ", f" {likelihood:.3f} "))
    assert "In percent, except for Brier, NLL. FPR95 (OOD), SCOD-AURC, OSCR, AUTC are the mean over" in read.text
    assert evaluation.sets["far"].checksum in read.text
    best = best_beyond_noise(evaluation, resamples=FEWER)
    assert evaluation_finding(evaluation, best).replace("\N{NO-BREAK SPACE}", " ") in read.text
    assert "from 60 paired resamples of the same images" in read.text


def test_the_same_arguments_give_the_same_bytes_whatever_the_settings_of_matplotlib(tmp_path):
    import matplotlib as mpl

    evaluation, options = example(), {"detector": amp_detector(), "record": {"a": 1}}
    first = written(tmp_path, evaluation, **options)
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "path", "axes.grid": True}):
        assert written(tmp_path, evaluation, **options) == first
    assert mpl.rcParams["svg.hashsalt"] is None


def test_text_from_data_is_escaped_wherever_it_enters(tmp_path):
    evaluation = example((EVIL, 'a"b&c'), (EVIL, "$x_1$ \N{OCTOPUS} 'q'"), classes=(EVIL, "</td>", "&lt;"))
    evaluation = moved(evaluation, f"moved {EVIL}", ShiftedResult(0.5, 0.5, 0.5))
    curve = Curve(f"title {EVIL}", f"axis {EVIL}", {f"series {EVIL}": {1: (EVIL, None), 2: ('a"b&c', EVIL)}})
    record = {EVIL: EVIL, "nested": {EVIL: [EVIL, {"k": EVIL}]}, "list": [EVIL]}
    options = {"title": EVIL, "intro": EVIL, "record": record, "curves": [curve], "leads": ('a"b&c', EVIL)}
    read = check(written(tmp_path, evaluation, detector=amp_detector(), **options))
    assert read.text.count(EVIL) > 30
    for words in ('a"b&c', "$x_1$ \N{OCTOPUS} 'q'", "&lt;", f"title {EVIL}", f"series {EVIL}", f"moved {EVIL}"):
        assert words in read.text
    for words in (f"axis {EVIL}", f"series {EVIL}"):
        assert any(words in attrs.get("aria-label", "") for attrs in read.all("svg"))
    assert re.search(rf"anchors: .*\d {re.escape(EVIL)} \(\d+ %\)", read.text)


BARE = {"labels": False, "temperatures": False, "resamples": 0}
CASES = {
    "no labels, no intervals": {"labels": False, "resamples": 0},
    "no temperatures, colour, one OOD set": {"temperatures": False, "shape": (3, 6, 9), "oods": ("only",)},
    "one of each": {"detectors": ("only",), "oods": ("one",)} | BARE,
    "one image each, two channels": {"sizes": (1, 1), "shape": (2, 6, 6), "oods": ("only",)},
    "few images, no class names": {"sizes": (5, 3), "classes": (), "detectors": ("only",)},
    "many sets": {"oods": tuple(f"set {i}" for i in range(8)), "detectors": ("only",)} | BARE,
    "nothing flagged": {"alpha": 0.001, "oods": ("only",)} | BARE,
    "much flagged": {"alpha": 0.99, "oods": ("only",)} | BARE,
}


@pytest.mark.parametrize("case", CASES)
def test_degenerate_evaluations_make_sound_reports(tmp_path, case):
    read = check(written(tmp_path, example(**CASES[case])))
    ids = {attrs["id"] for attrs in read.all("section")}
    assert ("reliability" in ids) == CASES[case].get("labels", True)
    assert ("tau" in ids) == CASES[case].get("temperatures", True)
    assert "anchors" not in ids
    assert "No record was given." in read.text
    assert "nan" not in read.text.lower().split()


def test_equal_scores_make_a_sound_report(tmp_path):
    sets = example().sets
    equal = result({name: detection(torch.ones(len(s)), torch.ones(30)) for name, s in sets.items()})
    check(written(tmp_path, Evaluation({"same": equal}, sets, "inside", 0), detector=msp_detector()))
    for value in (0.0, 1e-12, -3.0, 1e9, 1e17):  # bins have width even where scores are all but equal
        bins = figures.edges([np.array([value, np.nextafter(value, np.inf)]), np.full(3, value)])
        assert (np.diff(bins) > 0).all()
        assert bins[0] <= value <= bins[-1]


def test_errors_leave_no_file(tmp_path, monkeypatch):
    evaluation = example(resamples=0)
    unfitted = AMP(anchor(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))))
    for error, words, options in (
        (InputError, "at least one detector", {"evaluation": dataclasses.replace(evaluation, results={})}),
        (InputError, r"leads must name detectors .*; got 'nobody', 'none'", {"leads": ("first", "nobody", "none")}),
        (NotReadyError, "no anchors to show", {"detector": unfitted}),
        (NotReadyError, re.escape("pip install 'kedge[report]'"), {}),
    ):
        if not options:
            for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
                monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(error, match=words):
            write_report(tmp_path / "a.html", **{"evaluation": evaluation, "title": ""} | options)
    assert list(tmp_path.iterdir()) == []


def test_a_winner_leads_each_other_beyond_noise():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(4000, 1))  # noise that pairing removes
    drawn = shared + np.array([1.0, 0.0, -1.0]) + 0.3 * rng.normal(size=(4000, 3))
    assert winner([1, 0, -1], drawn, 1) == 0
    assert winner([1, 0, -1], drawn, -1) == 2
    alone = np.array([1.0, 0.0, -1.0]) + rng.normal(size=(4000, 3))
    assert winner([1, 0, -1], alone, 1) is None
    assert winner([1], drawn[:, :1], 1) is None


def marks(text):
    return len(re.findall(r'<td><strong class="best">', text))


def test_a_clearly_better_detector_is_marked_and_equal_or_few_are_not(tmp_path):
    evaluation = example(("good",), sizes=(80, 80), shifts=(3.0,), noise=0.0)
    random = {n: detection(torch.randn(len(s)), torch.randn(99)) for n, s in evaluation.sets.items()}
    results = {"bad": result(random, evaluation.sets["inside"].labels), **evaluation.results}
    unequal = dataclasses.replace(evaluation, results=results)
    best = best_beyond_noise(unequal)
    assert all(best.overall[metric] == "good" for metric in METRICS)
    assert all(best.by_set[ood, "auroc"] == "good" for ood in unequal.ood_names)
    text = written(tmp_path, unequal)
    assert marks(text) >= 5 + 2 + 2
    good, bad = (re.search(rf'<tr><th scope="row">{label}</th>(.*?)</tr>', text)[1] for label in ("good", "bad"))
    assert (marks(good) >= 5, marks(bad)) == (True, 0)
    assert "good has the highest mean AUROC" in text
    assert "a lead beyond noise" in text
    equal = dataclasses.replace(evaluation, results=dict.fromkeys(("one", "two"), evaluation.results["good"]))
    assert set(best_beyond_noise(equal).overall.values()) == {None}
    text = written(tmp_path, equal)
    assert marks(text) == 0
    assert "No value is marked as best" in text
    assert "one and two share the highest mean AUROC" in text
    few = example(sizes=(80, 5), noise=2.0)
    best = best_beyond_noise(few)
    assert (best.overall, best.by_set, best.enough) == ({}, {}, False)
    assert "too few images" in evaluation_finding(few, best)
    apart = dataclasses.replace(example(oods=("tiny (OpenOOD)", "near", "far")), apart=("tiny (OpenOOD)",))
    words = evaluation_finding(apart, best_beyond_noise(apart))
    assert "over 2 out-of-distribution (OOD) sets (tiny (OpenOOD) apart)" in words  # explained once, in no name


def test_the_difference_of_two_detectors_has_the_interval_of_the_paired_bootstrap():
    evaluation = example(("one", "two"), oods=("a", "b", "c"), sizes=(25, 22))
    apart = {label: dataclasses.replace(r, apart=("b",)) for label, r in evaluation.results.items()}
    evaluation = dataclasses.replace(evaluation, results=apart, apart=("b",))
    estimates = difference(evaluation, "one", "two", resamples=40, seed=3)
    results = evaluation.results.values()
    scores = [[r.detections[name].score.numpy() for name in evaluation.sets] for r in results]

    def gap(scores):  # of each OOD set
        one, two = ([ORACLES["fpr95"](inside, each) for each in outside] for inside, *outside in scores)
        return np.subtract(one, two)

    rng, gaps = np.random.default_rng(3), []
    for _ in range(40):
        rows = [rng.integers(len(s), size=len(s)) for s in evaluation.sets.values()]  # once, for both
        gaps.append(gap([[s[r] for s, r in zip(sets, rows, strict=True)] for sets in scores]))
    for name, drawn in (("b", [g[1] for g in gaps]), ("mean", [(g[0] + g[2]) / 2 for g in gaps])):
        assert [estimates[name]["fpr95"].low, estimates[name]["fpr95"].high] == pytest.approx(
            np.quantile(drawn, [0.025, 0.975])
        )
    assert estimates["mean"]["fpr95"].value == pytest.approx(gap(scores)[[0, 2]].mean())
    with pytest.raises(InputError, match="label must be one of 'one', 'two'; got 'three'"):
        difference(evaluation, "one", "three")


@pytest.mark.slow
def test_noise_is_rarely_marked():
    """Detectors that are equally good are marked in about one of twenty comparisons."""
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        scores = [[shift + rng.normal(size=100) for shift in (0, 1)] for _ in range(2)]
        drawn = redraw(scores, resamples=200, seed=seed)[:, :, 0, 0]
        values = [detection_metrics(*s)["auroc"].value for s in scores]
        wrong += winner(values, drawn, 1) is not None
    assert wrong <= 20


def test_the_promise_and_the_threshold_are_read_off_the_detections():
    calibrated = torch.randn(199).sort().values
    detections = {n: detection(torch.linspace(-4, 4, 400), calibrated, alpha=0.1) for n in ("inside", "near")}
    one = result(detections)
    assert guaranteed(one) == pytest.approx(20 / 200)
    true = calibration.threshold(calibrated, 0.1)
    assert flagging_threshold(one) == pytest.approx(true, abs=8 / 399)
    none = result({n: detection(torch.zeros(5), torch.zeros(30)) for n in ("inside", "near")})
    assert guaranteed(none) is None
    assert flagging_threshold(none) is None


def test_the_table_of_anchors_shows_the_predictions_of_the_network(tmp_path):
    evaluation, detector = example(("amp",), temperatures=False), amp_detector(k=4)
    text = written(tmp_path, evaluation, detector=detector)
    assert sum(attrs["alt"].startswith("Anchor ") for attrs in check(text).all("img")) == 4
    body = text[text.index('id="anchors"') :]
    row = re.search(r"<tr><th scope=\"row\">(?:(?!</tr>).)*lowest OOD score, (\w+)(.*?)</tr>", body)
    cells = re.findall(r"<td><span[^>]*>(?:≠ )?(\w+)</span><small>(\d+) %", row[2])
    scores = evaluation.results["amp"].detections[row[1]].score
    logits = detector.net.per_anchor_logits(evaluation.sets[row[1]].images[int(scores.argmin())][None] / 255)[:, 0]
    expected = (torch.cat([logits, logits.mean(dim=0)[None]]) / detector.calibration.temperature).softmax(dim=1)
    names = ("ant", "bee", "cow")
    assert cells == [(names[int(p.argmax())], f"{100 * float(p.max().detach()):.0f}") for p in expected]


def shown(image):
    source = data_address(image).partition("base64,")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))


def test_pictures_are_the_images():
    gray, color, five = (torch.randint(256, (channels, 5, 7), dtype=torch.uint8) for channels in (1, 3, 5))
    for image, expected in (
        (gray, gray[0]),
        (gray / 255, gray[0]),
        (color, color.permute(1, 2, 0)),
        (five, five.double().mean(dim=0).round()),
    ):
        assert (shown(image) == expected.numpy()).all()
    assert shown(torch.zeros(3, 300, 200, dtype=torch.uint8)).shape == (SIDE, SIDE * 2 // 3, 3)


def test_rounding_makes_figures_small_and_leaves_tick_labels_alone():
    values = np.linspace(0.0001, 0.0009, 50)
    svg = figures.histograms("h", values, values, figures.edges([values]), axis="score", label="A figure.")
    labels = [float(t) for t in re.findall(r"<text[^>]*>([\d.]+)</text>", svg)]
    assert len(set(labels)) == len(labels) >= 3
    assert np.allclose(np.diff(labels), labels[1] - labels[0])
    assert "font-family" not in svg
    assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<", "><", svg))
    assert len(svg) < 12_000


def test_each_bar_says_under_the_pointer_which_share_it_is():
    inside, outside = np.array([0.1, 0.2, 0.6, 0.7]), np.array([0.9, 0.95, 0.6, 3.0])
    edges = np.array([0.0, 0.5, 0.8, 1.0])
    svg = figures.histograms("h", inside, outside, edges, axis="score", label="A figure.", sides=("known", "<b>"))
    words = re.findall(r"<text[^>]*>([^<]*: [^<]*)</text>", svg)
    assert words == [
        "0 to 0.5: known 50 %, &lt;b&gt; 0 %",
        "0.5 to 0.8: known 50 %, &lt;b&gt; 25 %",
        "0.8 to 1: known 0 %, &lt;b&gt; 75 %",
    ]
    places = re.findall(r'<g class="hover"><rect x="([^"]*)" y="[^"]*" width="([^"]*)"', svg)
    left, width = np.array(places, float).T
    np.testing.assert_allclose(left[1:], (left + width)[:-1], atol=0.15)
    np.testing.assert_allclose(width / width.sum(), [0.5, 0.3, 0.2], atol=0.002)  # as wide as the bars


def test_the_page_opens_with_an_image_of_each_set_and_whether_its_verdict_is_right():
    evaluation = example(resamples=0)
    detections = evaluation.results["second"].detections
    shown = re.findall(
        r'alt="(\w+), image (\d+), (rightly|wrongly) (flagged|accepted)"', opening_pictures(evaluation, "second")
    )
    assert [name for name, *_ in shown[:4]] == ["inside", "inside", "near", "far"]
    assert int(shown[1][1]) == int(detections["inside"].score.argmax())
    lowest = min((float(detections[name].score.min()), name) for name in ("near", "far"))[1]
    assert shown[4][:2] == (lowest, str(int(detections[lowest].score.argmin())))
    for name, place, right, verdict in shown:
        flagged = bool(detections[name].is_ood[int(place)])
        assert verdict == ("flagged" if flagged else "accepted")
        assert right == ("rightly" if flagged == (name != "inside") else "wrongly")


def moved(evaluation, name, measured, count=30):
    """The evaluation with a shifted set, with the same measurements for each detector."""
    rng = torch.Generator().manual_seed(7)
    images = torch.randint(256, (count, 1, 6, 6), generator=rng, dtype=torch.uint8)
    results = {}
    for label, one in evaluation.results.items():
        outputs = detection(torch.randn(count, generator=rng), torch.randn(99, generator=rng))
        detections = {**one.detections, name: outputs}
        flagged = {**one.flagged, name: float(outputs.is_ood.double().mean())}
        shifted = {**one.shifted, name: measured}
        results[label] = dataclasses.replace(one, detections=detections, flagged=flagged, shifted=shifted)
    sets = {**evaluation.sets, name: ImageSet(images, torch.zeros(count, dtype=torch.int64), name)}
    names = (*evaluation.shifted_names, name)
    return dataclasses.replace(evaluation, results=results, sets=sets, shifted_names=names)


def known(evaluation, ood, name, scores):
    """The evaluation with known images in the source of an OOD set, to which every detector gives the same scores."""
    results = {}
    for label, one in evaluation.results.items():
        detections = {**one.detections, name: detection(scores, torch.randn(99))}
        inside = torch.cat([detections["inside"].score, scores])
        metrics = {**one.metrics, ood: detection_metrics(inside, detections[ood].score)}
        flagged = {**one.flagged, name: float(detections[name].is_ood.double().mean())}
        results[label] = dataclasses.replace(one, detections=detections, metrics=metrics, flagged=flagged)
    sets = {**evaluation.sets, name: ImageSet(torch.zeros(len(scores), 1, 6, 6, dtype=torch.uint8), name=name)}
    return dataclasses.replace(evaluation, results=results, sets=sets, known_in={ood: name})


def rows(text):
    """The rows of all tables in a piece of a page: words of the head, then of the cells."""
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", text)
    ]


def labels_of(text):
    """The text alternatives of the figures in a piece of a page."""
    return [attrs["aria-label"] for attrs in Page(text).all("svg") if "role" in attrs]


def test_curves_and_shifted_images_have_sections_only_where_there_are_some(tmp_path):
    evaluation = example(resamples=0)
    absent = Curve("Gone", "K", {"gone": {1: ("third", None)}})
    links = [attrs["href"] for attrs in check(written(tmp_path, evaluation, curves=[absent])).all("a")]
    assert not {"#curves", "#shifted"} & set(links)
    both = moved(evaluation, "turned", ShiftedResult(0.5, 0.75, 0.3))
    present = Curve("Here", "K", {"it": {1: ("first", None), 2: ("second", None)}})
    read = check(written(tmp_path, both, curves=[absent, present]))
    links = [attrs["href"] for attrs in read.all("a")]
    assert links[:5] == ["#summary", "#curves", "#sets", "#shifted", "#scores"]
    assert [attrs["id"] for attrs in read.all("section")] == [link[1:] for link in links]
    assert ("Here" in read.text, "Gone" in read.text) == (True, False)
    assert curve_section(evaluation, []) is curve_section(evaluation, [absent]) is None


def test_shifted_images_are_measured_in_percent(tmp_path):
    evaluation = moved(example(resamples=0), "turned", ShiftedResult(0.625, 0.9, 0.1234))
    evaluation = moved(evaluation, "blurred", ShiftedResult(0.25, None, 0.75), count=12)
    results = dict(evaluation.results)
    results["second"] = dataclasses.replace(results["second"], uses_outliers=True)
    page = written(tmp_path, dataclasses.replace(evaluation, results=results))
    text = re.search(r'<section id="shifted".*?</section>', page, re.DOTALL)[0]
    expected = []
    for name, before, after in (("turned", "62.5", ["90.0", "12.3"]), ("blurred", "25.0", ["\N{EN DASH}", "75.0"])):
        flagged = [f"{100 * r.flagged[name]:.1f}" for r in results.values()]
        expected.append(["Detector", "accuracy", "flagged", "accuracy of accepted", "AURC"])
        expected += [[d, before, f, *after] for d, f in zip(("first", "second *"), flagged, strict=True)]
    assert rows(text) == expected
    assert all(words in text for words in ("turned, 30 images, in percent.", "blurred, 12 images, in percent."))
    read = check(page)
    assert read.text.count("turned, 30 images") == 1
    assert "turned" not in re.search(r"Of 2 detectors .*?\.", read.text)[0]  # a shifted set is no OOD set


def test_a_curve_s_text_alternative_holds_its_numbers_and_its_axis_their_ticks():
    evaluation = example(("a", "b", "c"), resamples=0)
    curves = [
        Curve("Effect of K", "anchors", {"AMP": {10: ("b", None), 2.5: ("a", None)}, "other": {7: ("c", "near")}}),
        Curve("Strength", "severity", {"AMP": {1: ("a", "far"), 2: ("gone", "far")}}, metric="fpr95"),
        *(Curve("Any", "T", {"s": {1: ("a", "near"), 9: ("b", "near")}}, metric) for metric in METRICS),
    ]
    text = curve_section(evaluation, curves)

    def percent(label, metric, *oods):
        return f"{100 * np.mean([evaluation.results[label].metrics[ood][metric].value for ood in oods]):.1f} %"

    a, b = (percent(label, "auroc", "near", "far") for label in ("a", "b"))
    first, second, *others = labels_of(text)
    assert first == f"AUROC by anchors. AMP: {a} at 2.5, {b} at 10; other: {percent('c', 'auroc', 'near')} at 7."
    assert second == f"FPR95 by severity. AMP: {percent('a', 'fpr95', 'far')} at 1."
    for label, metric in zip(others, METRICS, strict=True):  # every metric, on a logarithmic axis
        assert f"{percent('a', metric, 'near')} at 1, {percent('b', metric, 'near')} at 9" in label
    captions = [re.sub(r"<[^>]*>", " ", c) for c in re.findall(r"<figcaption>(.*?)</figcaption>", text)]
    assert "mean over sets; higher is better" in captions[0]
    assert "FPR95; lower is better" in captions[1]
    assert captions[0].split()[-2:] == ["AMP", "other"]  # the legend
    ticks = set(re.findall(r"<text[^>]*>([^<]*)</text>", text))
    assert {"2.5", "7", "10", "1", "anchors", "severity", "AUROC, %", "FPR95, %"} <= ticks


def quantiles(scores):
    """Median and the ends of the middle 90 %, by hand, as text alternatives have them."""
    ordered, ends = sorted(scores.tolist()), []
    for share in (0.5, 0.05, 0.95):
        below, part = divmod(share * (len(ordered) - 1), 1)
        above = min(int(below) + 1, len(ordered) - 1)
        ends.append(ordered[int(below)] + part * (ordered[above] - ordered[int(below)]))
    return "median {:.3g}, 90 % from {:.3g} to {:.3g}".format(*ends)


def test_the_scores_of_every_lead_are_drawn_with_their_numbers(tmp_path):
    evaluation = example(("first", "second", "third"), resamples=0)
    text = charts.score_section(evaluation, ("third", "first"))
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["third", "first"]
    drawn = itertools.product(("third", "first"), ("near", "far"))
    for label, (lead, ood) in zip(labels_of(text), drawn, strict=True):
        one = evaluation.results[lead]
        assert f"inside: {quantiles(one.detections['inside'].score)};" in label
        assert f"{ood}: {quantiles(one.detections[ood].score)}." in label
        auroc = 100 * one.metrics[ood]["auroc"].value
        assert label.endswith(f"{100 * one.flagged[ood]:.1f} % flagged, AUROC {auroc:.1f} %.")
    alone = charts.score_section(evaluation, ("second",))
    assert "Scores of second" in alone
    assert "<h3>" not in alone
    assert "Scores of first" in written(tmp_path, evaluation)  # leads unless others do


def cards(text):
    """(Set, number, words) of every card."""
    pattern = r'<figure class="set[^>]*>.*?<img [^>]*alt="Image (\d+) of (\w+),.*?<figcaption>(.*?)</figcaption>'
    found = re.findall(pattern, text, re.DOTALL)
    return [(name, int(number), words.replace("<br>", "\n").strip()) for number, name, words in found]


def test_known_images_are_on_the_in_distribution_side_of_their_set(monkeypatch):
    scores = torch.linspace(50, 60, 25)  # far beyond all others
    evaluation = known(example(resamples=0), "near", "near, known", scores)
    near, far = labels_of(charts.score_section(evaluation, ("first",)))
    detections = evaluation.results["first"].detections
    inside = torch.cat([detections["inside"].score, scores]).double()
    assert quantiles(inside) in near
    assert quantiles(inside[:60]) in far
    by_set, by_detector = labels_of(charts.roc_section(evaluation, ("first",)))
    assert f"near {100 * ORACLES['auroc'](inside.tolist(), detections['near'].score.tolist()):.1f} %;" in by_set
    assert by_detector.startswith("ROC curves on near, one per detector.")  # the hardest, because of them
    drawn = []
    monkeypatch.setattr(figures, "roc", lambda name, pairs, names, *, label: drawn.append(pairs) or tag("svg"))
    charts.roc_section(evaluation, ("first",))
    sizes = [[tuple(map(len, pair)) for pair in pairs] for pairs in drawn]
    assert sizes == [[(60 + 25, 40), (60, 40)], [(60 + 25, 40)] * 2]


MANY = tuple(f"detector {c}" for c in "abcdefgh")


def many(n=8):
    """Detectors that are the worse the later they come."""
    evaluation = example(MANY[:n], resamples=0)
    rng = torch.Generator().manual_seed(3)
    results = {}
    for number, (label, one) in enumerate(evaluation.results.items()):
        noisy = {
            name: dataclasses.replace(d, score=d.score + number * torch.randn(len(d.score), generator=rng))
            for name, d in one.detections.items()
        }
        results[label] = result(noisy, evaluation.sets["inside"].labels)
    return dataclasses.replace(evaluation, results=results)


def test_of_many_detectors_six_have_their_roc_curve_drawn_leads_among_them():
    evaluation, leads = many(), (MANY[7], MANY[6])
    text = charts.roc_section(evaluation, leads)
    by_set, by_detector = labels_of(text)
    area = {d: {ood: m["auroc"].value for ood, m in r.metrics.items()} for d, r in evaluation.results.items()}
    hardest = min(("near", "far"), key=lambda ood: sum(by[ood] for by in area.values()))
    drawn = (*leads, *sorted(MANY[:6], key=lambda d: -area[d][hardest])[:4])
    shown = dict(re.findall(r"(detector \w) ([\d.]+) %", by_detector))
    assert shown == {d: f"{100 * area[d][hardest]:.1f}" for d in drawn}
    assert f"The best 6 of 8 detectors, leads included, on the hardest set, {hardest}" in text
    assert f"ROC curves of {MANY[7]}, one per OOD set." in by_set
    assert all(f"{ood} {100 * area[MANY[7]][ood]:.1f} %" in by_set for ood in ("near", "far"))
    text = charts.roc_section(many(6), (MANY[0],))  # few enough for all
    assert "Each detector on the hardest set" in text
    assert "The best" not in text
    assert all(name in labels_of(text)[1] for name in MANY[:6])
    assert len(labels_of(charts.roc_section(many(1), (MANY[0],)))) == 1  # nothing to compare


def test_of_many_classifiers_six_have_their_reliability_drawn_leads_first():
    evaluation = many()
    text = charts.reliability_section(evaluation, (MANY[7],))
    drawn = labels_of(text)
    assert [re.search(r"detector \w", label)[0] for label in drawn] == [MANY[7], *MANY[:5]]
    assert "Shown are 6 of 8 classifiers, leads first." in text
    labels = evaluation.sets["inside"].labels
    for label in drawn:
        inside = evaluation.results[re.search(r"detector \w", label)[0]].detections["inside"]
        confidence = np.mean(inside.probability.max(dim=1).values.tolist())
        right = np.mean((inside.label == labels).tolist())
        assert f"mean confidence {100 * confidence:.1f} %, accuracy {100 * right:.1f} %" in label
        assert f"ECE {100 * ece(inside.probability, labels):.1f} %" in label
    assert "Shown are" not in charts.reliability_section(many(6), (MANY[0],))
    probability = evaluation.results[MANY[0]].detections["inside"].probability
    for r in evaluation.results.values():
        r.detections["inside"] = dataclasses.replace(r.detections["inside"], probability=probability)
    text = charts.reliability_section(evaluation, (MANY[0],))  # detectors of one classifier share its diagram
    (label,) = labels_of(text)
    assert ", ".join(MANY) in label
    assert "Shown are" not in text


def test_cards_show_the_mistakes_of_the_lead_with_the_votes_of_the_anchors(tmp_path):
    evaluation, detector = example(("amp", "second"), resamples=0, noise=3.0), amp_detector(k=7)
    for lead in ("amp", "second"):
        scores = {name: d.score.tolist() for name, d in evaluation.results[lead].detections.items()}
        expected = [("inside", i) for i in np.argsort(scores["inside"])[::-1][:12]]
        for ood in ("near", "far"):
            expected += [(ood, i) for i in np.argsort(scores[ood])[:4]]
        assert [card[:2] for card in cards(image_section(evaluation, lead))] == expected
    temperature = detector.calibration.temperature
    assert abs(temperature - 1) > 0.1
    shown, divided = cards(image_section(evaluation, "amp", detector)), 0
    assert len(shown) == 12 + 4 + 4
    for name, number, words in shown:
        (line,) = re.findall(r"anchors: (.*)", words)
        votes = [(int(n), c, int(p)) for n, c, p in re.findall(r"(\d+) (\w+) \((\d+) %\)", line)]
        assert sum(n for n, _, _ in votes) == 7
        image = evaluation.sets[name].images[number][None] / 255
        expected = {}
        for logits in detector.net.eval().per_anchor_logits(image)[:, 0].tolist():
            place = logits.index(max(logits))
            share = 1 / sum(np.exp((other - logits[place]) / temperature) for other in logits)
            expected.setdefault(("ant", "bee", "cow")[place], []).append(100 * share)
        assert {c: n for n, c, _ in votes} == {c: len(shares) for c, shares in expected.items()}
        assert all(abs(p - np.mean(expected[c])) < 0.51 for _, c, p in votes)
        assert [n for n, _, _ in votes] == sorted((n for n, _, _ in votes), reverse=True)
        divided += len(votes) > 1
    assert 0 < divided < len(shown)  # on some images the anchors agree, on some they do not
    drawing = amp_detector(variant="authors", k=3, pool=20)  # each image draws its own
    text = written(tmp_path, example(("amp",), ("only",), **BARE), detector=drawing)
    assert "Each image draws 3 of 20, of which 12 are shown" in check(text).text
    votes = [words.split("anchors: ")[1] for _, _, words in cards(text) if "anchors: " in words]
    assert len(votes) == 12 + 4
    assert all(sum(map(int, re.findall(r"(\d+) \w+ \(", line))) == 3 for line in votes)


def test_the_nearest_training_images_stand_beside_each_error(tmp_path):
    evaluation = example(resamples=0)
    rng = torch.Generator().manual_seed(5)
    pixels = torch.randint(256, (50, 1, 6, 6), generator=rng, dtype=torch.uint8)
    train_set = ImageSet(pixels, torch.arange(50) % 3, "train", ("ant", "bee", "cow"))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))  # its last features are the pixels
    found = cards(image_section(evaluation, "first", neighbours=Neighbours(plain, train_set)))
    rows = (pixels / 255).flatten(1).numpy()
    for name, number, words in found:
        image = (evaluation.sets[name].images[number] / 255).flatten().numpy()
        angles = [float(row @ image / np.sqrt(row @ row) / np.sqrt(image @ image)) for row in rows]
        nearest = np.argsort(angles)[::-1][:3]
        assert words.endswith(", ".join(("ant", "bee", "cow")[place % 3] for place in nearest))
        sources = re.findall(r'src="([^"]*)"', words)
        assert sources == [data_address(pixels[place]) for place in nearest]
    kept = Neighbours(plain, train_set, features=extract(plain, train_set))
    assert kept.nearest(train_set, 1)[:, 0].tolist() == list(range(50))
    page = check(written(tmp_path, evaluation, neighbours=kept, title=None))
    assert "first, second on inside against near, far" in page.text
    choices = [attrs["id"] for attrs in page.all("input") if attrs["type"] == "radio"]
    assert choices == ["every-set", "set-0", "set-1", "set-2", "every-verdict", "only-flagged", "only-accepted"]
    many = Neighbours(plain, ImageSet(pixels.repeat(50, 1, 1, 1)))
    assert len(many.images) == len(many.bank) == KEPT


def test_a_document_links_to_its_sections_and_escapes_text():
    heads, rows = ["<n>", tag("th", "m", scope="col")], [(EVIL, "3")]
    inner = (figure(tag("img", src="#s", alt=EVIL), EVIL, tag("br"), "b"), table(EVIL, heads, rows, label="t"))
    content = section("s", EVIL, *inner, figures.legend(["a & b"] * 8))
    parts = [("one", "First <b>", tag("p", "1", id="one")), ("two", "Second", None), ("s", "3rd", content)]
    text = document(EVIL, "It is 5 % of <all>.", ["Para & graph", "10 % more"], parts)
    read = check(text)
    assert [attrs["href"] for attrs in read.all("a")] == ["#one", "#s"]
    assert ("Second" in read.text, "First <b>" in read.text, "a & b" in read.text) == (False, True, True)
    assert read.text.count(EVIL) == 2 + 4  # in the window's title and in the heading
    for words in ("It is 5\N{NO-BREAK SPACE}% of <all>.", "10\N{NO-BREAK SPACE}% more"):
        assert words in "".join(read.words)
    assert len(read.all("th")) == 3
