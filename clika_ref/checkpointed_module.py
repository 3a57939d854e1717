"""The part of a ClikaModule that is saved whole, in one safetensors file, of which reading executes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.exporting.export import target_for
from clika_ref.integer_weights import integer_weights, without_moves
from clika_ref.quantization.calibration_format import calibration_from_json, calibration_to_json
from clika_ref.quantization.fingerprint import fingerprint
from clika_ref.quantization.learned_scales import learned_plan
from clika_ref.quantization.stored_weights import StoredWeight, read_parameter
from clika_ref.quantization_settings import LayerQuantizationSettings, QuantizationSettings
from clika_ref.saved_module import SavedModule, apart_from_the_caller
from clika_ref.saving.bits import packed_bits, unpacked_bits
from clika_ref.saving.container import packed, unpacked
from clika_ref.saving.graph_format import read_type
from clika_ref.saving.settings_format import (
    deployment_from_json,
    deployment_to_json,
    settings_from_json,
    settings_to_json,
)
from clika_ref.settings import ClikaCompileOptions
from clika_ref.simulation import Quantized, device_of, target_of
from clika_ref.storage import require_path, write_atomically
from clika_ref.wanted import Wanted
from clika_ref.weights import named_tensors

EXAMPLE = "saved/model"

RANGES = "clika/ranges/"
"""Of the names of tensors of the calibration; no qualified name of a weight holds a slash."""

SAVED = "the weights that are saved here"
"""In place of the `fingerprint` of these, which is another one where integers stand for them."""

DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, RecursionError)
"""What is raised where a document is not what was written, its digest being right."""


class CheckpointedModule(SavedModule):
    """A module around a graph that can be saved whole."""

    def clika_save(
        self,
        path: str | PathLike[str],
        *,
        keep_float_weights: bool = False,
        keep_calibration_inputs: bool = False,
    ) -> None:
        """Save the module in one file, from which `clika_load` makes it again, also without the original's source.

        The file holds the graph, its guards, weights and masks, what is quantized and how, ranges, learned scales and
        settings. Weights that are integers in what the module computes are stored as these: what is loaded computes
        and exports the same, bit for bit, and its weights are what the integers stand for. The path is taken as it is;
        no suffix is added. The file takes its place when it is whole; until then, an old one stays as it was.

        Args:
            path: where to.
            keep_float_weights: store all weights as they are, for training to go on from these.
            keep_calibration_inputs: store the calibration inputs that the module has kept, up to 64 MB, so that what
                is loaded can be quantized for another target, or otherwise, without data.

        Raises:
            ModelError: no file can be written there; or the module is empty, or holds what is no part of its graph.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        place = require_path(path, EXAMPLE)
        parts = self._packed(keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
        with write_atomically(place) as file:
            for part in parts:
                file.write(part)

    @classmethod
    def clika_load(cls, path: str | PathLike[str]) -> Self:
        """Return the module that `clika_save` wrote to a file; nothing of it is executed.

        Raises:
            ModelError: the file cannot be read, is cut off, altered, of a newer format or no saved module, or needs
                plugins or classes that are not there; the message says which.
        """
        place = require_path(path, EXAMPLE)
        try:
            blob = place.read_bytes()
        except IsADirectoryError as error:
            msg = f"cannot load {str(place)!r}: it is a folder; give the file in it"
            raise ModelError(msg) from error
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            msg = f"cannot load {str(place)!r}: {reason}; give the path of a file that clika_save wrote"
            raise ModelError(msg) from error
        return cls._unpacked(blob, repr(str(place)))

    def clika_serialize(self, *, keep_float_weights: bool = False, keep_calibration_inputs: bool = False) -> bytes:
        """Return what `clika_save` writes, as bytes; the arguments mean what they mean to it.

        Raises:
            ModelError: the module is empty, or holds what is no part of its graph.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        parts = self._packed(keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)
        return b"".join(parts)

    @classmethod
    def clika_from_serialized(cls, serialized: bytes) -> Self:
        """Return the module that `clika_serialize` was asked of; nothing is executed.

        Raises:
            ModelError: as `clika_load`.
        """
        if not isinstance(serialized, bytes | bytearray | memoryview):
            msg = f"serialized is a {type(serialized).__name__}; give the bytes that clika_serialize returned"
            raise ModelError(msg)
        return cls._unpacked(bytes(serialized), f"{len(serialized):,} bytes")

    @property
    def _learned(self) -> Quantized | None:
        """How the module is quantized, with the scales that were learned since."""
        own = self._clika_quantized
        return own and replace(own, plan=learned_plan(own.plan.on(device_of(self.graph)), self._log_scales))

    # Writing

    def _packed(self, *, keep_float_weights: bool, keep_calibration_inputs: bool) -> list[bytes | memoryview]:
        self._require_graph()
        graph, registry, quantized = self.graph, self._clika_registry or load_registry(), self._clika_quantized
        self._refuse_foreign(graph)
        stored: dict[str, StoredWeight] = {}
        learned = self._learned  # refuses spoiled scales
        if quantized is not None and learned is not None and not keep_float_weights:
            stored = integer_weights(graph, learned.plan, target_of(quantized, registry), registry)
            layers = {weight.layer for weight in stored.values()}
            quantized = replace(quantized, plan=without_moves(quantized.plan, layers))
        mark = fingerprint(graph)
        if quantized is not None and quantized.model == mark:
            quantized = replace(quantized, model=SAVED)
        document, tensors = self._described(quantized)
        document["integers"] = {}
        for name, weight in stored.items():
            known = {n: t for n, t in tensors.items() if n.endswith(f".{weight.layer}")}
            document["integers"][name], held = weight.saved(name, known)
            tensors |= held
        for name, value in graph.constants.items():
            if value.data is not None and name not in stored:
                tensors[name] = packed_bits(value.data) if value.data.dtype == torch.bool else value.data
        tensors |= {name: log.detach() for name, log in self._log_scales.items() if bool(log.any())}
        document |= self._chosen(graph, registry)
        document["calibration"], held = self._calibration_to_json(mark, keeps_inputs=keep_calibration_inputs)
        return packed(document, tensors | {f"{RANGES}{name}": tensor for name, tensor in held.items()})

    def _refuse_foreign(self, graph: Graph) -> None:
        """Refuse parameters and buffers that somebody else gave the module: nobody would know what they are for."""
        known = graph.constants.keys() | graph.aliases.keys() | self._log_scales.keys()
        foreign = sorted(named_tensors(self).keys() - known)
        if foreign:
            msg = f"the module holds {foreign[0]!r}, which is no part of its graph; take it off, and save it by itself"
            raise ModelError(msg)

    def _chosen(self, graph: Graph, registry: Registry) -> dict[str, Any]:
        """Return what the user chose, and which versions of what the module needs."""
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
        known = {mark: SAVED}
        table = replace(found.table, model=known.get(found.table.model, found.table.model))
        found = replace(found, table=table, model=known.get(found.model, found.model))
        return calibration_to_json(found, is_whole=whole is not None, keeps_inputs=keeps_inputs)

    # Reading

    @classmethod
    def _unpacked(cls, blob: bytes, shown: str) -> Self:
        module = cls(registry=load_registry())
        with apart_from_the_caller():
            try:
                module._restore(*unpacked(blob))
            except ModelError as error:
                msg = f"cannot load {shown}: {error}"
                raise ModelError(msg) from error
            except DAMAGE as error:
                msg = f"cannot load {shown}: it is no saved module: {type(error).__name__}: {error}"
                raise ModelError(msg) from error
        return module

    def _restore(self, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill an empty module with what was saved."""
        registry = self._clika_registry or load_registry()
        _refuse_lacking_plugins(document["plugins"], registry)
        self._build(document, _constants(document, tensors), tensors)
        with torch.no_grad():
            for name, log in self._log_scales.items():
                log.copy_(tensors.get(name, log))
        self._clika_options = settings_from_json(ClikaCompileOptions, document["options"])
        self._clika_deployment = document["deployment"] and deployment_from_json(document["deployment"])
        mark = fingerprint(self.graph)
        if self._clika_quantized is not None and self._clika_quantized.model == SAVED:
            self._clika_quantized = replace(self._clika_quantized, model=mark)
        own = {name.removeprefix(RANGES): t for name, t in tensors.items() if name.startswith(RANGES)}
        self._take_calibration(document["calibration"], own, mark)
        self._take_wanted(document["wanted"], registry)
        nn.Module.train(self, document["training"])  # what trains is made when it is called

    def _take_calibration(self, saved: Any, tensors: Mapping[str, torch.Tensor], mark: str) -> None:
        """Take over ranges: with their inputs, all of them; without, they wait for the same data, which is not run."""
        if saved is None:
            return
        known, found = {SAVED: mark}, calibration_from_json(saved, tensors, self._clika_graph)
        found.table.model = known.get(found.table.model, found.table.model)
        found.model = known.get(found.model, found.model)
        if saved["inputs"] is not None and saved["is whole"]:
            self._clika_calibration = found
            self._clika_sizes = self._clika_sizes - found.sizes
        else:
            self._clika_unfinished = found

    def _take_wanted(self, saved: Any, registry: Registry) -> None:
        """Take over what the user chose of quantization, where the target is there that it was chosen for."""
        deployment = self._clika_deployment
        if saved is not None and deployment is not None and deployment.target in registry.targets:
            layers = {n: settings_from_json(LayerQuantizationSettings, s) for n, s in saved["layers"].items()}
            given = settings_from_json(QuantizationSettings, saved["settings"])
            options = settings_from_json(ClikaCompileOptions, saved["options"])
            self._clika_wanted = Wanted(target_for(deployment, registry), given, layers, options)


def _constants(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the constants of a graph that was saved, by their names.

    Raises:
        ModelError: integers of one are damaged.
    """
    integers: Mapping[str, Any] = document.get("integers", {})
    found: dict[str, torch.Tensor] = {}
    for name, saved in zip(document["graph"]["constants"], document["graph"]["constant_types"], strict=True):
        kind, tensor = read_type(saved), tensors[name]
        if name in integers:
            tensor = read_parameter(integers[name], name, tensors, kind)
        elif kind.dtype == torch.bool and tensor.dtype != torch.bool:
            tensor = unpacked_bits(tensor, tuple(map(int, kind.shape)))
        found[name] = tensor
    return found


def _refuse_lacking_plugins(needed: Mapping[str, str], registry: Registry) -> None:
    """Refuse a module whose operators nobody declares here.

    Raises:
        ModelError: plugins are not installed; all are named.
    """
    there = {plugin.distribution for plugin in registry.plugins}
    lacking = [f"{name} {version}" for name, version in needed.items() if name not in there]
    if lacking:
        msg = f"it needs operators of {', '.join(lacking)}, which is not among the plugins here; install it"
        raise ModelError(msg)
