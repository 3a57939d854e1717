"""Repeat one failure of the conformance suite. Exit status: 0 the target is correct, 1 it is wrong, 2 not run.

Unpack the archive, then run ``python repro.py``. The script needs torch, numpy and the target, which requires
clika-ref. If it compiles the graph, it also needs the plugins of its operators.

The suite (clika-ref-conformance) is needed for its target ``identity``, if no graph alone shows the failure (a
declaration, a damaged file, the result of another process), and if the failure is not a number that this script can
compare.
"""

# ruff: noqa: T201 - the script prints its result

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

try:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from clika_ref.compiled.lowering import lower
    from clika_ref.core.artifacts import Artifact
    from clika_ref.core.errors import ClikaError
    from clika_ref.core.execution import interpret
    from clika_ref.core.invariants import verify
    from clika_ref.core.registry import Registry, load_registry
    from clika_ref.export.interface import name_interface
    from clika_ref.serialization.graph_format import decode, graph_from_json
    from clika_ref.settings.compile_options import target_hint
except ImportError as missing:
    print(f"cannot run the case: {missing}. Install the missing package.")
    sys.exit(2)

Arrays = dict[str, np.ndarray]

ReturnedTensors = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that the target has returned, each with a copy of its elements at that time."""

AGREES, NOT_RUN, DIFFERS = 64, 65, 66
"""Exit statuses of the process that runs the target; the target causes all others, also 0."""

RULE_VERDICTS = ("fail:contract", "fail:nondeterministic")
"""Verdicts that correct numbers do not refute: a rule is broken, or two compilations differ."""


class MissingRequirementError(Exception):
    """A requirement of the case is not installed, nor in this folder."""


@contextlib.contextmanager
def require() -> Iterator[None]:
    """Convert errors of the block, which runs before the target, to a missing requirement.

    Raises:
        MissingRequirementError: the block raised an error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingRequirementError(f"{error}. Install it, or run this in the folder that contains it.") from error
    except (ClikaError, AttributeError) as error:
        raise MissingRequirementError(str(error)) from error
    except (Exception, SystemExit) as error:
        raise MissingRequirementError(f"{type(error).__name__}: {error}") from error


def run_in_child(folder: Path) -> int:
    """Run the target in its own process, which it may end; return the exit status."""
    command = [sys.executable, "-u", str(folder / "repro.py"), "child"]  # a crash loses buffered output
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - this file
    if status not in (AGREES, DIFFERS, NOT_RUN):
        print(f"the target ended its process with status {status}")
    return {AGREES: 0, NOT_RUN: 2}.get(status, 1)


