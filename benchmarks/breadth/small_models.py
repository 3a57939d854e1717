"""Small models, each with one call that has stopped a compilation: of real models, or of PyTorch's documentation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.breadth.architecture import Architecture, Sizes

Function = Callable[..., Any]


class Calls(nn.Module):
    """A linear layer of 4 channels, if there is one, and a function of its result."""

    def __init__(self, function: Function, *, has_layer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4) if has_layer else None
        self.function = function

    def forward(self, x: Any, *others: Any) -> Any:
        """Call the function."""
        return self.function(x if self.layer is None else self.layer(x), *others)


class Anchors(nn.Module):
    """A size and a number that come from a constant tensor, as in YOLO's anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.stride = torch.tensor([8.0, 16.0])

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the first stride."""
        return x * x.new_full((x.shape[-1],), self.stride[0])  # type: ignore[arg-type]


class EarlyExit(nn.Module):
    """A branch on the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Choose a layer."""
        return torch.cond(x.mean() > 0.5, self.first, lambda x: self.second(x).tanh(), (x,))


class SpatialTransformer(nn.Module):
    """An affine transform of an image by its own means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the image."""
        theta = self.layer(x.mean((2, 3))).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.size()), align_corners=False), align_corners=False)


class PackedRecurrence(nn.Module):
    """A recurrent network on sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)  # type: ignore[call-arg]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the states, 0 after the end of each sequence."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))[0]


class AttributeCache(nn.Module):
    """A cache in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(4, 32, 4)

    def forward(self, x: Tensor, position: int) -> Tensor:
        """Write to the cache, and sum what is in it."""
        batch, length, _ = x.shape
        self.cache = self.cache.to(x)
        self.cache[:batch, position : position + length] = x
        return self.cache[:batch, : position + length].sum(1)


class GaussianPolicy(nn.Module):
    """The log-probability of actions under a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability of each action."""
        mean, log_scale = self.layer(observation).chunk(2, -1)
        return torch.distributions.Normal(mean, log_scale.exp()).log_prob(action).sum(-1)


class Stream(nn.Module):
    """A causal convolution that keeps the end of each input for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 5)
        self.register_buffer("past", torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next outputs."""
        joined = torch.cat([self.past, x], -1)
        self.past.copy_(joined[..., -4:])
        return self.conv(joined)


class CellLoop(nn.Module):
    """A Python loop of a recurrent cell over the positions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state."""
        state = None
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


class AutocastRecurrence(nn.Module):
    """A recurrent network inside an autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.rnn(x)[0]


def _rotate(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.size(1)).float(), torch.tensor([1.0, 0.1]))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(2)


