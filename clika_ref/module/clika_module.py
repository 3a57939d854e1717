"""``ClikaModule``: the compiled module, an ``nn.Module`` that behaves like the original and can be exported."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.signature import Signature
from clika_ref.capture.surrounding_autocast import outside_autocast, surrounding_autocast
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, ClikaWarning, ModelError
from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.guards import check_inputs
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.export.configuration import current_configuration
from clika_ref.export.export import ExportRequest, artifact_path, export
from clika_ref.export.interface import resolve_names
from clika_ref.export.simulation import Simulation
from clika_ref.module.forward_signature import ClassCallableMethod, make_forward, user_stacklevel
from clika_ref.module.fsdp import broadcast_buffers, gather_full_tensor, is_sharded, release_weights, unshard_weights
from clika_ref.module.reported_module import ReportedModule
from clika_ref.module.training_execution import TrainingExecutor
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    BatchNormMode,
    DeploymentSettings_ONNXRuntime_ONNX,
)
from clika_ref.targets.size_statistics import symbol_sizes_of

MAX_CHECKED_SHAPES = 4096
"""Maximum number of input shape combinations to remember as checked; further ones are checked on every call."""

IDLE_DROPOUTS_WARNING = (
    "{} was traced in eval mode, and trains without its dropouts ({} in number): they are off, as in the artifact. "
    "What regularizes in their place is yours to choose: weight decay, varied data, or distillation_loss"
)


class ClikaModule(ReportedModule):
    """A compiled model: the original's call signature, parameters and ``state_dict`` keys around a graph.

    Created by `clika_compile`. An empty one, ``ClikaModule()``, takes its graph from the ``_extra_state`` of a state
    dict. Train mode computes the graph as traced: dropout is off and batch norm uses its running statistics.
    ``batch_norm="live"`` uses batch statistics instead, and ``skip_eval_set_mode=True`` traces the model in its
    training mode. A quantized module in train mode applies fake quantization, with gradients for its parameters and its
    scales. That is quantization-aware training, in any loop.

    Args:
        graph: the graph to compute; None creates an empty module.
        signature: maps a call to the inputs of the graph.
        persistent: the names of parameters and buffers in the state dict.
        registry: the known operators and targets; by default those of all plugins.
    """

    _clika_idle_dropouts = 0
    """Number of dropouts traced in eval mode; reset once training has warned about them."""

    @ClassCallableMethod
    def forward(self) -> Any:  # type: ignore[override] - a callable all the same
        """Compute the graph, under the original's signature, which tools inspect."""
        # Bound at each access: copies of ``__dict__``, which DataParallel makes, must not call another module.
        forward = self.__dict__.get("_clika_forward", ClikaModule._require_graph)
        return self.__dict__.get("forward") or forward.__get__(self)  # dynamo does not support MethodType

    @forward.setter
    def forward(self, wrapped: Callable[..., Any]) -> None:
        """Replace the forward call: accelerate wraps it in autocast when a trainer uses mixed precision."""
        self.__dict__["forward"] = wrapped

    @forward.deleter
    def forward(self) -> None:  # type: ignore[override]
        """Restore the graph's own forward."""
        del self.__dict__["forward"]

    def _keep_compilation_data(
        self,
        examples: list[list[torch.Tensor]],
        log: CompilationLog,
        *,
        are_data: bool = False,
        unread: LazyDataset | None = None,
        idle_dropouts: int = 0,
    ) -> None:
        """Keep data of the compilation; copies and state dicts keep only the sizes of the examples.

        Args:
            examples: the inputs to compare artifacts on, one tensor for each input of the graph.
            log: the log of the compilation.
            are_data: whether the examples are all calibration inputs, not a subset or inputs of the same shapes.
            unread: calibration inputs that were given but not read yet.
            idle_dropouts: number of dropouts traced in eval mode, for a warning when training starts.
        """
        self._clika_idle_dropouts = idle_dropouts
        self._clika_examples, self._clika_examples_are_data, self._clika_unread = examples, are_data, unread
        self._clika_sizes = Counter(symbol_sizes_of(self._clika_graph, inputs) for inputs in examples)
        self._keep_log(log)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_clika_trains": self.training and self._clika_training is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trains = state.pop("_clika_trains", False)
        super().__setstate__(state)
        self._rebuild_training_form(trains=trains)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        trains = self.training and self._clika_training is not None
        super()._load_from_state_dict(*args, **kwargs)
        self._rebuild_training_form(trains=trains)

    def _rebuild_training_form(self, *, trains: bool) -> None:
        """Build the training form at once if it existed before, since a tracer cannot build it in the next call."""
        quantized = self._clika_quantized
        if trains and quantized is not None and quantized.target in (self._clika_registry or load_registry()).targets:
            self._require_training_form()

    # Running

    def _install(self, graph: Graph, signature: Signature) -> None:
        super()._install(graph, signature)
        self._clika_accepted: set[Any] = set()
        elements = {s.side.name for s in graph.symbols.values() if s.side.dim is None}
        self._clika_numbers = [v.name in elements for v in graph.inputs]
        self.__dict__["_clika_forward"] = make_forward(signature.call_signature)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        signature = self._clika_signature
        inputs = signature.graph_inputs(signature.flatten(args, kwargs))
        self._check(inputs)
        if signature.autocast is None:
            results = self._compute_outputs(inputs)
        else:
            self._warn_of_autocast(signature.autocast)
            with outside_autocast():
                results = self._compute_outputs(inputs)
        sizes = read_sizes(self._clika_graph, inputs) if signature.needs_sizes else {}
        return signature.unflatten(results, sizes)

    def _compute_outputs(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph; a quantized module uses fake quantization in train mode, and the simulation in eval mode."""
        if self._clika_quantized is None:
            assert self._clika_float is not None
            return self._clika_float(self, inputs, has_live_norms=self._clika_options.batch_norm == "live")
        if self.training:
            return self._require_training_form()(self, inputs)
        return self._require_simulation()(self.graph, self._log_scales, inputs)

    def _require_simulation(self) -> Simulation:
        """Return the simulation of the quantized artifact, created on first use."""
        if self._clika_simulation is None:
            assert self._clika_quantized is not None
            self._clika_simulation = Simulation(self._clika_quantized, self._clika_registry or load_registry())
        return self._clika_simulation

    def _require_training_form(self) -> TrainingExecutor:
        """Return the training form; it is rebuilt after the module has moved to another device."""
        form = self._clika_training
        if form is not None and (torch.compiler.is_compiling() or form.device == next(self.parameters()).device):
            return form
        quantized, registry = self._clika_quantized, self._clika_registry or load_registry()
        assert quantized is not None
        with torch.inference_mode(mode=False), outside_autocast():
            form = TrainingExecutor(self.graph, quantized, self._log_scales, registry, self._clika_options.batch_norm)
        if form.quantized.plan.norms.keys() != quantized.plan.norms.keys():  # scales follow these norms now
            self._clika_quantized, self._clika_simulation = form.quantized, None
        self._clika_training = form
        return form

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's signature
        """Set train or eval mode; a quantized module quantizes the current weights again in eval mode.

        Raises:
            ModelError: the module is quantized, and a weight or scale is NaN, or a parameter could not be trained.
            TargetError: no plugin provides the target that it is quantized for.
        """
        before = self.training
        super().train(mode)
        broadcast_buffers(self)
        if mode and self._clika_idle_dropouts:
            msg = IDLE_DROPOUTS_WARNING.format(self._require_graph().name, self._clika_idle_dropouts)
            warnings.warn(msg, ClikaWarning, stacklevel=user_stacklevel())
            self._clika_idle_dropouts = 0
        if self._clika_quantized is None:
            return self
        try:
            self._prepare()
        except ClikaError:
            super().train(before)
            raise
        if mode and is_sharded(self):
            self._clika_simulation = None
            release_weights(self._clika_graph, *([self._clika_calibration.graph] if self._clika_calibration else []))
        return self

    def _prepare(self) -> None:
        """Build the training form or the simulation, according to the mode."""
        with unshard_weights(self):
            if self.training:
                self._require_training_form()
            else:
                self._require_simulation().prepare(self.graph, self._log_scales, looks_at_numbers=True)

    def clika_gather(self) -> ClikaModule:
        """Return a module with unsharded weights on each rank; with sharded weights (FSDP), all ranks call it.

        A module with unsharded weights is returned unchanged.

        Raises:
            ModelError: the graph holds an object that a state dict cannot store.
        """
        if not is_sharded(self) and not hasattr(self, "unshard"):  # kept while weights are whole
            return self
        broadcast_buffers(self)
        found = ClikaModule(registry=self._clika_registry)
        found.load_state_dict({name: gather_full_tensor(tensor) for name, tensor in self.state_dict().items()})
        settings = (self._clika_deployment, self._clika_options, self._clika_logs_dir, self._clika_distributed)
        found._configure_export(*settings)
        found._clika_calibration, found._clika_wanted = self._clika_calibration, self._clika_wanted
        found._clika_examples, found._clika_sizes = self._clika_examples, Counter(self._clika_sizes)
        return found.train(self.training)

    def clika_set_batch_norm(self, batch_norm: BatchNormMode) -> None:
        """Make batch norms frozen or live from now on; their statistics do not change.

        The scales keep following the norms that were live, so that the quantized weights do not change. If the weights
        are sharded (FSDP), all ranks must call this; they continue with the statistics of rank 0.

        Args:
            batch_norm: ``"frozen"`` or ``"live"``, as in `ClikaCompileOptions`.

        Raises:
            ModelError: the value is neither, or the norms cannot be live.
        """
        broadcast_buffers(self)
        before, form = self._clika_options, self._clika_training
        self._clika_options, self._clika_training = replace(before, batch_norm=batch_norm), None
        try:
            if form is not None:
                with unshard_weights(self):
                    self._require_training_form()
        except ModelError:
            self._clika_options, self._clika_training = before, form
            raise

    def _warn_of_autocast(self, compiled_in: str) -> None:
        """Warn if the autocast regions around a call differ from those that the graph was compiled in."""
        around = surrounding_autocast()
        if around != compiled_in:
            compiled, called = (f"in torch.autocast ({text})" if text else "outside" for text in (compiled_in, around))
            msg = (
                f"{self.graph.name} is called {called}, but was compiled {compiled}, and computes as it would there; "
                "compile it where it is called"
            )
            warnings.warn(msg, ClikaWarning, 2 if torch.compiler.is_compiling() else user_stacklevel())

    def _check(self, inputs: list[torch.Tensor]) -> None:
        """Reject inputs that do not match the graph: it would silently return wrong results."""
        if torch.compiler.is_compiling():
            return  # sizes are symbols here; the tracer's own guards apply
        numbers = self._clika_numbers
        key = tuple((int(t) if n else t.shape, t.dtype) for t, n in zip(inputs, numbers, strict=True))
        if key in self._clika_accepted:
            return
        check_inputs(self._clika_graph, inputs)
        if len(self._clika_accepted) < MAX_CHECKED_SHAPES:
            self._clika_accepted.add(key)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each stage of compilation and of the last export."""
        return self._clika_timings

    # Export

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
        check_types(locals())  # only the arguments at this point
        deployment = deployment_settings or self._clika_deployment or DeploymentSettings_ONNXRuntime_ONNX()
        registry = self._clika_registry or load_registry()
        place = artifact_path(file, deployment, registry)
        self._require_exportable()
        if self._clika_simulation is not None and not self.training:  # the simulation must match the artifact
            self._clika_simulation.prepare(self.graph, self._log_scales, looks_at_numbers=True)
        form = current_configuration()
        inputs = resolve_names("input_names", input_names, [v.name for v in self._clika_graph.inputs])
        defaults = form.kept(self._clika_signature.output_names(inputs))
        plan = self._plan_for(deployment)
        request = ExportRequest(
            self.graph.clone(form.kept(self.graph.outputs)),
            place,
            self._examples(example_inputs),
            lambda inputs: form.kept(self._graph_outputs(inputs)),
            inputs,
            resolve_names("output_names", output_names, defaults, taken=inputs),
            dynamic_axes,
            plan,
            self._clika_options,
            self._count_sizes(),
            form,
        )
        with CompilationLog.open(self._clika_logs_dir) as log, outside_autocast():
            self._warn_of_trained_weights(plan, log)
            artifact = export(request, deployment, registry, log)
            self._keep_log(log)
        return artifact

    def _graph_outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the graph on copies of the inputs; buffers do not change."""
        with torch.no_grad():
            outputs, _ = interpret(self.graph, [t.clone() for t in inputs])
        return outputs
