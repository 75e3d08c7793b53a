"""Pause tokens: where they stand, that nothing else changes, and that no model learns to say them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.config import recipe
from headrace.data.dataset import Dataset
from headrace.data.documents import Ragged
from headrace.data.pause_tokens import PAUSE_TOKEN, insert_pauses
from headrace.data.pipeline.prepare import prepare
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.objectives import Batch, SpecialTokens, TrainTask, causal

PAUSING = 99
RANDOM = np.random.default_rng(0)


def documents(ragged: Ragged, values: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(values, ragged.offsets[1:-1])]


def test_texts_get_the_requested_number_anywhere_and_are_otherwise_unchanged():
    lengths = RANDOM.integers(0, 40, 500)
    given = Ragged(RANDOM.integers(0, 90, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))
    found = insert_pauses(given, PAUSING, 10, RANDOM)
    pauses = found.values == PAUSING
    assert pauses.sum() == round(len(given.values) / 10)
    np.testing.assert_array_equal(found.loss_mask, ~pauses)
    without = [[token for token in one if token != PAUSING] for one in documents(found, found.values)]
    assert without == documents(given, given.values)
    share = np.array([one.count(PAUSING) for one in documents(found, found.values)])
    assert np.corrcoef(share, lengths)[0, 1] > 0.6  # the longer, the more


def test_conversations_get_them_before_each_answer():
    values = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    loss = np.array([False, True, True, False, True, True, False, True])
    found = insert_pauses(Ragged(values, np.array([0, 5, 5, 8]), loss), PAUSING, 2, RANDOM)
    p = PAUSING
    assert documents(found, found.values) == [[1, p, p, 2, 3, 4, p, p, 5], [], [p, p, 6, 7, p, p, 8]]
    np.testing.assert_array_equal(found.values[found.loss_mask], values[loss])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pauses")
    (root / "texts").mkdir()
    for number in range(40):
        (root / "texts" / f"{number}.txt").write_text(f"Text {number}: " + "the mill turns and turns. " * 9)
    (root / "data.yaml").write_text(
        f"path: {root}/data\nsources: {{test: {{path: {root}/texts}}}}\ntokenizer: {{use: bpe, vocab: 280}}\n"
        "pack: {sequence_length: 64, eval_fraction: 0.25, pause_tokens: 20}\n"
    )
    prepare(recipe.load_data(root / "data.yaml"), lambda line: None)
    return root / "data"


def test_data_has_the_token_and_no_model_learns_to_say_it(data):
    pause = tokenizer_io.load(data).inner.token_to_id(PAUSE_TOKEN)
    dataset = Dataset.open(data)
    assert pause == dataset.vocab - 1 and dataset.has_loss_mask
    packed = dataset.batch(dataset.train_order(8, seed=0), 0)
    pauses = packed.tokens == pause
    np.testing.assert_array_equal(packed.loss_mask[packed.segments > 0], ~pauses[packed.segments > 0])
    assert pauses.sum() == pytest.approx((packed.segments > 0).sum() / 6, rel=0.3)
    batch = Batch(packed.tokens, packed.segments, packed.positions, packed.loss_mask)
    special_tokens = SpecialTokens(dataset.vocab, None, None, None, None)
    task = TrainTask(None, causal.Config(), None, None, special_tokens, family=None)
    examples = causal.prepare(task, batch, jax.random.key(0))
    learnt = np.asarray(examples.weights) > 0
    assert not (np.asarray(examples.targets)[learnt] == pause).any()
    # What follows a pause is learnt from it: that is what it is for.
    assert (learnt & pauses).sum() > 10
    assert PAUSE_TOKEN not in tokenizer_io.load(data).decode(packed.tokens[0])


def test_a_tokenizer_that_is_brought_gets_the_token_too(data, tmp_path):
    folder = tmp_path / "brought"
    folder.mkdir()
    inner = json.loads((data / "tokenizer.json").read_text())
    inner["added_tokens"] = [token for token in inner["added_tokens"] if token["content"] != PAUSE_TOKEN]
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{test: {{path: {data.parent}/texts}}}}\n"
        f"tokenizer: {{use: file, path: {folder}}}\npack: {{sequence_length: 64, pause_tokens: 10}}\n"
    )
    prepare(recipe.load_data(tmp_path / "data.yaml"), lambda line: None)
    assert tokenizer_io.load(tmp_path / "data").inner.token_to_id(PAUSE_TOKEN) is not None
    assert tokenizer_io.load(folder).inner.token_to_id(PAUSE_TOKEN) is None
