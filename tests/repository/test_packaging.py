"""The distributions: consistent metadata, which matches their imports and the documents."""

import ast
import importlib.metadata
import re
import shlex
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from clika_ref.core.errors import format_install_command

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")), ROOT / "conformance"]
STATED = {folder: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in FOLDERS}
PROJECTS = {folder: stated["project"] for folder, stated in STATED.items()}
NAMES = {project["name"]: folder for folder, project in PROJECTS.items()}
EACH = pytest.mark.parametrize("folder", FOLDERS, ids=[project["name"] for project in PROJECTS.values()])
TESTS = ("*_test.py", "test_*.py", "conftest.py")
THE_SUITE = {"clika_ref_conformance/test_conformance.py", "clika_ref_conformance/conftest.py"}
"""Tests that a distribution is there for: ``pytest --pyargs clika_ref_conformance``."""

RANGED = ("torch", "onnx", "onnxruntime", "openvino")


def list_requirements(project):
    """Return all requirements of a distribution, with those of extras."""
    extras = project.get("optional-dependencies", {})
    return [Requirement(text) for text in (*project["dependencies"], *chain(*extras.values()))]


def read_pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if not line.startswith("#")}


def package_folder(folder):
    return folder / PROJECTS[folder]["name"].replace("-", "_")


@pytest.mark.parametrize("field", ["version", "requires-python", "license", "license-files", "classifiers", "readme"])
def test_distributions_state_same_metadata(field):
    """All distributions have the same version, license and other metadata."""
    stated = {name: PROJECTS[folder][field] for name, folder in NAMES.items()}
    assert [name for name, value in stated.items() if value != PROJECTS[ROOT][field]] == []


def test_distributions_use_same_build_system():
    """All distributions have the same build system, and the pinned version fits."""
    assert {str(stated["build-system"]) for stated in STATED.values()} == {str(STATED[ROOT]["build-system"])}
    needed = Requirement(STATED[ROOT]["build-system"]["requires"][0])
    assert needed.specifier.contains(read_pins()[needed.name]), "constraints.txt pins what cannot build them"


@EACH
def test_distribution_has_license_and_description(folder):
    """Each distribution has the license, a README title and a description."""
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    name, first = PROJECTS[folder]["name"], (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0]
    assert first == f"# {name}"
    assert PROJECTS[folder]["description"].endswith(".")


@EACH
def test_distribution_requires_siblings_of_own_version(folder):
    """Each distribution requires the others in its own version."""
    version = Version(PROJECTS[ROOT]["version"])
    wanted = {f">={version.major}.{version.minor}", f"<{version.major}.{version.minor + 1}"}
    for found in list_requirements(PROJECTS[folder]):
        if found.name.startswith("clika-ref"):
            assert found.name in NAMES
            assert {str(part) for part in found.specifier} == wanted


def test_distributions_except_example_have_extra():
    """Every distribution except the example is installed by an extra."""
    brought = [found.name for found in list_requirements(PROJECTS[ROOT]) if found.name in NAMES]
    assert len(brought) == len(set(brought))
    assert set(brought) == NAMES.keys() - {"clika-ref", "clika-ref-example"}


def test_requirements_have_one_range_with_pinned_version():
    """A package has the same range in every distribution, and the pinned version is in it."""
    ranges = {}
    for project in PROJECTS.values():
        for found in list_requirements(project):
            if found.name not in NAMES:
                ranges.setdefault(canonicalize_name(found.name), set()).add(str(found.specifier))
    assert {name: found for name, found in ranges.items() if len(found) > 1} == {}
    pinned = read_pins()
    outside = [n for n, (text,) in ranges.items() if not Requirement(n + text).specifier.contains(pinned[n])]
    assert outside == []


@EACH
def test_distribution_requires_imported_packages_only(folder):
    """Each distribution requires the packages that it imports, and no others."""
    package = package_folder(folder)
    packed = [path for path in package.rglob("*.py") if path.parent.name != "mutants"]  # wheels have no mutants
    imported = {name for path in packed for name in find_imports(path)} - {package.name} - sys.stdlib_module_names
    homes = importlib.metadata.packages_distributions()
    used = {
        canonicalize_name(name.replace("_", "-") if name.startswith("clika_ref") else homes.get(name, [name])[0])
        for name in imported
    }
    stated = {canonicalize_name(found.name) for found in list_requirements(PROJECTS[folder])}
    assert used - stated == set(), "it imports what it does not ask for"
    needless = {name for name in stated - used if name not in NAMES}
    assert needless == set(), "it asks for what it does not import"


