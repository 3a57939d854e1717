"""Communication between the processes that work on one model; if one fails, all end with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.serialization.container import read_extra_state, write_extra_state
from clika_ref.settings.distributed import ACCEPTED_DISTRIBUTED_SETTINGS, DistributedTrainingSettings
from clika_ref.torch_internals.processes import read_timeout

Message = tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""A document that JSON can hold, and tensors. The receiver executes nothing of it."""

START_HINT = (
    "Start each process with torchrun (torchrun --nproc-per-node 2 train.py), and call "
    "torch.distributed.init_process_group() before you use clika-ref."
)

SEPARATE_PROCESSES_WARNING = (
    "{} processes are running, and each quantizes with its own data, so their plans may differ. To quantize "
    "together, pass distributed_training_settings=DistributedTrainingSettings(multi_gpu=True) in each process."
)


class RemoteFailureError(ModelError):
    """Raised on each rank that did not fail itself, with the reason of the one that did."""


@dataclass(frozen=True)
class Ranks:
    """The processes that work on one model; by default, this process alone."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """A gloo process group, for CPU tensors; None for a single process."""

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides for all."""
        return self.rank == 0

    def gather_messages(self, message: Message) -> list[Message]:
        """All-gather messages, ordered by rank; all ranks call it.

        Raises:
            RemoteFailureError: another rank has failed since.
            ModelError: another rank has ended, or does not answer.
        """
        if not self.is_distributed:
            return [message]
        return [read_extra_state(messages) for messages in self._exchange_bytes(write_extra_state(*message))]

    def broadcast_message(self, make: Callable[[], Message]) -> Message:
        """Broadcast a message that rank 0 creates; all ranks call it.

        Raises:
            RemoteFailureError: another rank has failed since.
            ModelError: another rank has ended, or does not answer.
        """
        if not self.is_distributed:
            return make()
        messages = self._exchange_bytes(write_extra_state(*make()) if self.is_first else _empty_message())
        return read_extra_state(messages[0])

    def sum_counts(self, counts: Tensor) -> Tensor:
        """All-reduce integers by sum: ``int64[...]`` on the CPU, of one shape on all ranks; all ranks call it."""
        if self.is_distributed and counts.numel():
            # A rank that has failed since reports it here, so that the sum does not wait for it.
            self._exchange_bytes(_empty_message())
            with _translate_errors():
                dist.all_reduce(counts, group=self.group)
        return counts

    def report_failure(self, error: Exception) -> None:
        """Report the failure of this rank to the others, at their next communication."""
        self._exchange_bytes(_empty_message(), f"{type(error).__name__}: {error}")

    def part(self) -> None:
        """Wait until all ranks have finished the common work."""
        if self.is_distributed:
            self._exchange_bytes(_empty_message())

    def _exchange_bytes(self, message: Tensor, failure: str | None = None) -> list[Tensor]:
        """Exchange messages of bytes; raise an error if another rank reports a failure.

        All communication goes through this method, so that the others notice a failed rank at their next message.
        """
        own = message if failure is None else torch.tensor(list(failure.encode()), dtype=torch.uint8)
        with _translate_errors():
            # Names the ranks that have ended or hang, unlike a collective.
            dist.monitored_barrier(self.group, timeout=read_timeout(), wait_all_ranks=True)
            heads = [torch.zeros(2, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(heads, torch.tensor([len(own), int(failure is not None)]), group=self.group)
            failed = [rank for rank, head in enumerate(heads) if head[1]]
            messages = [
                self._broadcast_bytes(rank, int(head[0]), own) if not failed or rank in failed else _empty_message()
                for rank, head in enumerate(heads)
            ]
        if failed and failure is None:
            raise RemoteFailureError(self._failure_reasons({rank: messages[rank] for rank in failed}))
        return messages

    def _broadcast_bytes(self, rank: int, size: int, own: Tensor) -> Tensor:
        """Broadcast the bytes of one rank; an empty message needs no transfer."""
        messages = own if rank == self.rank else torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(messages, src=rank, group=self.group)
        return messages

    def _failure_reasons(self, messages: Mapping[int, Tensor]) -> str:
        texts = {rank: bytes(text.tolist()).decode(errors="replace") for rank, text in messages.items()}
        return "; ".join(
            f"rank {rank} of {self.count} failed, so all ranks stop: {text}" for rank, text in texts.items()
        )


SINGLE_PROCESS = Ranks()
"""A single process without communication."""


@contextlib.contextmanager
def open_ranks(settings: DistributedTrainingSettings | None) -> Iterator[Ranks]:
    """Yield the processes that work on one model; if one leaves the block with an error, all do, with its reason.

    Raises:
        ModelError: the settings have the wrong type; several processes are requested, but ``torch.distributed`` is not
            initialized; or another process failed or ended.
    """
    if settings is not None and not isinstance(settings, DistributedTrainingSettings):
        raise ModelError(
            f"distributed_training_settings is {settings!r}, a {type(settings).__name__}. Pass "
            f"{ACCEPTED_DISTRIBUTED_SETTINGS}."
        )
    if settings is None or not settings.multi_gpu:
        yield SINGLE_PROCESS
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise ModelError(f"multi_gpu=True needs a process group, and there is none. {START_HINT}")
    group: Any = dist.new_group(backend="gloo", timeout=read_timeout())
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group)
    try:
        yield ranks
    except (RemoteFailureError, _LostProcessError):
        raise
    except Exception as error:
        with contextlib.suppress(_LostProcessError):  # this error is more useful than the lost connection
            ranks.report_failure(error)
        raise
    else:
        ranks.part()
    finally:
        dist.destroy_process_group(group)


def find_separate_processes() -> str:
    """Return a warning if several processes run without settings to work together, empty otherwise."""
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return SEPARATE_PROCESSES_WARNING.format(dist.get_world_size()) if is_one_of_several else ""


class _LostProcessError(ModelError):
    """Another process has ended, or does not answer."""


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # raised by collectives
        raise _LostProcessError(
            f"another process has ended or does not respond, so this one stops too: {error}. See its last output for "
            "the cause; init_process_group(timeout=...) sets how long to wait for a slow process."
        ) from error


def _empty_message() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def broadcast_from_rank0(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Broadcast the elements of tensors from rank 0, by name; all ranks call it.

    Tensors of another shape than on rank 0 are skipped: other checks report that the models differ.
    """
    if not ranks.is_distributed:
        return
    _, messages = ranks.broadcast_message(lambda: ({}, {name: x.detach().clone() for name, x in tensors.items()}))
    with torch.no_grad():
        for name, x in tensors.items():
            if name in messages and messages[name].shape == x.shape:
                x.copy_(messages[name])
