"""Generation by transformers with a compiled module, or its artifact, gives the tokens of the original model."""

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    ModelError,
    clika_compile,
)
from clika_ref.integrations.generation import GenerationAdapter

TOKENS, STATES = 64, 6


def vary(model):
    """Return a model with larger random weights: with small ones, each token is the one before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model.eval()


def make_ids(batch, length, seed=0):
    return torch.randint(3, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


def build_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=[1, 2],
    )  # fmt: skip
    return vary(transformers.LlamaForCausalLM(config))


def make_call(model, batch, seen, length, *, is_padded):
    cache = DynamicCache(config=model.config)
    if seen:
        with torch.no_grad():
            model(make_ids(batch, seen), past_key_values=cache)
    call = {"input_ids": make_ids(batch, length), "past_key_values": cache if seen else None}
    if is_padded:
        call["attention_mask"] = torch.ones(batch, seen + length, dtype=torch.int64)
        call["position_ids"] = torch.arange(seen, seen + length).expand(batch, -1)
    return call


def compile_llama(model, *, is_padded=True):
    calls = [make_call(model, *sizes, is_padded=is_padded) for sizes in ((2, 0, 3), (1, 7, 4))]
    return clika_compile(copy.deepcopy(model), tracing_inputs=calls)


@pytest.fixture(scope="module")
def llama():
    model = build_llama()
    return model, compile_llama(model)


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
}


def generate(model, **options):
    """Return the tokens that follow a batch of two prompts, one of which is padded on the left."""
    ids = make_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, **options)


SETTINGS = {"onnxruntime": DeploymentSettings_ONNXRuntime_ONNX, "openvino": DeploymentSettings_OpenVINO_ONNX}

RUNTIMES = ["module", "onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)]


def export(module, runtime, folder):
    """Return the artifact of a module in a runtime; None for the module itself."""
    if runtime == "module":
        return None
    return module.clika_export(folder / "model.onnx", deployment_settings=SETTINGS[runtime]())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_generated_tokens_equal_model(mode, runtime, llama, tmp_path):
    """Each search gives the tokens of the model for a batch that is padded on the left."""
    model, module = llama
    adapter = GenerationAdapter(module, model.config, artifact=export(module, runtime, tmp_path))
    assert torch.equal(generate(adapter, **MODES[mode]), generate(model, **MODES[mode]))


class Recorder(transformers.generation.BaseStreamer):
    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.has_ended = True


def test_streamer_and_stopping_criteria_work(llama):
    """A streamer gets each token, and a stopping criterion ends the search."""
    model, module = llama
    adapter, streamer, ids = GenerationAdapter(module, model.config), Recorder(), make_ids(1, 4)
    criteria = transformers.StoppingCriteriaList([lambda tokens, _: tokens.shape[1] >= 7])
    options = {"streamer": streamer, "stopping_criteria": criteria, "max_new_tokens": 20, "eos_token_id": [-1]}
    found = adapter.generate(ids, **options)
    assert found[0].tolist() == streamer.tokens
    assert (found.shape, streamer.has_ended) == ((1, 7), True)


def test_each_of_several_eos_tokens_ends_sequence(llama):
    """Generation ends at any of the eos tokens of the configuration, and at the length limit without one."""
    model, module = llama
    adapter, ids = GenerationAdapter(module, model.config), make_ids(1, 4)
    plain = adapter.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=[-1])
    assert plain.shape[1] == 14
    wanted = GenerationConfig(eos_token_id=[1, int(plain[0, 6])], max_new_tokens=10, do_sample=False, pad_token_id=0)
    found = GenerationAdapter(module, model.config, generation_config=wanted).generate(ids)
    assert torch.equal(found, model.generate(ids, wanted))
    assert found.shape[1] <= 7


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("beams", [1, 2])
def test_encoder_decoder_generates_from_encoder(runtime, beams, tmp_path):
    """A model with an encoder runs it once, and passes its states to each call of the module."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = vary(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=TOKENS, **sizes)))
    cache, states = EncoderDecoderCache(DynamicCache(), DynamicCache()), torch.randn(1, STATES, 32)
    later = {"encoder_outputs": (states,), "decoder_input_ids": make_ids(1, 3)}
    with torch.no_grad():
        model(**later, past_key_values=cache)
    first = {"encoder_outputs": (torch.randn(2, STATES, 32),), "decoder_input_ids": make_ids(2, 1)}
    calls = [{**first, "past_key_values": None}, {**later, "past_key_values": cache}]
    module = clika_compile(copy.deepcopy(model), tracing_inputs=calls)
    artifact, ids = export(module, runtime, tmp_path), make_ids(2, STATES)
    adapter = GenerationAdapter(module, model.config, encoder=model.get_encoder(), artifact=artifact)
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams}
    assert torch.equal(adapter.generate(ids, **options), model.generate(ids, **options))
    with pytest.raises(ModelError, match=r"the encoder is missing\. Pass GenerationAdapter\(encoder="):
        GenerationAdapter(module, model.config).generate(ids, **options)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_artifact_continues_given_cache(runtime, llama, tmp_path):
    """A runtime starts from the positions of a given cache, and goes on with it or with the one that it returned."""
    model, module = llama
    adapter = GenerationAdapter(module, model.config, artifact=export(module, runtime, tmp_path))
    ids, cache = make_ids(1, 9), DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        model(ids[:, :4], past_key_values=cache)
    adapter(input_ids=ids[:, 4:6], past_key_values=cache)
    kept = adapter(input_ids=ids[:, 6:8], past_key_values=cache).past_key_values
    assert kept.get_seq_length() == 8
    torch.testing.assert_close(
        adapter(input_ids=ids[:, 8:], past_key_values=kept).logits[:, -1], expected, rtol=0, atol=1e-3
    )
    adapter(input_ids=ids[:, :3])
    with pytest.raises(ModelError, match="past_key_values: a later prompt replaced this cache"):
        adapter(input_ids=ids[:, 3:4], past_key_values=kept)


def test_assisted_decoding_rejected(llama):
    """Assisted decoding is rejected by the name of its option."""
    model, module = llama
    adapter = GenerationAdapter(module, model.config)
    for option in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ModelError, match=f"{next(iter(option))}: assisted decoding is not supported"):
            adapter.generate(make_ids(1, 4), **option)


def test_padded_batch_without_mask_rejected():
    """A padded batch needs a module that was compiled with a mask and positions."""
    model = build_llama()
    adapter = GenerationAdapter(compile_llama(model, is_padded=False), model.config)
    with pytest.raises(ModelError, match=r"the batch is padded, but .* without attention_mask and position_ids"):
        generate(adapter)
    ids = make_ids(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(adapter.generate(ids, **options), model.generate(ids, **options))


def test_module_without_cache_rejected():
    """A module that was compiled without a cache is rejected with the calls to give."""
    model = build_llama()
    calls = [{"input_ids": make_ids(*sizes), "use_cache": False} for sizes in ((2, 3), (1, 4))]
    with pytest.raises(ModelError, match=r"compiled without past_key_values\. Give tracing inputs of two calls"):
        GenerationAdapter(clika_compile(model, tracing_inputs=calls), model.config)
