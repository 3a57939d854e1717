"""The rows of ``clika-ref targets``: runtime, quantized types and files of each installed target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.registry import Plugin
from clika_ref.core.targets import Target
from clika_ref.settings.compile_options import TARGET_SHORT_NAMES

TARGET_COLUMNS = ("target", "short", "runtime", "activations", "weights", "weight-only", "files", "rules", "plugin")


@dataclass(frozen=True, slots=True)
class TargetRow:
    """The facts of one target."""

    name: str
    short: str
    """Short name on the command line and in settings files; empty if there is none."""
    plugin: str
    """The distribution that provides it, with its version."""
    runtime: str
    """The distribution of its runtime; empty if not declared."""
    runtime_version: str
    """Empty if the runtime is not installed."""
    emulated_by: str
    """The runtime that emulates its own on this machine; empty if its own runs the files."""
    unavailable_reason: str
    """Why files cannot run on this machine, with the package to install; empty if they can."""
    activations: str
    """Integer type of activations; empty if they stay float."""
    weights: str
    """Integer type of weights."""
    weights_only: tuple[int, ...]
    """Supported bit widths of weight-only quantization."""
    suffixes: tuple[str, ...]
    """Suffixes of its files; empty if not declared."""
    has_rules: bool
    """Whether ``clika-ref check`` supports it."""

    def cells(self) -> tuple[object, ...]:
        """Return the table row, in the order of `TARGET_COLUMNS`."""
        runtime = f"{self.runtime} {self.runtime_version}".strip() or "built in"
        if self.emulated_by:
            runtime = f"emulated by {self.emulated_by}"
        widths = " or ".join(map(str, self.weights_only))
        return (
            self.name,
            self.short,
            self.unavailable_reason or runtime,
            self.activations or "float",
            self.weights or "float",
            f"{widths} bits" if widths else "",
            " ".join(self.suffixes),
            self.has_rules,
            self.plugin,
        )


def list_targets(plugins: Iterable[Plugin]) -> list[TargetRow]:
    """Return the facts of all targets of the plugins, sorted by name."""
    rows = [_make_row(target, plugin) for plugin in plugins for target in plugin.targets]
    return sorted(rows, key=lambda row: row.name)


def _make_row(target: Target, plugin: Plugin) -> TargetRow:
    scheme = target.scheme
    weight_only = scheme.weights_only if scheme is not None else None
    return TargetRow(
        name=target.name,
        short=next((short for short, name in TARGET_SHORT_NAMES.items() if name == target.name), ""),
        plugin=f"{plugin.distribution} {plugin.version}",
        runtime=target.runtime,
        runtime_version=_find_version(target.runtime),
        emulated_by=target.emulated_by,
        unavailable_reason=target.unavailable_reason() or "",
        activations=_format_dtype(scheme.activations) if scheme is not None else "",
        weights=_format_dtype(scheme.weights) if scheme is not None else "",
        weights_only=tuple(sorted(weight_only.bits)) if weight_only is not None else (),
        suffixes=target.suffixes,
        has_rules=target.has_file_rules(),
    )


def _format_dtype(dtype: QuantizedType) -> str:
    """Return the name of an integer type: ``uint8``, ``int7 symmetric``."""
    return f"{'' if dtype.is_signed else 'u'}int{dtype.bits}{' symmetric' if dtype.is_symmetric else ''}"


def _find_version(distribution: str) -> str:
    try:
        return version(distribution) if distribution else ""
    except PackageNotFoundError:
        return ""
