"""Quantization sensitivity (QS): how much quantizing each layer would change the outputs, by random output probes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import resolve
from clika_ref.quantization.algorithms.bias_correction import compute_correction
from clika_ref.quantization.algorithms.gradient_tape import UNKNOWN_SENSITIVITY, record_gradients
from clika_ref.quantization.algorithms.sqnr import mean_ratio, sum_squares, zero_masked_elements
from clika_ref.quantization.calibration.observers import Range, quantization_error
from clika_ref.quantization.calibration.statistics import Statistics
from clika_ref.quantization.qdq.fused_pairs import quantize_dequantize
from clika_ref.quantization.qdq.insertion import Plan, quantize_weight, scale_axis_of
from clika_ref.quantization.qdq.placement import Placement

ERROR_DTYPE = torch.bfloat16
"""Errors are kept until the gradients are known; two digits of each are enough for a mean square."""


@dataclass(frozen=True)
class LayerErrorTerms:
    """The error terms of a layer, each as a share of the outputs' squared norm."""

    own: float
    """From its weight."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """From rounding its inputs and outputs, by value name; layers that read or return the same values share them."""

    @property
    def whole(self) -> float:
        """The sum of all terms."""
        return self.own + sum(self.values.values())


@dataclass(frozen=True)
class JointErrorTerm:
    """Error of a value that no layer rounds, but that is rounded if all its operands are, as in a quantized sum."""

    operands: frozenset[str]
    share: float
    """Share of the outputs' squared norm."""


@dataclass(frozen=True)
class Sensitivities:
    """Effect of quantizing each layer alone on the outputs."""

    parts: Mapping[Node, LayerErrorTerms]
    """Error terms of each layer."""
    joints: Mapping[str, JointErrorTerm]
    """Further error terms that several layers cause together, by value name, in order."""
    outputs: Sequence[Tensor]
    """Outputs of the graph in float, without integer tensors."""
    rivals: Sequence[Mapping[str, float]] = ()
    """Error from rounding each value with the scales of other plans, by value name."""
    incomparable: frozenset[str] = frozenset()
    """Values for which `rivals` shows no order: a single sample does not show what bias correction removes."""
    macs: Mapping[Node, int] = field(default_factory=dict[Node, int])
    """MACs of each layer."""

    @property
    def of(self) -> Mapping[Node, float]:
        """``||Q - F||^2 / ||F||^2`` by layer."""
        return {node: parts.whole for node, parts in self.parts.items()}

    @property
    def shares(self) -> Mapping[str, float]:
        """Error from rounding each value, by name."""
        read = {name: share for parts in self.parts.values() for name, share in parts.values.items()}
        return {**{name: joint.share for name, joint in self.joints.items()}, **read}

    @property
    def comparable(self) -> list[str]:
        """Names of the values for which `rivals` shows which scales are better."""
        return [name for name in self.shares if name not in self.incomparable]

    def without_layers(self, nodes: Collection[Node]) -> Sensitivities:
        """Return the sensitivities of the other layers."""
        return replace(self, parts={node: parts for node, parts in self.parts.items() if node not in nodes})

    def scale(self, factor: float) -> Sensitivities:
        """Return the sensitivities with all errors multiplied by a factor."""
        parts = {
            n: LayerErrorTerms(p.own * factor, {v: share * factor for v, share in p.values.items()})
            for n, p in self.parts.items()
        }
        joints = {v: replace(joint, share=joint.share * factor) for v, joint in self.joints.items()}
        return replace(self, parts=parts, joints=joints)

    def with_shares(self, shares: Mapping[str, float]) -> Sensitivities:
        """Return a copy with other scales of some values, given the errors from rounding these."""
        parts = {
            n: replace(p, values={v: shares.get(v, s) for v, s in p.values.items()}) for n, p in self.parts.items()
        }
        joints = {v: replace(joint, share=shares.get(v, joint.share)) for v, joint in self.joints.items()}
        return replace(self, parts=parts, joints=joints)


def merge_sensitivities(of_graphs: Sequence[Sensitivities]) -> Sensitivities:
    """Return the sensitivities of the layers of several graphs, without outputs; value names get the graph's index.

    Errors must be shares of the same outputs: see `Sensitivities.scale`.
    """
    parts: dict[Node, LayerErrorTerms] = {}
    joints: dict[str, JointErrorTerm] = {}
    for index, found in enumerate(of_graphs):
        for node, part in found.parts.items():
            parts[node] = replace(part, values={name_in_graph(index, name): s for name, s in part.values.items()})
        for name, joint in found.joints.items():
            operands = frozenset(name_in_graph(index, operand) for operand in joint.operands)
            joints[name_in_graph(index, name)] = replace(joint, operands=operands)
    macs = {node: count for found in of_graphs for node, count in found.macs.items()}
    return Sensitivities(parts, joints, (), macs=macs)


