"""State dicts of adapters: small, with the names that other tools use; and merging for good."""

import json

import pytest
import safetensors.torch
import torch
from adapted_nets import INT4, INT8, Images, Tokens, build_net, compile_net, make_batches, make_lora_settings, train

from clika_ref import ModelError


def rename_for_other_tools(state):
    """Return adapters under their names in memory: without the model prefix, with the name of an adapter."""
    return {
        key.removeprefix("base_model.model.").replace(".weight", ".default.weight"): tensor
        for key, tensor in state.items()
    }


@pytest.mark.parametrize(("kind", "settings"), [(Images, None), (Images, INT8), (Tokens, INT4)], ids=str)
@pytest.mark.parametrize("renamed", [dict, rename_for_other_tools])
def test_clika_load_lora_state_dict_reproduces_adapted_outputs(kind, settings, renamed, tmp_path):
    """Adapters loaded into another copy of the base model give the same outputs, with PEFT's names too."""
    module, x = train(compile_net(kind, settings, make_lora_settings()), kind), make_batches(kind, 1, seed=3)[0]
    safetensors.torch.save_file(module.clika_lora_state_dict(), tmp_path / "adapter_model.safetensors")
    other = compile_net(kind, settings, make_lora_settings())
    assert not torch.equal(other(x), module(x))
    other.clika_load_lora_state_dict(renamed(safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")))
    assert torch.equal(other(x), module(x))


def test_clika_lora_state_dict_peft_names_and_small_size():
    """The adapters have PEFT's names, shapes and configuration, and are small."""
    module = compile_net(Tokens, lora=make_lora_settings(target_layers=["query", "value"]))
    state = module.clika_lora_state_dict()
    layers = [f"base_model.model.{path}" for path in ("query", "value")]
    assert [*state] == [f"{path}.lora_{which}.weight" for path in layers for which in "AB"]
    assert [tuple(t.shape) for t in state.values()] == [(2, 32), (32, 2)] * 2
    assert sum(t.nbytes for t in state.values()) < 0.05 * sum(p.nbytes for p in module.parameters())
    assert json.loads(json.dumps(module.clika_lora_config())) == {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": 2,
        "lora_alpha": 4.0,
        "lora_dropout": 0.0,
        "target_modules": ["query", "value"],
        "bias": "none",
        "fan_in_fan_out": False,
    }


def test_clika_load_lora_state_dict_mismatch_lists_all_errors():
    """A mismatched state dict raises one error that lists every problem, and the module stays unchanged."""
    module, x = (
        compile_net(Tokens, lora=make_lora_settings(target_layers=["query", "value"])),
        make_batches(Tokens, 1)[0],
    )
    state, before = module.clika_lora_state_dict(), module(x)
    state = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    state["base_model.model.key.lora_A.weight"] = torch.ones(2, 32)
    state["base_model.model.query.lora_A.weight"] = torch.ones(8, 32)
    del state["base_model.model.value.lora_B.weight"]
    with pytest.raises(ModelError) as raised:
        module.clika_load_lora_state_dict(state)
    text = str(raised.value)
    assert "'base_model.model.key.lora_A.weight' is not a matrix of an adapter" in text
    assert "'base_model.model.query.lora_A.weight' is 8x32, but that of the adapter is 2x32" in text
    assert "base_model.model.value.lora_B.weight is missing" in text
    assert "LoraSettings(rank=..., target_layers=[...])" in text
    assert torch.equal(module(x), before)


def test_clika_load_lora_state_dict_invalid_matrix_raises():
    """Duplicate matrices, complex tensors, lists and unknown keys raise an error."""
    module = compile_net(Tokens, lora=make_lora_settings(target_layers=["query"]))
    state = module.clika_lora_state_dict()
    down, up = state
    cases = {
        "is the same matrix of a second adapter": state | rename_for_other_tools(state),
        "is torch.complex64, not a floating-point tensor": {down: state[down].to(torch.complex64), up: state[up]},
        "is list, not a floating-point tensor": {down: state[down].tolist(), up: state[up]},
        "3 is not a matrix of an adapter": state | {3: state[up]},
    }
    for message, other in cases.items():
        with pytest.raises(ModelError, match=message) as raised:
            module.clika_load_lora_state_dict(other)
        assert "is missing" not in str(raised.value)
    with pytest.raises(ModelError, match=r"state_dict is a str. Give matrices by name, as safetensors.torch.load"):
        module.clika_load_lora_state_dict("adapter_model.safetensors")


@pytest.mark.parametrize("kind", [Images, Tokens])
def test_clika_merge_lora_leaves_original_keys_and_outputs(kind):
    """After merging, the state dict has the original keys, and the outputs stay those of the adapters."""
    module, x = train(compile_net(kind, lora=make_lora_settings()), kind), make_batches(kind, 1, seed=3)[0]
    adapted = module(x)
    module.clika_merge_lora()
    torch.testing.assert_close(module(x), adapted, atol=1e-4, rtol=1e-4)
    assert module.state_dict().keys() == build_net(kind).state_dict().keys() | {"_extra_state"}
    plain = build_net(kind)
    plain.load_state_dict({name: t for name, t in module.state_dict().items() if name != "_extra_state"})
    torch.testing.assert_close(plain(x), adapted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "function", ["clika_merge_lora", "clika_lora_state_dict", "clika_lora_config", "clika_load_lora_state_dict"]
)
def test_lora_functions_without_adapters_raise_with_remedy(function):
    """Each function of adapters raises an error that suggests `clika_attach_lora`."""
    arguments = [{}] if "load" in function else []
    with pytest.raises(ModelError, match=r"the module has none. Attach them with clika_attach_lora"):
        getattr(compile_net(Tokens), function)(*arguments)
