"""Facts about installed plugins and single operators, for the command line."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from clika_ref.core import hooks
from clika_ref.core.errors import PluginError, format_count
from clika_ref.core.operators import Operator, format_schema
from clika_ref.core.registry import PLUGINS_VARIABLE, Plugin, Registry, build_registry, load_registry
from clika_ref.core.traits import QuantizationTrait
from clika_ref_cli.exit_status import MisuseError

PLUGIN_ITEM_KINDS = {"operators": "operator", "passes": "pass", "targets": "target", "visualizers": "visualizer"}


@dataclass(frozen=True, slots=True)
class InstalledPlugins:
    """The plugins of this environment: those that load, the failures of others, and those that are excluded."""

    plugins: tuple[Plugin, ...]
    failures: tuple[str, ...]
    excluded: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain data: names only, each list sorted."""
        plugins = [
            {"name": p.name, "distribution": p.distribution, "version": p.version}
            | {kind: list_names(p, kind) for kind in PLUGIN_ITEM_KINDS}
            for p in self.plugins
        ]
        return {"plugins": plugins, "failures": list(self.failures), "excluded": list(self.excluded)}


def load_installed_plugins() -> InstalledPlugins:
    """Load each plugin on its own, so that a failure does not hide the others, then check them for conflicts."""
    names = sorted({entry.name for entry in entry_points(group=hooks.ENTRY_POINT_GROUP)})
    limit = os.environ.get(PLUGINS_VARIABLE)
    selected = names if limit is None else [part.strip() for part in limit.split(",") if part.strip()]
    included = [name for name in names if name in selected]
    plugins: list[Plugin] = []
    failures = [f"${PLUGINS_VARIABLE} names {name!r}, which is not installed" for name in selected if name not in names]
    for name in included:
        try:
            plugins += load_registry(name).plugins
        except PluginError as error:
            failures.append(_extract_reason(error))
    try:
        build_registry(plugins)
    except PluginError as error:
        failures.append(str(error))
    return InstalledPlugins(tuple(plugins), tuple(failures), tuple(name for name in names if name not in included))


def _extract_reason(error: PluginError) -> str:
    # The message of a single plugin, without its first and last line, which are the same for all.
    lines = str(error).splitlines()
    return "\n".join(lines[1:-1]).strip() if len(lines) > 2 else str(error)


def list_names(plugin: Plugin, kind: str) -> list[str]:
    """Return the sorted names of a plugin's operators, passes, targets or visualizers."""
    return sorted(item.name for item in getattr(plugin, kind))


def count_items(plugin: Plugin) -> str:
    """Return the number of items that a plugin adds: ``218 operators, 1 target``."""
    counts = {kind: len(getattr(plugin, kind)) for kind in PLUGIN_ITEM_KINDS}
    return ", ".join(format_count(n, PLUGIN_ITEM_KINDS[kind]) for kind, n in counts.items() if n) or "nothing"


def find_operator(registry: Registry, text: str) -> Operator:
    """Return the operator with this name, or the one that an ATen call such as ``aten.conv2d.default`` maps to.

    Raises:
        MisuseError: there is none; the message suggests similar names.
    """
    query = text.removeprefix("torch.ops.").replace("::", ".")
    if query in registry.operators:
        return registry.operators[query]
    calls = {str(overload): op for overload, op in registry.overloads.items()}
    packets = {name.rpartition(".")[0]: op for name, op in reversed(calls.items())}
    if operator := calls.get(query) or packets.get(query):
        return operator
    known = [*registry.operators, *calls]
    near = difflib.get_close_matches(query, known, n=5) or [name for name in known if query in name][:5]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise MisuseError(
        f"cannot find the operator {text!r}: no installed plugin declares it. {hint}Run `clika-ref plugins --names`."
    )


def list_operator_facts(registry: Registry, op: Operator) -> Iterator[tuple[str, str]]:
    """Yield the facts of an operator as (title, text)."""
    plugin = next(p for p in registry.plugins if op in p.operators)
    yield "schema", _unquote_annotations(format_schema(op))
    yield "meaning", inspect.getdoc(op.reference) or "not documented"
    yield "ATen calls", "\n".join(sorted(map(str, op.converters))) or "none"
    yield "quantization", _describe_trait(op.trait)
    yield "rounding error", str(op.error)
    yield "deterministic", "no" if op.random else "yes"
    yield "reference", find_source_location(op.reference)
    yield "ONNX lowering", find_source_location(op.lowering)
    yield "samples", find_source_location(op.sampler)
    yield "plugin", str(plugin)


def _unquote_annotations(schema: str) -> str:
    # PEP 563 makes annotations strings, and a signature shows their quotes.
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", schema)


def _describe_trait(trait: QuantizationTrait) -> str:
    facts = {"weight": trait.weight, "axis": trait.axis, "bias": trait.bias}
    shown = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{trait.kind} ({shown})" if shown else trait.kind


def find_source_location(function: Callable[..., Any] | None) -> str:
    """Return ``file:line`` of a function, relative to the working directory where possible, or ``none``."""
    if function is None:
        return "none"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{code.co_firstlineno}"
