"""Quantize and train a network in two processes. Each reads half of the data, and both end with the same model.

`torchrun --nproc-per-node 2 examples/ddp_quantize.py [where/to/write.onnx]`, or without torchrun, which it then starts
by itself. It takes some forty seconds. On a machine with GPUs, use the backend nccl and a device for each rank:
docs/distributed.md lists the lines to change.
"""

import hashlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DistributedTrainingSettings,
    QuantizationSettings,
    clika_compile,
    clika_distribute,
)
from clika_ref.reporting.tables import print_table

DISTRIBUTED_SETTINGS = DistributedTrainingSettings(multi_gpu=True)
EPOCHS, QAT_EPOCHS = 6, 2
BATCH = 32
TEST_SAMPLES = 450


@record  # torchrun then shows the error of the failed rank, not the end of the other one
def main(path: Path) -> None:
    """Run one of the processes: train, quantize together, fine-tune with fake quantization, export."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on each rank
    images, labels = digits()
    loader = share_of(images[TEST_SAMPLES:], labels[TEST_SAMPLES:])
    accuracies: dict[str, float] = {}

    model = network()
    train(DistributedDataParallel(model), loader, EPOCHS, rate=2e-3)
    for statistics in model.buffers():  # batch norm statistics differ between ranks after the last step
        dist.broadcast(statistics, 0)
    accuracies["float"] = accuracy(model.eval(), images[:TEST_SAMPLES], labels[:TEST_SAMPLES])

    # Ranks take batches in turns: the plan is bit for bit that of a single process that reads all of them.
    batches = images[TEST_SAMPLES:].split(BATCH)
    own = [*itertools.islice(batches, dist.get_rank(), None, dist.get_world_size())]
    module = clika_compile(
        model,
        tracing_inputs=[images[:1], images[:2]],
        calibration_inputs=own,
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=0.05),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        distributed_training_settings=DISTRIBUTED_SETTINGS,
    )
    accuracies["quantized"] = accuracy(module, images[:TEST_SAMPLES], labels[:TEST_SAMPLES])

    trained = clika_distribute(module, DISTRIBUTED_SETTINGS, steps=len(loader))
    train(trained, loader, QAT_EPOCHS, rate=2e-4)
    trained.eval()
    accuracies["after QAT"] = accuracy(module, images[:TEST_SAMPLES], labels[:TEST_SAMPLES])

    print(f"rank {dist.get_rank()}: {len(own)} batches read, weights and scales {digest(module)}", flush=True)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        module.clika_export(path)
        rows = [(name, f"{100 * share:.2f} %") for name, share in accuracies.items()]
        print_table(["", "accuracy"], rows, title=f"\n  On {TEST_SAMPLES} handwritten test digits")
    dist.barrier()  # the other rank waits for the export; otherwise torchrun would report that it ended early
    dist.destroy_process_group()


def digits() -> tuple[Tensor, Tensor]:
    """Return images ``[n, 1, 8, 8]`` from 0 to 1 and labels ``[n]``, shuffled."""
    found: Any = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(found.target)[order]


def share_of(images: Tensor, labels: Tensor) -> DataLoader:
    """Return the training batches of this rank; all ranks have equally many."""
    data = TensorDataset(images, labels)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, drop_last=True), drop_last=True)


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


def train(model: nn.Module, loader: DataLoader, epochs: int, rate: float) -> None:
    """Train in an ordinary loop: DDP averages the gradients of all ranks at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    sampler: Any = loader.sampler  # a DistributedSampler: see share_of
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy, from 0 to 1."""
    return (model(images).argmax(1) == labels).float().mean().item()


def digest(module: ClikaModule) -> str:
    """Return the first 16 digits of a hash of all parameters."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "build/ddp_quantize.onnx"
    if "RANK" in os.environ:  # set by torchrun
        main(Path(path))
    else:
        torchrun(["--standalone", "--nproc-per-node", "2", __file__, path])
