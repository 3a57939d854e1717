"""The state of a compiled module: its graph, signature, settings, quantization and calibration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.signature import Signature
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.eager_results import EagerResults
from clika_ref.compiled.float_execution import FloatExecutor
from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.simulation import Simulation
from clika_ref.compiled.training_execution import TrainingExecutor
from clika_ref.compiled.weights import (
    clone_with_weights,
    clone_without_weights,
    device_of_weights,
    non_persistent_buffers,
    parameters_under,
    register_weights,
    set_parameters,
    tensors_by_name,
    weights_of,
)
from clika_ref.core.errors import ClikaError, ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.lora.adapters import adapters_of
from clika_ref.onnx_export.generic_operators import find_operator, torchlib_operator
from clika_ref.quantization.calibration.calibrator import Calibration, move_inputs
from clika_ref.quantization.qat.learned_scales import LOG_SCALE_SCOPES, apply_learned_scales, initial_log_scales
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json
from clika_ref.serialization.signature_format import signature_from_json, signature_to_json
from clika_ref.serialization.vocabulary import ModuleKey
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    deployment_settings_named,
)
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.targets.size_statistics import SymbolSizes

EMPTY_MODULE = "this ClikaModule is empty. Compile a model, or load a state_dict that a ClikaModule saved."


@dataclass(eq=False)
class CompiledState:
    """All of a compiled module except its weights.

    It holds neither the module nor its tensors: the constants of its graph, and of the graphs of its calibrations, have
    types only. ``DataParallel`` copies the ``__dict__`` of a module, so that all replicas share one state, and each
    computes with its own weights.
    """

    registry: Registry = field(default_factory=load_registry)
    """The known operators and targets."""
    deployment: BaseDeploymentSettings | None = None
    """The deployment target; None selects ONNX Runtime at export."""
    options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Options of exports, and of later quantization."""
    logs_dir: Any = None
    """The folder for logs; None writes none."""
    distributed: DistributedTrainingSettings | None = None
    """Whether several processes work together."""

    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage of the compilation and of the last export."""
    warnings: tuple[str, ...] = ()
    """Each warning of the compilation and of later calls, once."""
    idle_dropouts: int = 0
    """Number of dropouts traced in eval mode; reset once training has warned about them."""
    examples: list[list[torch.Tensor]] = field(default_factory=list[list[torch.Tensor]])
    """Inputs to compare artifacts on, one tensor for each input of the graph."""
    examples_are_data: bool = False
    """Whether the examples are all calibration inputs, not a subset or inputs of the same shapes."""
    example_sizes: Counter[SymbolSizes] = field(default_factory=Counter[SymbolSizes])
    """Sizes that the module, or its original, was traced and calibrated with, apart from those in ``calibration``."""

    eager_results: EagerResults | None = None
    """Results of the original on the examples, to compare artifacts with; None if they cannot be reused."""

    quantized: QuantizationState | None = None
    """The target and the plan; None if the module computes in float."""
    request: QuantizationRequest | None = None
    """The request that the plan was decided from."""
    calibration: Calibration | None = None
    """The last complete calibration; the constants of its graph have types only."""
    unfinished: Calibration | None = None
    """A calibration that was interrupted, likewise; it has weights only while it runs."""
    unread: LazyDataset | None = None
    """Calibration inputs that were given but not read yet."""

    float_executor: FloatExecutor | None = None
    """Runs the graph in float; None for a quantized module."""
    training_executor: TrainingExecutor | None = None
    """Runs the graph with fake quantization; None until the module is trained."""
    simulation: Simulation | None = None
    """Runs the quantized graph; None until the module is evaluated."""
    accepted_shapes: set[Any] = field(default_factory=set[Any])
    """Shapes and dtypes of inputs that were checked."""
    number_inputs: list[bool] = field(default_factory=list[bool])
    """For each input of the graph, whether it is a Python number."""

    _graph: Graph | None = field(default=None, init=False)
    _signature: Signature | None = field(default=None, init=False)

    def install(self, graph: Graph, signature: Signature) -> None:
        """Set the graph, without its tensors, and the signature."""
        self._signature = signature
        self.replace_graph(graph)

    def replace_graph(self, graph: Graph) -> None:
        """Replace the graph by one with the same inputs and outputs."""
        self._graph = clone_without_weights(graph)
        self.float_executor, self.eager_results, self.accepted_shapes = None, None, set()
        numbers = {s.source.name for s in graph.symbols.values() if s.source.dim is None}
        self.number_inputs = [value.name in numbers for value in graph.inputs]

    @property
    def is_empty(self) -> bool:
        """Whether there is no graph yet."""
        return self._graph is None

    @property
    def graph(self) -> Graph:
        """The graph; its constants have types and no tensors.

        Raises:
            ModelError: the module is empty.
        """
        if self._graph is None:
            raise ModelError(EMPTY_MODULE)
        return self._graph

    @property
    def signature(self) -> Signature:
        """How a call maps to the inputs of the graph, and its outputs to results.

        Raises:
            ModelError: the module is empty.
        """
        if self._signature is None:
            raise ModelError(EMPTY_MODULE)
        return self._signature

    @property
    def target(self) -> str | None:
        """The name of the target that the module is quantized for; None in float."""
        return self.quantized and self.quantized.target

    @property
    def deployment_settings(self) -> BaseDeploymentSettings | None:
        """The settings that the module was compiled with, or the defaults of its target; None if it has none.

        Raises:
            TargetError: the module was loaded, and its target needs settings that have no defaults.
        """
        return self.deployment or (deployment_settings_named(self.target) if self.target is not None else None)

    @property
    def sizes(self) -> Counter[SymbolSizes]:
        """The sizes that the module, or its original, was traced and calibrated with, and their counts."""
        return self.example_sizes + (self.calibration.sizes if self.calibration else Counter[SymbolSizes]())

    def choose_deployment(self, given: BaseDeploymentSettings | None) -> BaseDeploymentSettings:
        """Return the given settings, or those of the module, or ONNX Runtime's."""
        return given or self.deployment or DeploymentSettings_ONNXRuntime_ONNX()

    def configure(
        self,
        deployment: BaseDeploymentSettings | None,
        options: ClikaCompileOptions,
        logs_dir: Any = None,
        distributed: DistributedTrainingSettings | None = None,
    ) -> None:
        """Set the target and the options of later calls: the fields of the same names.

        Args:
            deployment: the deployment target.
            options: options of exports, and of later quantization.
            logs_dir: the folder for logs.
            distributed: whether several processes work together.
        """
        self.deployment, self.options, self.logs_dir, self.distributed = deployment, options, logs_dir, distributed

    def find_eager_results(self, graph: Graph) -> EagerResults | None:
        """Return the kept results if they hold for the weights of a graph; discard them otherwise.

        Args:
            graph: that of the module, bound to its current weights.
        """
        if self.eager_results is not None and not self.eager_results.is_valid_for(graph):
            self.eager_results = None
        return self.eager_results

    def drop_calibration_weights(self) -> None:
        """Keep the calibrations without weights: the next use of one lowers the graph of the module again."""
        self.calibration = self.calibration and _drop_weights(self.calibration)
        self.unfinished = self.unfinished and _drop_weights(self.unfinished)

    def record_log(self, log: CompilationLog) -> None:
        """Keep the timings of a log, and each of its warnings once."""
        self.timings.update(log.timings)
        self.warnings = (*dict.fromkeys((*self.warnings, *log.warnings)),)

    def move_inputs(self, before: torch.device, after: torch.device) -> None:
        """Move the kept inputs along when the weights move from the device ``before`` to ``after``."""
        self.examples = [move_inputs(inputs, before, after) for inputs in self.examples]
        self.calibration = self.calibration and self.calibration.move(before, after)
        self.unfinished = self.unfinished and self.unfinished.move(before, after)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that copies and pickles keep. The others are built again, or not needed."""
        kept = ("deployment", "options", "logs_dir", "timings", "warnings", "idle_dropouts", "examples_are_data")
        state = {name: getattr(self, name) for name in (*kept, "quantized")} | {"example_sizes": self.sizes}
        if self._graph is not None:
            state["document"] = json.dumps(self.describe_graph())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        document = state.pop("document", None)
        self.__init__(**state)
        if document is not None:
            self.install(*self.read_graph(json.loads(document)))

    def describe_graph(self) -> dict[str, Any]:
        """Return the graph and its signature as a document for `read_graph`.

        Raises:
            ModelError: the module is empty, or its graph holds an object that no file can store.
        """
        return {
            ModuleKey.GRAPH: graph_to_json(self.graph),
            ModuleKey.SIGNATURE: signature_to_json(self.signature),
        }

    def read_graph(
        self, document: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[Graph, Signature]:
        """Return the graph and the signature of a document.

        Args:
            document: as returned by `describe_graph`.
            weights: the tensors of the graph's constants, in their shapes; None if they have none yet.

        Raises:
            ModelError: the document is damaged, or of another version, or an operator or a class is missing.
        """
        find = partial(find_operator, declared=self.registry.operators, generic=torchlib_operator)
        graph = graph_from_json(document[ModuleKey.GRAPH], find, weights)
        return graph, signature_from_json(document[ModuleKey.SIGNATURE])


def _drop_weights(calibration: Calibration) -> Calibration:
    """Return a copy of a calibration without the weights in its graph and adapters."""
    graph = clone_without_weights(calibration.graph)
    return replace(calibration.of(graph, calibration.model), detached_adapters=())


class CompiledModule(nn.Module):
    """A module with a `CompiledState`, as the functions below `ClikaModule` see it; it has no behavior of its own."""

    clika_state: CompiledState


def bind_graph(module: CompiledModule) -> Graph:
    """Return a clone of a module's graph, its constants bound to the current parameters and buffers.

    Raises:
        ModelError: the module is empty, its weights are sharded over processes, or one is missing.
    """
    graph = module.clika_state.graph
    return clone_with_weights(graph, weights_of(module, graph))


def log_scales_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the log scales relative to those of the plan, by their names in the state dict."""
    return parameters_under(module, LOG_SCALE_SCOPES)


