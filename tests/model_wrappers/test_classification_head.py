"""Heads that tell labels: against transformers' own, packed against one by one, and from data to export."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace.checkpoint import open_hf
from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.config import reader, recipe, sections, source_model
from headrace.config.wrappers import ClassifierKeys
from headrace.convert import from_huggingface, gguf, to_huggingface
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import Sampling
from headrace.inference.serve import http as serve_http
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import classification_head, load_family
from headrace.nn import module, sharding
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens, TrainTask, classify
from headrace.quantize import run as quantize_run
from headrace.training import evaluate, step
from headrace.training import run as training_run
from headrace.training.init_from.check import check_source
from headrace.training.init_from.load import load_weights
from tests.data.test_labeled import WORDS, lines, prepared
from tests.support import parity

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, attn_implementation="eager",
    id2label={0: "no", 1: "perhaps", 2: "yes"}, label2id={"no": 0, "perhaps": 1, "yes": 2},
)  # fmt: skip
MODERN = dict(local_attention=8, classifier_dropout=0.0)
DEBERTA = dict(
    relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
    type_vocab_size=0, position_buckets=8, max_relative_positions=32, pos_att_type=["p2c", "c2p"],
    pooler_hidden_size=32, pooler_hidden_act="gelu",
)  # fmt: skip
HEADS = {
    "ModernBertForSequenceClassification first": MODERN | dict(classifier_pooling="cls"),
    "ModernBertForSequenceClassification mean": MODERN | dict(classifier_pooling="mean"),
    "ModernBertForTokenClassification each": MODERN,
    "DebertaV2ForSequenceClassification first": DEBERTA,
    "DebertaV2ForTokenClassification each": DEBERTA,
    "EuroBertForSequenceClassification first": dict(classifier_pooling="bos"),
    "EuroBertForSequenceClassification mean": dict(classifier_pooling="mean"),
    "EuroBertForTokenClassification each": {},
    "LlamaForSequenceClassification last": {},
    "LlamaForTokenClassification each": {},
    "Qwen3ForSequenceClassification last": dict(head_dim=8, num_key_value_heads=2),
    "Gemma2ForSequenceClassification last": dict(head_dim=8, num_key_value_heads=2, sliding_window=8),
    "Gemma3TextForSequenceClassification last": dict(head_dim=8, num_key_value_heads=2, sliding_window=8),
    "Olmo2ForSequenceClassification last": {},
}


def task_of(cfg: Any) -> TrainTask:
    return TrainTask(
        model=cfg,
        objective=reader.part_class("objectives", "classify")(),
        loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(),
        exec_opts=Execution(reader.part_class("attention", "auto")(), "float32"),
        special_tokens=SpecialTokens(cfg.vocab, pad=0, bos=1, eos=2, mask=3),
        family=load_family(cfg),
    )


# transformers.DebertaV2 compiles a function by torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("Qwen", "Gemma", "Olmo")))
        for name in HEADS
    ],
)
def test_logits_are_those_of_transformers_and_tensors_come_back(name: str, tmp_path: Path) -> None:
    architecture, pooling = name.split()
    kind = getattr(transformers, architecture)
    theirs = parity.fill(kind(kind.config_class(**SIZES | HEADS[name])), norm=1.0)
    theirs.save_pretrained(tmp_path)
    settings = source_model.read_hf_config(tmp_path)
    section, head = open_hf.to_recipe_sections(settings)
    cfg = reader.part_class("models", section.pop("use"))(**section, classifier=head)
    assert cfg.classifier == ClassifierKeys(3, pooling)
    family = load_family(cfg)
    table = family.tensor_table(cfg)
    read = open_hf.read_params(table, module.shapes(family.Model, cfg), tmp_path)
    params = jax.tree.map(jnp.asarray, read)
    tokens = np.random.default_rng(0).integers(4, 96, (2, 20))
    positions = np.broadcast_to(np.arange(20), tokens.shape)
    tell = jax.jit(
        lambda w, t, s, p: w.predict_labels(cfg, t, exec_opts=task_of(cfg).exec_opts, segments=s, positions=p)
    )
    ours = tell(params, jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(positions))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens), attention_mask=torch.ones(2, 20)).logits.numpy()
    ours = ours if pooling == "each" else ours[:, 0]
    np.testing.assert_allclose(ours, wanted, atol=2e-5, rtol=0)
    assert np.abs(wanted).max() > 0.1
    written = dict(to_tensors(table, params, "float32"))
    state = {name: w.numpy() for name, w in theirs.state_dict().items() if "rotary" not in name}
    assert written.keys() == state.keys()
    assert all(np.array_equal(written[name], state[name]) for name in state)
    told = family.hf_naming.to_config(cfg, 64) | classification_head.to_hf_labels(
        classification_head.from_hf_labels(settings)
    )
    assert told["architectures"] == [architecture] and told["id2label"] == {
        "0": "no",
        "1": "perhaps",
        "2": "yes",
    }
    again = kind.config_class(**told)
    for key in ("num_labels", "hidden_size", "classifier_pooling"):
        assert getattr(again, key, None) == getattr(theirs.config, key, None)


def packed(
    draw: np.random.Generator, texts: list[np.ndarray], labels: list[np.ndarray], length: int
) -> Batch:
    """All texts in one row, and padding."""
    tokens, segments, positions, told = (np.zeros((1, length), np.int32) for _ in range(4))
    place = 0
    for number, (text, label) in enumerate(zip(texts, labels, strict=True), 1):
        here = slice(place, place + len(text))
        tokens[0, here], segments[0, here], told[0, here] = text, number, label
        positions[0, here] = np.arange(len(text))
        place = here.stop
    positions[0, place:] = np.arange(length - place)
    return Batch(*map(jnp.asarray, (tokens, segments, positions)), labels=jnp.asarray(told))


@pytest.mark.parametrize(
    ("use", "pooling"),
    [
        ("modernbert", "first"),
        ("modernbert", "mean"),
        ("deberta", "first"),
        ("llama", "last"),
        ("deberta", "each"),
    ],
)
def test_texts_packed_in_a_row_give_the_loss_and_gradients_of_the_texts_one_by_one(
    use: str, pooling: str
) -> None:
    more = dict(kv_heads=2, head_dim=8) if use == "llama" else {}
    cfg = reader.part_class("models", use)(
        layers=2, embed=32, heads=4, mlp=40, vocab=96, classifier=ClassifierKeys(3, pooling), **more
    )
    task, family = task_of(cfg), load_family(cfg)
    axes = module.axes(family.Model, cfg)
    params = module.init(family.Model, cfg, jax.random.key(1))
    draw = np.random.default_rng(2)
    texts = [draw.integers(4, 96, size) for size in (7, 1, 12, 3)]
    labels = []
    for number, text in enumerate(texts):
        each = draw.integers(0, 4, len(text)) if pooling == "each" else np.zeros(len(text), int)
        each[0] = 1 + number % 3 if number != 3 else 0  # the last has no label
        labels.append(each)

    @jax.jit
    def gradients(batch: Batch) -> Any:
        examples = step.to_microbatches(classify.prepare(task, batch, jax.random.key(0)), 1)
        return step.accumulate_gradients(task, axes, params, examples)

    together, sums = gradients(packed(draw, texts, labels, 30))
    alone = [gradients(packed(draw, [text], [label], 30)) for text, label in zip(texts, labels, strict=True)]
    for name in ("loss", "accuracy", "count"):
        np.testing.assert_allclose(sums[name], sum(one[1][name] for one in alone), rtol=1e-5)
    assert sums["count"] == (3 if pooling != "each" else sum((label > 0).sum() for label in labels))
    added = jax.tree.map(lambda *parts: sum(parts), *(one[0] for one in alone))
    for (name, ours), (_, wanted) in zip(
        module.named_leaves(together), module.named_leaves(added), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, atol=2e-6, rtol=1e-4, err_msg=name)
    assert all(
        np.abs(g).max() > 0
        for name, g in module.named_leaves(together)
        if name in classification_head.HEAD_WEIGHTS
    )


def test_judgement_is_that_of_the_definitions() -> None:
    """Against sums over pairs of samples and labels, in plain Python."""
    draw = np.random.default_rng(3)
    wanted, told = draw.integers(0, 3, 200), draw.integers(0, 4, 200)
    told = np.where(draw.random(200) < 0.5, wanted, told)
    counts: dict[str, Any] = {
        "wanted": np.bincount(wanted, minlength=4),
        "told": np.bincount(told, minlength=4),
    }
    counts |= {"hits": np.bincount(wanted[wanted == told], minlength=4), "nll": 50.0}
    found = classify.eval_metrics(counts)
    assert (
        classify.per_label_lines(counts, "abcd")[3] == f"d: 0 of 0 right, predicted {(told == 3).sum()} times"
    )
    scores = []
    for label in range(4):
        hit = sum(w == label == t for w, t in zip(wanted, told, strict=True))
        precision, recall = hit / max((told == label).sum(), 1), hit / max((wanted == label).sum(), 1)
        scores.append(2 * precision * recall / (precision + recall) if hit else 0.0)
    one_hot = [np.eye(4)[labels] - np.eye(4)[labels].mean(axis=0) for labels in (wanted, told)]
    covariance = lambda a, b: (a * b).sum()
    matthews = covariance(*one_hot) / np.sqrt(
        covariance(one_hot[0], one_hot[0]) * covariance(one_hot[1], one_hot[1])
    )
    assert found["accuracy"] == np.mean(wanted == told) and found["loss"] == 0.25
    assert found["macro_f1"] == pytest.approx(np.mean(scores)) and found["matthews"] == pytest.approx(
        matthews
    )
    assert found["majority"] == np.bincount(wanted).max() / 200


def make_run(tmp_path: Path, name: str, path: Path, **sections: Any) -> sections.TrainRecipe:
    tree = dict(
        run_dir=str(tmp_path / name),
        model=dict(use="modernbert", layers=2, embed=32, heads=4, mlp=48, window=16),
        data=dict(path=str(path), sequence_length=48),
        objective=dict(use="classify"),
        optimizer=dict(use="adamw", learning_rate=5e-3, weight_decay=0.0),
        schedule=dict(use="cosine", steps=40, warmup=4),
        batch=dict(sequences=8),
        compute=dict(dtype="float32"),
        checkpoint=dict(every=100),
        eval=dict(every=40),
        log=dict(every=10, tensorboard=False),
    )
    (tmp_path / f"{name}.yaml").write_text(reader.dump(tree | sections))
    return recipe.load(tmp_path / f"{name}.yaml")


@pytest.fixture(scope="module")
def sorted_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose label is the rare word in them."""
    folder = tmp_path_factory.mktemp("sorted")
    draw = np.random.default_rng(4)
    records = []
    for number in range(240):
        words = [*draw.choice(WORDS, draw.integers(2, 8)), ("ox", "eel", "bee")[number % 3]]
        records.append({"text": " ".join(draw.permutation(words)), "label": ("Ox", "Eel", "Bee")[number % 3]})
    return prepared(folder, f"  a: {{path: {lines(folder / 'a.jsonl', records)}}}")


