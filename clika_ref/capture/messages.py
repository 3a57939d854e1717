"""Error messages for models that cannot be captured: every reason, the line, and how to rewrite it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING

from clika_ref.capture.dimensions import InputComparison, InputDim
from clika_ref.capture.origins import format_line, is_user_file
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.types import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clika_ref.capture.callables import TracedCallable

MAX_REASON_LENGTH = 400
"""Maximum number of characters of a tracer's reason; conditions of detection heads run to thousands."""

MAX_LISTED_TENSORS = 5
"""Maximum number of tensor names in an error."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)')

DATA_DEPENDENT_ADVICE = (
    "A branch or a size depends on the values of a tensor. Compute both branches and choose with "
    "torch.where(condition, a, b), or run one with torch.cond(condition, when_true, when_false, operands). Branches on "
    "sizes, flags and constants are supported. Compute sizes from sizes (x.shape[1] // 2), not from tensors."
)
"""Advice for Python code that reads the value of a tensor."""

LOOP_ADVICE = (
    "A loop ends by the values of a tensor. Run it with torch.while_loop(condition, body, operands), or a constant "
    "number of times."
)
"""Advice for a Python loop whose condition reads the value of a tensor."""

SKIPPED_ROWS_ADVICE = (
    "the graph runs the code at {line} also where the model skips it, for experts or positions without rows, and no "
    "input shows that it changes nothing there. Add a tracing input that leaves some out, or run the code for all"
)
"""What to do about code that a model skips where no rows are found."""

LOOP_STRUCTURE_ADVICE = (
    "{line} runs once for each position, and its iterations differ in more than their rows and states, so that they do "
    "not become a loop of the graph. Compute each position alike: read numbers that differ, such as t / (t + 1), from "
    "a tensor made before the loop, and visit every position"
)
"""Advice for a Python loop over positions that was unrolled."""

CONVERSION_ADVICE = "ClikaCompileOptions(convert_branches=True) converts if, while, and, or and early returns."
"""Advice for branches if their conversion is off."""

DATA_DEPENDENT_MARKERS = ("data-dependent", "Data-dependent", "Data dependent", "control flow")
"""Phrases in tracer errors for data-dependent code."""


class CaptureError(ModelError):
    """No tracer captures the model as one graph."""


class MismatchError(ModelError):
    """A trace succeeded but does not serve every input; another tracer may."""


class BranchConversionError(CaptureError):
    """A branch on the values of a tensor cannot become a part of the graph."""


class FixedSizeError(MismatchError):
    """A graph serves one length of at least 2 only, which the model compares with a number or converts to one."""


class ControlFlowError(MismatchError):
    """The model's own Python code branches on sizes that differ between the inputs: no tracer can serve them all."""


@dataclass(frozen=True)
class UnsupportedCall:
    """A call that no operator implements: its target, origin and the reason."""

    call: str
    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.call} in {self.origin}: {self.reason}"


def make_unsupported_error(name: str, calls: Sequence[UnsupportedCall]) -> CaptureError:
    """Return the error that lists every unsupported call."""
    shown = "\n".join(f"  {call}" for call in dict.fromkeys(map(str, calls)))
    return CaptureError(
        f"{name} makes {format_count(len(calls), 'unsupported call')}:\n{shown}\nDeclare operators for them in "
        "a plugin (see docs/write-an-operator.md), or rewrite those lines."
    )


def explain_failures(
    callee: TracedCallable,
    comparison: InputComparison,
    failures: Sequence[tuple[str, Exception]],
    asked: Sequence[str] = (),
    unconverted: Sequence[str] | None = None,
) -> CaptureError:
    """Return the error for a model that no tracer served, with the reason of each tracer.

    Args:
        callee: the model.
        comparison: its inputs.
        failures: the error of each tracer.
        asked: one message for each line that reads gradient state, as tracers and eager may differ there.
        unconverted: why functions were not converted; None if the conversion of branches is off.
    """
    mismatches = [error for _, error in failures if isinstance(error, MismatchError)]
    lead = str(mismatches[0]) if mismatches else "every tracer failed"
    reasons = "\n".join(f"  {tracer}: {_format_reason(error, lead)}" for tracer, error in _unique_failures(failures))
    advice = _make_advice(comparison, failures, asked, unconverted) or _inference_advice(callee)
    error = CaptureError(f"{callee.name} cannot be captured as one graph: {lead.removesuffix('.')}.\n{reasons}{advice}")
    error.__cause__ = mismatches[0] if mismatches else failures[0][1]
    return error


