"""The report: a page that is sound, safe, complete and honest, on a made-up evaluation."""

import base64
import functools
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

from kedge import AMP, Detection, ImageSet, anchor, calibration
from kedge.detectors import Cost
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import METRICS, Evaluation, Result
from kedge.evaluation.paired import best_beyond_noise, redraw, winner
from kedge.metrics import accuracy, aurc, detection_metrics, ece
from kedge.report import figures, page, write_report
from kedge.report.charts import threshold
from kedge.report.gallery import SIDE, picture
from kedge.report.tables import finding, promised

EVIL = "<script>alert(1)</script>"
VOID = {"br", "img", "meta"}


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    """Pages need not have the last digit; whether marks are right is tested on `best_beyond_noise` itself."""
    monkeypatch.setattr(page, "best_beyond_noise", functools.partial(best_beyond_noise, resamples=60))


def detection(scores, calibrated, *, tpr=0.95, classes=3, temperatures=True, seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(scores), classes, generator=rng)
    return Detection(
        label=logits.argmax(dim=1),
        logits=logits,
        probability=logits.softmax(dim=1),
        temperature=torch.rand(len(scores), generator=rng) if temperatures else None,
        score=scores,
        p_value=calibration.p_values(calibrated, scores),
        is_ood=calibration.is_ood(calibrated, scores, tpr),
    )


def made(
    detectors=("first", "second"),
    oods=("near", "far"),
    *,
    sizes=(60, 40),
    shifts=(1.0, 3.0),
    labels=True,
    temperatures=True,
    resamples=20,
    shape=(1, 6, 6),
    classes=("ant", "bee", "cow"),
    noise=0.2,
    tpr=0.95,
):
    """An evaluation of random scores: each detector sees the images' own scores through noise of its own."""
    rng = torch.Generator().manual_seed(0)
    names = ("inside", *oods)
    counts = (sizes[0], *(sizes[1] for _ in oods))
    true = torch.randint(3, (sizes[0],), generator=rng) if labels else None
    sets = {}
    for name, count in zip(names, counts, strict=True):
        images = torch.randint(256, (count, *shape), generator=rng, dtype=torch.uint8)
        inside = name == "inside"
        sets[name] = ImageSet(images, true if inside else None, name, classes if inside else ())
    steps = (0.0, *itertools.islice(itertools.cycle(shifts), len(oods)))
    own = {n: s + torch.randn(c, generator=rng) for n, c, s in zip(names, counts, steps, strict=True)}
    results = {}
    for number, name in enumerate(detectors):
        calibrated = torch.randn(99, generator=rng).sort().values
        said = {}
        for place, (s, scores) in enumerate(own.items()):
            seen = scores + noise * torch.randn(len(scores), generator=rng)
            said[s] = detection(seen, calibrated, temperatures=temperatures, seed=10 * number + place, tpr=tpr)
        results[name] = result(said, true, resamples)
    return Evaluation(results, sets, "inside", resamples)


def result(said, true=None, resamples=0):
    inside = said["inside"]
    return Result(
        metrics={
            s: detection_metrics(inside.score, d.score, resamples=resamples) for s, d in said.items() if s != "inside"
        },
        accuracy=None if true is None else accuracy(inside.label, true),
        ece=None if true is None else ece(inside.probability, true),
        aurc=None if true is None else aurc(inside.score, inside.label == true),
        flagged={s: float(d.is_ood.double().mean()) for s, d in said.items()},
        milliseconds=0.5,
        cost=Cost(forward=1),
        uses_outliers=False,
        detections=said,
    )


