"""TorchDynamo: what partial graphs need of it. Its import takes seconds."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_isolate_recompiles_id
from torch._dynamo import config as dynamo_config
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import OptimizeContext as OptimizeContext
from torch._dynamo.eval_frame import _get_cache_entries_for_region
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
from torch._dynamo.guards import get_and_maybe_log_recompilation_reasons
from torch._dynamo.output_graph import GraphCompileReason as GraphCompileReason
from torch._dynamo.pgo import FrameStateSizeEntry as FrameStateSizeEntry
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.source import TensorPropertySource as TensorPropertySource
from torch._guards import TracingContext as TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint as tag_activation_checkpoint
from torch.utils._sympy.symbol import SymT, symbol_is_type

optimize: Any = torch._dynamo.optimize
"""Compiles a function by a backend, with graph breaks."""

mark_dynamic: Any = torch._dynamo.mark_dynamic
"""Marks a dim of a tensor as dynamic; documented by PyTorch."""

__all__ = [
    "FailOnRecompileLimitHit",
    "FrameStateSizeEntry",
    "GraphCompileReason",
    "OptimizeContext",
    "TensorPropertySource",
    "TorchRuntimeError",
    "TracingContext",
    "dynamo_config",
    "dynamo_utils",
    "is_float_symbol",
    "list_changed_dims",
    "list_recompile_reasons",
    "mark_dynamic",
    "mark_number_dynamic",
    "optimize",
    "read_scalar",
    "read_size",
    "set_original_backend",
    "silence_dynamo",
    "tag_activation_checkpoint",
    "track_sizes_with",
]

builder: Any = importlib.import_module("torch._dynamo.variables.builder")
"""Finds the variables that a graph reads."""

SILENT_LOGGERS = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor", "torch._subclasses.fake_tensor")
"""The loggers of failures and of breaks, which errors and reports describe."""


def is_float_symbol(symbol: Any) -> bool:
    """Return whether a symbol in Dynamo's sizes is a float."""
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def set_original_backend(callback: Any, original: Any) -> None:
    """Set the backend that a callback wraps, which Dynamo reads there."""
    callback._torchdynamo_orig_backend = original


@contextlib.contextmanager
def track_sizes_with(choose: Callable[[str, FrameStateSizeEntry], FrameStateSizeEntry]) -> Iterator[None]:
    """Decide which sizes and numbers are dynamic by a function, instead of by the earlier calls of the process.

    Args:
        choose: returns what is dynamic in a tensor or number, from its source and its current sizes or value.
    """
    thread = threading.get_ident()

    def process(tx: Any, name: str, entry: FrameStateSizeEntry, **kwargs: Any) -> FrameStateSizeEntry:
        is_own = threading.get_ident() == thread  # other threads compile functions of their own
        return choose(name, entry) if is_own else original(tx, name, entry, **kwargs)

    with _TRACKING_LOCK:
        original = builder.process_automatic_dynamic
        builder.process_automatic_dynamic = process
        try:
            yield
        finally:
            builder.process_automatic_dynamic = original


_TRACKING_LOCK = threading.RLock()
"""Held while sizes are tracked by a function."""


def read_scalar(entry: FrameStateSizeEntry) -> float | None:
    """Return the number that an entry describes; None for a tensor."""
    return entry.scalar if isinstance(entry.scalar, int | float) else None


def read_size(entry: FrameStateSizeEntry) -> tuple[Any, ...] | None:
    """Return the size of the tensor that an entry describes; None for a number."""
    return entry.size if isinstance(entry.size, tuple) else None


def list_changed_dims(entry: FrameStateSizeEntry) -> list[int]:
    """Return the dims of the tensor that an entry describes whose sizes differ; none for a number."""
    return [dim for dim, size in enumerate(read_size(entry) or ()) if size is auto_dynamic]


def mark_number_dynamic(entry: FrameStateSizeEntry) -> None:
    """Mark the number that an entry describes as dynamic."""
    entry.scalar = auto_dynamic


@contextlib.contextmanager
def silence_dynamo() -> Iterator[None]:
    """Suppress messages about failures and breaks."""
    loggers = [logging.getLogger(name) for name in SILENT_LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled


def list_recompile_reasons(frame: Any, backend: Any) -> list[str]:
    """Return the guard that fails in each compiled form of a function, for the variables of a call."""
    entries = _get_cache_entries_for_region(frame.f_code, get_eval_frame_isolate_recompiles_id())
    return get_and_maybe_log_recompilation_reasons(entries, frame, backend, skip_logging=True)
