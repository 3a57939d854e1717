"""Unread constants go, read ones and state stay."""

import torch

from clika_ref_cleanup.remove_unused_constants import RemoveUnusedConstants


def test_unread_constants_go(sketch):
    x = sketch.input(2)
    for name in ("read", "unread", "state"):
        sketch.constant(torch.ones(2), name)
    y = sketch("add", x, sketch.graph.constants["read"])
    sketch.graph.set_state("state", y)
    sketch.returns(y).clean(RemoveUnusedConstants())
    assert list(sketch.graph.constants) == ["read", "state"]
