"""Save a compiled module in one safetensors file, and load it; reading the file executes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.quantization_state import target_of
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph, learned_quantization, log_scales_of
from clika_ref.compiled.weights import tensors_by_name
from clika_ref.core.errors import ModelError, format_install_command
from clika_ref.core.ir import Graph, walk
from clika_ref.core.registry import Registry
from clika_ref.module.state_dict import build_module, describe_state, isolate_from_caller_modes
from clika_ref.module.weight_storage import find_storable_weights, with_nearest_rounding
from clika_ref.quantization.calibration.calibration_format import calibration_from_json, calibration_to_json
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.qdq.stored_weights import StoredWeight, read_parameter
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.serialization.atomic_files import require_path, write_atomically
from clika_ref.serialization.container import pack_bits, pack_file, strip_prefix, unpack_bits, unpack_file
from clika_ref.serialization.graph_format import read_type
from clika_ref.serialization.vocabulary import CalibrationKey, GraphKey, ModuleKey, PartialKey, RequestKey, TensorPrefix
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.json_format import (
    deployment_from_json,
    deployment_to_json,
    settings_from_json,
    settings_to_json,
)
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

EXAMPLE_CHECKPOINT_PATH = "saved/model"

SAVED_WEIGHTS_FINGERPRINT = "saved_weights"
"""Stands for the `fingerprint` of the saved weights, which changes when quantized weights replace them."""

CORRUPTION_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, RecursionError)
"""Errors raised by a document that differs from the written one although its digest matches."""


def save(
    module: CompiledModule, path: str | PathLike[str], *, keep_float_weights: bool, keep_calibration_inputs: bool
) -> None:
    """Save a module in one file, which is replaced atomically."""
    checked = require_path(path, EXAMPLE_CHECKPOINT_PATH)
    parts = _pack(module, keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
    with write_atomically(checked) as file:
        for part in parts:
            file.write(part)


def serialize(module: CompiledModule, *, keep_float_weights: bool, keep_calibration_inputs: bool) -> bytes:
    """Return the contents of a file that `save` writes."""
    parts = _pack(module, keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
    return b"".join(parts)


def load(module: CompiledModule, path: str | PathLike[str]) -> None:
    """Fill an empty module from a file of `save`.

    Raises:
        ModelError: the file cannot be read, is truncated, altered, of another format or no saved module, or needs
            plugins or classes that are not installed; the message names them.
    """
    file = require_path(path, EXAMPLE_CHECKPOINT_PATH)
    _unpack(module, read_saved_file(file), repr(str(file)))


def read_saved_file(file: Path) -> bytes:
    """Return the contents of a file that ``clika_save`` wrote.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return file.read_bytes()
    except IsADirectoryError as error:
        raise ModelError(f"cannot load {str(file)!r}: it is a folder. Pass the path of a file in it") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"cannot load {str(file)!r}: {reason}. Pass the path of a file that clika_save wrote"
        ) from error


def deserialize(module: CompiledModule, serialized: bytes) -> None:
    """Fill an empty module from the bytes of `serialize`.

    Raises:
        ModelError: as `load`.
    """
    if not isinstance(serialized, bytes | bytearray | memoryview):
        raise ModelError(
            f"cannot load a module: serialized is a {type(serialized).__name__}. Pass the bytes of clika_serialize"
        )
    _unpack(module, bytes(serialized), f"{len(serialized):,} bytes")


# Writing


