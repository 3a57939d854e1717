"""The state dict of a compiled module: weights under the original's names, and all else in ``_extra_state``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.state import CompiledModule, log_scales_of, set_quantization
from clika_ref.compiled.weights import non_persistent_buffers, register_weights, tensors_by_name
from clika_ref.core.errors import ModelError
from clika_ref.module.running import set_forward
from clika_ref.serialization.container import read_extra_state, strip_prefix, write_extra_state
from clika_ref.serialization.graph_format import graph_to_json, is_same_graph
from clika_ref.serialization.vocabulary import GraphKey, ModuleKey

EXTRA_STATE_KEY = "_extra_state"


def write_state(module: CompiledModule) -> torch.Tensor:
    """Return the graph, the signature and the original's non-persistent buffers, as ``uint8[bytes]``."""
    document, tensors = describe_state(module, module.clika_state.quantized)
    return write_extra_state(document, {**non_persistent_buffers(module), **tensors})


def describe_state(
    module: CompiledModule, quantized: QuantizationState | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the state of a module apart from weights: a document, and the tensors of the quantization plan.

    Raises:
        ModelError: the module is empty, or its graph holds an object that no file can store.
    """
    state = module.clika_state
    document: dict[str, Any] = {
        **state.describe_graph(),
        ModuleKey.PERSISTENT: sorted(tensors_by_name(module).keys() - non_persistent_buffers(module).keys()),
        ModuleKey.PARAMETERS: {n: p.requires_grad for n, p in module.named_parameters(remove_duplicate=False)},
        ModuleKey.SIZES: sorted(state.sizes.items()),
        ModuleKey.BATCH_NORM: state.options.batch_norm,
    }
    document[ModuleKey.QUANTIZATION], tensors = quantized.to_document() if quantized else (None, {})
    return document, tensors


def prepare_to_load(module: CompiledModule, state_dict: dict[str, Any], prefix: str) -> None:
    """Restore all but the weights of a module from a state dict, and add missing entries to the state dict.

    An empty module is rebuilt first. The state dict of the original model lacks the parameters that compression added;
    these keep their values.

    Raises:
        ModelError: the state dict has no graph for an empty module, or another graph than the module.
    """
    key = f"{prefix}{EXTRA_STATE_KEY}"
    with isolate_from_caller_modes():
        if module.clika_state.is_empty:
            if key not in state_dict:
                raise _missing_graph_error(key, state_dict)
            _rebuild(module, strip_prefix(state_dict, prefix))
        elif key in state_dict:
            _load_state(module, state_dict[key])
    if key not in state_dict:
        for name, value in module.state_dict().items():
            if name.startswith((EXTRA_STATE_KEY, "clika.")):
                state_dict.setdefault(f"{prefix}{name}", value)


def _load_state(module: CompiledModule, saved: torch.Tensor) -> None:
    document, tensors = read_extra_state(saved)
    if not is_same_graph(document[ModuleKey.GRAPH], graph_to_json(module.clika_state.graph)):
        raise ModelError(
            "cannot load the state dict: it holds another graph than this module. Load it into an empty ClikaModule()"
        )
    _restore_quantization(module, document, tensors)


def _restore_quantization(
    module: CompiledModule, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Restore the quantization and the observed sizes; calibration ranges are not saved."""
    state = module.clika_state
    seen: Iterable[tuple[Iterable[tuple[str, int]], int]] = document[ModuleKey.SIZES]
    state.example_sizes = Counter({tuple((name, size) for name, size in sizes): n for sizes, n in seen})
    saved = document[ModuleKey.QUANTIZATION]
    set_quantization(module, saved and QuantizationState.read(saved, tensors), None)
    trained: Mapping[str, bool] = document[ModuleKey.PARAMETERS]
    for name, parameter in log_scales_of(module).items():
        parameter.requires_grad_(trained.get(name, True))
    state.options = replace(state.options, batch_norm=document[ModuleKey.BATCH_NORM])
    state.unfinished = None


def _rebuild(module: CompiledModule, state_dict: Mapping[str, Any]) -> None:
    document, extra = read_extra_state(state_dict[EXTRA_STATE_KEY])
    constants = document[ModuleKey.GRAPH][GraphKey.CONSTANTS]
    found = {n: t for n in constants if (t := state_dict.get(n, extra.get(n))) is not None}
    lacking = [name for name in constants if name not in found]
    if lacking:
        names = ", ".join(map(repr, lacking))
        raise ModelError(
            f"cannot load the state dict: it lacks {names}, which its graph needs. Load a complete state dict"
        )
    others = [f"{n!r} (a {type(t).__name__})" for n, t in found.items() if not isinstance(t, torch.Tensor)]
    if others:
        names = ", ".join(others)
        raise ModelError(
            f"cannot load the state dict: it holds {names} where its graph needs tensors. Pass it as it was saved"
        )
    build_module(module, document, {name: tensor.clone() for name, tensor in found.items()}, extra)


def build_module(
    module: CompiledModule,
    document: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Fill an empty module.

    Args:
        module: the module.
        document: as returned by `describe_state`.
        weights: the tensors of the graph's constants, which become those of the module.
        tensors: as returned by `describe_state`, possibly with others.
    """
    state = module.clika_state
    trained: Mapping[str, bool] = document[ModuleKey.PARAMETERS]
    own = {n: nn.Parameter(t, trained[n]) if n in trained else t for n, t in weights.items()}
    graph, signature = state.read_graph(document, own)
    register_weights(module, graph, frozenset(document[ModuleKey.PERSISTENT]))
    state.install(graph, signature)
    _restore_quantization(module, document, tensors)
    set_forward(module)


@contextmanager
def isolate_from_caller_modes() -> Iterator[None]:
    """Create tensors that can be trained, on the CPU, regardless of the caller's inference mode and default device."""
    with torch.inference_mode(mode=False), torch.device("cpu"):
        yield


def _missing_graph_error(key: str, state_dict: Mapping[str, Any]) -> ModelError:
    """Return the error for a state dict without a graph for an empty module."""
    found = next((name for name in state_dict if name.endswith(key)), None)
    if found is None:
        hint = "Pass the state dict of a ClikaModule; load that of the original into a compiled module"
    else:
        hint = (
            f"It has {found!r}: remove {found.removesuffix(key)!r} from its names, as "
            "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present does, or wrap this module likewise"
        )
    return ModelError(
        f"cannot load the state dict into an empty ClikaModule: it has no {key!r}, which holds the graph. {hint}"
    )
