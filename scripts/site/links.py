"""Internal links of a built site: files that are there, and places in them."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links that a page makes, and places in it that may be linked to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {"", "top"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {given[key] or "" for key in ("id", "name") if given.get(key)}
        self.links |= {given[key] or "" for key in ("href", "src") if given.get(key)}


def broken(site: Path) -> Iterator[str]:
    """Each link that leads nowhere, with its page."""
    pages = {file.resolve(): Page(file) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            name = f"{file.relative_to(site.resolve())}: {link}"
            if not target.exists():
                yield f"{name}: no such file"
            elif target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{name}: no such place"