@EACH
def test_distribution_contains_no_tests(folder):
    """No distribution contains its own tests."""
    found = {path.relative_to(folder).as_posix() for pattern in TESTS for path in package_folder(folder).rglob(pattern)}
    assert found - THE_SUITE == set(), "move them to a folder tests next to the package: wheels would contain them"


def find_imports(path):
    """Yield the packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value.partition(".")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant))


def test_installing_page_versions_match_requirements():
    """The versions in the document equal the requirements, and the lowest one is tested."""
    text = (ROOT / "docs/installing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    table = {name: rest for name, *rest in rows}
    assert set(table) == {"Python", *RANGED}
    assert table.pop("Python")[0] == PROJECTS[ROOT]["requires-python"]
    ranges = {found.name: found.specifier for project in PROJECTS.values() for found in list_requirements(project)}
    for name, (allowed, lowest, usual) in table.items():
        assert Requirement(name + allowed).specifier == ranges[name]
        assert Version(lowest) == Version(allowed.removeprefix(">=").partition(",")[0])
        assert usual == read_pins()[name]


def test_installing_page_lists_every_distribution():
    """The document lists every distribution with its extra."""
    text = (ROOT / "docs/installing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (?:`clika-ref\[(\w+)\]`)? ?\|$", text, re.MULTILINE)
    assert [name for name, _ in rows if name not in NAMES] == []
    assert {name for name, _ in rows} == NAMES.keys()
    extras = PROJECTS[ROOT]["optional-dependencies"]
    for name, extra in rows:
        holding = [known for known, texts in extras.items() if name in {Requirement(text).name for text in texts}]
        assert holding == ([extra] if extra else [])


INSTRUCTIONS = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(folder / "README.md" for folder in FOLDERS),
    ROOT / "plugins/cli/clika_ref_cli/plugin_template/README.md.template",
]
"""The documents with installation commands."""


def find_pip_commands(path):
    """Yield the words after ``pip install`` of each command of a document, without options and their values."""
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"`pip install ([^`\n]+)`", text):
        words = shlex.split(re.sub(r"--find-links \S+", "", command))
        yield [word for word in words if word not in {"-e", "--editable"}]


def test_pip_commands_in_documents_name_existing_distributions():
    """Each word is a folder with a distribution, one of ours with its extras, or a package that we ask for."""
    extras = {f"{name}[{extra}]" for name, folder in NAMES.items() for extra in optional_requirements(folder)}
    packages = {canonicalize_name(found.name) for folder in FOLDERS for found in list_requirements(PROJECTS[folder])}
    unknown = [
        (path.relative_to(ROOT).as_posix(), word)
        for path in INSTRUCTIONS
        for words in find_pip_commands(path)
        for word in words
        if (ROOT / word) not in FOLDERS
        and not all(part in {*NAMES, *extras} or canonicalize_name(part) in packages for part in expand_extras(word))
    ]
    assert unknown == []


def optional_requirements(folder):
    return PROJECTS[folder].get("optional-dependencies", {})


def expand_extras(word):
    """Return ``name[a,b]`` as ``name[a]`` and ``name[b]``."""
    found = re.fullmatch(r"([\w-]+)\[([\w,]+)\]", word)
    return [f"{found[1]}[{extra}]" for extra in found[2].split(",")] if found else [word]


@pytest.mark.parametrize("path", ["README.md", "docs/installing.md"])
def test_clone_command_of_document_installs_the_standard_extra(path):
    (command,) = [words for words in find_pip_commands(ROOT / path) if "." in words and len(words) > 1]
    installed = {PROJECTS[(ROOT / word).resolve()]["name"] for word in command}
    standard = {Requirement(text).name for text in PROJECTS[ROOT]["optional-dependencies"]["standard"]}
    assert installed == standard | {"clika-ref"}


def test_scaffold_clone_command_installs_standard_and_suite():
    (command,) = [words for words in find_pip_commands(INSTRUCTIONS[-1]) if "." in words]
    extras = PROJECTS[ROOT]["optional-dependencies"]
    wanted = {Requirement(text).name for extra in ("standard", "conformance") for text in extras[extra]}
    assert {PROJECTS[(ROOT / word).resolve()]["name"] for word in command} == wanted | {"clika-ref"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clika-ref"])
def test_install_command_in_errors_names_distribution_and_folder(name):
    command = re.fullmatch(
        r"pip install ([\w-]+) \(in a clone: pip install ([\w/]+); .*\)", format_install_command(name)
    )
    assert (command[1], ROOT / command[2]) == (name, NAMES[name])


def test_makefile_installs_every_distribution():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = [
        word for line in re.findall(r"^(?:RUNTIME|DEVELOPMENT) := (.*)$", text, re.MULTILINE) for word in line.split()
    ]
    assert sorted((ROOT / word).resolve() for word in words) == sorted(FOLDERS)
