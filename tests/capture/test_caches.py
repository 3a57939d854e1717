"""Caches of transformers as arguments and results: one graph serves the first call and the following ones."""

import copy
import sys

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx_sessions import open_session
from torch.utils import _pytree as pytree
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from clika_ref import ClikaCompileOptions, ClikaModule, ModelError, clika_compile
from clika_ref.capture.caches import DERIVED, LENGTHS, CacheTree, trace_caches
from clika_ref.stages import find_state, load_registry, load_stateful_runner

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def build_gpt2():
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, **tokens)
    return transformers.GPT2LMHeadModel(config).eval()


def build_t5():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def make_ids(batch, length):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def make_static(model, batch):
    cache = StaticCache(config=model.config, max_cache_len=20)
    cache.early_initialization(batch_size=batch, num_heads=2, head_dim=4, dtype=torch.float32, device="cpu")
    return cache


def make_dynamic(model, _):
    return DynamicCache(config=model.config)


def fill(model, cache, batch, length):
    """Return a cache that has seen some positions."""
    with torch.no_grad():
        model(make_ids(batch, length), past_key_values=cache)
    return cache


def compile_decoder(model, make=make_dynamic, first=None):
    later = fill(model, make(model, 1), 1, 7)
    inputs = [
        {"input_ids": make_ids(2, 1), "past_key_values": first},
        {"input_ids": make_ids(1, 4), "past_key_values": later},
    ]
    return clika_compile(copy.deepcopy(model), tracing_inputs=inputs)


@pytest.fixture(scope="module")
def llama():
    model = build_llama()
    return model, compile_decoder(model)


@pytest.mark.parametrize("make", [make_dynamic, make_static])
def test_cache_updated_as_by_eager(make):
    """Logits, and the tensors of the cache that was passed, equal eager for batches and lengths never traced."""
    model = build_llama()
    module = compile_decoder(model, make, make(model, 2))
    for batch, seen, length in ((1, 0, 5), (1, 3, 1), (3, 9, 2)):
        cache = fill(model, make(model, batch), batch, seen) if seen else make(model, batch)
        passed, ids = copy.deepcopy(cache), make_ids(batch, length)
        with torch.no_grad():
            expected = model(ids, past_key_values=cache)
            found = module(input_ids=ids, past_key_values=passed)
        assert found.past_key_values is passed
        assert type(passed) is type(cache)
        assert int(passed.get_seq_length()) == seen + length
        torch.testing.assert_close(found.logits, expected.logits)
        for own, layer in zip(passed.layers, cache.layers, strict=True):
            torch.testing.assert_close((own.keys, own.values), (layer.keys, layer.values))


WINDOW = 8


