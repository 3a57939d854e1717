"""Group boxes by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clika_ref.pictures.drawing import Box, Group, Member
from clika_ref.pictures.node_texts import shortened


@dataclass
class _Open:
    """A group under construction."""

    scope: str
    members: list[Box | _Open] = field(default_factory=list["Box | _Open"])


def grouped(boxes: Sequence[tuple[Box, Sequence[str]]], name: str) -> Group:
    """Return the boxes nested in groups of their modules.

    A group holds consecutive boxes: a module that is called twice, with others in between, becomes two groups. So
    groups never depend on each other cyclically, and can be drawn from top to bottom. A module with a single box gets
    no frame; the box takes its name.

    Args:
        boxes: boxes in topological order, with the paths of their modules, outermost first.
        name: name of the model.
    """
    root = _Open("")
    path = [root]
    for box, scopes in boxes:
        depth = 0
        while depth < len(scopes) and depth + 1 < len(path) and path[depth + 1].scope == scopes[depth]:
            depth += 1
        del path[depth + 1 :]
        for scope in scopes[depth:]:
            inner = _Open(scope)
            path[-1].members.append(inner)
            path.append(inner)
        path[-1].members.append(box)
    counts: dict[str, int] = {}
    return Group("group", name, [_closed(member, counts) for member in root.members])


def _closed(member: Box | _Open, counts: dict[str, int]) -> Member:
    if isinstance(member, Box):
        return member
    if len(member.members) == 1:
        only = _closed(member.members[0], counts)
        return _named(only, member.scope) if only is member.members[0] else only
    counts[member.scope] = visit = counts.get(member.scope, 0) + 1
    key = f"group {member.scope} {visit}"
    return Group(key, member.scope, [_closed(inner, counts) for inner in member.members])


def _named(only: Member, scope: str) -> Member:
    if isinstance(only, Group):
        return only
    return replace(only, rows=[("name", shortened(scope)), *only.rows[1:]])
