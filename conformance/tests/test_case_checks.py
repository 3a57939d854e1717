"""One case on one target: each fault of a target has its verdict, and a correct target passes."""

import re
import signal
from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.execution.case_checks import (
    has_same_bits,
    is_in_share,
    run_case,
    select_representative,
)
from clika_ref_conformance.execution.error_attribution import reset_sigint
from clika_ref_conformance.verdicts import Comparison, Verdict
from small_cases import REGISTRY, X, make_case, make_suite

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType


@pytest.mark.parametrize("x", [X.clone(), X.clone()[:1].expand(X.shape), X.clone().mT])
def test_run_case_restores_written_inputs(tmp_path, x):
    """Inputs that a target overwrites are restored, and the target fails each time."""
    held = x.clone()
    for _ in range(2):  # a target that writes the same again would pass the second time
        outcome = run_case(make_case(("relu", {}), x=x), make_suite(tmp_path, "writes-alike"))
        assert outcome.verdict is Verdict.CONTRACT
        assert torch.equal(x, held)


@pytest.mark.parametrize("passes", [False, True])
def test_run_case_faultless_target_passes(tmp_path, passes):
    """A target without fault passes and leaves no file."""
    outcome = run_case(make_case(("exp", {}), ("relu", {}), passes=passes), make_suite(tmp_path))
    assert outcome.verdict is Verdict.PASS, outcome.comparison
    assert outcome.comparison.elements == 12
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "verdict", "message"),
    [
        ("rejects", Verdict.UNSUPPORTED, "relu: it is a Tuesday"),
        ("refusal-raises", Verdict.CONTRACT, "unsupported_reason.* failed: KeyError: 'rank'"),
        ("refusal-empty", Verdict.CONTRACT, "unsupported_reason.* returned ''. Return None, or the reason as text."),
        ("refusal-number", Verdict.CONTRACT, "unsupported_reason.* returned 3. Return None, or the reason as text."),
        ("compile-raises", Verdict.UNDECLARED, "compiling failed, and the target did not reject.*no such kernel"),
        ("compile-leaves", Verdict.UNDECLARED, "compiling failed, and the target did not reject.*usage: compiler FILE"),
        ("load-raises", Verdict.ARTIFACT, "loading the artifact failed.*the file is damaged"),
        ("run-raises", Verdict.UNDECLARED, "running failed.*illegal instruction"),
        ("memory", Verdict.MEMORY, "compiling ran out of memory"),
        ("no-list", Verdict.STRUCTURE, "returned a Tensor instead of a list of tensors"),
        ("arrays", Verdict.STRUCTURE, "returned a list of ndarray instead"),
        ("elsewhere", Verdict.STRUCTURE, "output 0 is strided on meta. Return strided tensors on the CPU."),
        ("sparse", Verdict.STRUCTURE, "output 0 is sparse_coo on cpu. Return strided tensors on the CPU."),
        ("too-many", Verdict.STRUCTURE, "returned 2 outputs instead of 1"),
        ("too-few", Verdict.STRUCTURE, "returned 0 outputs instead of 1"),
        ("dtype", Verdict.STRUCTURE, "float64"),
        ("shape", Verdict.STRUCTURE, r"\[1, 2, 3\]"),
        ("view", Verdict.CONTRACT, "output 0 is a view of input 0"),
        ("array-view", Verdict.CONTRACT, "output 0 is a view of input 0"),
        ("writes", Verdict.CONTRACT, "wrote into its input 0"),
        ("reuses", Verdict.CONTRACT, "a later run changed the outputs"),
        ("value", Verdict.VALUE, ""),
    ],
)
def test_run_case_each_fault_has_its_verdict(tmp_path, fault, verdict, message):
    """Each fault of a target has its verdict and message."""
    x = X.abs() + 1
    outcome = run_case(make_case(("relu", {}), x=x), make_suite(tmp_path, fault))
    assert outcome.verdict is verdict, outcome.comparison
    assert re.search(message, outcome.comparison.message, re.DOTALL), outcome.comparison.message
    assert outcome.case is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["compile", "load", "run"])
