"""Models of transformers with adapters, in float and INT8."""

import onnx
import pytest
import torch
import transformers
from adapted_nets import HERE, INT4, INT8, make_lora_settings
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import nn

from clika_ref import LoraSettings, clika_compile
from clika_ref.quantization.decision import ratio_in_decibels


def build_bert():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,  # which adapters have of their own
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config), ["query", "value"]


def build_llama():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]


def build_gpt2():
    """Return a model whose linear weights have a column for each output."""
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), ["c_attn", "c_fc"]


PREFIXES = {
    build_bert: "bert.encoder.layer.0.attention.self.",
    build_llama: "model.layers.0.self_attn.",
    build_gpt2: "transformer.h.0.attn.",
}


def make_data(count=4):
    spread = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(64, (2 + i % 2, 8), generator=spread)} for i in range(count)]


@pytest.mark.slow_cases("int8-build_gpt2", "int4-build_llama")
@pytest.mark.parametrize("build", PREFIXES)
@pytest.mark.parametrize("settings", [None, INT8, INT4], ids=["float", "int8", "int4"])
def test_clika_compile_transformers_adapters_train_and_export(build, settings, tmp_path):
    """Adapters of transformers models train and export in float, INT8 and INT4."""
    torch.manual_seed(0)
    model, names = build()
    options = {"global_lora_settings": make_lora_settings(rank=2, target_layers=names)}
    if settings is not None:
        options |= {"quantization_settings": settings, "deployment_settings": HERE}
    module = clika_compile(model.eval(), calibration_inputs=make_data(), **options)
    adapters = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * 2
    state = module.clika_lora_state_dict()
    assert f"base_model.model.{PREFIXES[build]}{names[0]}.lora_A.weight" in state
    assert module.clika_lora_config()["fan_in_fan_out"] is (build is build_gpt2)
    goal = module(**make_data()[0]).logits.detach().roll(1, -1)
    losses = []
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 1e-2)
    for _ in range(12):
        loss = (module.train()(**make_data()[0]).logits - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    artifact = module.eval().clika_export(tmp_path / "model.onnx")
    wanted, ids = module(**make_data()[1]).logits.detach(), make_data()[1]["input_ids"]
    (found, *_) = OnnxRuntime().load(artifact)([ids])
    missed = ratio_in_decibels(float(wanted.square().sum()), float((wanted - found).square().sum()))
    assert missed > (60 if settings is None else 25)
    kinds = {tensor.data_type for tensor in onnx.load(artifact.path).graph.initializer if len(tensor.dims) > 1}
    assert (onnx.TensorProto.INT4 in kinds) is (settings is INT4)


@pytest.mark.parametrize("merging", ["auto", "off"])
def test_lora_transformers_conv1d_matches_linear(merging, tmp_path):
    """Adapters of a Conv1D of transformers equal those of a linear layer with the transposed weight."""
    torch.manual_seed(0)
    columns, rows = transformers.pytorch_utils.Conv1D(48, 32), nn.Linear(32, 48)
    with torch.no_grad():
        columns.weight.copy_(rows.weight.T)
        columns.bias.copy_(rows.bias)
    x, found = torch.randn(8, 32), []
    plain = torch.relu(rows(x)).detach()
    for layer in (columns, rows):
        settings = make_lora_settings(rank=2, target_layers=["0"], merging=merging)
        module = clika_compile(nn.Sequential(layer, nn.ReLU()), tracing_inputs=[x], global_lora_settings=settings)
        torch.manual_seed(1)
        state = {name: torch.randn_like(matrix) for name, matrix in module.clika_lora_state_dict().items()}
        module.clika_load_lora_state_dict(state)
        artifact = module.clika_export(tmp_path / "adapted.onnx")
        found += [module(x).detach(), OnnxRuntime().load(artifact)([x])[0]]
        module.clika_merge_lora()
        found.append(module(x).detach())
    assert not torch.allclose(found[0], plain, atol=0.1), "the adapters count"
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=1e-4)


class Classifier(nn.Module):
    """A model whose forward takes no other arguments."""

    def __init__(self):
        super().__init__()
        self.inner = build_bert()[0]

    def forward(self, input_ids, labels):
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


@pytest.mark.slow
def test_transformers_trainer_updates_adapters_only(tmp_path):
    """The Trainer of transformers updates adapters only."""
    torch.manual_seed(0)
    model, names = Classifier(), ["query", "value"]
    given = [{**batch, "labels": torch.zeros(len(batch["input_ids"]), dtype=torch.long)} for batch in make_data()]
    settings = LoraSettings(rank=2, target_layers=names)
    module = clika_compile(model.eval(), tracing_inputs=given, global_lora_settings=settings)
    held = {name: p.clone() for name, p in module.named_parameters()}
    examples = [{key: side[i] for key, side in batch.items()} for batch in given for i in range(2)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], learning_rate=1e-2, use_cpu=True
    )
    transformers.Trainer(module, arguments, train_dataset=examples).train()
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, held[name])}
    assert changed
    assert all(name.startswith("clika.adapters.") for name in changed)
