"""The calls ``quantized_decomposed``, which PyTorch's exporters support. Their import takes a second."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the calls; an exporter looks them up before it traces

QUANTIZED_DECOMPOSED: Any = torch.ops.quantized_decomposed
"""The calls by their names, for example ``quantize_per_tensor``."""
