"""Python kernels for torchvision's compiled operators, for a torchvision whose own library does not load."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from clika_ref.core.operators import Operator

POOLING = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"

SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"

QUANTIZATION = "float input_scale, int input_zero_point, float rois_scale, int rois_zero_point"

CONVOLUTION = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)

SCHEMAS = f"""
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
_cuda_version() -> int
roi_align(Tensor input, Tensor rois, {POOLING}, int sampling_ratio, bool aligned) -> Tensor
_roi_align_backward(Tensor grad, Tensor rois, {POOLING}, {SHAPE}, int sampling_ratio, bool aligned) -> Tensor
qroi_align(Tensor input, Tensor rois, {QUANTIZATION}, {POOLING}, int sampling_ratio, bool aligned) -> Tensor
roi_pool(Tensor input, Tensor rois, {POOLING}) -> (Tensor, Tensor)
_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {POOLING}, {SHAPE}) -> Tensor
ps_roi_align(Tensor input, Tensor rois, {POOLING}, int sampling_ratio) -> (Tensor, Tensor)
_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, {POOLING}, int sampling_ratio, {SHAPE}) -> Tensor
ps_roi_pool(Tensor input, Tensor rois, {POOLING}) -> (Tensor, Tensor)
_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, {POOLING}, {SHAPE}) -> Tensor
deform_conv2d({CONVOLUTION}) -> Tensor
_deform_conv2d_backward(Tensor grad, {CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
"""
"""The compiled operators that torchvision's own Python code refers to on import."""


_DECLARED: list[torch.library.Library] = []
"""The library of `use_python_kernels`: a library takes its operators with it when it is deleted."""


def use_python_kernels() -> None:
    """Declare torchvision's operators with Python kernels if its compiled library does not load.

    Call it before ``import torchvision``, which then takes the operators for its own. Results equal those of the
    compiled kernels within float rounding; gradients are not supported. Without torchvision, nothing happens.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    binaries = list(Path(found.origin).parent.glob("_C*.so"))
    try:
        for binary in binaries:
            torch.ops.load_library(binary)
    except OSError:
        _DECLARED.append(_declare_operators(frozenset(map(str, binaries))))


def _declare_operators(binaries: frozenset[str]) -> torch.library.Library:
    declared = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS.strip().splitlines():
        declared.define(schema)
    for name, kernel in KERNELS.items():
        declared.impl(name, kernel, "CompositeExplicitAutograd" if name == "_cuda_version" else "CPU")
    load: Callable[[Any], None] = torch.ops.load_library

    def load_other(path: Any) -> None:
        """Load a library, unless it is the one whose operators are declared here."""
        if str(path) not in binaries:
            load(path)

    torch.ops.load_library = load_other  # type: ignore[method-assign]
    return declared


def _make_kernel(module: str, name: str, *, has_indices: bool = False) -> Callable[..., Any]:
    """Return a kernel that runs the reference of an operator, whose module is imported on the first call.

    With ``has_indices``, the compiled operator also returns positions for its backward, which are not computed.
    """

    def run(*args: Any) -> Any:
        op: Operator = getattr(importlib.import_module(f"clika_ref_torchvision.{module}"), name)
        call = op.converters[f"torchvision.{name}.default"](*args)
        result = op(*call.operands, **call.attrs)
        return (result, torch.zeros(result.shape, dtype=torch.int32)) if has_indices else result

    return run


KERNELS: Mapping[str, Callable[..., Any]] = {
    "nms": _make_kernel("suppression", "nms"),
    "roi_align": _make_kernel("regions", "roi_align"),
    "roi_pool": _make_kernel("regions", "roi_pool", has_indices=True),
    "ps_roi_align": _make_kernel("regions", "ps_roi_align", has_indices=True),
    "deform_conv2d": _make_kernel("deformable", "deform_conv2d"),
    "_cuda_version": lambda: -1,
}
"""Kernels by the names of the compiled operators. -1 is the version of a build without CUDA."""
