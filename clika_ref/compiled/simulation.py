"""Simulation of a quantized module: its graph as it is exported, quantized values included, in PyTorch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.compiled.quantization_state import QuantizationState, target_of
from clika_ref.compiled.weights import clone_with_weights, device_of_constants
from clika_ref.core.errors import ClikaWarning, ModelError
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.qat.learned_scales import apply_learned_scales
from clika_ref.quantization.weight_checks import reject_nonfinite_weights
from clika_ref.torch_internals.tensors import get_version

FLOAT_EXPORT_WARNING = (
    "torch.onnx.export(dynamo=False) does not support quantized operators: {} is exported in float. Export with "
    "dynamo=True, or with clika_export."
)

NOT_PREPARED = (
    "cannot compile the quantized module with torch.compile: its current weights were not quantized before. Call "
    ".eval() first."
)

NO_VERSION = -1
"""Version of a tensor that may be written to, or has no version counter."""

TensorVersion = tuple[weakref.ref[torch.Tensor], int, int]
"""A tensor, its version, and its address, which an assignment to ``.data`` changes."""


@dataclass(frozen=True)
class _BuiltSimulation:
    """A compiled quantized graph, with all that it was built from."""

    run: Callable[..., Sequence[torch.Tensor]]
    versions: Sequence[TensorVersion]
    mark: str
    """`fingerprint` of the graph with its weights."""
    logs: Mapping[str, torch.Tensor]
    """Copies of the learned log scales."""


class Simulation:
    """Runs a quantized graph, and rebuilds it if a weight has changed.

    A call detects changes by versions and addresses of tensors, which is cheap. A write into ``.data`` changes neither;
    it is only detected if elements are compared on request. Tensors that a call writes to, such as a cache, belong to
    the module, and cause no rebuild. Weights that the quantized graph uses in float are referred to weakly. Replicas of
    a module in several threads may share a simulation.
    """

    def __init__(self, quantized: QuantizationState, registry: Registry) -> None:
        self._plan, self._target, self._registry = quantized.plan, target_of(quantized, registry), registry
        self._built: _BuiltSimulation | None = None

    def __call__(
        self,
        graph: Graph,
        read_tensors: Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]],
        inputs: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Run the graph on inputs.

        Args:
            graph: that of the module.
            read_tensors: returns ``weights`` and ``logs`` as for `prepare`. It is not called in a trace of
                ``torch.compile``, which does not see versions: call `prepare` outside of it first.
            inputs: one tensor for each input of the graph.

        Raises:
            ModelError: ``torch.export`` exports the module, which hides the weights, and they have changed since; or
                ``torch.compile`` traces it, and nothing was prepared.
        """
        built = self._built
        if torch.compiler.is_exporting():
            built = _require_current(built)
        elif not torch.compiler.is_compiling():
            _warn_float_export(graph)
            built = self.prepare(graph, *read_tensors())
        elif built is None:
            raise ModelError(NOT_PREPARED)
        return built.run(*inputs)

    def prepare(
        self,
        graph: Graph,
        weights: Mapping[str, torch.Tensor],
        logs: Mapping[str, torch.Tensor],
        *,
        compare_elements: bool = False,
    ) -> _BuiltSimulation:
        """Rebuild the quantized graph if the weights have changed.

        Args:
            graph: that of the module.
            weights: the current weights of the module, by the names of the graph's constants.
            logs: learned log scales.
            compare_elements: whether to compare the `fingerprint` too, which detects each write that changes most of a
                weight.
        """
        built, found = self._built, _tensor_versions(graph, weights, logs)
        if built is not None and not _is_same(built.versions, found):
            built = None
        if built is not None and not compare_elements:
            return built
        bound = clone_with_weights(graph, weights)
        mark = fingerprint(bound)
        if built is not None and mark == built.mark and all(torch.equal(built.logs[n], log) for n, log in logs.items()):
            return built
        copies = {name: log.detach().clone() for name, log in logs.items()}
        self._built = None  # if the weights cannot be quantized, tracers must not use the former ones
        built = _BuiltSimulation(self._build(bound, logs), found, mark, copies)
        self._built = built
        return built

    def _build(self, graph: Graph, logs: Mapping[str, torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
        # The scales first: a diverged scale makes weights diverge at the next step.
        plan = apply_learned_scales(self._plan.to_device(device_of_constants(graph)), logs)
        reject_nonfinite_weights(graph)
        with torch.no_grad():
            clone = quantize_for_target(graph, plan, self._target, self._registry)
        weak, computed = _compute_constants(clone, graph)
        run = compile_with_fx(clone)
        return lambda *inputs: run(_Constants(weak, computed), *inputs)


class _Constants:
    """The constants of a quantized graph as seen by generated code, as attributes ``constant_<i>``.

    A plain class, made for each call: ``torch.compile`` cannot trace the construction of a ``SimpleNamespace``.
    """

    def __init__(self, weak: Mapping[str, weakref.ref[torch.Tensor]], computed: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weak.items():
            setattr(self, name, weight())
        for name, constant in computed.items():
            setattr(self, name, constant)


@torch.no_grad()
def _compute_constants(
    clone: Graph, graph: Graph
) -> tuple[dict[str, weakref.ref[torch.Tensor]], dict[str, torch.Tensor]]:
    """Compute the constants of a clone once, not at each call.

    Args:
        clone: the quantized form of ``graph``.
        graph: bound to the weights of a module.

    Returns:
        Weak references to weights that are constants of both, and all other constants, none in memory of a weight.
    """
    weights = [value.data for value in graph.constants.values() if value.data is not None]
    own, memory = {id(t) for t in weights}, {t.untyped_storage().data_ptr() for t in weights if t.numel()}
    weak: dict[str, weakref.ref[torch.Tensor]] = {}
    computed: dict[str, torch.Tensor] = {}
    for index, value in enumerate(clone.constants.values()):
        data = value.data
        assert data is not None
        if id(data) in own:
            weak[f"constant_{index}"] = weakref.ref(data)
        else:  # a view of a weight would keep the whole weight
            is_view = data.untyped_storage().data_ptr() in memory
            computed[f"constant_{index}"] = data.clone() if is_view else data
    return weak, computed


def _require_current(built: _BuiltSimulation | None) -> _BuiltSimulation:
    """Return the built simulation, if its weights have not changed.

    Raises:
        ModelError: nothing was built, or a weight has changed.
    """
    if built is None or not all(_is_unchanged(*version) for version in built.versions):
        raise ModelError(
            "cannot export the quantized module with torch.export: its weights changed since they were "
            "quantized, and torch.export hides the new ones. Call .eval() again before the export."
        )
    return built


def _warn_float_export(graph: Graph) -> None:
    """Warn if PyTorch's older exporter runs a graph, as it records floats only."""
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined] - public, though torch.jit does not list it
    if is_traced and torch.onnx.is_in_onnx_export():
        warnings.warn(FLOAT_EXPORT_WARNING.format(graph.name), ClikaWarning, stacklevel=2)


def _tensor_versions(
    graph: Graph, weights: Mapping[str, torch.Tensor], logs: Mapping[str, torch.Tensor]
) -> list[TensorVersion]:
    """Return the weights and log scales with their versions; writes to state do not count."""
    tensors = [*weights.items(), *logs.items()]
    unseen = {name for name, t in tensors if name in graph.state or t.is_inference()}
    return [(weakref.ref(t), NO_VERSION if name in unseen else get_version(t), t.data_ptr()) for name, t in tensors]


def _is_same(versions: Sequence[TensorVersion], found: Sequence[TensorVersion]) -> bool:
    """Return whether all tensors are the same, at the same addresses, and without writes since."""
    pairs = zip(versions, found, strict=False)
    return len(versions) == len(found) and all(a() is b() and one == other for (a, *one), (b, *other) in pairs)


def _is_unchanged(tensor: weakref.ref[torch.Tensor], version: int, _: int) -> bool:
    """Return whether a tensor still exists, and nothing was written to it since."""
    found = tensor()
    return found is not None and version in (NO_VERSION, get_version(found))
