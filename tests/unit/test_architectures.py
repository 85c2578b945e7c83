"""The table of architectures: of each that transformers has, whether and why it is refused, by the
check and by the kernels alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dataflow.architectures import REFUSED, TESTED, UNTESTED, refusal
from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch.models import load_model
from tests.kit.architectures import ARCHITECTURES, tiny
from tests.kit.processes import ROOT, call_python

DECODERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LOCK = (ROOT / "requirements/cpu.lock").read_text()
LOCKED = Version(LOCK.partition("\ntransformers==")[2].partition("\n")[0])
"""The version of transformers that the table is of."""


def test_each_decoder_of_transformers_is_tested_or_refused_with_a_reason() -> None:
    for model_type in DECODERS:
        why = refusal({"model_type": model_type})
        reason = f"{model_type!r}: {REFUSED.get(model_type, UNTESTED)}"
        assert (why and why.reason) == (None if model_type in TESTED else reason)


def test_the_table_has_no_name_that_transformers_has_not() -> None:
    assert set(DECODERS) >= TESTED
    assert not TESTED & REFUSED.keys()
    if Version(transformers.__version__) >= LOCKED:  # an older one lacks the newest names
        assert set(CONFIG_MAPPING) >= REFUSED.keys()


def test_what_is_called_tested_is_among_the_architectures_of_the_tests() -> None:
    assert {make().model_type for make in ARCHITECTURES.values()} >= TESTED


@pytest.mark.long
def test_an_architecture_whose_attention_cannot_be_exchanged_has_a_reason_of_its_own() -> None:
    odd = set()
    for model_type in DECODERS:
        kind = AutoModelForCausalLM._model_mapping.get(CONFIG_MAPPING[model_type], None)
        kind = kind[0] if isinstance(kind, tuple) else kind
        if not kind._supports_attention_backend or kind._is_stateful:
            odd.add(model_type)
    assert len(odd) > 40
    assert odd <= REFUSED.keys()


REFUSED_FORMS = [name for name, make in ARCHITECTURES.items() if refusal(make().to_dict())]


@pytest.mark.parametrize("name", REFUSED_FORMS)
def test_the_kernels_refuse_what_the_check_refuses_in_the_same_words(
    tmp_path: Path, name: str
) -> None:
    """That they load all others is proven with their numbers in test_model_attention.py."""
    base = tiny(name, tmp_path)
    why = refusal(json.loads((base / "config.json").read_text()))
    with pytest.raises(KernelError) as caught:
        load_model(Model("policy", str(base)), "cpu")
    assert why.reason in str(caught.value)
    assert why.fix in str(caught.value)


@pytest.mark.long
@pytest.mark.repeats(turn=2)  # the two minutes of other turns are those of other parts
def test_the_page_of_models_is_what_its_script_writes(tmp_path: Path) -> None:
    """It tries each architecture; the tests of attention take few of them."""
    done = call_python("scripts/models.py", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs/models.md").read_text() == (tmp_path / "models.md").read_text()


@pytest.mark.parametrize(("settings", "told"), [
    ({"alibi": True}, "alibi in 'qwen2': its attention adds a bias for the distance"),
    ({"is_encoder_decoder": True}, "it is an encoder with a decoder"),
    ({"vision_config": {"depth": 2}}, "it reads images or sound"),
    ({"quantization_config": 4}, "quantization_config: quantised"),
    ({"layer_types": ["chunked_attention"]}, "a layer of 'chunked_attention'"),
    ({"rope_scaling": {"type": "su"}}, "rotary positions of kind 'su': only default, dynamic"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
        "rotary positions of kind 'spiral'",
    ),
])  # fmt: skip
def test_a_setting_that_changes_the_attention_is_refused(settings: dict, told: str) -> None:
    why = refusal({"model_type": "qwen2"} | settings)
    assert told in why.reason


@pytest.mark.parametrize("settings", [
    {"quantization_config": None, "rope_scaling": None, "layer_types": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "alibi": False},
    {"rope_scaling": {"type": "su"}, "model_type": "phi3"},
    {"layer_types": ["sliding_attention", "full_attention"], "vision_config": None},
    {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}},
])  # fmt: skip
def test_usual_settings_are_accepted(settings: dict) -> None:
    assert refusal({"model_type": "qwen2"} | settings) is None
