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
    {"aten", "cleanup", "cli", "conformance", "example", "onnxruntime", "openvino", "tensorrt", "visualize"}
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
        help="Lower-case letters, digits and hyphens: my-ops makes the distribution clika-ref-my-ops.",
        show_default=False,
    ),
]

Into = Annotated[Path, typer.Option("--into", metavar="FOLDER", help="Where the folder of the plugin is made.")]


def new_plugin(
    name: Name,
    *,
    into: Into = Path(),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a plugin, with an operator, a pass and their tests, that installs and passes them as it is."""
    with report_errors(debug=debug):
        place, files = write_plugin(name, into)
    steps = [f"cd {shlex.quote(str(place))}", 'pip install -e ".[test]"', "pytest"]
    begin = next(file for file in files if file.endswith("plugin.py"))
    heading = f"{place}  {len(files)} files, of which {begin} is the one to change first. Next:"
    lines = [heading, *(f"  {step}" for step in steps), *_list_missing_requirements()]
    print_result("\n".join(lines), {"folder": place, "files": files, "next": steps}, as_json=as_json)


def _list_missing_requirements() -> list[str]:
    """Return a line for each of our distributions that the tests of a plugin need and that is not installed."""
    return [
        f"Its tests need {name}, which is not installed: {format_install_command(name)}"
        for name in TEST_REQUIREMENTS
        if not _is_installed(name)
    ]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_plugin(name: str, into: Path) -> tuple[Path, list[str]]:
    """Generate a plugin in a new folder below ``into``. Return that folder and the files in it.

    The folder appears atomically: a failure or an interrupt leaves nothing behind.

    Raises:
        MisuseError: the name is invalid or taken, or the path exists.
        ModelError: the files cannot be written.
    """
    _check_name(name)
    distribution = distribution_of(name)
    place = into / distribution
    if not into.is_dir():
        msg = f"--into: there is no folder {into} to write to; make it first"
        raise MisuseError(msg)
    if os.path.lexists(place):
        msg = f"{place} is there already: choose another name or another folder (--into), or move it away"
        raise MisuseError(msg)
    texts = render_plugin_files(name)
    with stage_file(place) as folder:
        for path, text in texts.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return place, [*texts]


def distribution_of(name: str) -> str:
    """Return the distribution name of a plugin."""
    return f"clika-ref-{name}"


def render_plugin_files(name: str) -> Mapping[str, str]:
    """Return the files of a new plugin: texts by path."""
    package = distribution_of(name).replace("-", "_")
    words = {
        "name": name,
        "distribution": distribution_of(name),
        "package": package,
        "operator": f"{name.replace('-', '_')}_squared_relu",
        "range": _compatible_range(importlib.metadata.version("clika-ref")),
    }
    written: dict[str, str] = {}
    for source in sorted(TEMPLATE_FOLDER.rglob(f"*{TEMPLATE_SUFFIX}")):
        first, *others = source.relative_to(TEMPLATE_FOLDER).with_suffix("").parts
        path = "/".join([package if first == "package" else first, *others])
        written[path] = Template(source.read_text(encoding="utf-8")).substitute(words)
    return written


def _compatible_range(version: str) -> str:
    """Return the range of compatible versions; before 1.0, a minor version may break."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name) or len(name) > MAX_NAME_LENGTH or re.match(r"clika-ref(-|$)", name):
        plain = "-".join(re.findall(r"[a-z0-9]+", name.lower().replace("_", "-")))
        plain = re.sub(r"^(clika-ref(-|$)|[^a-z]+)+", "", plain)[:MAX_NAME_LENGTH].strip("-")
        msg = (
            f"{name!r} names no plugin: write lower-case letters, digits and single hyphens between them, a letter "
            f"first, {MAX_NAME_LENGTH} characters at most, and without clika-ref, which is put before it; for example "
            f"{plain or 'my-ops'}"
        )
        raise MisuseError(msg)
    owner = _name_owner(name)
    if owner is not None:
        msg = f"{name} is the name of {owner}: choose another one, as two plugins of one name cannot be installed"
        raise MisuseError(msg)


def _normalize_name(name: str) -> str:
    """Return the normalized name of a distribution, as installers compare it: ``Clika_Ref.X`` is ``clika-ref-x``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _name_owner(name: str) -> str | None:
    """Return the current owner of a name, installed or in this project, or None."""
    if name in RESERVED_NAMES:
        return f"{distribution_of(name)}, which belongs to clika-ref"
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name or (entry.dist is not None and _normalize_name(entry.dist.name) == distribution_of(name)):
            return f"a plugin of {entry.dist.name if entry.dist else 'an unknown distribution'}, which is installed"
    return None
