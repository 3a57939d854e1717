"""Adapters by the names that other tools give them, and their settings in the form of a file beside them.

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
from clika_ref.lora.adapters import DOWN, UP, adapters_of

WRAPPED = "base_model.model."
"""What stands before the path of a layer, whose model is wrapped there."""

KEY = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
"""The name of a matrix; those of a model in memory have that of their adapter before ``weight``."""


def adapter_state(graph: Graph) -> dict[str, Tensor]:
    """Return the matrices of all adapters: ``base_model.model.<path>.lora_A.weight`` and ``...lora_B.weight``."""
    return {
        f"{WRAPPED}{name}": matrix.data.detach() for name, matrix in _matrices(graph).items() if matrix.data is not None
    }


def _matrices(graph: Graph) -> dict[str, Value]:
    adapters = adapters_of(graph)
    return {a.path + end: matrix for a in adapters for end, matrix in ((DOWN, a.down), (UP, a.up))}


@torch.no_grad()
def load_adapter_state(graph: Graph, state: Mapping[str, Tensor]) -> None:
    """Take over matrices, as `adapter_state` and other tools name them.

    Raises:
        ModelError: one is missing, is of no adapter, or has another shape; all are named, and nothing is taken over.
    """
    own, found = _matrices(graph), dict[str, Tensor]()
    problems: list[str] = []
    for key, tensor in state.items():
        match = KEY.fullmatch(key)
        name = f"{match['path']}.lora_{match['which']}.weight" if match else ""
        if name not in own:
            problems.append(f"{key!r} is the matrix of no adapter")
        elif tensor.shape != own[name].type.shape:
            sides = ["x".join(map(str, shape)) for shape in (tensor.shape, own[name].type.shape)]
            problems.append(f"{key!r} is {sides[0]}, and the adapter's is {sides[1]}")
        else:
            found[name] = tensor
    named = " ".join(problems)
    problems += [f"{WRAPPED}{name} is missing" for name in own if name not in found and name not in named]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems)
        msg = (
            f"the adapters do not fit those of {graph.name}:\n{shown}\nAttach adapters of the same rank to the same "
            "layers first: LoraSettings(rank=..., target_layers=[...])"
        )
        raise ModelError(msg)
    for name, tensor in found.items():
        data = own[name].data
        assert data is not None
        data.copy_(tensor)


def adapter_config(graph: Graph) -> dict[str, Any]:
    """Return what other tools want to know of the adapters of a graph, as JSON has it."""
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
        "fan_in_fan_out": False,
    }
