"""The service's page in a real browser: by mouse, by keyboard, on a phone, in the dark."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from PIL import Image

import kedge
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
    kedge.AMP(net).fit(train).calibrate(held_out).save(home / "colours.kedge")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kedge", "serve", str(home / "colours.kedge"), "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/"
    process.terminate()
    process.wait(timeout=20)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_an_image_is_tried_and_explained(address, visit, width, dark, tmp_path):
    seen = visit(address, width=width, dark=dark)
    page = seen.page
    page.wait_for_selector("#examples button")
    assert "Classes: red, green, blue" in page.inner_text("#about")
    page.click("#examples button >> nth=0")
    page.wait_for_selector("#result:not([hidden])")
    assert page.inner_text("#verdict")
    assert page.inner_text("#prediction").endswith("%)")
    assert page.locator("#classes li").count() == 3
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
    assert page.inner_text("#title") == "anchor 1"
    assert seen.errors == []
    inside = (address, "data:", "blob:")
    assert [url for url in seen.requests if not url.startswith(inside)] == []
    if os.environ.get("KEDGE_SCREENSHOTS"):
        page.screenshot(path=f"{os.environ['KEDGE_SCREENSHOTS']}/service-{width}.png", full_page=True)


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


def test_what_is_no_image_is_told(address, visit, tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    seen = visit(address)
    seen.page.wait_for_selector("#examples button")
    seen.page.set_input_files("#file", str(tmp_path / "notes.txt"))
    seen.page.wait_for_selector("#problem:not(:empty)")
    assert "notes.txt: " in seen.page.inner_text("#problem")
    assert "cannot be read as an image" in seen.page.inner_text("#problem")
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    seen.page.set_input_files("#file", [str(tmp_path / name) for name in ("notes.txt", "red.png", "notes.txt")])
    seen.page.locator("#recent li").first.wait_for()
    seen.page.wait_for_function("document.getElementById('problem').textContent.split('notes.txt').length == 3")
