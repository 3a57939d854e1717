"""``ClikaModule``: what compilation returns, an ``nn.Module`` that behaves like the original and can be exported."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from clika_ref.argument_checks import check_kinds
from clika_ref.autocast import outside_autocast, surrounding_autocast
from clika_ref.calling import Method, forward_under, level_of_the_user
from clika_ref.capture.calibration_inputs import Unread
from clika_ref.core.errors import ClikaError, ClikaWarning, ModelError
from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Artifact
from clika_ref.distributed.sharding import hold_buffers_of_first, is_divided, let_go, whole, whole_weights
from clika_ref.exporting.configuration import configuration
from clika_ref.exporting.export import ExportRequest, export, place_for
from clika_ref.exporting.interface import chosen_names
from clika_ref.input_checks import check_inputs
from clika_ref.reported_module import ReportedModule
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings import BaseDeploymentSettings, DeploymentSettings_ONNXRuntime_ONNX, Norms
from clika_ref.signature import Signature
from clika_ref.simulation import Simulation
from clika_ref.sizes_seen import sizes_of
from clika_ref.training_form import TrainingForm

PATTERN_LIMIT = 4096
"""Combinations of input shapes whose check is remembered; beyond, the check is made again."""

IDLE_DROPOUTS = (
    "{} was traced in eval mode, and trains without its dropouts ({} in number): they are off, as in the artifact. "
    "What regularizes in their place is yours to choose: weight decay, varied data, or distillation_loss"
)


class ClikaModule(ReportedModule):
    """A compiled model: the original's call signature, parameters and ``state_dict`` keys around a graph.

    Made by `clika_compile`. An empty one, ``ClikaModule()``, takes the graph from the ``_extra_state`` of a state dict.
    It computes in train mode what was traced: dropout is off and batch norm uses its running statistics, unless
    ``batch_norm="live"`` lets that be the batch's, or ``skip_eval_set_mode=True`` kept the model in training mode while
    it was traced. A quantized one then rounds as its integers do, with gradients for its parameters and its scales:
    quantization-aware training, in any loop.

    Args:
        graph: what it computes; None makes an empty one.
        signature: how a call becomes the inputs of the graph.
        persistent: the names of parameters and buffers that stand in the state dict.
        registry: the operators and targets that it knows; by default those of all plugins.
    """

    _clika_idle_dropouts = 0
    """How many were traced in eval mode, until training has warned of them."""

    @Method
    def forward(self) -> Any:  # type: ignore[override] - a callable all the same
        """The method that computes the graph, under the original's signature, which tools inspect."""
        # Bound anew at each access: copies of ``__dict__``, which DataParallel makes, must not call another module.
        forward = self.__dict__.get("_clika_forward", ClikaModule._require_graph)
        return self.__dict__.get("forward") or forward.__get__(self)  # dynamo calls no MethodType

    @forward.setter
    def forward(self, wrapped: Callable[..., Any]) -> None:
        """Call something else: accelerate wraps it in autocast, where a trainer is asked for half precision."""
        self.__dict__["forward"] = wrapped

    @forward.deleter
    def forward(self) -> None:  # type: ignore[override]
        """Call the graph again."""
        del self.__dict__["forward"]

    def clika_remember(
        self,
        examples: list[list[torch.Tensor]],
        log: CompilationLog,
        *,
        are_data: bool = False,
        unread: Unread | None = None,
        idle_dropouts: int = 0,
    ) -> None:
        """Keep what compilation was given or took; of this, copies and state dicts have the sizes of the examples only.

        Args:
            examples: the inputs to compare artifacts on, one tensor for each input of the graph.
            log: of the compilation.
            are_data: whether the examples are the calibration inputs, and not a few of them, or only shaped like them.
            unread: calibration inputs that were given beside them.
            idle_dropouts: how many were traced in eval mode, of which training is to warn.
        """
        self._clika_idle_dropouts = idle_dropouts
        self._clika_examples, self._clika_examples_are_data, self._clika_unread = examples, are_data, unread
        self._clika_sizes = Counter(sizes_of(self._clika_graph, inputs) for inputs in examples)
        self._keep_told(log)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_clika_trains": self.training and self._clika_training is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trains = state.pop("_clika_trains", False)
        super().__setstate__(state)
        self._go_on(trains=trains)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        trains = self.training and self._clika_training is not None
        super()._load_from_state_dict(*args, **kwargs)
        self._go_on(trains=trains)

    def _go_on(self, *, trains: bool) -> None:
        """Make at once what trains, where it has been made before: a tracer, of which the next call may be, cannot."""
        quantized = self._clika_quantized
        if trains and quantized is not None and quantized.target in (self._clika_registry or load_registry()).targets:
            self._trained()

    # Running

    def _install(self, graph: Graph, signature: Signature) -> None:
        super()._install(graph, signature)
        self._clika_accepted: set[Any] = set()
        elements = {s.side.name for s in graph.symbols.values() if s.side.dim is None}
        self._clika_numbers = [v.name in elements for v in graph.inputs]
        self.__dict__["_clika_forward"] = forward_under(signature.shown)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        signature = self._clika_signature
        inputs = signature.graph_inputs(signature.flatten(args, kwargs))
        self._check(inputs)
        if signature.autocast is None:
            results = self._results(inputs)
        else:
            self._warn_of_autocast(signature.autocast)
            with outside_autocast():
                results = self._results(inputs)
        sizes = read_sizes(self._clika_graph, inputs) if signature.needs_sizes else {}
        return signature.unflatten(results, sizes)

    def _results(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute the graph; quantized, with gradients in training mode, and else with the integers of its artifact."""
        if self._clika_quantized is None:
            assert self._clika_float is not None
            return self._clika_float(self, inputs, has_live_norms=self._clika_options.batch_norm == "live")
        if self.training:
            return self._trained()(self, inputs)
        return self._simulated()(self.graph, self._log_scales, inputs)

    def _simulated(self) -> Simulation:
        """Return what computes with integers."""
        if self._clika_simulation is None:
            assert self._clika_quantized is not None
            self._clika_simulation = Simulation(self._clika_quantized, self._clika_registry or load_registry())
        return self._clika_simulation

    def _trained(self) -> TrainingForm:
        """Return what computes with gradients, made where the module has been moved, too."""
        form = self._clika_training
        if form is not None and (torch.compiler.is_compiling() or form.device == next(self.parameters()).device):
            return form
        quantized, registry = self._clika_quantized, self._clika_registry or load_registry()
        assert quantized is not None
        with torch.inference_mode(mode=False), outside_autocast():
            form = TrainingForm(self.graph, quantized, self._log_scales, registry, self._clika_options.batch_norm)
        if form.quantized.plan.norms.keys() != quantized.plan.norms.keys():  # from now on, scales follow these
            self._clika_quantized, self._clika_simulation = form.quantized, None
        self._clika_training = form
        return form

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's signature
        """Compute from now on what can be trained, or with integers, which are then made of the weights as they are.

        Raises:
            ModelError: the module is quantized, and a weight or scale is NaN, or a parameter could not be trained.
            TargetError: no plugin provides the target that it is quantized for.
        """
        before = self.training
        super().train(mode)
        hold_buffers_of_first(self)
        if mode and self._clika_idle_dropouts:
            msg = IDLE_DROPOUTS.format(self._require_graph().name, self._clika_idle_dropouts)
            warnings.warn(msg, ClikaWarning, stacklevel=level_of_the_user())
            self._clika_idle_dropouts = 0
        if self._clika_quantized is None:
            return self
        try:
            self._prepare()
        except ClikaError:
            super().train(before)
            raise
        if mode and is_divided(self):
            self._clika_simulation = None
            let_go(self._clika_graph, *([self._clika_calibration.graph] if self._clika_calibration else []))
        return self

    def _prepare(self) -> None:
        """Make what the quantized module computes with in its mode."""
        with whole_weights(self):
            if self.training:
                self._trained()
            else:
                self._simulated().prepare(self.graph, self._log_scales, looks_at_numbers=True)

    def clika_gather(self) -> ClikaModule:
        """Return a module that holds whole weights, on each rank: where they are divided (FSDP), all ranks call it.

        A module whose weights are whole is returned as it is.

        Raises:
            ModelError: its graph holds what no state dict can.
        """
        if not is_divided(self) and not hasattr(self, "unshard"):  # which stays where weights are whole for a while
            return self
        hold_buffers_of_first(self)
        found = ClikaModule(registry=self._clika_registry)
        found.load_state_dict({name: whole(tensor) for name, tensor in self.state_dict().items()})
        settings = (self._clika_deployment, self._clika_options, self._clika_logs_dir, self._clika_distributed)
        found.clika_configure(*settings)
        found._clika_calibration, found._clika_wanted = self._clika_calibration, self._clika_wanted
        found._clika_examples, found._clika_sizes = self._clika_examples, Counter(self._clika_sizes)
        return found.train(self.training)

    def clika_set_batch_norm(self, batch_norm: Norms) -> None:
        """Let batch norms be frozen or live from now on, whatever they were before; their statistics stay.

        Scales go on following the norms that were live, so that integers stay those that they are. Where weights are
        divided (FSDP), all ranks call this, and go on with the statistics of the first one.

        Args:
            batch_norm: as `ClikaCompileOptions` takes it.

        Raises:
            ModelError: it is something else, or the norms cannot be live.
        """
        hold_buffers_of_first(self)
        before, form = self._clika_options, self._clika_training
        self._clika_options, self._clika_training = replace(before, batch_norm=batch_norm), None
        try:
            if form is not None:
                with whole_weights(self):
                    self._trained()
        except ModelError:
            self._clika_options, self._clika_training = before, form
            raise

    def _warn_of_autocast(self, compiled_in: str) -> None:
        """Warn where the autocast regions around a call would cast otherwise than the graph, which holds its casts."""
        around = surrounding_autocast()
        if around != compiled_in:
            compiled, called = (f"in torch.autocast ({text})" if text else "outside" for text in (compiled_in, around))
            msg = (
                f"{self.graph.name} is called {called}, but was compiled {compiled}, and computes as it would there; "
                "compile it where it is called"
            )
            warnings.warn(msg, ClikaWarning, 2 if torch.compiler.is_compiling() else level_of_the_user())

    def _check(self, inputs: list[torch.Tensor]) -> None:
        """Refuse inputs that the graph was not made for: it would return wrong numbers in silence."""
        if torch.compiler.is_compiling():
            return  # sizes are symbols then; the tracer's own guards take over
        numbers = self._clika_numbers
        key = tuple((int(t) if n else t.shape, t.dtype) for t, n in zip(inputs, numbers, strict=True))
        if key in self._clika_accepted:
            return
        check_inputs(self._clika_graph, inputs)
        if len(self._clika_accepted) < PATTERN_LIMIT:
            self._clika_accepted.add(key)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each stage of compilation and of the last export."""
        return self._clika_timings

    # Export

    def clika_export(  # noqa: PLR0917 - the record's arguments, and one more
        self,
        file: Any,
        example_inputs: Any = None,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: Mapping[str, Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
    ) -> Artifact:
        """Write the artifact for the deployment target to ``file`` and return what is known of it.

        For another target than that of the module, what becomes integers is decided anew, from the ranges that are
        there: no data is read again, and the module stays as it is. `export_configuration` asks for other forms.

        Args:
            file: where to write; it ends as files of the target do, or has no suffix.
            example_inputs: one element as in ``tracing_inputs``; the artifact is compared with this module on it. By
                default on the tracing inputs.
            input_names: names of the inputs, in order; None or empty: those of the signature.
            output_names: names of the outputs that are written, in order.
            dynamic_axes: ``{input: [axis, ...]}`` or ``{input: {axis: name}}``: the sides to leave dynamic. By default
                all that were found dynamic; a side that is not listed is fixed to its length in ``example_inputs``.
                Sides of one name are equal in every call of the artifact.
            deployment_settings: of which target; by default that of the module.

        Raises:
            ModelError: an argument does not fit the model, or ``file`` cannot be written, or ends otherwise.
            TargetError: the target cannot run the model, or disagrees with this module.

        """
        check_kinds(locals())  # which are the arguments, and nothing else yet
        deployment = deployment_settings or self._clika_deployment or DeploymentSettings_ONNXRuntime_ONNX()
        registry = self._clika_registry or load_registry()
        place = place_for(file, deployment, registry)
        self._require_exportable()
        if self._clika_simulation is not None and not self.training:  # what it computes is that of the artifact
            self._clika_simulation.prepare(self.graph, self._log_scales, looks_at_numbers=True)
        form = configuration()
        inputs = chosen_names("input_names", input_names, [v.name for v in self._clika_graph.inputs])
        defaults = form.kept(self._clika_signature.output_names(inputs))
        plan = self._plan_for(deployment)
        request = ExportRequest(
            self.graph.clone(form.kept(self.graph.outputs)),
            place,
            self._examples(example_inputs),
            lambda inputs: form.kept(self._graph_outputs(inputs)),
            inputs,
            chosen_names("output_names", output_names, defaults, taken=inputs),
            dynamic_axes,
            plan,
            self._clika_options,
            self._sizes_seen(),
            form,
        )
        with CompilationLog.open(self._clika_logs_dir) as log, outside_autocast():
            self._warn_of_trained_weights(plan, log)
            artifact = export(request, deployment, registry, log)
            self._keep_told(log)
        return artifact

    def _graph_outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the graph on copies of inputs, leaving buffers as they are."""
        with torch.no_grad():
            outputs, _ = interpret(self.graph, [t.clone() for t in inputs])
        return outputs