def amp_detector(**options):
    images = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), init="fresh", seed=0)
    return AMP(net, **options).fit(images).calibrate(torch.rand(60, 1, 6, 6))


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
        else:
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
    assert not page.all("script", "link", "iframe", "object", "embed", "base")
    for _, attrs in page.tags:
        for name, value in attrs.items():
            assert not name.startswith("on")
            assert "://" not in (value or "") or name in ("alt", "aria-label")
            if name in ("src", "href"):
                assert value.startswith(("#", "data:image/png;base64,"))
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
    path = write_report(tmp_path / "report.html", evaluation, **{"title": "A title"} | options)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_whole_report_is_sound_and_shows_everything(tmp_path):
    record = {"command": "kedge demo", "seed": 3, "versions": {"kedge": "0.1"}, "config": {"deep": {"er": [1, 2]}}}
    evaluation = made()
    text = written(tmp_path, evaluation, detector=amp_detector(), record=record, intro="One.\n\nTwo.")
    read = check(text)
    headings = [f"{h}-heading" for h in ("summary", "sets", "scores", "roc", "temperature", "reliability", "images")]
    headings += ["anchors-heading", "reading-heading", "record-heading"]
    assert [attrs["id"] for attrs in read.all("h2")] == headings
    drawn = [attrs for attrs in read.all("svg") if "role" in attrs]
    assert len(drawn) == 2 + 2 + 2 + 2  # scores, ROC, temperatures, reliability of two networks
    for words in ("One.", "Two.", "kedge demo", "kedge: 0.1", "ant", "first", "near", "A title"):
        assert words in read.text
    for metric in ("AUROC", "FPR95"):
        estimate = evaluation.results["second"].metrics["near"][metric.lower()]
        assert f"{100 * estimate.value:.1f} {100 * estimate.low:.1f} to {100 * estimate.high:.1f}" in read.text
    assert evaluation.sets["far"].checksum in read.text
    assert finding(evaluation, best_beyond_noise(evaluation)).replace("\N{NO-BREAK SPACE}", " ") in read.text


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    import matplotlib as mpl

    evaluation, detector = made(), amp_detector()
    first = written(tmp_path, evaluation, detector=detector, record={"a": 1})
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "path", "axes.grid": True}):
        assert written(tmp_path, evaluation, detector=detector, record={"a": 1}) == first
    assert mpl.rcParams["svg.hashsalt"] is None


def test_text_from_data_is_escaped_wherever_it_enters(tmp_path):
    evaluation = made((EVIL, 'a"b&c'), (EVIL, "$x_1$ \N{OCTOPUS} 'q'"), classes=(EVIL, "</td>", "&lt;"))
    record = {EVIL: EVIL, "nested": {EVIL: [EVIL, {"k": EVIL}]}, "list": [EVIL]}
    read = check(written(tmp_path, evaluation, title=EVIL, intro=EVIL, record=record))
    assert read.text.count(EVIL) > 20
    assert 'a"b&c' in read.text
    assert "$x_1$ \N{OCTOPUS} 'q'" in read.text
    assert "&lt;" in read.text


PLAIN = {"labels": False, "temperatures": False, "resamples": 0}
CASES = {
    "no labels, no intervals": {"labels": False, "resamples": 0},
    "no temperatures, colour, one OOD set": {"temperatures": False, "shape": (3, 6, 9), "oods": ("only",)},
    "one of each": {"detectors": ("only",), "oods": ("one",)} | PLAIN,
    "one image each, two channels": {"sizes": (1, 1), "shape": (2, 6, 6), "oods": ("only",)},
    "few images, no class names": {"sizes": (5, 3), "classes": (), "detectors": ("only",)},
    "many sets": {"oods": tuple(f"set {i}" for i in range(8)), "detectors": ("only",)} | PLAIN,
    "nothing flagged": {"tpr": 0.999, "oods": ("only",)} | PLAIN,
    "much flagged": {"tpr": 0.01, "oods": ("only",)} | PLAIN,
}


@pytest.mark.parametrize("case", CASES)
def test_degenerate_evaluations_make_sound_reports(tmp_path, case):
    evaluation = made(**CASES[case])
    read = check(written(tmp_path, evaluation))
    ids = {attrs["id"] for attrs in read.all("section")}
    assert ("reliability" in ids) == CASES[case].get("labels", True)
    assert ("temperature" in ids) == CASES[case].get("temperatures", True)
    assert "anchors" not in ids
    assert "No record was given." in read.text
    assert "nan" not in read.text.lower().split()


def test_equal_scores_everywhere_make_a_sound_report(tmp_path):
    evaluation = made()
    said = {name: detection(torch.ones(len(s)), torch.ones(30)) for name, s in evaluation.sets.items()}
    check(written(tmp_path, Evaluation({"same": result(said)}, evaluation.sets, "inside", 0)))


