"""Reproducers: exact reading, script and replay that find the fault, and rejection of damaged files."""

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from clika_ref_conformance.cases import CaseRun, Compiled, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.drawing.motifs.rebuilding import SUITE_OPERATORS
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.reporting.replay import read_reproducer, replay
from clika_ref_conformance.reproducing import archives, tensors
from clika_ref_conformance.reproducing.archives import pack, unpack
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.reproducing.repro_script import AGREES, NOT_RUN
from clika_ref_conformance.reproducing.reproducers import make_reproducer, write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Comparison, Verdict
from small_cases import run_script

from clika_ref.core.accuracy import EXACT, ErrorClass
from clika_ref.core.artifacts import Artifact
from clika_ref.core.inference import Builder
from clika_ref.core.passes import Phase
from clika_ref.core.registry import load_registry

REGISTRY = load_registry()
TASK = Task("operators", "relu", "float32")

WRONG_TARGET = '''
"""ONNX Runtime, but for one element."""
import os
from dataclasses import replace

import torch
from clika_ref_onnxruntime.target import OnnxRuntime


class Wrong(OnnxRuntime):
    def load(self, artifact):
        runner = super().load(artifact)
        def run(inputs):
            outputs = runner(inputs)
            outputs[0].view(-1)[-1] += 1
            return outputs
        return run


TARGET = Wrong()
RIGHT = OnnxRuntime()


class Particular(OnnxRuntime):
    """Loads nothing but what it made: with facts that JSON does not have, or in a folder."""

    def compile(self, graph, path, **options):
        made = super().compile(graph, path, **options)
        return replace(made, facts={"dtype": torch.float16, "shape": (1, 2)})

    def load(self, artifact):
        assert artifact.facts == {"dtype": torch.float16, "shape": (1, 2)}, artifact.facts
        return Wrong().load(artifact)


class UnusualFiles(OnnxRuntime):
    """Writes files that no reproducer may contain: a folder, an unusual name, an object in a fact."""

    def compile(self, graph, path, **options):
        made = super().compile(graph, path, **options)
        folder = path.parent / "-a folder (1)"
        folder.mkdir()
        moved = made.path.rename(folder / "model.onnx")
        return replace(made, path=moved, facts={"own": Wrong()})

    def load(self, artifact):
        assert isinstance(artifact.facts["own"], Wrong)
        return Wrong().load(artifact)


class Leaving(OnnxRuntime):
    def load(self, artifact):
        return lambda inputs: os._exit(0)


class Rejecting(OnnxRuntime):
    def compile(self, graph, path, **options):
        raise RuntimeError("no way")
'''


