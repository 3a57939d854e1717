"""Profiles ``quick``, ``ci`` and ``nightly``: how thorough a run is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from clika_ref.core.errors import ClikaError


@dataclass(frozen=True)
class Profile:
    """How thorough a run is. Generation is seeded, so two runs with the same profile and seed plan the same checks."""

    name: str
    seed: int = 0
    dtypes: tuple[str, ...] = ("float32", "int64")
    """Columns of the operator level. An operator that takes none of them is run in the dtypes that it takes."""
    rows: int = 12
    """Maximum number of covering rows per operator and dtype."""
    drawn: int = 20
    """Drawn calls of an operator in its first dtype, after the covering rows with their mandatory vectors."""
    drawn_further: int = 20
    """Drawn calls in each further dtype: few bugs appear there and not in the first."""
    pair_operators: int = 50
    """Number of most-used operators to run in every pair."""
    graphs: int = 200
    pass_graphs: int = 200
    """Random graphs per pass, in addition to its motifs."""
    shape_profiles: int = 20
    trusts_eager: bool = False
    """Whether a result that is bit-identical to eager's passes, whatever its distance from the exact result."""
    share_of_artifacts: float = 0.1
    """Share of cases that is also saved and loaded in a fresh process."""
    most_failures: int = 0
    """Failures with one verdict after which the rest of a task is skipped as redundant; 0 for no limit."""
    shrink_seconds: float = 20.0
    case_seconds: float = 30.0
    """Time in seconds after which a case counts as a hang."""
    memory_bytes: int = 4 * 2**30
    """Limit on the private memory of a worker; 0 for no limit."""


ALL_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool")

PROFILES = {
    "quick": Profile(
        "quick", rows=16, drawn=3, drawn_further=2, graphs=80, pass_graphs=150, trusts_eager=True, most_failures=5
    ),
    "ci": Profile(
        "ci",
        dtypes=ALL_DTYPES,
        rows=40,
        drawn=100,
        drawn_further=10,
        graphs=2000,
        pass_graphs=1000,
        shape_profiles=70,
        most_failures=10,
    ),
    "nightly": Profile(
        "nightly",
        dtypes=ALL_DTYPES,
        rows=200,
        drawn=1000,
        drawn_further=200,
        graphs=10_000,
        pass_graphs=10_000,
        shape_profiles=1000,
        most_failures=50,
    ),
}


MOST_THOROUGH_PROFILE = "nightly"


def select_profile(name: str, seed: int | None = None) -> Profile:
    """Return a profile with a seed. Without ``seed``, it is 0, or drawn at random for ``nightly``.

    Raises:
        ClikaError: there is no such profile.
    """
    if name not in PROFILES:
        raise ClikaError(f"there is no profile {name!r}; profiles are {', '.join(PROFILES)}")
    if seed is None:
        seed = secrets.randbelow(2**31) if name == "nightly" else 0
    return replace(PROFILES[name], seed=seed)


def apply_limits(profile: Profile, memory_gib: float | None = None, case_seconds: float | None = None) -> Profile:
    """Return a profile with the user's limits. A limit of None keeps the profile's own."""
    memory_bytes = profile.memory_bytes if memory_gib is None else int(memory_gib * 2**30)
    seconds = profile.case_seconds if case_seconds is None else case_seconds
    return replace(profile, memory_bytes=memory_bytes, case_seconds=seconds)
