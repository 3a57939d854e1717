"""Settings of pruning: valid values, and contradictions."""

import pytest

from clika_ref import LayerPruningSettings, ModelError, PruningSettings


def test_pruning_settings_defaults_match_reference():
    """The defaults equal those of clika-ace."""
    settings = PruningSettings()
    assert (settings.mask_type, settings.pruning_sensitivity_threshold) == ("1:1", 0.001)
    settings.pruning_sensitivity_threshold = 0.01
    settings.check()


@pytest.mark.parametrize("mask_type", ["structured", "unstructured", "1:1", "2:4", "1:4", "4:8"])
def test_pruning_settings_valid_mask_types(mask_type):
    """Each valid mask type is accepted, for the model and for a layer."""
    assert PruningSettings(mask_type).mask_type == LayerPruningSettings(mask_type=mask_type).mask_type == mask_type


@pytest.mark.parametrize("mask_type", ["4:2", "2:2", "0:4", "02:4", "\uff12:\uff14", "2/4", "", None, 3])
def test_pruning_settings_invalid_mask_type_lists_choices(mask_type):
    """An invalid mask type raises an error that lists the valid ones."""
    with pytest.raises(ModelError, match=r'mask_type is .*. Give "structured", "unstructured" .*"2:4"'):
        PruningSettings(mask_type)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PruningSettings, {"pruning_sensitivity_threshold": -1}, "a number from 0, or None for no limit"),
        (PruningSettings, {"sparsity": 1.0}, "a number between 0 and 1"),
        (PruningSettings, {"mask_type": "2:4", "sparsity": 0.5}, "defines the sparsity already. Remove sparsity"),
        (
            PruningSettings,
            {"pruning_sensitivity_threshold": None},
            "sets no limit, so that everything could be pruned. Give sparsity",
        ),
        (LayerPruningSettings, {"skip_pruning": 1}, "True or False"),
        (LayerPruningSettings, {"skip_pruning": True, "sparsity": 0.5}, "a skipped layer has no mask_type"),
        (LayerPruningSettings, {"mask_type": "1:4", "sparsity": 0.5}, "defines the sparsity already. Remove sparsity"),
    ],
)
def test_pruning_settings_invalid_or_contradictory_raise(kind, fields, message):
    """Invalid values and contradictions raise an error."""
    with pytest.raises(ModelError, match=message):
        kind(**fields)


def test_pruning_settings_unknown_field_lists_fields():
    """An unknown field raises an error that lists the fields."""
    with pytest.raises(
        ModelError, match=r"PruningSettings has no 'mask'. Did you mean 'mask_type'\? Its fields are mask_type"
    ):
        PruningSettings().mask = "2:4"


def test_pruning_settings_assignment_checked_for_contradictions():
    """Assignments are checked, so that contradicting fields must be changed in order."""
    settings = PruningSettings("structured", None, 0.5)
    with pytest.raises(ModelError, match=r"defines the sparsity already. Remove sparsity"):
        settings.mask_type = "2:4"
    settings.sparsity = None
    with pytest.raises(ModelError, match=r"sets no limit, so that everything could be pruned. Give sparsity"):
        settings.check()
    settings.mask_type = "2:4"
    settings.check()
    settings.mask_type = "structured"
    settings.sparsity = 0.5
    settings.check()
