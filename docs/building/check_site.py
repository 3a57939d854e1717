"""What the built site promises: each link and anchor leads somewhere, and no page fetches anything.

`python docs/building/check_site.py build/docs` prints what is wrong; its exit status is 1 where anything is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script", "img", "iframe", "source", "video", "audio"}
"""Elements for whose ``src`` a browser fetches something."""

FETCHED_LINKS = {"stylesheet", "preload", "preconnect", "icon", "manifest", "modulepreload", "dns-prefetch"}
"""Kinds of ``<link>`` for whose target a browser does, or gets ready to."""


class Read(HTMLParser):
    """One page: what it links to, what it fetches, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in FETCHED and "src" in given:
            self.fetched.append(given["src"])
        elif tag == "link" and not FETCHED_LINKS.isdisjoint(given.get("rel", "").split()):
            self.fetched.append(given.get("href", ""))


def broken(site: Path, pages: dict[Path, Read]) -> Iterator[str]:
    """Yield a line for each link within a site that leads nowhere."""
    for path, page in pages.items():
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            folder = site if path.name == "404.html" else path.parent  # that page is shown for any address
            place = (folder / unquote(parts.path).removeprefix("/")).resolve() if parts.path else path
            anchors = pages[place].anchors if place in pages else {unquote(parts.fragment)}
            if not place.exists() or unquote(parts.fragment) not in anchors:
                yield f"{path.relative_to(site)}: {link} leads nowhere"


def fetching(site: Path, pages: dict[Path, Read]) -> Iterator[str]:
    """Yield a line for each thing that a browser would fetch from elsewhere."""
    for path, page in pages.items():
        yield from (f"{path.relative_to(site)}: {url} is fetched" for url in page.fetched if urlsplit(url).netloc)
    for path in sorted(site.rglob("*.css")):
        style = path.read_text(encoding="utf-8")
        yield from (f"{path.relative_to(site)}: {sign} is fetched" for sign in ("url(http", "url(//") if sign in style)


def main(site: Path) -> int:
    """Print how much was looked at and what is wrong; return the exit status."""
    pages = {path: Read(path) for path in sorted(site.rglob("*.html"))}
    wrong = [*broken(site, pages), *fetching(site, pages)]
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {links:,} links: {len(wrong)} broken or fetched from elsewhere", *wrong, sep="\n")
    return bool(wrong) or not pages


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
