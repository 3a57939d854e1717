"""What is decided, learned and loaded while the process makes tensors of another type than float32 by default."""

import pytest
import torch
from saved_nets import ALL, HERE, Convolutions, batches, compiled, trained

from clika_ref import ClikaModule


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default(request):
    """Return a type that is the default where a test sets it; what it was comes back after the test."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def test_learned_scales_are_loaded_as_they_were_saved(default):
    module = trained(compiled(), Convolutions)
    kept, state, x = module.clika_serialize(), module.state_dict(), batches(Convolutions, 1)[0]
    torch.set_default_dtype(default)
    loaded, rebuilt = ClikaModule.clika_from_serialized(kept), ClikaModule()
    rebuilt.load_state_dict(state)
    for again in (loaded, rebuilt.eval()):
        assert {p.dtype for p in again.parameters()} == {torch.float32}
        assert torch.equal(again(x), module(x))


def test_what_is_decided_is_what_it_was_before(default):
    module = compiled()
    before = module.clika_state.quantized.plan
    torch.set_default_dtype(default)
    module.clika_initialize_algorithms(ALL, deployment_settings=HERE)
    after = module.clika_state.quantized.plan
    assert after.activations == before.activations
    assert all(torch.equal(scales, before.weights[name]) for name, scales in after.weights.items())
