"""The ``_extra_state`` of a ClikaModule: what its state dict holds beside weights, as bytes of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError

DOCUMENT = "clika"
"""The entry of the metadata that holds everything but tensors."""


def write_extra_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a document and tensors as ``uint8[bytes]``."""
    on_cpu = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    blob = safetensors.torch.save(on_cpu, {DOCUMENT: json.dumps(document, separators=(",", ":"))})
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def read_extra_state(state: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors; nothing of them is executed.

    Raises:
        ModelError: the bytes are no such file.
    """
    blob = state.cpu().numpy().tobytes()
    try:
        length = int.from_bytes(blob[:8], "little")
        document = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"][DOCUMENT])
        return document, safetensors.torch.load(blob)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        msg = f"the _extra_state of {len(blob)} bytes, which holds the graph, is damaged: {error}"
        raise ModelError(msg) from error
