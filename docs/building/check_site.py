"""Check the built site: each link and anchor must exist, and no page may load files from other sites.

`python docs/building/check_site.py build/docs` prints the faults; the exit status is 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING_ELEMENTS = {"script", "img", "iframe", "source", "video", "audio"}
"""Elements with a ``src`` that a browser loads."""

LOADING_LINKS = {"stylesheet", "preload", "preconnect", "icon", "manifest", "modulepreload", "dns-prefetch"}
"""Values of ``rel`` of links that a browser loads, or prepares to load."""


class SitePage(HTMLParser):
    """The links of a page, the addresses that it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the links and anchors of one element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADING_ELEMENTS and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and not LOADING_LINKS.isdisjoint(given.get("rel", "").split()):
            self.loaded.append(given.get("href", ""))


def find_broken_links(site: Path, pages: dict[Path, SitePage]) -> Iterator[str]:
    """Yield a message for each link within a site that has no target."""
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            folder = site if path.name == "404.html" else path.parent  # that page is shown for any address
            target = (folder / unquote(parts.path).removeprefix("/")).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                yield f"{path.relative_to(site)}: the target of link {link} does not exist"


def find_external_loads(site: Path, pages: dict[Path, SitePage]) -> Iterator[str]:
    """Yield a message for each file that a browser would load from another site."""
    for path, page in pages.items():
        yield from (
            f"{path.relative_to(site)}: {url} is loaded from another site"
            for url in page.loaded
            if urlsplit(url).netloc
        )
    for path in sorted(site.rglob("*.css")):
        style = path.read_text(encoding="utf-8")
        yield from (
            f"{path.relative_to(site)}: {sign} loads from another site"
            for sign in ("url(http", "url(//")
            if sign in style
        )


def main(site: Path) -> int:
    """Print the number of pages and links, and the faults; return the exit status."""
    pages = {path: SitePage(path) for path in sorted(site.rglob("*.html"))}
    wrong = [*find_broken_links(site, pages), *find_external_loads(site, pages)]
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {links:,} links: {len(wrong)} broken or loaded from other sites", *wrong, sep="\n")
    return bool(wrong) or not pages


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
