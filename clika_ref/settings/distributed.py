"""Settings for work in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.settings.validation import CheckedSettings, check_flag

ACCEPTED_DISTRIBUTED_SETTINGS = (
    "a DistributedTrainingSettings, such as DistributedTrainingSettings(multi_gpu=True), or None"
)
"""Accepted values of arguments that take distributed settings, for messages."""


@dataclass
class DistributedTrainingSettings(CheckedSettings):
    """Whether several processes work on one model. Fields may be assigned later; each value is checked on assignment.

    Raises:
        ModelError: a value has the wrong type, or contradicts another one.
    """

    multi_gpu: bool = False
    """The processes of ``torch.distributed`` quantize together: each reads its own data, and all get the same plan."""

    use_sharding: bool = False
    """Shard weights, gradients and optimizer state over the processes (FSDP), instead of replicating them (DDP)."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {"multi_gpu": check_flag, "use_sharding": check_flag}

    def _find_contradiction(self) -> str:
        if self.use_sharding and not self.multi_gpu:
            return "use_sharding=True needs several processes, but multi_gpu is False. Set multi_gpu=True."
        return ""
