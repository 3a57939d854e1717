"""Messages between a run and its workers: lines of JSON, so that reading a message executes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from clika_ref_conformance.cases import Task
from clika_ref_conformance.profiles import Profile
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.verdicts import Comparison, Verdict


@dataclass(frozen=True)
class WorkerSetup:
    """The first line that a worker reads: the target, the profile, the levels, and the folders for files."""

    target: str
    profile: Profile
    levels: Mapping[str, str]
    """Names of the levels and their modules."""
    folder: str
    """Folder of the run, for artifacts."""
    out: str = ""
    """Folder of the report, for reproducers; none are written if empty."""
    path: tuple[str, ...] = field(default=())
    """``sys.path`` of the run."""
    modify_suite: str = ""
    """``package.module:function`` that changes the suite before planning, such as one that seeds a fault."""
    argument: str = ""
    """Argument of ``modify_suite``, after the suite."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> WorkerSetup:
        """Return the setup that `as_json` was called on."""
        profile: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document["profile"].items()}
        return cls(**{**document, "profile": Profile(**profile), "path": tuple(document["path"])})


def result_to_json(result: CheckResult) -> dict[str, Any]:
    """Return a result as JSON; floats that are not finite keep the names of Python's JSON."""
    return {
        **_collect_fields(result),
        "task": _collect_fields(result.task),
        "comparison": _collect_fields(result.comparison),
    }


def _collect_fields(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without copies; `asdict` copies each, which is slow for thousands of checks."""
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def result_of_json(document: Mapping[str, Any]) -> CheckResult:
    """Return the result that `result_to_json` was called on."""
    comparison = {**document["comparison"], "verdict": Verdict(document["comparison"]["verdict"])}
    lists = {name: tuple(document[name]) for name in ("deviations", "applicable")}
    return CheckResult(
        **{**document, **lists, "task": Task.of_json(document["task"]), "comparison": Comparison(**comparison)}
    )
