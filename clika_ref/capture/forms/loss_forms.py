"""Losses as simpler calls: those that PyTorch computes in a kernel of its own, or after a check of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.modules.linear_cross_entropy  # declares the chunked losses
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload, scan_op

aten = torch.ops.aten

REDUCTIONS = ("none", "mean", "sum")
"""Names of ATen's numbers of reductions."""


IMPOSSIBLE = -1e30
"""Logarithm of the probability of impossible paths: finite, so that gradients are."""


def _read_targets(targets: Tensor, lengths: Tensor) -> Tensor:
    """Return targets as ``int64[batch, length]``; those of all rows may be given one after the other."""
    if targets.dim() == 2:
        return targets.long()
    first = lengths.cumsum(0) - lengths
    positions = first[:, None] + torch.arange(targets.shape[0], device=targets.device)
    return targets.long()[positions.clamp(max=targets.shape[0] - 1)]


def _sum_paths(log_probs: Tensor, labels: Tensor, is_jump: Tensor, input_lengths: Tensor) -> Tensor:
    """Return the logarithm of the probability of each prefix of labels, ``[batch, label]``, after the last step.

    A step stays at a label, goes to the next one, or jumps over a blank.

    Source: Graves et al., "Connectionist Temporal Classification", 2006.
    """
    impossible = torch.full_like(log_probs[0, :, :1], IMPOSSIBLE)
    steps = torch.arange(log_probs.shape[0], device=log_probs.device)

    def advance(  # noqa: PLR0917 - the state of the scan and its operands
        paths: Tensor, row: Tensor, step: Tensor, labels: Tensor, is_jump: Tensor, lengths: Tensor, none: Tensor
    ) -> tuple[Tensor, Tensor]:
        one = torch.cat([none, paths[:, :-1]], 1)
        two = torch.where(is_jump, torch.cat([none, none, paths[:, :-2]], 1), IMPOSSIBLE)
        total = torch.stack([paths, one, two]).logsumexp(0) + row.gather(1, labels)
        return torch.where((step < lengths)[:, None], total, paths), step.clone()

    at_start = torch.arange(labels.shape[1], device=labels.device) == 0
    before = torch.where(at_start, 0.0, IMPOSSIBLE).to(log_probs.dtype).expand(labels.shape).clone()
    return scan_op(advance, [before], [log_probs, steps], [labels, is_jump, input_lengths, impossible])[0]


def _ctc_loss(  # noqa: PLR0917 - ATen's
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """The CTC loss of ``log_probs[time, batch, class]``, or without the batch."""
    device, is_batch = log_probs.device, log_probs.dim() == 3
    wide = log_probs if is_batch else log_probs[:, None]
    inputs, outputs = (torch.as_tensor(n, device=device).reshape(-1) for n in (input_lengths, target_lengths))
    given = _read_targets(targets if is_batch or targets.dim() == 2 else targets[None], outputs)
    blanks = torch.full_like(given, blank)
    labels = torch.cat([torch.stack([blanks, given], 2).flatten(1), torch.full_like(given[:, :1], blank)], 1)
    ends = torch.arange(labels.shape[1], device=device) <= 2 * outputs[:, None]
    labels = torch.where(ends, labels, blank)
    before = torch.cat([torch.full_like(labels[:, :2], blank), labels[:, :-2]], 1)
    paths = _sum_paths(wide, labels, (labels != blank) & (labels != before), inputs)
    last = paths.gather(1, 2 * outputs[:, None])
    inner = paths.gather(1, (2 * outputs[:, None] - 1).clamp(min=0))
    inner = torch.where(outputs[:, None] > 0, inner, IMPOSSIBLE)
    losses = -torch.cat([last, inner], 1).logsumexp(1)
    losses = torch.where(losses > -IMPOSSIBLE / 2, 0.0 if zero_infinity else math.inf, losses)
    if REDUCTIONS[reduction] == "mean":
        return (losses / outputs.clamp(min=1)).mean()
    return losses.sum() if REDUCTIONS[reduction] == "sum" else losses if is_batch else losses[0]


def _cross_entropy_of_linear(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, **options: Any
) -> Tensor:
    """The cross entropy of a linear layer at once, not by chunks of the batch."""
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return F.cross_entropy(logits, target, class_weight, **options)


def _find_chunked_losses(*operands: Any) -> Tensor:
    """The loss of each row."""
    return _cross_entropy_of_linear(*operands[:5], ignore_index=operands[5], reduction="none")


def _reduce_chunked_losses(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean or the sum of losses, and no gradients, which come from the graph."""
    x, (reduction, ignore_index, label_smoothing) = operands[0], operands[5:8]
    loss = _cross_entropy_of_linear(
        *operands[:5], reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return loss, x.new_empty((0, 0)), x.new_empty((0, 0)), x.new_empty((0,))


def _gaussian_nll_loss(  # noqa: PLR0917 - PyTorch's
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,  # noqa: FBT001, FBT002
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.gaussian_nll_loss`` without its check that no variance is negative."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    variance = variance[..., None] if variance.dim() < input.dim() else variance
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    losses = 0.5 * (variance.log() + (input - target).square() / variance)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


CTC_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.ctc_loss.IntList: _ctc_loss,
    aten.ctc_loss.Tensor: _ctc_loss,
}

CHUNKED_LOSS_FORMS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default: _reduce_chunked_losses,
    torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default: _find_chunked_losses,
}
"""Forms by the call of PyTorch that they replace."""

UNCHECKED_LOSSES: Mapping[Any, Callable[..., Tensor]] = {F.gaussian_nll_loss: _gaussian_nll_loss}
"""Functions of Python that branch on values to check them, and their forms without the checks."""
