"""Simulation of a quantized module: its graph as it is exported, quantized values included, in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from clika_ref.core.errors import ClikaWarning, ModelError, TargetError
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.export import make_export_graph
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.qat.learned_scales import apply_learned_scales
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.plan_format import plan_from_json, plan_to_json
from clika_ref.quantization.weight_checks import reject_nonfinite_weights
from clika_ref.settings.compile_options import target_hint

FLOAT_EXPORT_WARNING = (
    "torch.onnx.export(dynamo=False) knows no integers, and writes those of {} as the floats that they stand for; "
    "export with dynamo=True, or with clika_export"
)

PLAN_TENSOR_PREFIX = "clika/quantization/"
"""Prefix of the names of its tensors; qualified names of weights contain no slash."""


@dataclass(frozen=True)
class QuantizationState:
    """The quantization of a module: the target, and the plan with the scales."""

    target: str
    plan: Plan
    model: str = ""
    """`fingerprint` of the graph with the weights that the scales are for; empty if unknown."""
    found: Quantization | None = None
    """Decisions for each layer; None if unknown, as for a loaded module."""

    def to_document(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return a JSON document for `read`, and the plan's tensors, of any shape, under names that no weight has."""
        document, tensors = plan_to_json(self.plan)
        told = {"target": self.target, "plan": document, "model": self.model}
        return told, {f"{PLAN_TENSOR_PREFIX}{n}": t for n, t in tensors.items()}

    @classmethod
    def read(cls, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> QuantizationState:
        """Restore the result of `to_document` from its ``document`` and ``tensors``, of any shape; others are ignored.

        Raises:
            ModelError: the data has another version, or is damaged.
        """
        own = {n.removeprefix(PLAN_TENSOR_PREFIX): t for n, t in tensors.items() if n.startswith(PLAN_TENSOR_PREFIX)}
        return cls(str(document["target"]), plan_from_json(document["plan"], own), str(document.get("model", "")))


def quantize_for_target(graph: Graph, plan: Plan, target: Target, registry: Registry) -> Graph:
    """Return a clone of a float graph as the target gets it, quantized with a plan.

    ``registry`` has the operators and passes.

    Raises:
        ModelError: an adapter cannot follow the changes of a pass to its layer.
    """
    return make_export_graph(graph, plan, target, registry, ExportConfiguration())


def target_of(quantized: QuantizationState, registry: Registry) -> Target:
    """Return the target of a quantized module.

    Raises:
        TargetError: no plugin provides it.
    """
    target = registry.targets.get(quantized.target)
    if target is None:
        msg = (
            f"the module is quantized for the target {quantized.target!r}, which no installed plugin provides; "
            f"{target_hint(quantized.target)}; or quantize it for another with clika_initialize_algorithms("
            "calibration_inputs=..., deployment_settings=...)"
        )
        raise TargetError(msg)
    return target


def device_of(graph: Graph) -> torch.device:
    """Return the device of the constants of a graph."""
    return next((v.data.device for v in graph.constants.values() if v.data is not None), torch.device("cpu"))


class Simulation:
    """Runs a quantized graph, and rebuilds it if a weight has changed.

    A call detects changes by versions and addresses of tensors, which is cheap. A write into ``.data`` changes neither;
    it is only detected if elements are compared on request. Tensors that a call writes to, such as a cache, belong to
    the module, and cause no rebuild.
    """

    def __init__(self, quantized: QuantizationState, registry: Registry) -> None:
        self._plan, self._target, self._registry = quantized.plan, target_of(quantized, registry), registry
        self._built_from: list[TensorVersion] = []
        self._logs: dict[str, torch.Tensor] = {}
        self._mark = ""
        self._run: Callable[..., Sequence[torch.Tensor]] | None = None

    def __call__(
        self, graph: Graph, logs: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run the graph on inputs.

        Args:
            graph: that of the module, bound to its current weights.
            logs: learned log scales.
            inputs: one tensor for each input of the graph.

        Raises:
            ModelError: ``torch.export`` exports the module, which hides the weights, and they have changed since.
        """
        if torch.compiler.is_exporting():
            self._reject_changed_weights()
        elif self._run is None or not torch.compiler.is_compiling():  # tracers see no versions; weights stay the same
            _warn_float_export(graph)
            self.prepare(graph, logs)
        assert self._run is not None
        return self._run(*inputs)

    def prepare(self, graph: Graph, logs: Mapping[str, torch.Tensor], *, looks_at_numbers: bool = False) -> None:
        """Rebuild the quantized graph if the weights have changed.

        Args:
            graph: that of the module, bound to its current weights.
            logs: learned log scales.
            looks_at_numbers: whether to compare the `fingerprint` too, which detects each write that changes most of a
                weight.
        """
        found = _tensor_versions(graph, logs)
        is_same = self._run is not None and _is_same(self._built_from, found)
        if is_same and looks_at_numbers:
            is_same = self._mark == fingerprint(graph) and all(torch.equal(self._logs[n], t) for n, t in logs.items())
        if not is_same:
            self._run, self._built_from, self._mark = self._build(graph, logs), found, fingerprint(graph)
            self._logs = {name: log.detach().clone() for name, log in logs.items()}

    def _reject_changed_weights(self) -> None:
        if self._run is None or any(
            t._version != version  # noqa: SLF001 - torch has no public counter of writes
            for t, version, _ in self._built_from
            if version != NO_VERSION
        ):
            msg = (
                "the integers of a quantized module are made of its weights, which torch.export does not show: call "
                ".eval() once more before it is exported"
            )
            raise ModelError(msg)

    def _build(self, graph: Graph, logs: Mapping[str, torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
        plan = apply_learned_scales(
            self._plan.to_device(device_of(graph)), logs
        )  # first: a diverged scale makes weights diverge at the next step
        reject_nonfinite_weights(graph)
        with torch.no_grad():
            clone = quantize_for_target(graph, plan, self._target, self._registry)
            for value in clone.constants.values():
                value.data = value.data  # computed once, not at each call
        holder = SimpleNamespace(**{f"constant_{i}": v.data for i, v in enumerate(clone.constants.values())})
        run = compile_with_fx(clone)
        return lambda *inputs: run(holder, *inputs)


def _warn_float_export(graph: Graph) -> None:
    """Warn if PyTorch's older exporter runs a graph, as it records floats only."""
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined] - public, though torch.jit does not list it
    if is_traced and torch.onnx.is_in_onnx_export():
        warnings.warn(FLOAT_EXPORT_WARNING.format(graph.name), ClikaWarning, stacklevel=2)


NO_VERSION = -1
"""Version of a tensor that may be written to, or has no version counter."""


TensorVersion = tuple[torch.Tensor, int, int]
"""A tensor, its version, and its address, which an assignment to ``.data`` changes."""


def _tensor_versions(graph: Graph, logs: Mapping[str, torch.Tensor]) -> list[TensorVersion]:
    """Return the constants and log scales with their versions; writes to state do not count."""
    weights = [(name, v.data) for name, v in graph.constants.items() if v.data is not None] + [*logs.items()]
    unseen = {name for name, t in weights if name in graph.state or t.is_inference()}
    return [(t, NO_VERSION if name in unseen else t._version, t.data_ptr()) for name, t in weights]  # noqa: SLF001


def _is_same(made_of: Sequence[TensorVersion], found: Sequence[TensorVersion]) -> bool:
    """Return whether all tensors are the same, at the same addresses, and without writes since."""
    pairs = zip(made_of, found, strict=False)
    return len(made_of) == len(found) and all(a is b and one == other for (a, *one), (b, *other) in pairs)


def is_plan_valid(plan: Plan, target: Target, former: Target | None) -> bool:
    """Return whether a plan is valid for the current configuration of its target.

    Other ``shapes`` change nothing, another preset does.

    Args:
        plan: decided for a target of the same name.
        target: as it is configured now.
        former: as it was configured then; None if unknown, as for a loaded module.
    """
    scheme = target.scheme
    if former is not None:
        return former.scheme == scheme
    is_alike = scheme is None or scheme.activations.is_symmetric == plan.scheme.activations.is_symmetric
    return is_alike or not plan.activations  # the CPU decides whether they are signed
