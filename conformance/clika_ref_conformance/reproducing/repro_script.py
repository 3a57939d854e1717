"""Repeats one finding of the conformance suite: exits 1 while the target differs, 0 once it does not, 2 if not tried.

It needs torch, numpy and the target, which brings clika-ref along; where it compiles the graph, the plugins of its
operators as well. Unpack the archive, then run ``python repro.py``. Where no graph alone shows it (a declaration, a
damaged file, what another process makes of an artifact), or where no numbers do and it sees nothing itself, it asks the
suite, clika-ref-conformance, which also has the target ``identity``.
"""

# ruff: noqa: T201 - it prints: that is its output

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
    print(f"this cannot be tried here: {missing}; install it")
    sys.exit(2)

Arrays = dict[str, np.ndarray]

ReturnedTensors = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that the target has returned, each with a copy of what it held then."""

AGREES, UNTRIED, DIFFERS = 64, 65, 66
"""How the process that runs the target ends: any other status is the target's doing, 0 too."""

RULE_VERDICTS = ("fail:contract", "fail:nondeterministic")
"""Verdicts of which right numbers prove nothing: a rule is broken, or one compilation is not like another."""


class MissingRequirementError(Exception):
    """What the finding needs is not installed, nor in this folder."""


@contextlib.contextmanager
def require() -> Iterator[None]:
    """Take what is raised within the block for something that is not there: nothing was tried yet.

    Raises:
        MissingRequirementError: anything was.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingRequirementError(f"{error}; run this in the folder that holds it, or install it") from error
    except (ClikaError, AttributeError) as error:
        raise MissingRequirementError(str(error)) from error
    except (Exception, SystemExit) as error:
        raise MissingRequirementError(f"{type(error).__name__}: {error}") from error


def run_in_child(folder: Path) -> int:
    """Run the target in a process of its own, which it may end; return the exit status."""
    command = [sys.executable, "-u", str(folder / "repro.py"), "child"]  # a crash loses what is still in a buffer
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - this file
    if status not in (AGREES, DIFFERS, UNTRIED):
        print(f"the target ended its process, with status {status}")
    return {AGREES: 0, UNTRIED: 2}.get(status, 1)


def main(folder: Path) -> int:
    """Run the target on the stored inputs; print how it differs from what is stored, and return how to end."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    inputs, expected = (dict(np.load(folder / f"{name}.npz", allow_pickle=False)) for name in ("inputs", "expected"))
    print(f"{meta['task']['level']} of {meta['task']['subject']} on {meta['target']}: {meta['verdict']}")
    print(meta["listing"])
    faulthandler.dump_traceback_later(meta["limit_seconds"], exit=True)  # a target that hangs fails, too
    limit_memory(meta["limit_bytes"])
    problems: list[str] = []
    kept: ReturnedTensors = []
    with TemporaryDirectory() as scratch:
        if meta["repeats"] or meta["task"]["level"] == "artifacts" or has_operators_of_suite(folder):
            return ask_suite(folder, meta["target"], Path(scratch) / "case.zip")
        with require():
            target, registry = find_target(meta["target"])
            graph = None if meta["artifact"] else read_graph(folder, registry)
        try:
            if meta["artifact"]:
                runner = load_artifact(folder, meta["artifact"], target)
            else:
                runner = compile_graph(meta, graph, target, registry, Path(scratch))
            for index, run in enumerate(meta["runs"]):
                found = run_and_compare(runner, run, index, inputs, expected, kept=kept)
                problems += [f"on the inputs {run['name']!r}: {problem}" for problem in found]
            if not all(has_same_bits(output, copy) for output, copy in kept):
                problems.append("a later run changed the tensors that an earlier one had returned")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a target raises is its failure
            problems.append(f"{type(error).__name__}: {error}")
        if not problems and meta["verdict"] in RULE_VERDICTS:
            return ask_suite(folder, meta["target"], Path(scratch) / "case.zip")
    faulthandler.cancel_dump_traceback_later()
    print("\n".join(problems) if problems else "the target agrees with what is stored")
    return DIFFERS if problems else AGREES


def limit_memory(limit: int) -> None:
    """Limit the private memory of this process to so many bytes; 0 sets no limit.

    Reserved address space that is not writable does not count; runtimes of GPUs reserve more than any machine has.
    Source: getrlimit(2), RLIMIT_DATA: private writable mappings since Linux 4.7.
    """
    if limit:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def has_operators_of_suite(folder: Path) -> bool:
    """Whether the graph holds what stands for a reader that no pass knows, which no plugin provides."""
    nodes = json.loads((folder / "graph.json").read_text(encoding="utf-8"))["nodes"]
    return any(node[0].startswith("conformance_") for node in nodes)


def ask_suite(folder: Path, target: str, path: Path) -> int:
    """Let the suite repeat a finding, from a zip as this one was; return how to end."""
    with ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(folder))
    sys.path.insert(0, str(Path.cwd()))
    with require():
        replaying = importlib.import_module("clika_ref_conformance.reporting.replay")
        outcome = replaying.replay(path, load_registry(), target)
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
    """Compile the stored graph, or run the pass on it that is the subject."""
    if meta["task"]["level"] == "passes":
        passes = {**registry.passes, **{p.name: p for p in target.passes()}}
        passes[meta["task"]["subject"]](graph, registry.operators)
        verify(graph)
        return lambda given: interpret(graph, given)[0]
    if meta["passes"]:
        lower(graph, registry, target)
    name_interface(graph, registry.operators, (), ())
    return target.load(target.compile(graph, scratch / "model"))


