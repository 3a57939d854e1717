"""Save a `ClikaModule` whole, in one safetensors file; reading the file executes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.quantization_state import QuantizationState, target_of
from clika_ref.compiled.weights import device_of_constants, tensors_by_name
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.module.saved_module import SavedModule, isolate_from_caller_modes
from clika_ref.module.weight_storage import find_storable_weights, with_nearest_rounding
from clika_ref.quantization.calibration.calibration_format import calibration_from_json, calibration_to_json
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.qat.learned_scales import apply_learned_scales
from clika_ref.quantization.qdq.stored_weights import StoredWeight, read_parameter
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.serialization.atomic_files import require_path, write_atomically
from clika_ref.serialization.bits import pack_bits, unpack_bits
from clika_ref.serialization.container import pack_file, unpack_file
from clika_ref.serialization.graph_format import read_type
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.json_format import (
    deployment_from_json,
    deployment_to_json,
    settings_from_json,
    settings_to_json,
)
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

EXAMPLE_CHECKPOINT_PATH = "saved/model"

CALIBRATION_PREFIX = "clika/ranges/"
"""Prefix of the names of calibration tensors; qualified names of weights contain no slash."""

SAVED_WEIGHTS_FINGERPRINT = "the weights that are saved here"
"""Stands for the `fingerprint` of the saved weights, which changes when quantized weights replace them."""

CORRUPTION_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, RecursionError)
"""Errors raised by a document that differs from the written one although its digest matches."""


class CheckpointedModule(SavedModule):
    """A module around a graph that can be saved whole."""

    def clika_save(
        self,
        path: str | PathLike[str],
        *,
        keep_float_weights: bool = False,
        keep_calibration_inputs: bool = False,
    ) -> None:
        """Save the module in one file; `clika_load` restores it without the original's source.

        The file holds the graph, its guards, weights and masks, the quantization plan, calibration ranges, learned
        scales and settings. Quantized weights are stored as integers: the loaded module computes and exports the same,
        bit for bit, and its float weights are the dequantized ones. The path is used as given; no suffix is added. The
        file is replaced atomically; until then an old file stays as it was.

        Args:
            path: the file to write.
            keep_float_weights: store all weights as they are, so that training can continue from them.
            keep_calibration_inputs: store the calibration inputs that the module has kept, up to 64 MB, so that the
                loaded module can be quantized for another target, or differently, without data.

        Raises:
            ModelError: no file can be written there; or the module is empty, or holds tensors that are not part of its
                graph.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        place = require_path(path, EXAMPLE_CHECKPOINT_PATH)
        parts = self._pack(keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
        with write_atomically(place) as file:
            for part in parts:
                file.write(part)

    @classmethod
    def clika_load(cls, path: str | PathLike[str]) -> Self:
        """Load a module that `clika_save` wrote; nothing in the file is executed.

        Raises:
            ModelError: the file cannot be read, is truncated, altered, of a newer format or no saved module, or needs
                plugins or classes that are not installed; the message says which.
        """
        place = require_path(path, EXAMPLE_CHECKPOINT_PATH)
        try:
            blob = place.read_bytes()
        except IsADirectoryError as error:
            msg = f"cannot load {str(place)!r}: it is a folder; give the file in it"
            raise ModelError(msg) from error
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            msg = f"cannot load {str(place)!r}: {reason}; give the path of a file that clika_save wrote"
            raise ModelError(msg) from error
        return cls._unpack(blob, repr(str(place)))

    def clika_serialize(self, *, keep_float_weights: bool = False, keep_calibration_inputs: bool = False) -> bytes:
        """Return the file contents that `clika_save` writes, as bytes.

        ``keep_float_weights`` and ``keep_calibration_inputs`` are as for `clika_save`.

        Raises:
            ModelError: the module is empty, or holds tensors that are not part of its graph.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        parts = self._pack(keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
        return b"".join(parts)

    @classmethod
    def clika_from_serialized(cls, serialized: bytes) -> Self:
        """Load a module from the bytes of `clika_serialize`; nothing in them is executed.

        Raises:
            ModelError: as `clika_load`.
        """
        if not isinstance(serialized, bytes | bytearray | memoryview):
            msg = f"serialized is a {type(serialized).__name__}; give the bytes that clika_serialize returned"
            raise ModelError(msg)
        return cls._unpack(bytes(serialized), f"{len(serialized):,} bytes")

    @property
    def _learned_quantization(self) -> QuantizationState | None:
        """The quantization state, with the scales learned in training."""
        own = self._clika_quantized
        return own and replace(
            own, plan=apply_learned_scales(own.plan.to_device(device_of_constants(self.graph)), self._log_scales)
        )

    # Writing

    def _pack(self, *, keep_float_weights: bool, keep_calibration_inputs: bool) -> list[bytes | memoryview]:
        self._require_graph()
        graph, registry, quantized = self.graph, self._clika_registry or load_registry(), self._clika_quantized
        self._reject_foreign_tensors(graph)
        stored: dict[str, StoredWeight] = {}
        learned = self._learned_quantization  # rejects NaN or infinite scales
        if quantized is not None and learned is not None and not keep_float_weights:
            stored = find_storable_weights(graph, learned.plan, target_of(quantized, registry), registry)
            layers = {weight.layer for weight in stored.values()}
            quantized = replace(quantized, plan=with_nearest_rounding(quantized.plan, layers))
        mark = fingerprint(graph)
        if quantized is not None and quantized.model == mark:
            quantized = replace(quantized, model=SAVED_WEIGHTS_FINGERPRINT)
        document, tensors = self._describe_state(quantized)
        document["integers"] = {}
        for name, weight in stored.items():
            known = {n: t for n, t in tensors.items() if n.endswith(f".{weight.layer}")}
            document["integers"][name], held = weight.to_document(name, known)
            tensors |= held
        for name, value in graph.constants.items():
            if value.data is not None and name not in stored:
                tensors[name] = pack_bits(value.data) if value.data.dtype == torch.bool else value.data
        tensors |= {name: log.detach() for name, log in self._log_scales.items() if bool(log.any())}
        document |= self._settings_document(graph, registry)
        document["calibration"], held = self._calibration_to_json(mark, keeps_inputs=keep_calibration_inputs)
        return pack_file(document, tensors | {f"{CALIBRATION_PREFIX}{name}": tensor for name, tensor in held.items()})

    def _reject_foreign_tensors(self, graph: Graph) -> None:
        """Reject parameters and buffers that were added to the module from outside: they could not be restored."""
        known = graph.constants.keys() | graph.aliases.keys() | self._log_scales.keys()
        foreign = sorted(tensors_by_name(self).keys() - known)
        if foreign:
            msg = f"the module holds {foreign[0]!r}, which is no part of its graph; take it off, and save it by itself"
            raise ModelError(msg)

    def _settings_document(self, graph: Graph, registry: Registry) -> dict[str, Any]:
        """Return the user's settings, and the versions of the plugins that the module needs."""
        deployment, wanted, used = self._clika_deployment, self._clika_wanted, {node.op.name for node in graph.nodes}
        needed = [p for p in registry.plugins if not used.isdisjoint(operator.name for operator in p.operators)]
        return {
            "plugins": {plugin.distribution: plugin.version for plugin in needed},
            "training": self.training,
            "options": settings_to_json(self._clika_options),
            "deployment": deployment and deployment_to_json(deployment),
            "wanted": wanted
            and {
                "settings": settings_to_json(wanted.given),
                "layers": {name: settings_to_json(layer) for name, layer in wanted.layers.items()},
                "options": settings_to_json(wanted.options),
            },
        }

    def _calibration_to_json(self, mark: str, *, keeps_inputs: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        whole, unfinished = self._clika_calibration, self._clika_unfinished
        found = whole or unfinished
        if found is None:
            return None, {}
        known = {mark: SAVED_WEIGHTS_FINGERPRINT}
        table = replace(found.table, model=known.get(found.table.model, found.table.model))
        found = replace(found, table=table, model=known.get(found.model, found.model))
        return calibration_to_json(found, is_whole=whole is not None, keeps_inputs=keeps_inputs)

    # Reading

    @classmethod
    def _unpack(cls, blob: bytes, shown: str) -> Self:
        module = cls(registry=load_registry())
        with isolate_from_caller_modes():
            try:
                module._restore(*unpack_file(blob))
            except ModelError as error:
                msg = f"cannot load {shown}: {error}"
                raise ModelError(msg) from error
            except CORRUPTION_ERRORS as error:
                msg = f"cannot load {shown}: it is no saved module: {type(error).__name__}: {error}"
                raise ModelError(msg) from error
        return module

    def _restore(self, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill an empty module with the saved contents."""
        registry = self._clika_registry or load_registry()
        _require_plugins(document["plugins"], registry)
        self._build(document, _read_constants(document, tensors), tensors)
        with torch.no_grad():
            for name, log in self._log_scales.items():
                log.copy_(tensors.get(name, log))
        self._clika_options = settings_from_json(ClikaCompileOptions, document["options"])
        self._clika_deployment = document["deployment"] and deployment_from_json(document["deployment"])
        mark = fingerprint(self.graph)
        if self._clika_quantized is not None and self._clika_quantized.model == SAVED_WEIGHTS_FINGERPRINT:
            self._clika_quantized = replace(self._clika_quantized, model=mark)
        own = {
            name.removeprefix(CALIBRATION_PREFIX): t
            for name, t in tensors.items()
            if name.startswith(CALIBRATION_PREFIX)
        }
        self._restore_calibration(document["calibration"], own, mark)
        self._restore_request(document["wanted"], registry)
        nn.Module.train(self, document["training"])  # the training form is built on the first call

    def _restore_calibration(self, saved: Any, tensors: Mapping[str, torch.Tensor], mark: str) -> None:
        """Restore calibration ranges.

        Without saved inputs they stay pending until the same data is given, which is not run again.
        """
        if saved is None:
            return
        known, found = {SAVED_WEIGHTS_FINGERPRINT: mark}, calibration_from_json(saved, tensors, self._clika_graph)
        found.table.model = known.get(found.table.model, found.table.model)
        found.model = known.get(found.model, found.model)
        if saved["inputs"] is not None and saved["is whole"]:
            self._clika_calibration = found
            self._clika_sizes = self._clika_sizes - found.sizes
        else:
            self._clika_unfinished = found

    def _restore_request(self, saved: Any, registry: Registry) -> None:
        """Restore the quantization request of the user, if its target is installed."""
        deployment = self._clika_deployment
        if saved is not None and deployment is not None and deployment.target in registry.targets:
            layers = {n: settings_from_json(LayerQuantizationSettings, s) for n, s in saved["layers"].items()}
            given = settings_from_json(QuantizationSettings, saved["settings"])
            options = settings_from_json(ClikaCompileOptions, saved["options"])
            self._clika_wanted = QuantizationRequest(target_for(deployment, registry), given, layers, options)


def _read_constants(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the constants of a saved graph by name.

    Raises:
        ModelError: the integers of a quantized weight are damaged.
    """
    integers: Mapping[str, Any] = document.get("integers", {})
    found: dict[str, torch.Tensor] = {}
    for name, saved in zip(document["graph"]["constants"], document["graph"]["constant_types"], strict=True):
        kind, tensor = read_type(saved), tensors[name]
        if name in integers:
            tensor = read_parameter(integers[name], name, tensors, kind)
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
    lacking = [f"{name} {version}" for name, version in needed.items() if name not in there]
    if lacking:
        msg = f"it needs operators of {', '.join(lacking)}, which is not among the plugins here; install it"
        raise ModelError(msg)
