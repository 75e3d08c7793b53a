"""Preference pairs: both sides are rendered as in transformers, only the answers are trained on, and both are
in the same row."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.config import reader, recipe
from headrace.data.annotations import AnnotationStats
from headrace.data.chat import records as chat_records
from headrace.data.dataset import Dataset
from headrace.data.documents import Problems
from headrace.data.preference import encode_pairs
from headrace.data.shards import Index
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.data.verify import verify
from headrace.errors import UserError
from headrace.quantize.calibration_data import open_calibration_data
from tests.data.chat.test_encode import GENERATION, TOOLS, pair, say
from tests.data.test_labeled import lines, prepared, silent

ROOT = Path(__file__).parents[2]
QUESTION = {"role": "user", "content": "Which?"}
GOOD, BAD = {"role": "assistant", "content": "This."}, {"role": "assistant", "content": "That."}


def record(rng: random.Random) -> dict[str, Any]:
    """A random conversation with two alternatives for the last answer."""
    turns = [{"role": "system", "content": say(rng)}] * (rng.random() < 0.3)
    for _ in range(rng.randint(0, 2)):
        turns += [{"role": "user", "content": say(rng)}, {"role": "assistant", "content": say(rng)}]
    turns.append({"role": "user", "content": say(rng)})
    sides = [[*turns, {"role": "assistant", "content": say(rng)}] for _ in range(2)]
    return {"chosen": sides[0], "rejected": sides[1]}


@pytest.mark.parametrize("template", [GENERATION, TOOLS], ids=["generation", "tools"])
def test_both_sides_equal_those_of_transformers_and_only_the_answers_are_trained_on(template: str) -> None:
    actual, reference = pair("byte level", template)
    rng = random.Random(0)
    records = [record(rng) for _ in range(30)]
    documents = [json.dumps(chat_records.to_preference_parts(record_)) for record_ in records]
    encoded = encode_pairs(actual, documents, 10_000, stats=AnnotationStats())
    options: dict[str, Any] = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    for index, record_ in enumerate(records):
        encoded_pair = encoded.slice(index, index + 1)
        middle = int(encoded_pair.second_starts[0])
        for side, part in (("chosen", slice(0, middle)), ("rejected", slice(middle, None))):
            expected = reference.apply_chat_template([record_[side]], **options)
            assert encoded_pair.values[part].tolist() == expected["input_ids"][0]
            # The assistant mask, restricted to tokens after the prompt.
            prompt = reference.apply_chat_template(
                [record_[side][:-1]], add_generation_prompt=True, **options
            )
            mask = np.array(expected["assistant_masks"][0], bool)
            mask[: len(prompt["input_ids"][0])] = False
            assert encoded_pair.loss_mask[part].tolist() == mask.tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Which?", "chosen": "This.", "rejected": "That."},
        {
            "prompt": "Which?",
            "chosen": [QUESTION, GOOD],
            "rejected": [QUESTION, BAD],
            "messages": [QUESTION, GOOD],
        },
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {
            "chosen": "\n\nHuman: Which?\n\nAssistant: This.",
            "rejected": "\n\nHuman: Which?\n\nAssistant: That.",
        },
    ],
)
def test_published_layouts_of_pairs_give_the_same_parts(row: dict[str, Any]) -> None:
    assert chat_records.detect_shape(row) == "preference"
    assert chat_records.to_preference_parts(row) == [
        {"role": "prompt", "messages": [QUESTION]},
        {"role": "chosen", "messages": [GOOD]},
        {"role": "rejected", "messages": [BAD]},
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "Q", "chosen": "same", "rejected": "same"},
            "`chosen` has no message of the assistant that the other",
        ),
        ({"chosen": "this", "rejected": "that"}, "start with no common message"),
        ({"prompt": "Q", "chosen": 3, "rejected": "that"}, "`chosen` is not text"),
        ({"prompt": "Q", "chosen": "this", "rejected": None}, "`rejected` is missing"),
    ],
)
def test_errors_in_a_pair_are_described(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chat_records.to_preference_parts(row)


def test_both_sides_of_a_pair_are_skipped_if_the_template_refuses_either() -> None:
    actual, _ = pair(
        "byte level",
        "{% if 'no' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + GENERATION,
    )
    records = [{"prompt": "Q", "chosen": "yes", "rejected": rejected} for rejected in ("no", "perhaps")]
    problems = Problems("skip")
    documents = [json.dumps(chat_records.to_preference_parts(row)) for row in records]
    encoded = encode_pairs(
        actual, documents, 999, stats=AnnotationStats(), problems=problems, ids=["first", "second"]
    )
    assert encoded.lengths[0] == 0 < encoded.lengths[1]
    assert encoded.second_starts[0] == 0 < encoded.second_starts[1]
    assert problems.counts == {"refused by the chat template": 1} and "first" in problems.samples[0]


@pytest.mark.parametrize("mode", ["best_fit", "document", "concat"])
def test_a_pair_is_not_split_between_rows(tmp_path: Path, mode: str) -> None:
    rng = random.Random(1)
    words = ["mill", "water", "wheel", "stone"]
    random_words = lambda max_words: " ".join(rng.choices(words, k=rng.randint(1, max_words)))
    records = [
        {
            "prompt": f"{n}?",
            "chosen": f"yes{n} {random_words(8)}",
            "rejected": f"not{n} {random_words(90 if n % 9 == 0 else 8)}",
        }
        for n in range(80)
    ]
    log_lines: list[str] = []
    folder = prepared(
        tmp_path,
        f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}",
        f"pack.mode={mode}",
        "tokenizer.chat_template=plain",
        "pack.sequence_length=120",
        say=log_lines.append,
    )
    index = Index.parse((folder / "index.json").read_bytes(), "")
    assert index.pairs and not index.labelled
    verify(folder, silent)
    skipped = [line for line in log_lines if "pairs of answers are skipped" in line]
    dataset, tokenizer, num_pairs = Dataset.open(folder), tokenizer_io.load(folder), 0
    for split in ("train", "evaluation"):
        rows = dataset.rows_per_epoch(split)
        order = dataset.train_order(rows, seed=0) if split == "train" else dataset.eval_order(rows)
        batch = dataset.batch(order, 0)
        for tokens, segments, loss in zip(batch.tokens, batch.segments, batch.loss_mask, strict=True):
            assert segments.max() % 2 == 0
            for first in range(1, segments.max(), 2):
                num_pairs += 1
                answers = [tokenizer.decode(tokens[(segments == n) & loss]) for n in (first, first + 1)]
                number = answers[0].split()[0].removeprefix("yes")
                expected = records[int(number)]
                assert answers[0].strip().startswith(expected["chosen"])
                assert answers[1].strip().startswith(expected["rejected"])
    assert skipped == [skipped[0]] and skipped[0].startswith(f"pack: {80 - num_pairs} pairs")
    assert 0 < 80 - num_pairs < 20
    with pytest.raises(UserError, match="60 would cut the pairs of answers"):
        Dataset.open(folder, sequence_length=60)


def test_pairs_are_not_mixed_with_other_documents(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"prompt": "Q", "chosen": f"a{n}", "rejected": "b"} for n in range(20)])
    lines(tmp_path / "b.jsonl", [{"text": f"text {n}"} for n in range(20)])
    with pytest.raises(UserError, match="pairs of answers and plain texts in one dataset"):
        prepared(
            tmp_path,
            f"  a: {{path: {tmp_path}/a.jsonl}}\n  b: {{path: {tmp_path}/b.jsonl}}",
            "tokenizer.chat_template=plain",
        )


def test_the_example_of_the_guide_prepares_pairs_and_loads_a_recipe_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the commands of docs/finetune.md up to training."""
    (block,) = re.findall(r"```\n([^`]*pairs\.jsonl\n.*?)```", (ROOT / "docs/finetune.md").read_text(), re.S)
    make, prepare, train, *_ = block.splitlines()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data/demo").mkdir(parents=True)
    tokenizer = tokenizer_train.train_tokenizer(
        ["What is 12 plus 30? It is 42, I think."] * 3, kind="bpe", vocab=280
    )
    tokenizer_io.save(tokenizer, tmp_path / "data/demo")
    subprocess.run(make.replace("python", sys.executable, 1), shell=True, check=True)
    assert main(shlex.split(prepare)[1:]) == 0
    index = Index.parse((tmp_path / "data/pairs/index.json").read_bytes(), "")
    assert index.pairs and sum(split.documents for split in index.splits.values()) == 1600
    (tmp_path / "runs/lora-demo").mkdir(parents=True)  # the recipe reads the model from here
    (tmp_path / "runs/lora-demo/recipe.yaml").write_text((ROOT / "recipes/demo.yaml").read_text())
    name, *overrides = shlex.split(train)[2:]
    cfg = recipe.load(name, overrides)
    assert cfg.objective.use == "dpo" and cfg.init_from == "runs/lora-demo" and cfg.data.path == "data/pairs"


def test_finetuning_of_quantized_models_refuses_preference_pairs(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(30)]
    source = f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}"
    folder = str(prepared(tmp_path, source, "tokenizer.chat_template=plain", "pack.sequence_length=120"))

    def open_pairs(objective: str, *, is_trained_on: bool = False) -> Dataset:
        section = reader.part_class("objectives", objective)()
        run = SimpleNamespace(
            recipe=SimpleNamespace(objective=section, data=SimpleNamespace(sequence_length=120)),
            tokenizer_sha256=None,
        )
        return open_calibration_data(run, folder, is_trained_on=is_trained_on)

    assert open_pairs("dpo").index.pairs  # calibration accepts pairs
    with pytest.raises(UserError, match=r"finetune_steps: .* holds pairs of answers"):
        open_pairs("dpo", is_trained_on=True)
    with pytest.raises(UserError, match=r"data: .* holds pairs of answers, which objective causal"):
        open_pairs("causal")
