"""The command line: output, arguments of the Python interface, and exit statuses."""

import errno
import importlib
import importlib.metadata
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
import typer
from clika_ref_cli import cli, explaining, plugin_facts
from onnx_sessions import open_session
from typer.testing import CliRunner

import clika_ref
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import DisagreementError, ModelError, PluginError, TargetError
from clika_ref.core.operators import operator
from clika_ref.core.registry import Plugin


@pytest.fixture
def run(monkeypatch):
    """Run the command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")  # of the help
    return lambda *words: CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def compilation(monkeypatch):
    """Replace compilation by a recorder of its arguments, which returns a module whose export writes three bytes."""
    seen = SimpleNamespace(model=None, arguments=None, exported=[])

    def record_compilation(model, **arguments):
        seen.model, seen.arguments = model, arguments
        return SimpleNamespace(clika_export=export, timings={"Capturing": 0.5})

    def export(path):
        seen.exported.append(path)
        return Artifact(path, "onnxruntime", ("input",), ("output",), {"bytes": path.write_bytes(b"abc")})

    monkeypatch.setattr(clika_ref, "clika_compile", record_compilation)
    return seen


@operator(torch.ops.aten.relu.default)
def relu(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)``.

    Second paragraph about float32[b, 3].
    """
    return torch.relu(x)


@pytest.fixture
def fake_distributions(monkeypatch):
    """Replace the installed distributions."""
    plugin = Plugin("mine", "my-distribution", "1.2", operators=(relu,))
    found = {"failures": (), "excluded": ()}
    for module in (plugin_facts, explaining):
        monkeypatch.setattr(module, "load_installed_plugins", lambda: plugin_facts.InstalledPlugins((plugin,), **found))
    return found


def test_help_lists_commands_and_options(run):
    """`--help` lists the commands, their options and the exit statuses."""
    out = run("--help").stdout
    assert all(command in out for command in cli.COMMANDS)
    assert "Exit status: 0 success; 1 negative result" in " ".join(out.split())
    out = run("compile", "--help").stdout
    for option in ("--input", "--output", "--target", "--logs-dir", "--seed", "--static", "--train-mode", "--dry-run"):
        assert option in out


def test_version_prints_version_of_distribution(run):
    """`--version` prints the version of the distribution."""
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"clika-ref {importlib.metadata.version('clika-ref')}\n")


def test_compile_unknown_keyword_lists_arguments(run, monkeypatch):
    """An unknown keyword input raises an error that lists the arguments of forward."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    result = run("compile", "torch.nn:Sigmoid", "--input", "image=1x1x8x8", "--dry-run")
    assert result.exit_code == 3
    assert "No argument 'image': forward takes input" in result.stderr


def test_compile_passes_options_on_and_exports(run, compilation, tmp_path):
    """`compile` passes its options on and exports to the file."""
    path = tmp_path / "model.onnx"
    result = run(
        *("compile", "torch.nn:Sigmoid", "--input", "1x3", "--input", "2x3", "-o", path),
        *("--logs-dir", tmp_path, "--static", "--train-mode", "--no-compare"),
    )
    assert result.exit_code == 0, result.output
    assert isinstance(compilation.model, torch.nn.Sigmoid)
    given = compilation.arguments
    assert [t.shape for t in given["tracing_inputs"]] == [(1, 3), (2, 3)]
    assert given["deployment_settings"].is_ONNXRuntime_ONNX()
    assert given["logs_dir"] == tmp_path
    assert (given["dynamic"], given["skip_eval_set_mode"], given["is_dry_run"]) == (False, True, False)
    assert not given["clika_compile_options"].compare_after_export
    assert compilation.exported == [path]
    assert result.stdout == f"{path}  3 bytes\n"


def test_compile_defaults_match_api(run, compilation, tmp_path):
    """The defaults of `compile` are those of `clika_compile`."""
    assert run("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m").exit_code == 0
    given = compilation.arguments
    assert given["logs_dir"] is None
    assert (given["dynamic"], given["skip_eval_set_mode"], given["is_dry_run"]) == (True, False, False)
    assert given["clika_compile_options"].compare_after_export


def test_compile_seed_fixes_weights_and_inputs(run, compilation, tmp_path, monkeypatch):
    """`--seed` fixes weights and inputs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "seeded_model.py").write_text("import torch\ndef make(): return torch.nn.Linear(3, 3)\n")

    def compile_and_read_numbers(*more):
        assert run("compile", "seeded_model:make", "--input", "1x3", "-o", tmp_path / "m", *more).exit_code == 0
        return (
            compilation.model.weight.flatten().tolist() + compilation.arguments["tracing_inputs"][0].flatten().tolist()
        )

    assert compile_and_read_numbers() == compile_and_read_numbers("--seed", 0) != compile_and_read_numbers("--seed", 1)


