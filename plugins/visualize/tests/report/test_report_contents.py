"""Contents of reports: equal to the summary, the explanation and the ranges, with a reason for each empty part."""

from importlib.metadata import version

import pytest
import torch
from clika_ref_visualize.report.report_builder import FLOAT_MODULE_MESSAGE, NO_RANGES_MESSAGE
from reported_nets import HERE, Small, X, compile_float, compile_int4, compile_int8, read_contents

from clika_ref import (
    ClikaModule,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LoraSettings,
    ModelError,
    PruningSettings,
    Settings,
    TargetError,
    clika_compile,
)
from clika_ref import LayerQuantizationSettings as Layer


@pytest.fixture(scope="module")
def module():
    return compile_int8(layers={"blocks.0.second": Layer(skip_quantization=True)})


@pytest.fixture(scope="module")
def contents(module, tmp_path_factory):
    return read_contents(module.clika_report(tmp_path_factory.mktemp("contents") / "report.html"))


def find_node(contents, name):
    (found,) = [node for node in contents["nodes"] if node["name"] == name]
    return found


def test_clika_report_layers_match_summary(module, contents):
    """The facts about each layer equal those of the summary."""
    found = module.clika_state.quantized.found
    assert len(found.layers) == 6
    for layer in found.layers:
        node = find_node(contents, layer.name)
        assert (node["scope"], node["operator"]) == (layer.scope, layer.operator)
        assert tuple(node["bits"]) == layer.bits
        assert node["sensitivity"] == layer.sensitivity
        assert (node["bytes_before"], node["bytes_after"]) == (layer.bytes_before, layer.bytes_after)
    skipped = find_node(contents, "conv2d_2")
    assert (skipped["scope"], skipped["state"]) == ("blocks.0.second", "kept_in_float")
    assert "skip_quantization" in skipped["reason"]
    activations = [node for node in contents["nodes"] if node["operator"] == "hardswish"]
    assert {node["state"] for node in activations} == {"float"}  # no layer, so no decision
    assert all("no INT8 kernel" in node["reason"] for node in activations)


def test_clika_report_nodes_match_explanation(module, contents):
    """The facts about each node equal those of `clika_explain`."""
    explained = module.clika_explain()
    assert [node["name"] for node in contents["nodes"]] == [fact.name for fact in explained.nodes]
    for node, fact in zip(contents["nodes"], explained.nodes, strict=True):
        assert (node["planned"], node["runs"], node["macs"]) == (fact.planned, fact.runs, fact.macs)
    whole = contents["modules"][0]
    assert whole["quantized_macs"] / whole["macs"] == explained.share()


def test_clika_report_activations_show_range_and_observer(module, contents):
    """Activations show their observed range, the quantized range and the observer."""
    table, plan = module.clika_state.calibration.table, module.clika_state.quantized.plan
    values = {value["name"]: value for value in contents["values"]}
    assert set(plan.activations) <= set(values)
    for name, scale in plan.activations.items():
        value = values[name]
        quantized, observed = value["quantized"], value["observed"]
        assert (quantized["scale"], quantized["zero_point"], quantized["levels"]) == (
            scale.scale,
            scale.zero_point,
            256,
        )
        assert quantized["high"] - quantized["low"] == pytest.approx(255 * scale.scale)
        assert quantized["observer"] in ("min-max", "mse")
        source = table.values[observed["source"] or name]
        assert (observed["low"], observed["high"], observed["batches"]) == (source.low, source.high, 2)
        assert sum(observed["histogram"]["counts"]) == source.histogram.total
        assert 0 <= quantized["clipped_share"] < 0.05
    assert (values["x"]["producer"], values["x"]["type"]) == (None, "float32[batch, 3, 8, 8]")


def test_clika_report_nodes_refer_to_activations(contents):
    """Nodes refer to the activations that they read and produce, across Q/DQ pairs."""
    node = find_node(contents, "conv2d_1")
    assert [contents["values"][index]["name"] for index in node["outputs"]] == ["conv2d_1"]
    assert [contents["values"][index]["name"] for index in node["inputs"]] == ["conv2d"]
    for index, node in enumerate(contents["nodes"]):
        assert all(contents["values"][value]["producer"] == index for value in node["outputs"])


def test_clika_report_thresholds_match_summary(module, contents):
    """The thresholds and the selected one equal those of the summary."""
    found = module.clika_state.quantized.found
    assert [(row["threshold"], row["layers"], row["bytes"]) for row in contents["what_if"]] == [
        (row.threshold, row.layers, row.bytes) for row in found.what_if
    ]
    chosen = contents["chosen"]
    assert (chosen["threshold"], chosen["layers"], chosen["total_layers"], chosen["bytes"]) == (
        0.005,
        5,
        6,
        found.bytes,
    )


