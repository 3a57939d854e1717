"""The distributions of this repository: their folders, the contents of ``pyproject.toml``, and their files."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

METADATA_FILES = ("LICENSE", "README.md", "pyproject.toml")
"""Files next to a package that belong to its distribution."""

RUNTIME_PACKAGES = ("torch", "onnx", "onnxruntime", "openvino")
"""Packages that run or read models. `make lowest` tests their lowest allowed versions."""


def list_files(folder: Path, *patterns: str) -> list[str]:
    """Return the paths, from a folder, of the files that git tracks, or would; all, or those of the patterns."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    found = subprocess.run(listed, cwd=folder, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in {*found.split("\0")} if (folder / path).is_file())


@dataclass(frozen=True)
class Distribution:
    """One distribution."""

    folder: Path
    stated: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return self.stated["project"]["name"]

    @property
    def package(self) -> str:
        """Its only package."""
        return self.name.replace("-", "_")

    @property
    def requirements(self) -> list[str]:
        """All its requirements, with those of extras."""
        project = self.stated["project"]
        return [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]

    @property
    def excluded_folders(self) -> list[str]:
        """The folders of packages that stay in the repository."""
        excluded = self.stated["tool"]["setuptools"]["packages"]["find"].get("exclude", [])
        return [f"{package.replace('.', '/')}/" for package in excluded]

    def files(self) -> list[str]:
        """Return the paths, from its folder, of the files that it consists of: those that git knows, or would."""
        excluded = tuple(self.excluded_folders)
        return [
            path for path in list_files(self.folder, self.package, *METADATA_FILES) if not path.startswith(excluded)
        ]


def distributions() -> list[Distribution]:
    """Return every distribution, the project itself first."""
    folders = [
        ROOT / "pyproject.toml",
        *sorted(ROOT.glob("plugins/*/pyproject.toml")),
        ROOT / "conformance/pyproject.toml",
    ]
    return [Distribution(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))) for path in folders]


def lowest_versions() -> dict[str, str]:
    """Return, of each of `RUNTIME_PACKAGES`, the lowest version that is allowed."""
    asked = [text for found in distributions() for text in found.requirements]
    return {name: _lowest(name, asked) for name in RUNTIME_PACKAGES}


def _lowest(name: str, requirements: list[str]) -> str:
    (version,) = {found[1] for text in requirements if (found := re.match(rf"{name}>=([\d.]+)", text))}
    return version


def read_pinned_versions() -> dict[str, str]:
    """Return the versions that development uses."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))
