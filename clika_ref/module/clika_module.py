"""``ClikaModule``: the compiled module, an ``nn.Module`` that behaves like the original and can be exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.signature import Signature
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph, build_float_executor, set_quantization
from clika_ref.compiled.weights import device_of_weights, register_weights
from clika_ref.compress.adapters import attach_lora, merge_lora, require_adapters
from clika_ref.compress.calibrate import CalibrationArguments
from clika_ref.compress.prune import PruningArguments, prune
from clika_ref.compress.quantize import quantize, quantize_to_goal, require_decisions
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, format_count
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.export.explanation import Explanation
from clika_ref.export.inspection import draw_module, explain_module, render_notebook_html, write_report
from clika_ref.export.module_export import ExportArguments, export_module, generate_dummy_inputs
from clika_ref.export.target_comparison import TargetComparison, compare_targets
from clika_ref.lora.adapter_state import adapter_config, adapter_state, load_adapter_state
from clika_ref.lora.report import AdapterReport
from clika_ref.module.checkpoint import deserialize, load, save, serialize
from clika_ref.module.fsdp import broadcast_buffers, gather, is_sharded
from clika_ref.module.running import (
    OWN_FORWARD,
    ClassCallableMethod,
    own_forward,
    prepare_execution,
    rebuild_training_executor,
    set_batch_norm,
    set_forward,
    warn_of_idle_dropouts,
)
from clika_ref.module.state_dict import prepare_to_load, write_state
from clika_ref.pruning.report import PruningReport
from clika_ref.quantization.algorithms.accuracy_search import AccuracySearch
from clika_ref.quantization.decision import Quantization
from clika_ref.settings.compile_options import BaseDeploymentSettings, BatchNormMode
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings


class ClikaModule(CompiledModule):
    """A compiled model: the original's call signature, parameters and ``state_dict`` keys around a graph.

    Created by `clika_compile`. An empty one, ``ClikaModule()``, takes its graph from the ``_extra_state`` of a state
    dict. Train mode computes the graph as traced: dropout is off, and batch norm uses its running statistics unless
    ``batch_norm="live"``. A quantized module in train mode applies fake quantization, with gradients for parameters and
    scales: quantization-aware training, in any loop. ``clika_state`` holds everything except the weights.

    Args:
        graph: the graph to compute; None creates an empty module.
        signature: maps a call to the inputs of the graph.
        persistent: the names of parameters and buffers in the state dict.
        registry: the known operators and targets; by default those of all plugins.
    """

    def __init__(
        self,
        graph: Graph | None = None,
        signature: Signature | None = None,
        *,
        persistent: frozenset[str] = frozenset(),
        registry: Registry | None = None,
    ) -> None:
        super().__init__()
        self.clika_state = CompiledState(registry or load_registry())
        if graph is not None and signature is not None:
            register_weights(self, graph, persistent)
            self.clika_state.install(graph, signature)
            set_quantization(self, None, None)
            set_forward(self)

    @ClassCallableMethod
    def forward(self) -> Any:  # type: ignore[override] - a callable all the same
        """Compute the graph, under the original's signature, which tools inspect."""
        # Bound at each access: copies of ``__dict__``, which DataParallel makes, must not call another module.
        return self.__dict__.get("forward") or own_forward(self)

    @forward.setter
    def forward(self, wrapped: Callable[..., Any]) -> None:
        """Replace the forward call, as accelerate does to wrap it in autocast."""
        self.__dict__["forward"] = wrapped

    @forward.deleter
    def forward(self) -> None:  # type: ignore[override]
        """Restore the graph's own forward."""
        del self.__dict__["forward"]

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's signature
        """Set train or eval mode; a quantized module quantizes the current weights again in eval mode.

        Raises:
            ModelError: the module is quantized, and a weight or scale is NaN, or a parameter could not be trained.
            TargetError: no plugin provides the target that it is quantized for.
        """
        before, state = self.training, self.clika_state
        super().train(mode)
        broadcast_buffers(self)
        if mode:
            warn_of_idle_dropouts(state)
        if state.quantized is None:
            return self
        try:
            prepare_execution(self)
        except ClikaError:
            super().train(before)
            raise
        if mode and is_sharded(self):
            state.simulation = None  # it holds constants computed from the whole weights
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Move kept inputs along when ``to`` or ``cuda`` moves the weights."""
        before = device_of_weights(self)
        super()._apply(fn, recurse)
        after = device_of_weights(self)
        if after not in (before, torch.device("meta")):
            self.clika_state.move_inputs(before, after)
        return self

    @property
    def graph(self) -> Graph:
        """A clone of the stored graph, its constants bound to the current parameters and buffers.

        Raises:
            ModelError: the module is empty, or its weights are sharded over processes.
        """
        return bind_graph(self)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each stage of compilation and of the last export."""
        return self.clika_state.timings

    def extra_repr(self) -> str:
        """Return the name of the graph with its size."""
        if self.clika_state.is_empty:
            return "empty"
        graph = self.clika_state.graph
        return f"{graph.name}: {format_count(len(graph), 'node')}, {format_count(len(graph.constants), 'constant')}"

    # Copy, and load

    def __getstate__(self) -> dict[str, Any]:
        trains = self.training and self.clika_state.training_executor is not None
        return {name: value for name, value in self.__dict__.items() if name != OWN_FORWARD} | {"trains": trains}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trains = state.pop("trains")
        super().__setstate__(state)
        if not self.clika_state.is_empty:
            set_forward(self)
            build_float_executor(self)
        if trains:
            rebuild_training_executor(self)

    def get_extra_state(self) -> torch.Tensor:
        """Return the graph, the signature and the original's non-persistent buffers, as ``uint8[bytes]``.

        Raises:
            ModelError: the module is empty, or its graph holds an object that no file can store.
        """
        return write_state(self)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Ignore the ``uint8[bytes]``: the graph is rebuilt before the weights are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load weights; an empty module first rebuilds itself from the ``_extra_state``."""
        trains = self.training and self.clika_state.training_executor is not None
        prepare_to_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if trains:
            rebuild_training_executor(self)

    def clika_gather(self) -> Self:
        """Return a module with unsharded weights, or this one if it has them; with FSDP, all ranks call it.

        Raises:
            ModelError: the graph holds an object that a state dict cannot store.
        """
        return gather(self, partial(type(self), registry=self.clika_state.registry))

    def clika_set_batch_norm(self, batch_norm: BatchNormMode) -> None:
        """Make batch norms frozen or live from now on; their statistics do not change.

        The quantized weights do not change. With FSDP, all ranks call this, and continue with the statistics of rank 0.

        Args:
            batch_norm: ``"frozen"`` or ``"live"``, as in `ClikaCompileOptions`.

        Raises:
            ModelError: the value is neither, or the norms cannot be live.
        """
        set_batch_norm(self, batch_norm)

    # Quantize

    def clika_initialize_algorithms(
        self,
        quantization_settings: QuantizationSettings | None = None,
        *,
        calibration_inputs: Iterable[Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
        layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> Quantization:
        """Calibrate and quantize a compiled module, or quantize it again with other settings; return the decisions.

        A module with calibration ranges needs no data again. Without ranges, it reads the calibration inputs that
        `clika_compile` left unread, or else the tracing inputs, with a warning. After an interrupt, a call with the
        same data resumes. Until a call succeeds, the module computes as before.

        Args:
            quantization_settings: as for `clika_compile`; by default ``QuantizationSettings()``.
            calibration_inputs: the data, as for `clika_compile`; by default as described above.
            deployment_settings: the target; by default that of the module.
            layer_quantization_settings: overrides for single layers, as for `clika_compile`.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: the data is missing or wrong, or the settings contradict each other.
            TargetError: the target computes in float, or no plugin provides it.
        """
        given = CalibrationArguments(
            quantization_settings,
            calibration_inputs,
            deployment_settings,
            layer_quantization_settings,
            data_transform_fn,
            forward_fn,
            distributed_training_settings,
        )
        return quantize(self, given)

    def clika_quantize_to_goal(
        self,
        eval_fn: Callable[[Self], float],
        max_drop: float,
        quantization_settings: QuantizationSettings | None = None,
        *,
        calibration_inputs: Iterable[Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
        layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> AccuracySearch:
        """Quantize as much as possible while ``eval_fn`` drops by at most ``max_drop``; return the candidates.

        The search bisects sensitivity thresholds: a model of a hundred layers is evaluated eight or nine times, the
        float model first. The module keeps the best candidate, even if ``eval_fn`` raises. If no layer can be
        quantized, it stays float, and the result has a ``reason``.

        Args:
            eval_fn: takes this module, in eval mode and without gradients, and returns a score; higher is better.
            max_drop: maximum drop of the score, in its own units; at least 0.
            quantization_settings: as for `clika_compile`. The search replaces the threshold. Settings without effect
                in a search give a warning.
            calibration_inputs: this and the following, as for `clika_initialize_algorithms`.
            deployment_settings: the target.
            layer_quantization_settings: overrides for single layers.
            data_transform_fn: applied to each element.
            forward_fn: how to call the model on an element.
            distributed_training_settings: whether processes work together; the score of rank 0 counts.

        Raises:
            ModelError: as `clika_initialize_algorithms`; or a score or ``max_drop`` is invalid.
            TargetError: as `clika_initialize_algorithms`.
        """
        given = CalibrationArguments(
            quantization_settings,
            calibration_inputs,
            deployment_settings,
            layer_quantization_settings,
            data_transform_fn,
            forward_fn,
            distributed_training_settings,
        )
        return quantize_to_goal(self, eval_fn, max_drop, given)

    def clika_summary(self) -> Quantization:
        """Return the decision for each layer with its reason, and the effect of other thresholds; prints as two tables.

        Raises:
            ModelError: nothing was decided, or only the scales are known, as in a loaded module.
        """
        return require_decisions(self.clika_state)

    @property
    def clika_quantization(self) -> Quantization | None:
        """The decision for each layer, and the effect of other thresholds; None where `clika_summary` raises."""
        return self.clika_state.quantized and self.clika_state.quantized.found

    # Prune, and add adapters

    def clika_prune(
        self,
        pruning_settings: PruningSettings | None = None,
        *,
        layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = None,
        calibration_inputs: Iterable[Any] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> PruningReport:
        """Prune a compiled module; return the removed parts, which print as a table.

        The first few dozen samples of the data serve to estimate the error of the outputs. Prune first, then fine-tune,
        and quantize last. Pruning replaces parameters, so create a new optimizer afterwards.

        Args:
            pruning_settings: as for `clika_compile`; by default ``PruningSettings()``.
            layer_pruning_settings: overrides for single layers, as for `clika_compile`.
            calibration_inputs: the data, as for `clika_compile`; by default the data that the module holds.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: the module is quantized or has adapters, the data is missing or wrong, or settings contradict.
            PassError: a node returns other types than expected after removal, which is a bug.
        """
        given = PruningArguments(
            pruning_settings,
            layer_pruning_settings,
            calibration_inputs,
            data_transform_fn,
            forward_fn,
            distributed_training_settings,
        )
        return prune(self, given)

    def clika_attach_lora(
        self,
        lora_settings: LoraSettings | None = None,
        *,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> AdapterReport:
        """Attach adapters to a compiled module; return the adapters, which print as a table.

        Only the adapters are trained from then on: no other parameter requires gradients. The outputs do not change at
        first. A quantized module keeps its quantized weights and scales, but no calibration ranges. Create a new
        optimizer from the parameters that require gradients.

        Args:
            lora_settings: the layers to adapt, and the rank; by default all layers.
            distributed_training_settings: whether processes work together; all get the adapters of rank 0.

        Raises:
            ModelError: a name matches no layer, the module has adapters already or live batch norms, or ranks differ.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        return attach_lora(self, lora_settings, distributed_training_settings)

    def clika_lora_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the adapters, two matrices for each layer, under the names of the ``peft`` package, for safetensors.

        Raises:
            ModelError: the module has no adapters.
        """
        return adapter_state(require_adapters(self))

    def clika_lora_config(self) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json`` in the format of the ``peft`` package, ready for ``json``.

        Raises:
            ModelError: the module has no adapters.
        """
        return adapter_config(require_adapters(self))

    def clika_load_lora_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load adapters, two matrices for each layer, from `clika_lora_state_dict` or from ``peft``.

        Raises:
            ModelError: the module has no adapters, or they do not match; nothing is loaded then.
        """
        load_adapter_state(require_adapters(self), state_dict)

    def clika_merge_lora(self) -> None:
        """Merge the adapters into the weights and remove them; frozen parameters stay frozen.

        Raises:
            ModelError: the module has no adapters, or one belongs to a layer with a quantized, masked or tied weight.
        """
        merge_lora(self)

    # Export, and compare

    def clika_export(  # noqa: PLR0917 - clika-ace's arguments, and one more
        self,
        file: Any,
        example_inputs: Any = None,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: Mapping[str, Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
    ) -> Artifact:
        """Write the artifact for the deployment target to ``file`` and return its facts.

        For another target than the module's own, the calibration ranges are quantized again, without data; the module
        does not change. Use `export_configuration` for FP16, BF16 or INT4.

        Args:
            file: the file to write, with a suffix of the target or none.
            example_inputs: one element as in ``tracing_inputs``, to compare the artifact on; by default these inputs.
            input_names: names of the inputs, in order; None or empty: those of the signature.
            output_names: names of the exported outputs, in order.
            dynamic_axes: ``{input: [axis, ...]}`` or ``{input: {axis: name}}``: the dims to leave dynamic, by default
                all dynamic ones. Others are fixed to their length in ``example_inputs``. Dims of one name are equal.
            deployment_settings: the target; by default that of the module.

        Raises:
            ModelError: an argument does not fit the model, or ``file`` cannot be written, or has another suffix.
            TargetError: the target cannot run the model, or its results differ from this module's.
        """
        given = ExportArguments(file, example_inputs, input_names, output_names, dynamic_axes, deployment_settings)
        return export_module(self, given)

    def clika_compare_targets(self, *deployments: BaseDeploymentSettings) -> TargetComparison:
        """Quantize for each target from the calibration ranges and compare the results; prints as a table.

        Files are written as by `clika_export`. If a target does not support the module, its row gives the reason.

        Raises:
            ModelError: the module holds no ranges or decisions, no target is given, an argument has the wrong type, or
                the export configuration selects an output that does not exist.
            TargetError: no plugin provides a target.
        """
        return compare_targets(self, deployments)

    def clika_generate_dummy_inputs(self) -> dict[str, Any]:
        """Return dummy inputs of the traced shapes on the device of the weights, for ``module(**inputs)``.

        Raises:
            ModelError: the module is empty.
        """
        return generate_dummy_inputs(self)

    # Save, and load

    def clika_save(
        self,
        path: str | PathLike[str],
        *,
        keep_float_weights: bool = False,
        keep_calibration_inputs: bool = False,
    ) -> None:
        """Save the module in one file; `clika_load` restores it without the original's source.

        The loaded module computes and exports the same, bit for bit; its float weights are the dequantized ones. The
        file is replaced atomically; no suffix is added to its path.

        Args:
            path: the file to write.
            keep_float_weights: store all weights as they are, so that training can continue from them.
            keep_calibration_inputs: store the calibration inputs that the module has kept, up to 64 MB, to quantize
                the loaded module again without data.

        Raises:
            ModelError: no file can be written there; or the module is empty, or holds tensors that are not part of its
                graph.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        save(self, path, keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)

    @classmethod
    def clika_load(cls, path: str | PathLike[str]) -> Self:
        """Load a module that `clika_save` wrote; nothing in the file is executed.

        Raises:
            ModelError: the file cannot be read, is damaged, of another format or no saved module, or needs plugins or
                classes that are not installed.
        """
        module = cls()
        load(module, path)
        return module

    def clika_serialize(self, *, keep_float_weights: bool = False, keep_calibration_inputs: bool = False) -> bytes:
        """Return the file contents that `clika_save` writes, as bytes.

        ``keep_float_weights``, ``keep_calibration_inputs`` and errors are as for `clika_save`.

        Raises:
            ModelError: as `clika_save`.
            TargetError: as `clika_save`.
        """
        return serialize(self, keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)

    @classmethod
    def clika_from_serialized(cls, serialized: bytes) -> Self:
        """Load a module from the bytes of `clika_serialize`; nothing in them is executed.

        Raises:
            ModelError: as `clika_load`.
        """
        module = cls()
        deserialize(module, serialized)
        return module

    # Inspect

    def clika_explain(self, deployment_settings: BaseDeploymentSettings | None = None) -> Explanation:
        """Export the module and return the precision of each node in the runtime.

        The result prints as a table of planned and actual precisions, with reasons for differences.
        `export_configuration` selects FP16, BF16 or INT4 here as well.

        Args:
            deployment_settings: the target; by default that of the module.

        Raises:
            ModelError: ``deployment_settings`` have the wrong type, or the requested form is not available.
            TargetError: the target rejects a node, or its runtime is not installed.
        """
        return explain_module(self, deployment_settings)

    def clika_visualize(self, path: str | PathLike[str], explanation: Explanation | None = None) -> Path:
        """Draw the module to a file, and return its path.

        A quantized module is drawn as lowered for its target; colours mark quantized nodes and layers kept in float.

        Args:
            path: ``.svg`` (the default), ``.html``, ``.png`` or ``.dot``; an existing file is overwritten.
            explanation: the result of `clika_explain`, to show the precision of each node in the runtime.

        Raises:
            ModelError: the suffix is unknown, the file cannot be written, the module is empty, or ``.png`` needs
                ``pip install "clika-ref-visualize[pictures]"``.
            PluginError: no plugin draws pictures; the message contains the install command.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        return draw_module(self, path, explanation)

    def clika_report(self, path: str | PathLike[str], deployments: Sequence[BaseDeploymentSettings] = ()) -> Path:
        """Write a report on the module as one self-contained HTML file, and return its path.

        It shows each layer with its decision and observed ranges, other thresholds, warnings, and the settings and
        versions to reproduce the run. `export_configuration` selects FP16, BF16 or INT4 here as well.

        Args:
            path: the ``.html`` file; an existing one is replaced once the new one is complete.
            deployments: further targets to compare with, as by `clika_compare_targets`.

        Raises:
            ModelError: the path has another suffix or cannot be written, the module returns no tensor, or
                ``deployments`` have the wrong type or need ranges that the module lacks.
            PluginError: no plugin writes reports; the message names the package to install.
            TargetError: no plugin provides a target.
        """
        return write_report(self, path, deployments)

    def _repr_html_(self) -> str:
        return render_notebook_html(self)
