"""What `make package` relies on: a file that a wheel lacks is told, and the README's way to an artifact is short."""

import zipfile

import pytest

from releasing.building import differences
from releasing.distributions import distributions, lowest_versions, pinned
from releasing.trying import LINES, readme_lines


def test_a_first_artifact_in_integers_takes_twelve_lines_of_the_readme():
    lines = readme_lines()
    assert len(lines) <= LINES == 12
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


def test_a_wheel_with_each_file_passes(example, wheel):
    assert list(differences(example, wheel([*FILES, *DESCRIBED]))) == []


@pytest.mark.parametrize("name", [*FILES[:3], DESCRIBED[1]])
def test_a_file_that_a_wheel_lacks_is_told(example, wheel, name):
    names = [other for other in (*FILES, *DESCRIBED) if other != name]
    (told,) = differences(example, wheel(names))
    assert f"{name} is missing" in told


def test_a_file_that_is_in_no_folder_of_git_is_told(example, wheel):
    (told,) = differences(example, wheel([*FILES, *DESCRIBED, "clika_ref_example/old.py"]))
    assert "clika_ref_example/old.py is in there, and in no folder of git" in told


def test_the_lowest_versions_are_allowed_and_are_no_newer_than_those_of_development():
    def parts(version):
        return [int(part) for part in version.split(".")]

    lowest, usual = lowest_versions(), pinned()
    assert {name: version for name, version in lowest.items() if parts(version) > parts(usual[name])} == {}
