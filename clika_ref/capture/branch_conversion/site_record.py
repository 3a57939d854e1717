"""What is known of a branch, loop or condition of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from clika_ref.capture.branch_conversion.expressions import SiteDescription
from clika_ref.capture.messages import BranchConversionError
from clika_ref.capture.origins import format_line


@dataclass(eq=False)
class SiteRecord:
    """A branch, loop or condition of the model, and how often each branch ran in eager."""

    file: str
    function: str
    """The qualified name of the function that contains it."""
    description: SiteDescription
    taken: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """How often eager took each branch; the body of a loop counts as the first one."""
    is_converted: bool = False
    """Whether a trace contains it as a condition or loop."""

    @property
    def location(self) -> str:
        """The file and line."""
        return format_line(self.file, self.description.line)

    def __str__(self) -> str:
        return f"the {self.description.kind} at {self.location}"

    def reject(self, reason: str) -> BranchConversionError:
        """Return the error for a branch that cannot be converted, from the reason without its period."""
        return BranchConversionError(f"{self} depends on the values of a tensor and cannot be converted: {reason}.")

    def check(self) -> None:
        """Check that a branch of a graph can contain its statements.

        Raises:
            BranchConversionError: it cannot.
        """
        if self.description.obstacles:
            raise self.reject("; ".join(self.description.obstacles))