def test_a_decoder_that_tells_labels_is_refused_where_text_is_to_be_continued(tmp_path: Path) -> None:
    """Before its weights are looked at: it has a vocabulary and a cache, and would say something."""
    model = dict(use="llama", layers=1, embed=32, heads=2, kv_heads=2, mlp=32, vocab=280)
    cfg = make_run(tmp_path, "decoder", tmp_path / "none", model=model, classifier=dict(labels=3))
    tokenizer = tokenizer_train.train_tokenizer(["the mill turns"], kind="bpe", vocab=280)
    run = LoadedRun(
        cfg, None, 0, sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1]), tokenizer, None
    )
    for attempt in (
        lambda: generate.generate(run, "the", 3, Sampling()),
        lambda: serve_http.serve(run, host="127.0.0.1", port=0, slots=1, length=8, report=print),
        lambda: gguf.export(run, str(tmp_path / "x.gguf"), "float32"),
    ):
        with pytest.raises(UserError, match=r"objective.use: .*decoder was trained by classify"):
            attempt()
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.slow
def test_an_encoder_that_tells_labels_is_quantised_and_evaluated(tmp_path: Path, sorted_texts: Path) -> None:
    """DeBERTa has no head for tokens then, and its matrices have biases beside them."""
    model = dict(
        use="deberta", layers=2, embed=32, heads=4, mlp=64, position_buckets=8, max_relative_positions=24
    )
    cfg = make_run(tmp_path, "encoder", sorted_texts, model=model, schedule=dict(use="constant", steps=30))
    training_run.run(cfg)
    whole = evaluate.evaluate_run(open_run(recipe.load_run(cfg.run_dir)))
    method = recipe.load_method("vptq", ["bits=4", "vector_length=2", "tune_steps=2", "finetune_steps=2"])
    request = quantize_run.QuantizeRequest(str(tmp_path / "few"), method, 16, "float32", str(sorted_texts))
    quantize_run.quantize(open_run(recipe.load_run(cfg.run_dir)), request, lambda line: None)
    few = evaluate.evaluate_run(open_run(recipe.load_run(tmp_path / "few")))
    assert few["loss"] == pytest.approx(whole["loss"], abs=0.1)
    layers = json.loads((tmp_path / "few/config.json").read_text())["quantization_config"][
        "config_for_layers"
    ]
    assert layers and all(layer["bias"] for layer in layers.values())