def _unique_failures(failures: Sequence[tuple[str, Exception]]) -> list[tuple[str, Exception]]:
    seen: dict[str, tuple[str, Exception]] = {}
    for tracer, error in failures:
        seen.setdefault(f"{tracer}: {_format_reason(error)}", (tracer, error))
    return list(seen.values())


BODY_ERRORS = {
    r"Input-to-input aliasing": (
        "a body of control flow reads a tensor and a view of it, such as x and x.mT. Make the view by a call inside: "
        "x.transpose(-2, -1)"
    ),
    r"Encountered aliasing": (
        "a body of control flow returns a tensor from outside, or one tensor twice. Return a copy: x.clone()"
    ),
    r"differing branch outputs|Unmatched output spec": (
        "the branches of torch.cond return different structures. Return the same number of tensors from both"
    ),
    r"""got \w+\(["'](When merging two branches.*?)["']\)""": "{0}. Return the same dtype and rank from both",
    r"FX node with fake tensors: call_function cond\(.*?: got KeyError\(": (
        "the branches of torch.cond return tensors of different sizes. Return the same sizes from both"
    ),
    r"body_fn_output and carried_inputs to have same metadata but found:\s*pair\[(\d+)\] differ in '([^']*)'": (
        "the loop returns carried value {0} with another type ({1}). Return it with the type that it had"
    ),
    r"must be tensors for stack_output": "while_loop carries numbers. Carry tensors: torch.tensor(0) instead of 0",
    r"""Dynamo failed to run FX node with fake tensors: .*?: got \w+\(["'](.*?)["']\)\n""": "{0}",
}
"""What PyTorch's messages about the bodies of control flow mean."""


_WRITTEN_TENSOR = r"Input mutation detected at \[l_args_(\d)_(\w*?)_*\]"

_BRANCHES = {"1": "the branch for true", "2": "the branch for false"}
"""The branches of ``torch.cond`` by the positions of its arguments."""


def _describe_write(text: str) -> str:
    """Name the branch of ``torch.cond`` and the buffer or parameter that a body of control flow writes to, if known."""
    found, body, tensor = re.search(_WRITTEN_TENSOR, text), "a body of control flow", "a tensor from outside"
    if found is not None:
        position, path = found.groups()
        body = _BRANCHES.get(position, body) if "torch.cond" in text else body
        name = re.search(r"_(?:buffers|parameters)_(\w+)$", path)
        tensor = tensor if name is None else f"{name[1].strip('_')!r}"
    return f"{body} writes to {tensor}. Return the new value, and write it after the call"


_TORCH_SYMBOL = r"\b(?:s|u|zuf|zf)\d+\b"

_REPLACED_TEXT = {
    r"<class '(?:[\w.]*\.)?(\w+)'>": r"\1",
    r"<(?:[\w.]*\.)?(\w+) object at 0x[0-9a-f]+>": r"\1",
    r"<(?:bound method|built-in (?:method|function)|function|method) ([\w.<>]+)(?: of [^>]*| at 0x[0-9a-f]+)?>+": r"\1",
    r"\bat \"?/(?:pytorch|__w|builds|opt/conda|var/lib)[^\s\"]*\"?(?::\d+)?,?": "",
    r",? ?please report a bug to PyTorch\.?": "",
    r"(?:is )?not tracked with proxy for \S+": "is no value of the traced graph",
    r", \d{12,}\)": ")",
}
"""Parts of PyTorch's messages that no user has seen: representations, paths of its build, and names of its symbols."""


def simplify_message(text: str, symbol: str = "size") -> str:
    """Return a message of PyTorch without `_REPLACED_TEXT`: representations of objects become their names.

    Args:
        text: the message.
        symbol: the word for symbols of PyTorch.
    """
    text = re.sub(_TORCH_SYMBOL, symbol, text)
    for pattern, replacement in _REPLACED_TEXT.items():
        text = re.sub(pattern, replacement, text)
    return text


