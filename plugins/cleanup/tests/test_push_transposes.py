"""Permutes are moved and cancelled if that reduces their number, and stay otherwise."""

import pytest
import torch
from clika_ref_cleanup.plugin import clika_ref_passes
from clika_ref_cleanup.push_transposes import PushTransposes, _RegionRewriter
from pass_sketches import noise

from clika_ref.core.passes import Phase, Pipeline

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # channels last, channels first: inverse to each other


def add_permute(sketch, x, dims=LAST):
    return sketch("permute", x, dims=dims)


@pytest.mark.parametrize(
    "calls",
    [
        [("relu", {})],
        [("exp", {}), ("neg", {}), ("to", {"dtype": torch.float16})],
        [("softmax", {"dim": -1})],
        [("mean", {"dim": (1, 2), "keepdim": True})],
        [("slice", {"dim": 3, "start": 1, "end": 9}), ("roll", {"shifts": (1, -1), "dims": (1, -2)})],
    ],
    ids=str,
)
def test_push_transposes_pair_cancels_across_elementwise(sketch, calls):
    """A pair cancels across nodes that compute the same in any order of dims."""
    y = add_permute(sketch, sketch.input(2, 3, 4, 5))
    for kind, attrs in calls:
        y = sketch(kind, y, **attrs)
    sketch.returns(sketch("unsqueeze", add_permute(sketch, y, FIRST), dim=0))
    assert sketch.clean(PushTransposes()) == [*(kind for kind, _ in calls), "unsqueeze"]


def test_push_transposes_dynamic_dims_follow(sketch):
    """Dynamic dims follow."""
    y = sketch("relu", add_permute(sketch, sketch.input("b", 3, "h", "w")))
    sketch.returns(sketch("cat", add_permute(sketch, y, FIRST), sketch.input("b", 2, "h", "w", name="y"), dim=1))
    assert sketch.clean(PushTransposes(), sizes={"b": 2, "h": 4, "w": 5}) == ["relu", "cat"]


def test_push_transposes_single_permute_stays(sketch):
    """A single permute stays."""
    sketch.returns(
        sketch("conv2d", sketch("relu", add_permute(sketch, sketch.input(2, 3, 4, 5))), add_weight(sketch), None)
    )
    assert sketch.clean(PushTransposes()) == ["permute", "relu", "conv2d"]


def add_weight(sketch):
    return sketch.constant(torch.randn(2, 4, 1, 1))


def test_push_transposes_other_permutes_merge(sketch):
    """Permutes that are not inverse merge."""
    y = sketch("relu", sketch("permute", sketch.input(2, 3, 4), dims=(1, 2, 0)))
    sketch.returns(sketch("linear", sketch("permute", y, dims=(0, 2, 1)), sketch.constant(torch.randn(5, 4))))
    assert sketch.clean(PushTransposes()) == ["relu", "permute", "linear"]


def test_push_transposes_equal_operand_permutes_merge(sketch):
    """Two operands with the same permute share one permute."""
    x, y = (add_permute(sketch, sketch.input(2, 3, 4, 5, name=n)) for n in "xy")
    sketch.returns(sketch("softmax", sketch("reshape", sketch("add", x, y), shape=(2, 60)), dim=1))
    assert sketch.clean(PushTransposes()) == ["add", "permute", "reshape", "softmax"]


def test_push_transposes_different_operand_permutes_stay(sketch):
    """Two operands with different permutes stay."""
    x, y = sketch.input(2, 3, 3, 3, name="x"), sketch.input(2, 3, 3, 3, name="y")
    z = sketch("add", add_permute(sketch, x), add_permute(sketch, y, FIRST))
    sketch.returns(sketch("reshape", z, shape=(54,)))
    assert sketch.clean(PushTransposes()) == ["permute", "permute", "add", "reshape"]


def test_push_transposes_entry_in_other_order_permuted(sketch):
    """An operand in another order gets a permute."""
    alike = [sketch("permute", sketch.input(2, 3, 4, name=n), dims=(1, 2, 0)) for n in "xy"]
    other = sketch("permute", sketch.input(3, 2, 4, name="z"), dims=(0, 2, 1))
    sketch.returns(sketch("reshape", sketch("add", sketch("add", *alike), other), shape=(24,)))
    assert sketch.clean(PushTransposes()) == ["add", "permute", "add", "permute", "reshape"]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 3), (4, 1, 3), (2, 4, 5, 3)], ids=str)
