"""The registry: everything that the installed plugins provide, as one frozen value to pass as an argument."""

# pyright: reportPrivateUsage=false
# The type of an overload is in the private module torch._ops.

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

import pluggy

from clika_ref.core import hooks
from clika_ref.core.errors import DISTRIBUTION_PREFIX, PluginError, format_install_command
from clika_ref.core.operators import Operator, index_by_overload
from clika_ref.core.passes import PassReport, Phase, Pipeline
from clika_ref.core.targets import Target, invalid_target_reason
from clika_ref.core.visualizers import Visualizer
from clika_ref.torch_internals.operators import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from clika_ref.core.ir import Graph
    from clika_ref.core.passes import Pass

PLUGINS_VARIABLE = "CLIKA_REF_PLUGINS"
"""Environment variable with a comma-separated list of the entry points to load."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed plugin: its entry point, distribution and version; operators, passes, targets and visualizers."""

    name: str
    """The name of the entry point."""
    distribution: str
    version: str
    operators: tuple[Operator, ...] = ()
    passes: tuple[Pass, ...] = ()
    targets: tuple[Target, ...] = ()
    visualizers: tuple[Visualizer, ...] = ()
    tracing: tuple[Callable[[], AbstractContextManager[None]], ...] = ()
    """Functions that make a context for each trace."""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Registry:
    """All operators, passes, targets and visualizers by name, and the plugins that provide them."""

    plugins: tuple[Plugin, ...]
    operators: Mapping[str, Operator]
    passes: Mapping[str, Pass]
    targets: Mapping[str, Target]
    overloads: Mapping[OpOverload | str, Operator] = field(repr=False)
    """Operators by the ATen overloads that they implement."""
    visualizers: Mapping[str, Visualizer] = field(default_factory=dict[str, Visualizer])

    def operator_for(self, overload: OpOverload) -> Operator | None:
        """Return the operator for an ATen overload, or None."""
        return self.overloads.get(overload) or self.overloads.get(str(overload))

    @contextlib.contextmanager
    def enter_tracing(self) -> Generator[None]:
        """Enter the contexts that the plugins make for a trace."""
        with contextlib.ExitStack() as stack:
            for plugin in self.plugins:
                for make_context in plugin.tracing:
                    stack.enter_context(make_context())
            yield


def clean_graph(
    graph: Graph, registry: Registry, check_inputs: Sequence[torch.Tensor] | None = None
) -> list[PassReport]:
    """Run the CLEAN passes of the plugins on a graph, until none changes it; return a report of each run.

    Args:
        graph: changed in place; it keeps every parameter.
        registry: the operators and passes.
        check_inputs: one tensor for each input of the graph; if given, each pass must reproduce the results before it.

    Raises:
        PassError: a pass broke an invariant or changed numbers, or the passes do not settle.
    """
    return Pipeline.of(registry.passes, registry.operators, Phase.CLEAN, check_inputs=check_inputs).run(graph)


def load_registry(limit: str | None = None) -> Registry:
    """Load every installed plugin, in order of entry-point name, and check them for clashes.

    Args:
        limit: entry points to load, separated by commas; by default ``$CLIKA_REF_PLUGINS``, or all.

    Raises:
        PluginError: plugins fail to load or clash; the message lists all failures.
    """
    requested = limit if limit is not None else os.environ.get(PLUGINS_VARIABLE)
    found = sorted(entry_points(group=hooks.ENTRY_POINT_GROUP), key=lambda e: (e.name, e.value))
    if requested is not None:
        names = [name.strip() for name in requested.split(",") if name.strip()]
        unknown = sorted(set(names) - {e.name for e in found})
        if unknown:
            raise PluginError(
                f"cannot load the plugins in ${PLUGINS_VARIABLE}: {unknown} are not installed. Installed plugins: "
                f"{[e.name for e in found]}."
            )
        found = [e for e in found if e.name in names]
    return build_registry(_load_all(found))


