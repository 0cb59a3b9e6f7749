import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.models import make_tiny

PROMPTS = ["Hello", "Goodbye world", "1+1=", "The quick brown fox jumps over"]


def continuation(folder: Path, prompt: str, tokens: int) -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tuple(output[0, inputs.input_ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-a")


def test_size_and_config(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is False
    assert (tiny / "model.safetensors").stat().st_size < 2_000_000


def test_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    again = make_tiny(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    other = make_tiny(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_making_it_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny(tmp_path / "model")
    assert torch.equal(before, torch.random.get_rng_state())


def test_greedy_output_depends_on_the_prompt_and_does_not_stop_at_once(tiny: Path) -> None:
    outputs = [continuation(tiny, prompt, tokens=200) for prompt in PROMPTS]
    assert len({output[:8] for output in outputs}) == len(PROMPTS)
    assert all(len(output) == 200 for output in outputs), "stopped early"
    assert all(len(set(output)) > 40 for output in outputs), "runs in a loop"


def test_tied_embeddings(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tied", tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hidden_size_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden .* multiple of 32"):
        make_tiny(tmp_path / "model", hidden=100)


@pytest.mark.parametrize("text", ["plain", "  two  spaces\n\ttabs ", "hé 漢字 🌹", "don't </x>"])
def test_tokenizer_round_trip(tiny: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_chat_template(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("a</s>").input_ids[-1] == tokenizer.eos_token_id
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "user: hi\nassistant: "
