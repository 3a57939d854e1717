"""Convert adapters to the names of the ``peft`` package, with their ``adapter_config.json``.

Source: the layout of checkpoints of the package ``peft``, release 0.18: ``adapter_model.safetensors`` and
``adapter_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Value
from clika_ref.lora.adapters import DOWN_SUFFIX, UP_SUFFIX, adapters_of
from clika_ref.quantization.qdq.layer_weights import data_of

PEFT_PREFIX = "base_model.model."
"""Prefix of the path of a layer, since ``peft`` wraps the model."""

PEFT_KEY = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
"""Matches the name of a matrix; in-memory models have the adapter's name before ``weight``."""


def adapter_state(graph: Graph) -> dict[str, Tensor]:
    """Return the matrices of all adapters: ``base_model.model.<path>.lora_A.weight`` and ``...lora_B.weight``."""
    return {f"{PEFT_PREFIX}{name}": data_of(matrix) for name, matrix in _matrices(graph).items()}


def _matrices(graph: Graph) -> dict[str, Value]:
    adapters = adapters_of(graph)
    return {a.path + end: matrix for a in adapters for end, matrix in ((DOWN_SUFFIX, a.down), (UP_SUFFIX, a.up))}


@torch.no_grad()
def load_adapter_state(graph: Graph, state: Mapping[str, Tensor]) -> None:
    """Load matrices under the names of `adapter_state` and of other tools.

    Raises:
        ModelError: one is missing, belongs to no adapter, occurs twice, or has another shape; all are listed, and
            nothing is loaded.
    """
    if not isinstance(state, Mapping):
        raise ModelError(
            f"state_dict is a {type(state).__name__}. Give matrices by name, as safetensors.torch.load_file "
            "returns them."
        )
    own, found = _matrices(graph), dict[str, Tensor]()
    problems: list[str] = []
    for key, tensor in state.items():
        name = _own_name(key)
        problem = "is not a matrix of an adapter"
        if name in own:
            problem = _find_mismatch(tensor, own[name], is_second=name in found)
        problems += [f"{key!r} {problem}"] if problem else []
        found[name] = tensor
    problems += [f"{PEFT_PREFIX}{name} is missing" for name in own if name not in found]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems)
        raise ModelError(
            f"the adapters do not match those of {graph.name}:\n{shown}\nFirst attach adapters of the same rank to "
            "the same layers: LoraSettings(rank=..., target_layers=[...])."
        )
    for name, tensor in found.items():
        data_of(own[name]).copy_(tensor)


def _own_name(key: object) -> str:
    """Return our name of a matrix; empty if a key names none."""
    match = PEFT_KEY.fullmatch(key) if isinstance(key, str) else None
    return f"{match['path']}.lora_{match['which']}.weight" if match else ""


def _find_mismatch(tensor: object, own: Value, *, is_second: bool) -> str:
    """Return why a tensor cannot be loaded as a matrix of an adapter; empty if it can."""
    if is_second:
        return "is the same matrix of a second adapter. Load one adapter at a time"
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return (
            f"is {tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__}, not a floating-point tensor"
        )
    if tensor.shape != own.type.shape:
        shapes = ["x".join(map(str, shape)) for shape in (tensor.shape, own.type.shape)]
        return f"is {shapes[0]}, but that of the adapter is {shapes[1]}"
    return ""


def adapter_config(graph: Graph) -> dict[str, Any]:
    """Return the ``adapter_config.json`` of the adapters of a graph."""
    adapters = adapters_of(graph)
    attributes = adapters[0].attributes
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": adapters[0].rank,
        "lora_alpha": attributes["alpha"],
        "lora_dropout": attributes["dropout_rate"],
        "target_modules": [adapter.path for adapter in adapters],
        "bias": "none",
        "fan_in_fan_out": any(adapter.has_columns for adapter in adapters),
    }
