"""The contents of a picture before layout: boxes, groups around them, and edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Role(Enum):
    """Meaning of a box's color; the value is its text in the legend."""

    INTERFACE = "input or output"
    FLOAT = "runs in float"
    QUANTIZED = "runs in INT8"
    WEIGHT_ONLY = "low-bit weight, runs in float"
    KEPT_IN_FLOAT = "kept in float"
    NOT_QUANTIZED = "planned in INT8, runs in float"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the graph, or one of its inputs and outputs."""

    key: str
    """Unique in the drawing."""
    kind: str
    """The op type, or the kind of box (``input``, ``output``, ``state``)."""
    badge: str
    """The precision, in a word or two."""
    rows: Sequence[tuple[str, str]]
    """Text of the box: labels and texts. A text without a label spans the line."""
    details: Sequence[tuple[str, str]]
    """All known facts, for the tooltip."""
    role: Role

    @property
    def name(self) -> str:
        """The name in the first row."""
        return self.rows[0][1] if self.rows else self.kind

    @property
    def tooltip(self) -> str:
        """The tooltip, one fact per line."""
        return "\n".join([self.kind, *(f"{label}: {text}" for label, text in self.details)])


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor passed from one box to another."""

    source: str
    """Key of a box."""
    target: str
    tensor: str
    """Name of the tensor, with ``quantized`` after it if it is read so. Edges with one name may share a route."""
    text: str
    """Type of the tensor, and its quantization."""
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """The boxes of a module in order, with nested groups for its submodules."""

    key: str
    title: str
    members: Sequence[Box | BoxGroup]

    def boxes(self) -> Iterator[Box]:
        """Return all boxes of the group in order, including nested ones."""
        for member in self.members:
            if isinstance(member, BoxGroup):
                yield from member.boxes()
            else:
                yield member


Member: TypeAlias = "Box | BoxGroup"


@dataclass(frozen=True, slots=True)
class PictureDrawing:
    """A whole picture: all boxes are in the root group, and all edges lead down."""

    title: str
    subtitle: str
    root: BoxGroup
    edges: Sequence[Edge]

    @property
    def roles(self) -> Sequence[Role]:
        """The roles in use, in the order of the legend."""
        roles = {box.role for box in self.root.boxes()}
        return [role for role in Role if role in roles]

    @property
    def has_quantized_edges(self) -> bool:
        """Whether any edge is quantized."""
        return any(edge.is_quantized for edge in self.edges)
