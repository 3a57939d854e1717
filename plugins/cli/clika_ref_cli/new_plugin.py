"""The ``new-plugin`` command, which generates a plugin as a starting point."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from clika_ref.core.errors import format_install_command
from clika_ref.core.hooks import ENTRY_POINT_GROUP
from clika_ref.serialization.atomic_files import stage_file
from clika_ref_cli.exit_status import Debug, MisuseError, report_errors
from clika_ref_cli.options import AsJson
from clika_ref_cli.output import print_result

TEMPLATE_FOLDER = Path(__file__).with_name("plugin_template")
"""The template files, with ``$name`` and others as placeholders. Each has an extra suffix."""

TEMPLATE_SUFFIX = ".template"

NAME_PATTERN = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAX_NAME_LENGTH = 30
"""Maximum number of characters, which keeps the generated lines within 120 columns."""

RESERVED_NAMES = frozenset(
    {
        *("aten", "cleanup", "cli", "conformance", "example", "onnxruntime", "openvino", "tensorrt", "torchvision"),
        "visualize",
    }
)
"""Names of this project's own distributions, installed or not."""

TEST_REQUIREMENTS = (
    "clika-ref-aten",
    "clika-ref-cleanup",
    "clika-ref-onnxruntime",
    "clika-ref-visualize",
    "clika-ref-conformance",
)
"""Our distributions that the extra ``test`` of a new plugin needs."""

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Lower-case letters, digits and hyphens: my-ops creates the distribution clika-ref-my-ops.",
        show_default=False,
    ),
]

Into = Annotated[Path, typer.Option("--into", metavar="FOLDER", help="The parent folder of the new plugin.")]


def new_plugin(
    name: Name,
    *,
    into: Into = Path(),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a starter plugin with an operator, a pass and tests. It installs and passes its tests unchanged."""
    with report_errors(debug=debug):
        folder, files = write_plugin(name, into)
    enter = f"cd {shlex.quote(str(folder))}"
    steps = [*_list_missing_requirements(), enter, 'pip install -e ".[test]"', "pytest"]
    module = next(file for file in files if file.endswith("plugin.py"))
    heading = f"{folder}  {len(files)} files. Change {module} first. Next:"
    lines = [heading, *(f"  {step}" for step in steps)]
    print_result("\n".join(lines), {"folder": folder, "files": files, "next": steps}, as_json=as_json)


def _list_missing_requirements() -> list[str]:
    """Return a command for each of our distributions that the tests of a plugin need and that is not installed."""
    return [format_install_command(name) for name in TEST_REQUIREMENTS if not _is_installed(name)]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_plugin(name: str, into: Path) -> tuple[Path, list[str]]:
    """Generate a plugin in a new folder below ``into``. Return that folder and the files in it.

    The folder appears atomically: after a failure or an interrupt, no file remains.

    Raises:
        MisuseError: the name is invalid or taken, or the path exists.
        ModelError: the files cannot be written.
    """
    _check_name(name)
    distribution = name_distribution(name)
    folder = into / distribution
    if not into.is_dir():
        raise MisuseError(f"--into: cannot write to {into}: there is no such folder. Create it first.")
    if os.path.lexists(folder):
        raise MisuseError(
            f"cannot write {folder}: it exists. Choose another name or another folder (--into), or move it away."
        )
    texts = render_plugin_files(name)
    with stage_file(folder) as staged:
        for path, text in texts.items():
            file = staged / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return folder, [*texts]


def name_distribution(name: str) -> str:
    """Return the distribution name of a plugin."""
    return f"clika-ref-{name}"


def render_plugin_files(name: str) -> Mapping[str, str]:
    """Return the files of a new plugin: texts by path."""
    package = name_distribution(name).replace("-", "_")
    values = {
        "name": name,
        "distribution": name_distribution(name),
        "package": package,
        "operator": f"{name.replace('-', '_')}_squared_relu",
        "range": _format_compatible_range(importlib.metadata.version("clika-ref")),
    }
    files: dict[str, str] = {}
    for source in sorted(TEMPLATE_FOLDER.rglob(f"*{TEMPLATE_SUFFIX}")):
        first, *others = source.relative_to(TEMPLATE_FOLDER).with_suffix("").parts
        path = "/".join([package if first == "package" else first, *others])
        files[path] = Template(source.read_text(encoding="utf-8")).substitute(values)
    return files


def _format_compatible_range(version: str) -> str:
    """Return the range of compatible versions; before 1.0, a minor version may break."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name) or len(name) > MAX_NAME_LENGTH or re.match(r"clika-ref(-|$)", name):
        plain = "-".join(re.findall(r"[a-z0-9]+", name.lower().replace("_", "-")))
        plain = re.sub(r"^(clika-ref(-|$)|[^a-z]+)+", "", plain)[:MAX_NAME_LENGTH].strip("-")
        raise MisuseError(
            f"cannot name a plugin {name!r}. Use at most {MAX_NAME_LENGTH} lower-case letters, digits and single "
            "hyphens, with a letter first. The prefix clika-ref is added to it. For example: "
            f"{plain or 'my-ops'}"
        )
    owner = _find_name_owner(name)
    if owner is not None:
        raise MisuseError(f"cannot name a plugin {name!r}: it is the name of {owner}. Choose another name.")


def _normalize_name(name: str) -> str:
    """Return the normalized name of a distribution, as installers compare it: ``Clika_Ref.X`` is ``clika-ref-x``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _find_name_owner(name: str) -> str | None:
    """Return the current owner of a name, installed or in this project, or None."""
    if name in RESERVED_NAMES:
        return f"{name_distribution(name)}, a part of clika-ref"
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name or (
            entry.dist is not None and _normalize_name(entry.dist.name) == name_distribution(name)
        ):
            return f"a plugin of {entry.dist.name if entry.dist else 'an unknown distribution'}, which is installed"
    return None
