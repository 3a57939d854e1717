"""Softmax and log-softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import SOFTMAX
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref_aten.elementwise import FLOATS

aten = torch.ops.aten


def _softmax_lowering(op_type):
    def lowering(op, x, *, dim, dtype):
        vector = op.reshape(x, (1,)) if op.rank(x) == 0 else x
        result = op.node(op_type, *op.promote(vector), axis=dim)
        return op.reshape(result, ()) if op.rank(x) == 0 else result

    return lowering


def _internal_converter(declared):
    def converter(x, dim, half_to_float):
        return declared.call(x, dim=dim, dtype=torch.float32 if half_to_float else None)

    return converter


def _sampler(draw, s):
    x = draw(s.tensor(dtype=FLOATS, low=-8, high=8))
    dim = draw(s.integers(-max(x.rank, 1), max(x.rank - 1, 0)))
    return s.call(x, dim=dim, dtype=draw(s.choice(None, None, torch.float32, torch.float64)))


@operator(aten.softmax.int, aten.special_softmax.default, quant=OWN_QPARAMS, error=SOFTMAX)
def softmax(x: Tensor, *, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``dim``; ``x`` is cast to ``dtype`` first."""
    return torch.softmax(x, dim, dtype)


softmax.onnx(_softmax_lowering("Softmax"))
softmax.samples(_sampler)
softmax.from_torch(aten._softmax.default)(_internal_converter(softmax))  # noqa: SLF001 - ATen names it so


@operator(aten.log_softmax.int, aten.special_log_softmax.default, quant=OWN_QPARAMS, error=SOFTMAX)
def log_softmax(x: Tensor, *, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``x - log(sum(exp(x)))`` along ``dim``; ``x`` is cast to ``dtype`` first."""
    return torch.log_softmax(x, dim, dtype)


log_softmax.onnx(_softmax_lowering("LogSoftmax"))
log_softmax.samples(_sampler)
log_softmax.from_torch(aten._log_softmax.default)(_internal_converter(log_softmax))  # noqa: SLF001 - ATen names it so