def main(folder: Path) -> int:
    """Run the target on the stored inputs, print differences from the stored results, and return an exit status."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    inputs, expected = (dict(np.load(folder / f"{name}.npz", allow_pickle=False)) for name in ("inputs", "expected"))
    print(f"{meta['task']['level']} of {meta['task']['subject']} on {meta['target']}: {meta['verdict']}")
    print(meta["listing"])
    faulthandler.dump_traceback_later(meta["limit_seconds"], exit=True)  # a hang is a failure, too
    limit_memory(meta["limit_bytes"])
    problems: list[str] = []
    returned: ReturnedTensors = []
    with TemporaryDirectory() as scratch:
        if meta["repeats_check"] or meta["task"]["level"] == "artifacts" or has_operators_of_suite(folder):
            return replay_with_suite(folder, meta["target"], Path(scratch) / "case.zip")
        with require():
            target, registry = find_target(meta["target"])
            graph = None if meta["artifact"] else read_graph(folder, registry)
        try:
            if meta["artifact"]:
                runner = load_artifact(folder, meta["artifact"], target)
            else:
                runner = compile_graph(meta, graph, target, registry, Path(scratch))
            for index, run in enumerate(meta["runs"]):
                found = run_and_compare(runner, run, index, inputs, expected, returned=returned)
                problems += [f"inputs {run['name']!r}: {problem}" for problem in found]
            if not all(has_same_bits(output, copy) for output, copy in returned):
                problems.append("a later run changed the outputs of an earlier one")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a target is its failure
            problems.append(f"{type(error).__name__}: {error}")
        if not problems and meta["verdict"] in RULE_VERDICTS:
            return replay_with_suite(folder, meta["target"], Path(scratch) / "case.zip")
    faulthandler.cancel_dump_traceback_later()
    print("\n".join(problems) if problems else "the target agrees with the stored results")
    return DIFFERS if problems else AGREES


def limit_memory(limit: int) -> None:
    """Limit the private memory of this process, in bytes; 0 sets no limit.

    Reserved address space that is not writable does not count; runtimes of GPUs reserve more than any machine has.
    Source: getrlimit(2), RLIMIT_DATA: private writable mappings since Linux 4.7.
    """
    if limit:
        hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def has_operators_of_suite(folder: Path) -> bool:
    """Return whether the graph contains operators of the suite: readers that no pass knows."""
    nodes = json.loads((folder / "graph.json").read_text(encoding="utf-8"))["nodes"]
    return any(node[0].startswith("conformance_") for node in nodes)


def replay_with_suite(folder: Path, target: str, path: Path) -> int:
    """Let the suite repeat the failure, from a zip of this folder; return an exit status."""
    with ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(folder))
    sys.path.insert(0, str(Path.cwd()))
    with require():
        suite = importlib.import_module("clika_ref_conformance.reporting.replay")
        outcome = suite.replay(path, load_registry(), target)
    print(f"{outcome.verdict}: {outcome.comparison.message}")
    return DIFFERS if outcome.verdict.is_failure else AGREES


def load_artifact(folder: Path, stored: dict[str, Any], target: Any) -> Callable[..., Any]:
    """Load the stored artifact."""
    names = tuple(stored["input_names"]), tuple(stored["output_names"])
    facts = {key: decode(value) for key, value in stored["facts"].items()}
    return target.load(Artifact(folder / "artifact" / stored["file"], target.name, *names, facts))


def compile_graph(
    meta: dict[str, Any], graph: Any, target: Any, registry: Registry, scratch: Path
) -> Callable[..., Any]:
    """Compile the stored graph, or run the tested pass on it."""
    if meta["task"]["level"] == "passes":
        passes = {**registry.passes, **{p.name: p for p in target.passes()}}
        passes[meta["task"]["subject"]](graph, registry.operators)
        verify(graph)
        return lambda run_inputs: interpret(graph, run_inputs)[0]
    if meta["passes"]:
        lower(graph, registry, target)
    name_interface(graph, registry.operators, (), ())
    return target.load(target.compile(graph, scratch / "model"))


def read_graph(folder: Path, registry: Registry) -> Any:
    """Return the stored graph; its operators are those of the installed plugins."""
    weights = load_file(folder / "weights.safetensors")
    document = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    return graph_from_json(document, registry.operators.get, weights)


def find_target(name: str) -> tuple[Any, Registry]:
    """Return a plugin's target or the object ``package.module:OBJECT``, and the registry of the installed plugins."""
    registry = load_registry()
    found: Any = registry.targets.get(name)
    if found is None and ":" not in name and name != "identity":
        raise MissingRequirementError(f"no installed plugin provides the target {name}. {target_hint(name)}")
    if found is None:
        path = "clika_ref_conformance.targets.identity:Identity" if name == "identity" else name
        sys.path.insert(0, str(Path.cwd()))  # as `clika-ref conformance run` does
        module, _, attribute = path.partition(":")
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        found = found() if isinstance(found, type) or not hasattr(found, "compile") else found
    problem = found.unavailable_reason()
    if problem is not None:
        raise MissingRequirementError(problem)
    return found, registry


def tensor_of(layout: dict[str, Any], elements: np.ndarray) -> torch.Tensor:
    """Return a stored tensor with its original strides."""
    dtype, shape = getattr(torch, layout["dtype"]), layout["shape"]
    flat = torch.from_numpy(np.ascontiguousarray(elements)).reshape(shape)
    flat = flat if flat.dtype == dtype else flat.view(dtype)
    span = 1 + layout["offset"] + sum((n - 1) * s for n, s in zip(shape, layout["strides"], strict=True) if n)
    positions = torch.full(shape, layout["offset"])
    for dim, stride in enumerate(layout["strides"]):
        positions += (torch.arange(shape[dim]) * stride).reshape([n if d == dim else 1 for d, n in enumerate(shape)])
    storage = torch.zeros(span, dtype=dtype)
    storage[positions.reshape(-1)] = flat.reshape(-1)
    return storage.as_strided(shape, layout["strides"], layout["offset"])


