"""Small cases, runs of the suite on a faulty target, and the scripts of reproducers."""

import subprocess
import sys
import zipfile
from dataclasses import replace

import torch
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from faulty_targets import FaultyTarget

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
X = torch.tensor([[1.5, -2.0, 3.25], [0.0, 4.0, -1.0]])


def make_suite_without_fault(tmp_path, target=None):
    """Return the quick suite on eager or a given target."""
    return Suite(REGISTRY, target or Identity(), PROFILES["quick"], tmp_path)


def make_suite(tmp_path, fault="", **changes):
    profile = replace(PROFILES["quick"], share_of_artifacts=0.0)
    return replace(Suite(REGISTRY, FaultyTarget(fault=fault), profile, tmp_path), **changes)


def make_case(*calls, x=X, **changes):
    """Return a case of a chain of calls on x."""
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
