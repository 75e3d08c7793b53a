"""Hugging Face's BPE trainer on the documents of JSON lines, all cores."""

from typing import Any

from serve import read_texts, serve


def get_ready() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts: list[str] = []

    def work(options: dict[str, Any]) -> dict[str, Any]:
        if "files" in options:
            texts[:] = read_texts(options["files"])
            return {}
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=options["vocab"],
            special_tokens=options["special"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        inner.save(options["out"])
        return {}

    return work


if __name__ == "__main__":
    serve(get_ready)
