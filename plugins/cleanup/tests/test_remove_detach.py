"""``detach`` and ``overwritten`` go from the clone that is lowered, never from the stored graph."""

import torch
from clika_ref_cleanup.plugin import clika_ref_passes
from clika_ref_cleanup.remove_dead_nodes import RemoveDeadNodes
from clika_ref_cleanup.remove_detach import RemoveDetach

from clika_ref.core.passes import Phase, Pipeline


def detached(sketch):
    x = sketch("relu", sketch.input(2, 3))
    return sketch.returns(sketch("neg", sketch("detach", x)), x)


def test_detach_goes(sketch):
    assert detached(sketch).clean(RemoveDetach()) == ["relu", "neg"]


def test_overwritten_goes_with_what_was_there_before(sketch):
    x = sketch.input(2, 3)
    made = sketch("overwritten", sketch("abs", x), sketch("exp", x))
    assert sketch.returns(sketch("neg", made)).clean(RemoveDetach(), RemoveDeadNodes()) == ["abs", "neg"]


def test_overwritten_stays_where_it_converts_or_expands_what_is_written(sketch):
    row, half, whole = sketch.input(3), sketch.input(2, 3, dtype=torch.float16), sketch.input(2, 3)
    made = [sketch("overwritten", new, whole) for new in (row, half, 2.0)]
    assert sketch.returns(*made).clean(RemoveDetach()) == ["overwritten"] * 3


def test_the_stored_graph_keeps_it(sketch, operators):
    passes = {p.name: p for p in clika_ref_passes()}
    Pipeline.of(passes, operators, Phase.CLEAN).run(detached(sketch).graph)
    assert sketch.kinds == ["relu", "detach", "neg"]
