"""The state of a compiled module refers to no weight, in each form of the module, and through its protocols."""

import copy
import functools
import gc
import pickle
import types
import weakref

import pytest
import torch
from adapted_nets import (
    HERE,
    INT4,
    INT8,
    Images,
    Tokens,
    build_net,
    compile_net,
    make_batches,
    make_lora_settings,
    train,
)
from interrupted_data import interrupt_after
from torch import nn

from clika_ref import ClikaModule, LayerQuantizationSettings, PruningSettings

KINDS = [Images, Tokens]
FORMS = ["float", "int8", "int4", "mixed", "pruned", "adapted", "int8-adapted"]
FLOAT_LAYERS = {Images: "grouped", Tokens: "wide"}


def compile_form(kind, form):
    """Return a module in eval mode, calibrated if its form is quantized."""
    settings = {"int8": INT8, "mixed": INT8, "int8-adapted": INT8, "int4": INT4}.get(form)
    lora = make_lora_settings() if form.endswith("adapted") else None
    float_layers = {FLOAT_LAYERS[kind]: LayerQuantizationSettings(skip_quantization=True)}
    options = {"layer_quantization_settings": float_layers} if form == "mixed" else {}
    module = compile_net(kind, settings, lora, **options)
    if form == "pruned":
        module.clika_prune(PruningSettings(), calibration_inputs=make_batches(kind))
        module.clika_initialize_algorithms(INT8, calibration_inputs=make_batches(kind), deployment_settings=HERE)
    return module.eval()


def iter_referents(item):
    """Yield the objects that an object refers to: elements, attributes, and variables of functions."""
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from (cell.cell_contents for cell in item.__closure__ or ())
        yield item.__defaults__
        if item.__code__.co_filename == "<graph>":  # generated code: its globals are its own
            yield dict(item.__globals__)
    elif not isinstance(item, types.ModuleType | type):
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        names = (name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(item, name) for name in names if name != "__weakref__" and hasattr(item, name))


def find_modules_and_tensors(state):
    """Return the modules and tensors that a state refers to, directly or through other objects."""
    found, seen, waiting = [], {}, [state]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it alive, so that no other object gets its id
        if isinstance(item, torch.Tensor | nn.Module):
            found.append(item)
        else:
            waiting += iter_referents(item)
    return found


def find_weights(module):
    """Return the names of the weights whose memory the state of a module refers to."""
    found = find_modules_and_tensors(module.clika_state)
    assert [item for item in found if isinstance(item, nn.Module)] == []
    held = {t.untyped_storage().data_ptr() for t in found if t.numel()}
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return sorted(name for name, t in weights.items() if t.numel() and t.untyped_storage().data_ptr() in held)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_state_refers_to_no_weight_in_each_mode(kind, form):
    """No tensor of the state shares memory with a parameter or buffer, after calls in eval and train mode."""
    module, (x,) = compile_form(kind, form), make_batches(kind, 1)
    assert find_weights(module) == []
    expected = module(x)
    assert find_weights(module) == []
    module.train()(x).sum().backward()
    assert find_weights(module) == []
    assert torch.equal(module.eval()(x), expected)
    assert find_weights(module) == []


def test_find_weights_finds_weights_of_closures_and_graphs():
    """The search of these tests finds weights in closures, views and graphs."""
    module = compile_form(Images, "float")
    weight, view, graph = module.get_parameter("head.weight"), module.get_buffer("norm.running_mean")[:2], module.graph
    module.clika_state.logs_dir = functools.partial(lambda: weight)
    assert find_weights(module) == ["head.weight"]
    module.clika_state.logs_dir = {"view": (view,)}
    assert find_weights(module) == ["norm.running_mean"]
    module.clika_state.logs_dir = graph
    assert set(find_weights(module)) == set(graph.constants)


