"""Every stage of the pipeline from one import, for research.

`docs/stages.md` calls them one by one on a network. A stage takes the result of the stage before it, and most stages
also take the `Registry` of plugins.

| stage | name | input -> output |
|---|---|---|
| plugins | `load_registry` | names of plugins -> `Registry` |
| capture | `make_callable` | model -> `TracedCallable` |
| | `make_calls` | `TracedCallable`, tracing inputs -> `ModelCall` for each input |
| | `capture` | `TracedCallable`, calls, `Registry` -> `CaptureResult` with `Graph` and signature |
| | `torchlib_operator` | ATen overload -> operator, for `capture(fallback=...)` |
| run | `interpret` | `Graph`, inputs -> outputs, new state; a hook gets the results of each node |
| | `compile_with_fx` | `Graph` -> callable of generated code |
| | `load_runner` | `Target`, `Artifact` -> a function of tensors in the runtime |
| | `find_state` | `Artifact` -> the output that each input of its state takes in the next call |
| | `load_stateful_runner` | `Target`, `Artifact` -> the same, with this state in the runtime |
| clean | `clean_graph` | `Graph`, `Registry` -> `PassReport` for each run of a pass; the graph changes in place |
| prune | `prune_graph` | `Graph`, `PruningRequest`, batches -> `PruningReport`; in place |
| adapters | `attach_adapters` | `Graph`, `LoraSettings` -> `AdapterReport`; in place |
| | `merge_adapters` | `Graph` -> None; adds the adapters to the weights |
| calibrate | `target_for` | deployment settings -> `Target` |
| | `prepare_calibration` | `Graph`, `QuantizationRequest` -> `Calibration` of the lowered graph |
| | `calibrate_graph` | `Calibration`, batches -> `QuantizationPipeline` |
| decide | `decide_quantization` | `QuantizationPipeline`, `Graph` -> `Quantization` with a `Plan` and reasons |
| placement | `choose_placement` | `Graph`, quantization scheme -> `Placement` |
| sensitivity | `estimate_sensitivities` | `Graph`, `Placement`, `Plan`, inputs -> `Sensitivities` |
| mixed precision | `select_float_layers` | `Sensitivities` -> layers to keep in float, with reasons |
| observers | `search_observers` | `Planner`, `Placement` -> `ObserverSearchResult` |
| evaluation | `CandidateEvaluation` | `Plan` -> output error on batches |
| SmoothQuant | `search_smoothing_factors` | `Graph`, inputs -> factors for the channels of activations |
| GPTQ | `round_weights` | `Graph`, `Plan`, batches -> `RoundedWeight` for each layer |
| bias correction | `BiasShifts` | `Graph`, `Plan`, batches -> a correction for each layer |
| weight-only | `quantize_weights_only` | `Calibration`, settings -> `WeightOnlyResult` |
| lower | `lower_for` | `Plan`, clone of the `Graph`, `Target` -> `PassReport`s; in place |
| Q/DQ | `quantize_graph` | lowered `Graph`, `Plan` -> None; inserts quantize and dequantize nodes |
| | `quantize_for_target` | `Graph`, `Plan`, `Target` -> `Graph`: both steps on a clone |
| QAT | `initial_log_scales` | `Plan` -> parameters of learned scales |
| | `make_trainable` | lowered `Graph`, `Plan`, log scales -> `Graph` with fake quantization; in place |
| | `apply_learned_scales` | `Plan`, log scales -> `Plan` |
| write | `name_interface` | `Graph`, names -> None; sets the names of the inputs and outputs |
| | `check_supported` | `Graph`, `Target` -> None, or an error with all unsupported nodes |
| | `export` | `ExportRequest` -> `Artifact`: lower, quantize, write and compare |
| compare | `compare_artifact` | float `Artifact`, `Graph`, inputs -> a summary sentence, or an error |
| | `compare_quantized` | quantized `Artifact`, `Graph`, inputs -> a summary sentence, or an error |
| | `measure_agreement` | two models, inputs -> `Agreement` with the SQNR of each output |
| explain | `explain` | `Graph`, `Plan`, `Target` -> `Explanation` with the real precision of each node |
| latency | `LayerTimer` | lowered `Graph`, inputs -> layers that quantization makes slower |
| | `measure_ratio_to_float` | `Graph`, `Plan`, `Target`, inputs -> latency relative to float |
| | `measure_seconds_and_ratio` | two runners, inputs -> seconds of the first, and the ratio of both |
| wrap | `ClikaModule` | `Graph`, signature -> a drop-in `nn.Module` |
| | `QuantizationState` | name of a target, `Plan` -> the quantization of a module |
| | `set_quantization` | `ClikaModule`, `QuantizationState` -> None; the module then runs the quantized graph |
| log | `CompilationLog` | stages report their results to it |

The classes of results, such as `Calibration` and `Plan`, can be imported from here, too.
"""

# ruff: noqa: PLC0414 - each alias exports a name