def test_clika_report_lists_own_target_by_default(contents):
    """Only the module's own target is listed by default, with its latency."""
    (row,) = contents["targets"]
    assert (row["target"], row["layers"], row["total_layers"]) == ("onnxruntime", 5, 6)
    assert row["seconds"] > 0
    assert row["ratio"] > 0


def test_clika_report_node_latencies_sum_to_call(contents):
    """The latencies of nodes add up to that of a call."""
    taken = [node["seconds"] for node in contents["nodes"] if node["seconds"] is not None]
    assert len(taken) >= 6
    assert sum(taken) + contents["latency"]["unassigned"] == pytest.approx(contents["latency"]["seconds"])
    assert 0 <= contents["latency"]["unassigned"] < contents["latency"]["seconds"]
    assert contents["modules"][0]["seconds"] == pytest.approx(sum(taken))


def test_clika_report_other_targets_have_rows_or_reason(tmp_path):
    """Further targets have rows, and an unsupported one has its reason."""
    module = compile_int8(weights_num_bits=8, prefer_weights_only_quantization=True, automatic_skip_quantization=False)
    others = [DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()]
    own, openvino, tensorrt = read_contents(module.clika_report(tmp_path / "report.html", others))["targets"]
    assert (own["target"], openvino["target"]) == ("onnxruntime", "openvino")
    assert openvino["bytes"] > 0
    assert "weights_num_bits: 8 bits are requested" in tensorrt["unsupported_reason"]


def test_clika_report_emulated_target_has_no_latency(tmp_path):
    """An emulated target has no latency, with the reason."""
    module = compile_int8(deployment=DeploymentSettings_TensorRT_ONNX())
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert found["latency"] is None
    assert (
        found["unavailable"]["latency"]
        == "cannot report times: ONNX Runtime emulates tensorrt on this machine. Profile the file with tensorrt itself."
    )
    assert found["target"] == "tensorrt, emulated by ONNX Runtime"


def test_clika_report_openvino_latency_per_layer(tmp_path):
    """OpenVINO reports the latency of each layer."""
    module = compile_int8(deployment=DeploymentSettings_OpenVINO_ONNX())
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    taken = {node["name"] for node in found["nodes"] if node["seconds"]}
    assert {node["name"] for node in found["nodes"] if node["bits"]} <= taken


def test_clika_report_target_without_profile_shows_reason(tmp_path, monkeypatch):
    """A target without `profile` has no latency, with the reason."""
    module = compile_float()
    monkeypatch.delattr(type(module.clika_state.registry.targets["onnxruntime"]), "profile")
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert (
        found["unavailable"]["latency"] == "cannot report times: the target onnxruntime does not implement `profile`."
    )


def test_clika_report_missing_runtime_omits_own_parts_only(tmp_path, monkeypatch):
    """A missing runtime removes only the parts that depend on it."""
    module = compile_int8()
    monkeypatch.setattr(
        type(module.clika_state.registry.targets["onnxruntime"]), "unavailable_reason", lambda self: "it is gone"
    )
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert found["unavailable"] == {"runtime": "it is gone", "latency": "it is gone"}
    assert {node["state"] for node in found["nodes"] if node["bits"]} == {"quantized"}
    assert {node["runs"] for node in found["nodes"]} == {None}
    assert len(found["what_if"]) == 6


def test_clika_report_failing_profile_omits_latency_only(tmp_path, monkeypatch):
    """A failing `profile` removes only the latency."""

    def raise_error(self, artifact, inputs):
        raise TargetError("it ran out of patience")

    module = compile_int8()
    monkeypatch.setattr(type(module.clika_state.registry.targets["onnxruntime"]), "profile", raise_error)
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert found["unavailable"] == {"latency": "it ran out of patience"}
    assert found["bytes_of_file"] > 0


def test_clika_report_float_module_explains_missing_parts(tmp_path):
    """Parts about quantization are missing, because the module is float."""
    found = read_contents(compile_float().clika_report(tmp_path / "report.html"))
    assert sorted(found["unavailable"]) == ["sensitivity", "targets", "values", "what_if"]
    assert all(reason == FLOAT_MODULE_MESSAGE for reason in found["unavailable"].values())
    assert {node["state"] for node in found["nodes"]} <= {"float", "fused"}
    assert found["bytes_before"] == found["bytes_after"]
    assert [node["bits"] for node in found["nodes"] if node["bits"]] == [[32, 32]] * 6
    assert found["modules"][0]["quantized_layers"] == 0
    assert found["latency"]["seconds"] > 0
    assert "global_quantization_settings: null" in found["reproduction"]["settings"]
    assert "tracing_inputs=inputs" in found["reproduction"]["code"]