def test_compile_target_of_plugin_passed_by_name(run, compilation, tmp_path):
    """A target of a plugin is passed on by name."""
    run("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m", "--target", "interpreter")
    assert compilation.arguments["deployment_settings"].target == "interpreter"


def test_compile_dry_run_needs_no_output(run, compilation, tmp_path):
    """A dry run needs no output file and exports no file."""
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    assert result.exit_code == 0
    assert compilation.arguments["is_dry_run"]
    assert run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run", "-o", tmp_path / "m").exit_code == 0
    assert compilation.exported == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["torch.nn:Sigmoid", "--input", "1x3"],
            "cannot write the result: there is no output path. Give -o FILE, or --dry-run.",
        ),
        (
            ["torch.nn:Sigmoid", "--input", "1x3", "-o", "gone/m"],
            "-o: cannot write gone/m: there is no folder gone. Create it first.",
        ),
        (
            ["torch.nn:Sigmoid", "-o", "m"],
            "error: cannot compile: --input is missing. Give a shape such as 1x3x224x224, or a file of",
        ),
        (["torch.nn:Sigmod", "--input", "1x3", "-o", "m"], "error: cannot load torch.nn:Sigmod: "),
        (["torch.nn:Sigmoid", "--input", "1xa", "-o", "m"], "error: --input '1xa': cannot parse '1xa'. Write dims"),
    ],
)
def test_compile_bad_arguments_exit_2(run, compilation, words, message):
    """Wrong arguments exit with 2 and a message without a traceback."""
    result = run("compile", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert compilation.exported == []


def make_failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_compile_clika_error_prints_message_and_notes(run, monkeypatch):
    """An error prints its message and its notes."""
    error = ModelError("the model has no outputs")
    error.add_note("while compiling it")
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(error))
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    assert (result.exit_code, result.stderr) == (3, "error: the model has no outputs\nwhile compiling it\n")


def test_compile_debug_shows_traceback(run, monkeypatch):
    """`--debug` shows the traceback."""
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(ModelError("the model has no outputs")))
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run", "--debug")
    assert result.exit_code == 3
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("ModelError: the model has no outputs\n")


@pytest.mark.slow
def test_main_unencodable_output_escaped():
    """Output that stdout cannot encode is escaped."""
    code = "import sys, typer; from clika_ref_cli import cli; sys.argv[1:] = ['--version']; "
    code += "cli.add_plugin_commands = lambda app: print('half \\ud800'); cli.main()"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "half \\ud800")


def test_compile_internal_error_exits_70(run, monkeypatch):
    """A bug exits with 70 and one line; `--debug` shows the traceback."""
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(ZeroDivisionError("a bug.")))
    words = ("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    result = run(*words)
    output = (
        "error: ZeroDivisionError: a bug. This is a bug in clika-ref or in a plugin. Run again with --debug, and report"
    )
    assert (result.exit_code, result.stderr) == (70, f"{output} the traceback.\n")
    shown = run(*words, "--debug")
    assert shown.exit_code == 70
    assert shown.stderr.startswith("Traceback (most recent call last):")
    assert shown.stderr.endswith("ZeroDivisionError: a bug.\n")


def test_compile_exit_status_by_error_class(run, monkeypatch):
    """A disagreement exits with 1, an error of a plugin or target with 3."""
    for error, status in ((DisagreementError("off by 1"), 1), (PluginError("it is broken"), 3), (TargetError("no"), 3)):
        monkeypatch.setattr(clika_ref, "clika_compile", make_failing(error))
        result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
        assert (result.exit_code, result.stderr) == (status, f"error: {error}\n")


def test_compile_system_exit_in_model_exits_3(run, monkeypatch):
    """A model that raises SystemExit exits with 3."""
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(SystemExit(0)))
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    output = "error: the model or the data exited the process: SystemExit(0). Remove its call of sys.exit().\n"
    assert (result.exit_code, result.stderr) == (3, output)


