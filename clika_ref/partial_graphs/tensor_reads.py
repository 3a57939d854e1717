"""The lines of a model that read the elements of tensors: branches, and numbers as from ``Tensor.item()``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from clika_ref.capture.traced_floats import ITEM_OVERLOADS
from clika_ref.partial_graphs.breaks import Break, is_in_function
from clika_ref.torch_internals.tensors import TorchDispatchMode

READ_REASON = "Data-dependent branching, or a number as from Tensor.item()"

_TORCH_FOLDER = str(Path(torch.__file__).parent)


class _ReadRecorder(TorchDispatchMode):
    """Records the innermost line outside PyTorch of each call that reads an element of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int], str] = {}
        """The name of the function, by the file and the line."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ITEM_OVERLOADS:
            frame = _find_frame_of_user(sys._getframe(1))  # noqa: SLF001 - documented, though private by name
            if frame is not None:
                self.lines[frame.f_code.co_filename, frame.f_lineno] = frame.f_code.co_name
        return func(*args, **kwargs or {})


def _find_frame_of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER):
        frame = frame.f_back
    return frame


def list_reads(run: Callable[[], None], skipped: Iterable[Break]) -> list[Break]:
    """Return a break for each line of functions that run in Python where they read an element of a tensor.

    Args:
        run: calls the model in eager.
        skipped: the breaks of these functions, with lines in them.
    """
    with _ReadRecorder() as recorder:
        run()
    return [
        Break(name, file, line, READ_REASON)
        for (file, line), name in recorder.lines.items()
        if any(is_in_function(file, line, found.file, found.first_line) for found in skipped)
    ]