def test_clika_report_int4_layer_shows_bits_and_bytes(tmp_path):
    """INT4 layers show their bits and bytes."""
    module = compile_int4()
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    (linear,) = [node for node in found["nodes"] if node["scope"] == "head" and node["bits"]]
    assert (linear["state"], linear["planned"], linear["bits"]) == ("weight_only", "int4 weights", [4, 32])
    assert linear["bytes_before"] == 4 * 512 * 10
    assert 512 * 10 / 2 < linear["bytes_after"] < 512 * 10
    assert found["bytes_before"] - found["bytes_after"] > linear["bytes_before"] / 2


def test_clika_report_loaded_module_keeps_bits_and_bytes(module, contents, tmp_path):
    """A loaded module keeps bits and bytes, and missing parts have their reason."""
    module.clika_save(tmp_path / "saved")
    loaded = ClikaModule.clika_load(tmp_path / "saved")
    found = read_contents(loaded.clika_report(tmp_path / "report.html"))
    assert sorted(found["unavailable"]) == ["sensitivity", "targets", "values", "what_if"]
    assert "was loaded, and files store only quantized weights" in found["unavailable"]["what_if"]
    assert found["unavailable"]["values"] == NO_RANGES_MESSAGE
    before = {
        node["name"]: (node["bits"], node["state"], node["bytes_before"]) for node in contents["nodes"] if node["bits"]
    }
    again = {
        node["name"]: (node["bits"], node["state"], node["bytes_before"]) for node in found["nodes"] if node["bits"]
    }
    assert again == before


def test_clika_report_module_sums_match_nodes(contents):
    """The sums of a module equal those of its nodes."""
    modules = {module["scope"]: module for module in contents["modules"]}
    assert list(modules) == [
        "",
        "stem",
        "blocks",
        "blocks.0",
        "blocks.0.first",
        "blocks.0.second",
        "blocks.1",
        "blocks.1.first",
        "blocks.1.second",
        "head",
    ]
    block = modules["blocks.0"]
    assert (block["layers"], block["quantized_layers"]) == (2, 1)
    assert contents["modules"][block["parent"]]["scope"] == "blocks"
    inside = [node for node in contents["nodes"] if node["scope"].startswith("blocks.0")]
    assert block["count"] == len(inside)
    assert block["bytes_after"] == sum(node["bytes_after"] for node in inside)
    assert block["sensitivity"] == max(node["sensitivity"] for node in inside if node["sensitivity"] is not None)


def test_clika_report_contains_warnings_of_log(tmp_path):
    """The report contains the warnings of the log, each once."""
    module = clika_compile(make_float_model(), tracing_inputs=[X], deployment_settings=HERE)
    module.clika_initialize_algorithms()
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert any("which may differ from real data" in text for text in found["warnings"])
    assert len(found["warnings"]) == len(set(found["warnings"]))


def make_float_model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)).eval()


def test_clika_report_planned_int8_run_in_float_warned(tmp_path, monkeypatch):
    """INT8 layers that run in float are reported as a warning."""
    module = compile_int8()
    target = type(module.clika_state.registry.targets["onnxruntime"])
    monkeypatch.setattr(target, "explain", lambda self, artifact: {"conv2d": "float: for a test"})
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    warning = "9 of 9 quantized nodes run in float: stem, blocks.0.first, blocks.0.second and 6 more. "
    assert f"{warning}`clika_explain` lists the reasons." in found["warnings"]
    assert find_node(found, "conv2d")["state"] == "not_quantized"


def test_clika_report_repeat_contains_settings_and_versions(contents):
    """The report contains the settings, versions and timings to repeat the run."""
    reproduction = contents["reproduction"]
    assert "quantization_sensitivity_threshold: 0.005" in reproduction["settings"]
    assert "blocks.0.second" in reproduction["settings"]
    assert {"Python", "clika-ref", "torch", "onnxruntime", "clika-ref-onnxruntime"} <= set(reproduction["versions"])
    assert reproduction["versions"]["torch"] == version("torch")
    assert {"system", "processor"} <= set(reproduction["machine"])
    assert {"Capturing", "Quantizing"} <= set(reproduction["seconds"])


def test_clika_report_pruned_adapted_module_limits_repeat(contents, tmp_path):
    """For pruned and adapted modules, the report lists the steps that the settings do not repeat."""
    assert "reproduction" not in contents["unavailable"]
    module = clika_compile(Small().eval(), calibration_inputs=[X] * 8, deployment_settings=HERE)
    module.clika_prune(PruningSettings(pruning_sensitivity_threshold=1.0))
    pruned = read_contents(module.clika_report(tmp_path / "pruned.html"))["unavailable"]["reproduction"]
    assert pruned == (
        "The settings below do not include all steps: the module was pruned (sizes before are those after pruning). "
        "Repeat these steps, too."
    )
    module.clika_initialize_algorithms()
    module.clika_attach_lora(LoraSettings(rank=2, target_layers=["head"]))
    both = read_contents(module.clika_report(tmp_path / "both.html"))["unavailable"]["reproduction"]
    assert "sizes before are those after pruning) and adapters were attached. Repeat these steps, too." in both


