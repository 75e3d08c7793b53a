"""transformers' apply_chat_template with the mask of what the assistant says, which it finds by offsets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    from transformers import PreTrainedTokenizerFast

    state: dict[str, Any] = {}

    def work(options: dict[str, Any]) -> dict[str, Any]:
        if "tokenizer" in options:
            state["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(options["tokenizer"])
            state["chats"] = [json.loads(line) for line in Path(options["chats"]).read_bytes().splitlines()]
            return {}
        values, masks, lengths = [], [], []
        for chat in state["chats"]:
            found = state["tokenizer"].apply_chat_template(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            values += found["input_ids"]
            masks += found["assistant_masks"]
            lengths.append(len(found["input_ids"]))
        if "out" in options:
            arrays = (np.array(values, np.uint32), np.array(masks, bool), np.array(lengths))
            np.savez(options["out"], values=arrays[0], masks=arrays[1], lengths=arrays[2])
        return {"tokens": len(values)}

    return work


if __name__ == "__main__":
    serve(get_ready)
