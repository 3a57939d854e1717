"""Two processes with one model: their decisions, failures and training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "multi_process_worker.py"
TIMEOUT_S = 240


def run(group, folder, ranks=2):
    """Run a group of scenarios in several processes; return their exit codes and their stderr."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), group, str(rank), str(ranks), str(folder)],
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


class Found:
    """Return the results of the scenarios of a group, by rank."""

    def __init__(self, group, folder):
        self.folder = folder
        codes, said = run(group, folder)
        assert codes == [0, 0], "\n".join(said)

    def results_of(self, scenario):
        return [json.loads((self.folder / f"{scenario}.{rank}.json").read_text()) for rank in range(2)]

    def messages_of(self, scenario):
        return [found["message"] for found in self.results_of(scenario)]


@pytest.fixture(scope="module")
def quantizing_run(tmp_path_factory):
    return Found("quantizing", tmp_path_factory.mktemp("quantizing"))


@pytest.fixture(scope="module")
def failing_run(tmp_path_factory):
    return Found("failing", tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def training_run(tmp_path_factory):
    return Found("training", tmp_path_factory.mktemp("training"))


# Quantizing


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["linear_layers", "convolutions", "int4", "by_each_option", "small_reservoir", "no_data_on_one"]
)
def test_calibration_two_ranks_matches_one_process(quantizing_run, scenario):
    """Two ranks observe and decide the same as one process with all data."""
    one, other = quantizing_run.results_of(scenario)
    multi_process_worker, alone = one["seen"]
    assert multi_process_worker == alone
    assert other["seen"][0] == multi_process_worker
    assert len({*one["plans"], *other["plans"]}) == 1


@pytest.mark.slow
def test_calibration_scenarios_exercise_quantization(quantizing_run):
    """The compared scenarios quantize weights, apply SmoothQuant and fill the reservoir."""
    assert quantizing_run.results_of("linear_layers")[1]["smoothed"] > 0
    assert all(
        quantizing_run.results_of(scenario)[1]["weights"] for scenario in ("linear_layers", "convolutions", "int4")
    )
    (_, kept), *_ = [(0, found["seen"][0]["kept"]) for found in quantizing_run.results_of("small_reservoir")]
    assert 1 < len(kept) < 7
    assert quantizing_run.results_of("small_reservoir")[0]["seen"][0]["is_full"]


def test_calibration_uneven_ranks_warned_counted_once(quantizing_run):
    """Uneven ranks give a warning, and each batch counts once."""
    one, other = quantizing_run.results_of("uneven_data")
    assert one["plans"][0] == one["plans"][1] == other["plans"][0]
    assert "Warning: The ranks calibrated on different numbers of batches: 5, 1. Each batch counts once" in one["log"]
    assert "6 batches of 2 ranks" in one["log"]


def test_quantize_compiled_module_matches_one_process(quantizing_run):
    """Requantizing on two ranks by data, threshold and goal matches one process; rank 0 scores the goal."""
    one, other = quantizing_run.results_of("requantize")
    assert one["plans"][:3] == one["plans"][3:]
    assert other["plans"][:3] == one["plans"][:3]
    assert len({*one["plans"]}) == 3


def test_prune_two_ranks_uses_tracing_inputs_of_rank0(quantizing_run):
    """Ranks prune by the tracing inputs of rank 0."""
    one, other = quantizing_run.results_of("prune")
    assert len({*one["models"], *other["models"]}) == 1


def test_prune_dealt_data_matches_one_process(quantizing_run):
    """Ranks with dealt data prune as one process with all data does."""
    one, other = quantizing_run.results_of("prune_by_dealt_data")
    assert len({*one["plans"], *other["plans"]}) == 1
    assert len({*one["models"], *other["models"]}) == 1
    assert one["of the first"] not in one["models"], "by the data of one rank, another model is found"


def test_attach_lora_two_ranks_equal_adapters(quantizing_run):
    """All ranks have the adapters that rank 0 draws."""
    one, other = quantizing_run.results_of("attach_adapters")
    assert one == other
    assert one["models"][0] != one["models"][1], "drawn one after the other"


def test_clika_compile_uncoordinated_processes_warned(quantizing_run):
    """Processes without distributed settings are warned."""
    for found in quantizing_run.results_of("replicate_without_settings"):
        assert "Warning: 2 processes are running, and each quantizes with its own data" in found["log"]
        assert "distributed_training_settings=DistributedTrainingSettings(multi_gpu=True)" in found["log"]


# Failing