def name_in_graph(index: int, name: str) -> str:
    """Return the name of a value among those of several graphs."""
    return f"{index}/{name}"


def sum_layer_errors(parts: Iterable[LayerErrorTerms], joints: Mapping[str, JointErrorTerm]) -> float:
    """Return the error with several layers quantized, if errors add up; each value is rounded once for all layers."""
    every = [*parts]
    values = {name: share for part in every for name, share in part.values.items()}
    for name, joint in joints.items():
        if joint.operands <= values.keys():
            values[name] = joint.share
    return sum(part.own for part in every) + sum(values.values())


def estimate_sensitivities(
    graph: Graph,
    placement: Placement,
    plan: Plan,
    operators: Mapping[str, Operator],
    inputs: Sequence[Tensor],
    *,
    seen: Mapping[str, Statistics] | None = None,
    rivals: Sequence[Plan] = (),
    probes: int | None = None,
) -> Sensitivities:
    """Return ``||Q - F||^2 / ||F||^2`` at the outputs for each layer, if only that layer were quantized.

    Two local errors are computed: the change of a layer's output from its rounded weight, and the change of each value
    that it reads or must return from rounding. To first order, the Jacobian of the following nodes turns them into the
    error at the outputs. A probe is a direction ``u`` of random normal numbers: one backward pass gives ``u @ J`` for
    every layer at once. The mean square of ``u @ J`` times a local error estimates the squared error at the outputs,
    so that no layer needs a run of its own. Samples of a batch have independent errors and are squared one by one,
    which makes each of them a probe. The error of what only the first layer reads is computed at its output: a run of
    this layer costs less than its gradients, the slowest ones of many convolutional networks.

    Args:
        graph: lowered.
        placement: the quantized layers.
        plan: their scales.
        operators: those of the registry.
        inputs: a batch.
        seen: statistics of all batches by value name; errors of rare elements then count as often as these occur in all
            data, not in this batch.
        rivals: other plans for the same placement; the values are also rounded with their scales.
        probes: number of backward passes; by default enough for `ERROR_SAMPLES` with the samples of the batch.

    Source: Hutchinson, A stochastic estimator of the trace of the influence matrix (1989).
    """
    read = {node: _find_rounded_values(node, tail, placement, plan) for node, tail in placement.layers.items()}
    joint = {
        source_of_rounding(tail, placement): _operand_names(node, placement)
        for node, tail in placement.elementwise.items()
    }
    values = dict.fromkeys(value for some in (*read.values(), joint) for value in some)
    sizes = read_sizes(graph, inputs)
    pushed = _find_first_layers(graph, values, placement, sizes)
    places = {value: pushed[value][-1].output if value in pushed else value for value in values}
    rounded_by = {(value, number): value for number in range(1 + len(rivals)) for value in values}
    keys = {key: places[value] for key, value in rounded_by.items()}
    recorder = record_gradients(graph, {**placement.layers, **keys}, inputs, kept=pushed)
    plans = [_LayerErrors(recorder.tensors, each, operators, sizes) for each in (plan, *rivals)]
    errors: dict[Any, Tensor] = {
        node: plans[0].error(node, tail).to(ERROR_DTYPE) for node, tail in placement.layers.items()
    }
    rarity: dict[Any, float] = {}
    for value, number in rounded_by:
        error = plans[number].missed(value)
        rarity[value, number] = plans[number].error_ratio(value, error, (seen or {}).get(value.name))
        error = plans[number].left(value, error)
        if value in pushed:
            error = plans[number].push(value, error, pushed[value])
        errors[value, number] = error.to(ERROR_DTYPE)
    effects = recorder.estimate_effects(errors, probes=probes)
    shares, *others = (
        {v.name: effects.get((v, number), 0.0) * rarity[v, number] for v in values} for number in range(len(plans))
    )
    parts = {
        n: LayerErrorTerms(effects.get(n, 0.0), {v.name: shares[v.name] for v in some}) for n, some in read.items()
    }
    joints = {v.name: JointErrorTerm(made_of, shares[v.name]) for v, made_of in joint.items()}
    incomparable = frozenset(v.name for v in values if plans[0].find_mean_dims(v) and not plans[0].has_known_mean(v))
    return Sensitivities(parts, joints, recorder.float_outputs, others, incomparable, recorder.macs)


