"""Chains of moves and casts become one call, or none; lossy casts stay."""

import itertools

import pytest
import torch
from clika_ref_cleanup.merge_chains import FLOAT_BITS, INTEGER_BITS, MergeChains, is_mergeable_cast, is_representable

DTYPES = (*INTEGER_BITS, *FLOAT_BITS)


def build_chain(sketch, shape, *calls, dtype=torch.float32):
    x = sketch("neg" if dtype != torch.bool else "identity", sketch.input(*shape, dtype=dtype))
    for kind, attrs in calls:
        x = sketch(kind, x, **attrs)
    return sketch.returns(sketch("identity", x))


@pytest.mark.parametrize(
    ("shape", "calls", "left"),
    [
        ((2, 6), [("reshape", {"shape": (3, 4)}), ("reshape", {"shape": (12,)})], ["reshape"]),
        ((2, 6), [("reshape", {"shape": (3, 4)}), ("reshape", {"shape": (2, 6)})], []),
        ((2, 6), [("unsqueeze", {"dim": 1}), ("squeeze", {"dims": (1,)})], []),
        ((2, 6), [("unsqueeze", {"dim": 1}), ("squeeze", {"dims": (0,)})], ["reshape"]),
        ((2, 0), [("reshape", {"shape": (0, 5)}), ("unsqueeze", {"dim": 0})], ["reshape"]),
        ((), [("unsqueeze", {"dim": 0}), ("reshape", {"shape": ()})], []),
        ((2, 3, 4), [("permute", {"dims": (1, 2, 0)}), ("permute", {"dims": (2, 0, 1)})], []),
        ((2, 3, 4), [("permute", {"dims": (1, 2, 0)}), ("permute", {"dims": (1, 2, 0)})], ["permute"]),
        ((2, 3, 4), [("permute", {"dims": (-2, -1, 0)}), ("permute", {"dims": (-1, 0, 1)})], []),
        ((2, 1, 4), [("permute", {"dims": (1, 0, 2)})], ["reshape"]),
        ((2, 1, 4), [("permute", {"dims": (1, 2, 0)})], ["permute"]),
        ((2, 1, 4), [("permute", {"dims": (1, 0, 2)}), ("squeeze", {"dims": (0,)})], ["reshape"]),
        ((1, 3), [("expand", {"size": (2, 3)}), ("expand", {"size": (4, 2, 3)})], ["expand"]),
        ((4, 3), [("permute", {"dims": (1, 0)}), ("reshape", {"shape": (4, 3)})], ["permute", "reshape"]),
    ],
    ids=str,
)
def test_merge_chains_shortens_chain(sketch, shape, calls, left):
    """A chain becomes as short as possible."""
    assert build_chain(sketch, shape, *calls).clean(MergeChains()) == ["neg", *left, "identity"]


def test_merge_chains_sets_attrs_and_origin(sketch):
    """The merged call has its type and the rule in its origin."""
    build_chain(sketch, (2, 6), ("reshape", {"shape": (3, 4)}), ("reshape", {"shape": (12,)})).clean(MergeChains())
    (reshape,) = (node for node in sketch.graph.nodes if node.op_type == "reshape")
    assert reshape.attrs == {"shape": (12,)}
    assert reshape.origin.history == ("merge-reshapes",)


def test_merge_chains_dynamic_views_stay(sketch):
    """With dynamic dims, views that cost less than a computed shape stay."""
    views = [("unsqueeze", {"dim": 0}), ("unsqueeze", {"dim": 2})]
    assert build_chain(sketch, ("b", "n"), *views).clean(MergeChains()) == ["neg", "unsqueeze", "unsqueeze", "identity"]


def test_merge_chains_dynamic_inverse_views_removed(sketch):
    """Dynamic dims are merged where no shape must be computed."""
    views = [
        ("unsqueeze", {"dim": 0}),
        ("unsqueeze", {"dim": 2}),
        ("squeeze", {"dims": (2,)}),
        ("squeeze", {"dims": (0,)}),
    ]
    assert build_chain(sketch, ("b", "n"), *views).clean(MergeChains()) == ["neg", "identity"]


def test_merge_chains_dynamic_dim_not_taken_for_1(sketch):
    """A dynamic dim is never taken for 1."""
    x = sketch("neg", sketch.input("b", 3))
    sketch.returns(sketch("permute", x, dims=(1, 0)))
    assert sketch.clean(MergeChains(), sizes={"b": 1}) == ["neg", "permute"]


