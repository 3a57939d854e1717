"""L0: complete declarations of operators, samples that vary all of them, lowerings that read all attributes."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import CodeType, FrameType
from typing import Any

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator, format_schema
from clika_ref.core.samples import Call, Descriptions, random_draw
from clika_ref.onnx_export.emission import emit
from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.drawing.calls.attribute_variation import RecordedCall, record_call, vary_single_attributes
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.drawing.calls.covering import draw_covering_calls
from clika_ref_conformance.drawing.calls.drawn_call import fill_operands, format_call
from clika_ref_conformance.drawing.calls.dtypes import select_dtypes
from clika_ref_conformance.drawing.calls.vectors import make_typical_run
from clika_ref_conformance.drawing.sampling import (
    SampleError,
    UnjudgedDtypeError,
    collect_judged_calls,
    draw_call_of_any_dtype,
)
from clika_ref_conformance.eager_calls import call_eagerly
from clika_ref_conformance.execution.case_checks import has_same_bits, is_valid_reason
from clika_ref_conformance.judged_dtypes import is_judged
from clika_ref_conformance.judging.trait_claims import claim_of, find_broken_claim, has_claims
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

LEVEL = "contract"

RANDOM_CALLS = 24
"""Random calls in addition to the cover: a branch that 1 call in 6 takes stays untested with a probability of 1 %."""

PAIRS_PER_ATTRIBUTE = 3
"""Number of pairs of calls that are compared for each attribute."""

TRIES_PER_ATTRIBUTE = 40
"""Number of calls that are compared to find the pairs."""

UNTESTED_ATTRIBUTES = frozenset({"device", "generator"})
"""Attributes for the device or random state of the result: two of their values cannot be tried here."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator."""
    return [Task(LEVEL, name) for name in suite.registry.operators]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of one declaration."""
    contract = ContractChecks(suite.registry.operators[task.subject], suite)
    plain: dict[str, Callable[[], str | None]] = {
        "schema": contract.check_schema,
        "samples": contract.check_samples,
        "unsupported-reason": contract.check_rejections,
        "consumption": contract.check_consumption,
    }
    if has_claims(contract.op):
        plain["trait"] = contract.check_trait
    found = [
        Check(name, functools.partial(_run_contract_check, name, Verdict.CONTRACT, find_problem))
        for name, find_problem in plain.items()
    ]
    for attribute in contract.op.attributes:
        if attribute not in UNTESTED_ATTRIBUTES:
            name = f"sensitivity-{attribute}"
            find_problem = functools.partial(contract.check_sensitivity, attribute)
            found.append(Check(name, functools.partial(_run_contract_check, name, Verdict.NOT_RUN, find_problem)))
    return found


def _run_contract_check(name: str, verdict: Verdict, find_problem: Callable[[], str | None]) -> Outcome:
    """Return the outcome of a check that returns None, or a description of the problem."""
    try:
        problem = find_problem()
    except UnjudgedDtypeError as error:
        return Outcome(name, error.comparison)
    except SampleError as error:
        if name == "samples":
            return Outcome(name, Comparison(Verdict.SAMPLE, error.details))
        return Outcome(name, make_not_run(Reason.SAMPLES, str(error)))
    except _NothingToCheckError as unknown:
        return Outcome(name, make_not_run(Reason.NO_SUITABLE_CALL, str(unknown)))
    if problem is None:
        return Outcome(name, Comparison(Verdict.PASS))
    unseen = verdict is Verdict.NOT_RUN
    return Outcome(name, make_not_run(Reason.NOT_SENSITIVE, problem) if unseen else Comparison(verdict, problem))


class _NothingToCheckError(Exception):
    pass


@dataclass
class ContractChecks:
    """Declaration of one operator."""

    op: Operator
    suite: Suite
    _unjudged: torch.dtype | None = field(default=None, init=False)

    def check_schema(self) -> str | None:
        """Describe operands and attributes without a type, or a missing docstring."""
        signature = inspect.signature(self.op.reference)
        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        if bare or signature.return_annotation is signature.empty:
            return f"{format_schema(self.op)}: give {', '.join(bare) or 'the result'} a type"
        return None if self.op.reference.__doc__ else f"{self.op.name} has no docstring. Describe its result."

    def check_samples(self) -> str | None:
        """List everything that the samples omit: values of attributes, operands, and calls without optional ones.

        Control flow has no samples: its bodies are graphs, which the suite does not draw.
        """
        if self.op.bodies:
            return None
        if self.op.sampler is None:
            return f"{self.op.name} has no samples, so it cannot be tested. Declare some with @{self.op.name}.samples."
        self._check_determinism()  # also checks that samples can be drawn
        names = [name for name in self.op.attributes if name not in UNTESTED_ATTRIBUTES]
        once = [
            name
            for name in names
            if len({(type(c.attrs[name]), repr(c.attrs[name])) for c in self.calls}) < 2
            and not self._has_unjudged_variation(name)
        ]
        fixed = [
            (p, [call.operands[i] for call in self.calls]) for i, p in enumerate(self.op.operands) if not p.variadic
        ]
        never = [p.name for p, drawn in fixed if all(o is None for o in drawn)]
        always = [p.name for p, drawn in fixed if p.optional and all(o is not None for o in drawn)]
        templates = (
            ("draw only one value of {}: draw at least two", once),
            ("never draw {}", never),
            ("never omit {}", always),
        )
        problems = [text.format(", ".join(names)) for text, names in templates if names]
        return f"the samples of {self.op.name} {'; they '.join(problems)}" if problems else None

    def _check_determinism(self) -> None:
        """Draw again with the same seeds.

        Raises:
            SampleError: the calls differ.
        """
        for name, traced in self._traced.items():
            call, other = traced.call, self._draw(record_call, name).call
            if not _is_same_call(call, other):
                problem = f"draw {format_call(self.op, call)}, and with the same seed {format_call(self.op, other)}"
                advice = ". Draw every varying value with draw(), not with the generators of random, torch or numpy."
                raise SampleError(self.op, problem, advice)

    def check_rejections(self) -> str | None:
        """Describe a call that the target rejects without a reason, among one call of each choice of dtypes.

        The operator level checks the same for each of its calls.
        """
        graphs = [graph for graph in map(self._graph, self.calls) if graph is not None]
        nodes = {str([v.type.dtype for v in graph.inputs]): n for graph in graphs for n in graph.nodes}
        if not nodes:
            raise _NothingToCheckError(f"no call of {self.op.name} can be built as a graph")
        for node in nodes.values():
            reason = self.suite.target.unsupported_reason(node)
            if reason is not None and not is_valid_reason(reason):
                return f"{self.suite.target.name} rejects {self.op.name} without a reason: {reason!r}"
        return None

    def check_consumption(self) -> str | None:
        """Name an attribute that decides the result of a call, but is never read by the ONNX lowering.

        Only pairs of calls with results of the same type count: otherwise, the lowering may read the difference from
        the type.
        """
        if self.op.lowering is None:
            raise _NothingToCheckError(f"{self.op.name} has no ONNX lowering")
        for name, pairs in self.pairs.items():
            for call, other in pairs:
                first, second = self._graph(call), self._graph(other)
                if (
                    first is None
                    or second is None
                    or [v.type for v in first.outputs] != [v.type for v in second.outputs]
                ):
                    continue
                read = [find_read_attributes(self.op, graph) for graph in (first, second)]
                if any(r is not None and name not in r for r in read):
                    return (
                        f"the lowering of {self.op.name} never reads {name} in {format_call(self.op, call)}, "
                        f"which eager computes differently with {name}={other.attrs[name]!r}"
                    )
        if self.op.attributes and not any(self.pairs.values()):
            self._raise_unjudged()
            raise _NothingToCheckError(
                f"no two drawn calls of {self.op.name} differ in one attribute and in the result"
            )
        return None

    def check_trait(self) -> str | None:
        """Describe the first violation of the quantization trait.

        Raises:
            _NothingToCheckError: each call is random, or eager rejects it.
        """
        calls = [call for call in self.calls if not Node(self.op, call.operands, dict(call.attrs)).is_random]
        taken = [call for call in calls if self._call_eager(call) is not None]
        if not taken:
            self._raise_unjudged()
            raise _NothingToCheckError(f"every call of {self.op.name} is random, or eager rejects it")
        for call in taken:
            broken = find_broken_claim(
                self.op, fill_operands(call, make_typical_run(call.operands, 0).inputs), call.attrs
            )
            if broken is not None:
                claim = claim_of(self.op.trait)
                return f"{format_call(self.op, call)} is declared as {claim}, but {broken}; see clika_ref.core.traits"
        return None

    def check_sensitivity(self, name: str) -> str | None:
        """Report an attribute that no compared call depends on: a target that ignores it is found only by chance."""
        if self.pairs.get(name):
            return None
        self._raise_unjudged()
        known = (
            f"{name} never changes the result of the samples of {self.op.name}"
            if name in self.pairs
            else f"no two samples of {self.op.name} differ only in {name}"
        )
        return (
            f"{known}, on typical elements. Only calls that differ in more, or special elements, can show that a "
            "target ignores it."
        )

    @functools.cached_property
    def pairs(self) -> Mapping[str, Sequence[tuple[Call, Call]]]:
        """Pairs of drawn calls that differ in one attribute and in the result, by attribute name; several of each."""
        found: dict[str, list[tuple[Call, Call]]] = {}
        tries: Counter[str] = Counter()
        wanted = self.op.attributes.keys() - UNTESTED_ATTRIBUTES
        for traced in self._traced.values():
            for name, call in vary_single_attributes(self.op, traced):
                pairs = found.setdefault(name, [])
                if len(pairs) < PAIRS_PER_ATTRIBUTE and tries[name] < TRIES_PER_ATTRIBUTE:
                    tries[name] += 1
                    pairs += [(traced.call, call)] if self._has_different_results(traced.call, call) else []
            if all(
                len(found.get(name, ())) == PAIRS_PER_ATTRIBUTE or tries[name] == TRIES_PER_ATTRIBUTE for name in wanted
            ):
                break
        return {name: found[name] for name in sorted(found.keys() & wanted)}

    @functools.cached_property
    def calls(self) -> list[Call]:
        """Calls of the cover, and random ones.

        Raises:
            _NothingToCheckError: there are no samples.
            UnjudgedDtypeError: the samples draw no dtype that is judged.
            SampleError: the samples raise.
        """
        traced = [t.call for t in self._traced.values()]
        (dtype,) = select_dtypes(self.op, (torch.float32,))
        return [*(row.call for row in self._draw(draw_covering_calls, dtype, self.suite.profile.seed)), *traced]

    @functools.cached_property
    def _traced(self) -> dict[str, RecordedCall]:
        """Random calls with judged dtypes, by seed."""
        return dict(collect_judged_calls(functools.partial(self._draw_named, name) for name in self._names))

    def _draw_named(self, name: str) -> tuple[str, RecordedCall]:
        return name, self._draw(record_call, name)

    @property
    def _names(self) -> list[str]:
        """Seeds of the random calls."""
        return [f"{self.op.name}/{self.suite.profile.seed}/{i}" for i in range(RANDOM_CALLS)]

    def _draw(self, driver: Callable[..., Any], *settings: Any) -> Any:
        if self.op.sampler is None:
            raise _NothingToCheckError(f"{self.op.name} has no samples")
        return driver(self.op, *settings)

    def _has_unjudged_variation(self, name: str) -> bool:
        """Return whether an attribute has several values if dtypes that are not judged are drawn, too."""
        draws = (random_draw(Random(seed)) for seed in self._names)  # noqa: S311 - test data, not cryptography
        return len({repr(draw_call_of_any_dtype(self.op, draw, Descriptions()).attrs[name]) for draw in draws}) > 1

    def _graph(self, call: Call) -> Graph | None:
        try:
            return build_call_graph(self.op, fill_operands(call, make_typical_run(call.operands, 0).inputs), call.attrs)
        except Exception:  # noqa: BLE001 - the operator level reports calls that fail
            return None

    def _call_eager(self, call: Call) -> list[torch.Tensor] | None:
        """Return eager's results, from one random seed; None if it rejects the call or a result is not judged."""
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would format a stack for each other device
        try:
            operands = fill_operands(call, make_typical_run(call.operands, 0).inputs)
            results = call_eagerly(self.op, operands, call.attrs)
        except Exception:  # noqa: BLE001 - any error means that eager rejects the call
            return None
        alien = next((r.dtype for r in results if not is_judged(r.dtype)), None)
        self._unjudged = self._unjudged or alien
        return None if alien else results

    def _raise_unjudged(self) -> None:
        """Raise if results that could have distinguished calls have a dtype that is not judged."""
        if self._unjudged is not None:
            raise UnjudgedDtypeError(self.op, self._unjudged)

    def _has_different_results(self, call: Call, other: Call) -> bool:
        """Return whether eager accepts both calls and computes different results, with NaN equal to NaN."""
        before, after = self._call_eager(call), self._call_eager(other)
        return before is not None and after is not None and not _has_same_results(before, after)