def test_push_transposes_constants_permuted(sketch, shape):
    """Constants are permuted in advance."""
    c = sketch.constant(torch.randn(shape))
    y = sketch("add", sketch("mul", add_permute(sketch, sketch.input(2, 3, 4, 5)), c), 1.0)
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(120,)))
    assert sketch.clean(PushTransposes()) == ["mul", "add", "reshape"]


def test_push_transposes_large_shared_constant_gets_permute(sketch):
    """A large constant with other users counts as a permute."""
    c = sketch.constant(torch.randn(3, 3, 3, 3))
    y = sketch("mul", add_permute(sketch, sketch.input(3, 3, 3, 3)), c)
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(81,)), sketch("neg", c))
    assert sketch.clean(PushTransposes(limit_bytes=8)) == ["permute", "mul", "reshape", "neg"]


def test_push_transposes_large_low_rank_constant_stops(sketch):
    """A large constant of lower rank with other users stops the pass."""
    c = sketch.constant(torch.randn(3))
    y = sketch("mul", add_permute(sketch, sketch.input(3, 3, 3, 3)), c)
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(81,)), sketch("neg", c))
    assert sketch.clean(PushTransposes(limit_bytes=8)) == ["permute", "mul", "permute", "reshape", "neg"]


def test_push_transposes_overwritten_constant_stays(sketch):
    """Constants that a call overwrites stay."""
    c = sketch.constant(torch.randn(3), "count")
    y = sketch("mul", add_permute(sketch, sketch.input(3, 3, 3, 3)), c)
    sketch.graph.set_state("count", sketch("neg", c))
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(81,)))
    assert sketch.clean(PushTransposes()) == ["permute", "mul", "neg", "permute", "reshape"]


def test_push_transposes_low_rank_operand_stops(sketch):
    """An operand of lower rank stops the pass."""
    y = sketch("mul", add_permute(sketch, sketch.input(3, 3, 3, 3)), sketch.input(3, name="y"))
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(81,)))
    assert sketch.clean(PushTransposes()) == ["permute", "mul", "permute", "reshape"]


def test_push_transposes_scalar_operand_unchanged(sketch):
    """An operand of rank 0 follows unchanged."""
    y = sketch("mul", add_permute(sketch, sketch.input(3, 3, 3, 3)), sketch("neg", sketch.input(name="y")))
    sketch.returns(sketch("reshape", add_permute(sketch, y, FIRST), shape=(81,)))
    assert sketch.clean(PushTransposes()) == ["neg", "mul", "reshape"]


def test_push_transposes_broadcast_operand_gets_permute(sketch):
    """A broadcast operand of equal rank gets its own permute."""
    x, y = add_permute(sketch, sketch.input(2, 3, 4, 5)), sketch.input(1, 4, 1, 3, name="y")
    sketch.returns(sketch("reshape", add_permute(sketch, sketch("mul", x, y), FIRST), shape=(120,)))
    assert sketch.clean(PushTransposes()) == ["permute", "mul", "reshape"]


def test_push_transposes_interior_may_have_other_users(sketch):
    """Interior nodes may be outputs or have other users."""
    a = add_permute(sketch, sketch.input(2, 3, 4, 5))
    b = sketch("relu", a)
    c = add_permute(sketch, b, FIRST)
    sketch.returns(b, c, sketch("reshape", add_permute(sketch, sketch("exp", b), FIRST), shape=(120,)))
    # One permute at the entry and two at exits make way for the one that returns `b`.
    assert sketch.clean(PushTransposes()) == ["relu", "permute", "exp", "reshape"]


def test_push_transposes_permute_with_other_users_stays(sketch):
    """A permute with other users is not saved."""
    a = add_permute(sketch, sketch.input(2, 3, 4, 5))
    sketch.returns(sketch("reshape", sketch("relu", a), shape=(120,)), a)
    assert sketch.clean(PushTransposes()) == ["permute", "relu", "reshape"]


def test_push_transposes_kept_permute_causes_no_change(sketch):
    """A permute that stays for other users is no reason to change the graph."""
    a = add_permute(sketch, sketch.input(2, 3, 4, 5))
    sketch.returns(sketch("reshape", add_permute(sketch, sketch("relu", a)), shape=(120,)), a)
    revision = sketch.graph.revision
    sketch.clean(PushTransposes())
    assert sketch.graph.revision == revision


def test_push_transposes_users_move_if_only_joint_gain(sketch):
    """Users of one permute move together even if none would alone."""
    a = add_permute(sketch, sketch.input(2, 3, 4, 5))
    ends = [
        sketch("reshape", add_permute(sketch, sketch(kind, a), dims), shape=(120,))
        for kind, dims in (("exp", LAST), ("neg", (0, 1, 3, 2)))
    ]
    assert sketch.returns(*ends).clean(PushTransposes()).count("permute") == 2


