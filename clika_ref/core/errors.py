"""The error classes, one for each kind of reader, and the warning category."""

from __future__ import annotations


class ClikaError(Exception):
    """Base class of all errors raised on purpose. Any other exception that escapes is a bug in clika-ref."""


class ModelError(ClikaError):
    """For the user: a model, input or argument is not supported. The message names it, its location and the fix."""


class PluginError(ClikaError):
    """For the plugin author: a plugin is broken, clashes with another, or targets another version."""


class PassError(ClikaError):
    """For the pass author: a graph broke an invariant, or a pass changed numbers beyond its error class."""


class TargetError(ClikaError):
    """For the author or user of a target: a runtime is missing, rejects a node, or disagrees with eager."""


class DisagreementError(TargetError):
    """For the user of a target: a runtime computes other results from an artifact than the module."""


class ClikaWarning(UserWarning):
    """Category of every warning of this project, so that filters can select them."""