NAN = "calibration batch {}: the input 'x' contains NaN. Remove the batch, or fix it."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "rank", "reason"),
    [
        ("nan_on_one", 1, f"ModelError: {NAN.format(2)}"),
        ("nan_in_first_batch", 0, f"ModelError: {NAN.format(1)}"),
        ("no_data_on_first", 0, "ModelError: cannot calibrate: calibration_inputs are empty"),
        ("user_error_on_one", 1, "OSError: the disk is gone"),
        ("error_before_sum", 1, "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_clika_compile_failing_rank_stops_all(failing_run, scenario, rank, reason):
    """If one rank fails, all raise an error with its reason."""
    said = failing_run.messages_of(scenario)
    assert f"rank {rank} of 2 failed, so all ranks stop: {reason}" in said[1 - rank]
    assert reason.partition(": ")[2] in said[rank]
    assert "so all ranks stop" not in said[rank], "the one that failed has its own error"


@pytest.mark.slow
def test_clika_compile_wrong_argument_on_one_rank_stops_all(failing_run):
    """A wrong argument on one rank raises an error on all ranks."""
    reasons = [
        "cannot quantize: quantization_settings are given without calibration_inputs",
        "unknown option 'no_option' = 1",
        "pruning_settings is 3, a int",
        "lora_settings is 4, a int",
        "quantization_settings is 5, a int",
        "cannot distribute a int: it is no ClikaModule",
        "eval_fn is 7, a int",
    ]
    one, other = failing_run.messages_of("arguments_on_one")
    for reason, said, own in zip(reasons, one, other, strict=True):
        assert own.startswith(reason)
        assert said.startswith("rank 1 of 2 failed, so all ranks stop: ")
        assert reason in said


def test_clika_compile_all_ranks_fail_own_errors(failing_run):
    """If all ranks fail, each raises its own error."""
    assert failing_run.messages_of("error_on_both") == [NAN.format(2)] * 2


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("other_weights", "rank 1 has a different model than rank 0: its graph or its weights differ"),
        ("ranges_file", "the file is for one process, and several calibrate together"),
        (
            "other_plans",
            "cannot train together: rank 1 has another plan than rank 0, or weights of other shapes",
        ),
        ("other_shapes", "rank 1 has another plan than rank 0, or weights of other shapes"),
        ("other_steps", "cannot train together: the ranks have 3, 4 steps"),
    ],
)
def test_clika_distribute_unsupported_rejected_on_each_rank(failing_run, scenario, reason):
    """Other models, plans, shapes or steps per rank raise an error on each rank."""
    assert all(reason in said for said in failing_run.messages_of(scenario))


@pytest.mark.parametrize(
    ("scenario", "differences"),
    [
        (
            "other_targets",
            ["deployment_settings (DeploymentSettings_TensorRT_ONNX instead of DeploymentSettings_ONNXRuntime_ONNX)"],
        ),
        (
            "other_options",
            ["clika_compile_options.batch_norm ('live' instead of 'frozen'). Give all ranks the same settings."],
        ),
        (
            "other_thresholds",
            ["quantization_settings.quantization_sensitivity_threshold (0.005 instead of 1000000000.0)"],
        ),
        ("float_on_one", ["quantization_settings (None instead of QuantizationSettings)"]),
        (
            "other_settings_later",
            [
                "pruning_settings.sparsity (0.75 instead of 0.5)",
                "lora_settings.rank (3 instead of 2)",
                "layer_quantization_settings ({'head': LayerQuantizationSettings(",
                "whether there are calibration_inputs (False instead of True)",
            ],
        ),
        ("other_norms", ["batch_norm ('live' instead of 'frozen')"]),
        ("other_frozen_weights", ["head.weight.requires_grad (False instead of True)"]),
        ("shard_on_one", ["use_sharding (True instead of False)"]),
    ],
)
def test_other_settings_rejected_on_each_rank_with_names(failing_run, scenario, differences):
    """Other settings on one rank raise an error on each rank that names them."""
    for said in failing_run.messages_of(scenario):
        for difference in differences:
            assert f"rank 1 has different settings than rank 0: {difference}" in said


def test_clika_compile_after_failure_works_again(failing_run):
    """After a failure, the ranks can compile again."""
    one, other = failing_run.results_of("convolutions")
    assert one["plans"][0] == one["plans"][1] == other["plans"][0]


@pytest.mark.slow
def test_clika_compile_exited_rank_stops_others(tmp_path):
    """If one rank exits, the others stop with an error."""
    codes, said = run("ending", tmp_path)
    assert codes[1] == 3
    assert codes[0] == 0, said[0]
    message = json.loads((tmp_path / "exit_during_data.0.json").read_text())["message"]
    assert "another process has ended or does not respond, so this one stops too" in message


