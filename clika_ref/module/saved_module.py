"""State of a `ClikaModule` and its serialization in state dicts, copies and pickles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.signature import Signature
from clika_ref.compiled.float_execution import FloatExecutor
from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.simulation import Simulation
from clika_ref.compiled.training_execution import TrainingExecutor
from clika_ref.compiled.weights import (
    bind_weights,
    device_of_weights,
    non_persistent_buffers,
    parameters_under,
    register_weights,
    set_parameters,
    tensors_by_name,
)
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry, load_registry
from clika_ref.onnx_export.generic_operators import find_operator, torchlib_operator
from clika_ref.quantization.calibration.calibrator import Calibration, move_inputs
from clika_ref.quantization.qat.learned_scales import LOG_SCALE_SCOPES, initial_log_scales
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.extra_state import read_extra_state, write_extra_state
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json, is_same_graph
from clika_ref.serialization.signature_format import signature_from_json, signature_to_json
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.targets.size_statistics import SymbolSizes

UNCOPIED_ATTRIBUTES = frozenset(
    {
        "_clika_forward",
        "_clika_float",
        "_clika_registry",
        "_clika_simulation",
        "_clika_training",
        "_clika_calibration",
        "_clika_unfinished",
        "_clika_unread",
        "_clika_distributed",
        "_clika_wanted",
    }
)
"""Attributes that copies create again."""


class SavedModule(nn.Module):
    """A module around a graph; its state dict, copies and pickles contain the whole state."""

    _clika_warnings: tuple[str, ...] = ()
    """Warnings so far; old pickles have none."""

    def __init__(
        self,
        graph: Graph | None = None,
        signature: Signature | None = None,
        *,
        persistent: frozenset[str] = frozenset(),
        registry: Registry | None = None,
    ) -> None:
        super().__init__()
        self._clika_registry = registry
        self._clika_deployment: BaseDeploymentSettings | None = None
        self._clika_options = ClikaCompileOptions()
        self._clika_logs_dir: Any = None
        self._clika_distributed: DistributedTrainingSettings | None = None
        self._clika_timings: dict[str, float] = {}
        self._clika_examples: list[list[torch.Tensor]] = []
        self._clika_examples_are_data = False
        self._clika_sizes = Counter[SymbolSizes]()
        self._clika_quantized: QuantizationState | None = None
        self._clika_calibration: Calibration | None = None
        self._clika_unfinished: Calibration | None = None
        self._clika_unread: LazyDataset | None = None
        self._clika_simulation: Simulation | None = None
        self._clika_training: TrainingExecutor | None = None
        self._clika_float: FloatExecutor | None = None
        self._clika_wanted: QuantizationRequest | None = None
        if graph is not None and signature is not None:
            register_weights(self, graph, persistent)
            self._install(graph, signature)
            self._set_quantization(None, None)

    def _configure_export(
        self,
        deployment: BaseDeploymentSettings | None,
        options: ClikaCompileOptions,
        logs_dir: Any = None,
        distributed: DistributedTrainingSettings | None = None,
    ) -> None:
        """Set the deployment target and the options of later exports.

        Args:
            deployment: the target; None selects ONNX Runtime at export.
            options: options of exports, and of later quantization.
            logs_dir: the folder for logs; None writes none.
            distributed: whether processes work together.
        """
        self._clika_deployment, self._clika_options, self._clika_logs_dir = deployment, options, logs_dir
        self._clika_distributed = distributed

    def _set_quantization(
        self,
        quantized: QuantizationState | None,
        calibration: Calibration | None,
        wanted: QuantizationRequest | None = None,
    ) -> None:
        """Set the quantization state, and keep the calibration for the next quantization.

        Learned scales are discarded: the scales of the plan were chosen for the current weights.

        Args:
            quantized: the plan and its target; None computes in float.
            calibration: the calibration that it was decided from.
            wanted: the request that it was decided from.
        """
        self._clika_quantized, self._clika_calibration, self._clika_wanted = quantized, calibration, wanted
        self._clika_simulation = self._clika_training = None
        self._build_float_form()
        set_parameters(self, LOG_SCALE_SCOPES, initial_log_scales(quantized.plan) if quantized is not None else {})

    def _build_float_form(self) -> None:
        """Build the float form at once: the next call may come from a tracer, which cannot build it."""
        if self._clika_quantized is None and self._clika_float is None:
            self._clika_float = FloatExecutor(self._clika_graph)

    @property
    def _log_scales(self) -> dict[str, nn.Parameter]:
        """Log scales relative to those of the plan, by their names in the state dict."""
        return parameters_under(self, LOG_SCALE_SCOPES)

    def _keep_log(self, log: CompilationLog) -> None:
        """Keep the timings of stages, and each warning once."""
        self._clika_timings.update(log.timings)
        self._clika_warnings = (*dict.fromkeys((*self._clika_warnings, *log.warnings)),)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Move kept inputs along when ``to`` or ``cuda`` moves the weights."""
        before = device_of_weights(self)
        super()._apply(fn, recurse)
        after = device_of_weights(self)
        if after not in (before, torch.device("meta")):
            self._clika_examples = [move_inputs(inputs, before, after) for inputs in self._clika_examples]
            whole, unfinished = self._clika_calibration, self._clika_unfinished
            self._clika_calibration = whole and whole.moved(before, after)
            self._clika_unfinished = unfinished and unfinished.moved(before, after)
        return self

    def _count_sizes(self) -> Counter[SymbolSizes]:
        """Return the sizes that this module, or its original, was traced and calibrated with, and their counts."""
        return self._clika_sizes + (
            self._clika_calibration.sizes if self._clika_calibration else Counter[SymbolSizes]()
        )

    def _install(self, graph: Graph, signature: Signature) -> None:
        """Set a graph with registered weights."""
        self._clika_graph = graph
        self._clika_signature = signature
        self._clika_float = None

    def _replace_graph(self, graph: Graph) -> None:
        """Replace the graph by one of the same inputs and outputs, with its weights, in float."""
        saved = tensors_by_name(self).keys() - non_persistent_buffers(self).keys()
        own = {name for name in graph.constants if name.startswith("clika.")}
        register_weights(self, graph, frozenset(saved | own))
        self._install(graph, self._clika_signature)
        self._set_quantization(None, None)
        self._clika_unfinished = None

    @property
    def graph(self) -> Graph:
        """The stored graph, its constants bound to the current parameters and buffers.

        Raises:
            ModelError: the module is empty, or its weights are sharded over processes.
        """
        graph = self._require_graph()
        bind_weights(self, graph)
        return graph

    def _require_graph(self, *_: Any, **__: Any) -> Graph:
        graph = self.__dict__.get("_clika_graph")
        if graph is None:
            msg = "this ClikaModule is empty; compile a model, or load a state_dict that a ClikaModule saved"
            raise ModelError(msg)
        return graph

    def get_extra_state(self) -> torch.Tensor:
        """Return the graph, the signature and the original's non-persistent buffers, as ``uint8[bytes]``.

        Raises:
            ModelError: the module is empty, or its graph holds an object that no file can store.
        """
        document, tensors = self._describe_state(self._clika_quantized)
        return write_extra_state(document, {**non_persistent_buffers(self), **tensors})

    def _describe_state(self, quantized: QuantizationState | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state apart from weights: a document, and the tensors of the quantization plan."""
        graph = self._require_graph()
        document = {
            "graph": graph_to_json(graph),
            "signature": signature_to_json(self._clika_signature),
            "persistent": sorted(tensors_by_name(self).keys() - non_persistent_buffers(self).keys()),
            "parameters": {n: p.requires_grad for n, p in self.named_parameters(remove_duplicate=False)},
            "sizes": sorted(self._count_sizes().items()),
            "batch_norm": self._clika_options.batch_norm,
        }
        document["quantization"], tensors = quantized.to_document() if quantized else (None, {})
        return document, tensors

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Ignore the ``uint8[bytes]``: the graph is rebuilt before the weights are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load weights; PyTorch calls this for every module, whether top-level or nested.

        An empty module first rebuilds itself from the ``_extra_state``. A state dict of the original model is accepted
        too: parameters that compression added keep their values.
        """
        key = f"{prefix}_extra_state"
        with isolate_from_caller_modes():
            if "_clika_graph" not in self.__dict__:
                if key not in state_dict:
                    raise _missing_graph_error(key, state_dict)
                self._rebuild({k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)})
            elif key in state_dict:
                self._load_state(state_dict[key])
        for name in self._log_scales:  # older files stored a single scale as 0-d
            held = state_dict.get(f"{prefix}{name}")
            if isinstance(held, torch.Tensor) and not held.ndim:
                state_dict[f"{prefix}{name}"] = held.reshape(1)
        if key not in state_dict:
            for name, value in self.state_dict().items():
                if name.startswith(("_extra_state", "clika.")):
                    state_dict.setdefault(f"{prefix}{name}", value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _load_state(self, state: torch.Tensor) -> None:
        document, tensors = read_extra_state(state)
        if not is_same_graph(document["graph"], graph_to_json(self._clika_graph)):
            msg = "the state dict holds another graph than this module; load it into an empty ClikaModule()"
            raise ModelError(msg)
        self._restore_quantization(document, tensors)

    def _restore_quantization(self, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the quantization state and the observed sizes; calibration ranges are not saved."""
        seen: Iterable[tuple[Iterable[tuple[str, int]], int]] = document.get("sizes", ())
        self._clika_sizes = Counter({tuple((name, size) for name, size in sizes): n for sizes, n in seen})
        saved = document.get("quantization")
        self._set_quantization(saved and QuantizationState.read(saved, tensors), None)
        trained: Mapping[str, bool] = document["parameters"]
        for name, parameter in self._log_scales.items():
            parameter.requires_grad_(trained.get(name, True))
        self._clika_options = replace(self._clika_options, batch_norm=document.get("batch_norm", "frozen"))
        self._clika_unfinished = None

    def _rebuild(self, state_dict: Mapping[str, Any]) -> None:
        document, extra = read_extra_state(state_dict["_extra_state"])
        constants = document["graph"]["constants"]
        found = {n: t for n in constants if (t := state_dict.get(n, extra.get(n))) is not None}
        lacking = [name for name in constants if name not in found]
        if lacking:
            msg = f"the state dict lacks {', '.join(map(repr, lacking))}, which its graph needs; load a whole one"
            raise ModelError(msg)
        others = [f"{n!r} (a {type(t).__name__})" for n, t in found.items() if not isinstance(t, torch.Tensor)]
        if others:
            msg = f"the state dict holds {', '.join(others)}, where its graph needs tensors; give it as it was saved"
            raise ModelError(msg)
        self._build(document, {name: tensor.clone() for name, tensor in found.items()}, extra)

    def _build(
        self, document: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill an empty module.

        Args:
            document: as returned by `_describe_state`.
            weights: the tensors of the graph's constants, which become those of the module.
            tensors: as returned by `_describe_state`, possibly with others.
        """
        registry = self._clika_registry or load_registry()
        trained: Mapping[str, bool] = document["parameters"]
        own = {n: nn.Parameter(t, trained[n]) if n in trained else t for n, t in weights.items()}
        graph = graph_from_json(document["graph"], _operator_lookup(registry), own)
        register_weights(self, graph, frozenset(document["persistent"]))
        self._install(graph, signature_from_json(document["signature"]))
        self._restore_quantization(document, tensors)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in UNCOPIED_ATTRIBUTES}
        state["_clika_examples"], state["_clika_sizes"] = [], self._count_sizes()
        if "_clika_graph" in state:
            document = {
                "graph": graph_to_json(self._clika_graph),
                "signature": signature_to_json(self._clika_signature),
            }
            state["_clika_graph"] = json.dumps(document)
            del state["_clika_signature"], state["_clika_accepted"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        text = state.pop("_clika_graph", None)
        super().__setstate__(state)
        self._clika_registry = self._clika_calibration = self._clika_unfinished = self._clika_unread = None
        self._clika_simulation = self._clika_training = self._clika_wanted = self._clika_distributed = None
        self._clika_float = None
        if text is not None:
            document = json.loads(text)
            graph = graph_from_json(document["graph"], _operator_lookup(load_registry()), tensors_by_name(self))
            self._install(graph, signature_from_json(document["signature"]))
            self._build_float_form()

    def extra_repr(self) -> str:
        """Return the name of the graph with its size."""
        graph = self.__dict__.get("_clika_graph")
        return "empty" if graph is None else f"{graph.name}: {len(graph)} nodes, {len(graph.constants)} constants"


@contextmanager
def isolate_from_caller_modes() -> Iterator[None]:
    """Create tensors that can be trained, on the CPU, regardless of the caller's inference mode and default device."""
    with torch.inference_mode(mode=False), torch.device("cpu"):
        yield


def _missing_graph_error(key: str, state_dict: Mapping[str, Any]) -> ModelError:
    """Return the error for a state dict without a graph for an empty module."""
    found = next((name for name in state_dict if name.endswith(key)), None)
    if found is None:
        hint = "give the state dict of a ClikaModule; that of the original loads into a module that is compiled"
    else:
        hint = (
            f"it has {found!r}: take {found.removesuffix(key)!r} off its names, as "
            "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present does, or wrap this module likewise"
        )
    return ModelError(f"this ClikaModule is empty, and the state dict has no {key!r}, which holds the graph; {hint}")


def _operator_lookup(registry: Registry) -> Callable[[str], Operator | None]:
    return partial(find_operator, declared=registry.operators, generic=torchlib_operator)