from clika_ref.capture.callables import TracedCallable as TracedCallable
from clika_ref.capture.callables import make_callable as make_callable
from clika_ref.capture.capture import CaptureResult as CaptureResult
from clika_ref.capture.capture import capture as capture
from clika_ref.capture.inputs import ModelCall as ModelCall
from clika_ref.capture.inputs import make_calls as make_calls
from clika_ref.compiled.latency import LayerTimer as LayerTimer
from clika_ref.compiled.latency import measure_ratio_to_float as measure_ratio_to_float
from clika_ref.compiled.latency import measure_seconds_and_ratio as measure_seconds_and_ratio
from clika_ref.compiled.lowering import check_supported as check_supported
from clika_ref.compiled.lowering import lower_for as lower_for
from clika_ref.compiled.lowering import quantize_for_target as quantize_for_target
from clika_ref.compiled.lowering import target_for as target_for
from clika_ref.compiled.quantization_state import QuantizationState as QuantizationState
from clika_ref.compiled.runners import load_runner as load_runner
from clika_ref.compiled.state import set_quantization as set_quantization
from clika_ref.compiled.stateful_runners import find_state as find_state
from clika_ref.compiled.stateful_runners import load_stateful_runner as load_stateful_runner
from clika_ref.compress.calibration_pass import prepare_calibration as prepare_calibration
from clika_ref.compress.graph_quantization import calibrate_graph as calibrate_graph
from clika_ref.compress.graph_quantization import decide_quantization as decide_quantization
from clika_ref.core.artifacts import Artifact as Artifact
from clika_ref.core.execution import interpret as interpret
from clika_ref.core.fx_execution import compile_with_fx as compile_with_fx
from clika_ref.core.ir import Graph as Graph
from clika_ref.core.passes import PassReport as PassReport
from clika_ref.core.registry import Registry as Registry
from clika_ref.core.registry import clean_graph as clean_graph
from clika_ref.core.registry import load_registry as load_registry
from clika_ref.core.targets import Target as Target
from clika_ref.export.artifact_check import compare_artifact as compare_artifact
from clika_ref.export.configuration import ExportConfiguration as ExportConfiguration
from clika_ref.export.explanation import Explanation as Explanation
from clika_ref.export.explanation import explain as explain
from clika_ref.export.export import ExportRequest as ExportRequest
from clika_ref.export.export import export as export
from clika_ref.export.interface import name_interface as name_interface
from clika_ref.export.model_comparison import Agreement as Agreement
from clika_ref.export.model_comparison import measure_agreement as measure_agreement
from clika_ref.export.quantized_check import compare_quantized as compare_quantized
from clika_ref.lora.attaching import attach_adapters as attach_adapters
from clika_ref.lora.merging import merge_adapters as merge_adapters
from clika_ref.lora.report import AdapterReport as AdapterReport
from clika_ref.module.clika_module import ClikaModule as ClikaModule
from clika_ref.onnx_export.generic_operators import torchlib_operator as torchlib_operator
from clika_ref.pruning.report import PruningReport as PruningReport
from clika_ref.pruning.stages import PruningRequest as PruningRequest
from clika_ref.pruning.stages import prune_graph as prune_graph
from clika_ref.quantization.algorithms.bias_correction import BiasShifts as BiasShifts
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation as CandidateEvaluation
from clika_ref.quantization.algorithms.gptq import RoundedWeight as RoundedWeight
from clika_ref.quantization.algorithms.gptq import round_weights as round_weights
from clika_ref.quantization.algorithms.mixed_precision import select_float_layers as select_float_layers
from clika_ref.quantization.algorithms.sensitivity import Sensitivities as Sensitivities
from clika_ref.quantization.algorithms.sensitivity import estimate_sensitivities as estimate_sensitivities
from clika_ref.quantization.algorithms.smooth_quant import QuantizedInputEvaluator as QuantizedInputEvaluator
from clika_ref.quantization.algorithms.smooth_quant import SmoothingOptions as SmoothingOptions
from clika_ref.quantization.algorithms.smooth_quant import search_smoothing_factors as search_smoothing_factors
from clika_ref.quantization.algorithms.weight_only import WeightOnlyResult as WeightOnlyResult
from clika_ref.quantization.algorithms.weight_only import quantize_weights_only as quantize_weights_only
from clika_ref.quantization.calibration.calibrator import Calibration as Calibration
from clika_ref.quantization.calibration.observer_search import ObserverSearchResult as ObserverSearchResult
from clika_ref.quantization.calibration.observer_search import search_observers as search_observers
from clika_ref.quantization.calibration.range_table import RangeTable as RangeTable
from clika_ref.quantization.decision import Quantization as Quantization
from clika_ref.quantization.pipeline import QuantizationPipeline as QuantizationPipeline
from clika_ref.quantization.qat.learned_scales import apply_learned_scales as apply_learned_scales
from clika_ref.quantization.qat.learned_scales import initial_log_scales as initial_log_scales
from clika_ref.quantization.qat.training_graph import make_trainable as make_trainable
from clika_ref.quantization.qdq.insertion import Plan as Plan
from clika_ref.quantization.qdq.insertion import quantize_graph as quantize_graph
from clika_ref.quantization.qdq.placement import Placement as Placement
from clika_ref.quantization.qdq.placement import choose_placement as choose_placement
from clika_ref.quantization.qdq.planning import Planner as Planner
from clika_ref.quantization.qdq.qparams import QParams as QParams
from clika_ref.quantization.request import QuantizationRequest as QuantizationRequest
from clika_ref.reporting.log import CompilationLog as CompilationLog
