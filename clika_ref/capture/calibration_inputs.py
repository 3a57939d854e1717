"""Read the user's calibration inputs once: first a few of them for tracing, then all for calibration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.inputs import CALIBRATION_BATCH, ForwardFn, ModelCall, check_iterable, is_array, make_call
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.trees import pytree

ARGUMENT_NAME = "calibration_inputs"

STREAM_EXAMPLE_COUNT = 4
"""Number of elements of a one-pass iterable to trace with; dims that differ among them are dynamic."""

MAX_LIST_EXAMPLES = 8
"""Maximum number of elements of a list to trace with."""


class CalibrationInputs:
    """The calls of a model for the elements of an iterable.

    Of a list, which is in memory anyway, tracing uses the first element and each element that differs from it in a new
    dim. Of a generator or a DataLoader, it uses the first ones.

    Raises:
        ModelError: the inputs are not iterable, or have no element.
    """

    def __init__(
        self,
        inputs: Iterable[Any],
        transform: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        check_iterable(inputs, ARGUMENT_NAME)
        self._transform, self._forward_fn = transform, forward_fn
        self.count = _count(inputs)
        self._inputs = inputs
        self._elements: Iterator[Any] = iter(inputs)
        self._calls_by_index: dict[int, ModelCall] = {}
        self._read_elements: list[Any] = []

    def examples(self, callee: TracedCallable) -> list[ModelCall]:
        """Return the calls to trace with.

        Raises:
            ModelError: there are none, or one does not fit the model.
        """
        inputs = self._inputs
        for number in (
            select_distinct_shapes(inputs) if isinstance(inputs, list | tuple) else range(STREAM_EXAMPLE_COUNT)
        ):
            self._read_elements += itertools.islice(self._elements, max(number + 1 - len(self._read_elements), 0))
            if number < len(self._read_elements):
                self._calls_by_index[number] = self._call(callee, number, self._read_elements[number])
        if not self._calls_by_index:
            raise ModelError(
                f"{ARGUMENT_NAME} has no elements. Give at least one batch, and no generator that was read before."
            )
        return [*self._calls_by_index.values()]

    def peek(self, callee: TracedCallable) -> Iterator[ModelCall]:
        """Yield calls in order, reading only as many as requested; `calls` still yields all of them."""
        for number in itertools.count():
            self._read_elements += itertools.islice(self._elements, number == len(self._read_elements))
            if number == len(self._read_elements):
                return
            if number not in self._calls_by_index:
                self._calls_by_index[number] = self._call(callee, number, self._read_elements[number])
            yield self._calls_by_index[number]

    def calls(self, callee: TracedCallable) -> Iterator[ModelCall]:
        """Yield all calls in order, reusing those made before."""
        for number, element in enumerate(itertools.chain(self._read_elements, self._elements)):
            yield self._calls_by_index.pop(number, None) or self._call(callee, number, element)

    def _call(self, callee: TracedCallable, number: int, element: Any) -> ModelCall:
        return make_call(callee, element, self._transform, self._forward_fn, f"{CALIBRATION_BATCH} {number + 1}")


@dataclass(frozen=True)
class LazyDataset:
    """Unread calibration inputs, with the functions that convert an element to a call."""

    inputs: Iterable[Any]
    transform: Callable[[Any], Any] | None = None
    forward_fn: ForwardFn | None = None

    @property
    def count(self) -> int | None:
        """The number of elements, if known without reading them."""
        return _count(self.inputs)

    @property
    def is_rereadable(self) -> bool:
        """Whether the inputs can be iterated again, unlike a generator."""
        return not isinstance(self.inputs, Iterator)

    def start(self) -> CalibrationInputs:
        """Start reading the inputs.

        Raises:
            ModelError: they are not iterable.
        """
        return CalibrationInputs(self.inputs, self.transform, self.forward_fn)


def _count(inputs: Iterable[Any]) -> int | None:
    try:
        return len(inputs)  # type: ignore[arg-type]
    except TypeError:  # generators, and loaders over iterable datasets, whose __len__ raises
        return None


def select_distinct_shapes(elements: Sequence[Any]) -> list[int]:
    """Return the indices of elements that show which dims differ: the first, and each that differs in a new dim."""
    chosen: list[int] = []
    differing: set[Any] = set()
    first: list[Any] = []
    for number, element in enumerate(elements):
        described = [_describe(leaf) for leaf in pytree.tree_leaves(element)]
        if not number:
            first, new = described, {None}
        else:
            new = _find_differences(first, described) - differing
        if new:
            differing |= new
            chosen.append(number)
        if len(chosen) == MAX_LIST_EXAMPLES:
            break
    return chosen


def _describe(leaf: Any) -> tuple[Any, ...]:
    has_dims = isinstance(leaf, torch.Tensor) or is_array(leaf)
    return (leaf.dtype, *leaf.shape) if has_dims else (type(leaf), repr(leaf))


def _find_differences(first: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> set[Any]:
    """Return the positions of differences between two descriptions: leaf and dim, or the structure as a whole."""
    if [len(d) for d in first] != [len(d) for d in other]:
        return {tuple(len(d) for d in other)}
    return {
        (leaf, dim)
        for leaf, (own, its) in enumerate(zip(first, other, strict=True))
        for dim, (a, b) in enumerate(zip(own, its, strict=True))
        if a != b
    }