@pytest.mark.parametrize("form", ["int8", "int4", "mixed", "int8-adapted"])
def test_state_refers_to_no_weight_through_copies_and_files(form, tmp_path):
    """Copies, loaded and gathered modules have states without weights, and compute the same."""
    module, (x,) = compile_form(Tokens, form), make_batches(Tokens, 1)
    expected = module(x)
    module.clika_save(tmp_path / "model.clika", keep_float_weights=True, keep_calibration_inputs=True)
    gathered = copy.deepcopy(module)
    gathered.clika_state.calibration = module.clika_state.calibration
    gathered.unshard = lambda: None  # as fully_shard adds; its weights are whole
    loaded = ClikaModule.clika_load(tmp_path / "model.clika")
    pickled = pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes
    for twin in (copy.deepcopy(module), pickled, loaded, gathered.clika_gather()):
        assert torch.equal(twin.eval()(x), expected)
        assert find_weights(twin) == []
    assert loaded.clika_state.calibration is not None
    assert gathered.clika_gather().clika_state.calibration is not None


@pytest.mark.parametrize("form", ["int8", "int4", "int8-adapted"])
def test_kept_calibration_uses_current_weights(form):
    """A later quantization without data uses the kept ranges with the current weights."""
    module, (x,) = compile_form(Tokens, form), make_batches(Tokens, 1)
    settings = INT4 if form == "int4" else INT8
    before, original = module(x), build_net(Tokens)
    module.clika_initialize_algorithms(settings)
    assert torch.equal(module.eval()(x), before)
    with torch.no_grad():
        for net in (module, original):
            net.get_parameter("narrow.weight").mul_(0.1)
    module.clika_initialize_algorithms(settings)
    error = module.eval()(x) - original(x)
    assert error.norm() < 0.5 * (before - original(x)).norm()  # 0.5: nearer to the new weights than to the old ones
    assert find_weights(module) == []


def test_interrupted_calibration_keeps_no_weight():
    """An interrupted calibration keeps its ranges and no weight, and resumes."""
    module, data = compile_form(Images, "float"), make_batches(Images)
    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(INT8, calibration_inputs=interrupt_after(data[:2]), deployment_settings=HERE)
    assert module.clika_state.unfinished.table.batches == 2
    assert find_weights(module) == []
    module.clika_initialize_algorithms(INT8, calibration_inputs=data, deployment_settings=HERE)
    assert module.clika_state.calibration.table.batches == len(data)
    alone = compile_form(Images, "float")
    alone.clika_initialize_algorithms(INT8, calibration_inputs=data, deployment_settings=HERE)
    assert torch.equal(module.eval()(data[0]), alone.eval()(data[0]))
    assert find_weights(module) == []


def test_goal_search_keeps_no_weight():
    """A search for an accuracy goal ends with a state without weights."""
    module, data = compile_form(Images, "float"), make_batches(Images)
    expected = module(data[0])
    module.clika_quantize_to_goal(
        lambda m: -float((m(data[0]) - expected).norm() / expected.norm()),
        0.1,
        calibration_inputs=data,
        deployment_settings=HERE,
    )
    assert module.eval().clika_state.calibration is not None
    module(data[0])
    assert find_weights(module) == []


@pytest.mark.slow_cases("int8", "float", "pruned", "int4", "mixed")
@pytest.mark.parametrize("form", FORMS)
def test_released_module_frees_its_weights(form):
    """Nothing but the module keeps its weights alive, also while its state is used elsewhere."""
    module, (x,) = compile_form(Tokens, form), make_batches(Tokens, 1)
    module(x)
    weights = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    state = module.clika_state
    del module
    gc.collect()
    assert [name for name, weight in weights.items() if weight() is not None] == []
    assert not state.is_empty


def test_trained_module_computes_with_trained_float_weights():
    """The simulation of a trained module uses the trained values of weights that stay in float."""
    module, (x,) = compile_form(Tokens, "mixed"), make_batches(Tokens, 1)
    before = module(x)
    train(module, Tokens, steps=3)
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    assert torch.equal(loaded.eval()(x), module(x))
    assert not torch.equal(module(x), before)