def learned_quantization(module: CompiledModule) -> QuantizationState | None:
    """Return the quantization of a module with the scales learned in training; None in float.

    Raises:
        ModelError: a learned scale is NaN or infinite.
    """
    own = module.clika_state.quantized
    if own is None:
        return None
    plan = own.plan.to_device(device_of_weights(module))
    return replace(own, plan=apply_learned_scales(plan, log_scales_of(module)))


def set_quantization(
    module: CompiledModule,
    quantized: QuantizationState | None,
    calibration: Calibration | None,
    request: QuantizationRequest | None = None,
) -> None:
    """Set the quantization of a module, and keep the calibration for the next one.

    Learned scales are discarded: the scales of the plan were chosen for the current weights. With adapters, the scales
    are frozen like the weights.

    Args:
        module: gets a log scale for each scale of the plan.
        quantized: the plan and its target; None computes in float.
        calibration: the calibration that it was decided from.
        request: the request that it was decided from.

    Raises:
        ModelError: the module is empty, its weights are sharded over processes, or one is missing.
    """
    state = module.clika_state
    state.quantized, state.calibration, state.request = quantized, calibration, request
    state.drop_calibration_weights()
    state.simulation = state.training_executor = None
    build_float_executor(module)
    set_parameters(module, LOG_SCALE_SCOPES, initial_log_scales(quantized.plan) if quantized is not None else {})
    if adapters_of(state.graph):
        for log in log_scales_of(module).values():
            log.requires_grad_(False)


