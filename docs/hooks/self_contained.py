"""The built site asks no other host for anything: no font, script, style or image.

A link to follow is no request.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
}
_RELATIONS = {"canonical", "alternate", "next", "prev"}  # of <link>, which a browser does not fetch
_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)")


class _Requests(HTMLParser):
    """Addresses on other hosts that a browser would load with the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        followed = tag == "link" and set((values.get("rel") or "").split()) <= _RELATIONS
        for name, value in values.items():
            loaded = (tag, name) in _LOADED or (tag == "link" and name == "href" and not followed)
            if loaded and re.match(r"(?:https?:)?//", value or ""):
                self.found.append(str(value))


def requests_of(path: Path) -> list[str]:
    """What `path`, a page or a style sheet, loads from other hosts."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".css":
        return _STYLE.findall(text)
    parser = _Requests()
    parser.feed(text)
    return parser.found + _STYLE.findall(text)


def on_post_build(config: Any) -> None:
    """mkdocs's event: fail the build on the first page that is not self-contained."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := requests_of(path)):
            raise PluginError(f"{path}: loads {found[0]} from another host")
