"""The variables that branches assign, in the cells that they share with their function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.syntax import PREFIX
from clika_ref.capture.messages import BranchConversionError

if TYPE_CHECKING:
    from clika_ref.capture.branch_conversion.expressions import SiteDescription


class Unbound:
    """The content of the cell of a variable that has no value."""


@dataclass(frozen=True)
class Branch:
    """A branch that returns its value, without an effect on variables."""

    function: FunctionType
    """The code of the model."""
    run: Callable[[], Any]


@dataclass(frozen=True)
class SharedVariables:
    """The cells of the variables that the branches of a site assign."""

    cells: Mapping[str, CellType]
    merged: tuple[str, ...]
    """Those that are read afterward."""

    @classmethod
    def of(cls, functions: Sequence[FunctionType], description: SiteDescription) -> SharedVariables:
        """Find the cells of the variables in the closures of branches."""
        found: dict[str, CellType] = {}
        waiting = [*functions]
        while waiting:
            function = waiting.pop()
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name.startswith(PREFIX) and name not in found:  # a branch that this one continues with
                    waiting.append(cell.cell_contents)
                found[name] = cell
        assigned = {name: found[name] for name in description.assigned if name in found}
        return cls(assigned, tuple(name for name in description.merged if name in assigned))

    def read(self, name: str) -> Any:
        """Return the value of a variable, or `Unbound`."""
        try:
            return self.cells[name].cell_contents
        except ValueError:
            return Unbound

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set variables; those that are `Unbound` lose their value."""
        for name, value in values.items():
            if value is not Unbound:
                self.cells[name].cell_contents = value
            elif self.read(name) is not Unbound:
                del self.cells[name].cell_contents

    @contextlib.contextmanager
    def preserve(self) -> Iterator[None]:
        """Restore all variables on exit."""
        before = {name: self.read(name) for name in self.cells}
        try:
            yield
        finally:
            self.assign(before)

    def isolate(self, function: FunctionType, *, returns: bool, run: Callable[[], Any] | None = None) -> Branch:
        """Return a branch that restores all variables at its end.

        Args:
            function: the code of the branch.
            returns: whether the value of the branch is the result of the function; else it is the merged variables.
            run: calls the function; by default it is only called.
        """

        def run_isolated() -> Any:
            with self.preserve():
                result = (run or function)()
                return result if returns else {name: self.read(name) for name in self.merged}

        return Branch(function, run_isolated)


def reject_unbound(site: SiteRecord, name: str, *, has_value: str) -> BranchConversionError:
    """Return the error for a variable that only some paths assign."""
    return site.reject(f"{name} is read afterward, but it has a value only {has_value}. Assign it before")
