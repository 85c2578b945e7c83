"""`dataflow merge`: an adapter's folder and its base, as a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataflow import Model, lora
from dataflow.adapters import Lora
from dataflow.log_prob_probe import probe_rows
from engine.cli import main
from operators.kernels.torch.adapters import BaseWeights, named_trained
from operators.kernels.torch.models import load_model
from operators.kernels.torch.probe import compute_probe
from operators.kernels.torch.saving import save_model
from tests.kit.architectures import tiny
from tests.kit.models import save_tiny

peft: Any = pytest.importorskip("peft")
IDS = torch.arange(3, 40)[None]


def save_adapter_of(
    base: str, folder: Path, adapter: Lora | None = None, *, head: Any = "lm", size: float = 0.05
) -> Any:
    """An adapter that is not its base, in a folder as a train node writes it; and its module."""
    adapter = adapter or lora(rank=4)
    model = Model("policy", base, trainable=True, adapter=adapter, head=head)
    module = load_model(model, "cpu", BaseWeights(), 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in named_trained(module):
            if "lora_A" not in name:
                weight.copy_(torch.randn(weight.shape) * size)
    save_model(module, folder)
    return module


def log_probs(module: Any) -> Any:
    with torch.no_grad():
        return module.eval()(input_ids=IDS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("scale", ["lora", "rslora"])
def test_it_is_what_pefts_merge_gives_and_computes_what_the_adapter_does(
    tmp_path: Path, scale: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "adapter", tmp_path / "merged"
    # Log-probs that spread over one nat, as those of trained models do.
    base = save_tiny(tmp_path / "base", initializer_range=0.1)
    save_adapter_of(base, folder, lora(rank=4, alpha=8, scale=scale), size=0.02)
    assert main(["merge", str(folder), str(out)]) == 0
    assert capsys.readouterr().out.split("\n")[0] == (
        f"{out}: {folder} merged into {base}, in float32"
    )
    merged = AutoModelForCausalLM.from_pretrained(out)
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    expected = log_probs(beside)
    torch.testing.assert_close(log_probs(merged), expected, atol=1e-5, rtol=0)
    theirs = beside.merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0)
    assert (log_probs(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.1


def test_it_has_the_bases_files_and_nothing_of_peft(base: str, tmp_path: Path) -> None:
    save_adapter_of(base, tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {path.name for path in Path(base).iterdir()} <= names
    assert not any("adapter" in name for name in names)
    configs = (
        json.loads((Path(folder) / "config.json").read_text())
        for folder in (base, tmp_path / "merged")
    )
    first, second = configs
    assert first == second
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert not (tmp_path / "merged.partial").exists()


def test_it_is_cast_last_to_the_bases_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "wide")
    narrow = tmp_path / "narrow"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(narrow)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (narrow / file).write_bytes((Path(base) / file).read_bytes())
    # In float32, as a user of PEFT trains it beside a base in bfloat16.
    plain = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32)
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=2e-3)
    theirs.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert "rounding to bfloat16 took" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    exact = theirs.merge_and_unload().state_dict()
    for name, weight in exact.items():
        assert merged[name].dtype == torch.bfloat16
        assert torch.equal(merged[name], weight.bfloat16()), name


def test_matrices_of_fused_experts_are_merged(tmp_path: Path) -> None:
    base = str(tiny("mixtral", tmp_path / "base"))
    module = save_adapter_of(base, tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    merged = load_model(Model("merged", str(tmp_path / "merged")), "cpu")
    rows = probe_rows(3, 98)
    expected = compute_probe(module, rows, head="lm")
    np.testing.assert_allclose(compute_probe(merged, rows, head="lm"), expected, atol=1e-5)
    plain = load_model(Model("plain", base), "cpu")
    assert np.abs(compute_probe(plain, rows, head="lm") - expected).max() > 0.05


def test_a_critic_keeps_its_head(base: str, tmp_path: Path) -> None:
    module = save_adapter_of(base, tmp_path / "adapter", head="scalar")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    merged: Any = load_model(Model("critic", str(tmp_path / "merged"), head="scalar"), "cpu")
    assert torch.equal(merged.score.weight, module.score.weight)
    assert torch.equal(merged.score.bias, module.score.bias)


def refused(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert main(["merge", *words]) == code
    return " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_merged_is_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "adapter", str(tmp_path / "merged")
    save_adapter_of(base, folder)
    message = refused([base, out], capsys, 3)
    assert f"expected adapter_model.safetensors and adapter_config.json in {base}" in message
    other = save_tiny(tmp_path / "other", seed=3)
    message = refused([str(folder), out, "--base", other], capsys, 3)
    assert "expected an adapter that was trained beside its base" in message
    message = refused([str(folder), str(tmp_path)], capsys, 2)
    assert f"expected '{tmp_path}' not to be there, found a directory that is not empty" in message
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, expected in (("./gone", "found nothing at ./gone"), (None, "found none")):
        config["base_model_name_or_path"] = name
        (folder / "adapter_config.json").write_text(json.dumps(config))
        message = refused([str(folder), out], capsys, 3)
        assert expected in message
        assert "Fix: --base DIRECTORY" in message
    assert not Path(out).exists()
    assert main(["merge", str(folder), out, "--base", base]) == 0