def build_gemma():
    """Return a model with a layer that sees the last positions only, and one that sees all."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=WINDOW, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.mark.slow_cases("make_static")
@pytest.mark.parametrize("make", [make_dynamic, make_static])
def test_sliding_window_crossed(make):
    """One graph serves prompts and chunks that end before, at and beyond the window, from any position."""
    model = build_gemma()
    module = compile_decoder(model, make, make(model, 2))
    for chunks in ((7, 1, 1), (8, 1), (9, 1), (3, 4, 2, 9), (1, 15)):
        expected, found = make(model, 2), make(model, 2)
        for number, length in enumerate(chunks):
            ids = make_ids(2, length + number)[:, :length]
            with torch.no_grad():
                logits = model(ids, past_key_values=expected).logits
                torch.testing.assert_close(module(input_ids=ids, past_key_values=found).logits, logits)
            for own, layer in zip(found.layers, expected.layers, strict=True):
                torch.testing.assert_close((own.keys, own.values), (layer.keys, layer.values))


def generate(run, length, past=None):
    """Return the tokens that a model, a compiled module or a session finds, each the most probable one."""
    ids, tokens = make_ids(1, 5), []
    for _ in range(length):
        logits, past = run(ids, past)
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


def make_step(model):
    def run(ids, past):
        with torch.no_grad():
            found = model(input_ids=ids, past_key_values=past)
        return found.logits, found.past_key_values

    return run


def make_file_step(path, constant=None, ids_name="input_ids"):
    """Return a step that runs a file, and passes each ``present`` value as ``past_key_values`` of the next one."""
    session = open_session(path)
    names = [output.name for output in session.get_outputs()]
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    shapes = {
        i.name: [1, *(0 if isinstance(n, str) else n for n in i.shape[1:])] if i.shape else []
        for i in session.get_inputs()
    }
    pasts = [i for i in session.get_inputs() if i.name.startswith("past")]
    empty = {i.name: np.zeros(shapes[i.name], kinds[i.type]) for i in pasts}

    def run(ids, past):
        feed = {ids_name: ids.numpy(), **(constant or {}), **(past or empty)}
        results = dict(zip(names, session.run(None, feed), strict=True))
        logits = torch.from_numpy(results.pop("logits"))
        named = {name.replace("present", "past_key_values"): x for name, x in results.items()}
        return logits, {i.name: named.get(i.name, empty[i.name]) for i in pasts}

    return run


@pytest.mark.slow_cases("build_gpt2")
@pytest.mark.parametrize("build", [build_llama, build_gpt2, build_gemma])
def test_generated_tokens_equal_eager(build, tmp_path):
    """The first call gets no cache, and later ones that of the call before, in the module and in the file."""
    model, path = build(), tmp_path / "model.onnx"
    module = compile_decoder(model)
    expected = generate(make_step(model), 24)
    assert generate(make_step(module), 24) == expected
    module.clika_export(path)
    graph = onnx.load(path).graph
    counted = ["0.cumulative_length"] if build is build_gemma else []
    names = sorted([f"{layer}.{part}" for layer in range(2) for part in ("key", "value")] + counted)
    assert {i.name for i in graph.input} == {"input_ids", *(f"past_key_values.{name}" for name in names)}
    assert {o.name for o in graph.output} >= {"logits", *(f"present.{name}" for name in names if name not in counted)}
    assert generate(make_file_step(path), 24) == expected


def test_exportable_module_of_transformers(tmp_path):
    """The buffers of the static cache that transformers' own wrapper holds become inputs and outputs of the file."""
    model, path = build_llama(), tmp_path / "model.onnx"
    model.generation_config = transformers.GenerationConfig(use_cache=True, cache_implementation="static")
    wrapper = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=20)
    calls = [
        {"input_ids": make_ids(1, length), "cache_position": torch.arange(length) + seen}
        for seen, length in ((0, 1), (3, 2))
    ]
    options = ClikaCompileOptions(state="io")
    module = clika_compile(copy.deepcopy(wrapper), tracing_inputs=calls, clika_compile_options=options)

    def make_step(run):
        def step(ids, seen):
            with torch.no_grad():
                logits = run(input_ids=ids, cache_position=torch.arange(ids.shape[1]) + (seen or 0))
            return logits, (seen or 0) + ids.shape[1]

        return step

    expected = generate(make_step(wrapper), 12)
    assert generate(make_step(module), 12) == expected
    artifact = module.clika_export(path)
    runner = load_stateful_runner(load_registry().targets[artifact.target], artifact)
    runner.start([torch.zeros_like(wrapper.get_buffer(name)) for name in find_state(artifact)])
    assert generate(make_step(lambda **given: runner([*given.values()])[0]), 12) == expected
    session = open_session(path)
    state = {i.name: np.zeros_like(wrapper.get_buffer(i.name).numpy()) for i in session.get_inputs()[2:]}
    assert [*state] == [f"{part}_{n}" for n in range(2) for part in ("key_cache", "value_cache", "cumulative_length")]

    def run_file(**given):
        logits, *following = session.run(None, {name: x.numpy() for name, x in given.items()} | state)
        state.update(zip(state, following, strict=True))
        return torch.from_numpy(logits)

    assert generate(make_step(run_file), 12) == expected