def _pack(
    module: CompiledModule, *, keep_float_weights: bool, keep_calibration_inputs: bool
) -> list[bytes | memoryview]:
    state, graph = module.clika_state, bind_graph(module)
    registry, quantized = state.registry, state.quantized
    _reject_foreign_tensors(module, graph)
    stored: dict[str, StoredWeight] = {}
    learned = learned_quantization(module)  # rejects NaN or infinite scales
    if quantized is not None and learned is not None and not keep_float_weights:
        stored = find_storable_weights(graph, learned.plan, target_of(quantized, registry), registry)
        layers = {name for weight in stored.values() for name in weight.readers}
        quantized = replace(quantized, plan=with_nearest_rounding(quantized.plan, layers))
    mark = fingerprint(graph)
    if quantized is not None and quantized.model == mark:
        quantized = replace(quantized, model=SAVED_WEIGHTS_FINGERPRINT)
    document, tensors = describe_state(module, quantized)
    document[ModuleKey.QUANTIZED_WEIGHTS] = {}
    for name, weight in stored.items():
        known = {n: t for n, t in tensors.items() if n.endswith(f".{weight.layer}")}
        document[ModuleKey.QUANTIZED_WEIGHTS][name], stored_tensors = weight.to_document(name, known)
        tensors |= stored_tensors
    for name, value in graph.constants.items():
        if value.data is not None and name not in stored:
            tensors[name] = pack_bits(value.data) if value.data.dtype == torch.bool else value.data
    tensors |= {name: log.detach() for name, log in log_scales_of(module).items() if bool(log.any())}
    document |= _settings_document(module, graph)
    document[ModuleKey.CALIBRATION], ranges = _calibration_to_json(state, mark, keeps_inputs=keep_calibration_inputs)
    return pack_file(document, tensors | {f"{TensorPrefix.RANGES}{name}": tensor for name, tensor in ranges.items()})


def _reject_foreign_tensors(module: CompiledModule, graph: Graph) -> None:
    """Reject parameters and buffers that were added to the module from outside: they could not be restored."""
    known = graph.constants.keys() | graph.aliases.keys() | log_scales_of(module).keys()
    foreign = sorted(tensors_by_name(module).keys() - known)
    if foreign:
        raise ModelError(
            f"cannot save the module: {foreign[0]!r} is not part of its graph. Remove it from the module, and save it "
            "separately"
        )


def _settings_document(module: CompiledModule, graph: Graph) -> dict[str, Any]:
    """Return the user's settings, and the versions of the plugins that the module needs."""
    state = module.clika_state
    deployment, request, used = state.deployment, state.request, {node.op.name for node in walk(graph)}
    needed = [p for p in state.registry.plugins if not used.isdisjoint(operator.name for operator in p.operators)]
    return {
        ModuleKey.PLUGINS: {plugin.distribution: plugin.version for plugin in needed},
        ModuleKey.TRAINING: module.training,
        ModuleKey.OPTIONS: settings_to_json(state.options),
        ModuleKey.DEPLOYMENT: deployment and deployment_to_json(deployment),
        ModuleKey.REQUEST: request
        and {
            RequestKey.SETTINGS: settings_to_json(request.given),
            RequestKey.LAYERS: {name: settings_to_json(layer) for name, layer in request.layers.items()},
            RequestKey.OPTIONS: settings_to_json(request.options),
        },
    }


