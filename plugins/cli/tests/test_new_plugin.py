"""``clika-ref new-plugin``: valid names, written files, and complete or no output."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from clika_ref_cli import cli
from clika_ref_cli.new_plugin import MAX_NAME_LENGTH, RESERVED_NAMES, render_plugin_files
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
FILES = {
    "README.md",
    "pyproject.toml",
    "clika_ref_my_ops/__init__.py",
    "clika_ref_my_ops/plugin.py",
    "clika_ref_my_ops/py.typed",
    "tests/test_conformance.py",
    "tests/test_plugin.py",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, ["new-plugin", *map(str, words)])


def test_new_plugin_writes_distribution_and_next_steps(run, tmp_path):
    """`new-plugin` writes a complete distribution and prints the next steps."""
    result = run("my-ops")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "clika-ref-my-ops"
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == FILES
    assert list(tmp_path.iterdir()) == [folder]
    assert result.stdout.splitlines() == [
        "clika-ref-my-ops  7 files. Change clika_ref_my_ops/plugin.py first. Next:",
        "  cd clika-ref-my-ops",
        '  pip install -e ".[test]"',
        "  pytest",
    ]


def test_new_plugin_without_the_suite_names_requirements_of_tests(run, monkeypatch):
    found = importlib.metadata.distribution

    def find_version_without_suite(name):
        if name == "clika-ref-conformance":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr("importlib.metadata.distribution", find_version_without_suite)
    assert run("my-ops").stdout.splitlines()[1:3] == [
        (
            "  pip install clika-ref-conformance "
            "(in a clone: pip install conformance; from wheels: add --find-links FOLDER)"
        ),
        "  cd clika-ref-my-ops",
    ]


def test_new_plugin_json_and_into_folder(run, tmp_path):
    """`--json` reports the same facts, and `--into` selects another folder."""
    (tmp_path / "some where").mkdir()
    result = json.loads(run("my-ops", "--into", "some where", "--json").stdout)
    assert result["folder"] == "some where/clika-ref-my-ops"
    assert set(result["files"]) == FILES
    assert result["next"][0] == "cd 'some where/clika-ref-my-ops'"
    assert all((tmp_path / result["folder"] / file).is_file() for file in result["files"])


def test_render_plugin_files_metadata_matches_project():
    """Dependencies and Python versions match those of the example plugin."""
    project = tomllib.loads((ROOT / "plugins/example/pyproject.toml").read_text(encoding="utf-8"))["project"]
    written = tomllib.loads(render_plugin_files("my-ops")["pyproject.toml"])["project"]
    assert written["dependencies"] == [name for name in project["dependencies"] if name.startswith("clika-ref>")]
    assert written["requires-python"] == project["requires-python"]
    assert written["entry-points"] == {"clika_ref": {"my-ops": "clika_ref_my_ops.plugin"}}


def test_reserved_names_match_own_distributions():
    """The reserved names are those of our own distributions."""
    folders = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert folders | {"conformance"} == RESERVED_NAMES


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("My_Ops", r"cannot name a plugin 'My_Ops'\. Use at most 30 lower-case letters, .*\. For example: my-ops"),
        ("clika-ref-my-ops", "The prefix clika-ref is added to it. For example: my-ops"),
        ("clika-ref", "For example: my-ops"),
        ("3d ops", "with a letter first.* For example: d-ops"),
        ("two--hyphens", "For example: two-hyphens"),
        ("../up", "For example: up"),
        ("größe", "For example: gr-e"),
        ("", "For example: my-ops"),
        ("a" * (MAX_NAME_LENGTH + 1), f"For example: {'a' * MAX_NAME_LENGTH}"),
        (
            "aten",
            "cannot name a plugin 'aten': it is the name of clika-ref-aten, a part of clika-ref. Choose another name.",
        ),
        ("conformance", "it is the name of clika-ref-conformance"),
        (
            "reference",
            "'reference': it is the name of a plugin of clika-ref-example, which is installed. Choose another name.",
        ),
    ],
)
def test_new_plugin_invalid_or_reserved_name_exits_2(run, tmp_path, name, problem):
    """An invalid or reserved name exits with 2 and an example."""
    result = run("--", name)
    assert result.exit_code == 2
    assert re.search(problem, " ".join(result.stderr.split())), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_new_plugin_equivalent_installed_name_rejected(run, tmp_path, monkeypatch):
    """A name that pip treats as an installed one is rejected."""
    entry = SimpleNamespace(name="other", dist=SimpleNamespace(name="Clika_Ref.My_Ops"))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    result = run("my-ops")
    assert (result.exit_code, "a plugin of Clika_Ref.My_Ops, which is installed" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_new_plugin_existing_path_not_overwritten(run, tmp_path, kind):
    """An existing file, folder or link is not overwritten."""
    place = tmp_path / "clika-ref-my-ops"
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nowhere")
    result = run("my-ops")
    assert result.exit_code == 2
    assert (
        "error: cannot write clika-ref-my-ops: it exists. Choose another name or another folder (--into)"
        in result.stderr
    )
    assert list(tmp_path.iterdir()) == [place]
    assert kind != "folder" or list(place.iterdir()) == []


def test_new_plugin_missing_folder_not_created(run, tmp_path):
    """A missing target folder is not created."""
    result = run("my-ops", "--into", "gone")
    assert result.exit_code == 2
    assert "--into: cannot write to gone: there is no such folder. Create it first." in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "No space left on device"), 3), (KeyboardInterrupt(), 130)])
def test_new_plugin_failed_write_leaves_no_file(run, tmp_path, monkeypatch, error, status):
    """A failed or interrupted write leaves no file."""
    written = []
    write = Path.write_text

    def fail_at_last_file(path, *arguments, **options):
        written.append(path)
        if len(written) == len(FILES):
            raise error
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fail_at_last_file)
    assert run("my-ops").exit_code == status
    assert len(written) == len(FILES)
    assert list(tmp_path.iterdir()) == []
