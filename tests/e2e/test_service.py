"""The service's page in a real browser: by mouse, by keyboard, on a phone, in the dark."""

import csv
import os

import pytest
import torch
from PIL import Image

import kedge
from helpers import service_process
from kedge.models import build

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    home = tmp_path_factory.mktemp("service")
    torch.manual_seed(0)
    images = torch.randint(0, 90, (120, 3, 16, 16), dtype=torch.uint8)
    labels = torch.arange(120) % 3
    images[torch.arange(120), labels] += 120
    train = kedge.ImageSet(images[:80], labels[:80], classes=("red", "green", "blue"))
    held_out = kedge.ImageSet(images[80:], labels[80:])
    net = kedge.anchor(build("compact", width=8, classes=3))
    kedge.train(net, train, kedge.training.Recipe(epochs=6, batch=16, lr=0.05, crop=1))
    for part, images in (("train", train), ("samples", held_out)):
        for i, (image, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
            folder = home / part / train.classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    options = ["--train", f"folder:{home / 'train'}", "--samples", f"folder:{home / 'samples'}"]
    with service_process(kedge.AMP(net).fit(train).calibrate(held_out), home, *options) as (_, port, _):
        yield f"http://127.0.0.1:{port}/"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_an_image_is_tried_and_explained(address, visit, width, dark, tmp_path):
    seen = visit(address, width=width, dark=dark)
    page = seen.page
    page.wait_for_selector("#examples button")
    assert page.inner_text("#about") == "It knows red, green, blue."
    page.click("#examples button >> nth=0")
    page.wait_for_selector("#result:not([hidden])")
    assert page.inner_text("#verdict")
    page.wait_for_function("document.getElementById('verdict').getBoundingClientRect().bottom <= innerHeight")
    assert page.inner_text("#prediction").endswith("%).")
    assert page.locator("#classes li").count() == 3
    assert set(page.locator("#nearest li").all_inner_texts()) <= {"red", "green", "blue"}
    assert page.locator("#nearest img").count() == 4
    page.click("#why summary")
    assert page.locator("#by-anchor li").count() == 5
    assert "threshold" in page.get_attribute("#plot", "aria-label")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    Image.new("RGB", (40, 30), "white").save(tmp_path / "white.png")
    page.set_input_files("#file", str(tmp_path / "white.png"))
    page.locator("#recent li").nth(1).wait_for()
    assert page.inner_text("#title") == "white.png"
    assert page.get_attribute("#photo", "src").startswith("blob:")
    page.click("#recent li >> nth=1 >> button")
    assert page.inner_text("#title") == "samples: blue"
    page.click("footer summary")
    assert page.inner_text("#curl") == f"curl -F images=@photo.jpg {address}v1/score"
    assert seen.errors == []
    inside = (address, "data:", "blob:")
    assert [url for url in seen.requests if not url.startswith(inside)] == []
    if os.environ.get("KEDGE_SCREENSHOTS"):
        page.screenshot(path=f"{os.environ['KEDGE_SCREENSHOTS']}/service-{width}.png", full_page=True)


def test_more_images_are_flagged_at_a_larger_alpha_and_the_detector_s_own_verdicts_come_back(address, visit):
    page = visit(address).page
    page.wait_for_selector("#examples button")
    images = page.locator("#examples button").count()
    page.click("#all")
    page.locator("#recent li").nth(images - 1).wait_for()
    assert page.inner_text("#share") == "5 %"
    verdicts, flagged = page.locator("#recent b").all_inner_texts(), []
    page.focus("#alpha")
    for _ in range(5):
        flagged.append(page.locator("#recent .out").count())
        assert page.inner_text("#tally").startswith(f"{flagged[-1]} of {images} images are flagged.")
        page.keyboard.press("ArrowRight")
    assert flagged == sorted(flagged)
    assert flagged[-1] > flagged[0] == verdicts.count("flagged")
    assert page.locator("#recent b", has_text="changed").count() == flagged[-1] - flagged[0]
    page.locator("#recent button", has_text="changed").first.click()
    assert "Do not trust the prediction" in page.inner_text("#verdict")
    page.keyboard.press("Home")
    page.focus("#alpha")
    page.keyboard.press("Home")
    assert page.locator("#recent .out").count() == 0
    assert "too few to flag any at this share; 5 % is the least" in page.inner_text("#tally")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.locator("#recent b").all_inner_texts() == verdicts


def test_verdicts_are_put_in_the_order_of_their_scores_and_downloaded(address, visit, tmp_path):
    page = visit(address).page
    page.wait_for_selector("#examples button")
    images = page.locator("#examples button").count()
    page.click("#all")
    page.locator("#recent li").nth(images - 1).wait_for()
    with page.expect_download() as download:
        page.click("#table")
    download.value.save_as(tmp_path / "verdicts.csv")
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == page.locator("#recent span:last-child").all_inner_texts()
    assert sum(row["is_ood"] == "true" for row in rows) == page.locator("#recent .out").count()
    assert all(bool(row["reason"]) == (row["is_ood"] == "true") for row in rows)
    page.select_option("#order", "scores")
    rows.sort(key=lambda row: -float(row["score"]))
    assert [row["name"] for row in rows] == page.locator("#recent span:last-child").all_inner_texts()


def test_it_works_by_keyboard(address, visit):
    page = visit(address).page
    page.wait_for_selector("#examples button")
    for _ in range(12):  # the file, then the examples
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "BUTTON":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("#result:not([hidden])")
    assert page.evaluate("document.getElementById('result').getAttribute('aria-live')") == "polite"


def test_what_is_no_image_is_told_by_its_name_and_the_others_are_scored(address, visit, tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    for color in ("red", "blue"):
        Image.new("RGB", (9, 9), color).save(tmp_path / f"{color}.png")
    page = visit(address).page
    page.wait_for_selector("#examples button")
    page.set_input_files("#file", [str(tmp_path / name) for name in ("red.png", "notes.txt", "blue.png", "notes.txt")])
    page.locator("#drop", has_text="Drop photographs here").wait_for()
    problems = page.inner_text("#problem").split("\n")
    assert len(problems) == 2
    assert all(problem.startswith("notes.txt: cannot be read as an image") for problem in problems)
    assert page.locator("#recent li").count() == 2
    assert page.inner_text("#title") == "red.png"
