"""A chart as inline SVG: elements, axes and ticks. Text stays text, and colours are CSS classes of the page.

Lengths are in the units of the view box, which scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

LETTER = 7.1  # mean width of a letter at the charts' font size


@dataclass(frozen=True)
class Scale:
    """Values `low` to `high` onto lengths `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + share * (self.stop - self.start), 2)


class Chart:
    """An SVG picture with a title and a description for those who do not see it.

    Args:
        key: A part of the page's ids; unique.
        width: The view box's width.
        height: The view box's height.
        title: What it shows.
        description: What can be read from it.
    """

    def __init__(self, key: str, width: float, height: float, title: str, description: str) -> None:
        self.root = ET.Element(
            "svg",
            {
                "viewBox": f"0 0 {width:g} {height:g}",
                "role": "img",
                "aria-labelledby": f"{key}-title {key}-text",
                "class": "chart",
            },
        )
        ET.SubElement(self.root, "title", {"id": f"{key}-title"}).text = title
        ET.SubElement(self.root, "desc", {"id": f"{key}-text"}).text = description

    def add(self, tag: str, kind: str, tip: str | None = None, **values: float | str) -> ET.Element:
        """An element of class `kind`; `tip` is what pointing at it shows."""
        written = {name.replace("_", "-"): f"{v:g}" if isinstance(v, int | float) else v for name, v in values.items()}
        element = ET.SubElement(self.root, tag, {"class": kind, **written})
        if tip is not None:
            ET.SubElement(element, "title").text = tip
        return element

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "label", **more: str) -> None:
        self.add("text", kind, x=x, y=y, text_anchor=anchor, **more).text = text

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, tip: str | None = None) -> None:
        size = {"width": round(max(width, 0.0), 2), "height": round(max(height, 0.0), 2)}
        self.add("rect", kind, tip, x=round(x, 2), y=round(y, 2), **size)

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        self.add("path", kind, d="M" + "L".join(f"{x:g} {y:g}" for x, y in points))

    def mark(self, x: float, y: float, shape: str, kind: str, tip: str) -> None:
        """A point: a `circle`, a `square` or a `diamond`, so that colour is not all that tells series apart."""
        r = 4.5
        if shape == "circle":
            self.add("circle", kind, tip, cx=x, cy=y, r=r)
        elif shape == "square":
            self.add("rect", kind, tip, x=x - r, y=y - r, width=2 * r, height=2 * r)
        else:
            corners = [(x, y - r - 1), (x + r + 1, y), (x, y + r + 1), (x - r - 1, y)]
            self.add("path", kind, tip, d="M" + "L".join(f"{a:g} {b:g}" for a, b in corners) + "Z")

    def axes(self, x: Scale, y: Scale, x_label: str, y_label: str, x_ticks: Sequence[float] | None = None) -> None:
        """Both axes with grid lines; `x_ticks` where the ticks of `x` are not a choice."""
        for value in ticks(y.low, y.high, 5):
            self.line(x.start, y(value), x.stop, y(value), "grid")
            self.text(x.start - 6, y(value) + 4, short(value), "end")
        for value in ticks(x.low, x.high, 6) if x_ticks is None else x_ticks:
            self.text(x(value), y.start + 16, short(value), "middle")
        self.line(x.start, y.start, x.stop, y.start, "axis")
        self.text((x.start + x.stop) / 2, y.start + 34, x_label, "middle")
        middle = (y.start + y.stop) / 2
        self.text(13, middle, y_label, "middle", transform=f"rotate(-90 13 {middle:g})")

    def __html__(self) -> str:
        return ET.tostring(self.root, encoding="unicode")


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in `low` to `high`, about `most` of them."""
    raw = (high - low) / max(most - 1, 1) or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number as an axis says it."""
    return f"{value:.4g}"
