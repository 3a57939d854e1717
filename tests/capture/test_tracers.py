"""The third tracer supports the same callables as the first two: modules, methods and functions."""

import contextlib
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture import capture
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.tracers import TRACERS, Tracer, select_tracers, trace
from clika_ref.core.errors import ModelError
from clika_ref.stages import load_registry, make_callable, make_calls


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def infer(self, x):
        return self.layer(x) + 1

    def forward(self, x):
        return self.infer(x) * 2


def double(x):
    return x * 2


MODEL = Model()


@pytest.mark.parametrize("tracer", select_tracers(dynamic=False), ids=lambda t: t.name)
@pytest.mark.parametrize("traced", [MODEL, MODEL.infer, double], ids=["module", "method", "function"])
def test_each_tracer_accepts_modules_methods_functions(tracer, traced, monkeypatch):
    """Every tracer accepts modules, methods and functions."""
    monkeypatch.setattr(capture, "select_tracers", lambda dynamic: (tracer,))
    x = torch.randn(3, 2)
    assert torch.equal(clika_compile(traced, tracing_inputs=[x], discard_input_model=False)(x), traced(x))


def test_select_tracers_static_omits_oblivious_variant():
    """Static graphs need one tracer less."""
    assert len(select_tracers(dynamic=True)) == len(TRACERS) == len(select_tracers(dynamic=False)) + 1


@pytest.mark.parametrize("name", ["torch.export._trace", "torch.export", "torch._dynamo.eval_frame"])
def test_trace_hides_log_of_tracer_only(name, monkeypatch):
    """The log of a tracer is hidden during a trace; other loggers are not."""
    seen, handler = [], logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())

    def log_errors(*_):
        logging.getLogger(name).error("unsupported")
        logging.getLogger("mine").error("the model's own")

    loggers = [logging.getLogger(name), logging.getLogger("mine")]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [handler])
    trace(Tracer("noisy", log_errors, oblivious=True), MODEL, ModelCall((), {}), None)
    assert seen == ["the model's own"]
    loggers[0].error("after the trace")
    assert seen[1:] == ["after the trace"]


LIMITS = {1: 2.0, 7: 3.0}


@pytest.mark.parametrize(
    "model",
    [lambda x: x * 2 if x.shape[0] in {1, 7} else x, lambda x: x * LIMITS.get(x.shape[0], 1.0)],
    ids=["set", "dict"],
)
def test_trace_size_lookup_in_set_or_dict_rejected(model):
    """Looking up a size in a set or dict raises an error with the remedy."""
    with pytest.raises(ModelError, match=r"fixes it: Eq\(batch, 5\) \(from test_tracers.py:\d+\)") as caught:
        clika_compile(model, tracing_inputs=[torch.ones(5, 3), torch.ones(4, 3)])
    assert "is looked up in a set, a dict or a cache" in str(caught.value)
    assert "Compare it with each value instead (x.shape[0] == 1 or x.shape[0] == 7)" in str(caught.value)
    assert "__hash__" not in vars(torch.fx.Proxy), "only while it traces"
    assert torch.equal(
        clika_compile(model, tracing_inputs=[torch.ones(7, 3)])(torch.ones(7, 3)), model(torch.ones(7, 3))
    )


def test_trace_lifted_tensor_without_elements_rejected(monkeypatch):
    """A result that a tracer treats as a constant raises an error."""

    class Reads(Model):
        def forward(self, x):
            return x @ self.layer.weight.data

    (dynamo,) = [t for t in TRACERS if t.name == "dynamo"]
    monkeypatch.setattr(capture, "select_tracers", lambda dynamic: (dynamo,))
    with pytest.raises(
        ModelError, match=r"the tracer treated a result of the model as a constant .\(2, 2\) in lifted_tensor_0"
    ):
        clika_compile(Reads(), tracing_inputs=[torch.randn(3, 2)])


def test_clika_compile_one_thread_at_a_time():
    """One thread captures at a time, and PyTorch is left unpatched."""
    meeting, met = threading.Barrier(2), []

    def meet_other_thread(x):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.2))
        with torch.inference_mode():
            return x.data * 2

    x, before = torch.ones(2), (torch.inference_mode.__enter__, torch.Tensor.data)
    with ThreadPoolExecutor() as threads:
        modules = list(threads.map(lambda _: clika_compile(meet_other_thread, tracing_inputs=[x]), range(2)))
    assert not met
    assert (torch.inference_mode.__enter__, torch.Tensor.data) == before
    assert all(torch.equal(module(x), x * 2) for module in modules)


class Skipping(Model):
    """Stochastic depth: a random number decides the branch."""

    def forward(self, x):
        return x + self.layer(x) if torch.rand(()) < 0.5 else x


class Noisy(Model):
    """Draws noise without an argument of the call, and has a branch that only a symbolic trace supports."""

    def forward(self, x):
        noise = torch.empty(2).normal_()
        return self.layer(x + noise) if torch.rand(()) < 2 else x


@pytest.mark.parametrize("model", [Skipping, Noisy])
def test_trace_random_branch_rejected(model):
    """A branch on a random number raises an error with its line."""
    with pytest.raises(ModelError, match=r"draws random numbers, which .* \(at test_tracers.py:\d+\)") as caught:
        clika_compile(model(), tracing_inputs=[torch.rand(3, 2)])
    assert "choose with torch.where(condition, a, b)" in str(caught.value)


def test_trace_distributions_with_validation():
    """Checks of arguments, which are on before dynamo runs, are not traced."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        module = clika_compile(find_log_prob, tracing_inputs=[torch.rand(1, 3), torch.rand(4, 3)])
        assert torch.distributions.Distribution._validate_args
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
    x = torch.rand(5, 3)
    torch.testing.assert_close(list(module(x)), list(find_log_prob(x)))


def find_log_prob(x):
    normal = torch.distributions.Normal(x, torch.nn.functional.softplus(x))
    chosen = torch.distributions.Categorical(logits=x)
    return normal.log_prob(x * 2), chosen.log_prob(x.argmax(-1)), chosen.entropy()


FRESH_SCAN = """
import torch
from torch._higher_order_ops.scan import scan
from clika_ref import clika_compile

layer = torch.nn.Linear(4, 4)

def run(x):
    return scan(lambda h, row: (torch.tanh(layer(h) + row), h * 2), torch.zeros(x.shape[1], 4), x)

clika_compile(run, tracing_inputs=[torch.rand(3, 2, 4), torch.rand(5, 3, 4)])
from torch._inductor.decomposition import decompositions
forms = [found for found in decompositions.values() if getattr(found, "__module__", "").startswith("clika_ref.")]
assert not forms, forms
"""


@pytest.mark.slow
def test_trace_scan_first_in_process_leaves_inductor():
    """The first scan of a process imports inductor, which must not keep the forms of a trace."""
    done = subprocess.run([sys.executable, "-c", FRESH_SCAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_capture_skips_tracer_that_fixes_same_size():
    """A size that ``int`` fixes is left to Dynamo at once: the second tracer runs the same code."""

    class Halves(nn.Module):
        def forward(self, x):
            return x[:, : int(x.shape[1] // 2)] * 2

    callee, steps = make_callable(Halves()), []
    calls = make_calls(callee, [torch.randn(2, 6), torch.randn(3, 8)])
    captured = capture.capture(callee, calls, load_registry(), progress=steps.append)
    assert captured.tracer == "dynamo"
    started = [tracer.name for tracer in TRACERS if f"tracing with {tracer.name}" in steps]
    assert started == ["torch.export", "dynamo"]