def test_push_transposes_two_returned_permutes_keep_names(sketch):
    """Two returned permutes keep two names."""
    y = sketch("relu", add_permute(sketch, sketch.input(2, 3, 4, 5)))
    sketch.returns(add_permute(sketch, y, FIRST), add_permute(sketch, y, FIRST))
    # Of three permutes one goes at the entry and one at an exit; the second name takes one there and one back.
    assert sketch.clean(PushTransposes()) == ["relu", "permute", "permute"]


def test_push_transposes_returned_twins_cause_no_change(sketch):
    """Equal returned permutes alone are no reason to change the graph."""
    y = sketch("relu", sketch.input(2, 3, 4, 5))
    sketch.returns(add_permute(sketch, y), add_permute(sketch, y))
    assert sketch.clean(PushTransposes()) == ["relu", "permute", "permute"]


def test_push_transposes_users_of_one_permute_move_together(sketch):
    """Users of one permute move together."""
    a = add_permute(sketch, sketch.input(2, 3, 4, 5))
    ends = [sketch("reshape", add_permute(sketch, sketch(kind, a), FIRST), shape=(120,)) for kind in ("exp", "neg")]
    assert sketch.returns(*ends).clean(PushTransposes()).count("permute") == 0


def test_push_transposes_random_and_index_dependent_stop(sketch):
    """Random nodes and functions of indices stop the pass."""
    for kind in (noise, sketch.build.operators["triu"]):
        y = add_permute(sketch, sketch(kind, add_permute(sketch, sketch.input(3, 3, 3, 3))), FIRST)
        sketch.returns(sketch("reshape", y, shape=(81,)))
    assert sketch.clean(PushTransposes()).count("permute") == 4


def build_sequence_first_layers(sketch, dims):
    """Return layer norm and a linear layer between a permute and its inverse."""
    x = sketch("permute", sketch.input(3, 3, 3), dims=dims)
    y = sketch("layer_norm", x, sketch.constant(torch.randn(3)), None, normalized_shape=(3,))
    y = sketch(
        "gelu", sketch("linear", y, sketch.constant(torch.randn(5, 3), "w"), sketch.constant(torch.randn(5), "b"))
    )
    return sketch.returns(sketch("reshape", sketch("permute", y, dims=dims), shape=(45,)))


def test_push_transposes_last_dim_layers_pass_other_orders(sketch):
    """Layers on the last dim let orders of the other dims pass."""
    left = ["layer_norm", "linear", "gelu", "reshape"]
    assert build_sequence_first_layers(sketch, (1, 0, 2)).clean(PushTransposes()) == left


def test_push_transposes_last_dim_layers_stop_its_orders(sketch):
    """Layers on the last dim stop orders that move it."""
    assert build_sequence_first_layers(sketch, (0, 2, 1)).clean(PushTransposes()).count("permute") == 2


@pytest.mark.parametrize(
    ("dim", "keepdim", "left"),
    [
        ((1, 2), False, ["mean"]),
        ((-1,), False, ["mean"]),
        ((0, 3), False, ["mean"]),
        ((0,), False, ["permute", "mean"]),
        (None, False, ["permute", "mean"]),
    ],
)
def test_push_transposes_reduction_absorbs_permute(sketch, dim, keepdim, left):
    """A reduction absorbs the permute if the remaining dims keep their order."""
    y = sketch("mean", add_permute(sketch, sketch.input(2, 3, 4, 5)), dim=dim, keepdim=keepdim)
    assert sketch.returns(y).clean(PushTransposes()) == left


