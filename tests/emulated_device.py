"""A device ``emulated``, with which a machine without a GPU finds device errors: ``pytest -p emulated_device``.

Its tensors lie in the memory of the CPU, whose kernels compute on them, but not together with tensors that were made
elsewhere: what mixes devices raises what it raises on a GPU. It is compiled on first use, which takes half a minute. A
process has it for good, with all that PyTorch then thinks of its accelerator, so that it gets a process of its own.
"""

import types
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "emulated"


def _make_device_module() -> types.ModuleType:
    """Return the module that PyTorch expects as ``torch.emulated``."""
    module = types.ModuleType(f"torch.{NAME}")
    answers = {"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0}
    answers |= {"_is_in_bad_fork": False, "get_amp_supported_dtype": [torch.bfloat16, torch.float16]}
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.manual_seed_all = lambda *_: None
    return module


def _deepcopy_tensor(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    """Copy deeply, without the copy of storages that PyTorch makes by way of a tensor of the CPU."""
    if tensor.device.type != NAME:
        return _copied_by_pytorch(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


torch.utils.rename_privateuse1_backend(NAME)
source = Path(__file__).with_suffix(".cpp")
cpp_extension.load(f"clika_ref_{NAME}_device", [str(source)], extra_cflags=["-O0", "-w"])
torch._register_device_module(NAME, _make_device_module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_copied_by_pytorch = torch.Tensor.__deepcopy__
torch.Tensor.__deepcopy__ = _deepcopy_tensor