@pytest.mark.slow
def test_clika_compile_unresponsive_rank_named(tmp_path):
    """A rank that does not answer before the timeout is named."""
    run("hanging", tmp_path)
    found = json.loads((tmp_path / "hang.0.json").read_text())
    assert "another process has ended or does not respond" in found["message"]
    assert "Ranks 1 failed to pass monitoredBarrier" in found["message"]
    assert "init_process_group(timeout=...)" in found["message"]


# Training


def assert_parameters_close(found, expected):
    """Compare parameters with those of one process, whose gradient sums are rounded differently.

    Another rounding may change a quantized value, which changes the gradient of its scale by some per cent if few
    elements share the scale. A sum in place of a mean would be wrong by a factor of two.
    """
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        rel, off = (0.2, 1e-3) if name.startswith("clika.log") else (1e-4, 1e-5)
        assert found[name] == pytest.approx(numbers, rel=rel, abs=off), name


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["train_replicated", "train_sharded"])
def test_clika_distribute_training_matches_one_process(training_run, scenario):
    """Ranks train the same weights as one process, replicated and sharded."""
    one, other = training_run.results_of(scenario)
    assert one["digest"] == other["digest"]
    assert_parameters_close(one["numbers"], one["alone"])
    scales = [numbers for name, numbers in one["numbers"].items() if name.startswith("clika.log")]
    assert len(scales) > 6
    assert all(any(numbers) for numbers in scales), "each scale has learned"
    assert one["bytes"] > 1000


def test_clika_distribute_unused_layer_trains(training_run):
    """A model with a layer that is never called trains on several ranks."""
    one, other = training_run.results_of("train_idle_weights")
    assert one["digest"] == other["digest"]
    assert one["grads"] == [True, False]


def test_clika_distribute_wrapper_follows_settings(training_run):
    """The settings select DDP or FSDP."""
    assert training_run.results_of("train_replicated")[0]["kind"] == "DistributedDataParallel"
    assert training_run.results_of("train_sharded")[0]["kind"] == "FSDPClikaModule"


def test_clika_distribute_sharded_holds_own_share_only(training_run):
    """A sharded module holds its share of the weights and no whole tensor."""
    found = training_run.results_of("train_sharded")
    assert sum(of["share"] for of in found) == pytest.approx(1)
    assert all(0.4 < of["share"] < 0.6 for of in found), "small weights do not divide evenly"
    assert [of["holds"] for of in found] == [0, 0]


def test_clika_gather_sharded_eval_continue_and_gather(training_run):
    """A sharded module evaluates, continues training and is gathered with equal outputs."""
    for found in training_run.results_of("train_sharded"):
        assert found["same"] == [True, True, True]
        assert found["settings"] == [True, True, False]


def test_clika_export_sharded_needs_gather(training_run):
    """Exporting a sharded module raises an error that suggests `clika_gather`."""
    for found in training_run.results_of("train_sharded"):
        assert "is sharded over processes, but the whole weight is needed. Call" in found["message"]


def test_fully_shard_by_user_trains(training_run):
    """A module that the user shards with `fully_shard` trains equal weights on all ranks."""
    one, other = training_run.results_of("shard_without_clika")
    assert one["whole"] == other["whole"]


def test_sharded_module_alternating_train_eval_matches_gather(training_run):
    """Alternating training and evaluation gives the outputs of the gathered module."""
    one, other = training_run.results_of("switch_modes_sharded")
    assert one["same"] == other["same"] == [True, True]
    assert one["whole"] == other["whole"]


def test_sharded_module_live_norms_use_rank0_stats(training_run):
    """Evaluating or freezing a sharded module uses the batch norm statistics of rank 0."""
    one, other = training_run.results_of("train_sharded_live_norms")
    assert one["own"] != other["own"], "in training, each rank counts for itself"
    assert one["live"] == other["live"]
    assert one["statistics"] == other["statistics"]
    assert one["whole"] == other["whole"]
    assert all(found["same"] for found in (one, other))
    assert all(found["divided"] for found in (one, other))


def test_clika_distribute_sharded_starts_from_rank0_weights(training_run):
    """All ranks of a sharded module start with the weights of rank 0."""
    one, other = training_run.results_of("shard_other_weights")
    assert one["before"] != other["before"]
    assert one["whole"] == other["whole"] == one["before"]


def test_fully_shard_of_submodules_rejected(training_run):
    """Sharding parts of a module raises an error."""
    for said in training_run.messages_of("shard_in_parts"):
        assert "the weights of a submodule are sharded on their own" in said
        assert "fully_shard(module)" in said
