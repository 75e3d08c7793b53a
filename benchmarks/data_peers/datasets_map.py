"""Hugging Face datasets: JSON lines loaded, tokenised by map, grouped into rows by map, two processes."""

from itertools import chain
from typing import Any

from serve import serve


def get_ready() -> Any:
    import datasets
    import tokenizers

    datasets.disable_progress_bars()

    def work(options: dict[str, Any]) -> dict[str, Any]:
        inner = tokenizers.Tokenizer.from_file(options["tokenizer"])
        eos, length = inner.token_to_id(options["eos"]), options["length"]

        def encode(batch: dict[str, Any]) -> dict[str, Any]:
            found = inner.encode_batch(batch["text"], add_special_tokens=False)
            return {"input_ids": [[*encoding.ids, eos] for encoding in found]}

        def group(batch: dict[str, Any]) -> dict[str, Any]:
            joined = list(chain.from_iterable(batch["input_ids"]))
            end = len(joined) // length * length
            return {"input_ids": [joined[i : i + length] for i in range(0, end, length)]}

        loaded = datasets.load_dataset(
            "json", data_files=options["files"], split="train", cache_dir=options["out"]
        )
        encoded = loaded.map(encode, batched=True, num_proc=2, remove_columns=loaded.column_names)
        rows = encoded.map(group, batched=True, num_proc=2)
        return {"rows": len(rows)}

    return work


if __name__ == "__main__":
    serve(get_ready)