def run_and_compare(
    runner: Callable[..., Any],
    run: dict[str, Any],
    index: int,
    inputs: Arrays,
    expected: Arrays,
    *,
    returned: ReturnedTensors,
) -> list[str]:
    """Run twice; compare with the stored results, the second run with the first, and the inputs with the stored ones.

    The outputs are added to ``returned``, to compare them after all runs. Random calls run once only.
    """
    tensors = [tensor_of(layout, inputs[f"run{index}_input{i}"]) for i, layout in enumerate(run["inputs"])]
    first = list(runner(tuple(tensors)))
    if len(first) != len(run["outputs"]):
        return [f"{len(first)} outputs instead of {len(run['outputs'])}"]
    problems: list[str] = []
    for i, (layout, output) in enumerate(zip(run["outputs"], first, strict=True)):
        prefix = f"run{index}_output{i}_"
        stored = {k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)}
        problem = describe_difference(layout, output, stored)
        if problem:
            problems.append(f"output {i} {problem}")
        if any(has_shared_memory(output, tensor) for tensor in tensors):
            problems.append(f"output {i} is a view of an input")
    for i, layout in enumerate(run["inputs"]):
        if not has_same_bits(tensors[i], tensor_of(layout, inputs[f"run{index}_input{i}"])):
            problems.append(f"input {i} was changed")
    if run["random"]:
        return problems
    copies = [output.clone() for output in first]
    returned += zip(first, copies, strict=True)
    second = list(runner(tuple(tensors)))
    if len(second) != len(copies) or not all(map(has_same_bits, copies, second)):
        problems.append("a second run returned other results")
    return problems


def describe_difference(layout: dict[str, Any], output: torch.Tensor, stored: Arrays) -> str:
    """Describe how an output differs from the stored results; empty if it does not."""
    kind = str(output.dtype).removeprefix("torch.")
    if (kind, list(output.shape)) != (layout["dtype"], layout["shape"]):
        return f"is {kind}{list(output.shape)} instead of {layout['dtype']}{layout['shape']}"
    low, high = (torch.from_numpy(stored[name]).reshape(output.shape) for name in ("low", "high"))
    wide = output.to(low.dtype)
    is_correct = (wide >= low) & (wide <= high)
    if "special" in stored:
        special = torch.from_numpy(stored["special"]).reshape(output.shape)
        for bit, is_special in enumerate((output.isnan(), output == float("inf"), output == -float("inf"))):
            is_correct = torch.where(is_special, (special >> bit) % 2 == 1, is_correct)
    if not bool(is_correct.all()):
        at = tuple(int(i) for i in (~is_correct).nonzero()[0])
        eager = tensor_of(layout, stored["output"])[at].item()
        wrong = f"{int((~is_correct).sum()):,} of {output.numel():,} elements are wrong"
        first, last = low[at].item(), high[at].item()
        limits = f"{first:.9g} to {last:.9g} is correct" if first <= last else "no finite number is correct"
        return f"is {output[at].item()!r} at {list(at)}, eager has {eager!r}, and {limits}; {wrong}"
    if "mean" in stored:
        error = wide - torch.from_numpy(stored["exact"]).reshape(output.shape)
        mean, limit = float(error[error.isfinite()].square().mean().sqrt()), float(stored["mean"])
        if mean > limit:
            return f"has an RMS error of {mean:.6g}, above the limit of its dtype, {limit:.6g}"
    return ""


def has_shared_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the memories of two tensors overlap."""
    storages = (tensor.untyped_storage() for tensor in (one, other))
    (start, end), (first, last) = ((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)
    return bool(one.numel() and other.numel()) and start < last and first < end


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))))


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    if sys.argv[1:] != ["child"]:
        sys.exit(run_in_child(here))
    try:
        status = main(here)
    except MissingRequirementError as error:
        print(f"cannot run the case: {error}")
        status = NOT_RUN
    sys.stdout.flush()
    os._exit(status)  # errors of a runtime at process exit are no failures
