"""The commands of ``clika-ref`` with their arguments and options, read from the installed entry points."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from releasing.baseline.messages import normalize_text

SCRIPT = "clika-ref"
FURTHER_COMMANDS = "clika_ref.commands"
"""The entry-point group of commands that other distributions add."""


def load_main() -> Any:
    """Return the function that the console script calls."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=SCRIPT)
    return script.load()


def describe_commands() -> dict[str, str]:
    """Return each argument and option under ``command option``, and each command by itself."""
    main = load_main()
    (app,) = {id(v): v for v in vars(sys.modules[main.__module__]).values() if isinstance(v, typer.Typer)}.values()
    found = dict(_describe(get_command(app), SCRIPT))
    for entry in importlib.metadata.entry_points(group=FURTHER_COMMANDS):
        found |= _describe(get_command(entry.load()), f"{SCRIPT} {entry.name}")
    return found


def _describe(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a command and of all commands below it."""
    yield name, "command"
    for parameter in command.params:
        shown = "/".join([*parameter.opts, *parameter.secondary_opts])
        facts = {
            "type": inspect.formatannotation(parameter.type_descriptor.annotation),
            "default": parameter.default,
            "required": parameter.required,
            "multiple": getattr(parameter, "multiple", False),
            "metavar": parameter.metavar,
        }
        text = " ".join(f"{key}={value!r}" for key, value in facts.items() if value is not None and value is not False)
        yield f"{name} {shown}", normalize_text(text)
    for inner, found in getattr(command, "commands", {}).items():
        yield from _describe(found, f"{name} {inner}")
