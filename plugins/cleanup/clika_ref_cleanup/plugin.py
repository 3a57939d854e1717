"""The plugin: all passes of this package with default options."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.core.hooks import hookimpl
from clika_ref.core.passes import Pass
from clika_ref_cleanup.addmm_to_linear import AddmmToLinear
from clika_ref_cleanup.distribute_loops import DistributeLoops
from clika_ref_cleanup.fold_batch_norm import FoldBatchNorm
from clika_ref_cleanup.fold_constants import FoldConstants, FoldLiterals
from clika_ref_cleanup.fold_padding import FoldPadding
from clika_ref_cleanup.merge_chains import MergeChains
from clika_ref_cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from clika_ref_cleanup.merge_equal_constants import MergeEqualConstants
from clika_ref_cleanup.mul_to_silu import MulToSilu
from clika_ref_cleanup.push_slices import PushSlices
from clika_ref_cleanup.push_transposes import PushTransposes
from clika_ref_cleanup.remove_dead_nodes import RemoveDeadNodes
from clika_ref_cleanup.remove_detach import RemoveDetach
from clika_ref_cleanup.remove_dropout import RemoveDropout
from clika_ref_cleanup.remove_identities import RemoveIdentities
from clika_ref_cleanup.split_recurrent_layers import SplitRecurrentLayers

CLIKA_REF_API = 1


@hookimpl
def clika_ref_passes() -> Sequence[Pass]:
    """Return the passes; `after` orders them."""
    return [
        AddmmToLinear(),
        DistributeLoops(),
        FoldBatchNorm(),
        FoldConstants(),
        FoldLiterals(),
        FoldPadding(),
        MergeChains(),
        MergeCommonSubexpressions(),
        MergeEqualConstants(),
        MulToSilu(),
        PushSlices(),
        PushTransposes(),
        RemoveDeadNodes(),
        RemoveDetach(),
        RemoveDropout(),
        RemoveIdentities(),
        SplitRecurrentLayers(),
    ]
