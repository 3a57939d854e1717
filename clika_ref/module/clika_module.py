"""``ClikaModule``: the compiled module, an ``nn.Module`` that behaves like the original and can be exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.signature import Signature
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph, set_quantization
from clika_ref.compiled.weights import device_of_weights, register_weights
from clika_ref.compress.adapters import attach_lora, merge_lora, require_adapters
from clika_ref.compress.calibrate import CalibrationArguments
from clika_ref.compress.prune import PruningArguments, prune
from clika_ref.compress.quantize import quantize, quantize_to_goal, require_decisions
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.export.explanation import Explanation
from clika_ref.export.inspection import draw_module, explain_module, render_notebook_html, write_report
from clika_ref.export.module_export import ExportArguments, export_module, generate_dummy_inputs
from clika_ref.export.target_comparison import TargetComparison, compare_targets
from clika_ref.lora.adapter_state import adapter_config, adapter_state, load_adapter_state
from clika_ref.lora.report import AdapterReport
from clika_ref.module.checkpoint import deserialize, load, save, serialize
from clika_ref.module.forward_signature import OWN_FORWARD, ClassCallableMethod, own_forward, set_forward
from clika_ref.module.fsdp import broadcast_buffers, gather, is_sharded, release_whole_weights
from clika_ref.module.running import prepare_execution, rebuild_training_executor, set_batch_norm, warn_of_idle_dropouts
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
    dict. Train mode computes the graph as traced: dropout is off and batch norm uses its running statistics.
    ``batch_norm="live"`` uses batch statistics instead, and ``skip_eval_set_mode=True`` traces the model in its
    training mode. A quantized module in train mode applies fake quantization, with gradients for its parameters and its
    scales. That is quantization-aware training, in any loop.

    All but the weights is in ``clika_state``; the methods below delegate to functions of it.

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

    # Run

    @ClassCallableMethod
    def forward(self) -> Any:  # type: ignore[override] - a callable all the same
        """Compute the graph, under the original's signature, which tools inspect."""
        # Bound at each access: copies of ``__dict__``, which DataParallel makes, must not call another module.
        return self.__dict__.get("forward") or own_forward(self)

    @forward.setter
    def forward(self, wrapped: Callable[..., Any]) -> None:
        """Replace the forward call: accelerate wraps it in autocast when a trainer uses mixed precision."""
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
            release_whole_weights(state)
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
        return f"{graph.name}: {len(graph)} nodes, {len(graph.constants)} constants"

    # Copy, and load

    def __getstate__(self) -> dict[str, Any]:
        trains = self.training and self.clika_state.training_executor is not None
        return {name: value for name, value in self.__dict__.items() if name != OWN_FORWARD} | {"trains": trains}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trains = state.pop("trains")
        super().__setstate__(state)
        if not self.clika_state.is_empty:
            set_forward(self)
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
        """Load weights; PyTorch calls this for every module, whether top-level or nested.

        An empty module first rebuilds itself from the ``_extra_state``. A state dict of the original model is accepted
        too: parameters that compression added keep their values.
        """
        trains = self.training and self.clika_state.training_executor is not None
        prepare_to_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if trains:
            rebuild_training_executor(self)

    # Train

    def clika_gather(self) -> Self:
        """Return a module with unsharded weights on each rank; with sharded weights (FSDP), all ranks call it.

        A module with unsharded weights is returned unchanged.

        Raises:
            ModelError: the graph holds an object that a state dict cannot store.
        """
        return gather(self, type(self))

    def clika_set_batch_norm(self, batch_norm: BatchNormMode) -> None:
        """Make batch norms frozen or live from now on; their statistics do not change.

        The scales keep following the norms that were live, so that the quantized weights do not change. If the weights
        are sharded (FSDP), all ranks must call this; they continue with the statistics of rank 0.

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

        Data need not be given twice: a new threshold, new layer settings or weights changed by training reuse the
        existing calibration ranges. Without ranges, the module reads the calibration inputs that `clika_compile` was
        given together with ``tracing_inputs``; failing that, it uses the tracing inputs, with a warning. After an
        interrupt, a call with the same data resumes; a call with another first batch starts again, with a warning.
        Until a call succeeds, the module computes as before.

        Args:
            quantization_settings: as for `clika_compile`; by default ``QuantizationSettings()``.
            calibration_inputs: the data, as for `clika_compile`; see above.
            deployment_settings: the target; by default that of the module.
            layer_quantization_settings: overrides for single layers, as for `clika_compile`.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: there is no data, or it does not fit; or the settings cannot be satisfied.
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
        float model first. The module keeps the best candidate, even if ``eval_fn`` raises or is interrupted. If not
        even one layer may be quantized, it stays float, and the ``reason`` of the result says why.

        Args:
            eval_fn: takes this module, in eval mode and without gradients, and returns a score; higher is better.
            max_drop: maximum drop of the score, in its own units; at least 0.
            quantization_settings: as for `clika_compile`. The search replaces its threshold, which decides together
                with ``mixed_precision`` which layers stay float: ``automatic_skip_quantization=False`` and
                ``skip_tail_quantization=False`` have no effect, with a warning. Nor has ``optimize_for="latency"`` with
                weight-only quantization; otherwise layers are timed before the search, and the whole model is not.
            calibration_inputs: this and the following, as for `clika_initialize_algorithms`.
            deployment_settings: the target.
            layer_quantization_settings: overrides for single layers.
            data_transform_fn: applied to each element.
            forward_fn: how to call the model on an element.
            distributed_training_settings: if processes work together, all of them call this, and the score of rank 0
                counts; by default as the module was compiled.

        Raises:
            ModelError: as `clika_initialize_algorithms`; or a score is no finite number, or ``max_drop`` is negative or
                no number.
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

        The first few dozen samples of the data are used to estimate the error of the outputs, so pass them in no
        particular order. Prune first, then fine-tune, and quantize last; to combine both kinds of pruning, remove
        channels before masking weights. Pruning replaces parameters, so create a new optimizer afterwards.

        Args:
            pruning_settings: as for `clika_compile`; by default ``PruningSettings()``.
            layer_pruning_settings: overrides for single layers, as for `clika_compile`.
            calibration_inputs: the data, as for `clika_compile`; by default the data that the module holds.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: the module is quantized already or has adapters, there is no data, or it does not fit; or the
                settings cannot be satisfied.
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

        From then on only the adapters are trained: all other parameters, including learned quantization scales, no
        longer require gradients. The outputs do not change at first. A quantized module stays quantized, with the same
        quantized weights and learned scales; its calibration ranges are dropped. Create a new optimizer from the
        parameters that require gradients.

        Args:
            lora_settings: the layers to adapt, and the rank; by default all layers.
            distributed_training_settings: if several processes work together, all of them call this and get the
                adapters of the first rank; by default as the module was compiled.

        Raises:
            ModelError: a name in the settings matches no layer, the module has adapters already, or its batch norms are
                live; or another process has another module.
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
            ModelError: the module has no adapters, or the adapters do not match; all mismatches are listed, and nothing
                is loaded.
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

        For a target other than the module's own, the quantization is decided again from the calibration ranges: no data
        is read, and the module does not change. Use `export_configuration` for FP16, BF16 or INT4.

        Args:
            file: the file to write, with a suffix of the target or none.
            example_inputs: one element as in ``tracing_inputs``; the artifact is compared with this module on it. By
                default on the tracing inputs.
            input_names: names of the inputs, in order; None or empty: those of the signature.
            output_names: names of the exported outputs, in order.
            dynamic_axes: ``{input: [axis, ...]}`` or ``{input: {axis: name}}``: the dims to leave dynamic. By default
                all dynamic dims; a dim that is not listed is fixed to its length in ``example_inputs``. Dims of one
                name must be equal in every call of the artifact.
            deployment_settings: the target; by default that of the module.

        Raises:
            ModelError: an argument does not fit the model, or ``file`` cannot be written, or has another suffix.
            TargetError: the target cannot run the model, or its results differ from this module's.
        """
        given = ExportArguments(file, example_inputs, input_names, output_names, dynamic_axes, deployment_settings)
        return export_module(self, given)

    def clika_compare_targets(self, *deployments: BaseDeploymentSettings) -> TargetComparison:
        """Quantize for each target from the calibration ranges and compare the results; prints as a table.

        Files are written as by `clika_export`, in the form of `export_configuration`. If a target lacks a requested
        feature, such as a weight width, or rejects a node, its row says so.

        Raises:
            ModelError: the module holds no ranges, or nothing was decided from them yet; or no target is given, or an
                argument has the wrong type; or the form names an output that does not exist.
            TargetError: no plugin provides a target.
        """
        return compare_targets(self, deployments)

    def clika_generate_dummy_inputs(self) -> dict[str, Any]:
        """Return dummy inputs of the traced shapes by argument, nested as in a call: ``module(**inputs)``.

        They are on the device of the weights.

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
        save(self, path, keep_float_weights=keep_float_weights, keep_calibration_inputs=keep_calibration_inputs)

    @classmethod
    def clika_load(cls, path: str | PathLike[str]) -> Self:
        """Load a module that `clika_save` wrote; nothing in the file is executed.

        Raises:
            ModelError: the file cannot be read, is truncated, altered, of a newer format or no saved module, or needs
                plugins or classes that are not installed; the message says which.
        """
        module = cls()
        load(module, path)
        return module

    def clika_serialize(self, *, keep_float_weights: bool = False, keep_calibration_inputs: bool = False) -> bytes:
        """Return the file contents that `clika_save` writes, as bytes.

        ``keep_float_weights`` and ``keep_calibration_inputs`` are as for `clika_save`.

        Raises:
            ModelError: the module is empty, or holds tensors that are not part of its graph.
            TargetError: no plugin provides the target that the module is quantized for.
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

        The result prints as a table: the planned precision, the actual precision, and the reasons for the differences.
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

        Each node is a box with its name, type, shapes and attributes, in frames for the modules of the original. A
        quantized module is drawn as lowered for its target, with its batch norms folded. Colours mark quantized nodes,
        quantized tensors and layers kept in float; tooltips give the reason.

        Args:
            path: ``.svg``, ``.html`` (folds modules, pans, zooms, searches), ``.png`` or ``.dot``; ``.svg`` is added to
                a path without a suffix. An existing file is overwritten.
            explanation: the result of `clika_explain`, to show the precision of each node in the runtime.

        Raises:
            ModelError: the suffix is another one, the file cannot be written, the module is empty, or the renderer for
                ``.png`` is not installed: ``pip install resvg_py``.
            PluginError: no plugin draws pictures; the message says what to install.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        return draw_module(self, path, explanation)

    def clika_report(self, path: str | PathLike[str], deployments: Sequence[BaseDeploymentSettings] = ()) -> Path:
        """Write a report on the module as one self-contained HTML file, and return its path.

        For the model: the modules with their totals, the effect of other thresholds, targets side by side, warnings,
        and the settings and versions to reproduce the run. For each layer: its sensitivity, the decision with its
        reason, the precision in the runtime, the observed values, the quantized range, and the time per node if the
        runtime reports it. Missing facts, as for a float or loaded module, are explained. `export_configuration`
        selects FP16, BF16 or INT4 here as well.

        Args:
            path: the ``.html`` file; an existing one is replaced once the new one is complete.
            deployments: further targets to compare with. The quantization is decided again for each from the
                calibration ranges, which takes longest.

        Raises:
            ModelError: the path has another suffix or cannot be written, the module returns no tensor, or
                ``deployments`` have the wrong type, or need ranges that the module does not hold.
            PluginError: no plugin writes reports; the message says what to install.
            TargetError: no plugin provides a target.
        """
        return write_report(self, path, deployments)

    def _repr_html_(self) -> str:
        return render_notebook_html(self)
