"""Reject a trace if the model catches a tracer error: it then takes a branch that it does not take in eager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from clika_ref.capture.origins import format_line, is_model_frame
from clika_ref.capture.patching import patch_attributes
from clika_ref.torch_internals.tracing import MAKE_DATA_DEPENDENT_ERROR, NON_STRICT_HANDLER

CONVERSION_METHODS = (
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
)
"""Methods that Python calls for the value of a number. Proxies lack them, and Python's own error cannot be observed."""

RAISING_METHODS = ("__bool__", "__iter__", "__len__")
"""Methods that proxies define and that raise."""


class CaughtError(Exception):
    """The model caught a tracer error."""


class ErrorRecorder:
    """Errors raised while tracing or running a model in eager, by calls of the model in this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._errors: list[BaseException] = []

    def record(self, error: BaseException) -> None:
        """Record an error; its traceback grows until a handler catches it."""
        if threading.get_ident() == self._thread and not any(error is known for known in self._errors):
            self._errors.append(error)

    def describe_caught(self) -> dict[tuple[str, str], str]:
        """Return the messages of errors that the model caught, by error class and the line that raised them."""
        found = {}
        for error in self._errors:
            trace = error.__traceback__  # from the frame that caught it to the one that raised it
            if trace is not None and is_model_frame(trace.tb_frame):
                kind, line = type(error).__name__, _innermost_line(trace)
                found[kind, line] = f"the model caught a {kind} at {line}: {error}"
        return found

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to record the errors that it raises."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.record(error)
                raise

        return wrapper


def _innermost_line(trace: TracebackType | None) -> str:
    line = ""
    while trace is not None:
        if is_model_frame(trace.tb_frame):
            line = format_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line


@contextlib.contextmanager
def record_trace_errors() -> Iterator[ErrorRecorder]:
    """Record PyTorch's errors about unknown values, and about failing calls, during a trace."""
    raised = ErrorRecorder()
    handler, proxy = NON_STRICT_HANDLER, torch.fx.Proxy
    make = getattr(*MAKE_DATA_DEPENDENT_ERROR)

    def make_and_record(*args: Any, **kwargs: Any) -> Any:
        error = make(*args, **kwargs)
        raised.record(error)
        return error

    watched: dict[tuple[Any, str], Any] = {
        (proxy, name): raised.watch(getattr(proxy, name)) for name in RAISING_METHODS
    }
    watched |= {(proxy, name): raised.watch(_make_raising_method(name)) for name in CONVERSION_METHODS}
    watched[handler, "__torch_function__"] = raised.watch(handler.__torch_function__)
    watched[MAKE_DATA_DEPENDENT_ERROR] = make_and_record
    with patch_attributes(watched):
        yield raised


def _make_raising_method(name: str) -> Callable[..., Any]:
    def raise_type_error(traced: torch.fx.Proxy, *_: Any) -> Any:
        raise TypeError(f"{name.strip('_')}() of {traced} is data-dependent: its value is not known during tracing")

    return raise_type_error


@contextlib.contextmanager
def record_eager_errors() -> Iterator[ErrorRecorder]:
    """Record the errors that PyTorch calls raise in eager."""
    raised = ErrorRecorder()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return raised.watch(func)(*args, **(kwargs or {}))

    with Mode():
        yield raised
