"""Saved modules with adapters: the loaded module computes the same, and its adapters can be trained further."""

import pytest
import torch
from adapted_nets import INT4, INT8, Images, Tokens, compile_net, make_batches, train

from clika_ref import ClikaModule, LoraSettings


@pytest.mark.parametrize(("kind", "settings"), [(Images, INT8), (Tokens, INT8), (Tokens, INT4), (Images, None)])
def test_clika_save_and_load_restore_adapters(kind, settings, tmp_path):
    """A loaded module has the same outputs, adapters and trainable parameters, in float, INT8 and INT4."""
    module, x = train(compile_net(kind, settings, LoraSettings()), kind), make_batches(kind, 1, seed=5)[0]
    module.clika_save(tmp_path / "saved")
    again = ClikaModule.clika_load(tmp_path / "saved")
    assert torch.equal(again(x), module(x))
    state = module.clika_lora_state_dict()
    assert all(torch.equal(matrix, state[name]) for name, matrix in again.clika_lora_state_dict().items())
    wanted = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name for name, p in again.named_parameters() if p.requires_grad} == wanted
