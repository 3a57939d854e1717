"""Loops over the positions where a mask is true run for all positions, if those left out change nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clika_ref import ModelError, clika_compile

SEARCHES = {
    "nonzero": lambda mask: mask.nonzero(),
    "column": lambda mask: mask.nonzero()[:, 0],
    "squeeze": lambda mask: mask.nonzero().squeeze(-1),
    "as tuple": lambda mask: torch.nonzero(mask, as_tuple=True)[0],
    "where": lambda mask: torch.where(mask)[0],
}


class Experts(nn.Module):
    """A layer that loops over the experts that a batch hits, as transformers does; expert 3 is a padding."""

    def __init__(self, search, count=3):
        super().__init__()
        self.search, self.count = search, count
        self.router = nn.Linear(4, count)
        self.weight = nn.Parameter(torch.rand(count, 4, 4))

    def forward(self, x):
        scores, chosen = self.router(x).topk(1)
        mask = F.one_hot(chosen, num_classes=self.count + 1).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in self.search(mask.sum((-1, -2)) > 0):
            number = expert[0] if expert.dim() else expert
            if number == self.count:
                continue
            place, row = torch.where(mask[number])
            self.add_rows(out, x, number, row, scores[row, place, None])
        return out

    def add_rows(self, out, x, number, row, scores):
        """Add the results of an expert for some rows."""
        out.index_add_(0, row, F.linear(x[row], self.weight[number]) * scores)


@pytest.mark.parametrize("name", SEARCHES)
def test_experts_that_batch_hits_match_eager(tmp_path, name):
    """Module and file agree with eager, with and without rows for each expert."""
    torch.manual_seed(0)
    check_other_batches(Experts(SEARCHES[name]).eval(), tmp_path)


class ExpertsWithRows(Experts):
    """A layer that skips experts without rows, as DeepSeek-V3 does."""

    def __init__(self, *, is_early):
        super().__init__(None)
        self.is_early = is_early

    def forward(self, x):
        scores, chosen = self.router(x).topk(1)
        mask = F.one_hot(chosen, num_classes=self.count).permute(2, 0, 1)
        out = torch.zeros_like(x)
        for expert in range(self.count):
            row, place = torch.where(mask[expert])
            if self.is_early and row.shape[0] == 0:
                continue
            if self.is_early or row.numel() > 0:
                self.add_rows(out, x, expert, row, scores[row, place, None])
        return out


@pytest.mark.parametrize("is_early", [False, True], ids=["condition", "continue"])
def test_experts_with_rows_match_eager(tmp_path, is_early):
    """Module and file agree with eager, with and without rows for each expert."""
    torch.manual_seed(0)
    check_other_batches(ExpertsWithRows(is_early=is_early).eval(), tmp_path)


def check_other_batches(model, tmp_path):
    """Compare module and file with eager for batches that leave experts out, or none."""
    module = clika_compile(model, tracing_inputs=[torch.rand(30, 4), torch.rand(7, 4)], discard_input_model=False)
    for rows in (1, 2, 50):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), model(x))
    module.clika_export(tmp_path / "experts.onnx", example_inputs=(torch.randn(2, 4),))


def add_if_found(x):
    """Add 1 to a tensor that has a positive row."""
    (found,) = torch.where(x.sum(1) > 0)
    return x * 2 + 1 if found.numel() > 0 else x * 2


def test_condition_on_rows_found_with_effect_rejected():
    """A condition on the number of rows found is an error with its line if it changes the result."""
    for last in (torch.rand(5, 4), -torch.rand(5, 4)):
        with pytest.raises(ModelError, match=r"runs the code at test_hit_rows.py:\d+ also where the model skips it"):
            clika_compile(add_if_found, tracing_inputs=[torch.rand(3, 4), last])


@pytest.mark.slow
def test_mixtral_experts_that_batch_hits_match_eager(tmp_path):
    """The experts of transformers, looped over where a batch hits them, agree with eager in module and file."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("eager")

    def make_text(*shape):
        return {"input_ids": torch.randint(0, 64, shape), "use_cache": False}

    module = clika_compile(model, tracing_inputs=[make_text(1, 8), make_text(2, 5)], discard_input_model=False)
    for shape in ((1, 1), (3, 9)):
        call = make_text(*shape)
        torch.testing.assert_close(module(**call).logits, model(**call).logits)
    module.clika_export(tmp_path / "mixtral.onnx")


class CountTrue(nn.Module):
    """The number of positions of a mask, counted by a loop."""

    def __init__(self, make_mask):
        super().__init__()
        self.make_mask = make_mask

    def forward(self, x):
        count = x.new_zeros(())
        for _ in self.make_mask(x).nonzero():
            count = count + 1
        return count


def test_loop_over_hits_that_counts_rejected():
    """A loop in which positions left out would change the result is an error."""
    with pytest.raises(ModelError, match="disagrees with eager on input 1: output 1 is off by 1"):
        clika_compile(CountTrue(torch.Tensor.signbit), tracing_inputs=[(torch.tensor([1.0, -1.0]),)])


@pytest.mark.parametrize("make_mask", [lambda x: x > 0, lambda x: x == x], ids=["random values leave out", "never"])  # noqa: PLR0124
def test_loop_over_hits_in_all_inputs_rejected(make_mask):
    """A loop that ran for all positions in each tracing input is tried on random values, or not provable."""
    message = r"runs the code at test_hit_rows.py:\d+ also where the model skips it, .* Add a tracing input that leaves"
    with pytest.raises(ModelError, match=message):
        clika_compile(CountTrue(make_mask), tracing_inputs=[(torch.ones(3),)])
