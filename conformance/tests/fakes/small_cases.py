"""Small cases, the suite on a target with a fault, and the scripts of reproducers."""

import subprocess
import sys
import zipfile
from dataclasses import replace

import torch
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from odd_targets import Odd

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
X = torch.tensor([[1.5, -2.0, 3.25], [0.0, 4.0, -1.0]])


def suite_for(tmp_path, fault="", **changes):
    profile = replace(PROFILES["quick"], share_of_artifacts=0.0)
    return replace(Suite(REGISTRY, Odd(fault=fault), profile, tmp_path), **changes)


def case_of(*calls, x=X, **changes):
    """Return a case of calls that take x one after the other."""
    graph = Graph("case")
    value = graph.add_input(TensorType(x.dtype, tuple(x.shape)), "x")
    build = Builder(graph, REGISTRY.operators)
    for name, attrs in calls:
        value = build(name, value, **attrs)
    graph.add_output(value)
    runs = [CaseRun("first", (x.clone(),)), CaseRun("second", (x.flip(0).contiguous(),))]
    return replace(GraphCase("case", graph, runs), **changes)


def run_script(path, folder):
    """Unpack a reproducer and run its script in a fresh process."""
    place = folder / "unpacked"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place)
    command = [sys.executable, str(place / "repro.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
