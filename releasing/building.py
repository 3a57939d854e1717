"""Build the sdist and the wheel of a distribution, and check that they contain each of its files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from releasing.distributions import METADATA_FILES, Distribution


def build(found: Distribution, out: Path) -> None:
    """Write the sdist of a distribution into a folder, and the wheel from the sdist.

    It is built from a copy: setuptools leaves folders next to the sources, and packages files that are in them.

    Raises:
        SystemExit: it cannot be built, or a file is missing from the wheel or should not be there.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / found.name
        for path in found.files():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found.folder / path, source / path)
        words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{found.name} cannot be built:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    (wheel,) = out.glob(f"{found.package}-*.whl")
    if problems := [*differences(found, wheel)]:
        raise SystemExit(f"{wheel.name}:\n" + "\n".join(problems))


def differences(found: Distribution, wheel: Path) -> Iterator[str]:
    """Yield the files that a wheel lacks, and the unexpected ones."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packed = {name for name in names if name.startswith(f"{found.package}/")}
    files = {name for name in found.files() if name not in METADATA_FILES}
    yield from (f"  {name} is missing; list it under [tool.setuptools.package-data]" for name in sorted(files - packed))
    yield from (f"  {name} is in the wheel, but not in git" for name in sorted(packed - files))
    (described,) = {name.partition("/")[0] for name in names} - {found.package}
    for name in ("METADATA", "licenses/LICENSE", "top_level.txt"):
        if f"{described}/{name}" not in names:
            yield f"  {described}/{name} is missing"
