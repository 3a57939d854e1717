"""The processes that work on one model: what one says, all hear, and where one fails, all end with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.distributed_settings import WANTED, DistributedTrainingSettings
from clika_ref.saving.extra_state import read_extra_state, write_extra_state

Message = tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""A document that JSON can hold, and tensors. Nothing of it is executed where it arrives."""

STARTED = (
    "start each process with torchrun (torchrun --nproc-per-node 2 train.py), and call "
    "torch.distributed.init_process_group() before clika-ref is asked for anything"
)

UNASKED = (
    "{} processes run, of which each quantizes by its own data: their plans need not be the same. Pass "
    "distributed_training_settings=DistributedTrainingSettings(multi_gpu=True) in each of them to quantize together"
)


class FailedElsewhereError(ModelError):
    """Raised on each rank that did not fail itself, with the reason of the one that did."""


@dataclass(frozen=True)
class Ranks:
    """The processes that work on one model, of which this is one; by itself, as it comes."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """A process group of the backend gloo, in which tensors of the CPU travel; None where this process is alone."""

    @property
    def are_several(self) -> bool:
        """Whether there is another process."""
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """Whether this one decides for all."""
        return self.rank == 0

    def told_by_all(self, message: Message) -> list[Message]:
        """Return what each rank says, by ranks; all call it.

        Raises:
            FailedElsewhereError: another rank has failed since.
            ModelError: another rank has ended, or does not answer.
        """
        if not self.are_several:
            return [message]
        return [read_extra_state(said) for said in self._meet(write_extra_state(*message))]

    def told_by_first(self, make: Callable[[], Message]) -> Message:
        """Return what the first rank makes, which others wait for; all call it.

        Raises:
            FailedElsewhereError: another rank has failed since.
            ModelError: another rank has ended, or does not answer.
        """
        if not self.are_several:
            return make()
        said = self._meet(write_extra_state(*make()) if self.is_first else _nothing())
        return read_extra_state(said[0])

    def summed(self, counts: Tensor) -> Tensor:
        """Return integers of the CPU, ``int64[...]`` of one shape on all ranks, summed over these; all call it."""
        if self.are_several and counts.numel():
            self._meet(_nothing())  # a rank that has failed since says so here, and no sum waits for it
            with _explaining():
                dist.all_reduce(counts, group=self.group)
        return counts

    def tell(self, error: Exception) -> None:
        """Let the other ranks know why this one fails, wherever they next say something."""
        self._meet(_nothing(), f"{type(error).__name__}: {error}")

    def part(self) -> None:
        """Go on by oneself, once all have come so far."""
        if self.are_several:
            self._meet(_nothing())

    def _meet(self, message: Tensor, failure: str | None = None) -> list[Tensor]:
        """Return the bytes that each rank says; where one tells of a failure instead, raise that.

        There is no other way to say anything, so that a rank which fails meets the others wherever they are.
        """
        own = message if failure is None else torch.tensor(list(failure.encode()), dtype=torch.uint8)
        with _explaining():
            # Names the ranks that have ended or hang, which a collective does not.
            dist.monitored_barrier(self.group, timeout=_timeout(), wait_all_ranks=True)
            heads = [torch.zeros(2, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(heads, torch.tensor([len(own), int(failure is not None)]), group=self.group)
            failed = [rank for rank, head in enumerate(heads) if head[1]]
            said = [
                self._said(rank, int(head[0]), own) if not failed or rank in failed else _nothing()
                for rank, head in enumerate(heads)
            ]
        if failed and failure is None:
            raise FailedElsewhereError(self._reasons({rank: said[rank] for rank in failed}))
        return said

    def _said(self, rank: int, size: int, own: Tensor) -> Tensor:
        """Return what one rank says; its size alone travels where it is nothing."""
        said = own if rank == self.rank else torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(said, src=rank, group=self.group)
        return said

    def _reasons(self, said: Mapping[int, Tensor]) -> str:
        texts = {rank: bytes(text.tolist()).decode(errors="replace") for rank, text in said.items()}
        return "; ".join(f"rank {rank} of {self.count} failed, so that all end: {text}" for rank, text in texts.items())


ALONE = Ranks()
"""One process, which tells nobody anything."""


@contextlib.contextmanager
def working_together(settings: DistributedTrainingSettings | None) -> Iterator[Ranks]:
    """Yield the processes that work on one model; where one leaves with an error, all do, with its reason.

    Raises:
        ModelError: these are no such settings; several are to work, and ``torch.distributed`` knows of none; or another
            one failed or ended.
    """
    if settings is not None and not isinstance(settings, DistributedTrainingSettings):
        msg = f"distributed_training_settings is {settings!r}, a {type(settings).__name__}; it takes {WANTED}"
        raise ModelError(msg)
    if settings is None or not settings.multi_gpu:
        yield ALONE
        return
    if not (dist.is_available() and dist.is_initialized()):
        msg = f"multi_gpu=True lets several processes work on one model, and there is no process group: {STARTED}"
        raise ModelError(msg)
    group: Any = dist.new_group(backend="gloo", timeout=_timeout())
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group)
    try:
        yield ranks
    except FailedElsewhereError:
        raise
    except Exception as error:
        if not isinstance(error, _LostError):
            with contextlib.suppress(_LostError):  # its own reason says more than that nobody is there to hear it
                ranks.tell(error)
        raise
    else:
        ranks.part()
    finally:
        dist.destroy_process_group(group)


def unasked() -> str:
    """Return what to warn of where several processes run and were not told to work together; nothing elsewhere."""
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return UNASKED.format(dist.get_world_size()) if is_one_of_several else ""


class _LostError(ModelError):
    """Another process has ended, or does not answer."""


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what collectives raise
        msg = (
            f"another process has ended or does not answer, so that this one ends too: {error}. What it wrote last "
            "says why; init_process_group(timeout=...) says how long to wait for one that is slow"
        )
        raise _LostError(msg) from error


def _timeout() -> timedelta:
    """Return how long the process group that the user made waits for a rank."""
    group = dist.distributed_c10d._get_default_group()
    found = [group._get_backend(device).options._timeout for device in group._device_types]
    return max(found)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def hold_those_of_first(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Let tensors hold the elements that those of the same names hold on the first rank; all call it.

    One that has other sides there keeps its own: that the ranks work on different models, others tell.
    """
    if not ranks.are_several:
        return
    _, said = ranks.told_by_first(lambda: ({}, {name: x.detach().clone() for name, x in tensors.items()}))
    with torch.no_grad():
        for name, x in tensors.items():
            if name in said and said[name].shape == x.shape:
                x.copy_(said[name])
