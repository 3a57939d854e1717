"""torchlib's lowerings to ONNX, and torch.onnx's recorder for them. Their import takes 1.5 s."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from torch.onnx._internal.exporter._building import OpRecorder as OpRecorder
from torch.onnx._internal.exporter._registration import ONNXRegistry as ONNXRegistry
from torch.onnx._internal.exporter._tensors import SymbolicTensor as SymbolicTensor
