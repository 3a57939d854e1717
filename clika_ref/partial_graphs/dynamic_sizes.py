"""What Dynamo treats as dynamic: the sizes and numbers of each function, found from the tracing inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from clika_ref.capture.origins import format_line
from clika_ref.torch_internals.dynamo import (
    FrameStateSizeEntry,
    list_changed_dims,
    mark_number_dynamic,
    read_scalar,
    read_size,
)

RECOMPILE_LIMIT = 64
"""Maximum number of graphs of one function or resume function; PyTorch's own limit is 8, and it falls back to eager."""

MAX_NUMBER_VALUES = RECOMPILE_LIMIT // 2
"""Number of values of a number after which graphs take it as an input; the limit leaves room for other differences."""

SIZE_ADVICE = "To make a dim dynamic, compile with tracing inputs that differ in it."

_LOCAL_VARIABLE = re.compile(r"^L\['(?:args'\]\[(?P<index>\d+)|(?P<name>\w+)')\]$")
"""Matches Dynamo's source of a local variable or argument; ``args`` are those of `trace_library_forward`."""

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_(\d+)$")


@dataclass(frozen=True)
class CodePosition:
    """Where the code of a graph begins: a function, or the line where it resumes after a break."""

    function: str
    """The name of the function."""
    file: str
    """The path of its file."""
    line: int
    """The line where the function begins or resumes."""
    is_resumed: bool
    """Whether the graph begins after a break."""

    def is_same_function(self, other: CodePosition) -> bool:
        """Return whether both are in functions of one name in files of one name."""
        names = [(p.function, p.is_resumed, Path(p.file).name) for p in (self, other)]
        return names[0] == names[1]

    def __str__(self) -> str:
        if Path(self.file).parent == Path(__file__).parent:  # made by `trace_library_forward`
            return self.function
        return f"{self.function} {'resumed ' * self.is_resumed}at {format_line(self.file, self.line)}"

    @classmethod
    def of(cls, code: CodeType) -> CodePosition:
        """Return the position of a code object, such as Dynamo's resume functions."""
        resumed = _RESUMED.match(code.co_name)
        name, line = resumed.groups() if resumed else (code.co_name, code.co_firstlineno)
        return cls(name, code.co_filename, int(line), resumed is not None)


def read_function_name(code_name: str) -> str:
    """Return the name of the function that a code object belongs to."""
    resumed = _RESUMED.match(code_name)
    return resumed[1] if resumed else code_name


