"""Group boxes by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clika_ref_visualize.pictures.drawing import Box, BoxGroup, Member
from clika_ref_visualize.pictures.node_texts import shorten


@dataclass
class _OpenGroup:
    """A group under construction."""

    scope: str
    members: list[Box | _OpenGroup] = field(default_factory=list["Box | _OpenGroup"])


def group_boxes(boxes: Sequence[tuple[Box, Sequence[str]]], name: str) -> BoxGroup:
    """Return the boxes nested in groups of their modules.

    A group holds consecutive boxes: a module that is called twice, with others in between, becomes two groups. So
    groups never depend on each other in a cycle, and can be drawn from top to bottom. A module with a single box gets
    no frame; the box takes its name.

    Args:
        boxes: boxes in topological order, with the paths of their modules, outermost first.
        name: name of the model.
    """
    root = _OpenGroup("")
    path = [root]
    for box, scopes in boxes:
        depth = 0
        while depth < len(scopes) and depth + 1 < len(path) and path[depth + 1].scope == scopes[depth]:
            depth += 1
        del path[depth + 1 :]
        for scope in scopes[depth:]:
            inner = _OpenGroup(scope)
            path[-1].members.append(inner)
            path.append(inner)
        path[-1].members.append(box)
    counts: dict[str, int] = {}
    return BoxGroup("group", name, [_build_group(member, counts) for member in root.members])


def _build_group(member: Box | _OpenGroup, counts: dict[str, int]) -> Member:
    if isinstance(member, Box):
        return member
    if len(member.members) == 1:
        only = _build_group(member.members[0], counts)
        return _rename_box(only, member.scope) if only is member.members[0] else only
    counts[member.scope] = visit = counts.get(member.scope, 0) + 1
    key = f"group {member.scope} {visit}"
    return BoxGroup(key, member.scope, [_build_group(inner, counts) for inner in member.members])


def _rename_box(only: Member, scope: str) -> Member:
    if isinstance(only, BoxGroup):
        return only
    return replace(only, rows=[("name", shorten(scope)), *only.rows[1:]])
