"""The hooks that a plugin may implement, each an empty function whose docstring is the manual.

A plugin is a module (or object) named by an entry point of the group ``clika_ref``. It implements any of these
functions under ``@hookimpl`` and states the level of this interface that it was written for: ``CLIKA_REF_API = 1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clika_ref.core.operators import Operator
    from clika_ref.core.passes import Pass
    from clika_ref.core.targets import Target

GROUP = "clika_ref"
"""The entry-point group, and the name of the pluggy project."""

API_LEVEL = 1
"""Raised whenever a plugin written for the level below may break."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plugin as the implementation of the hook of the same name."""


@hookspec
def clika_ref_operators() -> Sequence[Operator]:  # type: ignore[empty-body]
    """Return the operators that this plugin declares; their names and ATen overloads must be unclaimed."""


@hookspec
def clika_ref_passes() -> Sequence[Pass]:  # type: ignore[empty-body]
    """Return the passes that this plugin adds to the standard pipeline."""


@hookspec
def clika_ref_targets() -> Sequence[Target]:  # type: ignore[empty-body]
    """Return the targets that this plugin can compile for. Do not import the runtime here: `Target.missing` may."""
