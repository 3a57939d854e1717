"""What a picture shows, before anybody knows where: boxes, the groups around them, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Role(Enum):
    """What the colour of a box says; the value is what the legend says of it."""

    INTERFACE = "input or output"
    FLOAT = "in float"
    INTEGERS = "in integers"
    WEIGHTS = "weight in few bits, in float"
    KEPT = "kept in float"
    MISSED = "planned in integers, runs in float"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the graph, or one of its inputs and outputs."""

    key: str
    """Unique in the drawing."""
    kind: str
    """The operator, or what else it is."""
    badge: str
    """What it is computed in, in a word or two."""
    rows: Sequence[tuple[str, str]]
    """What is written in it: labels and texts; without a label, a text has the whole line."""
    details: Sequence[tuple[str, str]]
    """All that is known of it, for who asks."""
    role: Role

    @property
    def name(self) -> str:
        """What it is called in its first row."""
        return self.rows[0][1] if self.rows else self.kind

    @property
    def told(self) -> str:
        """What is known of it, in lines."""
        return "\n".join([self.kind, *(f"{label}: {text}" for label, text in self.details)])


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way from one box to another."""

    source: str
    """The key of a box."""
    target: str
    carries: str
    """Unique for each tensor, and each form in which it is read: edges that carry the same may share their way."""
    text: str
    """The type of the tensor, and how integers hold it."""
    is_integers: bool


@dataclass(frozen=True, slots=True)
class Group:
    """The boxes of a module, in order, with those of the modules in it."""

    key: str
    title: str
    members: Sequence[Box | Group]

    def boxes(self) -> Iterator[Box]:
        """Return all boxes in it, however deep, in order."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.boxes()
            else:
                yield member


Member: TypeAlias = "Box | Group"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A whole picture: all boxes lie in one group, that of the model, and all edges lead down."""

    title: str
    subtitle: str
    root: Group
    edges: Sequence[Edge]

    @property
    def roles(self) -> Sequence[Role]:
        """The roles that occur, in the order of the legend."""
        found = {box.role for box in self.root.boxes()}
        return [role for role in Role if role in found]

    @property
    def has_integers(self) -> bool:
        """Whether any tensor is read as integers."""
        return any(edge.is_integers for edge in self.edges)
