"""The parts of `make package`: missing files of a wheel are reported, and the README's first example is short."""

import zipfile

import pytest

from releasing.building import differences
from releasing.code_lines import CodeSize, comparison_table, group_of, measure
from releasing.distributions import distributions, lowest_versions, read_pinned_versions
from releasing.trying import MAX_README_LINES, readme_lines


def test_readme_first_int8_artifact_in_twelve_lines():
    """The README takes at most twelve lines to the first INT8 artifact."""
    lines = readme_lines()
    assert len(lines) <= MAX_README_LINES == 12
    assert "from own import model" in lines, "the model of the README is not the one line that a newcomer changes"


@pytest.fixture
def example():
    (found,) = [found for found in distributions() if found.name == "clika-ref-example"]
    return found


@pytest.fixture
def wheel(tmp_path):
    """Write a wheel of some files."""

    def write(names):
        path = tmp_path / "clika_ref_example-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        return path

    return write


DESCRIBED = [f"clika_ref_example-0.1.0.dist-info/{name}" for name in ("METADATA", "licenses/LICENSE", "top_level.txt")]
FILES = [f"clika_ref_example/{name}" for name in ("__init__.py", "plugin.py", "py.typed", "reference.py")]


def test_differences_complete_wheel_empty(example, wheel):
    """A complete wheel has no differences."""
    assert list(differences(example, wheel([*FILES, *DESCRIBED]))) == []


@pytest.mark.parametrize("name", [*FILES[:3], DESCRIBED[1]])
def test_differences_missing_file_reported(example, wheel, name):
    """A missing file of a wheel is reported."""
    names = [other for other in (*FILES, *DESCRIBED) if other != name]
    (message,) = differences(example, wheel(names))
    assert f"{name} is missing" in message


def test_differences_untracked_file_reported(example, wheel):
    """A file in a wheel that is not in git is reported."""
    (message,) = differences(example, wheel([*FILES, *DESCRIBED, "clika_ref_example/old.py"]))
    assert "clika_ref_example/old.py is in the wheel, but not in git" in message


def test_wheel_of_the_conformance_suite_has_no_mutants():
    (suite,) = [found for found in distributions() if found.name == "clika-ref-conformance"]
    assert suite.excluded_folders == ["clika_ref_conformance/mutants/"]
    assert "clika_ref_conformance/cli.py" in suite.files()
    assert not [path for path in suite.files() if "mutants" in path]


def test_lowest_versions_not_above_pinned():
    """The lowest versions are not newer than the pinned ones."""

    def split_version(version):
        return [int(part) for part in version.split(".")]

    lowest, usual = lowest_versions(), read_pinned_versions()
    assert {
        name: version for name, version in lowest.items() if split_version(version) > split_version(usual[name])
    } == {}


COUNTED = '''
"""A module."""

LIMIT = 3  # of all
"""An attribute."""


def double(x):
    """Double it.

    Twice.
    """
    # twice
    return (
        2 * x
    )
'''


def test_code_size_without_comments_and_docstrings():
    assert measure(COUNTED) == CodeSize(lines=5, statements=3)


def test_code_size_of_joined_lines_has_equal_statements():
    assert measure(COUNTED.replace("(\n        2 * x\n    )", "2 * x")) == CodeSize(lines=3, statements=3)


def test_code_groups_leave_tests_out():
    assert group_of("conformance/clika_ref_conformance/mutants/norms.py") == "conformance mutants"
    assert group_of("plugins/aten/clika_ref_aten/gating.py") == "plugins/aten"
    assert group_of("docs/building/check_site.py") == "docs/building"
    assert group_of("plugins/aten/tests/test_gating.py") is group_of("tests/core/test_ir.py") is None


def test_code_size_table_shows_changes_and_sum():
    after = {"clika_ref": CodeSize(1000, 850), "releasing": CodeSize(50, 40)}
    table = comparison_table({"clika_ref": CodeSize(1200, 900)}, after, "HEAD")
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["clika_ref", "1,200", "1,000", "-200", "900", "850", "-50"],
        ["releasing", "0", "50", "+50", "0", "40", "+40"],
        ["in", "wheels", "1,200", "1,000", "-200", "900", "850", "-50"],
        ["total", "1,200", "1,050", "-150", "900", "890", "-10"],
    ]