def test_cache_of_encoder_and_decoder(tmp_path):
    """Both parts of an ``EncoderDecoderCache`` are inputs, under the usual names."""
    model = build_t5()

    def make_call(batch, seen, length):
        state = torch.randn(batch, 6, 16, generator=torch.Generator().manual_seed(seen))
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        given = {"encoder_outputs": (state,), "past_key_values": cache}
        with torch.no_grad():
            model(**given, decoder_input_ids=make_ids(batch, seen))
        return {**given, "decoder_input_ids": make_ids(batch, length)}

    module = clika_compile(copy.deepcopy(model), tracing_inputs=[make_call(2, 3, 1), make_call(1, 5, 2)])
    call = make_call(3, 4, 1)
    with torch.no_grad():
        torch.testing.assert_close(module(**copy.deepcopy(call)).logits, model(**call).logits)
    module.clika_export(tmp_path / "model.onnx")
    names = [i.name for i in onnx.load(tmp_path / "model.onnx").graph.input]
    parts = [f"past_key_values.0.{part}.{leaf}" for part in ("decoder", "encoder") for leaf in ("key", "value")]
    assert names == ["decoder_input_ids", "encoder_outputs.0", *parts]


def build_whisper():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "max_source_positions": 6, "max_target_positions": 64, "num_mel_bins": 8}
    parts = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **parts, **heads, **tokens)
    return transformers.WhisperForConditionalGeneration(config).eval()


def make_pair(model, *_):
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


@pytest.mark.slow_cases("build_t5")
@pytest.mark.parametrize("build", [build_t5, build_whisper])
def test_first_call_fills_cache_of_encoder(build, tmp_path):
    """The first call computes the keys of the encoder, and the following ones read them, in one graph."""
    model, path = build(), tmp_path / "model.onnx"
    states = {batch: (torch.randn(batch, 6, 16),) for batch in (1, 2)}
    later = make_pair(model)
    with torch.no_grad():
        model(encoder_outputs=states[2], decoder_input_ids=make_ids(2, 3), past_key_values=later)
    calls = [
        {"encoder_outputs": states[1], "decoder_input_ids": make_ids(1, 1), "past_key_values": None},
        {"encoder_outputs": states[2], "decoder_input_ids": make_ids(2, 2), "past_key_values": later},
    ]
    module = clika_compile(copy.deepcopy(model), tracing_inputs=calls)

    def make_decoder_step(run):
        def step(ids, past):
            with torch.no_grad():
                found = run(encoder_outputs=states[1], decoder_input_ids=ids, past_key_values=past)
            return found.logits, found.past_key_values

        return step

    expected, caches = generate(make_decoder_step(model), 24), (make_pair(model), make_pair(model))
    assert generate(make_decoder_step(module), 24) == expected
    for run, cache in zip((model, module), caches, strict=True):
        generate(make_decoder_step(run), 1, cache)
    assert caches[0].is_updated == caches[1].is_updated == {0: True}
    module.clika_export(path)
    step = make_file_step(path, {"encoder_outputs.0": states[1][0].numpy()}, "decoder_input_ids")
    assert generate(step, 24) == expected


class Restarting(torch.nn.Module):
    """Treats no cache and an empty one differently."""

    def forward(self, x, cache=None):
        fresh = DynamicCache() if cache is None else cache
        keys, _ = fresh.update(x, x, 0)
        return keys.sum(2) + (cache is None), fresh


def test_first_call_without_cache_that_differs_rejected():
    """A model that computes something else without a cache than with an empty one needs two graphs."""
    x, cache = torch.randn(1, 2, 3, 4), DynamicCache()
    cache.update(x, x, 0)
    calls = [{"x": torch.randn(batch, 2, 1, 4), "cache": past} for batch, past in ((2, None), (1, cache))]
    with pytest.raises(ModelError, match=r"other results for tracing input 1, which has no cache, than with an empty"):
        clika_compile(Restarting(), tracing_inputs=calls)


