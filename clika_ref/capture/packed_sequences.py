"""Packed sequences in a trace: padded tensors with lengths, as the rows of a packed tensor depend on the lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.torch_internals.symbols import check
from clika_ref.torch_internals.tracing import PACK_PADDED_SEQUENCE, PAD_PACKED_SEQUENCE, RECURRENT_FUNCTIONS

FROZEN_GATE = 1e4
"""A gate's input that makes its sigmoid exactly 0 or 1 in every float dtype."""

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Lengths:
    """The lengths of the sequences in a batch, ``lengths[batch]``, padded to ``longest`` positions."""

    values: Tensor
    longest: Any

    def is_padding(self) -> Tensor:
        """Return whether an element is padding, ``result[position, batch]``."""
        positions = torch.arange(self.longest, device=self.values.device)
        return positions[:, None] >= self.values[None]

    def reverse(self, x: Tensor) -> Tensor:
        """Reverse each sequence of ``x[position, batch, feature]``; the padding stays at the end."""
        positions = torch.arange(self.longest, device=self.values.device)[:, None]
        order = torch.where(self.is_padding(), positions, self.values[None] - 1 - positions)
        return x.gather(0, order.to(x.device).unsqueeze(-1).expand(x.shape))

    def select_last(self, x: Tensor) -> Tensor:
        """Return the last element of each sequence of ``x[position, batch, feature]``, with 1 position."""
        last = (self.values - 1).to(x.device).reshape(1, -1, 1)
        return x.gather(0, last.expand(1, *x.shape[1:]))


class _TracePackedSequences(TorchFunctionMode):
    """Replaces the calls of packing, unpacking, and recurrent networks on packed sequences.

    The data of a packed sequence has a row for each position of the padded batch, in the order of eager:
    ``data[position * batches + batch, ...]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[int, tuple[Tensor, Lengths]] = {}
        """The tensor ``batch_sizes`` of each packed sequence by its identity, and the lengths it stands for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == PACK_PADDED_SEQUENCE:
            return self._pack(*args)
        if func == PAD_PACKED_SEQUENCE:
            return self._pad(*args)
        if func == torch.Tensor.__getitem__ and id(args[0]) in self.packed and args[1] == 0:
            return self.packed[id(args[0])][1].values.shape[0]
        if func in RECURRENT_FUNCTIONS and id(args[1]) in self.packed:
            x, batch_sizes, *rest = args
            return _run_layers(func, x, self.packed[id(batch_sizes)][1], *rest)
        return func(*args, **(kwargs or {}))

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - ATen's
        padded = x.transpose(0, 1) if batch_first else x
        found = Lengths(lengths, padded.shape[0])
        longest = lengths.max().item()
        check(longest >= 1)
        check(longest <= found.longest)
        batch_sizes = (~found.is_padding()).sum(1)[:longest]
        self.packed[id(batch_sizes)] = (batch_sizes, found)
        return _join_rows(padded), batch_sizes

    def _pad(
        self,
        data: Tensor,
        batch_sizes: Tensor,
        batch_first: bool,  # noqa: FBT001 - ATen's
        value: float,
        length: Any,
    ) -> tuple[Tensor, Tensor]:
        lengths = self.packed[id(batch_sizes)][1]
        x = data.unflatten(0, (lengths.longest, lengths.values.shape[0]))
        mask = lengths.is_padding().to(x.device)
        x = x.masked_fill(mask.reshape(*mask.shape, *(1,) * (x.dim() - 2)), value)
        if not statically_known_true(length == lengths.longest):
            used = batch_sizes.shape[0]
            x = x[:used]
            if not statically_known_true(length == used):
                x = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1) + [0, length - used], value)
        return x.transpose(0, 1) if batch_first else x, lengths.values


def _join_rows(x: Tensor) -> Tensor:
    """Join positions and batch. Reshaping by itself adds guards, as it depends on the strides whether it copies."""
    return x.clone(memory_format=torch.contiguous_format).view(x.shape[0] * x.shape[1], *x.shape[2:])


def _run_layers(  # noqa: PLR0917 - ATen's
    run: Callable[..., Any],
    data: Tensor,
    lengths: Lengths,
    hx: Tensor | States,
    weights: Sequence[Tensor],
    has_biases: bool,  # noqa: FBT001
    layers: int,
    dropout: float,
    train: bool,  # noqa: FBT001
    bidirectional: bool,  # noqa: FBT001
) -> tuple[Tensor, ...]:
    """Run a recurrent network layer by layer; a reverse direction runs forward on reversed sequences."""
    states = (hx,) if isinstance(hx, Tensor) else hx
    directions = 2 if bidirectional else 1

    def call(x: Tensor, before: States, own: Sequence[Tensor]) -> States:
        given: Any = before if isinstance(hx, tuple | list) else before[0]
        return run(x, given, own, has_biases, 1, 0.0, False, False, False)

    count = len(weights) // (layers * directions)
    x, last = data.unflatten(0, (lengths.longest, lengths.values.shape[0])), list[States]()
    for layer in range(layers):
        results: list[Tensor] = []
        for direction in range(directions):
            position = layer * directions + direction
            own, before = weights[position * count :][:count], tuple(s[position : position + 1] for s in states)
            result, after = _run_direction(call, lengths.reverse(x) if direction else x, lengths, before, own)
            results.append(lengths.reverse(result) if direction else result)
            last.append(after)
        x = torch.cat(results, -1)
        if dropout and train and layer < layers - 1:
            x = nn.functional.dropout(x, dropout)
    return (_join_rows(x), *(torch.cat(parts) for parts in zip(*last, strict=True)))


def _run_direction(
    run: Callable[[Tensor, States, Sequence[Tensor]], States],
    x: Tensor,
    lengths: Lengths,
    states: States,
    weights: Sequence[Tensor],
) -> tuple[Tensor, States]:
    """Run one layer forward; return its results, and the states after the last element of each sequence."""
    result = run(x, states, weights)[0]
    after = (lengths.select_last(result),)
    if len(states) == 1:
        return result, after
    # The cell states are no result. A feature that marks the padding keeps them: it opens the forget gate, and closes
    # the input gate. Unless the model reads them, the graph drops this call.
    padding = lengths.is_padding().to(x).unsqueeze(-1)
    gates = torch.tensor([-FROZEN_GATE, FROZEN_GATE, 0, 0], dtype=x.dtype, device=x.device)
    column = gates.repeat_interleave(weights[0].shape[0] // 4).unsqueeze(1)
    frozen = run(torch.cat([x, padding], -1), states, [torch.cat([weights[0], column], 1), *weights[1:]])
    return result, (*after, frozen[2])


@contextlib.contextmanager
def trace_packed_sequences() -> Iterator[None]:
    """Trace packed sequences as padded tensors while the context lasts."""
    checks = {(kind, "check_forward_args"): _skip_packed(kind.check_forward_args) for kind in (nn.RNNBase, nn.LSTM)}
    with _TracePackedSequences(), patch_attributes(checks):
        yield


def _skip_packed(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a check of arguments that accepts packed sequences: PyTorch's reads their batch size as a number."""

    def check(module: nn.Module, x: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        if batch_sizes is None:
            plain(module, x, hidden, batch_sizes)

    return only_in_this_thread(check, plain)
