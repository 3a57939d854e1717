"""L0: each gap in a declaration is reported, and a complete declaration passes."""

import re
from dataclasses import dataclass, replace

import bad_samples
import pytest
import torch
from clika_ref_conformance.cases import Task
from clika_ref_conformance.drawing.calls.attribute_variation import record_call, vary_single_attributes
from clika_ref_conformance.levels import contract
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from sampled_operators import find_check, make_suite, shift
from torch import Tensor, float32

from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import TensorSample
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

OPERATORS = load_registry().operators


def run_check_named(op, folder, name, **changes):
    suite = make_suite(op, folder=folder, **changes)
    (task,) = contract.tasks(suite)
    assert task == Task("contract", op.name)
    return find_check(contract.checks(task, suite), name).run()


def declare_operator():
    @operator()
    def bare(x: Tensor, *, k: int = 1, note: str = "") -> Tensor:
        """``k * x``."""
        return x * k

    @bare.onnx
    def _(op, x, *, k, note):
        return op.Mul(x, op.like(x, k))

    return bare


def test_contract_complete_declaration_passes(tmp_path):
    """A complete declaration passes every check."""
    suite = make_suite(shift, folder=tmp_path)
    found = {c.name: c.run().verdict for c in contract.checks(Task("contract", "shift"), suite)}
    names = {
        "schema",
        "samples",
        "unsupported-reason",
        "consumption",
        "sensitivity-by",
        "sensitivity-dim",
        "sensitivity-twice",
    }
    assert found == dict.fromkeys(names, Verdict.PASS)


def test_schema_without_types_or_docstring_fails(tmp_path):
    """The schema check asks for types and a docstring."""

    @operator()
    def vague(x, *, k=1):
        return x

    found = run_check_named(vague, tmp_path, "schema")
    assert (found.verdict, found.comparison.message) == (Verdict.CONTRACT, "vague(x, *, k=1): give x, k a type")

    @operator()
    def identity_op(x: Tensor) -> Tensor:
        return x

    assert (
        run_check_named(identity_op, tmp_path, "schema").comparison.message
        == "identity_op has no docstring. Describe its result."
    )


def test_samples_missing_fail_and_skip_other_checks(tmp_path):
    """An operator without samples is named, and its other checks are not run."""
    identity_op = declare_operator()
    found = run_check_named(identity_op, tmp_path, "samples")
    assert found.verdict is Verdict.CONTRACT
    assert "bare has no samples, so it cannot be tested. Declare some with @bare.samples." in found.comparison.message
    assert run_check_named(identity_op, tmp_path, "consumption").verdict is Verdict.NOT_RUN


def test_samples_single_attribute_value_fails(tmp_path):
    """An attribute with a single drawn value is named."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note="a"))
    message = run_check_named(bare, tmp_path, "samples").comparison.message
    assert message == "the samples of bare draw only one value of note: draw at least two"


def test_consumption_unread_attribute_fails(tmp_path):
    """An attribute that changes the result but is never read is named."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert run_check_named(bare, tmp_path, "consumption").verdict is Verdict.PASS

    @bare.onnx
    def _(op, x, *, k, note):
        return op.Identity(x)

    found = run_check_named(bare, tmp_path, "consumption")
    assert found.verdict is Verdict.CONTRACT
    assert "the lowering of bare never reads k in bare(float32[" in found.comparison.message
    assert "which eager computes differently with k=" in found.comparison.message


def test_consumption_lowering_with_kwargs_passes(tmp_path):
    """A lowering that takes all attributes as kwargs reads them."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    bare.onnx(lambda op, x, **attrs: op.Mul(x, op.like(x, attrs["k"])))
    assert run_check_named(bare, tmp_path, "consumption").verdict is Verdict.PASS


def test_samples_unknown_argument_blames_sampler(tmp_path):
    """A call that the operator does not accept is the fault of its samples."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), kay=draw(s.choice(1, 2)), note="a"))
    message = run_check_named(bare, tmp_path, "samples").comparison.message
    assert re.search(
        r"\(in test_contract\.py, line \d+: in the return value of the samples that begin there\)", message
    ), message