def test_what_it_cannot_show_is_an_error(tmp_path):
    evaluation = made(resamples=0)
    with pytest.raises(InputError, match="at least one detector"):
        write_report(tmp_path / "a.html", Evaluation({}, evaluation.sets, "inside", 0), title="")
    with pytest.raises(InputError, match=r"must be an AMP detector, .* got str"):
        write_report(tmp_path / "a.html", evaluation, title="", detector="amp")
    bare = AMP(anchor(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))))
    with pytest.raises(NotReadyError, match="no anchors to show"):
        write_report(tmp_path / "a.html", evaluation, title="", detector=bare)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotReadyError, match=re.escape("pip install 'kedge[report]'")):
        write_report(tmp_path / "a.html", made(resamples=0), title="")
    assert list(tmp_path.iterdir()) == []


# --- honest marks -----------------------------------------------------------------------------------------------------


def naive(metric, inside, outside):
    """The metric by its definition, in loops."""
    if metric == "auroc":
        return np.mean([(o > i) + (o == i) / 2 for o in outside for i in inside])
    if metric == "fpr95":
        t = min(t for t in inside if np.mean([i <= t for i in inside]) >= 0.95)
        return np.mean([o <= t for o in outside])
    cuts = [-np.inf, *inside, *outside]
    return max((np.mean([i <= t for i in inside]) + np.mean([o > t for o in outside])) / 2 for t in cuts)


def test_the_paired_bootstrap_is_that_of_the_definition():
    rng = np.random.default_rng(1)
    scores = [[rng.integers(0, 9, n).astype(float) for n in (12, 7, 9)] for _ in range(3)]
    drawn = redraw(scores, resamples=6, seed=4)
    assert drawn.shape == (6, 3, 2, len(METRICS))
    rng = np.random.default_rng(4)
    for r in range(6):
        rows = [rng.integers(n, size=n) for n in (12, 7, 9)]  # once, for all detectors
        for d, j, metric in itertools.product(range(3), range(2), ("auroc", "fpr95", "dtacc")):
            inside = [scores[d][0][i] for i in rows[0]]
            outside = [scores[d][j + 1][i] for i in rows[j + 1]]
            assert drawn[r, d, j, METRICS.index(metric)] == pytest.approx(naive(metric, inside, outside))


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


def test_equal_detectors_are_not_marked(tmp_path):
    evaluation = made(("one",))
    twins = Evaluation(dict.fromkeys(("one", "two"), evaluation.results["one"]), evaluation.sets, "inside", 20)
    assert set(best_beyond_noise(twins).overall.values()) == {None}
    text = written(tmp_path, twins)
    assert marks(text) == 0
    assert "No value is marked as best" in text
    assert "one and two share the highest mean AUROC" in text


def test_a_clearly_better_detector_is_marked(tmp_path):
    evaluation = made(("good", "bad"), sizes=(80, 80), shifts=(3.0,), noise=0.0)
    said = {n: detection(torch.randn(len(s)), torch.randn(99)) for n, s in evaluation.sets.items()}
    results = {"bad": result(said, evaluation.sets["inside"].labels), "good": evaluation.results["good"]}
    unequal = Evaluation(results, evaluation.sets, "inside", 20)
    best = best_beyond_noise(unequal)
    assert all(best.overall[metric] == "good" for metric in METRICS)
    assert all(best.by_set[ood, "auroc"] == "good" for ood in unequal.ood_names)
    text = written(tmp_path, unequal)
    assert marks(text) >= 5 + 2 + 2
    row = re.search(r'<tr><th scope="row">good</th>(.*?)</tr>', text)[1]
    assert marks(row) >= 5
    assert marks(re.search(r'<tr><th scope="row">bad</th>(.*?)</tr>', text)[1]) == 0
    assert "good has the highest mean AUROC" in text
    assert "a lead beyond noise" in text


