"""Pairs of answers: both sides as transformers renders them, only the answers to be learnt, and both in one
row."""

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
from test_chat import GENERATION, TOOLS, pair, say
from test_labelled import lines, prepared, silent

from headrace.config import reader as config, recipe
from headrace.cli.main import main
from headrace.quantize import run as command
from headrace.data.tokenizer import train as learn, tokenizer as tokenise
from headrace.data.chat import records as shapes
from headrace.data.annotations import Notes
from headrace.data.documents import Problems
from headrace.data.preference import encode_pairs
from headrace.data.shards import Index
from headrace.data.dataset import Dataset
from headrace.data.verify import verify
from headrace.errors import UserError

ROOT = Path(__file__).parent.parent
ASKED = {"role": "user", "content": "Which?"}
GOOD, BAD = {"role": "assistant", "content": "This."}, {"role": "assistant", "content": "That."}


def record(draw: random.Random) -> dict[str, Any]:
    """A dialogue of some turns whose last answer is one of two."""
    talk = [{"role": "system", "content": say(draw)}] * (draw.random() < 0.3)
    for _ in range(draw.randint(0, 2)):
        talk += [{"role": "user", "content": say(draw)}, {"role": "assistant", "content": say(draw)}]
    talk.append({"role": "user", "content": say(draw)})
    both = [[*talk, {"role": "assistant", "content": say(draw)}] for _ in range(2)]
    return {"chosen": both[0], "rejected": both[1]}


@pytest.mark.parametrize("template", [GENERATION, TOOLS], ids=["generation", "tools"])
def test_both_sides_are_those_of_transformers_and_only_the_answers_are_learnt(template: str) -> None:
    ours, theirs = pair("byte level", template)
    draw = random.Random(0)
    records = [record(draw) for _ in range(30)]
    documents = [json.dumps(shapes.pair(one)) for one in records]
    encoded = encode_pairs(ours, documents, 10_000, notes=Notes())
    how: dict[str, Any] = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    for number, one in enumerate(records):
        here = encoded.take(number, number + 1)
        middle = int(here.seconds[0])
        for side, part in (("chosen", slice(0, middle)), ("rejected", slice(middle, None))):
            expected = theirs.apply_chat_template([one[side]], **how)
            assert here.values[part].tolist() == expected["input_ids"][0]
            # Of the mask of all that the assistant says, that of what comes after the prompt.
            asked = theirs.apply_chat_template([one[side][:-1]], add_generation_prompt=True, **how)
            mask = np.array(expected["assistant_masks"][0], bool)
            mask[: len(asked["input_ids"][0])] = False
            assert here.loss[part].tolist() == mask.tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "Which?", "chosen": "This.", "rejected": "That."},
        {"prompt": "Which?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "messages": [ASKED, GOOD]},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {
            "chosen": "\n\nHuman: Which?\n\nAssistant: This.",
            "rejected": "\n\nHuman: Which?\n\nAssistant: That.",
        },
    ],
)
def test_published_pairs_are_made_one(given: dict[str, Any]) -> None:
    assert shapes.detect(given) == "preference"
    assert shapes.pair(given) == [
        {"role": "prompt", "messages": [ASKED]},
        {"role": "chosen", "messages": [GOOD]},
        {"role": "rejected", "messages": [BAD]},
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"prompt": "Q", "chosen": "same", "rejected": "same"},
            "says nothing in `chosen` that the other has not",
        ),
        ({"chosen": "this", "rejected": "that"}, "begin with no common message"),
        ({"prompt": "Q", "chosen": 3, "rejected": "that"}, "`chosen` is not text"),
        ({"prompt": "Q", "chosen": "this", "rejected": None}, "`rejected` is missing"),
    ],
)
def test_what_is_wrong_with_a_pair_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shapes.pair(given)


def test_a_pair_that_the_template_refuses_on_one_side_is_left_out_whole() -> None:
    ours, _ = pair(
        "byte level",
        "{% if 'no' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + GENERATION,
    )
    records = [{"prompt": "Q", "chosen": "yes", "rejected": what} for what in ("no", "perhaps")]
    problems = Problems("skip")
    documents = [json.dumps(shapes.pair(one)) for one in records]
    encoded = encode_pairs(ours, documents, 999, notes=Notes(), problems=problems, ids=["first", "second"])
    assert encoded.lengths[0] == 0 < encoded.lengths[1]
    assert encoded.seconds[0] == 0 < encoded.seconds[1]
    assert problems.counts == {"refused by the chat template": 1} and "first" in problems.samples[0]


