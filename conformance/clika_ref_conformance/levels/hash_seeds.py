"""Print the results of passes on drawn graphs: they must not depend on PYTHONHASHSEED."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from random import Random

from clika_ref.core.errors import ClikaError
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass
from clika_ref.core.registry import load_registry
from clika_ref_conformance.drawing.motifs.hosts import embed_motif
from clika_ref_conformance.drawing.motifs.motif_search import find_motifs
from clika_ref_conformance.drawing.motifs.pass_operators import find_operator_groups

GRAPHS_PER_PASS = 4
"""Number of random graphs per pass."""

OTHER_HASH_SEED = "4242"
"""Any seed but 0, which gives the default hashes of strings if hashing is not randomized."""

TIMEOUT_S = 300
"""Timeout for the other process."""


def run_on_random_graphs(p: Pass, operators: Mapping[str, Operator], seed: int) -> list[str]:
    """Return the results of a pass on random graphs with its motifs, as text."""
    found = find_motifs(p, operators, seed=seed, motif_count=2, tries=1000, patience=GRAPHS_PER_PASS, varied=False)
    random = Random(f"{p.name}-hash-{seed}")  # noqa: S311 - test data, not cryptography
    groups = find_operator_groups(p, operators)
    made: list[str] = []
    for number in range(GRAPHS_PER_PASS if found.cases else 0):
        case = embed_motif(random, found.cases[number % len(found.cases)], operators, groups)
        if case is not None:
            graph = case.graph.clone()
            p(graph, operators)
            made.append(f"{case.graph}\nbecomes\n{graph}")
    return made


def digest_text(text: str) -> str:
    """Return a digest that is the same in any process."""
    return sha256(text.encode()).hexdigest()


def digest_in_other_process(names: list[str], seed: int) -> dict[str, list[str]]:
    """Return the digests of the results of installed passes, computed in a process with another hash seed.

    Raises:
        ClikaError: the process failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(seed), *names]
    environment = {**os.environ, "PYTHONHASHSEED": OTHER_HASH_SEED}
    done = subprocess.run(  # noqa: S603 - our own module
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ClikaError(f"the process with PYTHONHASHSEED={OTHER_HASH_SEED} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    """Print the digests of the passes that follow the seed on the command line."""
    seed, *names = arguments
    registry = load_registry()
    known = [name for name in names if name in registry.passes]
    found = {
        n: [digest_text(t) for t in run_on_random_graphs(registry.passes[n], registry.operators, int(seed))]
        for n in known
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