def read_graph(folder: Path, registry: Registry) -> Any:
    """Return the stored graph, of the operators that plugins declare."""
    weights = load_file(folder / "weights.safetensors")
    document = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    return graph_from_json(document, registry.operators.get, weights)


def find_target(name: str) -> tuple[Any, Registry]:
    """Return the target of a plugin, or the object that ``package.module:OBJECT`` names, and what plugins provide."""
    registry = load_registry()
    found: Any = registry.targets.get(name)
    if found is None and ":" not in name and name != "identity":
        raise MissingRequirementError(f"no installed plugin provides the target {name}. {target_hint(name)}")
    if found is None:
        place = "clika_ref_conformance.targets.identity:Identity" if name == "identity" else name
        sys.path.insert(0, str(Path.cwd()))  # where `clika-ref conformance run` also looks
        module, _, attribute = place.partition(":")
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        found = found() if isinstance(found, type) or not hasattr(found, "compile") else found
    problem = found.unavailable_reason()
    if problem is not None:
        raise MissingRequirementError(problem)
    return found, registry


def tensor_of(layout: dict[str, Any], elements: np.ndarray) -> torch.Tensor:
    """Return a stored tensor with the strides that it had."""
    dtype, shape = getattr(torch, layout["dtype"]), layout["shape"]
    flat = torch.from_numpy(np.ascontiguousarray(elements)).reshape(shape)
    flat = flat if flat.dtype == dtype else flat.view(dtype)
    span = 1 + layout["offset"] + sum((n - 1) * s for n, s in zip(shape, layout["strides"], strict=True) if n)
    where = torch.full(shape, layout["offset"])
    for dim, stride in enumerate(layout["strides"]):
        where += (torch.arange(shape[dim]) * stride).reshape([n if d == dim else 1 for d, n in enumerate(shape)])
    storage = torch.zeros(span, dtype=dtype)
    storage[where.reshape(-1)] = flat.reshape(-1)
    return storage.as_strided(shape, layout["strides"], layout["offset"])


def run_and_compare(
    runner: Callable[..., Any],
    run: dict[str, Any],
    index: int,
    inputs: Arrays,
    expected: Arrays,
    *,
    kept: ReturnedTensors,
) -> list[str]:
    """Run twice; compare with what is stored, the second run with the first, and the inputs with what they were.

    What is returned is kept, for a look at it after all runs; of random calls no two runs return the same.
    """
    given = [tensor_of(layout, inputs[f"run{index}_input{i}"]) for i, layout in enumerate(run["inputs"])]
    first = list(runner(tuple(given)))
    if len(first) != len(run["outputs"]):
        return [f"{len(first)} outputs instead of {len(run['outputs'])}"]
    problems: list[str] = []
    for i, (layout, output) in enumerate(zip(run["outputs"], first, strict=True)):
        prefix = f"run{index}_output{i}_"
        stored = {k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)}
        problem = describe_difference(layout, output, stored)
        if problem:
            problems.append(f"output {i} {problem}")
        if any(has_shared_memory(output, tensor) for tensor in given):
            problems.append(f"output {i} is a view of an input")
    for i, layout in enumerate(run["inputs"]):
        if not has_same_bits(given[i], tensor_of(layout, inputs[f"run{index}_input{i}"])):
            problems.append(f"input {i} was changed")
    if run["random"]:
        return problems
    copies = [output.clone() for output in first]
    kept += zip(first, copies, strict=True)
    second = list(runner(tuple(given)))
    if len(second) != len(copies) or not all(map(has_same_bits, copies, second)):
        problems.append("a second run gave other results")
    return problems


def describe_difference(layout: dict[str, Any], output: torch.Tensor, stored: Arrays) -> str:
    """Say how an output leaves what is stored, or nothing."""
    kind = str(output.dtype).removeprefix("torch.")
    if (kind, list(output.shape)) != (layout["dtype"], layout["shape"]):
        return f"is {kind}{list(output.shape)} instead of {layout['dtype']}{layout['shape']}"
    low, high = (torch.from_numpy(stored[name]).reshape(output.shape) for name in ("low", "high"))
    wide = output.to(low.dtype)
    right = (wide >= low) & (wide <= high)
    if "special" in stored:
        special = torch.from_numpy(stored["special"]).reshape(output.shape)
        for bit, is_such in enumerate((output.isnan(), output == float("inf"), output == -float("inf"))):
            right = torch.where(is_such, (special >> bit) % 2 == 1, right)
    if not bool(right.all()):
        at = tuple(int(i) for i in (~right).nonzero()[0])
        eager = tensor_of(layout, stored["output"])[at].item()
        wrong = f"{int((~right).sum()):,} of {output.numel():,} elements are wrong"
        first, last = low[at].item(), high[at].item()
        limits = f"{first:.9g} to {last:.9g} is right" if first <= last else "no finite number is right"
        return f"is {output[at].item()!r} at {list(at)}, where eager has {eager!r} and {limits}; {wrong}"
    if "mean" in stored:
        error = wide - torch.from_numpy(stored["exact"]).reshape(output.shape)
        mean, limit = float(error[error.isfinite()].square().mean().sqrt()), float(stored["mean"])
        if mean > limit:
            return f"is off by {mean:.6g} in the mean, where what its dtype claims allows {limit:.6g}"
    return ""


def has_shared_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memories of two tensors overlap."""
    storages = (tensor.untyped_storage() for tensor in (one, other))
    (start, end), (first, last) = ((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)
    return bool(one.numel() and other.numel()) and start < last and first < end


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit."""
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
        print(f"this cannot be tried here: {error}")
        status = UNTRIED
    sys.stdout.flush()
    os._exit(status)  # what a runtime does as its process ends is no finding
