"""What ``clika-ref targets`` tells of each installed target: its runtime, the integers that it takes, its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from clika_ref.core.registry import Plugin
from clika_ref.core.targets import Target
from clika_ref.emulation import stand_in_of
from clika_ref.opened_files import suffixes_of
from clika_ref.quantization_scheme import Integers, scheme_of
from clika_ref.settings import SHORT_NAMES
from clika_ref.violations import checker_of

COLUMNS = ("target", "short", "runtime", "values", "weights", "weights alone", "files", "rules", "from")


@dataclass(frozen=True, slots=True)
class TargetRow:
    """What is known of one target."""

    name: str
    short: str
    """What the command line and settings files may call it; nothing where there is no shorter name."""
    plugin: str
    """The distribution that provides it, and its version."""
    runtime: str
    """The distribution of its runtime; nothing where it does not say."""
    runtime_version: str
    """Nothing where it is not installed."""
    emulated_by: str
    """What runs its files here in place of the runtime; nothing where that does."""
    missing: str
    """Why files cannot be run here, and what to install; nothing where they can."""
    values: str
    """The integers of values between layers; nothing where it computes in float."""
    weights: str
    """The integers of weights."""
    weights_only: tuple[int, ...]
    """Bits that weights may have where values stay float."""
    suffixes: tuple[str, ...]
    """Of its files; nothing where it does not say."""
    has_rules: bool
    """Whether ``clika-ref check`` knows rules of its files."""

    def cells(self) -> tuple[object, ...]:
        """Return the row of a table under `COLUMNS`."""
        runtime = f"{self.runtime} {self.runtime_version}".strip() or "here"
        if self.emulated_by:
            runtime = f"emulated by {self.emulated_by}"
        widths = " or ".join(map(str, self.weights_only))
        return (
            self.name,
            self.short,
            self.missing or runtime,
            self.values or "float",
            self.weights or "float",
            f"{widths} bits" if widths else "",
            " ".join(self.suffixes),
            self.has_rules,
            self.plugin,
        )


def target_rows(plugins: Iterable[Plugin]) -> list[TargetRow]:
    """Return what is known of the targets of plugins, by name."""
    rows = [_row(target, plugin) for plugin in plugins for target in plugin.targets]
    return sorted(rows, key=lambda row: row.name)


def _row(target: Target, plugin: Plugin) -> TargetRow:
    scheme, runtime = scheme_of(target), getattr(target, "runtime", "")
    few = scheme.weights_only if scheme is not None else None
    return TargetRow(
        name=target.name,
        short=next((short for short, name in SHORT_NAMES.items() if name == target.name), ""),
        plugin=f"{plugin.distribution} {plugin.version}",
        runtime=runtime,
        runtime_version=_version(runtime),
        emulated_by=stand_in_of(target),
        missing=target.missing() or "",
        values=_integers(scheme.activations) if scheme is not None else "",
        weights=_integers(scheme.weights) if scheme is not None else "",
        weights_only=tuple(sorted(few.bits)) if few is not None else (),
        suffixes=suffixes_of(target),
        has_rules=checker_of(target) is not None,
    )


def _integers(kind: Integers) -> str:
    """Return integers in words: ``uint8``, ``int7 symmetric``."""
    return f"{'' if kind.is_signed else 'u'}int{kind.bits}{' symmetric' if kind.is_symmetric else ''}"


def _version(distribution: str) -> str:
    try:
        return version(distribution) if distribution else ""
    except PackageNotFoundError:
        return ""
