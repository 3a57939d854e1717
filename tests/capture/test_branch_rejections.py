"""Branches on the values of tensors that cannot be converted: the reason, the line and the remedy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from clika_ref import ClikaCompileOptions, clika_compile
from clika_ref.core.errors import ModelError

CONVERT = ClikaCompileOptions(convert_branches=True)
INPUTS = [torch.ones(2, 4), -torch.ones(3, 4)]


def find_line(text):
    """Return the number of the only line of this file that ends with a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(text))
    return number


def compile_rejected(model, inputs=INPUTS):
    with pytest.raises(ModelError) as caught:
        clika_compile(model, tracing_inputs=inputs, clika_compile_options=CONVERT)
    return str(caught.value)


def different_shapes(x):
    if x.sum() > 0:  # shapes
        y = x
    else:
        y = x.sum(0)
    return y * 2


def different_dtypes(x):
    return x.double() if x.sum() > 0 else x  # dtypes


def different_structures(x):
    if x.sum() > 0:  # structures
        return {"y": (x, x)}
    return {"y": [x, x]}


def different_kinds(x):
    mode = "double"
    if x.sum() > 0:  # kinds
        mode = "half"
    return x * (2 if mode == "double" else 0.5)


def missing_variable(x):
    if x.sum() > 0:  # missing
        y = x + 1
    z = x * 2
    return y + z


def missing_before_loop(x):
    while x.sum() > 0:  # missing in a loop
        y = x * 2
        x = x - 1
    return y


def changing_shape(x):
    y = x
    while x.sum() > 0:  # changing
        x = x - 1
        y = y.sum(0)
    return y


def written_input(x):
    if x.sum() > 0:  # written
        x += 1  # the write
    return x * 2


def written_view(x):
    row = x[0]
    if x.sum() > 0:  # written view
        row.mul_(2)  # the write to a view
    return x * 2


def appended_list(x):
    found = []
    if x.sum() > 0:  # appended
        found.append(x)
    return x * 2 if found else x


def raised_error(x):
    if x.isnan().any():  # raised
        raise ValueError("found NaN")  # the raise
    return x * 2


def assertion(x):
    assert x.sum() < 100  # the assert
    return x * 2


def printed(x):
    if x.sum() > 0:  # printed
        print("positive")
        x = x * 2
    return x


def caught_errors(x):
    if x.sum() > 0:  # caught
        try:
            x = x.view(-1, 4)
        except RuntimeError:
            x = x.reshape(-1, 4)
    return x * 2


def breaking(x):
    while x.shape[1] == 4:
        with torch.no_grad():
            if x.sum() < 10:  # broken
                break
        x = x / 2
    return x


def numbers(x):
    yield x
    if x.sum() > 0:  # generated
        yield x * 2


def from_generator(x):
    return sum(numbers(x))


def filtered(x):
    return sum(row for row in x.unbind(1) if row.sum() > 0)  # filtered


def assigned_in_operand(x):
    if x.sum() > 0 and (top := x.amax()) > 0.5:  # operand
        x = x / top
    return x


choose_sign = lambda x: -x if x.sum() < 0 else x  # noqa: E731 - a lambda


def calls_lambda(x):
    return choose_sign(x) * 2


def vmapped(x):
    if x.sum() > 0:  # vmapped
        return torch.vmap(lambda row: row * 2)(x)
    return x


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        if x.sum() > 0:  # attribute
            self.count += 1
            x = x * 2
        return x


COUNTS = {"calls": 0}
TOTAL = 0


def counted(x):
    if x.sum() > 0:  # counted
        COUNTS["calls"] += 1
        x = x * 2
    return x


def assigned_global(x):
    global TOTAL
    if x.sum() > 0:  # global
        TOTAL = 1
        x = x * 2
    return x


REJECTED = {
    "different shapes": (
        different_shapes,
        "shapes",
        ["y is float32[s", ", 4] if the condition is true, and float32[4] if it is false"],
    ),
    "different dtypes": (different_dtypes, "dtypes", ["its result is float64[", "and float32["]),
    "different structures": (different_structures, "structures", ["its result['y'] is a tuple of 2", "a list of 2"]),
    "different kinds": (different_kinds, "kinds", ["mode is 'half' if the condition is true, and 'double' if it"]),
    "missing variable": (
        missing_variable,
        "missing",
        ["y is read afterward, but it has a value only if the condition is true. Assign it before"],
    ),
    "missing before a loop": (
        missing_before_loop,
        "missing in a loop",
        ["y is read afterward, but it has a value only after an iteration"],
    ),
    "changing shape": (changing_shape, "changing", ["y is float32[s", "before the loop, and float32[4] after an iter"]),
    "written input": (written_input, "written", ["writes to x in place. Compute a new tensor instead", "the write"]),
    "written view": (written_view, "written view", ["writes to row in place", "the write to a view"]),
    "appended list": (appended_list, "appended", ["it changes found, and a graph has no such effects"]),
    "raised error": (raised_error, "raised", ["raises ValueError: found NaN. Check values before", "the raise"]),
    "assertion": (assertion, "the assert", ["an assertion is no part of a graph. Remove it"]),
    "printed": (printed, "printed", ["calls print (line "]),
    "caught errors": (caught_errors, "caught", ["contains a try (line "]),
    "breaking": (breaking, "broken", ["contains a break (line "]),
    "generator": (from_generator, "generated", ["it is in a generator. Return a list instead"]),
    "lambda": (calls_lambda, "noqa: E731 - a lambda", ["was not converted: it is in a lambda. Write it as a function"]),
    "comprehension": (filtered, "filtered", ["it is the condition of a comprehension. Write a loop"]),
    "operand": (assigned_in_operand, "operand", ["an operand assigns a variable with :=. Assign it before"]),
    "counted": (counted, "counted", ["it changes COUNTS"]),
    "vmapped": (vmapped, "vmapped", ["it calls torch.vmap or torch.func. Move the call out of the branch"]),
    "attribute": (Counting(), "attribute", ["it changes self.count, and a graph has no such effects"]),
    "global": (assigned_global, "global", ["assigns the global TOTAL (line "]),
}
"""Functions, the mark of the line that the error names, and parts of the error."""


@pytest.mark.slow_cases("comprehension")
@pytest.mark.parametrize("name", REJECTED)
def test_conversion_rejected_branch_names_line_and_reason(name):
    """A branch that cannot be converted is an error with its line and the reason."""
    function, mark, parts = REJECTED[name]
    text = compile_rejected(function, INPUTS if "missing" not in name else [torch.ones(2, 4), torch.ones(3, 4)])
    assert f"test_branch_rejections.py:{find_line(f'# {mark}' if name != 'assertion' else mark)}" in text
    for part in parts:
        if part.startswith("the "):
            assert f"test_branch_rejections.py:{find_line(f'# {part}')}" in text if part in WRITES else part in text
        else:
            assert part in text


WRITES = ("the write", "the write to a view", "the raise")
"""Marks of lines that errors name besides the line of the branch."""
