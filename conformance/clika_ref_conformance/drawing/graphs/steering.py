"""Steering a sampler: the lengths that it drew are changed until a shape that it asks for is one that exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from clika_ref.core.samples import Choice, Draw, Integers


class Drawn(int):
    """A number that a sampler drew, which remembers its place among the decisions until it is calculated with."""

    place: int

    def __new__(cls, value: int, place: int) -> Self:
        """Return ``value``, marked with its place."""
        self = super().__new__(cls, value)
        self.place = place
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def plain(item: Any) -> Any:
    """Return an attribute or operand without the marks of its numbers."""
    if isinstance(item, tuple | list):
        return type(item)(map(plain, item))
    return int(item) if isinstance(item, Drawn) else item


class Again(Exception):  # noqa: N818 - no error: a request
    """Asks for the sampler to be run once more, with other numbers at some places."""

    def __init__(self, changes: Mapping[int, int]) -> None:
        super().__init__()
        self.changes = changes


class Steered:
    """A driver that marks the numbers it draws, and can repeat its decisions with some of them changed."""

    def __init__(self, draw: Draw, answer: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.answer = answer
        self.decisions: list[tuple[Any, Any]] = []
        self.next = 0

    def __call__(self, description: Any, /) -> Any:
        """Decide a number or an option; what is a tensor goes to ``answer``."""
        if not isinstance(description, Choice | Integers):
            return self.answer(description)
        if self.decisions[self.next : self.next + 1] and self.decisions[self.next][0] == description:
            result = self.decisions[self.next][1]
        else:  # new, or another question than before, after which nothing is as it was
            result = self.draw(description)
            self.decisions[self.next :] = [(description, result)]
        self.next += 1
        return Drawn(result, self.next - 1) if type(result) is int else result

    def repeat(self, changes: Mapping[int, int]) -> None:
        """Start from the first decision again; after the last change all is decided anew."""
        for place, number in changes.items():
            self.decisions[place] = (self.decisions[place][0], number)
        del self.decisions[max(changes) + 1 :]
        self.next = 0


def changes_for(wanted: Sequence[int], there: Sequence[int]) -> dict[int, int] | None:
    """Return which numbers to change so that the shape ``wanted`` becomes ``there``, or None where that cannot be.

    It cannot where a length was calculated rather than drawn, or one number is to become two.
    """
    changes: dict[int, int] = {}
    for mine, other in zip(wanted, there, strict=True):
        if isinstance(mine, Drawn) and changes.setdefault(mine.place, other) == other:
            continue
        if mine != other or isinstance(mine, Drawn):
            return None
    return changes or None