def _count_down(x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop  # noqa: PLC0415 - PyTorch documents it there

    return while_loop(lambda n, _: n > 0, lambda n, y: (n - 1, y * 1.5), (torch.tensor(3), x))[1]


def _scan_sums(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan  # noqa: PLC0415

    return scan(lambda state, row: (state + row, (state + row).tanh()), torch.zeros(x.shape[1]), x)[1]


def _multiply_in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.linalg.multi_dot([x, x.T, x])


Shapes = tuple[Sizes, ...]

OF_TENSORS: Mapping[str, tuple[Callable[[], nn.Module], tuple[Shapes, Shapes, Shapes]]] = {
    "new_full of a constant": (Anchors, (((2, 5),), ((3, 8),), ((4, 6),))),
    "avg_pool2d, ceil_mode": (
        lambda: nn.AvgPool2d(3, 3, 1, ceil_mode=True),
        (((1, 2, 8, 9),), ((2, 2, 10, 14),), ((3, 2, 11, 13),)),
    ),
    "rfft": (lambda: Calls(lambda x: torch.fft.rfft(x).abs()), (((1, 16),), ((2, 24),), ((3, 20),))),
    "fft2": (lambda: Calls(lambda x: torch.fft.fft2(x).real), (((1, 6, 8),), ((2, 6, 8),), ((3, 6, 8),))),
    "complex rotation": (lambda: Calls(_rotate), (((1, 5, 4),), ((2, 9, 4),), ((3, 7, 4),))),
    "cond": (EarlyExit, (((1, 4),), ((2, 4),), ((3, 4),))),
    "while_loop": (lambda: Calls(_count_down), (((1, 4),), ((2, 4),), ((3, 4),))),
    "scan": (lambda: Calls(_scan_sums), (((5, 3),), ((7, 3),), ((9, 3),))),
    "vmap": (
        lambda: Calls(torch.vmap(lambda a, b: a @ b)),
        (((1, 3, 4), (1, 4, 2)), ((2, 3, 4), (2, 4, 2)), ((3, 3, 4), (3, 4, 2))),
    ),
    "affine_grid": (SpatialTransformer, (((1, 3, 5, 6),), ((2, 3, 7, 9),), ((3, 3, 8, 7),))),
    "linspace": (
        lambda: Calls(lambda x: x * torch.linspace(0, 1, x.shape[1])),
        (((1, 5),), ((2, 8),), ((3, 7),)),
    ),
    "as_tensor of sizes": (
        lambda: Calls(lambda x: x.mean() / torch.as_tensor([x.shape[1], x.shape[2]])),
        (((1, 5, 6),), ((2, 8, 9),), ((3, 7, 5),)),
    ),
    "pad_sequence": (
        lambda: Calls(lambda a, b: nn.utils.rnn.pad_sequence([a, b], batch_first=True) * 2),
        (((5, 4), (3, 4)), ((7, 4), (6, 4)), ((4, 4), (8, 4))),
    ),
    "normal distribution": (GaussianPolicy, (((1, 4), (1, 3)), ((2, 4), (2, 3)), ((3, 4), (3, 3)))),
    "branch on a length of 1": (
        lambda: Calls(lambda x: x + 1 if x.size(1) == 1 else x + x.cumsum(1) * 0 + 1),
        (((1, 1, 4),), ((2, 6, 4),), ((3, 5, 4),)),
    ),
    "state in a buffer": (Stream, (((1, 3, 8),), ((1, 3, 12),), ((1, 3, 10),))),
    **{
        f"loop of {kind.__name__}": (functools.partial(CellLoop, kind), (((1, 5, 4),), ((2, 7, 4),), ((3, 6, 4),)))
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    },
    "LSTM in autocast": (AutocastRecurrence, (((1, 5, 4),), ((2, 7, 4),), ((3, 6, 4),))),
    "LSTM with proj_size": (
        lambda: nn.LSTM(4, 6, proj_size=3, batch_first=True),
        (((1, 5, 4),), ((2, 7, 4),), ((3, 6, 4),)),
    ),
    "weighted cov": (
        lambda: Calls(lambda x: torch.cov(x, aweights=torch.ones(x.shape[1]))),
        (((3, 5),), ((3, 8),), ((3, 7),)),
    ),
    "combinations": (lambda: Calls(torch.combinations), (((5,),), ((7,),), ((6,),))),
    "gradient": (lambda: Calls(lambda x: torch.gradient(x, dim=1)[0]), (((2, 5),), ((3, 8),), ((4, 6),))),
    "take_along_dim": (
        lambda: Calls(lambda x: torch.take_along_dim(x, x.argsort(1), 1)),
        (((2, 5),), ((3, 8),), ((4, 6),)),
    ),
    "multi_dot in autocast": (lambda: Calls(_multiply_in_bfloat16), (((3, 5),), ((6, 9),), ((7, 4),))),
}
"""A function that makes the model, and the shapes of its inputs: two to trace, and one that was never traced."""


def _make_lengths(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, 4), "lengths": torch.tensor([length, *[length // 2] * (batch - 1)])}


def _make_cached(batch: int, length: int, position: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, length, 4), "position": position}


def _make_tensors(*shapes: Sizes) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    return {
        **{
            name: Architecture(build, _make_tensors, ((first, second), unseen), "sizes that differ")
            for name, (build, (first, second, unseen)) in OF_TENSORS.items()
        },
        **{
            f"packed {kind.__name__}": Architecture(
                functools.partial(PackedRecurrence, kind), _make_lengths, (((2, 5), (3, 7)), (4, 6)), "batch, length"
            )
            for kind in (nn.LSTM, nn.GRU, nn.RNN)
        },
        "cache in an attribute": Architecture(
            AttributeCache, _make_cached, (((1, 4, 0), (2, 3, 4)), (3, 5, 2)), "batch, length, position"
        ),
    }
