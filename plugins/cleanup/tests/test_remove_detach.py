"""``detach`` and ``overwritten`` are removed from the lowered clone, never from the stored graph."""

import torch
from clika_ref_cleanup.plugin import clika_ref_passes
from clika_ref_cleanup.remove_dead_nodes import RemoveDeadNodes
from clika_ref_cleanup.remove_detach import RemoveDetach

from clika_ref.core.passes import Phase, Pipeline


def build_detached_graph(sketch):
    x = sketch("relu", sketch.input(2, 3))
    return sketch.returns(sketch("neg", sketch("detach", x)), x)


def test_remove_detach_detach_removed(sketch):
    """detach is removed from the lowered clone."""
    assert build_detached_graph(sketch).clean(RemoveDetach()) == ["relu", "neg"]


def test_remove_detach_overwritten_and_old_tensor_removed(sketch):
    """overwritten is removed together with the old tensor."""
    x = sketch.input(2, 3)
    made = sketch("overwritten", sketch("abs", x), sketch("exp", x))
    assert sketch.returns(sketch("neg", made)).clean(RemoveDetach(), RemoveDeadNodes()) == ["abs", "neg"]


def test_remove_detach_converting_overwritten_stays(sketch):
    """overwritten stays if it casts or expands the new tensor."""
    row, half, whole = sketch.input(3), sketch.input(2, 3, dtype=torch.float16), sketch.input(2, 3)
    made = [sketch("overwritten", new, whole) for new in (row, half, 2.0)]
    assert sketch.returns(*made).clean(RemoveDetach()) == ["overwritten"] * 3


def test_pipeline_clean_keeps_detach_in_stored_graph(sketch, operators):
    """The stored graph keeps detach."""
    passes = {p.name: p for p in clika_ref_passes()}
    Pipeline.of(passes, operators, Phase.CLEAN).run(build_detached_graph(sketch).graph)
    assert sketch.kinds == ["relu", "detach", "neg"]
