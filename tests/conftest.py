"""Shared fixtures of the whole pipeline: compile a model, and compare the module with eager PyTorch."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from clika_ref import clika_compile
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import pack_arguments

sys.path.insert(0, str(Path(__file__).parent))  # the importlib mode of pytest leaves the folder of a test off the path
sys.path.append(str(Path(__file__).parents[1]))  # for `releasing`; last, so that what is installed comes first

from warm_process import CommandServer


@pytest.fixture(scope="session")
def warm_commands(tmp_path_factory):
    """Return the environment variables that run ``clika-ref`` and ``pytest`` in forks of a warmed process."""
    return CommandServer(tmp_path_factory.mktemp("warm")).environment


def call_on_element(function, element):
    """Return the results of a function for an element of ``tracing_inputs``, and its arguments after the call."""
    packed = pack_arguments(make_callable(function).parameters, element).copy()
    result = function(*packed.args, **packed.kwargs)
    return pytree.tree_leaves(result), pytree.tree_leaves((packed.args, packed.kwargs))


def assert_same_results(module, original, element):
    """Compare one call with eager: results, changes of its arguments, and changes of buffers.

    The tolerance is PyTorch's own for results of one dtype (``torch.testing``).
    """
    with torch.no_grad():
        expected, actual = call_on_element(original, element), call_on_element(module.forward, element)
    for results in zip(actual, expected, strict=True):
        kinds = [[type(r) for r in side] for side in results]
        assert kinds[0] == kinds[1]
        assert [r for r in results[0] if not isinstance(r, torch.Tensor)] == [
            r for r in results[1] if not isinstance(r, torch.Tensor)
        ]
        tensors = [[r for r in side if isinstance(r, torch.Tensor)] for side in results]
        torch.testing.assert_close(tensors[0], tensors[1], equal_nan=True)
    owner = getattr(original, "__self__", original)
    if isinstance(owner, torch.nn.Module):
        buffers = dict(module.named_buffers())
        for name, buffer in owner.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, msg=lambda text, name=name: f"buffer {name}: {text}")


@pytest.fixture
def compile_and_compare():
    """Compile a copy of a model for inputs; compare it with eager on these and on unseen inputs; return it."""

    def compile_and_check(model, inputs, unseen=(), **options):
        original = copy.deepcopy(model)
        if isinstance(original, torch.nn.Module) and not options.get("skip_eval_set_mode"):
            original.eval()
        module = clika_compile(model, tracing_inputs=inputs, **options)
        for element in [*inputs, *unseen]:
            assert_same_results(module, original, element)
        return module

    return compile_and_check


@pytest.fixture
def unread_inputs():
    """Inputs that fail the test when they are read."""

    def fail_when_read():
        pytest.fail("the calibration inputs were read")
        yield

    return fail_when_read()