@pytest.fixture
def suite(tmp_path):
    """The suite on ONNX Runtime."""
    return Suite(REGISTRY, REGISTRY.targets["onnxruntime"], PROFILES["quick"], tmp_path)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module with a faulty target, a correct one, and one that compiles nothing."""
    (tmp_path / "external_targets.py").write_text(WRONG_TARGET)
    monkeypatch.syspath_prepend(tmp_path)
    yield "external_targets"
    sys.modules.pop("external_targets", None)


def make_relu_case(*inputs):
    """A relu on given inputs, each a run."""
    graph = build_call_graph(REGISTRY.operators["relu"], [inputs[0]], {})
    runs = [CaseRun(f"run-{i}", (x,)) for i, x in enumerate(inputs)]
    return GraphCase("relu", graph, runs, {"shapes": "[2, 3]", "alpha": 0.5, "kind": torch.float32})


def make_failed_outcome(case, verdict=Verdict.VALUE):
    """Return a failed outcome of a case."""
    return Outcome("relu-1", Comparison(verdict, "off by one", 1.0, float("inf")), "run-0", case)


def make_tensors_of_layouts():
    """Yield one tensor of each dtype and layout."""
    x = torch.arange(24.0).reshape(2, 3, 4) - 7
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool):
        yield x.to(dtype)
    yield torch.tensor([float("nan"), float("-inf"), -0.0])
    yield torch.tensor(3.0)
    yield torch.empty(0, 3)
    yield x.transpose(0, 2)
    yield x[:, 1::2, 1:]
    yield torch.ones(1, 3).expand(4, 3)
    yield torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last)
    yield torch.arange(8.0).unfold(0, 3, 1)


@pytest.mark.parametrize("x", list(make_tensors_of_layouts()), ids=lambda x: f"{x.dtype}{list(x.shape)}{x.stride()}")
def test_tensor_npz_round_trip_keeps_bits_and_layout(x):
    """A tensor keeps its bits and its layout."""
    content = tensors.to_npz({"x": tensors.elements_of(x)})
    layout = json.loads(json.dumps(tensors.layout_of(x)))
    y = tensors.rebuild_tensor(layout, tensors.from_npz(content, "x.npz", 10**6)["x"])
    assert (y.dtype, y.shape, y.stride(), y.storage_offset()) == (x.dtype, x.shape, x.stride(), x.storage_offset())
    assert tensors.elements_of(x).tobytes() == tensors.elements_of(y).tobytes()


def test_read_reproducer_returns_written_case(suite, tmp_path):
    """A case is read from its reproducer as it was written."""
    x = torch.randn(3, 2).T
    path = tmp_path / write_reproducer(
        make_failed_outcome(make_relu_case(x, x + 1)), TASK, suite, "onnxruntime", tmp_path
    )
    found = read_reproducer(path, REGISTRY)
    assert (found.task, found.check, found.target, found.verdict) == (TASK, "relu-1", "onnxruntime", "fail:value")
    assert found.case.facts == {"shapes": "[2, 3]", "alpha": 0.5, "kind": torch.float32}
    assert [node.op.name for node in found.case.graph.nodes] == ["relu"]
    assert [run.name for run in found.case.runs] == ["run-0", "run-1"]
    assert torch.equal(found.case.runs[0].inputs[0], x)
    assert found.case.runs[0].inputs[0].stride() == x.stride()


def test_make_reproducer_no_pickle_and_same_bytes(suite):
    """A reproducer has no pickle and the same bytes each time."""
    made = Compiled(Artifact(Path("model.onnx"), "onnxruntime", ("x",), ("y",)), {"model.onnx": b"a model"})
    outcome = replace(make_failed_outcome(make_relu_case(torch.ones(2, 3))), compiled=made)
    content = make_reproducer(outcome, TASK, suite, "onnxruntime")
    assert content == make_reproducer(outcome, TASK, suite, "onnxruntime")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert sorted(archive.namelist()) == sorted([*archives.REQUIRED_FILES, "artifact/model.onnx"])
        assert "pickle" not in archive.read("repro.py").decode().replace("allow_pickle=False", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "finding",
    [
        ("TARGET", Verdict.VALUE, 1, "is correct; 1 of 6 elements are wrong"),
        ("RIGHT", Verdict.VALUE, 0, "the target agrees with the stored results"),
        ("Rejecting", Verdict.UNDECLARED, 1, "RuntimeError: no way"),
        ("Particular", Verdict.VALUE, 1, "is correct; 1 of 6 elements are wrong"),
        ("UnusualFiles", Verdict.VALUE, 1, "is correct; 1 of 6 elements are wrong"),
        ("Leaving", Verdict.CRASH, 1, "the target ended its process with status 0"),
        ("RIGHT", Verdict.CRASH, 0, "the target agrees with the stored results"),  # compiled from the graph
    ],
)
def test_repro_script_exits_1_while_target_differs(suite, module, tmp_path, finding):
    """The script exits with 1 as long as the target differs."""
    target, verdict, status, said = finding
    suite = replace(suite, target=load_target(f"{module}:{target}", REGISTRY))
    outcome = make_failed_outcome(make_relu_case(torch.randn(2, 3), torch.tensor([[1, 2, float("nan")]] * 2)), verdict)
    path = tmp_path / write_reproducer(outcome, TASK, suite, f"{module}:{target}", tmp_path)
    done = run_script(path, tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert f"operators of relu on {module}:{target}: {verdict}" in done.stdout


def run_lacking(path, folder, module):
    """Run the script of a reproducer, as its child does, where a module is not installed."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    code = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path(sys.argv.pop(1), {{}}, '__main__')"
    command = [sys.executable, "-c", code, str(folder / "repro.py"), "child"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "repeats", "status"),
    [(Verdict.VALUE, False, AGREES), (Verdict.CRASH, False, AGREES), (Verdict.CONTRACT, True, NOT_RUN)],
)
def test_repro_script_needs_suite_for_repeated_check_only(suite, tmp_path, verdict, repeats, status):
    """The script needs the suite only to repeat a check."""
    outcome = make_failed_outcome(make_relu_case(torch.rand(2, 3)), verdict)
    outcome = replace(outcome, case=None) if repeats else outcome
    path = tmp_path / write_reproducer(outcome, TASK, suite, "onnxruntime", tmp_path)
    done = run_lacking(path, tmp_path, "clika_ref_conformance")
    assert done.returncode == status, done.stdout + done.stderr
    assert ("cannot run the case: " in done.stdout and "clika_ref_conformance" in done.stdout) == repeats
    assert ("the target agrees with the stored results" in done.stdout) != repeats


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("named", ["gone_since:TARGET", "{module}:GONE", "nobody"])
def test_repro_script_missing_target_exits_2(suite, module, tmp_path, named, repeats):
    """The script exits with 2 if the target does not exist."""
    outcome = make_failed_outcome(make_relu_case(torch.rand(2, 3)), Verdict.CONTRACT if repeats else Verdict.VALUE)
    outcome = replace(outcome, case=None) if repeats else outcome
    path = tmp_path / write_reproducer(outcome, TASK, suite, named.format(module=module), tmp_path)
    done = run_script(path, tmp_path)
    assert (done.returncode, done.stderr) == (2, ""), done
    assert "cannot run the case: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["torch", "onnxruntime", "clika_ref_aten"])