def test_cache_inside_model_traced_by_dynamo():
    """Dynamo, which cannot trace thread numbers, traces the replaced methods of a cache that a model makes."""

    def multiply(x):
        keys, values = DynamicCache().update(x, x * 2, 0)
        return keys @ values.transpose(2, 3)

    x = torch.randn(2, 1, 5, 4)
    with trace_caches():
        found = torch.compile(multiply, backend="eager", fullgraph=True)(x)
    assert torch.equal(found, multiply(x))


def test_classes_of_transformers_stay_unregistered():
    """Nothing is registered for a cache, and a registration of the user's is neither used nor changed."""
    model = build_llama()
    compile_decoder(model)
    assert DynamicCache not in pytree.SUPPORTED_NODES
    pytree.register_pytree_node(DynamicCache, lambda cache: ([], cache), lambda _, cache: cache)
    try:
        module = compile_decoder(model)
        found = module(input_ids=make_ids(1, 2), past_key_values=fill(model, make_dynamic(model, 1), 1, 2))
        assert int(found.past_key_values.get_seq_length()) == 4
    finally:
        pytree._deregister_pytree_node(DynamicCache)


def test_saved_module_takes_and_returns_caches(llama, tmp_path):
    """A loaded module takes a cache, or none in the first call."""
    model, module = llama
    module.clika_save(tmp_path / "model.clika")
    loaded = ClikaModule.clika_load(tmp_path / "model.clika")
    assert generate(make_step(loaded), 8) == generate(make_step(model), 8)


def test_cache_of_other_form_rejected(llama):
    """A cache of another class is named."""
    model, module = llama
    static = fill(model, make_static(model, 1), 1, 2)
    with pytest.raises(ModelError, match=r"'past_key_values' is a StaticCache of 6 values, but the model was compiled"):
        module(input_ids=make_ids(1, 1), past_key_values=static)


def test_cache_with_unknown_attribute_rejected():
    """A cache with an attribute that no graph can hold is rejected by the name of the attribute."""
    model = build_llama()
    cache = fill(model, make_dynamic(model, 1), 1, 2)
    cache.layers[1].lock = memoryview(b"")
    with pytest.raises(ModelError, match=r"a cache has 1\.lock, a memoryview, which no input of a graph can hold"):
        clika_compile(model, tracing_inputs=[{"input_ids": make_ids(1, 1), "past_key_values": cache}])


def test_rebuilding_imports_no_other_module():
    """A class of a module that is not imported is named: a file could name any module."""
    tree = CacheTree('{"object": "antigravity:Cache", "attributes": {}}', [])
    with pytest.raises(ModelError, match=r"contains antigravity:Cache, which is not imported"):
        tree.rebuild()
    assert "antigravity" not in sys.modules


def test_attributes_of_layers_known():
    """The attributes that a rebuilt layer derives, and those that count positions, are those of transformers 5."""
    x = torch.zeros(1, 2, 3, 4)
    layers = [cache_utils.DynamicSlidingWindowLayer(4), cache_utils.StaticSlidingWindowLayer(8, 4)]
    for layer in layers:
        layer.update(x, x)
    known = {name for layer in layers for name in vars(layer)}
    assert known >= {*DERIVED, *LENGTHS}, transformers.__version__
    for layer in layers:
        cache = cache_utils.Cache(layers=[layer])
        rebuilt = CacheTree.of(cache).rebuild().layers[0]
        assert vars(rebuilt).keys() == vars(layer).keys()
        assert all(
            torch.equal(torch.as_tensor(vars(rebuilt)[n]), torch.as_tensor(vars(layer)[n]))
            for n in LENGTHS & vars(layer).keys()
        )
