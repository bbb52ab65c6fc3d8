"""Writes a model version as Hugging Face files, for engines that read nothing else.

The same weights, dequantised as ours are, and the tokenizer that ours uses: what two engines
then differ in is themselves.

    python -m benchmarks.as_hugging_face --model VERSION_DIRECTORY --out DIRECTORY
"""

import argparse
import json
from pathlib import Path

import torch

from tests.support.transformers_llama import transformers_llama
from text.gguf_tokenizer import read_gguf
from text.hf_tokenizer import read_hf
from worker.weights import load_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    transformers_llama(load_weights(options.model, dtype)).to(dtype).save_pretrained(options.out)
    files = sorted(options.model.glob("*.gguf"))
    parts = read_gguf(files[0]) if files else read_hf(options.model)
    parts.tokenizer.save(str(options.out / "tokenizer.json"))
    eos = min(parts.eos_ids)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": parts.tokenizer.id_to_token(eos),
        "chat_template": parts.template,
        "model_max_length": parts.context_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(config))
    print(options.out)


if __name__ == "__main__":
    main()
