"""datatrove: JSON lines to files of tokens, documents shuffled in each; as a second round, the merge of these
into one in random order. With `fast: tokenizer`, gigatoken in the place of its tokenizer and nothing else
changed; with `fast: batches`, the loop that writes documents is replaced as well."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.batching import batched
from serve import serve


@dataclass
class Encoding:
    ids: list[int]


class Gigatoken:
    """gigatoken with the interface of tokenizers.Tokenizer that the pipeline needs."""

    def __init__(self, path: str, eos: str) -> None:
        import gigatoken

        self.inner = gigatoken.Tokenizer(path)
        self.eos = tokenizers.Tokenizer.from_file(path).token_to_id(eos)

    def get_vocab_size(self) -> int:
        return self.inner.vocab_size

    def encode_batch(self, texts: list[str]) -> list[Encoding]:
        return [Encoding([*ids, self.eos]) for ids in self.inner.encode_batch_list(texts, parallel=False)]


class FastTokenizer(DocumentTokenizer):
    # No cached_property: it has a lock, which workers would inherit locked.
    @property
    def tokenizer(self) -> Any:
        if "fast" not in vars(self):
            self.fast = Gigatoken(self.tokenizer_name_or_path, self.eos_token)
        return self.fast


class BatchTokenizer(DocumentTokenizer):
    """Encode and write a batch in one call each, the best that can be done for it."""

    def write_unshuffled(self, data: Any, filename: str) -> TokenizedFile:
        import gigatoken

        inner = gigatoken.Tokenizer(self.tokenizer_name_or_path)
        eos = self.tokenizer.token_to_id(self.eos_token)
        written = TokenizedFile(
            self.output_folder,
            filename,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
            save_final_metadata=self.save_final_metadata,
            token_size=2,
        )
        for batch in batched(data, self.batch_size):
            with self.track_time(unit="batch"):
                found = inner.encode_batch([document.text for document in batch], parallel=False).layout
                found = found.to_ListOffsetArray64(start_at_zero=True)
                offsets = np.asarray(found.offsets)
                values = np.insert(np.asarray(found.content.data)[: offsets[-1]], offsets[1:], eos)
                ends = offsets[1:] + np.arange(1, len(offsets))
                written.write_bytes(values.astype(np.uint16).tobytes(), doc_ends=ends.tolist())
        written.close()
        return written


def get_ready() -> Any:
    def work(options: dict[str, Any]) -> dict[str, Any]:
        out = options["out"]
        if options.get("merge"):
            steps: list[Any] = [
                DocumentTokenizerMerger(f"{out}/tokens", f"{out}/merged", "all", seed=0, progress=False)
            ]
            LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{out}/logs2").run()
            return {}
        kinds = {"": DocumentTokenizer, "tokenizer": FastTokenizer, "batches": BatchTokenizer}
        kind = kinds[options["fast"]]
        steps = [
            JsonlReader(options["folder"], glob_pattern="*.jsonl"),
            kind(
                f"{out}/tokens",
                tokenizer_name_or_path=options["tokenizer"],
                eos_token=options["eos"],
                batch_size=1000,
                seed=0,
            ),
        ]
        LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=f"{out}/logs").run()
        return {}

    return work


if __name__ == "__main__":
    serve(get_ready)
