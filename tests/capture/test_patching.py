"""Patches of PyTorch are undone, whatever a model does meanwhile, and only affect one thread."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture.caught_errors import ErrorRecorder
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.patching import only_in_this_thread, patch_attributes, patch_functions
from clika_ref.capture.tracers import TRACERS, Tracer, trace

REPLACED = (
    *((torch.Tensor, n) for n in ("requires_grad", "grad_fn", "register_hook", "data")),
    *((torch.inference_mode, n) for n in ("__enter__", "__exit__")),
    *((torch.fx.Proxy, n) for n in ("__hash__", "__bool__", "__float__", "__len__")),
    (torch, "is_grad_enabled"),
    (nn.modules.transformer, "_detect_is_causal_mask"),
)


def read_patched_attributes():
    return [vars(owner).get(name, "inherited") for owner, name in REPLACED]


class Base:
    inherited = 1


class Derived(Base):
    own = 1


def test_patch_attributes_error_restores_names():
    """All names are restored after an error, also if one is missing."""

    def fail():
        del Derived.inherited
        raise KeyError(Derived.own)

    with pytest.raises(KeyError, match="2"), patch_attributes({(Derived, "own"): 2, (Derived, "inherited"): 3}):
        fail()
    assert ("inherited" in vars(Derived), Derived.own, Derived.inherited) == (False, 1, 1)


def test_patch_attributes_nested_restores_outer():
    """A nested patch restores the outer one."""
    with patch_attributes({(Derived, "inherited"): 2}):
        with patch_attributes({(Derived, "inherited"): 3}):
            assert Derived.inherited == 3
        assert Derived.inherited == 2
    assert "inherited" not in vars(Derived)


@pytest.fixture
def holder(monkeypatch):
    """Return an imported module of the user."""
    module = ModuleType("holder")
    monkeypatch.setitem(sys.modules, "holder", module)
    return module


def double(x):
    return 2 * x


def negate(x):
    return -x


def test_patch_functions_replaces_every_name(holder):
    """Each module that binds the function has the replacement under each name, until the context ends."""
    holder.first = holder.second = double
    with patch_functions({double: negate}):
        assert [f(3) for f in (holder.first, holder.second, double)] == [-3] * 3
    assert [holder.first, holder.second, sys.modules[__name__].double] == [double] * 3


def test_patch_functions_finds_names_bound_later(holder):
    """Names are found that a module binds after an earlier patch, also one inside a patch."""
    replacements = {double: negate}
    with patch_functions(replacements):
        holder.first = negate
        with patch_functions(replacements):
            pass
    holder.first = double
    with patch_functions(replacements):
        assert holder.first(3) == -3
    holder.second = double
    with patch_functions(replacements):
        assert holder.second(3) == -3


def test_patch_functions_finds_rebound_names_of_main(monkeypatch):
    """A name of ``__main__`` may be bound again, as in a notebook."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.scale = negate
    with patch_functions({double: negate}):
        assert main.scale(3) == -3
    main.scale = double
    with patch_functions({double: negate}):
        assert main.scale(3) == -3


def test_only_in_this_thread_other_thread_uses_original():
    """Another thread uses the original."""
    chosen = only_in_this_thread(lambda: "here", lambda: "elsewhere")
    with ThreadPoolExecutor() as threads:
        assert (chosen(), threads.submit(chosen).result()) == ("here", "elsewhere")


class Compiling(nn.Module):
    """Compiles another model when it is called."""

    def forward(self, x):
        return clika_compile(nn.ReLU(), tracing_inputs=[torch.ones(2, 3)])(x)


def test_clika_compile_nested_compilation_restores_pytorch():
    """A model that compiles another one leaves PyTorch unpatched."""
    before = read_patched_attributes()
    with pytest.raises(ModelError, match="cannot be captured as one graph"):
        clika_compile(Compiling(), tracing_inputs=[torch.ones(2, 3)])
    assert read_patched_attributes() == before


def test_trace_patches_current_thread_only():
    """Other threads keep inference mode, proxies and `.data` unpatched during a trace."""

    def run_in_other_thread():
        x = torch.ones(2)
        with torch.inference_mode():
            inferred = torch.is_inference_mode_enabled()
        x.data.add_(1)
        torch.fx.Tracer().trace(lambda y: {y: 1}[y])
        return inferred, x._version

    def run(module, call, shapes):
        with ThreadPoolExecutor() as threads:
            answers.append(threads.submit(run_in_other_thread).result())
        return TRACERS[-1].run(module, call, shapes)

    answers = []
    trace(Tracer("next to another thread", run, oblivious=True), nn.ReLU(), ModelCall((torch.ones(2, 3),), {}), None)
    assert answers == [(True, 0)]


def test_error_recorder_ignores_other_threads():
    """Errors of other threads are not recorded."""
    raised = ErrorRecorder()

    def catch_key_error():
        try:
            raised.watch(lambda: {}["a"])()
        except KeyError:
            return

    with ThreadPoolExecutor() as threads:
        threads.submit(catch_key_error).result()
    assert not raised.describe_caught()
    catch_key_error()
    assert len(raised.describe_caught()) == 1
