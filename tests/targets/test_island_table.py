"""Tables of operators between INT8 layers: the nearest measurement, and the scheme without slower operators."""

import pytest

from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.targets.island_table import (
    installed_version,
    read_measurements,
    select_measurement,
    without_operators,
    write_measurement,
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "islands.toml"
    write_measurement(path, "1.30.0", "x86-vnni", {"add": 0.8, "cat": 1.2})
    write_measurement(path, "1.40.2", "x86-vnni", {"add": 0.98, "cat": 0.7})
    write_measurement(path, "1.30.0", "arm", {"add": 2.0})
    return path


def test_write_measurement_replaces_same_runtime_and_cpu(table):
    """A second measurement of a runtime on a CPU replaces the first one; others stay."""
    write_measurement(table, "1.30.0", "x86-vnni", {"add": 0.5})
    found = {(m.cpu, m.runtime): dict(m.ratios) for m in read_measurements(table)}
    assert found == {
        ("arm", "1.30.0"): {"add": 2.0},
        ("x86-vnni", "1.30.0"): {"add": 0.5},
        ("x86-vnni", "1.40.2"): {"add": 0.98, "cat": 0.7},
    }


@pytest.mark.parametrize(
    ("runtime", "cpu", "expected"),
    [
        ("1.30.0", "x86-vnni", ("1.30.0", {"cat"})),
        ("1.40.2", "x86-vnni", ("1.40.2", {"add"})),  # 0.98 is no gain
        ("1.39.0", "x86-vnni", ("1.40.2", {"add"})),
        ("2.0.0", "x86-vnni", ("1.30.0", {"cat"})),
        ("1.40.2", "arm", ("1.30.0", {"add"})),
        ("1.30.0", "x86", ("1.30.0", {"add"})),
        ("", "x86-vnni", ("1.30.0", {"cat"})),
    ],
)
def test_select_measurement_nearest_runtime_with_note(table, runtime, cpu, expected):
    """The measurement of the same CPU and the nearest version is used; the note names both if they differ."""
    found, note = select_measurement(table, runtime, cpu)
    assert (found.runtime, found.slower) == expected
    assert bool(note) is (bool(runtime) and (found.runtime, found.cpu) != (runtime, cpu))
    assert not note or (f"version {found.runtime} on {found.cpu}" in note and f"version {runtime} on {cpu}" in note)


def test_without_operators_leaves_layers():
    """Only operators between layers are removed, from each field that lists them."""
    scheme = QuantizationScheme(
        QuantizedType(),
        QuantizedType(is_signed=True),
        layers=frozenset({"conv2d"}),
        elementwise=frozenset({"add", "mul"}),
        data_movement=frozenset({"reshape", "max_pool2d"}),
        shared_qparams=frozenset({"cat"}),
    )
    found = without_operators(scheme, {"add", "max_pool2d", "cat", "conv2d"})
    assert (found.elementwise, found.data_movement, found.shared_qparams) == ({"mul"}, {"reshape"}, set())
    assert found.layers == {"conv2d"}


def test_installed_version_of_missing_distribution_is_empty():
    """A missing distribution has no version."""
    assert installed_version("no-such-distribution") == ""
    assert installed_version("torch")