def test_run_case_written_weight_fails_and_gets_restored(tmp_path, monkeypatch, when):
    """A target that writes into weights fails, and the weights are restored."""
    g = Graph("weighted")
    weight = torch.ones(2, 3)
    value = g.add_constant(weight, "weight")
    g.add_output(Builder(g, REGISTRY.operators)("add", g.add_input(TensorType(X.dtype, tuple(X.shape)), "x"), value))
    suite = make_suite(tmp_path)
    whole = {name: getattr(type(suite.target), name) for name in ("compile", "load")}

    def write_weight_before(name):
        def call_after_write(*args, **kwargs):
            weight.view(-1)[:1].mul_(-3)
            return whole[name](*args, **kwargs)

        return call_after_write

    if when == "run":
        monkeypatch.setattr(type(suite.target), "load", lambda *args: lambda inputs: [weight.mul_(-3)[:2] + inputs[0]])
    else:
        monkeypatch.setattr(type(suite.target), when, write_weight_before(when))
    outcome = run_case(GraphCase("weighted", g, [CaseRun("x", (X,))]), suite)
    assert (outcome.verdict, outcome.comparison.message) == (
        Verdict.CONTRACT,
        "the target wrote into the weight weight, which belongs to the model",
    )
    assert torch.equal(weight, torch.ones(2, 3))


def test_run_case_keyboard_interrupt_in_worker_fails(tmp_path):
    """KeyboardInterrupt is the target's fault where no user can have caused it."""
    case, suite = make_case(("relu", {})), make_suite(tmp_path, "compile-interrupts")
    with pytest.raises(KeyboardInterrupt):
        run_case(case, suite)
    before = signal.getsignal(signal.SIGINT)
    reset_sigint()
    try:
        outcome = run_case(case, suite)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.verdict is Verdict.UNDECLARED
    assert outcome.comparison.message == "compiling failed, and the target did not reject the call: KeyboardInterrupt: "


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("fault", "share"), [("drifts", 0.0), ("depends-on-compilation", 1.0)])
def test_run_case_changing_bits_report_nondeterministic(tmp_path, fault, share, dtype):
    """Results that change are reported even if the judge accepts them."""
    suite = make_suite(tmp_path, fault)
    suite = replace(suite, profile=replace(suite.profile, share_of_artifacts=share))
    case = make_case(("detach", {}), x=torch.full((2, 3), 1000).to(dtype))
    found = run_case(case, suite)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert re.match(
        r"output 0\[0, 0\] is (1001|1000.0\d+|1004.0|False) .* instead of (1000(.0)?|True); 6 of 6",
        found.comparison.message,
    )
    assert run_case(case, make_suite(tmp_path)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong-in-turn", r"output 0.* on a second run instead of .* elements differ"),
        ("wrong-in-turn-reused", r"output 0.* on a second run instead of .* elements differ"),
        ("wrong-then-raises", r"on a second run: running failed.*; on the first: output 0.* instead of "),
    ],
)
def test_run_case_wrong_on_one_run_reports_nondeterministic(tmp_path, fault, reason):
    """A result that is wrong on one run only is no wrong value."""
    outcome = run_case(make_case(("relu", {})), make_suite(tmp_path, fault))
    assert outcome.verdict is Verdict.NONDETERMINISTIC
    assert re.match(reason, outcome.comparison.message, re.DOTALL), outcome.comparison
    assert run_case(make_case(("relu", {})), make_suite(tmp_path, "value")).verdict is Verdict.VALUE


def test_run_case_share_of_artifacts_sets_compilations(tmp_path):
    """A case is compiled once, or twice if its share says so."""
    for share, compilations in ((0.0, ["model.onnx"]), (1.0, ["model.onnx", "again.onnx"])):
        suite = make_suite(tmp_path)
        run_case(make_case(("relu", {})), replace(suite, profile=replace(suite.profile, share_of_artifacts=share)))
        assert suite.target.compilations == compilations


def test_run_case_random_call_may_differ_between_runs(tmp_path):
    """Random calls may differ between runs."""
    case = make_case(("dropout", {"p": 0.5, "train": True}), x=torch.ones(100))
    assert run_case(case, make_suite(tmp_path)).verdict is Verdict.PASS


