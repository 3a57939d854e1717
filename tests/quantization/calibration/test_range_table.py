"""Range tables are merged, saved and loaded unchanged; other files are rejected."""

import re

import pytest
import safetensors.torch
import torch
from seeded_tensors import randn

from clika_ref.core.errors import ModelError
from clika_ref.quantization.calibration import range_table
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.calibration.statistics import measure_tensor


def make_table(*names, seed=0):
    found = RangeTable()
    elements = {n: randn(50, seed=seed + i) for i, n in enumerate(names)}
    found.add({name: [measure_tensor(x)] for name, x in elements.items()})
    return found


def read_facts(found):
    return {
        name: (s.low, s.high, s.batches, s.lows.value, s.highs.value, s.is_unbounded, s.histogram.counts.tolist())
        for name, s in found.values.items()
    }


def test_range_table_save_load_round_trip(tmp_path):
    """A table is the same after saving and loading."""
    found = make_table("x", "y")
    found.add({"mask": [measure_tensor(torch.tensor([-torch.inf]))]})
    found.save(tmp_path / "ranges")
    loaded = RangeTable.load(tmp_path / "ranges")
    assert read_facts(loaded) == read_facts(found)
    assert loaded.batches == 2
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "ranges").read_bytes()


def test_range_table_empty_saved_and_loaded(tmp_path):
    """An empty table is saved and loaded."""
    RangeTable().save(tmp_path / "ranges")
    assert RangeTable.load(tmp_path / "ranges").values == {}


def test_range_table_merge_equals_table_of_all_data():
    """Tables of parts of the data merge to the table of all data."""
    whole = make_table("x", "y")
    whole.merge(make_table("y", "z", seed=5))
    assert whole.batches == 2
    assert list(whole.values) == ["x", "y", "z"]
    other = make_table("y", "z", seed=5)
    other.merge(make_table("x", "y"))
    assert read_facts(other) == read_facts(whole)


def test_range_table_load_other_file_raises(tmp_path):
    """A file that is no range table raises an error that names it."""
    (tmp_path / "text").write_text("no")
    safetensors.torch.save_file({"counts": torch.zeros(1)}, tmp_path / "other")
    for name in ("text", "other", "missing"):
        with pytest.raises(
            ModelError, match=rf"{re.escape(str(tmp_path / name))} is not a range table: .*Calibrate again"
        ):
            RangeTable.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            1,
            r"^cannot load .*ranges: it has format {newer}, but .* reads formats up to {own}\. Update clika-ref\.$",
        ),
        (-1, "^cannot load .*ranges: it was saved by a development version; compile again$"),
    ],
)
def test_range_table_load_other_version_raises(tmp_path, monkeypatch, change, message):
    """A newer version raises an error with both versions, an older one that of a development version."""
    own = range_table.RANGE_TABLE_VERSION
    with monkeypatch.context() as patched:
        patched.setattr(range_table, "RANGE_TABLE_VERSION", own + change)
        make_table("x").save(tmp_path / "ranges")
    with pytest.raises(ModelError, match=message.format(newer=own + 1, own=own)):
        RangeTable.load(tmp_path / "ranges")
