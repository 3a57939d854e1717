"""Load a user's target in a separate process first, as loading it may end the process.

Run as a module, it is that process.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile

from clika_ref.core.errors import TargetError
from clika_ref.core.registry import load_registry
from clika_ref_conformance.deviations import read_declarations
from clika_ref_conformance.execution.worker_process import START_TIMEOUT_S, get_last_lines
from clika_ref_conformance.targets.loading import load_target

FINISHED_STATUS = 64
"""Exit status of a probe that finished, whether the target was loaded or rejected. The target causes all others."""


def probe_target(text: str) -> None:
    """Load ``package.module:TARGET`` in another process. `load_target` may follow in this one, and may still reject it.

    Installed targets are not tried: it takes 3 s, and they are in use.

    Raises:
        TargetError: the process did not finish, or not in time.
    """
    if ":" not in text:
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", __name__, text]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            found = subprocess.run(  # noqa: S603 - this file
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            ending = f"did not end within {START_TIMEOUT_S:g} s"
        else:
            if found.returncode == FINISHED_STATUS:
                return
            status = found.returncode
            ending = f"ended with {'signal' if status < 0 else 'status'} {abs(status)}"
        output.seek(0)
        written = get_last_lines(output.read())
    quoted = f" Its output:\n{written}" if written else ""
    raise TargetError(
        f"cannot load the target {text}: its process {ending}. Correct the target: its import, its creation, its "
        f"attributes, unavailable_reason(), passes() and replicas must return.{quoted}"
    )


def main() -> None:
    """Load the target of the command line, and its declarations. Errors are ignored: the run raises them again."""
    faulthandler.enable()
    try:
        given, registry = sys.argv[1], load_registry()
        read_declarations(load_target(given, registry), registry, given)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FINISHED_STATUS)


if __name__ == "__main__":
    main()