@dataclass
class DynamicSizes:
    """The sizes and numbers that Dynamo treats as dynamic, for each function and resume function."""

    sources: dict[CodePosition, set[str]] = field(default_factory=dict[CodePosition, set[str]])
    """Entries of ``torch.compiler.config.dynamic_sources``, as `list_dynamic_sources` returns them."""
    is_one_special: bool = False
    """Whether dynamic sizes of 1 have graphs of their own: without, some broadcasts fail to trace."""
    is_complete: bool = True
    """Whether all is listed; otherwise Dynamo adds what differs between two calls."""
    is_closed: bool = False
    """Whether all tracing inputs have run: calls then have the sizes that these had."""
    mismatches: dict[CodePosition, str] = field(default_factory=dict[CodePosition, str], compare=False)
    """A size that no tracing input had, for each function that was compiled for another call."""
    positions: set[CodePosition] = field(default_factory=set[CodePosition], compare=False)
    """The functions that have a graph. Others are compiled for one of the tracing inputs only."""
    is_first_call: bool = False
    """Whether the first call of the model runs, while not all is listed."""
    _entries: dict[tuple[CodePosition, str], FrameStateSizeEntry] = field(
        default_factory=dict[tuple[CodePosition, str], FrameStateSizeEntry], compare=False
    )
    """What is known of each tensor and number while not all is listed."""
    _values: dict[tuple[CodePosition, str], set[float]] = field(
        default_factory=dict[tuple[CodePosition, str], set[float]], compare=False
    )
    """The values of each number so far."""
    _sizes: dict[tuple[CodePosition, str], list[tuple[int, ...]]] = field(
        default_factory=dict[tuple[CodePosition, str], list[tuple[int, ...]]], compare=False
    )
    """The sizes of each tensor in the tracing inputs that a graph was compiled for."""

    def add(self, position: CodePosition, names: Iterable[str]) -> None:
        """Add entries for a function."""
        self.sources.setdefault(position, set()).update(names)

    def find(self, position: CodePosition) -> set[str]:
        """Return the entries of a function, whose file and lines may have moved since they were recorded."""
        if position in self.sources:
            return self.sources[position]
        alike = [known for known in self.sources if known.is_same_function(position)]
        return self.sources[min(alike, key=lambda known: abs(known.line - position.line))] if alike else set()

    def observe_number(self, position: CodePosition, name: str, value: float) -> None:
        """Record the value of a number; list it if a later call of the model has a value that the first did not have.

        A number of layers, such as a rate, has the same values in all calls: it stays a constant of their graphs.
        """
        known = self._values.setdefault((position, name), set())
        if self.is_first_call:
            known.add(value)
        elif value not in known:
            self.add(position, [to_source_pattern(name)])

    def list_sources(self) -> dict[CodePosition, set[str]]:
        """Return all entries, and those of tensors whose sizes differ: a function without a graph has no others."""
        found = {position: set(names) for position, names in self.sources.items()}
        for (position, name), entry in self._entries.items():
            found.setdefault(position, set()).update(
                f"{to_source_pattern(name)}:{dim}" for dim in list_changed_dims(entry)
            )
        return found

    def choose(self, position: CodePosition, name: str, entry: FrameStateSizeEntry) -> FrameStateSizeEntry:
        """Return what is dynamic in a tensor or number of a function, from its current sizes or value."""
        number = read_scalar(entry)
        if not self.is_complete:
            if number is not None:
                self.observe_number(position, name, number)
            known = self._entries.setdefault((position, name), entry)
            known |= entry
            return known
        if number is not None:
            values = self._values.setdefault((position, name), set())
            values.add(number)
            is_listed = any(re.match(pattern, name) for pattern in self.find(position))
            if is_listed or len(values) > MAX_NUMBER_VALUES:
                mark_number_dynamic(entry)
        elif (size := read_size(entry)) is not None:
            self._compare_size(position, name, size)
        return entry

    def _compare_size(self, position: CodePosition, name: str, size: tuple[int, ...]) -> None:
        """Record the size of a tensor in the tracing inputs; later, note a size that none of these had."""
        known, local = self._sizes.setdefault((position, name), []), _LOCAL_VARIABLE.match(name)
        if not self.is_closed:
            known.append(size)
        elif (
            known
            and local
            and position in self.positions
            and not any(self._is_same_size(position, name, size, other) for other in known)
        ):
            fixed = [dim for dim in range(len(known[0])) if not self._is_dynamic(position, name, dim)]
            expected = ", ".join(str(known[0][dim]) if dim in fixed else "any" for dim in range(len(known[0])))
            label = local["name"] or f"argument {local['index']}"
            self.mismatches[position] = (
                f"{label} has size [{', '.join(map(str, size))}], but [{expected}] in all tracing inputs"
            )

    def _is_same_size(self, position: CodePosition, name: str, one: Sequence[int], other: Sequence[int]) -> bool:
        return len(one) == len(other) and all(
            size == known or self._is_dynamic(position, name, dim)
            for dim, (size, known) in enumerate(zip(one, other, strict=True))
        )

    def _is_dynamic(self, position: CodePosition, name: str, dim: int) -> bool:
        return f"{to_source_pattern(name)}:{dim}" in self.find(position)


def to_source_pattern(source: str) -> str:
    r"""Return the pattern that matches a source in ``torch.compiler.config.dynamic_sources``, a list with commas.

    >>> to_source_pattern("L['f(a, b)']")
    "L\\['f\\(a..b\\)'\\]$"
    """
    return re.sub(r"\\? |,", ".", re.escape(source)) + "$"