def test_clika_report_settings_load_from_file(module, contents, tmp_path):
    """The settings in the report load from a file."""
    place = tmp_path / "settings.yaml"
    place.write_text(contents["reproduction"]["settings"])
    settings = Settings.load_from_path(place)
    assert settings.global_quantization_settings == module.clika_state.request.given
    assert settings.deployment_settings == HERE
    assert settings.layer_settings["blocks.0.second"].quantization_settings.skip_quantization


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("report.pdf", r"cannot write a report to 'report.pdf': the name ends in '.pdf'. Use .html"),
        ("report", r"cannot write a report to 'report': the name has no suffix. Use .html"),
        ("folder.html", r"cannot write a report to .*folder.html': it is a folder. Add a file name"),
        ("missing/report.html", r"cannot write .*missing' does not exist. Create it, or choose another path"),
    ],
)
def test_clika_report_invalid_path_raises_before_work(module, tmp_path, monkeypatch, name, message):
    """An invalid path raises an error before the report is built."""
    (tmp_path / "folder.html").mkdir()
    monkeypatch.setattr("clika_ref_visualize.report.report_builder.build_contents", None)
    with pytest.raises(ModelError, match=message):
        module.clika_report(tmp_path / name)


def test_clika_report_wrong_argument_types_raise(module, tmp_path):
    """A path or settings of a wrong type raise an error."""
    with pytest.raises(ModelError, match=r"path is 3, a int. Give a path such as 'model.html'"):
        module.clika_report(3)
    with pytest.raises(ModelError, match=r"deployments is 'openvino'. Give a list of deployment settings, such as"):
        module.clika_report(tmp_path / "report.html", "openvino")


def test_clika_report_failure_keeps_existing_file(module, tmp_path, monkeypatch):
    """A failure keeps the existing report."""
    place = tmp_path / "report.html"
    place.write_text("before")

    def raise_error(contents):
        raise KeyboardInterrupt

    monkeypatch.setattr("clika_ref_visualize.report.page.render_report", raise_error)
    with pytest.raises(KeyboardInterrupt):
        module.clika_report(place)
    assert place.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_clika_report_keeps_module_unchanged(tmp_path):
    """The report changes neither the module nor its outputs."""
    module = compile_int8()
    before, results = module.clika_serialize(), module(X)
    module.clika_report(tmp_path / "report.html")
    assert module.clika_serialize() == before
    assert torch.equal(module(X), results)


def count_calls(monkeypatch, target, *names):
    """Return the number of calls of a target's methods, by name."""
    calls = dict.fromkeys(names, 0)

    def count(name, method):
        def count_and_call(self, *args, **options):
            calls[name] += 1
            return method(self, *args, **options)

        monkeypatch.setattr(target, name, count_and_call)

    for name in names:
        count(name, getattr(target, name))
    return calls


def test_clika_report_compiles_one_int8_and_one_float_artifact(tmp_path, monkeypatch):
    """One INT8 artifact is written for all facts, and one float artifact to compare with."""
    module = compile_int8()
    target = type(module.clika_state.registry.targets["onnxruntime"])
    calls = count_calls(monkeypatch, target, "compile", "explain", "profile", "load")
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    assert calls == {"compile": 2, "explain": 1, "profile": 1, "load": 2}
    assert found["bytes_of_file"] == found["targets"][0]["bytes"]


def test_clika_report_float_module_compiles_one_artifact(tmp_path, monkeypatch):
    """A float module is written as one artifact."""
    module = compile_float()
    target = type(module.clika_state.registry.targets["onnxruntime"])
    calls = count_calls(monkeypatch, target, "compile", "explain", "profile", "load")
    module.clika_report(tmp_path / "report.html")
    assert calls == {"compile": 1, "explain": 1, "profile": 1, "load": 0}


def test_clika_report_missing_runtime_keeps_file_size(tmp_path, monkeypatch):
    """The file size is reported without the runtime."""
    module = compile_int8()
    monkeypatch.setattr(
        type(module.clika_state.registry.targets["onnxruntime"]), "unavailable_reason", lambda self: "it is gone"
    )
    found = read_contents(module.clika_report(tmp_path / "report.html"))
    (row,) = found["targets"]
    assert found["bytes_of_file"] == row["bytes"] > 0
    assert (row["unavailable_reason"], row["unsupported_reason"]) == ("it is gone", "")
