"""A real browser: Debian's chromium or any other that is installed, driven by playwright."""

import shutil
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# A browser calls home in many ways of its own; none of them is the page's doing.
QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-sandbox"]  # fmt: skip


@dataclass
class Visit:
    """What happened while a page was open."""

    page: object
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make e2e installs it")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(NAMES)}): apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=QUIET)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens an address in a window of some width, light or dark, and keeps what goes wrong."""
    contexts = []

    def go(address: str, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        contexts.append(context)
        seen = Visit(context.new_page())
        seen.page.on(
            "console", lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(address, wait_until="load")
        return seen

    yield go
    for context in contexts:
        context.close()
