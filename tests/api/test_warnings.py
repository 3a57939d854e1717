"""Every warning has the category `ClikaWarning`, so that users can filter ours."""

import ast
import warnings
from pathlib import Path

import pytest

import clika_ref
from clika_ref import ClikaWarning

ROOT = Path(__file__).parents[2]
SWEPT = ("clika_ref", "plugins", "conformance")


def find_warnings_without_category(source: str) -> list[int]:
    """Return the lines that raise a warning of another category than ClikaWarning."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in ("warn", "warn_explicit")]
    found += [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "warn"]
    return [c.lineno for c in found if not (len(c.args) > 1 and ast.unparse(c.args[1]).endswith("ClikaWarning"))]


@pytest.mark.slow
def test_warnings_in_packages_have_clika_category():
    """Each warning in our packages has the category `ClikaWarning`."""
    files = [p for folder in SWEPT for p in (ROOT / folder).rglob("*.py") if "tests" not in p.parts]
    assert len(files) > 100
    found = {str(p.relative_to(ROOT)): find_warnings_without_category(p.read_text(encoding="utf-8")) for p in files}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("warnings.warn(text)", [1]),
        ("x = 1\nwarnings.warn(text, UserWarning, stacklevel=2)", [2]),
        ("from warnings import warn\nwarn(text)", [2]),
        ("warnings.warn(text, ClikaWarning, stacklevel=2)", []),
        ("log.warning(text)", []),
    ],
)
def test_warnings_without_category_finds_other_category(source, lines):
    """The check finds warnings without the category `ClikaWarning`."""
    assert find_warnings_without_category(source) == lines


def test_clika_warning_public_subclass_of_user_warning():
    """`ClikaWarning` is public, and filters can select it among `UserWarning`s."""
    assert issubclass(ClikaWarning, UserWarning)
    assert clika_ref.ClikaWarning is ClikaWarning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ClikaWarning)
        warnings.warn("hidden", ClikaWarning, stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn("seen", UserWarning, stacklevel=1)