def test_compile_interrupt_exits_130(run, monkeypatch):
    """An interrupt exits with 130 and one line."""
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(KeyboardInterrupt()))
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    output = "interrupted: existing files are unchanged, and no incomplete file was written\n"
    assert (result.exit_code, result.stderr) == (130, output)


def test_compile_closed_pipe_exits_1_silently(run, monkeypatch):
    """A closed pipe exits with 1 and prints no error."""
    monkeypatch.setattr(clika_ref, "clika_compile", make_failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run")
    assert (result.exit_code, result.stderr) == (1, "")


def test_plugins_lists_contributions(run, fake_distributions):
    """`plugins` lists the contributions of each plugin, with their names on request."""
    result = run("plugins")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["mine", "my-distribution", "1.2", "1", "operator"] in rows
    assert "relu" not in result.stdout
    assert "mine operators: relu\n" in run("plugins", "--names").stdout


def test_plugins_json_lists_operators(run, fake_distributions):
    """`plugins --json` lists operators and failures."""
    found = json.loads(run("plugins", "--json").stdout)
    assert found["plugins"][0]["operators"] == ["relu"]
    assert found["failures"] == []


def test_plugins_failures_exit_1(run, fake_distributions):
    """`plugins` lists broken and excluded plugins, and exits with 1."""
    fake_distributions["failures"] = ("'broken' = b.plugin (b 0.1): ImportError: no [c]",)
    fake_distributions["excluded"] = ("unwanted",)
    result = run("plugins")
    assert result.exit_code == 1
    assert "cannot be used: 'broken' = b.plugin (b 0.1): ImportError: no [c]" in result.stdout
    assert "unwanted is installed, but excluded by $CLIKA_REF_PLUGINS" in result.stdout
    result = run("plugins", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failures"] == list(fake_distributions["failures"])


def test_explain_operator_prints_facts(run, fake_distributions):
    """`explain` prints the facts about an operator."""
    result = run("explain", "aten.relu.default")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:5] == [
        "schema          relu(x: torch.Tensor) -> torch.Tensor",
        "meaning         ``max(x, 0)``.",
        "",
        "                Second paragraph about float32[b, 3].",
        "ATen calls      aten.relu.default",
    ]
    assert "plugin          'mine' (my-distribution 1.2)" in lines


def test_explain_operator_ignores_broken_plugin(run, fake_distributions):
    """`explain` works although another plugin is broken."""
    fake_distributions["failures"] = ("'broken'",)
    assert run("explain", "relu").exit_code == 0


def test_explain_unknown_operator_suggests_near_name(run, fake_distributions):
    """`explain` answers an unknown operator with similar names."""
    result = run("explain", "rellu")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: cannot find the operator 'rellu': no installed plugin declares it. Did you mean relu"
    )


