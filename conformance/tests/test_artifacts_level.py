"""L6: correct artifacts pass; other bytes, swapped inputs, lost weights and untyped errors are found."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.fresh_process import (
    OTHER_PROCESS_HASH_SEED,
    FreshProcess,
    FreshProcessError,
    digest_folder,
)
from clika_ref_conformance.execution.levels import LEVELS, list_tasks
from clika_ref_conformance.levels import artifacts
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Verdict
from faulty_targets import PartialTarget

from clika_ref.core.artifacts import Artifact
from clika_ref.core.registry import load_registry

PROFILE = replace(PROFILES["quick"], share_of_artifacts=0.01, graphs=200)
REGISTRY = load_registry()
RUNTIME = REGISTRY.targets["onnxruntime"]


def make_suite(folder, target=RUNTIME):
    return Suite(REGISTRY, target, PROFILE, folder)


def run_checks(subject, suite, *names):
    found = artifacts.checks(Task("artifacts", subject), suite)
    return {check.name: check.run() for check in found if not names or check.name in names}


class Changed:
    """ONNX Runtime, as a base class of faulty targets."""

    def __getattr__(self, name):
        return getattr(RUNTIME, name)


@pytest.mark.slow
def test_artifacts_files_transfer_and_damage_raises(tmp_path):
    """Artifacts run in another process, and damaged files raise typed errors."""
    found = run_checks("files", make_suite(tmp_path))
    assert {name: o.comparison.message for name, o in found.items() if o.verdict is not Verdict.PASS} == {}
    assert {"inputs of equal shape", "external weights", "damaged-0", "damaged-7"} <= found.keys()
    assert "truncated to nothing: TargetError" in found["damaged-0"].comparison.message


@pytest.mark.slow
def test_artifacts_random_graphs_transfer(tmp_path):
    """A share of the random graphs runs in another process."""
    found = run_checks("random graphs", make_suite(tmp_path))
    assert {o.verdict for o in found.values()} <= {Verdict.PASS, Verdict.NOT_RUN}
    assert Verdict.PASS in {o.verdict for o in found.values()}


@pytest.mark.slow
def test_artifacts_operator_calls_share_one_fresh_process(tmp_path):
    """Calls of operators run in one other process."""
    suite = make_suite(tmp_path)
    for name in ("softmax", "max", "conv2d"):
        assert run_checks(name, suite)["transferred"].verdict is Verdict.PASS
    process = artifacts.ArtifactChecks(suite).fresh.process
    assert process is not None
    run_checks("relu", suite)
    assert artifacts.ArtifactChecks(suite).fresh.process is process
    assert run_checks("rand", suite)["transferred"].verdict is Verdict.PASS


@pytest.mark.slow
def test_artifacts_input_as_output_transfers(tmp_path):
    """An artifact whose output is an input runs in another process."""
    suite = make_suite(tmp_path)
    case = artifacts.make_input_order_case(suite)
    case.graph.add_output(case.graph.inputs[0])
    assert artifacts.ArtifactChecks(suite).transfer(case).verdict is Verdict.PASS
    assert (
        suite.lower_graph(case).outputs[1].producer is not None
    )  # the memory of an input may keep its elements for a while


def test_artifacts_tasks_grow_with_share_of_profile(tmp_path):
    """The selected tasks are the same each time; a larger share contains them."""
    small = make_suite(tmp_path)
    large = replace(small, profile=replace(PROFILE, share_of_artifacts=0.1))
    assert artifacts.tasks(small) == artifacts.tasks(small)
    assert set(artifacts.tasks(small)) < set(artifacts.tasks(large))


def test_list_tasks_requested_operator_kept_in_artifacts(tmp_path):
    """A requested operator is never left out of the share."""
    asked = replace(make_suite(tmp_path), subjects=("softmax",))
    assert Task("artifacts", "softmax") in list_tasks(asked, {"artifacts": LEVELS["artifacts"]})


def test_artifacts_bytes_differ_per_compile_fails(tmp_path):
    """Bytes that change from one compilation to the next are reported."""

    class RandomFile(Changed):
        def compile(self, graph, path, **options):
            artifact = RUNTIME.compile(graph, path, **options)
            Path(f"{path}.stamp").write_text(secrets.token_hex(), encoding="utf-8")
            return artifact

    (found,) = run_checks("files", make_suite(tmp_path, RandomFile()), "inputs of equal shape").values()
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert "twice in one process" in found.comparison.message


@pytest.mark.slow
def test_artifacts_bytes_differ_per_process_fails(tmp_path):
    """Bytes that depend on the process are reported."""

    class ProcessFile(Changed):
        def compile(self, graph, path, **options):
            artifact = RUNTIME.compile(graph, path, **options)
            Path(f"{path}.process").write_text(str(os.getpid()), encoding="utf-8")
            return artifact

    (found,) = run_checks("files", make_suite(tmp_path, ProcessFile()), "inputs of equal shape").values()
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert "another process" in found.comparison.message


@pytest.mark.slow
def test_artifacts_reordered_inputs_fail(tmp_path):
    """Inputs that a loaded artifact takes in another order are reported."""

    class Sorted(Changed):
        def compile(self, graph, path, **options):
            artifact = RUNTIME.compile(graph, path, **options)
            return replace(artifact, input_names=tuple(sorted(artifact.input_names)))

        def load(self, artifact):
            runner = RUNTIME.load(artifact)
            return lambda inputs: runner(inputs[::-1] if len(inputs) > 1 else inputs)  # right here, wrong in a file

    (found,) = run_checks("files", make_suite(tmp_path, Sorted()), "inputs of equal shape").values()
    assert found.verdict is Verdict.VALUE
    assert "output 0 differs if another process loads the artifact" in found.comparison.message


@pytest.mark.slow
def test_artifacts_random_results_report_nondeterministic(tmp_path):
    """Random results are reported as nondeterministic, not as a fault of the artifact."""

    class RandomOffset(Changed):
        def load(self, artifact):
            runner = RUNTIME.load(artifact)
            return lambda inputs: [t + secrets.randbelow(2**20) for t in runner(inputs)]

    (found,) = run_checks("files", make_suite(tmp_path, RandomOffset()), "inputs of equal shape").values()
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert "loaded and run again in one process" in found.comparison.message


@pytest.mark.slow
def test_fresh_process_separates_typed_raw_and_crash(tmp_path):
    """Typed errors, raw errors and crashes of the other process are distinguished."""
    fresh = FreshProcess(make_suite(tmp_path))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(FreshProcessError, match="TargetError") as typed:
        fresh.run(Artifact(broken, "onnxruntime", ("x",), ("y",)), [torch.zeros(1)])
    assert typed.value.kind == "typed"
    with pytest.raises(FreshProcessError) as raw:
        fresh.request({"do": "run"})
    assert (raw.value.kind, str(raw.value)) == ("raw", "KeyError: 'names'")
    fresh.process.kill()
    with pytest.raises(FreshProcessError, match=r"the other process died \(signal 9\)") as crash:
        fresh.request({"do": "run"})
    assert crash.value.kind == "crash"
    with pytest.raises(FreshProcessError) as raw:  # it is started again
        fresh.request({"do": "run"})
    assert raw.value.kind == "raw"
    fresh.close()


@pytest.mark.slow
def test_fresh_process_no_answer_ends_with_hang(tmp_path):
    """A process that does not answer is ended."""
    suite = make_suite(tmp_path)
    fresh = FreshProcess(replace(suite, profile=replace(PROFILE, case_seconds=0.0)))
    with pytest.raises(FreshProcessError, match="did not answer within 0 s") as hang:
        fresh.request({"do": "run"})
    assert hang.value.kind == "hang"
    assert fresh.process is None


def test_fresh_process_hash_seed_differs():
    """The other process uses a different hash seed."""
    assert os.environ.get("PYTHONHASHSEED") != OTHER_PROCESS_HASH_SEED


def test_digest_folder_covers_names_and_bytes(tmp_path):
    """A digest changes with the names and the bytes of files."""
    (tmp_path / "a").write_bytes(b"1")
    first = digest_folder(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = digest_folder(tmp_path)
    (tmp_path / "b").write_bytes(b"2")
    assert len({first, second, digest_folder(tmp_path)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "verdict"), [(True, Verdict.ARTIFACT), (False, Verdict.PASS)])
def test_check_damage_runnable_file_fails_only_if_cut(tmp_path, cut, verdict):
    """A truncated file that still runs is a failure; an altered one is not."""
    suite = make_suite(tmp_path)
    case = artifacts.make_input_order_case(suite)
    found = artifacts.ArtifactChecks(suite).check_damage("damage", case, lambda _: "untouched", is_cut=cut)
    assert found.verdict is verdict
    assert found.comparison.message.startswith("untouched")


class RaisingRuns(Changed):
    """Raises an error of its own in every run."""

    def load(self, artifact):
        def run(inputs):
            raise OSError("the device is gone")

        return run


def test_transfer_raw_run_error_reports_not_run(tmp_path):
    """An artifact that cannot run here is left to other levels, for any error type."""
    suite = make_suite(tmp_path, RaisingRuns())
    found = artifacts.ArtifactChecks(suite).transfer(artifacts.make_input_order_case(suite))
    assert found.verdict is Verdict.NOT_RUN
    assert found.comparison.message.endswith("as other levels report: the device is gone")


def test_artifacts_unsupported_files_report_unsupported(tmp_path):
    """Files with operators that the target does not support are no failures."""
    found = run_checks("files", make_suite(tmp_path, PartialTarget()))
    assert {o.verdict for o in found.values()} == {Verdict.UNSUPPORTED}
    assert found["damaged-0"].comparison.message == "matmul: only relu so far"
    assert found["inputs of equal shape"].comparison.message == "sub: only relu so far"


def test_artifacts_unsupported_random_graphs_not_run(tmp_path):
    """Graphs are not run if the target supports none of their calls."""
    found = run_checks("random graphs", make_suite(tmp_path, PartialTarget(known=())))
    assert {o.verdict for o in found.values()} == {Verdict.NOT_RUN}
    assert found["graph-000"].comparison.message == "the target rejects every call that was drawn for the graph"