def _summarize(text: str) -> str:
    """Return the message of an error in one line."""
    if "Encountered input mutation" in text:
        return _describe_write(text)
    for pattern, meaning in BODY_ERRORS.items():
        found = re.search(pattern, text)
        if found:
            parts = (" ".join(simplify_message(group).split()).removesuffix(".") for group in found.groups())
            return meaning.format(*parts)
    return simplify_message(text.splitlines()[0]) if text else ""


def _format_reason(error: Exception, message: str = "") -> str:
    text = str(error).strip()
    if text == message:
        return "the reason above"
    first = shorten(_summarize(text), MAX_REASON_LENGTH, placeholder=" ...")
    line = _user_line(text) or _traceback_line(error)
    return f"{type(error).__name__}: {first}{f' (at {line})' if line else ''}"


def _user_line(text: str) -> str:
    own = [f for f in _FRAME.findall(text) if is_user_file(f[0])]
    return f"{format_line(own[-1][0], int(own[-1][1]))}: {own[-1][2]}" if own else ""


def _traceback_line(error: Exception) -> str:
    """Return the innermost line of the user's model in the traceback of an error."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if trace.tb_frame.f_code.co_name == "forward" and is_user_file(filename):
            found = format_line(filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _make_advice(
    comparison: InputComparison,
    failures: Sequence[tuple[str, Exception]],
    asked: Sequence[str],
    unconverted: Sequence[str] | None,
) -> str:
    crosswise = _find_crosswise_dims(comparison)
    if crosswise:
        a, b = crosswise
        return (
            f"\nThe dims {comparison.label(a)} and {comparison.label(b)} are 1 in different inputs. If the model "
            "broadcasts them against each other (crosswise broadcasting), one graph cannot represent both. Expand "
            "the tensors before the call, or compile once for each case."
        )
    mismatched = any(isinstance(error, MismatchError) for _, error in failures)
    if asked and any(
        isinstance(error, MismatchError) and not isinstance(error, ControlFlowError) for _, error in failures
    ):
        return "".join(f"\n{text[0].upper()}{text[1:]}" for text in asked)
    if not mismatched and any(word in str(error) for _, error in failures for word in DATA_DEPENDENT_MARKERS):
        lines = [_user_line(str(error)) for _, error in failures]
        is_loop = any(line.partition(": ")[2].startswith("while ") for line in lines)
        advice = LOOP_ADVICE if is_loop else DATA_DEPENDENT_ADVICE
        if unconverted is None:
            return f"\n{advice} {CONVERSION_ADVICE}"
        return "".join(f"\n{text}" for text in (*unconverted, advice))
    return ""


def _inference_advice(callee: TracedCallable) -> str:
    """Name the inference tensors of a model: tracers cannot follow some lines that use them, such as in autocast."""
    named = [*callee.module.named_parameters(), *callee.module.named_buffers()]
    made = [name for name, tensor in named if tensor.is_inference()]
    more = f" and {len(made) - MAX_LISTED_TENSORS} more" if len(made) > MAX_LISTED_TENSORS else ""
    names = ", ".join(made[:MAX_LISTED_TENSORS]) + more
    if not made:
        return ""
    return (
        f"\n{names} {'were' if len(made) > 1 else 'was'} created under torch.inference_mode(), and tracers do not "
        "support all computations with such tensors. Build the model outside of it, or compile copy.deepcopy(model), "
        "copied outside of it."
    )


def _find_crosswise_dims(comparison: InputComparison) -> tuple[InputDim, InputDim] | None:
    """Find two dims of different tensors that are 1 in different inputs."""
    dims = [s for s in comparison.sizes if s.dim is not None and 1 in comparison.sizes[s]]
    for i, a in enumerate(dims):
        for b in dims[i + 1 :]:
            pairs = list(zip(comparison.sizes[a], comparison.sizes[b], strict=True))
            if a.leaf != b.leaf and any(x == 1 < y for x, y in pairs) and any(y == 1 < x for x, y in pairs):
                return a, b
    return None