def test_compile_artifact_runs_with_untraced_batch(run, tmp_path, monkeypatch):
    """The artifact runs with a batch size that was not traced."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "real_model.py").write_text("import torch\nmade = torch.nn.Linear(3, 2)\n")
    path = tmp_path / "model.onnx"
    result = run("compile", "real_model:made", "--input", "1x3", "--input", "2x3", "-o", path)
    assert result.exit_code == 0, result.output
    session = open_session(path)
    model, x = importlib.import_module("real_model").made, torch.randn(7, 3)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    # Three multiplications and a sum of size 1 in another order: some 4 roundings of 6e-8.
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), rtol=0, atol=1e-6)


def test_compile_dry_run_reports_operators_only(run, tmp_path, monkeypatch):
    """A dry run reports the operators and writes no file."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "--dry-run", "-o", tmp_path / "model.onnx")
    assert result.exit_code == 0, result.output
    assert "sigmoid" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_compile_unknown_target_lists_installed(run, tmp_path, monkeypatch):
    """An unknown target exits with 2 and lists the installed ones."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    result = run("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m", "--target", "toaster")
    assert result.exit_code == 2
    assert (
        "error: cannot use the target 'toaster': no installed plugin provides it (installed: onnxruntime). A plugin"
        in result.stderr
    )


def test_target_option_retired_target_rejected(run, tmp_path):
    """A retired target exits with 2 and suggests no installation."""
    for words in (("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m"), ("check", __file__)):
        result = run(*words, "--target", "tflite")
        assert result.exit_code == 2
        assert "It retired before release 25, and is not implemented" in result.stderr
        assert "pip install" not in result.stderr


@pytest.mark.parametrize(
    ("given", "name"),
    [("trt", "tensorrt"), ("ov", "openvino"), ("ort", "onnxruntime"), ("trt-llm", "tensorrt-llm")],
)
def test_compile_short_target_name_resolved(run, compilation, tmp_path, given, name):
    """A short name selects the settings class of its target."""
    run("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m", "--target", given)
    settings = compilation.arguments["deployment_settings"]
    assert settings.target == name
    assert type(settings).__module__ == "clika_ref.settings.compile_options", (
        "one of ours, and none that was made for the name"
    )


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [
        ("OpenVINO", "Did you mean 'openvino'?"),
        ("tensorrt_llm", "Did you mean 'tensorrt-llm'?"),
        ("TRT", "Did you mean 'tensorrt'?"),
        ("interpeter", "Did you mean 'interpreter'?"),
        ("", "Give the name of one."),
        (" ", "Give the name of one."),
    ],
)
def test_target_option_unknown_name_suggests_near(run, tmp_path, given, suggestion):
    """An unknown target lists the installed ones and the near match."""
    known = "interpreter, onnx-reference, onnxruntime, openvino, tensorrt, tensorrt-llm"
    for words in (("compile", "torch.nn:Sigmoid", "--input", "1x3", "-o", tmp_path / "m"), ("check", __file__)):
        result = run(*words, "--target", given)
        assert result.exit_code == 2
        error = f"error: cannot use the target {given!r}: no installed plugin provides it (installed: {known})."
        assert f"{error} {suggestion}\n" in result.stderr


@pytest.mark.slow
def test_import_cli_does_not_import_torch():
    """Importing the command line does not import torch."""
    code = "import sys\nfrom clika_ref_cli import cli\nassert 'torch' not in sys.modules, 'torch was imported'\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_reports_violations_and_unsupported_files(run, tmp_path):
    """`check` reports violated rules, and rejects targets and files that it cannot check."""
    path = tmp_path / "model.onnx"
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    scale = onnx.numpy_helper.from_array(np.float32(0.1), "scale")
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], "quantizer"),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale"], ["y"], "dequantizer"),
    ]
    graph = onnx.helper.make_graph(nodes, "pair", [x], [y], [scale])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), path)
    result = run("check", str(path), "--target", "tensorrt")
    assert result.exit_code == 1
    assert "[integer-type] quantizer: its quantized type is UINT8" in result.stdout
    violations = json.loads(run("check", str(path), "--target", "trt", "--json").stdout)
    assert {violation["rule"] for violation in violations} == {"integer-type", "isolated"}
    for words, message in (
        ([str(path), "--target", "toaster"], "cannot use the target 'toaster': no installed plugin provides it"),
        (
            [str(path), "--target", "onnxruntime"],
            "cannot check files for onnxruntime: it has no rules. Targets with rules: tensorrt",
        ),
        ([str(tmp_path / "none.onnx"), "--target", "tensorrt"], "there is no such file"),
        ([str(tmp_path), "--target", "tensorrt"], "it is a folder. Give a model file in it."),
        ([__file__, "--target", "tensorrt"], "it is not of the form module:factory. Write for example"),
    ):
        result = run("check", *words)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.fixture
def no_suite(monkeypatch):
    """Hide the command that the conformance suite adds."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    app = typer.Typer()
    app.command("other")(lambda: None)
    cli.add_plugin_commands(app)
    return app


@pytest.mark.parametrize("words", [(), ("--help",), ("run", "--target", "onnxruntime")])
def test_conformance_without_the_suite_names_package(no_suite, words):
    result = CliRunner().invoke(no_suite, ["conformance", *words])
    assert result.exit_code == 3
    assert result.stderr == (
        "error: clika-ref conformance: the conformance suite is not installed. Run pip install clika-ref-conformance "
        "(in a clone: pip install conformance; from wheels: add --find-links FOLDER).\n"
    )
