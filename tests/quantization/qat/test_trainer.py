"""``transformers.Trainer`` trains a compiled module like any other model."""

import copy
import inspect

import pytest
import safetensors.torch
import torch
import transformers
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import nn

from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)


class Classifier(nn.Module):
    """A model with the interface of transformers: a call with labels returns a loss."""

    def __init__(self):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = transformers.BertForSequenceClassification(config)

    def forward(self, input_ids, attention_mask, labels):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def make_sentences(count):
    spread = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (count, 8), generator=spread)
    return [{"input_ids": i, "attention_mask": torch.ones(8).long(), "labels": i[0] % 2} for i in ids]


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    batch = torch.utils.data.default_collate(make_sentences(8))
    return clika_compile(
        Classifier().eval(), calibration_inputs=[batch], quantization_settings=ALL, deployment_settings=HERE
    )


def test_clika_module_has_interface_for_transformers_trainer(classifier, tmp_path):
    """A module has the signature, parameter names and state dict that the Trainer needs."""
    assert [*inspect.signature(classifier.forward).parameters] == ["input_ids", "attention_mask", "labels"]
    batch = torch.utils.data.default_collate(make_sentences(8))
    decayed = transformers.trainer_pt_utils.get_parameter_names(classifier, [nn.LayerNorm])
    assert {*decayed} == {name for name, _ in classifier.named_parameters()}
    optimizer = torch.optim.AdamW(classifier.train().parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        outputs = classifier(**batch)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    safetensors.torch.save_file(classifier.state_dict(), tmp_path / "model.safetensors")
    loaded = ClikaModule()
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(loaded.eval()(**batch)["logits"], classifier.eval()(**batch)["logits"])


def make_trainer(model, folder, **options):
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "save_steps": 2,
        "logging_steps": 1,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
        **given | options,
    )
    return transformers.Trainer(model, arguments, train_dataset=make_sentences(32), eval_dataset=make_sentences(16))


def read_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_trains_evaluates_and_loads_best(classifier, tmp_path):
    """The Trainer trains, evaluates, saves and loads the best checkpoint."""
    before = copy.deepcopy(classifier.state_dict())
    run = make_trainer(
        classifier, tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    run.train()
    assert read_losses(run)[-1] < read_losses(run)[0]
    trained = {name: p for name, p in classifier.named_parameters() if p.requires_grad}
    assert all(not torch.equal(p, before[name]) for name, p in trained.items() if p.grad is not None and p.grad.any())
    evaluated = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    assert run.evaluate()["eval_loss"] == pytest.approx(min(evaluated.values()), rel=1e-4), "the best, not the last"
    artifact = classifier.eval().clika_export(tmp_path / "trained.onnx")
    batch = torch.utils.data.default_collate(make_sentences(8))
    exported = OnnxRuntime().load(artifact)([*batch.values()])
    assert any(torch.allclose(classifier(**batch)["logits"], found, atol=1e-3) for found in exported)


@pytest.mark.slow
def test_trainer_resumed_run_matches_whole_run(classifier, tmp_path):
    """A resumed run equals an uninterrupted one."""
    whole, half, rest = (copy.deepcopy(classifier) for _ in range(3))
    schedule = {"lr_scheduler_type": "constant", "save_steps": 4}
    make_trainer(whole, tmp_path / "whole", max_steps=8, **schedule).train()
    make_trainer(half, tmp_path / "half", max_steps=4, **schedule).train()
    make_trainer(rest, tmp_path / "half", max_steps=8, **schedule).train(resume_from_checkpoint=True)
    for (name, wanted), found in zip(whole.named_parameters(), rest.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_accumulation_steps": 2}], ids=["bf16", "accumulated"])
def test_trainer_bf16_and_gradient_accumulation(classifier, tmp_path, options):
    """The Trainer trains in BF16 and with accumulated gradients."""
    run = make_trainer(classifier, tmp_path, max_steps=20, **options)
    run.train()
    assert sum(read_losses(run)[-4:]) < sum(read_losses(run)[:4])
    assert all(p.isfinite().all() for p in classifier.parameters())


@pytest.mark.slow
def test_trainer_trains_model_with_kwargs_forward(tmp_path):
    """A model with `**kwargs` trains, although the Trainer adds the number of tokens to each batch."""
    torch.manual_seed(0)
    model = Classifier().model.eval()
    batch = torch.utils.data.default_collate(make_sentences(8))
    assert "kwargs" in inspect.signature(model.forward).parameters
    module = clika_compile(model, calibration_inputs=[batch], quantization_settings=ALL, deployment_settings=HERE)
    parameters = inspect.signature(module.forward).parameters
    assert "kwargs" not in parameters
    assert {*batch} < {*parameters}
    run = make_trainer(module, tmp_path, max_steps=8)
    run.train()
    assert read_losses(run)[-1] < read_losses(run)[0]