@pytest.mark.slow
def test_a_run_starts_from_a_pretrained_one_and_ends_in_transformers(
    tmp_path: Path, sorted_texts: Path
) -> None:
    """Pre-trained on the same texts without their labels; the head is drawn, nobody names a weight."""
    before = make_run(
        tmp_path, "before", sorted_texts, objective=dict(use="masked"), schedule=dict(use="cosine", steps=2)
    )
    assert training_run.run(before) == 0
    cfg = make_run(tmp_path, "after", sorted_texts, init_from=str(tmp_path / "before"))
    assert training_run.run(cfg) == 0
    rows = [json.loads(line) for line in (tmp_path / "after" / "metrics.jsonl").read_text().splitlines()]
    assert any("accuracy" in row for row in rows) and any("evaluate/macro_f1" in row for row in rows)
    run = open_run(recipe.load_run(str(tmp_path / "after")))
    found = evaluate.evaluate_run(run)
    assert found["accuracy"] > 0.9 > 0.5 > found["majority"]
    assert (run.recipe.model.classifier.labels, run.recipe.model.classifier.pooling) == (3, "first")
    to_huggingface.export(run, str(tmp_path / "hf"), "float32")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.config.id2label == {0: "Bee", 1: "Eel", 2: "Ox"}
    special = run.tokenizer.special
    ids = [special.bos, *run.tokenizer.encode("the wheel of an ox grinds"), special.eos]
    assert tokenizer.decode(ids[1:-1]) == "the wheel of an ox grinds"
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    how = dict(segments=jnp.ones((1, len(ids)), int), positions=jnp.arange(len(ids))[None])
    ours = run.params.predict_labels(
        run.recipe.model, jnp.array([ids]), exec_opts=task_of(run.recipe.model).exec_opts, **how
    )[0, 0]
    np.testing.assert_allclose(ours, wanted, atol=2e-5, rtol=0)
    assert theirs.config.id2label[int(wanted.argmax())] == "Ox"
    from_huggingface.import_model(str(tmp_path / "hf"), str(tmp_path / "again"))
    again = recipe.load_run(str(tmp_path / "again"))
    assert (again.objective.use, again.model.classifier.labels) == ("classify", 3)
    assert json.loads((tmp_path / "again" / "labels.json").read_text()) == ["Bee", "Eel", "Ox"]
    source = check_source(str(tmp_path / "hf"), again.model)
    assert set(classification_head.HEAD_WEIGHTS[2:]) <= source.taken  # of the same labels