def test_merge_chains_interior_nodes_may_have_other_users(sketch):
    """Interior nodes may be outputs or have other users."""
    x = sketch("neg", sketch.input(2, 6))
    a = sketch("reshape", x, shape=(12,))
    b = sketch("reshape", a, shape=(3, 4))
    c = sketch("reshape", b, shape=(2, 6))
    sketch.returns(a, c, sketch("abs", b))
    assert sketch.clean(MergeChains()) == ["neg", "reshape", "reshape", "abs"]


CASTS = [
    ((torch.float16, torch.float32, torch.float64), True),
    ((torch.float16, torch.float32, torch.float16), True),
    ((torch.float32, torch.float16, torch.float32), False),
    ((torch.float32, torch.bfloat16, torch.float32), False),
    ((torch.float16, torch.bfloat16, torch.float16), False),
    ((torch.int32, torch.float32, torch.int32), False),
    ((torch.int16, torch.float32, torch.int16), True),
    ((torch.int32, torch.int64, torch.int8), True),
    ((torch.int8, torch.uint8, torch.int8), False),
    ((torch.uint8, torch.int8, torch.int16), False),
    ((torch.bool, torch.float32, torch.int64), True),
    ((torch.int64, torch.bool, torch.int64), False),
    ((torch.float32, torch.int32, torch.float32), False),
    ((torch.float16, torch.float32, torch.int8), False),
    ((torch.float32, torch.float64, torch.bool), True),
]


@pytest.mark.parametrize(("dtypes", "goes"), CASTS, ids=str)
def test_merge_chains_only_lossless_casts_removed(sketch, dtypes, goes):
    """Only a cast that loses nothing is removed."""
    first, *rest = dtypes
    casts = [("to", {"dtype": dtype}) for dtype in rest]
    kinds = build_chain(sketch, (2, 6), *casts, dtype=first).clean(MergeChains())
    assert kinds.count("to") == (2 if not goes else 0 if first == rest[-1] else 1)


def make_boundary_tensor(dtype):
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype in INTEGER_BITS:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype=dtype)
    info = torch.finfo(dtype)
    numbers = [
        info.min,
        -1 - info.eps,
        -0.0,
        info.tiny * info.eps,
        info.tiny,
        1 + info.eps,
        info.max,
        torch.inf,
        torch.nan,
    ]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


PACKED = [("unsqueeze", {"dim": 0}), ("permute", {"dims": (-2, 1, 2, 0, 4)}), ("squeeze", {"dims": (-2,)})]
"""The calls that split query, key and value in attention."""


@pytest.mark.parametrize("shape", [(5, 2, 3, 4), ("s", "b", 3, 4)], ids=str)
def test_merge_chains_temporary_dim_removed(sketch, shape):
    """A dim that is dropped again is not made."""
    assert build_chain(sketch, shape, *PACKED).clean(MergeChains()) == ["neg", "permute", "identity"]


def test_merge_chains_temporary_dim_of_reshape_removed(sketch):
    """A dim that is dropped again is not made by a reshape."""
    reshape, *rest = ("reshape", {"shape": (1, 5, 2, 3, 4)}), *PACKED[1:]
    assert build_chain(sketch, (5, 2, 12), reshape, *rest).clean(MergeChains()) == [
        "neg",
        "reshape",
        "permute",
        "identity",
    ]


def test_merge_chains_squeeze_of_longer_dim_ignored(sketch):
    """Dims longer than 1 are not dropped."""
    squeeze = ("squeeze", {"dims": (0, 3)})
    assert build_chain(sketch, (5, 2, 3, 4), *PACKED[:2], squeeze).clean(MergeChains()) == [
        "neg",
        "permute",
        "identity",
    ]


def test_merge_chains_shared_permute_not_duplicated(sketch):
    """A permute with other users is not made twice."""
    build_chain(sketch, (5, 2, 3, 4), *PACKED)
    (permute,) = (node for node in sketch.graph.nodes if node.op_type == "permute")
    sketch.returns(sketch("abs", permute.output))
    assert sketch.clean(MergeChains()).count("permute") == 1


@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_mergeable_casts_agree_on_boundary_elements(first):
    """Casts that merge agree on boundary elements."""
    x = make_boundary_tensor(first)
    for middle, last in itertools.product(DTYPES, repeat=2):
        if is_representable(first, middle):
            torch.testing.assert_close(x.to(middle).to(first), x, rtol=0, atol=0, equal_nan=True)
        if is_mergeable_cast(first, middle, last):
            torch.testing.assert_close(x.to(middle).to(last), x.to(last), rtol=0, atol=0, equal_nan=True)