def build_registry(plugins: Iterable[Plugin]) -> Registry:
    """Combine ``plugins`` into a registry.

    Raises:
        PluginError: two plugins claim one name or one ATen call; the message lists all clashes.
    """
    plugins = tuple(plugins)
    problems: list[str] = []

    def collect_unique(kind: str, items: Callable[[Plugin], Iterable[tuple[Any, Any]]]) -> dict[Any, Any]:
        owners: dict[Any, Plugin] = {}
        result: dict[Any, Any] = {}
        for plugin in plugins:
            for key, item in items(plugin):
                if key in owners:
                    problems.append(f"{kind} {str(key)!r} is declared by {owners[key]} and by {plugin}")
                owners[key], result[key] = plugin, item
        return result

    operators = collect_unique("operator", lambda p: ((o.name, o) for o in p.operators))
    overloads = collect_unique("ATen overload", lambda p: ((c, o) for o in p.operators for c in index_by_overload([o])))
    passes = collect_unique("pass", lambda p: ((q.name, q) for q in p.passes))
    targets = collect_unique("target", lambda p: ((t.name, t) for t in p.targets))
    visualizers = collect_unique("visualizer", lambda p: ((v.name, v) for v in p.visualizers))
    if problems:
        shown = "\n".join(f"  {p}" for p in problems)
        raise PluginError(
            f"cannot combine the plugins:\n{shown}\nUninstall one of each, or list the plugins to load in "
            f"${PLUGINS_VARIABLE}."
        )
    return Registry(plugins, operators, passes, targets, overloads, visualizers)


def _load_all(found: list[EntryPoint]) -> list[Plugin]:
    manager = pluggy.PluginManager(hooks.ENTRY_POINT_GROUP)
    manager.add_hookspecs(hooks)
    plugins: list[Plugin] = []
    problems: list[str] = []
    missing: set[str] = set()
    for entry in found:
        try:
            plugins.append(_load(manager, entry))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; all failures are reported
            problems.append(f"  {_describe_entry_point(entry)}: {type(error).__name__}: {error}")
            missing |= _find_missing_distribution(error)
    if problems:
        advice = f"Run {' and '.join(map(format_install_command, sorted(missing)))}.\n" if missing else ""
        raise PluginError(
            f"cannot load {len(problems)} of {len(found)} plugins:\n" + "\n".join(problems) + f"\n{advice}"
            f"{'Or update' if missing else 'Update'} or uninstall them, or list those to load in ${PLUGINS_VARIABLE}."
        )
    return plugins


def _find_missing_distribution(error: BaseException) -> set[str]:
    """Return the name of one of our distributions if an import failed because it is not installed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    distribution = (name or "").replace("_", "-")
    return {distribution} if distribution.startswith(DISTRIBUTION_PREFIX) and "." not in distribution else set()


def _describe_entry_point(entry: EntryPoint) -> str:
    owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
    return f"{entry.name!r} = {entry.value} ({owner})"


def _load(manager: pluggy.PluginManager, entry: EntryPoint) -> Plugin:
    module = entry.load()
    level = getattr(module, "CLIKA_REF_API", None)
    if level != hooks.API_LEVEL:
        stated = "CLIKA_REF_API is not defined" if level is None else f"CLIKA_REF_API is {level!r}"
        raise PluginError(f"{stated}, and this clika-ref supports {hooks.API_LEVEL}. Install a matching version.")
    manager.register(module, entry.name)
    manager.check_pending()
    parts: dict[str, tuple[Any, ...]] = {}
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is module:
                parts[caller.name.removeprefix("clika_ref_")] = tuple(cast("Any", implementation.function()))
    _check_types(parts)
    dist = entry.dist
    return Plugin(entry.name, dist.name if dist else "?", dist.version if dist else "?", **parts)


def _check_types(parts: Mapping[str, tuple[Any, ...]]) -> None:
    for item in parts.get("operators", ()):
        if not isinstance(item, Operator):
            raise PluginError(
                f"clika_ref_operators returned {item!r}, a {type(item).__name__}. Return operators, made by @operator."
            )
    for item in parts.get("visualizers", ()):
        if not isinstance(item, Visualizer):
            raise PluginError(
                f"clika_ref_visualizers returned {item!r}, a {type(item).__name__}; return instances of Visualizer"
            )
    for kind in ("passes", "visualizers"):
        for item in parts.get(kind, ()):
            if not isinstance(getattr(item, "name", None), str):
                raise PluginError(
                    f"clika_ref_{kind} returned {item!r}, which has no `name`. Return instances, not classes."
                )
    for item in parts.get("targets", ()):
        reason = invalid_target_reason(item)
        if reason is not None:
            raise PluginError(f"clika_ref_targets returned {item!r}: {reason}")