def build_float_executor(module: CompiledModule) -> None:
    """Build the executor of a float module at once: the next call may come from a tracer, which cannot build it."""
    state = module.clika_state
    if state.quantized is None and state.float_executor is None:
        state.float_executor = FloatExecutor(bind_graph(module))


def replace_graph(module: CompiledModule, graph: Graph) -> None:
    """Replace the graph of a module by one of the same inputs and outputs, with its weights, in float."""
    saved = tensors_by_name(module).keys() - non_persistent_buffers(module).keys()
    own = {name for name in graph.constants if name.startswith("clika.")}
    register_weights(module, graph, frozenset(saved | own))
    module.clika_state.replace_graph(graph)
    module.clika_state.unfinished = None
    set_quantization(module, None, None)


def read_tensors(module: CompiledModule) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return the weights of a module by the names of the graph's constants, and its log scales."""
    return weights_of(module, module.clika_state.graph), log_scales_of(module)


def require_simulation(state: CompiledState) -> Simulation:
    """Return the simulation of the quantized artifact, created on first use."""
    if state.simulation is None:
        assert state.quantized is not None
        state.simulation = Simulation(state.quantized, state.registry)
    return state.simulation


def update_simulation(module: CompiledModule, *, compare_elements: bool = True) -> None:
    """Quantize the current weights again, if they have changed; `Simulation.prepare` has ``compare_elements``."""
    state = module.clika_state
    require_simulation(state).prepare(state.graph, *read_tensors(module), compare_elements=compare_elements)


@torch.compiler.assume_constant_result  # runs outside of the traced graph, at each trace
def update_simulation_for_tracer(module: CompiledModule) -> str | None:
    """Quantize the current weights again, if they have changed, before ``torch.compile`` traces the simulation.

    Return the message of an error for the traced code to raise: an error raised here would be internal to the tracer.
    """
    try:
        with torch.inference_mode(mode=False), outside_autocast():
            update_simulation(module, compare_elements=False)
    except ClikaError as error:
        return str(error)
    return None


def require_training_executor(module: CompiledModule) -> TrainingExecutor:
    """Return the training executor; it is rebuilt after the module has moved to another device."""
    state = module.clika_state
    executor = state.training_executor
    if executor is not None and (torch.compiler.is_compiling() or executor.device == device_of_weights(module)):
        return executor
    quantized = state.quantized
    assert quantized is not None
    with torch.inference_mode(mode=False), outside_autocast():
        executor = TrainingExecutor(
            bind_graph(module), quantized, log_scales_of(module), state.registry, state.options.batch_norm
        )
    if executor.quantized.plan.norms.keys() != quantized.plan.norms.keys():  # scales follow these norms now
        state.quantized, state.simulation = executor.quantized, None
    state.training_executor = executor
    return executor