def test_samples_error_reports_draws_and_skips_checks(tmp_path):
    """Samples that raise are reported with their draws; other checks are not run."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor(rank=0, dtype=(float32,))), k=draw(s.choice(3)) // 0))
    found = run_check_named(bare, tmp_path, "samples")
    assert found.verdict is Verdict.SAMPLE
    message = found.comparison.message
    assert message.startswith("the samples of bare raise ZeroDivisionError: ")
    assert "(in test_contract.py, line " in message
    assert "after drawing TensorSample(dtype=torch.float32, shape=()" in message
    assert message.endswith(", 3")
    for name in ("unsupported-reason", "consumption", "sensitivity-k"):
        found = run_check_named(bare, tmp_path, name)
        assert found.verdict is Verdict.NOT_RUN
        assert found.comparison.message.endswith("; see contract/bare")


@pytest.mark.parametrize("source", ["random", "torch", "numpy"])
def test_samples_process_generator_fails(tmp_path, source):
    """Samples that draw from a generator of the process are reported."""
    bare = declare_operator()
    drawn = bad_samples.SOURCES[source]
    bare.samples(lambda draw, s: s.call(draw(s.tensor(dtype=(float32,))), k=drawn(), note=draw(s.choice("a", "b"))))
    found = run_check_named(bare, tmp_path, "samples")
    assert found.verdict is Verdict.SAMPLE
    assert re.search(r"the samples of bare draw bare\(.*, and with the same seed bare\(", found.comparison.message)
    assert found.comparison.message.endswith("not with the generators of random, torch or numpy.")


def test_samples_tensors_compared_by_elements(tmp_path):
    """Tensors that samples make are compared by their elements."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(torch.rand(2000), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert run_check_named(bare, tmp_path, "samples").verdict is Verdict.SAMPLE
    bare.samples(lambda draw, s: s.call(torch.ones(2000), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert run_check_named(bare, tmp_path, "samples").verdict is Verdict.PASS


def test_sensitivity_attribute_without_effect_not_run(tmp_path):
    """An attribute that never changes the result is reported."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert run_check_named(bare, tmp_path, "sensitivity-k").verdict is Verdict.PASS
    found = run_check_named(bare, tmp_path, "sensitivity-note")
    assert found.verdict is Verdict.NOT_RUN
    assert found.comparison.message == (
        "note never changes the result of the samples of bare, on typical elements. Only calls that differ in more, or "
        "special elements, can show that a target ignores it."
    )


def test_unsupported_reason_missing_lowering_passes(tmp_path):
    """An operator without a lowering is unsupported with a reason."""
    bare = declare_operator()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2))))
    bare.lowering = None
    assert run_check_named(bare, tmp_path, "unsupported-reason").verdict is Verdict.PASS
    assert run_check_named(bare, tmp_path, "consumption").comparison.message == "bare has no ONNX lowering"


def test_unsupported_reason_blank_fails(tmp_path):
    """A blank reason is reported."""

    @dataclass(frozen=True)
    class EmptyReason(Identity):
        def unsupported_reason(self, node):
            return " "

    suite = replace(make_suite(shift, folder=tmp_path), target=EmptyReason())
    found = find_check(contract.checks(Task("contract", "shift"), suite), "unsupported-reason").run()
    assert found.verdict is Verdict.CONTRACT
    assert found.comparison.message == "identity rejects shift without a reason: ' '"


def test_unsupported_reason_blank_for_one_call_fails(tmp_path):
    """A blank reason is reported for whichever call returns it."""

    @dataclass(frozen=True)
    class SometimesEmptyReason(Identity):
        def unsupported_reason(self, node):
            return "" if node.inputs[0].type.rank > 1 else None

    suite = replace(make_suite(shift, folder=tmp_path), target=SometimesEmptyReason())
    found = find_check(contract.checks(Task("contract", "shift"), suite), "unsupported-reason").run()
    assert found.verdict is Verdict.CONTRACT


def test_samples_undrawn_operand_fails(tmp_path):
    """An operand that is never drawn is named."""

    @operator()
    def two(x: Tensor, y: Tensor | None = None) -> Tensor:
        """``x`` or ``x + y``."""
        return x if y is None else x + y

    two.samples(lambda draw, s: s.call(draw(s.tensor())))
    assert run_check_named(two, tmp_path, "samples").comparison.message == "the samples of two never draw y"


def test_samples_omissions_reported_together(tmp_path):
    """All omissions of the samples are reported at once."""

    @operator()
    def three(x: Tensor, y: Tensor | None = None, z: Tensor | None = None, *, k: int = 1) -> Tensor:
        """Return ``x`` and the other operands that are given."""
        return x if z is None else x + z

    three.samples(lambda draw, s: s.call(x := draw(s.tensor()), None, draw(s.tensor(shape=x.shape)), k=2))
    assert run_check_named(three, tmp_path, "samples").comparison.message == (
        "the samples of three draw only one value of k: draw at least two; they never draw y; they never omit z"
    )


def test_vary_single_attributes_changes_one_attribute():
    """Varied calls differ in one attribute and in no operand."""
    traced = record_call(shift, "seed")
    found = list(vary_single_attributes(shift, traced))
    assert {name for name, _ in found} <= {"by", "dim", "twice"}
    assert found
    for name, call in found:
        assert call.operands == traced.call.operands
        assert [n for n in call.attrs if call.attrs[n] != traced.call.attrs[n]] == [name]


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_samples_declared_operators_vary_each_attribute(name, tmp_path):
    """The samples of every declared operator vary every attribute."""
    assert run_check_named(OPERATORS[name], tmp_path, "samples").comparison.message == ""


def test_emit_wrong_attribute_type_raises_clika_error():
    """An attribute of a wrong type is accepted or raises a ClikaError."""
    refused = 0
    for op in (op for op in OPERATORS.values() if op.sampler is not None and op.lowering is not None):
        call = record_call(op, "seed").call
        operands = [TensorType(o.dtype, o.shape) if isinstance(o, TensorSample) else o for o in call.operands]
        for name in op.attributes:
            graph = Graph("wrong")
            inputs = [graph.add_input(o, "x") if isinstance(o, TensorType) else o for o in operands]
            try:
                graph.insert(
                    node := Node(op, inputs, {**call.attrs, name: "no such value"}), infer_types(op, inputs, node.attrs)
                )
                emit(graph)
            except ClikaError:
                refused += 1
    assert refused > 300


def test_trait_false_claim_fails_and_random_call_not_run(tmp_path):
    """A trait that claims too much fails; a random call proves nothing."""

    @operator(quant=SHARED_QPARAMS)
    def halve(x: Tensor, *, random: bool = True) -> Tensor:
        """``x / 2``."""
        return x / 2

    halve.samples(lambda draw, s: s.call(draw(s.tensor(rank=(1, 2))), random=draw(s.booleans())))
    found = run_check_named(halve, tmp_path, "trait")
    assert found.verdict is Verdict.CONTRACT
    assert "is declared as shared-qparams, but it returns" in found.comparison.message
    halve.random = True
    found = run_check_named(halve, tmp_path, "trait")
    assert found.verdict is Verdict.NOT_RUN
    assert found.comparison.message == "every call of halve is random, or eager rejects it"