def build_window_attention(sketch, heads=2, width=8, window=2, length=4):
    """Return one block of window attention on ``[b, c, h, w]`` as Swin writes it, with its no-op steps."""
    tokens, count = window * window, length // window
    x = sketch.input(2, width, length, length)
    residual = sketch("add", add_permute(sketch, x), sketch("neg", add_permute(sketch, sketch("tanh", x))))
    y = sketch("layer_norm", residual, None, None, normalized_shape=(width,))
    y = sketch("roll", sketch("slice", y, dim=1, start=0, end=length), shifts=(0, 0), dims=(1, 2))
    y = sketch("permute", sketch("reshape", y, shape=(2, count, window, count, window, width)), dims=(0, 1, 3, 2, 4, 5))
    y = sketch("reshape", sketch("identity", y), shape=(2 * count**2, tokens, width))
    qkv = sketch("linear", y, sketch.constant(torch.randn(3 * width, width), "qkv"))
    qkv = sketch("permute", sketch("reshape", qkv, shape=(8, tokens, 3, heads, width // heads)), dims=(2, 0, 3, 1, 4))
    q, k, v = (sketch("select", qkv, dim=0, index=i) for i in range(3))
    scores = sketch("matmul", sketch("mul", q, 0.5), sketch("permute", k, dims=(0, 1, 3, 2)))
    table = sketch(
        "index", sketch.constant(torch.randn(9, heads), "table"), sketch.constant(torch.arange(16) % 9, "at")
    )
    bias = sketch("permute", sketch("reshape", table, shape=(tokens, tokens, heads)), dims=(2, 0, 1))
    scores = sketch("softmax", sketch("add", scores, sketch("unsqueeze", bias, dim=0)), dim=-1)
    y = sketch("permute", sketch("matmul", sketch("dropout", scores, p=0.0, train=False), v), dims=(0, 2, 1, 3))
    y = sketch(
        "linear", sketch("reshape", y, shape=(8, tokens, width)), sketch.constant(torch.randn(width, width), "o")
    )
    y = sketch("reshape", sketch("dropout", y, p=0.0, train=False), shape=(2, count, count, window, window, width))
    y = sketch("reshape", sketch("permute", y, dims=(0, 1, 3, 2, 4, 5)), shape=(2, length, length, width))
    y = sketch("add", sketch("slice", y, dim=2, start=0, end=length), residual)
    return sketch.returns(sketch("mean", add_permute(sketch, y, FIRST), dim=(2, 3)))


def test_pipeline_window_attention_removes_idle_nodes(sketch, operators):
    """Window attention loses its idle nodes and two permutes."""
    graph = build_window_attention(sketch).graph
    passes = {p.name: p for p in clika_ref_passes()}
    inputs = [torch.randn(2, 8, 4, 4)]
    Pipeline.of(passes, operators, Phase.CLEAN, check_inputs=inputs).run(graph)
    assert not {"dropout", "identity", "roll", "slice"} & set(sketch.kinds)
    assert sketch.kinds.count("permute") == 9
    Pipeline.of(passes, operators, Phase.FUSE, check_inputs=inputs).run(graph)
    assert sketch.kinds.count("permute") == 7
    assert "index" not in sketch.kinds


def test_push_transposes_consecutive_permutes_in_one_run(sketch):
    """Consecutive permutes are both pushed in one run."""
    halves = sketch("glu", sketch.constant(torch.randn(5, 4)), dim=1)
    swapped = sketch("permute", sketch("permute", halves, dims=(1, 0)), dims=(1, 0))
    assert sketch.returns(swapped).clean(PushTransposes()) == ["glu"]


@pytest.fixture
def _fail_without_progress(monkeypatch):
    """Fail at the first rewrite that removes no permute: with such rewrites the pass might never end."""
    improve = _RegionRewriter.improve

    def improve_or_fail(pushing, nodes):
        count, revision = count_permutes(pushing.graph), pushing.graph.revision
        improve(pushing, nodes)
        assert pushing.graph.revision == revision or count_permutes(pushing.graph) < count

    monkeypatch.setattr(_RegionRewriter, "improve", improve_or_fail)


def count_permutes(graph):
    return sum(node.op_type == "permute" for node in graph.nodes)


@pytest.mark.usefixtures("_fail_without_progress")
@pytest.mark.parametrize(("op", "dims"), [("sub", (0, 1, 3, 2)), ("add", (0, 3, 2, 1)), ("add", (0, 2, 1))])
@pytest.mark.parametrize(
    "end", [("neg", {}), ("sum", {"dim": (2,)}), ("unsqueeze", {"dim": 0})], ids=lambda end: end[0]
)
def test_push_transposes_self_permute_with_no_gain_stays(sketch, op, dims, end):
    """A permute from a region into itself is saved in no order."""
    kind, attrs = end
    h = sketch("relu", sketch.input(*[4] * len(dims)))
    g = sketch("relu", sketch(op, h, sketch("permute", h, dims=dims)))
    sketch.returns(sketch("permute", g, dims=dims), sketch(kind, g, **attrs))
    assert sketch.clean(PushTransposes()).count("permute") == 2


@pytest.mark.usefixtures("_fail_without_progress")
def test_push_transposes_self_permute_follows_region(sketch):
    """A permute from a region into itself follows the region."""
    h = sketch("relu", add_permute(sketch, sketch.input(3, 3, 3, 3)))
    g = sketch("add", h, add_permute(sketch, h, (0, 2, 1, 3)))
    sketch.returns(sketch("reshape", add_permute(sketch, g, FIRST), shape=(81,)))
    assert sketch.clean(PushTransposes()) == ["relu", "permute", "add", "reshape"]