def _is_same_call(call: Call, other: Call) -> bool:
    """Return whether two calls are equal in every literal, and in the elements of tensors that the sampler created."""
    pairs = list(zip(call.operands, other.operands, strict=False))
    made = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    rest = [[o for o in c.operands if not isinstance(o, torch.Tensor)] for c in (call, other)]
    return repr((rest[0], call.attrs)) == repr((rest[1], other.attrs)) and all(has_same_bits(a, b) for a, b in made)


def _has_same_results(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
        for a, b in zip(left, right, strict=True)
    )


def find_read_attributes(op: Operator, graph: Graph) -> set[str] | None:
    """Return the attributes that an operator's lowering reads while a graph is emitted; None if emission fails.

    Attributes are passed as parameters, so each read is an instruction with the parameter's name. A lowering that takes
    them as ``**attributes`` passes all of them on.
    """
    lowering = inspect.unwrap(op.lowering) if op.lowering is not None else None
    code = getattr(lowering, "__code__", None)
    if not isinstance(code, CodeType):
        return set(op.attributes)
    names = {i.offset: i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")}
    read: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            read.add(names.get(frame.f_lasti, ""))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        emit(graph)
    except (ClikaError, ValueError, TypeError):
        return None
    finally:
        sys.settrace(before)
    return set(op.attributes) if _is_forwarding_keywords(code, read) else read & op.attributes.keys()


def _is_forwarding_keywords(code: CodeType, read: set[str]) -> bool:
    """Return whether a function passes on all of its keyword arguments."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[count] in read