def _find_rounded_values(node: Node, tail: Value, placement: Placement, plan: Plan) -> list[Value]:
    """Return the values that are rounded if only this layer is quantized."""
    values = [node.first_tensor, *([tail] if node.op_type in plan.scheme.needs_quantized_output else [])]
    return [source_of_rounding(end, placement) for end in values]


def _find_first_layers(
    graph: Graph, values: Collection[Value], placement: Placement, sizes: Mapping[str, int]
) -> dict[Value, list[Node]]:
    """Return the nodes from each of some values to the output, after fusion, of the only layer that reads it.

    Only values before all layers are returned, and only those that depend on no other one of ``values``.
    """
    preceded = set[Value]()
    for node in graph.nodes:
        if node in placement.layers or any(v in preceded or v in values for v in node.inputs if isinstance(v, Value)):
            preceded.update(node.outputs)
    tails = {*placement.layers.values()}
    found = {value: _find_reader_chain(value, tails, sizes) for value in values if value not in preceded}
    return {value: nodes for value, nodes in found.items() if nodes}


def _find_reader_chain(value: Value, tails: Collection[Value], sizes: Mapping[str, int]) -> list[Node]:
    """Return the nodes from a value to the first tail, if each result is read by one node, with constants; or none.

    Nodes with sizes in their attributes are among them if these are ``sizes``, those of the inputs.
    """
    nodes: list[Node] = []
    while value not in tails:
        users = [use.user for use in value.uses]
        if len(users) != 1 or not isinstance(users[0], Node) or not _is_function_of(users[0], value, sizes):
            return []
        nodes.append(users[0])
        value = users[0].output
    return nodes


def _is_function_of(node: Node, value: Value, sizes: Mapping[str, int]) -> bool:
    """Return whether a node computes one tensor from a value, constants and these sizes."""
    others = [v for v in node.inputs if v is not value]
    known = {str(s) for item in (*node.attrs.values(), *others) for s in _find_symbols(item)} <= sizes.keys()
    is_constant = all(other.is_constant for other in others if isinstance(other, Value))
    return len(node.outputs) == 1 and not node.bodies and known and is_constant


def _find_symbols(item: Any) -> Iterator[Any]:
    """Yield the symbols in an attribute or operand."""
    if isinstance(item, tuple):
        for part in item:
            yield from _find_symbols(part)
    else:
        yield from getattr(item, "free_symbols", ())


def source_of_rounding(value: Value, placement: Placement) -> Value:
    """Return the value that is rounded: the source that a value was moved from, if there is one."""
    source = placement.scale_sources.get(value, value)
    return source if source in placement.scale_sources else value


def _operand_names(node: Node, placement: Placement) -> frozenset[str]:
    return frozenset(source_of_rounding(v, placement).name for v in node.inputs if isinstance(v, Value))


def sensitivity_reason(sensitivity: float, limit: float | None) -> str:
    """Return the reason to keep a layer in float with a sensitivity above a threshold."""
    if not limit:
        return "quantization_sensitivity_threshold=0: quantization would change the results"
    if sensitivity >= UNKNOWN_SENSITIVITY:
        return (
            "its sensitivity cannot be estimated: the gradient from the outputs is zero, as of an argmax or a "
            "comparison, or of a layer after a selection whose size depends on the data, or infinite, as of a square "
            "root at 0. automatic_skip_quantization=False quantizes it anyway"
        )
    return f"too sensitive: {sensitivity:.2g} is above quantization_sensitivity_threshold={limit:g}"


def variance_share(*batches: Sequence[Tensor]) -> float:
    """Return the share of the outputs' squared norm that varies with the input; for random weights it is small.

    The shares of several outputs are averaged. With a single sample, the positions of a sequence are compared instead;
    without positions, nothing shows which part is constant, and all of it counts.

    Args:
        batches: the outputs of each, with samples along dim 0; further ones count if their other dims agree.
    """
    parts: list[tuple[float, float]] = []
    for outputs in zip(*batches, strict=True):
        first = zero_masked_elements(outputs[0].detach())
        compatible = [zero_masked_elements(o.detach()) for o in outputs if o.ndim and o.shape[1:] == first.shape[1:]]
        samples = torch.cat(compatible) if compatible else first
        whole = varying = sum_squares(samples)
        if samples.ndim > 2 and len(compatible) == len(samples) == 1:
            samples = samples.flatten(0, -2)
        if compatible and len(samples) > 1:  # the mean of few samples absorbs a part of the variance
            varying = sum_squares(samples - samples.mean(0)) * len(samples) / (len(samples) - 1)
        parts.append((min(varying, whole), whole))
    return mean_ratio(parts)


