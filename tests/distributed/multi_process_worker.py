"""The worker of multi-process tests: ``python multi_process_worker.py <group> <rank> <ranks> <folder>``.

Each scenario of a group returns its results, which are written to ``<scenario>.<rank>.json`` for the tests to read.
"""

import datetime as dt
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import failing_scenarios
import quantizing_scenarios
import training_scenarios
from rank_models import catch_message, compile_for_training, make_images


def exit_during_data():
    """Let the other rank end while the data is read."""

    def data():
        yield make_images(1)[0]
        if dist.get_rank() == 1:
            os._exit(3)

    return {"message": catch_message(lambda: compile_for_training(data()))}


def hang():
    """Let the other rank be slower than the process group waits."""

    def data():
        yield make_images(1)[0]
        if dist.get_rank() == 1:
            time.sleep(12)

    began = time.monotonic()
    return {"message": catch_message(lambda: compile_for_training(data())), "seconds": time.monotonic() - began}


GROUPS = {
    "quantizing": quantizing_scenarios.SCENARIOS,
    "failing": failing_scenarios.SCENARIOS,
    "training": training_scenarios.SCENARIOS,
    "ending": [exit_during_data],
    "hanging": [hang],
}
TIMEOUTS = {"hanging": 4}


def main(group, rank, ranks, folder):
    """Run the scenarios of a group as one of its processes."""
    warnings.simplefilter("ignore")  # of torch.distributed, of which each version has others
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{group}.store",
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=TIMEOUTS.get(group, 120)),
    )
    for scenario in GROUPS[group]:
        found = scenario()
        (Path(folder) / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
