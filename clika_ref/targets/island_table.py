"""Tables of operators between INT8 layers: whether a runtime runs them faster in INT8 or in float, as measured."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clika_ref.core.quantization_scheme import QuantizationScheme

MAX_INT8_RATIO = 0.97
"""Ratio of the times up to which an operator runs in INT8: without a gain, float is more accurate."""

HEADER = """# Times of chains of INT8 convolutions with an operator between them: with the operator in INT8, divided by
# those with the operator in float. `python -m benchmarks islands --write` measures them. ARM was not measured.
"""


@dataclass(frozen=True, slots=True)
class IslandMeasurement:
    """The ratios of one runtime version on one class of CPUs."""

    runtime: str
    """Version of the runtime."""
    cpu: str
    """The class of the CPU: `clika_ref.targets.cpu.cpu_class`."""
    ratios: Mapping[str, float]
    """Time with an operator in INT8, divided by that in float, by operator."""

    @property
    def slower(self) -> frozenset[str]:
        """The operators that INT8 does not make faster."""
        return frozenset(op for op, ratio in self.ratios.items() if ratio > MAX_INT8_RATIO)


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def without_operators(scheme: QuantizationScheme, operators: Collection[str]) -> QuantizationScheme:
    """Return a scheme that leaves operators between layers in float."""
    return replace(
        scheme,
        elementwise=scheme.elementwise - {*operators},
        data_movement=scheme.data_movement - {*operators},
        shared_qparams=scheme.shared_qparams - {*operators},
    )


def read_measurements(path: Path) -> list[IslandMeasurement]:
    """Return the measurements of a table."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return [IslandMeasurement(str(e["runtime"]), str(e["cpu"]), dict(e["ratios"])) for e in document["measured"]]


def select_measurement(path: Path, runtime: str, cpu: str) -> tuple[IslandMeasurement, str]:
    """Return the nearest measurement of a table, and a note if the runtime or the CPU is another one.

    Args:
        path: the table.
        runtime: version of the runtime here; empty if it is not installed.
        cpu: class of the CPU here.
    """
    found = min(read_measurements(path), key=lambda m: (m.cpu != cpu, _distance(m.runtime, runtime)))
    if (found.cpu, found.runtime) == (cpu, runtime) or not runtime:
        return found, ""
    return found, (
        f"operators between INT8 layers are placed as measured with version {found.runtime} on {found.cpu}; version "
        f"{runtime} on {cpu} was not measured"
    )


def _distance(one: str, other: str) -> list[int]:
    """Return how far two versions are apart, the first part first."""
    pairs = zip(_parts(one), _parts(other), strict=False)
    return [abs(a - b) for a, b in pairs]


def _parts(text: str) -> list[int]:
    return [int(part) for part in text.split("+", maxsplit=1)[0].split(".") if part.isdecimal()]


def write_measurement(path: Path, runtime: str, cpu: str, ratios: Mapping[str, float]) -> None:
    """Write a measurement to a table, in place of an earlier one of the same runtime and CPU."""
    kept = [m for m in read_measurements(path) if (m.runtime, m.cpu) != (runtime, cpu)] if path.exists() else []
    found: list[Any] = sorted([*kept, IslandMeasurement(runtime, cpu, ratios)], key=lambda m: (m.cpu, m.runtime))
    blocks = [
        f'\n[[measured]]\nruntime = "{m.runtime}"\ncpu = "{m.cpu}"\n\n[measured.ratios]\n'
        + "".join(f"{op} = {ratio:.2f}\n" for op, ratio in m.ratios.items())
        for m in found
    ]
    path.write_text(HEADER + "".join(blocks), encoding="utf-8")