def _calibration_to_json(state: CompiledState, mark: str, *, keeps_inputs: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    complete, unfinished = state.calibration, state.unfinished
    found = complete or unfinished
    if found is None:
        return None, {}
    known = {mark: SAVED_WEIGHTS_FINGERPRINT}
    table = replace(found.table, model=known.get(found.table.model, found.table.model))
    found = replace(found, table=table, model=known.get(found.model, found.model))
    return calibration_to_json(found, is_complete=complete is not None, keeps_inputs=keeps_inputs)


# Reading


def _unpack(module: CompiledModule, blob: bytes, shown: str) -> None:
    with isolate_from_caller_modes():
        try:
            _restore(module, *unpack_file(blob))
        except ModelError as error:
            raise ModelError(f"cannot load {shown}: {error}") from error
        except CORRUPTION_ERRORS as error:
            raise ModelError(f"cannot load {shown}: it is no saved module: {type(error).__name__}: {error}") from error


def _restore(module: CompiledModule, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill an empty module with the saved contents."""
    if PartialKey.PIECES in document:
        raise ModelError("it holds a model in pieces. Load it with PartialClikaModule.clika_load(path, model)")
    state = module.clika_state
    _require_plugins(document[ModuleKey.PLUGINS], state.registry)
    build_module(module, document, _read_constants(document, tensors), tensors)
    with torch.no_grad():
        for name, log in log_scales_of(module).items():
            log.copy_(tensors.get(name, log))
    state.options = settings_from_json(ClikaCompileOptions, document[ModuleKey.OPTIONS])
    state.deployment = document[ModuleKey.DEPLOYMENT] and deployment_from_json(document[ModuleKey.DEPLOYMENT])
    mark = fingerprint(bind_graph(module))
    if state.quantized is not None and state.quantized.model == SAVED_WEIGHTS_FINGERPRINT:
        state.quantized = replace(state.quantized, model=mark)
    ranges = strip_prefix(tensors, TensorPrefix.RANGES)
    _restore_calibration(state, document[ModuleKey.CALIBRATION], ranges, mark)
    _restore_request(state, document[ModuleKey.REQUEST])
    nn.Module.train(module, document[ModuleKey.TRAINING])  # the training executor is built on the first call


def _restore_calibration(state: CompiledState, saved: Any, tensors: Mapping[str, torch.Tensor], mark: str) -> None:
    """Restore calibration ranges.

    Without saved inputs they stay pending until the same data is given, which is not run again.
    """
    if saved is None:
        return
    known, found = {SAVED_WEIGHTS_FINGERPRINT: mark}, calibration_from_json(saved, tensors, state.graph)
    found.table.model = known.get(found.table.model, found.table.model)
    found.model = known.get(found.model, found.model)
    if saved[CalibrationKey.INPUTS] is not None and saved[CalibrationKey.IS_COMPLETE]:
        state.calibration = found
        state.example_sizes = state.example_sizes - found.sizes
    else:
        state.unfinished = found


def _restore_request(state: CompiledState, saved: Any) -> None:
    """Restore the quantization request of the user, if its target is installed."""
    deployment = state.deployment
    if saved is not None and deployment is not None and deployment.target in state.registry.targets:
        layers = {n: settings_from_json(LayerQuantizationSettings, s) for n, s in saved[RequestKey.LAYERS].items()}
        given = settings_from_json(QuantizationSettings, saved[RequestKey.SETTINGS])
        options = settings_from_json(ClikaCompileOptions, saved[RequestKey.OPTIONS])
        state.request = QuantizationRequest(target_for(deployment, state.registry), given, layers, options)


def _read_constants(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the constants of a saved graph by name.

    Raises:
        ModelError: a quantized weight is damaged.
    """
    graph, quantized = document[ModuleKey.GRAPH], document[ModuleKey.QUANTIZED_WEIGHTS]
    found: dict[str, torch.Tensor] = {}
    for name, saved in zip(graph[GraphKey.CONSTANTS], graph[GraphKey.CONSTANT_TYPES], strict=True):
        kind, tensor = read_type(saved), tensors[name]
        if name in quantized:
            tensor = read_parameter(quantized[name], name, tensors, kind)
        elif kind.dtype == torch.bool and tensor.dtype != torch.bool:
            tensor = unpack_bits(tensor, tuple(map(int, kind.shape)))
        found[name] = tensor
    return found


def _require_plugins(needed: Mapping[str, str], registry: Registry) -> None:
    """Reject a module that uses operators of missing plugins.

    Raises:
        ModelError: plugins are not installed; all are listed.
    """
    there = {plugin.distribution for plugin in registry.plugins}
    lacking = {name: version for name, version in needed.items() if name not in there}
    if lacking:
        versions = ", ".join(f"{name} {version}" for name, version in lacking.items())
        commands = " and ".join(map(format_install_command, lacking))
        raise ModelError(f"it needs operators of {versions}, which are not installed. Run {commands}.")
