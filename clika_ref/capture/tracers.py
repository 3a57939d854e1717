"""The tracers, in order: non-strict export, dynamo, and symbolic tracing followed by export of its result."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import FrameSummary
from typing import Any, TextIO, cast

import torch
from torch.fx.proxy import TraceError
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from clika_ref.capture.associative_scans import trace_associative_scans
from clika_ref.capture.caches import trace_caches
from clika_ref.capture.derivatives import trace_derivatives
from clika_ref.capture.eager import disable_fast_path
from clika_ref.capture.flex_attention import trace_flex_attention
from clika_ref.capture.forms.composites import replace_composites
from clika_ref.capture.gradient_modes import trace_gradient_modes
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.packed_sequences import trace_packed_sequences
from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.capture.size_functions import keep_builtins_dynamic, keep_dynamic_sizes
from clika_ref.capture.source_lines import record_model_lines
from clika_ref.capture.vmap_regions import keep_mapped_dims_dynamic, move_batch_dims_outside
from clika_ref.torch_internals.operators import OpOverload, set_grad_enabled
from clika_ref.torch_internals.symbols import symbol_config
from clika_ref.torch_internals.tensors import TorchDispatchMode
from clika_ref.torch_internals.tracing import (
    CREATE_UNBACKED_SIZE,
    FAKE_TENSOR_CONFIG,
    SOLVE_CONSTRAINTS,
    VALIDATE_DISTRIBUTIONS,
)
from clika_ref.torch_internals.trees import pytree

TRACER_WARNINGS = (
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.jit.script_method` is deprecated",
)
"""The beginnings of warnings about PyTorch's own code, when it traces the bodies of control flow."""

NOISY_LOGGERS = ("torch.fx.experimental.symbolic_shapes.", "torch.export.", "torch._dynamo.")
"""The loggers of the tracers, with their children."""

MIN_UNCACHED_DIMS = 2
"""Number of dynamic dims from which fake tensors are not cached: PyTorch computes the sizes of a cached view again.

Without the cache, tracing is 1.1 to 1.9 times as fast (ResNet-50 to Swin v2). With a dynamic batch alone, the cache
pays.
"""

DynamicShapes = dict[str, Any] | None


@dataclass(frozen=True)
class Tracer:
    """A way to trace a model: its display name, and whether it treats sizes 0 and 1 like any other (``oblivious``)."""

    name: str
    run: Callable[[torch.nn.Module, ModelCall, DynamicShapes], torch.export.ExportedProgram]
    oblivious: bool
    runs_code: bool = False
    """Whether Python runs the code of the model, on fake tensors."""


def _export(
    module: torch.nn.Module, call: ModelCall, shapes: DynamicShapes, *, strict: bool = False
) -> torch.export.ExportedProgram:
    with contextlib.nullcontext() if strict else keep_builtins_dynamic(module):
        return torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes, strict=strict)


def _symbolic_trace(module: torch.nn.Module, call: ModelCall, shapes: DynamicShapes) -> torch.export.ExportedProgram:
    tracer = torch.fx.Tracer()
    replaced = module.__dict__.get("forward")
    root: Any = module
    if replaced is not None:  # a method or function replaces forward, but a tracer looks up methods on the class
        if getattr(replaced, "__self__", None) is module:
            tracer.traced_func_name = replaced.__name__
        else:
            root = replaced
    with _reject_hashing(), _RejectRandomCalls(), _RejectGradModes():
        traced = tracer.trace(root)
    return _export(torch.fx.GraphModule(module, traced), call, shapes)


@contextlib.contextmanager
def _reject_hashing() -> Iterator[None]:
    """Make hashing of ``torch.fx`` proxies raise, as for sizes in torch.export, with the same kind of error.

    With the default hash, a size is in no set or dict, so that a branch or table that looks it up would be dropped
    without a guard. Attributes such as ``x.ndim`` are of a subclass, so this patches the class.
    """
    proxy = torch.fx.Proxy
    with patch_attributes({(proxy, "__hash__"): only_in_this_thread(_raise_unhashable, proxy.__hash__)}):
        yield


def _raise_unhashable(traced: torch.fx.Proxy) -> int:
    raise TypeError(
        f"{traced} is looked up in a set, a dict or a cache, but its value is not known during tracing. Compare it "
        "with each value instead (x.shape[0] == 1 or x.shape[0] == 7), or make this dim static."
    )


class _RejectRandomCalls(TorchDispatchMode):
    """Rejects random calls: without traced arguments they run during the trace, and the result becomes a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(f"{func} draws random numbers, which a symbolic trace would record as constants")
        return func(*args, **(kwargs or {}))


class _RejectGradModes(TorchFunctionMode):
    """Rejects regions without gradients, as a symbolic trace does not record them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad_enabled and not (args[0] and torch.is_grad_enabled()):
            raise TraceError("gradients are switched on or off for a region, which a symbolic trace does not record")
        return func(*args, **(kwargs or {}))


TRACERS: tuple[Tracer, ...] = (
    Tracer("torch.export", _export, oblivious=True, runs_code=True),
    Tracer("torch.export, sizes 0 and 1 special", _export, oblivious=False, runs_code=True),
    Tracer("dynamo", partial(_export, strict=True), oblivious=True),
    Tracer("torch.fx.symbolic_trace", _symbolic_trace, oblivious=True),
)
"""Oblivious first: the plain mode rejects resnet18 at 32 x 32, but serves models that the other cannot."""


