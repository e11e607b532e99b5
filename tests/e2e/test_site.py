"""The documentation in a real browser, opened as files: nothing is fetched, nothing overflows, search works."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What reaches beyond the window although nothing around it scrolls.
BEYOND = """() => [...document.querySelectorAll("article *")].filter(element => {
  const box = element.getBoundingClientRect();
  for (let e = element; box.width && e !== document.body; e = e.parentElement)
    if (getComputedStyle(e).overflowX !== "visible") return false;
  return box.right > innerWidth + 1;
}).map(element => element.outerHTML.slice(0, 80))"""

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is missing: make e2e installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={"NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_and_loads_nothing_from_elsewhere(site, visit, width):
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    seen = visit(pages[0].as_uri(), width=width)
    for path in pages:
        seen.page.goto(path.as_uri(), wait_until="load")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, path.name
        assert seen.page.evaluate(BEYOND) == [], path.name
        assert seen.page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length") == 0
        # A list needs an empty line before it, or its marks stand in the text.
        words = seen.page.evaluate("[...document.querySelectorAll('article p')].map(p => p.textContent).join('\\n\\n')")
        assert "\n- " not in words, path.name
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith((site.as_uri(), "data:", "blob:"))] == []


@pytest.mark.parametrize("width", [1280, 390])
def test_search_works_offline(site, visit, width):
    seen = visit((site / "index.html").as_uri(), width=width)
    page = seen.page
    page.click("label.md-header__button[for=__search]" if width < 1000 else ".md-search__input")
    page.locator(".md-search__input").press_sequentially("mahalanobis")
    page.wait_for_selector(".md-search-result__item")
    assert "Mahalanobis" in page.locator(".md-search-result__item").first.inner_text()
    assert seen.errors == []


def test_the_tabs_lead_to_every_part(site, visit):
    page = visit((site / "index.html").as_uri()).page
    assert page.locator(".md-tabs__link").all_inner_texts() == [
        "Start",
        "Choose a detector",
        "Guides",
        "Methods",
        "Concepts and theory",
        "Studies and results",
        "API reference",
        "Reliability",
        "Scale",
        "Changelog",
    ]
