"""Settings of adapters: valid values, and the calls that take them."""

import pytest

from clika_ref import ClikaCompileOptions, LoraSettings, ModelError
from clika_ref.integrations.dynamo_backend import translate_options


def test_lora_settings_defaults_match_reference():
    """The defaults equal those of clika-ace."""
    settings = LoraSettings()
    assert (settings.rank, settings.alpha, settings.dropout_rate) == (2, 1, 0.05)
    assert (settings.target_layers, settings.merging) == (["*"], "auto")
    settings.rank = 8
    settings.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "LoraSettings.rank is 0. Give a whole number from 1"),
        ({"rank": 2.0}, "a whole number from 1"),
        ({"rank": True}, "a whole number from 1"),
        ({"alpha": 0}, "LoraSettings.alpha is 0. Give a number above 0"),
        ({"alpha": float("inf")}, "a number above 0"),
        ({"dropout_rate": 1.0}, "a number from 0, below 1"),
        ({"dropout_rate": -0.1}, "a number from 0, below 1"),
        ({"target_layers": "head"}, "a list of layer names"),
        ({"target_layers": []}, "a list of layer names"),
        ({"merging": True}, "Give 'auto', 'on', 'off'"),
    ],
)
def test_lora_settings_invalid_value_raises(fields, message):
    """An invalid value raises an error with the expected one."""
    with pytest.raises(ModelError, match=message):
        LoraSettings(**fields)


def test_lora_settings_unknown_field_lists_fields():
    """An unknown field raises an error that lists the fields."""
    with pytest.raises(ModelError, match=r"LoraSettings has no 'r'. Its fields are rank, alpha"):
        LoraSettings().r = 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_lora_settings": {"rank": 8}}, r"'global_lora_settings' is \{'rank': 8\}, a dict. Give a LoraSet"),
        ({"global_lora_settings": LoraSettings(), "batch_norm": "live"}, "Compile with batch_norm='frozen'"),
    ],
)
def test_clika_compile_options_wrong_lora_settings_raise(options, message):
    """Other types, and live batch norm, raise an error."""
    with pytest.raises(ModelError, match=message):
        ClikaCompileOptions(**options)


def test_torch_compile_backend_lora_settings_raise():
    """The `torch.compile` backend rejects settings of adapters."""
    options = {"clika_compile_options": ClikaCompileOptions(global_lora_settings=LoraSettings())}
    with pytest.raises(ModelError, match=r"does not support adapters.*Compile with clika_compile"):
        translate_options(options)
