"""Levels of the suite by name, and the tasks of a plan: those of the requested levels and subjects."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from clika_ref.core.errors import ClikaError, TargetError
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import ExpectedFailure, ExpectedFailureScopes
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import LevelModule, Suite

LEVELS: Mapping[str, str] = {
    name: f"clika_ref_conformance.levels.{name}"
    for name in (
        "contract",
        "operators",
        "passes",
        "pairs",
        "graphs",
        "blocks",
        "dynamic",
        "artifacts",
        "quantization",
        "neighborhoods",
    )
}
"""Modules of the levels, in execution order."""


def select_levels(requested: Sequence[str], levels: Mapping[str, str] = LEVELS) -> dict[str, str]:
    """Return the requested levels, in the order of the plan; all of them if ``requested`` is empty.

    Raises:
        ClikaError: a level is unknown.
    """
    unknown = [name for name in requested if name not in levels]
    if unknown:
        near = difflib.get_close_matches(unknown[0], levels, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ClikaError(f"there is no level {unknown[0]!r}{hint} Levels are {', '.join(levels)}.")
    return {name: module for name, module in levels.items() if not requested or name in requested}


def import_level(module: str) -> LevelModule:
    """Import the module of a level."""
    return cast("LevelModule", importlib.import_module(module))


def list_tasks(suite: Suite, levels: Mapping[str, str]) -> list[Task]:
    """Return the tasks of the plan: those of the given levels with a name that contains a word of ``suite.subjects``.

    Raises:
        ClikaError: no task name contains a word, or two tasks have the same name.
    """
    every = [task for module in levels.values() for task in import_level(module).tasks(suite)]
    duplicates = sorted({str(task) for task in every if every.count(task) > 1}) if len(set(every)) < len(every) else []
    if duplicates:
        raise ClikaError(
            f"the plan contains tasks twice: {', '.join(duplicates)}. Give each task of a level its own subject."
        )
    without = [word for word in suite.subjects if not any(_is_selected(task, [word]) for task in every)]
    if without or not every:
        subjects = sorted({task.subject for task in every})
        near = [m for word in without for m in difflib.get_close_matches(word, subjects)]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ClikaError(
            f"no task of the levels {', '.join(levels)} contains {' or '.join(without) or 'anything'}{hint}"
        )
    return [task for task in every if _is_selected(task, suite.subjects)]


def find_scopes(
    xfails: Sequence[ExpectedFailure], suite: Suite, available_levels: Mapping[str, str]
) -> ExpectedFailureScopes:
    """Return the tasks that each expected failure concerns; reject entries that concern no task of any profile.

    Raises:
        TargetError: there are such entries, in the selected tasks or not; the message lists all of them.
    """
    tasks = _list_tasks_of_all_profiles(suite, available_levels) if xfails else []
    scopes = {entry: frozenset(filter(entry.matches_task, tasks)) for entry in xfails}
    strange = [entry.task for entry, mine in scopes.items() if not mine]
    if strange:
        near = [difflib.get_close_matches(entry, [*map(str, tasks)], 1) for entry in strange]
        shown = [f"{t!r}{f' (did you mean {n[0]!r}?)' if n else ''}" for t, n in zip(strange, near, strict=True)]
        raise TargetError(f"[[xfail]] matches no task of any level and profile: {', '.join(shown)}")
    return scopes


def _list_tasks_of_all_profiles(suite: Suite, available_levels: Mapping[str, str]) -> list[Task]:
    """Return the tasks of all profiles, in 2 s, with all artifact tasks, as the seed selects only a share of them."""
    profiles = [replace(profile, share_of_artifacts=1.0) for profile in (suite.profile, *PROFILES.values())]
    suites = [replace(suite, profile=profile) for profile in profiles]
    levels = [import_level(module) for module in available_levels.values()]
    return [*dict.fromkeys(task for level in levels for each in suites for task in level.tasks(each))]


def _is_selected(task: Task, words: Sequence[str]) -> bool:
    return not words or any(word == task.subject or word in str(task) for word in words)
