"""Tracers: what they call, and the functions of them that a trace replaces.

A tuple of an owner and a name is what `clika_ref.capture.patching.patch_attributes` replaces.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import torch.export._trace  # else torch imports it, and creates its logger, during the first trace
from torch import _meta_registrations, fx
from torch._C._autograd import _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._dynamo import config as dynamo_config  # imported by torch.export._trace
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._functorch import apis, eager_transforms, predispatch
from torch._functorch import vmap as torch_vmap
from torch._guards import SLoc as SLoc
from torch._guards import tracing as tracing
from torch._library.fake_impl import FakeImplCtx
from torch._ops import _pop_mode_from_pre_dispatch, _set_mode_pre_dispatch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.experimental.proxy_tensor import _temp_remove_pre_dispatch_torch_function_mode, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import DimConstraints, ShapeEnv
from torch.fx.proxy import TracerBase
from torch.utils._thunk import Thunk

NON_STRICT_HANDLER = _NonStrictTorchFunctionHandler
"""Sees each call of a model that ``torch.export`` traces by running it."""

MAKE_DATA_DEPENDENT_ERROR = (ShapeEnv, "_make_data_dependent_error")
"""Makes the error about an unknown value."""

GET_STACK_SUMMARY = (ShapeEnv, "_get_stack_summary")
"""Makes the location of a guard."""

SOLVE_CONSTRAINTS = (DimConstraints, "solve")
"""Simplifies the guards of a trace, for suggestions of other dynamic shapes."""

FILTER_TRACEBACK_FRAMES = (TracerBase, "_filter_traceback_frames")
"""Selects the lines that a traced call comes from."""

FIND_FIRST_MODE_CHANGE = (replace_set_grad_with_hop_pass, "nodes_first")
"""Finds the call that starts a region without gradients."""

APPLY_AUTOGRAD_FUNCTION = (_SingleLevelFunction, "apply")
"""Calls the forward of a ``torch.autograd.Function``."""

REMOVE_BATCH_DIM = (torch_vmap, "_remove_batch_dim")
"""Ends a region of ``torch.vmap`` for one tensor."""

pop_pre_dispatch_mode, push_pre_dispatch_mode = _pop_mode_from_pre_dispatch, _set_mode_pre_dispatch
"""Stop and continue recording the calls that a model makes itself, before autograd."""

pause_pre_dispatch_functions = _temp_remove_pre_dispatch_torch_function_mode
"""A context in which a trace records no Python functions, such as those that enter a region of ``torch.vmap``."""

find_proxy_mode = get_proxy_mode
"""Returns the mode that records the calls of a trace; None outside a trace."""


def make_proxy(tracked: Any) -> fx.Proxy:
    """Return the proxy of a traced number, which a trace makes when it is first needed."""
    return tracked.force() if isinstance(tracked, Thunk) else tracked


pop_saved_tensors_hooks, push_saved_tensors_hooks = _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks
"""Stop and continue to call hooks of saved tensors."""

FUNCTION_TRANSFORMS = (
    (apis, "vmap_impl"),
    (apis, "_chunked_vmap"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
)
"""The functions that call the argument of a transform of ``torch.func`` at a new level."""

VECTOR_JACOBIAN_PRODUCT = (eager_transforms, "_vjp_with_argnums")
"""The transform that returns a function, which computes the derivatives."""

COUNT_POOLING_WINDOWS = (_meta_registrations, "pooling_output_shape_pad_lr")
COMPUTE_FFT_STRIDES = (_meta_registrations, "_exec_fft")
SORT_FFT_DIMS = (_meta_registrations, "_sort_dims")
"""Functions of fake tensors that fix sizes."""

CREATE_UNBACKED_SIZE = (FakeImplCtx, "create_unbacked_symint")
"""Makes the data-dependent size of a custom operator; deprecated for ``new_dynamic_size``, it assumes at least 2."""

VALIDATE_DISTRIBUTIONS = (torch.distributions.Distribution, "_validate_args")
"""Whether distributions check their arguments by default."""

FAKE_TENSOR_CONFIG: Any = dynamo_config  # PyTorch replaces the type of this module on import
"""The configuration of fake tensors, whose ``fake_tensor_cache_enabled`` keeps the result of each call."""

ENTER_AUTOCAST, EXIT_AUTOCAST = _enter_autocast, _exit_autocast
"""The calls around a region of autocast in a graph."""

ENTER_INFERENCE_MODE, EXIT_INFERENCE_MODE = _enter_inference_mode, _exit_inference_mode
"""The calls around a region of inference mode in a graph of Dynamo."""

ENTER_VMAP, EXIT_VMAP = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
"""The calls around a region of ``torch.vmap``; regions may be nested."""

ADD_BATCH_DIM, MAKE_BATCH_DIM = predispatch._add_batch_dim, predispatch._remove_batch_dim
"""The calls that give a tensor a batch dim of a nesting level, and that make it a dim again."""

PREPARE_VMAP = predispatch.lazy_load_decompositions
"""A call before each region of ``torch.vmap``, without a result."""

_variable_functions: Any = torch._C._VariableFunctions

PACK_PADDED_SEQUENCE = _variable_functions._pack_padded_sequence
PAD_PACKED_SEQUENCE = _variable_functions._pad_packed_sequence
"""The functions that ``torch.nn.utils.rnn`` calls."""

RECURRENT_FUNCTIONS = tuple(getattr(_variable_functions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""The functions that recurrent networks of ``torch.nn`` call."""


def get_autograd_function(node: Any) -> type:
    """Return the ``torch.autograd.Function`` whose backward a node of an autograd graph is."""
    return type(node)._forward_cls
