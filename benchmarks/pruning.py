"""Compare four models with their originals after structured pruning: latency in ONNX Runtime, size and MACs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.models import MODELS

# isort: split
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from benchmarks.measuring import Names, run_in_fresh_process
from clika_ref import ClikaModule, PruningSettings, clika_compile
from clika_ref.compiled.latency import measure_seconds_and_ratio
from clika_ref.core.registry import load_registry
from clika_ref.reporting.tables import print_table

PRUNED_SHARE = 0.5
"""Of the channels, or heads, of each group."""


class GroupedQueryBlock(nn.Module):
    """A block of a language model: attention with 16 query heads and 4 key/value heads, then a gated MLP."""

    def __init__(self, dim: int = 512, heads: int = 16, key_value_heads: int = 4) -> None:
        super().__init__()
        self.width = dim // heads
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(dim, key_value_heads * self.width) for _ in range(2))
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(dim),
            *(nn.Linear(dim, 4 * dim) for _ in range(2)),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[n, length, dim]`` for ``x[n, length, dim]``."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class PruningSubject:
    """A model, and its inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]


def _make_images() -> torch.Tensor:
    return torch.randn(1, 3, 224, 224)


SUBJECTS: Mapping[str, PruningSubject] = {
    **{
        name: PruningSubject(lambda name=name: MODELS[name]().make(), _make_images)
        for name in ("densenet121", "mobilenet_v3_large")
    },
    "resnext50_32x4d": PruningSubject(lambda: torchvision.models.resnext50_32x4d(weights=None), _make_images),
    "grouped-query block": PruningSubject(GroupedQueryBlock, lambda: torch.randn(1, 128, 512)),
}


def main(name: str) -> dict[str, float]:
    """Prune one model, export it before and after, and run both files in turn; return the ratios."""
    torch.manual_seed(0)
    subject, target = SUBJECTS[name], load_registry().targets["onnxruntime"]
    inputs = [subject.inputs()]
    module = clika_compile(subject.build().eval(), calibration_inputs=inputs)
    assert isinstance(module, ClikaModule)
    with TemporaryDirectory() as folder:
        before = module.clika_export(Path(folder) / "before.onnx")
        pruned = module.clika_prune(PruningSettings("structured", None, PRUNED_SHARE), calibration_inputs=inputs)
        after = module.clika_export(Path(folder) / "after.onnx")
        seconds, ratio = measure_seconds_and_ratio(target.load(after), inputs, target.load(before), inputs)
    return {
        "seconds": seconds,
        "latency": ratio,
        "bytes": after.facts["bytes"] / before.facts["bytes"],
        "macs": pruned.macs_after / pruned.macs_before,
        "pruning_s": module.timings["Pruning"],
    }


def run(names: Names = None) -> None:
    """Compare four models with their originals after structured pruning: latency, size and MACs."""
    rows: list[Sequence[object]] = []
    speedups: list[float] = []
    for name in names or SUBJECTS:
        found = run_in_fresh_process("benchmarks.pruning", name)
        speedups.append(1 / found["latency"])
        rows.append(
            (
                name,
                f"{found['seconds'] * 1e3:.2f} ms",
                f"{1 / found['latency']:.2f}x",
                f"{found['bytes']:.2f}",
                f"{found['macs']:.2f}",
                f"{found['pruning_s']:.1f} s",
            )
        )
    title = f"{PRUNED_SHARE:.0%} of the channels or heads of each group removed, ONNX Runtime, calls in turn"
    print_table(("model", "after", "faster", "file / before", "MACs / before", "pruning"), rows, title=title)
    print(f"Geometric mean of the speedups: {statistics.geometric_mean(speedups):.2f}x")
