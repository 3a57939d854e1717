"""Quantizing, training and loading with another default dtype than float32."""

import pytest
import torch
from saved_nets import ALL, HERE, Convolutions, compile_net, make_batches, train

from clika_ref import ClikaModule


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default(request):
    """Return a dtype for a test to set as default; the original one is restored after the test."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def test_load_with_other_default_dtype_keeps_learned_scales(default):
    """Learned scales load as saved with another default dtype."""
    module = train(compile_net(), Convolutions)
    kept, state, x = module.clika_serialize(), module.state_dict(), make_batches(Convolutions, 1)[0]
    torch.set_default_dtype(default)
    loaded, rebuilt = ClikaModule.clika_from_serialized(kept), ClikaModule()
    rebuilt.load_state_dict(state)
    for again in (loaded, rebuilt.eval()):
        assert {p.dtype for p in again.parameters()} == {torch.float32}
        assert torch.equal(again(x), module(x))


def test_quantize_with_other_default_dtype_gives_same_plan(default):
    """Quantization gives the same plan with another default dtype."""
    module = compile_net()
    before = module.clika_state.quantized.plan
    torch.set_default_dtype(default)
    module.clika_initialize_algorithms(ALL, deployment_settings=HERE)
    after = module.clika_state.quantized.plan
    assert after.activations == before.activations
    assert all(torch.equal(scales, before.weights[name]) for name, scales in after.weights.items())
