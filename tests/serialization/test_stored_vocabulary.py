"""The names in saved files: those in the code and in real modules equal the pinned table."""

import copy
import json
from collections import defaultdict

import pytest
import stored_vocabulary
from adapted_nets import INT4, make_lora_settings
from saved_nets import ALL, Convolutions, Tokens, compile_net, make_batches, train
from stored_vocabulary import PINNED_FILE, collect, find_added, find_removed, main, read_pinned

from clika_ref import ClikaCompileOptions, PruningSettings
from clika_ref.serialization.container import FILE_FORMAT, read_extra_state, unpack_file

HINT = "Raise FILE_FORMAT for a rename, then run tests/stored_vocabulary.py."


def test_vocabulary_equals_pinned_table():
    """No pinned name is removed or renamed within a file format, and each new one is pinned."""
    pinned, found = read_pinned(), collect()
    assert not find_removed(pinned, found), HINT
    assert not find_added(pinned, found), HINT
    assert pinned["format"] == FILE_FORMAT, HINT


def test_main_rename_requires_raised_format(monkeypatch, tmp_path):
    """A rename cannot be pinned until the file format is raised."""
    pinned = read_pinned()
    pinned["PlanKey"].append("moved")
    file = tmp_path / "pinned.json"
    file.write_text(json.dumps(pinned))
    monkeypatch.setattr(stored_vocabulary, "PINNED_FILE", file)
    with pytest.raises(SystemExit, match=r"are missing:\n  PlanKey: moved\nRaise FILE_FORMAT, or restore them"):
        main()
    monkeypatch.setattr(stored_vocabulary, "FILE_FORMAT", FILE_FORMAT + 1)
    main()
    assert json.loads(file.read_text()) == {**json.loads(PINNED_FILE.read_text()), "format": FILE_FORMAT + 1}


# Names that real modules write


def make_quantized_and_pruned():
    module = compile_net(settings=None)
    module.clika_prune(PruningSettings("2:4", None), calibration_inputs=make_batches(Convolutions))
    module.clika_initialize_algorithms(ALL, calibration_inputs=make_batches(Convolutions))
    return module


MODULES = {
    "float": lambda: compile_net(settings=None, tracing_inputs=make_batches(Convolutions)),
    "INT8": lambda: compile_net(gptq="on", bias_correction="on"),
    "INT8, smoothed": lambda: compile_net(Tokens, smooth_quant="on"),
    "INT4": lambda: compile_net(Tokens, INT4, gptq="on"),
    "pruned": make_quantized_and_pruned,
    "LoRA": lambda: compile_net(
        Tokens, clika_compile_options=ClikaCompileOptions(global_lora_settings=make_lora_settings())
    ),
    "QAT": lambda: train(compile_net(), Convolutions),
}


@pytest.fixture(scope="module")
def files():
    """The document and the tensors of each module, with kept inputs."""
    written = {name: make().clika_serialize(keep_calibration_inputs=True) for name, make in MODULES.items()}
    return {name: unpack_file(serialized) for name, serialized in written.items()}


def read_names(document, tensors):
    """Return the names in a file by table; names of the user's weights, layers and activations are left out."""
    graph, names = document["graph"], defaultdict(set)

    def add(table, found):
        names[table] |= {*found}

    add("ModuleKey", document)
    add("GraphKey", graph)
    add("SignatureKey", document["signature"])
    add("LeafKind", (leaf[0] for leaf in document["signature"]["leaves"]))
    add("operators", (f"{node[0]}({', '.join(sorted(node[2]))})" for node in graph["nodes"]))
    add(
        "AttributeForm",
        (form for node in graph["nodes"] for i in (*node[1], *node[2].values()) for form in find_forms(i)),
    )
    add("ClikaCompileOptions", document["options"])
    add("LoraSettings", document["options"]["global_lora_settings"] or ())
    add(
        "state dict",
        (scope for name in tensors for scope in read_pinned()["state dict"] if name.startswith(f"{scope}.")),
    )
    for stored in document["quantized_weights"].values():
        add("StoredWeightKey", stored)
        add("StoredWeightStep", (step[0] for step in stored["steps"]))
    if document["quantization"]:
        add("QuantizationKey", document["quantization"])
        add("PlanKey", document["quantization"]["plan"])
        add("targets", [document["quantization"]["target"]])
        add("deployments", [document["deployment"][0]])
        add("RequestKey", document["request"])
        add("QuantizationSettings", document["request"]["settings"])
        add("PlanKey", (name.split("/")[2].split(".")[0] for name in tensors if name.startswith("clika/quantization/")))
    if document["calibration"]:
        ranges = document["calibration"]["ranges"]
        add("CalibrationKey", document["calibration"])
        add("RangesKey", ranges)
        add("StatisticsKey", (key for statistics in ranges["activations"].values() for key in statistics))
        parts = {name.split("/")[2].split(".")[0] for name in tensors if name.startswith("clika/ranges/")}
        add("RangesKey", parts & {"smoothing"})
        add("CalibrationKey", parts - {"smoothing"})
    add("TensorPrefix", (f"clika/{name.split('/')[1]}/" for name in tensors if name.startswith("clika/")))
    return names


def find_forms(attribute):
    """Return the keys of an attribute's encoding, also of nested ones."""
    if isinstance(attribute, list):
        return {form for item in attribute for form in find_forms(item)}
    return (
        {key for key in attribute for key in (key, *find_forms(attribute[key]))}
        if isinstance(attribute, dict)
        else set()
    )


@pytest.mark.slow
def test_saved_modules_contain_pinned_names_only(files):
    """Each name in the files of float, INT8, INT4, pruned, LoRA and trained modules is pinned."""
    pinned = read_pinned()
    unknown = {
        (module, table, name)
        for module, parts in files.items()
        for table, names in read_names(*parts).items()
        for name in names - {*pinned[table]}
    }
    assert not unknown


WRITTEN_TABLES = (
    "ModuleKey", "GraphKey", "QuantizationKey", "PlanKey", "StoredWeightKey", "StoredWeightStep", "CalibrationKey",
    "StatisticsKey", "RequestKey", "QuantizationSettings", "LoraSettings", "TensorPrefix", "state dict",
)  # fmt: skip
"""Tables whose names are all in some file."""


@pytest.mark.parametrize("table", WRITTEN_TABLES)
def test_saved_modules_contain_each_pinned_name(files, table):
    """No pinned name is unused: the files of all modules contain each."""
    written = set().union(*(read_names(*parts)[table] for parts in files.values()))
    assert {*read_pinned()[table]} == written


def test_extra_state_contains_pinned_names(files):
    """The extra state of a state dict has the names of a file, without those of ``clika_save``."""
    document, _ = read_extra_state(compile_net().get_extra_state())
    saved = files["INT8"][0]
    assert [*document] == [*saved][: len(document)]
    assert document["quantization"].keys() == saved["quantization"].keys()
    assert document["quantization"]["plan"].keys() == saved["quantization"]["plan"].keys()


def test_names_of_renamed_key_found(files):
    """A renamed key of a document is reported: the comparison has an effect."""
    document, tensors = files["INT8"]
    changed = copy.deepcopy(document)
    changed["quantization"]["plan"]["moved"] = changed["quantization"]["plan"].pop("gptq")
    assert "moved" in read_names(changed, tensors)["PlanKey"] - {*read_pinned()["PlanKey"]}
