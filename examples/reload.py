"""Load the exports of whole.sh with other libraries and check that they compute the same as Headrace."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import numpy as np
import torch
import transformers

PROMPT, TOKENS = "def ", 24


def main(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "merged-hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged-hf", dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0]
    hf_text = tokenizer.decode(output, skip_special_tokens=True)
    command = ["headrace", "generate", str(folder / "tuned"), "--prompt", PROMPT, "--tokens", str(TOKENS)]
    process = subprocess.run([*command, "--temperature", "0"], stdout=subprocess.PIPE, text=True, check=True)
    assert process.stdout.rstrip("\n") == hf_text.rstrip("\n"), (process.stdout, hf_text)
    print(f"transformers: continues {PROMPT!r} with the same {TOKENS} tokens as Headrace")

    reader = gguf.GGUFReader(str(folder / "merged.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    table = np.asarray(tensors["token_embd.weight"].data).reshape(model.get_input_embeddings().weight.shape)
    assert np.array_equal(table, model.get_input_embeddings().weight.detach().numpy())
    print(f"gguf: {len(tensors)} tensors; the embedding is bit for bit that of transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