@dataclass(frozen=True)
class _LayerErrors:
    """Computes the quantization errors of layers and values, on the tensors of the float run."""

    tensors: Mapping[Value, Tensor]
    plan: Plan
    operators: Mapping[str, Operator]
    sizes: Mapping[str, int]
    """Those of the inputs."""

    @torch.no_grad()
    def error(self, node: Node, tail: Value) -> Tensor:
        """Return the change in a layer's output after fusion, from a rounded weight and bias correction."""
        value = node.output
        found = self._run(node, [self._operand(node, i) for i in range(len(node.inputs))])
        if node.op.trait.bias is not None:
            found += compute_correction(node, self.tensors[node.output], found)
        while value is not tail:
            (use,) = value.uses
            assert isinstance(use.user, Node)
            found, value = self._apply(use.user, value, found), use.user.output
        return found - self.tensors[tail]

    @torch.no_grad()
    def missed(self, value: Value) -> Tensor:
        """Return the rounding error of a value."""
        x, scale = self.tensors[value].detach(), self.plan.activations.get(value.name)
        if scale is None:
            return torch.zeros_like(x)
        kind = self.plan.scheme.activations
        return quantize_dequantize(x, scale.scale, scale.zero_point, low=kind.low, high=kind.high).sub_(x)

    def left(self, value: Value, error: Tensor) -> Tensor:
        """Return the rounding error, minus its mean in each channel if a layer with a bias reads the value.

        The bias correction of the layer removes that mean. The mean of a single element would be the error itself.
        """
        dims = self.find_mean_dims(value)
        return error - error.mean(dims, keepdim=True) if dims and self.has_known_mean(value) else error

    @torch.no_grad()
    def push(self, value: Value, error: Tensor, nodes: Sequence[Node]) -> Tensor:
        """Return the change in the output of the last node from an error in a value that the first node reads."""
        found = self.tensors[value] + error
        for node in nodes:
            found, value = self._apply(node, value, found), node.output
        return found - self.tensors[value]

    def _apply(self, node: Node, value: Value, changed: Tensor) -> Tensor:
        """Return the result of a node with one operand changed, and the others as in the float run."""
        return self._run(node, [changed if v is value else _float_operand(v, self.tensors) for v in node.inputs])

    def _run(self, node: Node, operands: Sequence[Any]) -> Tensor:
        """Return the result of a node, with symbols in operands and attributes replaced by sizes."""
        attrs = {name: resolve(attr, self.sizes) for name, attr in node.attrs.items()}
        return node.op(*(resolve(operand, self.sizes) for operand in operands), **attrs)

    def find_mean_dims(self, value: Value) -> list[int]:
        """Return the dims of the mean that bias correction removes from the rounding error; none if it removes none."""
        readers = [use.user for use in value.uses if isinstance(use.user, Node) and use.user.op.trait.bias is not None]
        rank = self.tensors[value].ndim
        if not readers or rank < 2:
            return []
        channel = readers[0].op.trait.channel or 0
        return [d for d in range(rank) if d != channel % rank]

    def has_known_mean(self, value: Value) -> bool:
        """Return whether that mean has more than one element."""
        return math.prod(self.tensors[value].shape[d] for d in self.find_mean_dims(value)) > 1

    def error_ratio(self, value: Value, error: Tensor, seen: Statistics | None) -> float:
        """Return the ratio of the rounding error over all calibration data to that of this batch."""
        scale, kind = self.plan.activations.get(value.name), self.plan.scheme.activations
        if scale is None or seen is None or not error.numel():
            return 1.0
        here = float(error.square().mean(dtype=torch.float64))
        covered = Range(*((end - scale.zero_point) * scale.scale for end in (kind.low, kind.high)))
        return quantization_error(seen, covered, 2**kind.bits) / here if here else 1.0

    def _operand(self, node: Node, position: int) -> Any:
        operand = node.inputs[position]
        if position == node.op.trait.weight:
            scales = self.plan.weights[node.name]
            axis = scale_axis_of(node, scales)
            quantized = quantize_weight(operand, scales, axis, self.plan.scheme.weights, self.operators["quantize"])
            return self.operators["dequantize"](quantized, scales, axis=axis)
        return _float_operand(operand, self.tensors)


def _float_operand(operand: Any, tensors: Mapping[Value, Tensor]) -> Any:
    """Return the tensor of a value in the float run, the data of a constant, or a number as it is."""
    if not isinstance(operand, Value):
        return operand
    return operand.data if operand.is_constant else tensors[operand]
