"""The reports in a real browser: nothing fails, nothing is fetched, nothing is cut off, everything is described."""

import pytest
import torch
from PIL import Image

import kedge
from helpers import run_cli
from kedge import AMP, MSP, ImageSet, anchor, evaluate
from kedge.detectors.neighbours import Neighbours
from kedge.evaluation.report import write_report
from kedge.evaluation.result import Curve
from kedge.models import build
from kedge.scoring import score_files
from kedge.studies import run_ntk

pytestmark = pytest.mark.e2e


def greys(n, name, level, labels=False):
    rng = torch.Generator().manual_seed(level)
    images = (torch.randn(n, 3, 8, 8, generator=rng) * 30 + level).clamp(0, 255).to(torch.uint8)
    return ImageSet(images, torch.arange(n) % 3 if labels else None, name, ("ant", "bee", "cow"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    train, held_out, test = (greys(60, name, 90 + i, True) for i, name in enumerate(("train", "held out", "test")))
    torch.manual_seed(0)
    net = build("compact", width=4, classes=3)
    amp, msp = AMP(anchor(net, seed=0)), MSP(net)
    for detector in (amp, msp):
        detector.fit(train).calibrate(held_out)
    shifted = greys(60, "brighter <&> shifted", 130, True)
    oods = [
        greys(40, "far away, with a name that is long enough to need a line of its own", 200),
        greys(40, "near", 110),
    ]
    evaluation = evaluate({"AMP": amp, "MSP": msp}, test, oods, shifted=[shifted], controls=True, resamples=20)
    curve = Curve("Rows", "row", {"near": {1: ("AMP", "near"), 2: ("MSP", "near")}})
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        evaluation,
        title="Greys",
        detector=amp,
        neighbours=Neighbours(amp.net, train),
        curves=[curve],
        record={"seed": 0, "config": {"a": [1, 2]}},
    )


@pytest.fixture(scope="module")
def ntk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ntk")
    run_ntk(folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def drift(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drift")
    images = torch.cat([greys(300, "before", 90).images, greys(200, "since", 200).images]).permute(0, 2, 3, 1).numpy()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:03}.png")
    net = kedge.anchor(build("compact", width=4, classes=3), seed=0)
    kedge.KNN(net).fit(greys(60, "train", 91)).calibrate(greys(60, "held out", 92)).save(folder / "knn.kedge")
    score_files(folder / "knn.kedge", [folder / "*.png"], folder / "rows.csv")
    assert run_cli("watch", folder / "knn.kedge", folder / "rows.csv").exit_code == 0
    return folder / "rows-drift.html"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("which", ["report", "ntk", "drift"])
def test_a_report_opens_without_errors_or_requests_at_any_width(which, width, dark, visit, request):
    path = request.getfixturevalue(which)
    seen = visit(path.as_uri(), width=width, dark=dark)
    assert seen.errors == []
    outside = [url for url in seen.requests if not url.startswith("data:")]
    assert outside == [path.as_uri()]
    page = seen.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll within themselves
    assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth || !i.alt).length") == 0
    pictures = page.evaluate("[...document.querySelectorAll('svg[role=img]')].map(s => s.getAttribute('aria-label'))")
    assert len(pictures) > 3
    assert all(pictures)
    for link in page.query_selector_all("nav a"):
        assert page.query_selector(link.get_attribute("href")) is not None


def test_its_colours_follow_the_reader(report, visit):
    def background(dark):
        return visit(report.as_uri(), dark=dark).page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background(True) != background(False)


def test_images_are_filtered_and_enlarged_without_scripts(report, visit):
    page = visit(report.as_uri(), scripts=False).page
    shown = page.locator("#images .gallery figure >> visible=true")
    before = shown.count()
    page.check("#set-2")
    assert shown.count() == 4
    page.check("#only-flagged")
    flagged = shown.count()
    page.check("#only-accepted")
    assert flagged + shown.count() == 4
    page.check("#every-set")
    page.check("#every-verdict")
    assert shown.count() == before
    page.locator("#scores .hover rect").nth(2).hover()
    words = page.locator("#scores .hover text >> visible=true").all_text_contents()
    assert len(words) == 1
    assert "ID" in words[0]
    picture = shown.locator("img").first
    small = picture.bounding_box()["width"]
    picture.click()
    assert picture.bounding_box()["width"] > 4 * small
    picture.click()
    assert picture.bounding_box()["width"] == small


def test_an_enlarged_image_shows_its_words_and_obeys_the_keyboard(report, visit):
    page = visit(report.as_uri()).page
    enlarged = page.locator("#images .gallery > figure:has(> .zoom > input:checked)")
    page.locator("#images .gallery > figure > .zoom").nth(1).click()
    assert "score" in enlarged.locator("figcaption").inner_text()
    box = enlarged.locator("figcaption").bounding_box()
    assert box["y"] + box["height"] == 900  # at the foot of the window, in view
    first = enlarged.locator("> .zoom > img").get_attribute("alt")
    page.keyboard.press("ArrowRight")
    second = enlarged.locator("> .zoom > img").get_attribute("alt")
    assert second != first
    page.keyboard.press("ArrowLeft")
    assert enlarged.locator("> .zoom > img").get_attribute("alt") == first
    page.keyboard.press("Escape")
    assert enlarged.count() == 0
