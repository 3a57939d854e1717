"""Reject a trace if the model catches a tracer error: it then takes a branch that it does not take in eager."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import sympy
import torch
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from clika_ref.capture.origins import INSTALLED, is_users, short_line
from clika_ref.capture.replacing import replaced

_STANDARD = sysconfig.get_paths()["stdlib"]
_SYMPY = str(Path(sympy.__file__).parent)

CONVERSIONS = ("__float__", "__int__", "__index__", "__complex__", "__round__", "__trunc__", "__floor__", "__ceil__")
"""Methods that Python calls for the value of a number. Proxies lack them, and Python's own error cannot be observed."""

REFUSALS = ("__bool__", "__iter__", "__len__")
"""Methods that proxies define and that raise."""


class CaughtError(Exception):
    """The model caught a tracer error."""


class Raised:
    """Errors raised while tracing or running a model in eager, by calls of the model in this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._errors: list[BaseException] = []

    def remember(self, error: BaseException) -> None:
        """Record an error; its traceback grows until a handler catches it."""
        if threading.get_ident() == self._thread and not any(error is known for known in self._errors):
            self._errors.append(error)

    def caught(self) -> dict[tuple[str, str], str]:
        """Return the messages of errors that the model caught, by error class and the line that raised them."""
        found = {}
        for error in self._errors:
            trace = error.__traceback__  # from the frame that caught it to the one that raised it
            if trace is not None and is_models(trace.tb_frame):
                kind, line = type(error).__name__, _innermost(trace)
                found[kind, line] = f"{kind} at {line}, which the model itself catches: {error}"
        return found

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to record the errors that it raises."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.remember(error)
                raise

        return watched


def is_models(frame: FrameType) -> bool:
    """Whether a frame belongs to the model or to a library that it uses, rather than to PyTorch or its dependencies."""
    return is_model_file(frame.f_code.co_filename)


def is_model_file(file: str) -> bool:
    """Whether frames of a file belong to the model or to a library that it uses."""
    is_standard = file.startswith(_STANDARD + os.sep) and INSTALLED.isdisjoint(Path(file).parts)
    return is_users(file) and not is_standard and not file.startswith(_SYMPY)


def _innermost(trace: TracebackType | None) -> str:
    line = ""
    while trace is not None:
        if is_models(trace.tb_frame):
            line = short_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line


@contextlib.contextmanager
def traced_errors() -> Iterator[Raised]:
    """Record PyTorch's errors about unknown values, and about failing calls, during a trace."""
    raised = Raised()
    handler, proxy = _NonStrictTorchFunctionHandler, torch.fx.Proxy
    make = ShapeEnv._make_data_dependent_error

    def made(*args: Any, **kwargs: Any) -> Any:
        error = make(*args, **kwargs)
        raised.remember(error)
        return error

    watched: dict[tuple[Any, str], Any] = {(proxy, name): raised.watch(getattr(proxy, name)) for name in REFUSALS}
    watched |= {(proxy, name): raised.watch(_refusal(name)) for name in CONVERSIONS}
    watched[handler, "__torch_function__"] = raised.watch(handler.__torch_function__)
    watched[ShapeEnv, "_make_data_dependent_error"] = made
    with replaced(watched):
        yield raised


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(traced: torch.fx.Proxy, *_: Any) -> Any:
        msg = f"{name.strip('_')}() of {traced}, whose value is not known while it is traced, is data-dependent"
        raise TypeError(msg)

    return refuse


@contextlib.contextmanager
def eager_errors() -> Iterator[Raised]:
    """Record the errors that PyTorch calls raise in eager."""
    raised = Raised()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return raised.watch(func)(*args, **(kwargs or {}))

    with Mode():
        yield raised
