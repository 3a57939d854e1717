"""`clika_distribute` in one process: nothing is sharded, and other objects are rejected."""

import pytest
from torch import nn

from clika_ref import DistributedTrainingSettings, ModelError, clika_compile, clika_distribute


@pytest.fixture(scope="module")
def module():
    return clika_compile(nn.Linear(2, 2).eval(), tracing_inputs=[nn.Linear(2, 2).weight.detach()])


@pytest.mark.parametrize("settings", [None, DistributedTrainingSettings()])
def test_clika_distribute_one_process_returns_module(module, settings):
    """In one process, `clika_distribute` returns the module itself."""
    assert clika_distribute(module, settings) is module


@pytest.mark.parametrize("settings", [True, {"multi_gpu": True}])
def test_clika_distribute_settings_wrong_type_rejected(module, settings):
    """Settings of a wrong type raise an error with the accepted type."""
    with pytest.raises(ModelError, match=r"distributed_training_settings is .*\. Pass a DistributedTrainingSettings"):
        clika_distribute(module, settings)
