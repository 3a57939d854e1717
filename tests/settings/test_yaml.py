"""Settings as YAML: clika-ace's schema, writing and reading, and errors for invalid files."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    DistributedTrainingSettings,
    LayerPruningSettings,
    LayerQuantizationSettings,
    LayerSettings,
    LoraSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    Settings,
    TrainingSettings,
    clika_compile,
)
from clika_ref.integrations.dynamo_backend import translate_options

RECORD = """
# the whole schema of 24.x, with the values of its template
deployment_settings:
  target_framework: trt
  weights_utilize_full_int_range: false
distributed_training_settings:
  multi_gpu: true
  use_sharding: false
global_quantization_settings:
  method: qat
  weights_num_bits: 8
  activations_num_bits: 8
  skip_tail_quantization: null
  automatic_skip_quantization: true
  quantization_sensitivity_threshold: null
training_settings:
  stats_steps: 20
  random_seed: null
  is_training_from_scratch: false
layer_settings:
  conv_proj:
    quantization_settings:
      skip_quantization: true
  encoder.layers.*.mlp:
    quantization_settings:
      weights_num_bits: 8
"""


@pytest.fixture
def read(tmp_path):
    """Write a text as a file, and read settings from it."""

    def read_text(text):
        (tmp_path / "clika.yaml").write_text(text, encoding="utf-8")
        return Settings.load_from_path(tmp_path / "clika.yaml")

    return read_text


def read_rejection(read, text):
    """Return the error for a file with a given text, without its path."""
    with pytest.raises(ModelError) as caught:
        read(text)
    return re.sub(r"\S*clika.yaml", "clika.yaml", str(caught.value))


def test_settings_load_reads_whole_reference_schema(read):
    """The schema of clika-ace is read completely."""
    assert read(RECORD) == Settings(
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
        distributed_training_settings=DistributedTrainingSettings(multi_gpu=True),
        global_quantization_settings=QuantizationSettings(),
        training_settings=TrainingSettings(stats_steps=20, random_seed=None, is_training_from_scratch=False),
        layer_settings={
            "conv_proj": LayerSettings(LayerQuantizationSettings(skip_quantization=True)),
            "encoder.layers.*.mlp": LayerSettings(LayerQuantizationSettings(weights_num_bits=8)),
        },
    )


EVERYTHING = Settings(
    deployment_settings=DeploymentSettings_OpenVINO_ONNX(preset="performance"),
    distributed_training_settings=DistributedTrainingSettings(multi_gpu=True, use_sharding=True),
    global_quantization_settings=QuantizationSettings(
        weights_num_bits=[8, 4],
        quantization_sensitivity_threshold=1e-05,
        weights_only_quantization_block_size=[0, 32],
        weights_utilize_full_int_range=False,
        automatic_skip_quantization=True,
        skip_tail_quantization=False,
    ),
    global_pruning_settings=PruningSettings("2:4", 0.25),
    global_lora_settings=LoraSettings(rank=4, alpha=8, target_layers=["*.query"]),
    training_settings=TrainingSettings(stats_steps=3, random_seed=2**64 - 1, is_training_from_scratch=True),
    layer_settings={
        "1e-3": LayerSettings(LayerQuantizationSettings(skip_quantization_until=["on", "8", "a: b"])),
        "yes": LayerSettings(pruning_settings=LayerPruningSettings(mask_type="1:1")),
        "*.head": LayerSettings(LayerQuantizationSettings(activations_num_bits=8)),
    },
    clika_compile_options=ClikaCompileOptions(
        smooth_quant="on", mixed_precision="off", observer="percentile-99.99", ranges_file="1e-3"
    ),
)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        EVERYTHING,
        Settings(None, global_quantization_settings=None),
        Settings(DeploymentSettings_TensorRT_ONNX({"batch": (1, 4, 16)})),
        Settings(DeploymentSettings_TensorRT_LLM_ONNX()),
        Settings(global_quantization_settings=QuantizationSettings(weights_utilize_full_int_range=True)),
    ],
    ids=["defaults", "everything", "nothing", "shapes", "llm", "full range"],
)
def test_settings_save_and_load_round_trip(settings, tmp_path):
    """Saved settings load as equal ones."""
    settings.save_to_path(tmp_path / "clika.yaml")
    assert Settings.load_from_path(str(tmp_path / "clika.yaml")) == settings


OTHERWISE = [
    QuantizationSettings((4, 8), 16, 0.25, False, 32, True, False, True),
    QuantizationSettings(dynamic_activations=True),
    LayerQuantizationSettings(skip_quantization=True),
    LayerQuantizationSettings(skip_quantization_until=("a", "b.*")),
    LayerQuantizationSettings(skip_quantization_downstream=True),
    LayerQuantizationSettings(weights_num_bits=(8, 4), activations_num_bits=16),
    PruningSettings("2:4", 0.25),
    PruningSettings("structured", None, 0.5),
    LayerPruningSettings(skip_pruning=True),
    LayerPruningSettings(mask_type="unstructured", pruning_sensitivity_threshold=0.25, sparsity=0.5),
    LoraSettings(4, 8.5, 0.25, ("*.query", "8"), "off"),
    DistributedTrainingSettings(multi_gpu=True, use_sharding=True),
    TrainingSettings(3, 7, is_training_from_scratch=True),
    ClikaCompileOptions(
        *(True, False, True, "a: b", "latency", "min-max"),
        *("on", "off", "on", "off", "on", "off"),
        *("live", 2.5),
        convert_branches=True,
        state="io",
    ),
    DeploymentSettings_OpenVINO_ONNX("performance"),
    DeploymentSettings_TensorRT_ONNX({"batch": [1, 4, 16]}),
]
"""Settings of each kind that are not those that it comes with."""


def nest_settings(own):
    """Return complete settings that contain the given ones."""
    if isinstance(own, LayerQuantizationSettings):
        return Settings(layer_settings={"a": LayerSettings(quantization_settings=own)})
    if isinstance(own, LayerPruningSettings):
        return Settings(layer_settings={"a": LayerSettings(pruning_settings=own)})
    place = {
        QuantizationSettings: "global_quantization_settings",
        PruningSettings: "global_pruning_settings",
        LoraSettings: "global_lora_settings",
        DistributedTrainingSettings: "distributed_training_settings",
        TrainingSettings: "training_settings",
        ClikaCompileOptions: "clika_compile_options",
    }
    return Settings(**{place.get(type(own), "deployment_settings"): own})


@pytest.mark.parametrize("own", OTHERWISE, ids=lambda own: type(own).__name__)
def test_settings_round_trip_each_class(own, tmp_path):
    """The settings of each class load as saved."""
    settings = nest_settings(own)
    settings.save_to_path(tmp_path / "clika.yaml")
    assert Settings.load_from_path(tmp_path / "clika.yaml") == settings


def test_settings_round_trip_examples_cover_every_field():
    """The examples change every field of every settings class."""
    lacking = {kind: {f.name for f in dataclasses.fields(kind)} for kind in map(type, OTHERWISE)}
    for own in OTHERWISE:
        default = type(own)()
        lacking[type(own)] -= {name for name, value in vars(own).items() if value != getattr(default, name)}
    lacking[ClikaCompileOptions] -= {"global_lora_settings"}  # a section of its own
    assert not any(lacking.values()), lacking


def test_global_lora_settings_section_passed_as_option(read):
    """Adapters have a section of their own, and it is passed as a compile option."""
    settings = read("global_lora_settings: {rank: 2, alpha: 1, dropout_rate: 0.05}")
    assert settings.compile_arguments()["clika_compile_options"].global_lora_settings == LoraSettings(2, 1, 0.05)
    with pytest.raises(ModelError, match="global_lora_settings is also given in clika_compile_options"):
        Settings(clika_compile_options=ClikaCompileOptions(global_lora_settings=LoraSettings()))


def test_settings_save_numpy_numbers_and_paths(tmp_path):
    """NumPy numbers and paths are saved as numbers and strings."""
    threshold = np.float64(0.25)
    settings = Settings(
        global_quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=threshold),
        clika_compile_options=ClikaCompileOptions(ranges_file=Path("a/ranges")),
    )
    settings.save_to_path(tmp_path / "clika.yaml")
    found = Settings.load_from_path(tmp_path / "clika.yaml")
    assert found.global_quantization_settings == settings.global_quantization_settings
    assert found.clika_compile_options.ranges_file == "a/ranges"


def test_settings_save_missing_folder_raises(tmp_path):
    """Saving to a missing folder raises an error."""
    with pytest.raises(ModelError, match=r"clika\.yaml"):
        Settings().save_to_path(tmp_path / "nowhere" / "clika.yaml")


def test_settings_load_missing_entries_have_defaults(read):
    """Missing entries and empty sections have their defaults."""
    assert read("{}") == read("training_settings:\nglobal_quantization_settings:\nlayer_settings:") == Settings()
    assert read("global_pruning_settings:") == Settings(global_pruning_settings=PruningSettings())
    assert read("layer_settings: {a: }") == Settings(layer_settings={"a": LayerSettings()})


def test_settings_load_null_section_disables_step(read):
    """Null disables quantization and the target."""
    found = read("global_quantization_settings: null\ndeployment_settings: ~")
    assert found.global_quantization_settings is found.deployment_settings is None


@pytest.mark.parametrize("word", ["yes", "on", "True", "true", "Yes"])
def test_settings_load_yaml_1_1_booleans_accepted(read, word):
    """The boolean words of YAML 1.1 are true where a boolean is expected."""
    assert read(f"distributed_training_settings: {{multi_gpu: {word}}}").distributed_training_settings.multi_gpu is True
    quantization = read(f"global_quantization_settings: {{skip_tail_quantization: {word}}}")
    assert quantization.global_quantization_settings.skip_tail_quantization is True


def test_settings_load_on_off_stay_strings(read):
    """'on' and 'off' stay strings where strings are expected."""
    options = read(
        "clika_compile_options: {smooth_quant: on, equalization: off, mixed_precision: 'on'}"
    ).clika_compile_options
    assert (options.smooth_quant, options.equalization, options.mixed_precision) == ("on", "off", "on")


def test_settings_load_mask_type_stays_string(read):
    """A mask type stays a string, although YAML 1.1 reads 2:4 as 124 seconds."""
    assert read("global_pruning_settings: {mask_type: 2:4}").global_pruning_settings.mask_type == "2:4"
    assert read("global_pruning_settings: {mask_type: 1:1}").global_pruning_settings.mask_type == "1:1"


@pytest.mark.parametrize(("text", "number"), [("1e-3", 0.001), ("5E-3", 0.005), ("1.", 1.0), (".5", 0.5), ("0", 0)])
def test_settings_load_number_formats(read, text, number):
    """Numbers are read in each format, also 1e-3 that PyYAML reads as a string."""
    found = read(f"global_quantization_settings: {{quantization_sensitivity_threshold: {text}}}")
    assert found.global_quantization_settings.quantization_sensitivity_threshold == number


def test_settings_load_alias_resolved(read):
    """An alias is read as the value of its anchor."""
    found = read("layer_settings: {a: &skip {quantization_settings: {skip_quantization: true}}, b: *skip}")
    assert found.layer_settings["a"] == found.layer_settings["b"] != LayerSettings()


FULL = "weights_utilize_full_int_range"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"deployment_settings: {{target_framework: ov, {FULL}: false}}", False),
        (f"deployment_settings: {{target_framework: ort, {FULL}: yes}}", True),
        (f"deployment_settings: {{target_framework: openvino, {FULL}: false}}", False),
        (f"deployment_settings: {{{FULL}: false}}\nglobal_quantization_settings: {{{FULL}: true}}", True),
        (f"deployment_settings: {{target_framework: trt, {FULL}: false}}", None),
    ],
    ids=["next to the target", "in words", "the name of a plugin", "both", "where the target does not saturate"],
)
def test_settings_load_weight_range_in_deployment_section(read, text, expected):
    """The weight range in the deployment section becomes a quantization setting."""
    assert read(text).global_quantization_settings.weights_utilize_full_int_range is expected


def test_settings_load_old_threshold_scale_warns(read):
    """A threshold on the scale of old releases raises a warning."""
    with pytest.warns(UserWarning, match=r"line 2: quantization_sensitivity_threshold is 5000, as in releases of 2024"):
        read("global_quantization_settings:\n  quantization_sensitivity_threshold: 5000")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "clika.yaml: the file is empty. .*writes all settings with their defaults"),
        ("# nothing\n", "clika.yaml: the file is empty"),
        ("- a\n- b", "line 1: the file is a list. Give names and values"),
        ("just words", "line 1: the file is 'just words'. Give names and values"),
        ("a: [1", "line 1: it is not valid YAML: while parsing a flow sequence"),
        ("a: b: c", "line 1: it is not valid YAML: mapping values are not allowed here"),
        ("training_settings:\n\tstats_steps: 3", "line 2: it is not valid YAML: .*found character"),
        ("a: \x07", "clika.yaml: it is not valid YAML: unacceptable character"),
        ("--- {}\n--- {}", "line 2: it is not valid YAML: .*but found another document"),
        ("[" * 3000, "clika.yaml: it is nested too deeply"),
        ("{? [a]: 1}", "line 1: a key is a list or a mapping. Give a name"),
        (
            "training_settings: &a {x: *a}",
            "clika.yaml: it is nested too deeply, or an alias is inside its own anchor",
        ),
        ("training_settings: !!python/object:os.system {}", "line 1: the tag .*python.* is not supported"),
        (
            "training_settings: {}\n\ntraining_settings: {}",
            "line 3: 'training_settings' is given twice, first in line 1",
        ),
        ("\ntraining_setings: {}", "line 2: the file has no 'training_setings'. Did you mean 'training_settings'?"),
        ("stats_steps: 20", "line 1: the file has no 'stats_steps'. It belongs to training_settings"),
        ("zebra: 1", "line 1: the file has no 'zebra'. Its names are deployment_settings, layer_settings"),
        (
            "global_quantization_settings:\n  weights_num_bit: 8",
            "line 2: global_quantization_settings has no 'weights_num_bit'. Did you mean 'weights_num_bits'",
        ),
        (
            "global_quantization_settings: {stats_steps: 3}",
            "global_quantization_settings has no 'stats_steps'. It belongs to training_settings",
        ),
        (
            "global_quantization_settings:\n  weights_num_bits: '8'",
            "line 2: global_quantization_settings.weights_num_bits is '8'. Give a number .*Write it without quotes",
        ),
        ("global_quantization_settings: {weights_num_bits: [[8]]}", r"weights_num_bits is \['a list'\]. Give"),
        ("global_quantization_settings: {weights_num_bits: {a: {b: 1}}}", "weights_num_bits is {'a': 'a mapping'}"),
        ("global_quantization_settings: {weights_num_bits: null}", "weights_num_bits is None. Give a number"),
        ("global_quantization_settings: {method: ptq}", "method is 'ptq'. Give 'qat'"),
        ("global_quantization_settings: {skip_tail_quantization: 'yes'}", "is 'yes'. Give True, False, or None"),
        (
            "global_quantization_settings: {quantization_sensitivity_threshold: .nan}",
            "quantization_sensitivity_threshold is nan. Give a number from 0",
        ),
        (
            (
                "training_settings: {}\nglobal_quantization_settings:\n"
                "  quantization_sensitivity_threshold: 0\n  automatic_skip_quantization: false"
            ),
            "line 2: global_quantization_settings: QuantizationSettings: quantization_sensitivity_threshold=0 keeps",
        ),
        ("training_settings: null", "line 1: training_settings is None. Give names and values"),
        ("training_settings: {stats_steps: 0}", "training_settings.stats_steps is 0. Give a whole number from 1"),
        ("training_settings: {random_seed: -1}", "random_seed is -1. Give a whole number from 0"),
        ("distributed_training_settings: {use_sharding: true}", "multi_gpu is False. Set multi_gpu"),
        ("deployment_settings: trt", "line 1: deployment_settings is 'trt'. Give names and values"),
        ("deployment_settings: {target_framework: tr}", "target_framework has no 'tr'. Did you mean 'trt'"),
        ("deployment_settings: {target_framework: [ov]}", "target_framework has no ''. Its names are ort, ov"),
        ("deployment_settings: {target_framework: qnn}", "target_framework: cannot use the target QNN: it retired"),
        ("deployment_settings: {target_framework: ort, hue: 1}", "settings has no 'hue'. It has no settings"),
        ("deployment_settings: {target_framework: ov, preset: x}", "deployment_settings: preset is 'x'. Choose one of"),
        ("deployment_settings: {target_framework: trt, shapes: {n: [3, 2, 1]}}", "shapes contains 'n'"),
        (f"deployment_settings: {{{FULL}: 3}}", f"deployment_settings.{FULL} is 3. Give true or false"),
        (
            "clika_compile_options: {smooth_quant: true}",
            "option 'smooth_quant' is True. Choose one of 'auto', 'on', 'off'",
        ),
        ("layer_settings: {a: {skip_quantization: true}}", "layer_settings.a has no .*. It belongs to quantization_s"),
        (
            "layer_settings:\n  a: &a {quantization_settings: {skip_quantization: true}}\n  b:\n    <<: *a",
            "line 4: '<<' is a merge key, which YAML 1.2 lacks. Write the names and values out",
        ),
        (
            "clika_compile_options: {sparing: 'off'}",
            r"line 1: clika_compile_options has no 'sparing'. Did you mean 'mixed_precision'\?",
        ),
        (
            "clika_compile_options:\n  smoothing: on\n  weight_rounding: off",
            (
                r"line 2: clika_compile_options has no 'smoothing'. Did you mean 'smooth_quant'\?"
                r"\n.*line 3: clika_compile_options has no 'weight_rounding'. Did you mean 'gptq'\?"
            ),
        ),
        (
            "quantisation: {weights_num_bits: 8}",
            r"line 1: the file has no 'quantisation'. Did you mean 'global_quantization_settings'\?",
        ),
        ("layer_settings: [a]", "line 1: layer_settings is a list. Give names and values"),
        (
            "clika_compile_options:\n  global_lora_settings: {rank: 2}",
            "line 2: clika_compile_options has no 'global_lora_settings'. Make it a section of its own",
        ),
        ("layer_settings: {a: 3}", "line 1: layer_settings.a is 3. Give names and values"),
        (
            "layer_settings: {a: {quantization_settings: {skip_quantisation: true}}}",
            "layer_settings.a.quantization_settings has no .skip_quantisation.. Did you mean .skip_quantization.",
        ),
    ],
)
def test_settings_load_invalid_entry_reports_line(read, text, message):
    """An invalid entry raises an error with its line."""
    assert re.search(message, read_rejection(read, text)), read_rejection(read, text)


def test_settings_load_reports_all_errors_at_once(read):
    """All errors of a file are reported at once."""
    told = read_rejection(read, "zebra: 1\ntraining_settings:\n  stats_steps: x\n  steps: 3\n  random_seed: 1.5\n")
    assert told.splitlines()[0] == "cannot read the settings in clika.yaml: it has 4 errors:"
    assert [line[:9] for line in told.splitlines()[1:]] == ["  line 1:", "  line 3:", "  line 4:", "  line 5:"]


def test_settings_load_alias_bomb_read_quickly(read):
    """Nested aliases that would expand to a gigabyte are read without expansion."""
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    told = read_rejection(read, "\n".join([*lines, "global_quantization_settings: {weights_num_bits: *a39}"]))
    assert "weights_num_bits is ['a list', 'a list']" in told


def test_settings_load_unreadable_file_raises_with_reason(tmp_path):
    """A file that cannot be read raises an error with the reason."""
    with pytest.raises(ModelError, match=r"cannot read the settings in .*none.yaml: No such file"):
        Settings.load_from_path(tmp_path / "none.yaml")
    with pytest.raises(ModelError, match=r"cannot read the settings in .*: Is a directory"):
        Settings.load_from_path(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ModelError, match=r"bytes\.yaml: it is not valid YAML"):
        Settings.load_from_path(tmp_path / "bytes.yaml")


@pytest.mark.parametrize("path", [None, 3, b"clika.yaml"])
def test_settings_path_of_wrong_type_raises(path):
    """A value that is no path raises an error."""
    told = f"path is {path!r}, a {type(path).__name__}. Give a path such as 'clika.yaml'"
    for use in (Settings.load_from_path, Settings().save_to_path):
        with pytest.raises(ModelError, match=re.escape(told)):
            use(path)


def test_settings_fields_checked_on_assignment():
    """Fields are checked as they are set."""
    with pytest.raises(ModelError, match=r"Settings.training_settings is None. Give a TrainingSettings"):
        Settings(training_settings=None)
    with pytest.raises(ModelError, match=r"Settings.layer_settings is .*. Give a dict from layer names"):
        Settings(layer_settings={"a": QuantizationSettings()})
    with pytest.raises(
        ModelError, match=r"Settings has no 'quantization_settings'. .*Its fields are deployment_settings"
    ):
        Settings().quantization_settings = None
    with pytest.raises(ModelError, match=r"multi_gpu is False. Set multi_gpu"):
        DistributedTrainingSettings(use_sharding=True)


def test_settings_compile_arguments_accepted_by_clika_compile(read):
    """`compile_arguments` gives arguments of `clika_compile`."""
    arguments = read(
        "deployment_settings: {target_framework: ort}\ntraining_settings: {is_training_from_scratch: true}\n"
        "layer_settings:\n  '1': {quantization_settings: {skip_quantization: true}}\n  '0': {pruning_settings: {}}\n"
    ).compile_arguments()
    assert arguments["layer_quantization_settings"] == {"1": LayerQuantizationSettings(skip_quantization=True)}
    assert arguments["layer_pruning_settings"] == {"0": LayerPruningSettings()}
    assert arguments["is_model_pretrained"] is False
    module = clika_compile(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval(),
        calibration_inputs=[torch.randn(4, 8) for _ in range(2)],
        **{**arguments, "layer_pruning_settings": None, "is_model_pretrained": True},
    )
    assert module.clika_state.quantized.plan.weights.keys() <= {"linear"}


def test_translate_options_accepts_settings_and_path(tmp_path):
    """The `torch.compile` backend accepts settings and the path of their file."""
    settings = Settings(global_quantization_settings=None)
    settings.save_to_path(tmp_path / "clika.yaml")
    expected = {**settings.compile_arguments(), "graph_name": "named"}
    assert translate_options({"settings": settings, "graph_name": "named"}) == expected
    assert translate_options({"settings": tmp_path / "clika.yaml", "graph_name": "named"}) == expected
    default = translate_options({"settings": settings, "deployment_settings": DeploymentSettings_OpenVINO_ONNX()})
    assert default["deployment_settings"] == DeploymentSettings_OpenVINO_ONNX(), (
        "the explicit argument takes precedence"
    )
    assert expected["deployment_settings"] == DeploymentSettings_ONNXRuntime_ONNX()


def test_translate_options_limits_batches_by_stats_steps():
    """The `torch.compile` backend reads at most `stats_steps` batches of a dataloader."""

    class Loader:
        def __iter__(self):
            read.append("begun")
            yield from "abc"

    read, options = [], {"settings": Settings(training_settings=TrainingSettings(stats_steps=2))}
    found = translate_options({**options, "train_dataloader": Loader()})["calibration_inputs"]
    assert not read
    assert [*found] == ["a", "b"]
    assert translate_options({**options, "train_dataloader": ["a", "b", "c"]})["calibration_inputs"] == ["a", "b"]
    with pytest.raises(ModelError, match=r"train_dataloader are a int. Give a list"):
        translate_options({**options, "train_dataloader": 3})
