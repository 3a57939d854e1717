"""Every error raised on purpose: one base, and one class per reader; and the category of every warning."""

from __future__ import annotations


class ClikaError(Exception):
    """The base of all errors raised on purpose; any other exception that escapes is a bug of ours."""


class ModelError(ClikaError):
    """For the user: a model, an input or an argument cannot be served; the message says which, where and what to do."""


class PluginError(ClikaError):
    """For the plugin author: a plugin is broken, clashes with another, or was written for another version."""


class PassError(ClikaError):
    """For the pass author: a graph broke an invariant, or a pass changed numbers that it promised to keep."""


class TargetError(ClikaError):
    """For the target author, and whoever runs one: a runtime is missing, refuses a node, or disagrees with eager."""


class ClikaWarning(UserWarning):
    """The category of every warning that this project gives, so that a filter can tell them from others'."""
