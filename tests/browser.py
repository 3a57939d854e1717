"""Pages in a headless Chromium: opened from files, without a network; any error of a page fails the test.

Where playwright or Chromium is missing, tests that ask for `open_page` are skipped with the package to install; where
``CLIKA_REF_NEEDS_BROWSER`` is set, as CI does, they fail instead.
"""

import io
import os
import shutil
from collections import Counter

import pytest
from PIL import Image

NEEDED = "CLIKA_REF_NEEDS_BROWSER"
"""Environment variable by which a missing browser fails a test."""

CHROMIUM = "CLIKA_REF_CHROMIUM"
"""Environment variable that names the program, where it is none of `NAMES`."""

NAMES = ("chromium", "chromium-browser", "google-chrome")

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--no-first-run", "--force-color-profile=srgb"),
)


def skip_without_browser(what):
    """Skip a test, or fail it where the browser is needed."""
    text = f"{what}; pip install playwright, and install Chromium (apt-get install chromium), or name it in {CHROMIUM}"
    (pytest.fail if os.environ.get(NEEDED) else pytest.skip)(text)


@pytest.fixture(scope="module")  # its event loop would be in the way of tests that have one
def browser():
    """A Chromium of all tests of a file."""
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - may be absent
    except ImportError:
        skip_without_browser("there is no playwright here")
    program = os.environ.get(CHROMIUM) or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        skip_without_browser("there is no Chromium here")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """A function that opens a file in a window of its own and returns playwright's page.

    ``open_page(path, width=1280, height=900, dark=False)``. When the test ends, errors of scripts and requests of
    anything but the file itself fail it.
    """
    contexts, problems = [], []

    def open_file(path, *, width=1280, height=900, dark=False):
        how = {"viewport": {"width": width, "height": height}, "color_scheme": "dark" if dark else "light"}
        context = browser.new_context(**how)
        contexts.append(context)
        page, address = context.new_page(), path.absolute().as_uri()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: problems.append(asked.url) if not asked.url.startswith(address) else None)
        page.goto(address)
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert not problems, problems


def count_colours(page, selector=None):
    """Return the number of pixels of each colour, ``(red, green, blue)``, on a page or in its first selected element.

    Chromium antialiases edges, so most pixels of a drawn shape have exactly its colour, but not all.
    """
    shot = (page.locator(selector).first if selector else page).screenshot()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    return Counter({colour: count for count, colour in image.getcolors(image.width * image.height)})
