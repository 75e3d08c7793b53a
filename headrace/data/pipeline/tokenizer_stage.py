"""Second stage: train a tokenizer or copy the user's, and choose the library that encodes with it."""

import time

from headrace.data import pause_tokens
from headrace.data.chat import encode
from headrace.data.pipeline.context import PipelineContext
from headrace.data.pipeline.progress import Bar
from headrace.data.pipeline.stages import TokenizerRecord, read_template, stage_fingerprint, tokenizer_hash
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train

SAMPLE = 400_000  # characters of text on which a fast encoder is compared with the reference


class TokenizerStage:
    """Makes the tokenizer, from the documents or from the user's files."""

    def __init__(self, context: PipelineContext) -> None:
        self.context = context

    def fingerprint(self) -> str:
        """Hash of the recipe keys and files that the tokenizer depends on."""
        recipe = self.context.recipe
        return stage_fingerprint(recipe, "tokenizer") + tokenizer_hash(recipe)

    def is_outdated(self) -> bool:
        return False

    def run(self) -> TokenizerRecord:
        """Write the tokenizer to the data folder. Returns the record of the stage."""
        context, section, started_at = self.context, self.context.recipe.tokenizer, time.perf_counter()
        self._write_tokenizer()
        tokenizer = context.tokenizer
        choice = tokenizer_io.choose_encoder(tokenizer, list(context.sample_texts(SAMPLE)))
        special = ", ".join(f"{role} {id}" for role, id in vars(tokenizer.special).items() if id is not None)
        seconds = time.perf_counter() - started_at
        context.report(
            f"tokenizer: {tokenizer.vocab_size:,} entries ({special}) in {seconds:.1f} s; "
            f"{choice.name} encodes ({choice.reason})"
        )
        if section.use != "file" and tokenizer.vocab_size < section.vocab:
            context.report(
                f"tokenizer: fewer entries than tokenizer.vocab, {section.vocab:,}, because the text yields "
                "no more"
            )
        if tokenizer.chat_template is not None and (reason := encode.find_slow_reason(tokenizer)) is not None:
            context.report(f"tokenizer: conversations take longer with it, since {reason}")
        return {
            "vocab": tokenizer.vocab_size,
            "encoder": choice.name,
            "brought": tokenizer_hash(context.recipe),
        }

    def _write_tokenizer(self) -> None:
        """Write the files of the tokenizer to the data folder. Held-out documents are not trained on."""
        context, section = self.context, self.context.recipe.tokenizer
        if section.use == "file":
            assert section.path is not None
            tokenizer_io.copy(section.path, context.folder)
        else:
            texts = context.sample_texts(section.sample_mb * 1_000_000)
            with Bar("tokenizer", 1):
                trained = tokenizer_train.train_tokenizer(
                    texts, kind=section.use, vocab=section.vocab, report=context.report
                )
            tokenizer_io.save(trained, context.folder)
        if context.recipe.pack.pause_tokens:
            pause_tokens.add_pause_token(context.folder)
        if section.chat_template is not None:
            tokenizer_io.write_chat_template(context.folder, read_template(section.chat_template))
