"""FlexAttention in a trace: attention on whole matrices of scores.

PyTorch compiles the call by itself, in a graph that a trace does not contain, and rejects gradients on a CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.torch_internals import flex_attention as flex


@contextlib.contextmanager
def trace_flex_attention() -> Iterator[None]:
    """Make ``flex_attention`` call traceable functions while the context lasts, if a model has imported it."""
    module = flex.find_module()
    if module is None:
        yield
        return
    forms: dict[str, Callable[..., Any]] = {
        flex.CALL_KERNEL: _compute_attention,
        flex.CHECK_DEVICE: _accept,
        flex.CREATE_MASK: _create_empty_mask,
        flex.FIND_BLOCKS: lambda mask, **_: (mask, None),
        flex.CREATE_BLOCK_MASK: _create_block_mask,
    }
    replaced = {(module, name): _make_traceable(form, getattr(module, name)) for name, form in forms.items()}
    with patch_attributes({**replaced, (module, flex.CALLS_WITHOUT_COMPILING): True}):
        yield


def _make_traceable(form: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    own = only_in_this_thread(form, plain)

    def choose(*args: Any, **kwargs: Any) -> Any:  # Dynamo cannot trace the identity of a thread
        return form(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else own(*args, **kwargs)

    return choose


def _accept(*_: Any) -> None:
    """Accept tensors of any device that require gradients."""


def _create_empty_mask(_mask_mod: Any, batch: Any, heads: Any, *_: Any, device: Any = None, **__: Any) -> Tensor:
    """Return a mask of one position for each batch and head: only the function of the mask is used."""
    return torch.ones(batch or 1, heads or 1, 1, 1, dtype=torch.bool, device=device)


def _create_block_mask(
    masks: tuple[Tensor, None], mask_mod: Any, lengths: tuple[Any, Any], query_block: int, key_block: int
) -> Any:
    """Return a mask whose tables of blocks are not filled in."""
    counts = masks[0].sum(-1).to(torch.int32)
    indices = torch.zeros_like(masks[0], dtype=torch.int32)
    tables = counts, indices, None, None, counts, indices, None, None
    return flex.find_module().BlockMask(lengths, *tables, BLOCK_SIZE=(query_block, key_block), mask_mod=mask_mod)


def _compute_attention(  # noqa: PLR0917 - PyTorch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    _kernel_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, its log-sum-exp and the maximum of its scores, both in units of log(2).

    PyTorch maps ``score_mod`` and the function of the mask over scalars. Both get tensors here that broadcast to the
    scores, ``scores[batch, head, query, key]``.

    Args:
        query: ``query[batch, head, query, channel]``.
        key: ``key[batch, head, key, channel]``; its heads are repeated, if there are fewer.
        value: ``value[batch, head, key, channel]``, as ``key``.
        score_mod: ``score_mod(score, batch, head, query, key)`` returns a score.
        block_mask: the last element is ``mask_mod(batch, head, query, key)``, which returns whether to attend.
        scale: the factor of the scores.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(-2, -1) * scale
    shapes = (-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)
    indices = [torch.arange(scores.shape[d], device=scores.device).view(shape) for d, shape in enumerate(shapes)]
    is_attended = block_mask[-1](*indices)
    scores = torch.where(is_attended, score_mod(scores, *indices), -math.inf).to(dtype)
    largest = scores.amax(-1)
    log_sum = torch.where(largest == -math.inf, -math.inf, scores.logsumexp(-1))
    weights = torch.where((largest == -math.inf)[..., None], 0.0, scores.softmax(-1))
    return weights.to(query.dtype) @ value, log_sum / math.log(2), largest / math.log(2)
