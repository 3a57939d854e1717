"""FlexAttention: modified scores, masks of blocks, fewer key heads, and further results, at sizes never traced."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from clika_ref import clika_compile

HEADS, CHANNELS = 2, 4

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class FlexAttention(nn.Module):
    """Self-attention by ``flex_attention``; `make_options` returns the arguments after query, key and value."""

    def __init__(self, make_options, key_heads=HEADS):
        super().__init__()
        self.key_heads = key_heads
        self.project = nn.Linear(8, (HEADS + 2 * key_heads) * CHANNELS)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.make_options = make_options

    def forward(self, x):
        widths = [heads * CHANNELS for heads in (HEADS, self.key_heads, self.key_heads)]
        parts = self.project(x).split(widths, -1)
        query, key, value = (part.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for part in parts)
        return flex_attention(query, key, value, **self.make_options(self, x))


def add_distance(model, _):
    return {"score_mod": lambda score, _b, head, query, key: score - model.slopes[head] * (query - key).abs()}


def mask_future(_, x):
    length = x.shape[1]
    mask = create_block_mask(lambda _b, _h, query, key: query >= key, None, None, length, length, device="cpu")
    return {"block_mask": mask}


def mask_by_batch(_, x):
    limits = (x.sum((1, 2)) > 0).long() + 1
    mask = create_block_mask(
        lambda batch, _h, _q, key: key < limits[batch], x.shape[0], None, x.shape[1], x.shape[1], device="cpu"
    )
    return {"block_mask": mask}


def share_key_heads(_, __):
    return {"enable_gqa": True, "scale": 0.3}


def return_statistics(_, __):
    return {"return_aux": AuxRequest(lse=True)}


def build(make_options):
    torch.manual_seed(0)
    return FlexAttention(make_options, key_heads=1 if make_options is share_key_heads else HEADS).eval()


@pytest.mark.parametrize("options", [add_distance, mask_future, mask_by_batch, share_key_heads, return_statistics])
def test_flex_attention_equals_eager_at_new_sizes(options, tmp_path):
    model = build(options)
    inputs = [(torch.randn(2, 7, 8),), (torch.randn(3, 12, 8),)]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    unseen = torch.randn(4, 140, 8)  # more than one block
    with torch.no_grad():
        torch.testing.assert_close(module(unseen), model(unseen))
    assert module.clika_export(tmp_path / "flex.onnx").path.exists()


def test_fully_masked_rows_are_zero():
    def mask_first(_, x):
        mask = create_block_mask(lambda _b, _h, query, _k: query > 0, None, None, 5, 5, device=x.device)
        return {"block_mask": mask}

    model, x = build(mask_first), torch.randn(2, 5, 8)
    module = clika_compile(model, tracing_inputs=[(x,)], discard_input_model=False)
    result = module(x)
    assert result[:, :, 0].abs().max() == 0
    assert result[:, :, 1:].abs().min() > 0


def test_flex_attention_trains_as_attention():
    model, x = build(mask_future), torch.randn(2, 5, 8)
    module = clika_compile(model, tracing_inputs=[(x,)], discard_input_model=False).train()
    module(x).square().sum().backward()
    parts = [t.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for t in model.project(x).chunk(3, -1)]
    F.scaled_dot_product_attention(*parts, is_causal=True).square().sum().backward()
    torch.testing.assert_close(module.project.weight.grad, model.project.weight.grad)
