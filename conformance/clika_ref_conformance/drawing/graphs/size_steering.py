"""Changes to the sizes that a sampler draws, so that a shape it asks for becomes an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from clika_ref.core.samples import Choice, Draw, IntegerRange


class DrawnInt(int):
    """A number drawn by a sampler, with its index among the decisions; arithmetic drops the index."""

    index: int

    def __new__(cls, value: int, index: int) -> Self:
        """Return ``value`` with its decision index."""
        self = super().__new__(cls, value)
        self.index = index
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def to_plain_numbers(item: Any) -> Any:
    """Return an attribute or operand with plain numbers instead of `DrawnInt` ones."""
    if isinstance(item, tuple | list):
        return type(item)(map(to_plain_numbers, item))
    return int(item) if isinstance(item, DrawnInt) else item


class RedrawRequest(Exception):  # noqa: N818 - a request, not an error
    """Requests another run of the sampler, with other numbers at some decision indices."""

    def __init__(self, changes: Mapping[int, int]) -> None:
        super().__init__()
        self.changes = changes


class RepeatableDraw:
    """A driver that marks the numbers it draws, and can repeat its decisions with some of them changed."""

    def __init__(self, draw: Draw, answer: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.answer = answer
        self.decisions: list[tuple[Any, Any]] = []
        self.next = 0

    def __call__(self, description: Any, /) -> Any:
        """Decide a number or an option; other descriptions go to ``answer``."""
        if not isinstance(description, Choice | IntegerRange):
            return self.answer(description)
        if self.decisions[self.next : self.next + 1] and self.decisions[self.next][0] == description:
            result = self.decisions[self.next][1]
        else:  # a new or changed description invalidates all later decisions
            result = self.draw(description)
            self.decisions[self.next :] = [(description, result)]
        self.next += 1
        return DrawnInt(result, self.next - 1) if type(result) is int else result

    def repeat(self, changes: Mapping[int, int]) -> None:
        """Restart from the first decision; all decisions after the last change are drawn again."""
        for index, number in changes.items():
            self.decisions[index] = (self.decisions[index][0], number)
        del self.decisions[max(changes) + 1 :]
        self.next = 0


def find_size_changes(requested: Sequence[int], there: Sequence[int]) -> dict[int, int] | None:
    """Return the numbers to change so that shape ``requested`` becomes shape ``there``, or None if impossible.

    It is impossible if a size was computed rather than drawn, or if one number would need two values.
    """
    changes: dict[int, int] = {}
    for mine, other in zip(requested, there, strict=True):
        if isinstance(mine, DrawnInt) and changes.setdefault(mine.index, other) == other:
            continue
        if mine != other or isinstance(mine, DrawnInt):
            return None
    return changes or None
