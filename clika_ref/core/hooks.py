"""The hooks that a plugin may implement: empty functions with the manual in their docstrings.

A plugin is a module (or object) named by an entry point of the group ``clika_ref``. It implements any of these
functions with ``@hookimpl``, and sets ``CLIKA_REF_API = 1``, the API level that it was written for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from clika_ref.core.operators import Operator
    from clika_ref.core.passes import Pass
    from clika_ref.core.targets import Target
    from clika_ref.core.visualizers import Visualizer

ENTRY_POINT_GROUP = "clika_ref"
"""The entry-point group, and the pluggy project name."""

API_LEVEL = 1
"""The API level, incremented by each change that may break plugins of the previous level."""

hookspec = pluggy.HookspecMarker(ENTRY_POINT_GROUP)
hookimpl = pluggy.HookimplMarker(ENTRY_POINT_GROUP)
"""Mark a plugin function as the implementation of the hook with the same name."""


@hookspec
def clika_ref_operators() -> Sequence[Operator]:  # type: ignore[empty-body]
    """Return the operators that this plugin declares. No other plugin may claim their names and ATen overloads."""


@hookspec
def clika_ref_passes() -> Sequence[Pass]:  # type: ignore[empty-body]
    """Return the passes that this plugin adds to the standard pipeline."""


@hookspec
def clika_ref_targets() -> Sequence[Target]:  # type: ignore[empty-body]
    """Return the targets that this plugin adds. Do not import the runtime here; `Target.load` may import it."""


@hookspec
def clika_ref_visualizers() -> Sequence[Visualizer]:  # type: ignore[empty-body]
    """Return the visualizers that this plugin adds, which draw graphs and write reports of modules.

    `ClikaModule.clika_visualize` and `ClikaModule.clika_report` use the first visualizer of the first plugin that has
    one, in order of entry-point names.
    """


@hookspec
def clika_ref_tracing() -> Sequence[Callable[[], AbstractContextManager[None]]]:  # type: ignore[empty-body]
    """Return functions that make a context for each trace of a model.

    A context replaces functions of a library that fix sizes or read values by forms that a trace can record, and
    restores them. It must not import the library: a model that uses it has done so.
    """
