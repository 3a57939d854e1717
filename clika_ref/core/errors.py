"""The error classes, one for each kind of reader, the warning category, and parts of messages."""

from __future__ import annotations

import re


class ClikaError(Exception):
    """Base class of all errors raised on purpose. Any other exception that escapes is a bug in clika-ref."""


class ModelError(ClikaError):
    """For the user: a model, input or argument is not supported. The message names it, its location and the fix."""


class PluginError(ClikaError):
    """For the plugin author: a plugin is broken, clashes with another, targets another version, or is not installed."""


class PassError(ClikaError):
    """For the pass author: a graph broke an invariant, or a pass changed numbers beyond its error class."""


class TargetError(ClikaError):
    """For the author or user of a target: a runtime is missing, rejects a node, or disagrees with eager."""


class DisagreementError(TargetError):
    """For the user of a target: a runtime computes other results from an artifact than the module."""


class ClikaWarning(UserWarning):
    """Category of every warning of this project, so that filters can select them."""


DISTRIBUTION_PREFIX = "clika-ref-"
"""Prefix of the names of our distributions."""


def format_install_command(distribution: str) -> str:
    """Return the command that installs a distribution; for one of ours, also its forms for a clone and for wheels.

    >>> format_install_command("clika-ref-cli")
    'pip install clika-ref-cli (in a clone: pip install plugins/cli; from wheels: add --find-links FOLDER)'
    >>> format_install_command("my-plugin")
    'pip install my-plugin'
    """
    if not distribution.startswith(DISTRIBUTION_PREFIX):
        return f"pip install {distribution}"
    name = distribution.removeprefix(DISTRIBUTION_PREFIX)
    folder = name if name == "conformance" else f"plugins/{name}"
    return f"pip install {distribution} (in a clone: pip install {folder}; from wheels: add --find-links FOLDER)"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural if the count is not 1.

    Args:
        count: the number of items.
        noun: the singular; words from "before", "of" or "with" on stay as they are.

    >>> format_count(1, "node"), format_count(1018, "unnecessary node"), format_count(2, "batch")
    ('1 node', '1,018 unnecessary nodes', '2 batches')
    >>> format_count(3, "node with constant inputs")
    '3 nodes with constant inputs'
    """
    if count == 1:
        return f"1 {noun}"
    head, *rest = re.split(r"(?= (?:before|of|with) )", noun, maxsplit=1)
    ending = "es" if head.endswith(("ch", "s", "sh", "x")) else "s"
    return f"{count:,} {head}{ending}{''.join(rest)}"
