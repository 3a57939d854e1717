"""The contents of a picture before layout: boxes, edges between them, and groups of boxes."""

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
    """The lines in the box, each a label and a text; with an empty label, the text spans the line."""
    details: Sequence[tuple[str, str]]
    """The lines of the tooltip, each a label and a text."""
    role: Role

    @property
    def tooltip(self) -> str:
        """The text of the tooltip: kind and details."""
        return "\n".join([self.kind, *(f"{label}: {text}" for label, text in self.details)])


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor passed from one box to another."""

    source: str
    """Key of the box that the edge starts at."""
    target: str
    """Key of the box that reads the tensor."""
    tensor: str
    """Name of the tensor, followed by ``quantized`` if the edge is. Edges of the same name may share a line."""
    text: str
    """Type of the tensor, or its quantization, for the tooltip."""
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """The boxes of a module in order, with nested groups for its submodules."""

    key: str
    title: str
    members: Sequence[Box | BoxGroup]

    def boxes(self) -> Iterator[Box]:
        """Yield all boxes of the group in order, including those of nested groups."""
        for member in self.members:
            if isinstance(member, BoxGroup):
                yield from member.boxes()
            else:
                yield member


Member: TypeAlias = "Box | BoxGroup"


@dataclass(frozen=True, slots=True)
class PictureDrawing:
    """A whole picture: its title, boxes and edges."""

    title: str
    subtitle: str
    root: BoxGroup
    """The group of all boxes, in topological order: an edge ends at a later box."""
    edges: Sequence[Edge]

    @property
    def roles(self) -> Sequence[Role]:
        """The roles of all boxes, in the order of the legend."""
        roles = {box.role for box in self.root.boxes()}
        return [role for role in Role if role in roles]

    @property
    def has_quantized_edges(self) -> bool:
        """Whether any edge is quantized."""
        return any(edge.is_quantized for edge in self.edges)