def select_tracers(dynamic: bool) -> Sequence[Tracer]:  # noqa: FBT001 - the only argument
    """Return the tracers to try. Without dynamic dims, the treatment of sizes 0 and 1 makes no difference."""
    return TRACERS if dynamic else tuple(t for t in TRACERS if t.oblivious)


def trace(
    tracer: Tracer,
    module: torch.nn.Module,
    call: ModelCall,
    shapes: DynamicShapes,
    *,
    reach: Callable[[FrameSummary], None] = lambda _: None,
    decompose_composites: bool = False,
) -> torch.export.ExportedProgram:
    """Trace a module with one tracer, and report each line of the model reached; errors are the tracer's own."""
    derivatives = trace_derivatives(decompose_composites=decompose_composites)
    config: Any = symbol_config  # PyTorch replaces the type of this module on import
    with (
        config.patch(backed_size_oblivious=tracer.oblivious),
        FAKE_TENSOR_CONFIG.patch(fake_tensor_cache_enabled=_count_dynamic_dims(shapes) < MIN_UNCACHED_DIMS),
        _use_traceable_transformers(),
        record_model_lines(__file__, reach),
        replace_composites(),
        keep_dynamic_sizes(),
        trace_packed_sequences(),
        trace_caches(),
        trace_flex_attention(),
        move_batch_dims_outside(),
        keep_mapped_dims_dynamic(),
        trace_associative_scans(),
        _trace_data_reads(),
        _skip_validated_distributions() if tracer.runs_code else contextlib.nullcontext(),
        trace_gradient_modes(),
        _keep_unsolved_guards(),
        _allow_empty_results(),
        derivatives if tracer.runs_code else contextlib.nullcontext(),
        _allow_caches(),
        _silence_tracers(),
    ):
        return tracer.run(module, call, shapes)


def _count_dynamic_dims(shapes: DynamicShapes) -> int:
    """Return the number of dynamic dims and numbers of all inputs."""
    return sum(leaf is torch.export.Dim.AUTO for leaf in pytree.tree_leaves(shapes))


@contextlib.contextmanager
def _use_traceable_transformers() -> Iterator[None]:
    """Make ``torch.nn``'s transformers use their traceable code path."""
    # The data-dependent check for a causal mask only yields a hint that is passed in addition to the mask.
    hint = {(transformer, "_detect_is_causal_mask"): lambda _mask, is_causal=None, _size=None: is_causal is True}
    with patch_attributes(hint), disable_fast_path():
        yield


@contextlib.contextmanager
def _trace_data_reads() -> Iterator[None]:
    """Make tracers see reads of ``tensor.data``: as an attribute, its result would become a constant."""
    plain: Any = torch.Tensor.data  # inherited from the base class
    read = only_in_this_thread(torch.Tensor.detach, plain.__get__)
    with patch_attributes({(torch.Tensor, "data"): property(read, plain.__set__)}):
        yield


@contextlib.contextmanager
def _skip_validated_distributions() -> Iterator[None]:
    """Leave out the checks of arguments in ``torch.distributions``, which read values; eager runs made them.

    Dynamo switches them off for the rest of the process.
    """
    with patch_attributes({VALIDATE_DISTRIBUTIONS: False}):
        yield


@contextlib.contextmanager
def _keep_unsolved_guards() -> Iterator[None]:
    """Leave guards as they are: sympy fails to solve some, and no dim is declared, so that none can contradict them."""
    form = only_in_this_thread(lambda _constraints: None, getattr(*SOLVE_CONSTRAINTS))
    with patch_attributes({SOLVE_CONSTRAINTS: form}):
        yield


@contextlib.contextmanager
def _allow_empty_results() -> Iterator[None]:
    """Let data-dependent sizes of custom operators be 0 and 1, as those of PyTorch's own."""

    def create(context: Any, *, min: int = 0, max: int | None = None) -> Any:
        return context.new_dynamic_size(min=min, max=max)

    form = only_in_this_thread(create, getattr(*CREATE_UNBACKED_SIZE))
    with patch_attributes({CREATE_UNBACKED_SIZE: form}):
        yield


@contextlib.contextmanager
def _allow_caches() -> Iterator[None]:
    """Suppress warnings about assigning tensors to attributes in forward: eager runs showed them to be harmless."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
        yield


@contextlib.contextmanager
def _silence_tracers() -> Iterator[None]:
    """Suppress the output of tracers; the final error message contains it once and in order."""
    found = list(logging.root.manager.loggerDict)  # by name: disabling a logger does not disable its children
    loggers = [logging.getLogger(name) for name in found if f"{name}.".startswith(NOISY_LOGGERS)]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        out, err = cast("TextIO", _ThreadMutedStream(sys.stdout)), cast("TextIO", _ThreadMutedStream(sys.stderr))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            for message in TRACER_WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was


class _ThreadMutedStream:
    """A stream that drops output of this thread; other threads, such as the progress display, still write."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or io.StringIO()  # None in a program without a console
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
