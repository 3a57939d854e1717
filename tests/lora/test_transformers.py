"""Models of transformers with adapters, float and in integers."""

import onnx
import pytest
import torch
import transformers
from adapted_nets import HERE, INT4, INT8, lora
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import nn

from clika_ref import LoraSettings, clika_compile
from clika_ref.quantization.decision import decibels


def bert():
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


def llama():
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


def data(count=4):
    spread = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(64, (2 + i % 2, 8), generator=spread)} for i in range(count)]


@pytest.mark.parametrize("build", [bert, llama])
@pytest.mark.parametrize("settings", [None, INT8, INT4], ids=["float", "int8", "int4"])
def test_query_and_value_are_adapted_trained_and_exported(build, settings, tmp_path):
    torch.manual_seed(0)
    model, names = build()
    options = {"global_lora_settings": lora(rank=2, target_layers=names)}
    if settings is not None:
        options |= {"quantization_settings": settings, "deployment_settings": HERE}
    module = clika_compile(model.eval(), calibration_inputs=data(), **options)
    adapters = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * 2
    state = module.clika_lora_state_dict()
    prefix = "bert.encoder.layer.0.attention.self." if build is bert else "model.layers.0.self_attn."
    assert f"base_model.model.{prefix}{names[0]}.lora_A.weight" in state
    goal = module(**data()[0]).logits.detach().roll(1, -1)
    losses = []
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 1e-2)
    for _ in range(12):
        loss = (module.train()(**data()[0]).logits - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    artifact = module.eval().clika_export(tmp_path / "model.onnx")
    wanted, ids = module(**data()[1]).logits.detach(), data()[1]["input_ids"]
    (found, *_) = OnnxRuntime().load(artifact)([ids])
    missed = decibels(float(wanted.square().sum()), float((wanted - found).square().sum()))
    assert missed > (60 if settings is None else 25)
    kinds = {tensor.data_type for tensor in onnx.load(artifact.path).graph.initializer if len(tensor.dims) > 1}
    assert (onnx.TensorProto.INT4 in kinds) is (settings is INT4)


class Classifier(nn.Module):
    """A model whose forward takes no other arguments."""

    def __init__(self):
        super().__init__()
        self.inner = bert()[0]

    def forward(self, input_ids, labels):
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


def test_the_trainer_of_transformers_trains_adapters_alone(tmp_path):
    torch.manual_seed(0)
    model, names = Classifier(), ["query", "value"]
    given = [{**batch, "labels": torch.zeros(len(batch["input_ids"]), dtype=torch.long)} for batch in data()]
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