@pytest.mark.slow
def test_of_a_pair_the_finder_is_fine_tuned_with_its_full_embedding(
    tmp_path: Path, sorted_texts: Path
) -> None:
    """What rtd learns is the difference to the generator's embedding."""
    sizes = dict(
        use="deberta", layers=2, embed=32, heads=4, mlp=48, position_buckets=8, max_relative_positions=64
    )
    before = make_run(
        tmp_path,
        "before",
        sorted_texts,
        model=sizes | dict(generator_layers=1),
        objective=dict(use="rtd"),
        schedule=dict(use="cosine", steps=2),
    )
    assert training_run.run(before) == 0
    pair = open_run(recipe.load_run(str(tmp_path / "before")))
    model = reader.part_class("models", "deberta")(
        **{key: value for key, value in sizes.items() if key != "use"},
        vocab=pair.recipe.model.vocab, classifier=ClassifierKeys(3, "first"),
    )  # fmt: skip
    source = check_source(str(tmp_path / "before"), model)
    family = load_family(model).Model
    everywhere = jax.sharding.NamedSharding(pair.mesh, jax.sharding.PartitionSpec())
    fresh = jax.device_put(module.init(family, model, jax.random.key(0)), everywhere)
    whole, said = load_weights(source, model, fresh, pair.mesh, str(sorted_texts))
    np.testing.assert_array_equal(whole.embedding, pair.params.full_embedding(pair.recipe.model))
    np.testing.assert_array_equal(whole.blocks.w_q, pair.params.blocks.w_q)
    np.testing.assert_array_equal(whole.w_classes, fresh.w_classes)
    assert "w_classes" in said and "initialized" in said