def test_run_case_input_or_repeated_output_passes(tmp_path):
    """An output that is an input, or occurs twice, can be compiled."""
    graph = Graph("pass-through")
    x = graph.add_input(TensorType(X.dtype, tuple(X.shape)), "x")
    y = Builder(graph, REGISTRY.operators)("relu", x)
    for value in (x, y, y):
        graph.add_output(value)
    suite = replace(make_suite(tmp_path), target=REGISTRY.targets["onnxruntime"])
    outcome = run_case(GraphCase("pass-through", graph, [CaseRun("typical", (X,))]), suite)
    assert outcome.verdict is Verdict.PASS, outcome.comparison


def test_run_case_call_rejected_by_eager_blames_sample(tmp_path):
    """A call that eager rejects is the fault of the sample."""
    case = make_case(("relu", {}))
    case = replace(case, runs=[CaseRun("wrong", (torch.ones(1, dtype=torch.complex64),))])
    outcome = run_case(case, make_suite(tmp_path))
    assert outcome.verdict is Verdict.SAMPLE
    assert "eager rejects the call" in outcome.comparison.message


def test_run_case_names_deciding_run(tmp_path):
    """The run that decides the verdict is named."""
    case = make_case(("exp", {}))
    runs = [*case.runs, CaseRun("last", (torch.full_like(X, torch.nan),))]
    outcome = run_case(replace(case, runs=runs), make_suite(tmp_path, "no-nan"))
    assert (outcome.verdict, outcome.run) == (Verdict.SPECIAL, "last")


def test_has_same_bits_compares_dtype_shape_and_sign_of_zero():
    """Dtype, shape and the sign of zero count; the bits of NaN do not."""
    zero, nan = torch.zeros(2), torch.tensor([torch.nan, 1.0])
    assert has_same_bits(nan, nan.clone())
    assert not has_same_bits(zero, -zero)
    assert not has_same_bits(zero, zero.double())
    assert not has_same_bits(zero, zero[None])
    assert not has_same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_is_in_share_selects_by_name():
    """The name decides if a check is in a share."""
    chosen = [name for name in map(str, range(2000)) if is_in_share(name, 0.1)]
    assert 150 < len(chosen) < 250
    assert all(is_in_share(name, 0.5) for name in chosen)
    assert not any(is_in_share(name, 0.0) for name in chosen)


def test_run_case_ambiguous_run_defers_to_clear_run(tmp_path):
    """A run where rounding decides too much leaves the verdict to the others."""
    graph = Graph("step")
    x = graph.add_input(TensorType(torch.float32, (4,)), "x")
    build = Builder(graph, REGISTRY.operators)
    graph.add_output(build("floor", build("exp", build("log", x))))
    near, clear = CaseRun("near", (torch.tensor([2.0, 3.0, 5.0, 7.0]),)), CaseRun("clear", (torch.tensor([2.5] * 4),))
    suite = make_suite(tmp_path)
    strict = replace(suite, profile=replace(suite.profile, trusts_eager=False))
    alone = run_case(GraphCase("step", graph, [near]), strict)
    assert alone.verdict is Verdict.NOT_RUN
    assert alone.comparison.message == "rounding decides 4 of 4 elements: both results are correct"
    both = run_case(GraphCase("step", graph, [near, clear]), strict)
    assert (both.verdict, both.run) == (Verdict.PASS, "clear")
    assert run_case(GraphCase("step", graph, [near]), suite).verdict is Verdict.PASS, "these are eager's bits"


def test_select_representative_orders_verdicts():
    """A deviation comes before a pass, and a pass before an outcome without verdict."""
    lost = ("lost", Comparison(Verdict.NOT_RUN, ratio=3.0))
    right, worse = ("right", Comparison(Verdict.PASS)), ("worse", Comparison(Verdict.PASS, ratio=0.5))
    other = ("other", Comparison(Verdict.DEVIATION))
    assert select_representative([lost, right, other, worse]) == other
    assert select_representative([lost, right, worse]) == worse
    assert select_representative([lost]) == lost


def test_select_representative_sums_elements():
    """The elements of all runs are counted."""
    few = ("few", Comparison(Verdict.PASS, ratio=0.5, elements=3, unstable=1))
    many = ("many", Comparison(Verdict.PASS, elements=40, ambiguous=2, unstable=4))
    run, comparison = select_representative([few, many])
    assert (run, comparison.elements, comparison.ambiguous, comparison.unstable) == ("few", 43, 2, 5)