def test_with_few_images_nothing_is_marked():
    evaluation = made(sizes=(80, 5), noise=2.0)
    best = best_beyond_noise(evaluation)
    assert (best.overall, best.by_set, best.enough) == ({}, {}, False)
    assert "too few images to tell" in finding(evaluation, best)


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


# --- what the numbers and pictures say --------------------------------------------------------------------------------


def test_the_promise_and_the_threshold_are_read_off_the_detections():
    calibrated = torch.randn(199).sort().values
    said = {n: detection(torch.linspace(-4, 4, 400), calibrated, tpr=0.9) for n in ("inside", "near")}
    one = result(said)
    assert promised(one) == pytest.approx(20 / 200)
    true = calibration.threshold(calibrated, 0.9)
    assert threshold(one) == pytest.approx(true, abs=8 / 399)
    none = result({n: detection(torch.zeros(5), torch.zeros(30)) for n in ("inside", "near")})
    assert promised(none) is None
    assert threshold(none) is None


def test_anchors_predict_what_the_network_says(tmp_path):
    evaluation, detector = made(("amp",), temperatures=False), amp_detector(k=4)
    text = written(tmp_path, evaluation, detector=detector)
    assert sum(attrs["alt"].startswith("Anchor ") for attrs in check(text).all("img")) == 4
    body = text[text.index('id="anchors"') :]
    row = re.search(r"<tr><th scope=\"row\">(?:(?!</tr>).)*lowest OOD score, (\w+)(.*?)</tr>", body)
    shown = re.findall(r"<td><span[^>]*>(?:≠ )?(\w+)</span><small>(\d+) %", row[2])
    said = evaluation.results["amp"].detections[row[1]]
    image = evaluation.sets[row[1]].images[int(said.score.argmin())][None] / 255
    hypotheses = detector.net.hypotheses(image)[:, 0]
    expected = (torch.cat([hypotheses, hypotheses.mean(dim=0)[None]]) / detector.calibration.temperature).softmax(dim=1)
    names = ("ant", "bee", "cow")
    assert shown == [(names[int(p.argmax())], f"{100 * float(p.max().detach()):.0f}") for p in expected]


def test_anchors_of_each_image_are_shown_as_a_pool(tmp_path):
    detector = amp_detector(variant="authors", k=3, pool=20)
    read = check(written(tmp_path, made(("amp",), ("only",), **PLAIN), detector=detector))
    assert sum(attrs["alt"].startswith("Anchor ") for attrs in read.all("img")) == 12
    assert "Each image draws 3 of 20, of which 12 are shown" in read.text


def shown(image):
    source = re.search(r'base64,([^"]*)', picture(image, "an image"))[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))


def test_pictures_are_the_images():
    grey = torch.randint(256, (1, 5, 7), dtype=torch.uint8)
    assert (shown(grey) == grey[0].numpy()).all()
    assert (shown(grey / 255) == grey[0].numpy()).all()
    colour = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    assert (shown(colour) == colour.permute(1, 2, 0).numpy()).all()
    five = torch.randint(256, (5, 4, 4), dtype=torch.uint8)
    assert (shown(five) == five.double().mean(dim=0).round().numpy()).all()
    assert shown(torch.zeros(3, 300, 200, dtype=torch.uint8)).shape == (SIDE, SIDE * 2 // 3, 3)


@pytest.mark.parametrize("value", [0.0, 1e-12, -3.0, 1e9, 1e17])
def test_bins_have_width_even_where_scores_are_all_but_equal(value):
    bins = figures.edges([np.array([value, np.nextafter(value, np.inf)]), np.full(3, value)])
    assert (np.diff(bins) > 0).all()
    assert bins[0] <= value <= bins[-1]


def test_rounding_makes_figures_small_and_leaves_tick_labels_alone():
    values = np.linspace(0.0001, 0.0009, 50)
    svg = figures.histograms("h", values, values, figures.edges([values]), axis="score", label="A figure.")
    labels = [float(t) for t in re.findall(r"<text[^>]*>([\d.]+)</text>", svg)]
    assert len(set(labels)) == len(labels) >= 3
    assert np.allclose(np.diff(labels), labels[1] - labels[0])
    assert "font-family" not in svg
    assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<", "><", svg))
    assert len(svg) < 12_000
