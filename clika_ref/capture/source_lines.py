"""Record the lines of the model for traced calls and guards.

Tracers only recognize functions named ``forward``, and guards name lines of PyTorch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files
from torch.fx.proxy import TracerBase

from clika_ref.capture.origins import is_model_file, is_model_frame
from clika_ref.capture.patching import patch_attributes
from clika_ref.torch_internals.tracing import FILTER_TRACEBACK_FRAMES, GET_STACK_SUMMARY, SLoc

CONDITIONS_FILE = str(Path(__file__).with_name("hit_rows.py"))
"""The file that reads the conditions of the model on sizes during a trace."""

STRING_FILE_NAME = "<string>"
"""File name of code compiled from a string, such as clika-ref's wrappers with another signature."""


@dataclass(frozen=True)
class LocatedSLoc(SLoc):
    """The location of a guard, with the innermost line of the model."""

    model: FrameSummary | None = None


@contextlib.contextmanager
def record_model_lines(outermost: str, reach: Callable[[FrameSummary], None]) -> Iterator[None]:
    """Record the lines of the model for traced calls and guards.

    Args:
        outermost: the file that calls the model; only frames inside its frames belong to the model.
        reach: receives the innermost frame of the model of each call and guard.
    """
    summarize_stack, filter_stack = getattr(*GET_STACK_SUMMARY), getattr(*FILTER_TRACEBACK_FRAMES)

    def summarize(env: ShapeEnv, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:  # noqa: FBT001, FBT002 - PyTorch's signature
        framework_line: Any = framework_loc or _find_innermost_frame(_is_interesting)
        location, debug = summarize_stack(env, is_debug, framework_line)
        model = _find_innermost_frame(_is_of_model, outermost)
        if model is not None:
            reach(model)
        return LocatedSLoc(location.framework_loc, location.maybe_user_loc, model), debug

    def filter_frames(tracer: TracerBase, stack: StackSummary) -> StackSummary:
        frames = _select_model_frames(stack, outermost)
        if not frames:
            return filter_stack(tracer, stack)
        reach(frames[-1])
        return StackSummary.from_list(frames)

    with patch_attributes({GET_STACK_SUMMARY: summarize, FILTER_TRACEBACK_FRAMES: filter_frames}):
        yield


def _find_innermost_frame(predicate: Callable[[FrameType], bool], outermost: str = "") -> FrameSummary | None:
    """Return the innermost frame for which the predicate holds, inside the frames of the file ``outermost``."""
    frame: FrameType | None = sys._getframe(2)  # the caller of summarize
    while frame is not None and frame.f_code.co_filename != outermost:
        if predicate(frame):
            return FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _is_interesting(frame: FrameType) -> bool:
    """Return whether PyTorch would name the line of a frame for a guard, without our reading of conditions."""
    return frame.f_code.co_filename not in uninteresting_files() and frame.f_code.co_filename != CONDITIONS_FILE


def _is_of_model(frame: FrameType) -> bool:
    return is_model_frame(frame) and frame.f_code.co_filename != STRING_FILE_NAME


def _select_model_frames(stack: StackSummary, outermost: str) -> list[FrameSummary]:
    """Return the frames of the model, inside the frames of the file ``outermost``."""
    start = max((i for i, frame in enumerate(stack) if frame.filename == outermost), default=len(stack))
    return [frame for frame in stack[start:] if is_model_file(frame.filename) and frame.filename != STRING_FILE_NAME]