def test_repro_script_missing_package_untried(suite, tmp_path, lacking):
    """The script reports that a missing package prevents the run."""
    path = write_reproducer(
        make_failed_outcome(make_relu_case(torch.rand(2, 3)), Verdict.CRASH), TASK, suite, "onnxruntime", tmp_path
    )
    done = run_lacking(tmp_path / path, tmp_path, lacking)
    assert done.returncode == (2 if lacking == "torch" else NOT_RUN), done
    assert "cannot run the case: " in done.stdout


def test_replay_finds_fault_until_fixed(suite, module, tmp_path):
    """Replay finds the fault again, and passes once it is fixed."""
    path = tmp_path / write_reproducer(
        make_failed_outcome(make_relu_case(torch.rand(2, 3))), TASK, suite, f"{module}:TARGET", tmp_path
    )
    again = replay(path, REGISTRY, f"{module}:TARGET")
    assert (again.verdict, again.name) == (Verdict.VALUE, "relu-1")
    assert replay(path, REGISTRY, "onnxruntime").verdict is Verdict.PASS


def test_read_reproducer_keeps_limits_of_run(suite, tmp_path):
    """A replayed case has the limits of its run."""
    patient = replace(suite, profile=replace(suite.profile, case_seconds=300.0, memory_bytes=2**33))
    path = tmp_path / write_reproducer(
        make_failed_outcome(make_relu_case(torch.rand(2, 3))), TASK, patient, "onnxruntime", tmp_path
    )
    profile = read_reproducer(path, REGISTRY).profile
    assert (profile.case_seconds, profile.memory_bytes) == (300.0, 2**33)


def test_replay_user_target_needs_option(suite, tmp_path):
    """A zip does not decide the module that is imported."""
    path = tmp_path / write_reproducer(
        make_failed_outcome(make_relu_case(torch.rand(2, 3))), TASK, suite, "antigravity:X", tmp_path
    )
    with pytest.raises(
        ReportError, match=r"a zip must not select code to import. Give its target yourself: --target antigravity:X"
    ):
        replay(path, REGISTRY)
    assert "antigravity" not in sys.modules


