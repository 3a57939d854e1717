"""Messages of PyTorch in our errors: without representations, paths of its build, and names of its symbols."""

import pytest

from clika_ref.capture.messages import simplify_message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "((s27 + 127)//128) (<class 'torch.SymInt'>, 140319599202640)is not tracked with proxy for <torch.Tracer",
            "((size + 127)//128) (SymInt)is no value of the traced graph",
        ),
        (
            "could not guard on Eq(u0, 1)",
            "could not guard on Eq(size, 1)",
        ),
        ("got <function relu at 0x7f2a10>", "got relu"),
        ("got <bound method Net.forward of Net(\n  (a): Linear()\n)>", "got Net.forward"),
        ("got <built-in method sin of type object at 0x7f5>", "got sin"),
        ("<torch.fx.experimental.proxy_tensor.PythonKeyTracer object at 0x7f0c>", "PythonKeyTracer"),
        (
            'INTERNAL ASSERT FAILED at "/pytorch/c10/core/SymInt.cpp":77, please report a bug to PyTorch. not an int',
            "INTERNAL ASSERT FAILED  not an int",
        ),
    ],
)
def test_unseen_parts_of_messages_replaced(text, expected):
    assert simplify_message(text) == expected


@pytest.mark.parametrize("text", ["dim 1 of 'x' is 3", "s is not a list", "a < b and c > d", "cannot add u to v"])
def test_plain_message_unchanged(text):
    assert simplify_message(text) == text
