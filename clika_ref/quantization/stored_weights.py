"""Parameters as files hold them: the integers of the layers that read them, and the steps that lead back from these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.types import TensorType
from clika_ref.onnx_emission.packing import BITS, pack_int4, unpack_int4

TIMES, MOVED = "times", "moved"
"""What steps are in a document."""

FACTORS = "clika/factors/"
"""Of the names of factors, which no weight has."""


@dataclass(frozen=True)
class Times:
    """Elements, seen as a tensor of some sides, are multiplied by a factor for each place along some of them."""

    sides: tuple[int, ...]
    factor: Tensor
    """``float32``, as many sides, those along which it is the same being 1."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply in place."""
        x.view(self.sides).mul_(self.factor)
        return x


@dataclass(frozen=True)
class Moved:
    """Elements move into a tensor of other sides, or of the same in another order."""

    sides: tuple[int, ...]
    strides: tuple[int, ...]
    """How far apart those lie in it that were neighbours along each side."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return another tensor."""
        result = x.new_zeros(self.sides)
        result.as_strided(x.shape, self.strides).copy_(x)
        return result


@dataclass(frozen=True)
class StoredWeight:
    """A parameter, of which a file holds integers."""

    layer: str
    """The name of the layer that reads them."""
    integers: Tensor
    """``int8``, in the sides of the layer's weight."""
    bits: int
    steps: tuple[Times | Moved, ...]
    """From floats of the integers to the parameter; the first one is their scale."""
    dtype: torch.dtype
    """Of the parameter."""

    def parameter(self) -> Tensor:
        """Return the parameter that is read: lowered and rounded, it has these integers."""
        x = self.integers.to(torch.float32, copy=True)
        for step in self.steps:
            x = step(x)
        return x.to(self.dtype)

    def saved(self, name: str, known: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what `read` takes: a document, and tensors, the integers under the name of the parameter.

        Args:
            name: of the parameter.
            known: tensors of the layer that the file holds anyway, among which may be its scales.
        """
        packed = pack_int4(self.integers) if self.bits <= BITS else self.integers
        steps, tensors = list[list[Any]](), {name: packed}
        for number, step in enumerate(self.steps):
            if isinstance(step, Moved):
                steps.append([MOVED, step.sides, step.strides])
            else:
                factor = step.factor.cpu()
                held = next((n for n, t in known.items() if _is_same(t, factor)), f"{FACTORS}{number}/{name}")
                tensors |= {} if held in known else {held: factor}
                steps.append([TIMES, step.sides, list(factor.shape), held])
        document = {"layer": self.layer, "bits": self.bits, "sides": list(self.integers.shape), "steps": steps}
        return document, tensors


def read_parameter(document: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor], kind: TensorType) -> Tensor:
    """Return the parameter that `StoredWeight.saved` was asked of.

    Args:
        document: as it was returned.
        name: of the parameter.
        tensors: those of the file.
        kind: of the parameter, as the graph has it.

    Raises:
        ModelError: it is damaged.
    """
    try:
        bits, sides = int(document["bits"]), tuple(map(int, document["sides"]))
        integers = unpack_int4(tensors[name], sides, torch.int8) if bits <= BITS else _bytes(tensors[name], sides)
        steps = tuple(_step(*step, tensors=tensors) for step in document["steps"])
        _refuse_other_sizes(steps, integers.numel())
        found = StoredWeight(str(document["layer"]), integers, bits, steps, kind.dtype).parameter()
    except (KeyError, TypeError, ValueError, RuntimeError, ModelError) as error:
        msg = f"the integers of {name!r} are damaged: {type(error).__name__}: {error}"
        raise ModelError(msg) from error
    return found


def _refuse_other_sizes(steps: Sequence[Times | Moved], elements: int) -> None:
    """Refuse steps that make more or fewer elements of some: a forged file may name any sides."""
    for step in steps:
        if math.prod(step.sides) != elements:
            msg = f"a step is of sides {list(step.sides)}, and there are {elements:,} elements"
            raise ValueError(msg)


def _bytes(integers: Tensor, sides: tuple[int, ...]) -> Tensor:
    if integers.dtype != torch.int8 or integers.shape != sides:
        msg = f"{integers.dtype}{list(integers.shape)} are no integers of sides {list(sides)}"
        raise ValueError(msg)
    return integers


def _step(kind: str, sides: list[int], *rest: Any, tensors: Mapping[str, Tensor]) -> Times | Moved:
    if kind == MOVED:
        (strides,) = rest
        return Moved(tuple(map(int, sides)), tuple(map(int, strides)))
    if kind == TIMES:
        shape, name = rest
        return Times(tuple(map(int, sides)), tensors[name].reshape(tuple(map(int, shape))))
    msg = f"there is no step {kind!r}"
    raise ValueError(msg)


def _is_same(known: Tensor, factor: Tensor) -> bool:
    return known.dtype == factor.dtype and torch.equal(known.cpu().reshape(-1), factor.reshape(-1))