def test_data_and_objective_must_belong_together(tmp_path: Path, sorted_texts: Path) -> None:
    plain = lines(tmp_path / "plain.jsonl", [{"text": f"text {n}"} for n in range(60)])
    (tmp_path / "plain").mkdir()
    data = prepared(tmp_path / "plain", f"  a: {{path: {plain}}}")
    with pytest.raises(UserError, match="has no labels, which objective classify needs"):
        training_run.run(make_run(tmp_path, "one", data))
    answers = [{"prompt": "Q", "chosen": f"a{n}", "rejected": "b"} for n in range(60)]
    (tmp_path / "pairs").mkdir()
    data = prepared(
        tmp_path / "pairs",
        f"  a: {{path: {lines(tmp_path / 'pairs.jsonl', answers)}}}",
        "tokenizer.chat_template=plain",
        "pack.sequence_length=96",
    )
    with pytest.raises(UserError, match="pairs of answers, which objective masked does not read"):
        training_run.run(
            make_run(
                tmp_path,
                "two",
                data,
                objective=dict(use="masked"),
                data=dict(path=str(data), sequence_length=96),
            )
        )
    words = make_run(tmp_path, "three", sorted_texts)
    with pytest.raises(UserError, match="this data has labels for a text"):
        classification_head.with_label_count(
            recipe.load(tmp_path / "three.yaml", ["classifier.pooling=each"]).model, 3, "text"
        )
    with pytest.raises(UserError, match="found 3, and the data has 5"):
        classification_head.with_label_count(
            recipe.load(tmp_path / "three.yaml", ["classifier.labels=3"]).model, 5, "text"
        )
    assert classification_head.with_label_count(words.model, 7, "tokens").classifier.pooling == "each"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("objective.use=masked classifier.labels=3", "expected objective.use to be classify"),
        ("data.isolate_documents=false", "a label belongs to one document"),
        ("loss.soft_cap=30", "labels are predicted without it"),
        ("classifier.labels=-1", "expected 0 or more"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, override: str, why: str) -> None:
    make_run(tmp_path, "one", tmp_path)
    with pytest.raises(UserError, match=why):
        recipe.load(tmp_path / "one.yaml", override.split())
