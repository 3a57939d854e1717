"""Make one subject and write it to a folder: ``python -m benchmarks.ptq.preparing resnet18 FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.ptq.subjects import write

if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps(None))
