"""Parameters as stored in files: quantized weights, and the steps that restore the parameters from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.int4 import INT4_BITS, pack_int4, unpack_int4
from clika_ref.serialization.vocabulary import StoredWeightKey, StoredWeightStep, TensorPrefix


@dataclass(frozen=True)
class MultiplyStep:
    """Multiplies the elements, viewed in the shape ``shape``, by a factor for each index along some dims."""

    shape: tuple[int, ...]
    factor: Tensor
    """``float32`` of the same rank; dims with a common factor have length 1."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply in place."""
        x.view(self.shape).mul_(self.factor)
        return x


@dataclass(frozen=True)
class LayoutStep:
    """Moves the elements into a tensor of another shape, or into another order of dims."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in the result for each dim of the input."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the new tensor."""
        result = x.new_zeros(self.shape)
        result.as_strided(x.shape, self.strides).copy_(x)
        return result


@dataclass(frozen=True)
class StoredWeight:
    """A parameter that a file stores in quantized form."""

    layer: str
    """Name of the layer that reads it."""
    quantized: Tensor
    """``int8`` in the shape of the layer's weight."""
    bits: int
    steps: tuple[MultiplyStep | LayoutStep, ...]
    """From the integers as floats to the parameter; the first step multiplies by the scales."""
    dtype: torch.dtype
    """Dtype of the parameter."""
    lookups: tuple[str, ...] = ()
    """Names of lookups that read the same integers."""

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the layer and of the lookups."""
        return self.layer, *self.lookups

    def restore_parameter(self) -> Tensor:
        """Return the restored parameter: lowered and rounded, it has these integers."""
        x = self.quantized.to(torch.float32, copy=True)
        for step in self.steps:
            x = step(x)
        return x.to(self.dtype)

    def to_document(self, name: str, known: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a JSON document and tensors for `read_parameter`; the integers have the name of the parameter.

        Args:
            name: of the parameter.
            known: tensors of the layer that the file contains anyway, possibly with its scales.
        """
        packed = pack_int4(self.quantized) if self.bits <= INT4_BITS else self.quantized
        steps, tensors = list[list[Any]](), {name: packed}
        for number, step in enumerate(self.steps):
            if isinstance(step, LayoutStep):
                steps.append([StoredWeightStep.LAYOUT, step.shape, step.strides])
            else:
                factor = step.factor.cpu()
                stored_name = next(
                    (n for n, t in known.items() if _is_equal(t, factor)), f"{TensorPrefix.FACTORS}{number}/{name}"
                )
                tensors |= {} if stored_name in known else {stored_name: factor}
                steps.append([StoredWeightStep.MULTIPLY, step.shape, list(factor.shape), stored_name])
        document: dict[str, Any] = {
            StoredWeightKey.LAYER: self.layer,
            StoredWeightKey.BITS: self.bits,
            StoredWeightKey.SHAPE: list(self.quantized.shape),
            StoredWeightKey.STEPS: steps,
        }
        return document, tensors


def read_parameter(document: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor], kind: TensorType) -> Tensor:
    """Return the parameter that `StoredWeight.saved` converted.

    Args:
        document: the JSON document.
        name: of the parameter.
        tensors: those of the file.
        kind: type of the parameter in the graph.

    Raises:
        ModelError: the data is damaged.
    """
    try:
        bits, shape = int(document[StoredWeightKey.BITS]), tuple(map(int, document[StoredWeightKey.SHAPE]))
        integers = (
            unpack_int4(tensors[name], shape, torch.int8) if bits <= INT4_BITS else _check_int8(tensors[name], shape)
        )
        steps = tuple(_read_step(*step, tensors=tensors) for step in document[StoredWeightKey.STEPS])
        _reject_size_changes(steps, integers.numel())
        found = StoredWeight(
            str(document[StoredWeightKey.LAYER]), integers, bits, steps, kind.dtype
        ).restore_parameter()
    except (KeyError, TypeError, ValueError, RuntimeError, ModelError) as error:
        raise ModelError(f"the quantized weight {name!r} is damaged: {type(error).__name__}: {error}") from error
    return found


def _reject_size_changes(steps: Sequence[MultiplyStep | LayoutStep], elements: int) -> None:
    """Reject steps that change the number of elements: a forged file may declare any shape."""
    for step in steps:
        if math.prod(step.shape) != elements:
            raise ValueError(f"a step has the shape {list(step.shape)}, but there are {elements:,} elements")


def _check_int8(quantized: Tensor, shape: tuple[int, ...]) -> Tensor:
    if quantized.dtype != torch.int8 or quantized.shape != shape:
        raise ValueError(f"{quantized.dtype}{list(quantized.shape)} is not a quantized tensor of shape {list(shape)}")
    return quantized


def _read_step(kind: str, shape: list[int], *rest: Any, tensors: Mapping[str, Tensor]) -> MultiplyStep | LayoutStep:
    if kind == StoredWeightStep.LAYOUT:
        (strides,) = rest
        return LayoutStep(tuple(map(int, shape)), tuple(map(int, strides)))
    if kind == StoredWeightStep.MULTIPLY:
        factor_shape, name = rest
        return MultiplyStep(tuple(map(int, shape)), tensors[name].reshape(tuple(map(int, factor_shape))))
    raise ValueError(f"unknown step {kind!r}")


def _is_equal(known: Tensor, factor: Tensor) -> bool:
    return known.dtype == factor.dtype and torch.equal(known.cpu().reshape(-1), factor.reshape(-1))
