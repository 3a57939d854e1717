"""The ``_extra_state`` of a ClikaModule: its state dict entries other than weights, as bytes of a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from clika_ref.core.errors import ModelError
from clika_ref.serialization.container import pack_file, unpack_file


def write_extra_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Serialize a document and tensors as ``uint8[bytes]``."""
    return torch.frombuffer(bytearray(b"".join(pack_file(document, tensors))), dtype=torch.uint8)


def read_extra_state(state: object) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors, without executing anything in them.

    Raises:
        ModelError: the state is no tensor of such a file.
    """
    is_tensor = isinstance(state, torch.Tensor)
    if not is_tensor or state.dtype != torch.uint8 or state.layout != torch.strided or state.is_meta:
        found = f"{state.dtype}, {state.layout} on {state.device}" if is_tensor else f"a {type(state).__name__}"
        msg = f"cannot load _extra_state (the graph): it is {found}. Give the uint8[bytes] of a saved state dict."
        raise ModelError(msg)
    blob = state.cpu().numpy().tobytes()
    try:
        return unpack_file(blob)
    except ModelError as error:
        msg = f"cannot load _extra_state (the graph) of {len(blob)} bytes: {error}"
        raise ModelError(msg) from error
