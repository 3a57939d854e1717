"""Draw the pictures of the documentation: ``python -m docs.building.pictures [--record]``.

With ``--record``, the facts in `facts.json` are measured again first; `make pictures` does so.
"""

import os
import sys
from collections.abc import Sequence

from docs.building.pictures.drawing import FOLDER, draw_all
from docs.building.pictures.facts import record_facts


def main(arguments: Sequence[str]) -> None:
    """Write all pictures, and print the size of each."""
    os.environ.setdefault("CLIKA_REF_QUIET", "1")
    if "--record" in arguments:
        record_facts()
    FOLDER.mkdir(exist_ok=True)
    for name, picture in draw_all().items():
        (FOLDER / name).write_bytes(picture)
        print(f"{(FOLDER / name).relative_to(FOLDER.parents[1])}: {len(picture):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
