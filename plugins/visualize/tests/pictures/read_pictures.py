"""Read pictures back: the positions of boxes, groups and routes in an SVG."""

import re
from dataclasses import dataclass
from xml.etree import ElementTree as ET

SPACE = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Area:
    """A box or a group on the page."""

    key: str
    x: float
    y: float
    width: float
    height: float
    role: str = ""

    def overlaps(self, other: "Area") -> bool:
        """Whether both areas overlap."""
        is_apart = self.x + self.width <= other.x or other.x + other.width <= self.x
        return not (is_apart or self.y + self.height <= other.y or other.y + other.height <= self.y)

    def contains(self, other: "Area") -> bool:
        """Whether it contains another area."""
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.x + other.width <= self.x + self.width
            and other.y + other.height <= self.y + self.height
        )


@dataclass(frozen=True)
class RouteLine:
    """A line on the page, from its first point to its last one."""

    tensor: str
    start: tuple[float, float]
    end: tuple[float, float]
    has_tip: bool
    kind: str


class Page:
    """An SVG as text, read."""

    def __init__(self, text: str | bytes) -> None:
        self.root = ET.fromstring(text)  # noqa: S314 - written by ourselves a moment ago
        self.boxes: list[Area] = []
        self.groups: list[Area] = []
        self.routes: list[RouteLine] = []
        self._read(self.root, 0.0, 0.0)

    def _read(self, element, x: float, y: float) -> None:
        dx, dy = re.findall(r"-?\d[\d.]*", element.get("transform", "")) or (0, 0)
        x, y = x + float(dx), y + float(dy)
        kind = element.get("class", "")
        if kind in ("box", "group"):
            ground = next(child for child in element if child.get("class", "").endswith("ground"))
            size = float(ground.get("width")), float(ground.get("height"))
            areas = self.boxes if kind == "box" else self.groups
            areas.append(Area(element.get("data-key"), x, y, *size, element.get("data-role", "")))
        if element.get("data-route") is not None:
            self.routes.append(_read_route(element, x, y))
        for child in element:
            self._read(child, x, y)

    def texts(self, key: str) -> str:
        """Return all texts of a box."""
        (found,) = [e for e in self.root.iter(f"{SPACE}g") if e.get("data-key") == key]
        return "\n".join("".join(text.itertext()) for text in found.iter(f"{SPACE}text"))

    def tooltip(self, key: str) -> str:
        """Return the tooltip of a box."""
        (found,) = [e for e in self.root.iter(f"{SPACE}g") if e.get("data-key") == key]
        return found.findtext(f"{SPACE}title")

    def box(self, key: str) -> Area:
        """Return the box with a key."""
        (found,) = [box for box in self.boxes if box.key == key]
        return found


def _read_route(element, x: float, y: float) -> RouteLine:
    line = element.get("d")
    at = [0.0, 0.0]
    start = None
    for letter, numbers in re.findall(r"([MVC])([-\d.e+ ]+)", line):
        values = [float(number) for number in numbers.split()]
        at = [at[0], values[0]] if letter == "V" else values[-2:]
        start = start or tuple(at)
    tensor = element.findtext(f"{SPACE}title").splitlines()[0]
    has_tip, kind = element.get("marker-end") is not None, element.get("class")
    return RouteLine(tensor, (start[0] + x, start[1] + y), (at[0] + x, at[1] + y), has_tip, kind)