def replace_files(content, **files):
    """Return a reproducer with some files replaced, added, or removed (None)."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    kept |= {name.replace("__", "."): data for name, data in files.items()}
    return pack({name: data for name, data in kept.items() if data is not None})


def replace_meta_entries(content, **entries):
    """Return a reproducer with some entries of ``meta.json`` replaced."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        meta = json.loads(archive.read("meta.json"))
    return replace_files(content, meta__json=json.dumps(meta | entries).encode())


def make_object_npz():
    """Return an npz file of Python objects, which only pickle can read."""
    file = io.BytesIO()
    np.savez(file, run0_input0=np.array([{}], dtype=object))
    return file.getvalue()


LAYOUT = {"dtype": "float32", "shape": [2, 3], "strides": [3, 1], "offset": 0}

DAMAGES = {
    "no zip": (lambda c: b"no zip", "cannot read the reproducer"),
    "cut off": (lambda c: c[: len(c) // 2], "cannot read the reproducer"),
    "a flipped byte": (lambda c: c[:300] + bytes([c[300] ^ 255]) + c[301:], "cannot read the reproducer"),
    "a file missing": (lambda c: replace_files(c, graph__json=None), r"lacks \['graph\.json'\]"),
    "a file outside": (lambda c: replace_files(c, **{"../evil": b""}), "which no reproducer has"),
    "an absolute file": (lambda c: replace_files(c, **{"/etc/evil": b""}), "which no reproducer has"),
    "an artifact outside": (lambda c: replace_files(c, **{"artifact/../../evil": b""}), "which no reproducer has"),
    "many files": (lambda c: replace_files(c, **{f"artifact/{i}": b"" for i in range(70)}), "more than 64"),
    "no time at all": (
        lambda c: replace_meta_entries(c, limit_seconds=0),
        "limit_seconds is 0.0, not a time of at most a day",
    ),
    "time without end": (lambda c: replace_meta_entries(c, limit_seconds="inf"), "limit_seconds is inf, not a time"),
    "no JSON": (lambda c: replace_files(c, meta__json=b"{"), r"it is damaged \(JSONDecodeError"),
    "JSON of another form": (lambda c: replace_files(c, graph__json=b"[]"), r"it is damaged \(TypeError"),
    "deep JSON": (lambda c: replace_files(c, graph__json=b"[" * 10**5), r"it is damaged \(RecursionError"),
    "a newer format": (
        lambda c: replace_meta_entries(c, format=9),
        "it has format 9, but this suite reads format 2. Update it.",
    ),
    "no such layout": (
        lambda c: replace_meta_entries(c, runs=[{"name": "a", "inputs": [{}]}]),
        "does not fit its elements",
    ),
    "a huge layout": (
        lambda c: replace_meta_entries(c, runs=[{"name": "a", "inputs": [LAYOUT | {"offset": 10**12}]}]),
        "spans 1,000,000,000,006 elements",
    ),
    "a negative stride": (
        lambda c: replace_meta_entries(c, runs=[{"name": "a", "inputs": [LAYOUT | {"strides": [-3, 1]}]}]),
        "the invalid layout",
    ),
    "too few inputs": (
        lambda c: replace_meta_entries(c, runs=[{"name": "a", "inputs": []}]),
        "has 0 inputs, but its graph has 1",
    ),
    "Python objects": (lambda c: replace_files(c, inputs__npz=make_object_npz()), "does not consist of plain arrays"),
    "broken weights": (
        lambda c: replace_files(c, weights__safetensors=b"12345678"),
        r"it is damaged \(SafetensorError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_read_reproducer_damaged_file_raises(suite, tmp_path, damage):
    """A damaged reproducer raises ReportError with the reason."""
    change, message = DAMAGES[damage]
    path = tmp_path / "case.zip"
    path.write_bytes(
        change(make_reproducer(make_failed_outcome(make_relu_case(torch.ones(2, 3))), TASK, suite, "onnxruntime"))
    )
    with pytest.raises(ReportError, match=message):
        read_reproducer(path, REGISTRY)


def test_read_reproducer_unknown_operator_raises(suite, tmp_path):
    """An operator that no plugin declares is named."""
    content = make_reproducer(make_failed_outcome(make_relu_case(torch.ones(2, 3))), TASK, suite, "onnxruntime")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        graph = archive.read("graph.json").replace(b'"relu"', b'"nobodys"')
    (tmp_path / "case.zip").write_bytes(replace_files(content, graph__json=graph))
    with pytest.raises(ReportError, match=r"cannot replay .* no installed plugin declares the operators \['nobodys'\]"):
        read_reproducer(tmp_path / "case.zip", REGISTRY)


def test_unpack_too_large_raises(suite, tmp_path, monkeypatch):
    """A reproducer that unpacks to too many bytes raises before it is read."""
    path = tmp_path / "case.zip"
    path.write_bytes(
        replace_files(
            make_reproducer(make_failed_outcome(make_relu_case(torch.ones(2, 3))), TASK, suite, "onnxruntime"),
            repro__py=b" " * 10**6,
        )
    )
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 10**5)
    with pytest.raises(ReportError, match=r"unpacks to 1,\d+,\d+ bytes, more than 100,000"):
        unpack(path)


def test_replay_passing_case_passes(suite, tmp_path):
    """A case that passes replays as a pass."""
    case = make_relu_case(torch.ones(2, 3))
    assert run_case(case, suite).verdict is Verdict.PASS
    (tmp_path / "case.zip").write_bytes(make_reproducer(make_failed_outcome(case), TASK, suite, "onnxruntime"))
    assert replay(tmp_path / "case.zip", REGISTRY).verdict is Verdict.PASS


@dataclass(frozen=True)
class Doubling:
    """A pass that makes every graph return something else."""

    name: ClassVar[str] = "doubling"
    phase: ClassVar[Phase] = Phase.CLEAN
    after: ClassVar[tuple[str, ...]] = ()
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = ""

    def __call__(self, graph, operators, /):
        first = next(iter(graph.nodes))
        if first.op.name != "exp":
            graph.replace(first.output, Builder(graph, operators, before=first)("exp", first.inputs[0]))
            graph.erase(first)


@pytest.mark.parametrize("check", ["motifs", "pipeline order", "random order"])
def test_replay_pass_finding_runs_pass(suite, tmp_path, check):
    """A finding about a pass is replayed on the pass."""
    registry = replace(REGISTRY, passes={"doubling": Doubling()})
    outcome = replace(make_failed_outcome(make_relu_case(torch.rand(2, 3))), name=check)
    path = tmp_path / "case.zip"
    path.write_bytes(make_reproducer(outcome, Task("passes", "doubling"), suite, "onnxruntime"))
    assert "artifact/model.onnx" not in unpack(path)
    found = replay(path, registry)
    assert (found.verdict.is_failure, found.name) == (True, check)
    assert found.comparison.message.startswith("doubling: ")
    assert found.case is not None
    with pytest.raises(ReportError, match=r"there is no pass 'doubling'\. Install its plugin\."):
        replay(path, REGISTRY)


@pytest.mark.slow
def test_repro_script_pass_finding_runs_pass(suite, tmp_path):
    """The script of a finding about a pass runs the pass."""
    path = tmp_path / "case.zip"
    path.write_bytes(
        make_reproducer(
            make_failed_outcome(make_relu_case(torch.rand(2, 3))),
            Task("passes", "fold-constants"),
            suite,
            "onnxruntime",
        )
    )
    done = run_script(path, tmp_path)
    assert (done.returncode, "the target agrees" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
def test_repro_script_uses_operators_of_suite(suite, tmp_path):
    """The script uses the suite for operators that no plugin declares."""
    path = tmp_path / "case.zip"
    graph = build_call_graph(SUITE_OPERATORS["conformance_tap"], [torch.rand(2, 3)], {})
    case = GraphCase("tap", graph, [CaseRun("run-0", (torch.rand(2, 3),))])
    path.write_bytes(make_reproducer(make_failed_outcome(case), Task("passes", "fold-constants"), suite, "onnxruntime"))
    done = run_script(path, tmp_path)
    assert (done.returncode, "pass: " in done.stdout) == (0, True), done.stdout + done.stderr
