"""A tiny random Llama with its own byte-level tokenizer, made from a seed without any download.

It is small enough that a vLLM step takes milliseconds on a CPU, and its weights are spread wide
enough that what it says depends on what it is asked, so token-exactness tests mean something.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.models.folder import build, is_complete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"

WEIGHT_STD = 0.15
"""At 0.08 greedy output soon runs in short loops; at 0.3 single tokens take 60 % of the probability
(90 % with tied embeddings), and log-probs say little."""

HEAD_SIZE = 32
"""The smallest head that vLLM's CPU attention has a kernel for."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tiny(
    path: Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    kv_heads: int = 2,
    intermediate: int = 256,
    max_length: int = 2048,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """Write the model to the folder `path`, unless a complete model is already there."""
    heads = hidden // HEAD_SIZE
    if heads < 1 or hidden % HEAD_SIZE or heads % kv_heads:
        raise ValueError(
            f"hidden must be a multiple of {HEAD_SIZE} and hidden / {HEAD_SIZE} one of kv_heads, "
            f"which {hidden} with kv_heads {kv_heads} is not."
        )
    if is_complete(path):
        return path

    import torch

    tokenizer = byte_tokenizer(max_length, CHAT_TEMPLATE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = llama(tokenizer, hidden, layers, kv_heads, intermediate, std=WEIGHT_STD, tied=tied)
    # By chance it would end one generation in a few hundred tokens, at a place nobody chose.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.all_special_ids] = 0

    with build(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return path


def llama(
    tokenizer: "PreTrainedTokenizerFast",
    hidden: int,
    layers: int,
    kv_heads: int,
    intermediate: int,
    *,
    std: float,
    tied: bool = False,
) -> Any:
    """With random weights of that spread."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=tied,
        initializer_range=std,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def byte_tokenizer(max_length: int, chat_template: str) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    # The specials come first, so that their ids do not depend on the alphabet.
    symbols = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=chat_template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