@pytest.mark.parametrize("mode", ["best_fit", "document", "concat"])
def test_a_pair_is_one_unit_within_a_row(tmp_path: Path, mode: str) -> None:
    draw = random.Random(1)
    words = ["mill", "water", "wheel", "stone"]
    talk = lambda longest: " ".join(draw.choices(words, k=draw.randint(1, longest)))
    records = [
        {
            "prompt": f"{n}?",
            "chosen": f"yes{n} {talk(8)}",
            "rejected": f"not{n} {talk(90 if n % 9 == 0 else 8)}",
        }
        for n in range(80)
    ]
    said: list[str] = []
    folder = prepared(
        tmp_path,
        f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}",
        f"pack.mode={mode}",
        "tokenizer.template=plain",
        "pack.sequence_length=120",
        say=said.append,
    )
    index = Index.parse((folder / "index.json").read_bytes(), "")
    assert index.pairs and not index.labelled
    verify(folder, silent)
    left_out = [line for line in said if "pairs of answers are left out" in line]
    dataset, tokenizer, seen = Dataset.open(folder), tokenise.load(folder), 0
    for split in ("train", "evaluation"):
        batch = dataset.batch(0, split=split, sequences=dataset.rows(split), seed=0)
        for tokens, segments, loss in zip(batch.tokens, batch.segments, batch.loss, strict=True):
            assert segments.max() % 2 == 0
            for first in range(1, segments.max(), 2):
                seen += 1
                answers = [tokenizer.decode(tokens[(segments == n) & loss]) for n in (first, first + 1)]
                number = answers[0].split()[0].removeprefix("yes")
                wanted = records[int(number)]
                assert answers[0].strip().startswith(wanted["chosen"])
                assert answers[1].strip().startswith(wanted["rejected"])
    assert left_out == [left_out[0]] and left_out[0].startswith(f"pack: {80 - seen} pairs")
    assert 0 < 80 - seen < 20
    with pytest.raises(UserError, match="60 would cut the pairs of answers"):
        Dataset.open(folder, sequence_length=60)


def test_pairs_are_a_set_of_their_own(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"prompt": "Q", "chosen": f"a{n}", "rejected": "b"} for n in range(20)])
    lines(tmp_path / "b.jsonl", [{"text": f"text {n}"} for n in range(20)])
    with pytest.raises(UserError, match="pairs of answers and plain texts in one set"):
        prepared(
            tmp_path,
            f"  a: {{path: {tmp_path}/a.jsonl}}\n  b: {{path: {tmp_path}/b.jsonl}}",
            "tokenizer.template=plain",
        )


def test_the_guides_example_makes_pairs_and_a_recipe_to_learn_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lines of docs/finetune.md as they stand there, up to training."""
    (block,) = re.findall(r"```\n([^`]*pairs\.jsonl\n.*?)```", (ROOT / "docs/finetune.md").read_text(), re.S)
    make, prepare, train, *_ = block.splitlines()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data/demo").mkdir(parents=True)
    tokenizer = learn.train(["What is 12 plus 30? It is 42, I think."] * 3, kind="bpe", vocab=280)
    tokenise.save(tokenizer, tmp_path / "data/demo")
    subprocess.run(make.replace("python", sys.executable, 1), shell=True, check=True)
    assert main(shlex.split(prepare)[1:]) == 0
    index = Index.parse((tmp_path / "data/pairs/index.json").read_bytes(), "")
    assert index.pairs and sum(split.documents for split in index.splits.values()) == 1600
    name, *overrides = shlex.split(train)[2:]
    cfg = recipe.load(name, overrides)
    assert cfg.objective.use == "dpo" and cfg.start == "runs/lora-demo" and cfg.data.path == "data/pairs"


def test_few_bits_are_not_learnt_from_what_was_rejected(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(30)]
    source = f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}"
    folder = str(prepared(tmp_path, source, "tokenizer.template=plain", "pack.sequence_length=120"))

    def opened(objective: str, *options: str) -> Dataset:
        section = config.part_class("objectives", objective)()
        run = SimpleNamespace(
            cfg=SimpleNamespace(objective=section, data=SimpleNamespace(sequence_length=120)),
            tokenizer_sha256=None,
        )
        method = recipe.load_method("vptq", options)
        return command.open_data(run, command.Request("out", method, 8, "float32", folder))

    assert opened("dpo").index.pairs  # to be calibrated with
    with pytest.raises(UserError, match="finish: .* holds pairs of answers"):
        opened("dpo", "finish=10")
    with pytest.raises(UserError, match="--data: .* holds pairs of answers, which objective causal"):
        opened("causal")
