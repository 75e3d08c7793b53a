"""Text generation: the cache against the full forward pass and transformers, and the sampling of tokens."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.cli.main import main
from headrace.config import recipe
from headrace.config.recipe import load_run
from headrace.convert import from_huggingface
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import Sampling, sample_token
from headrace.models import llama
from headrace.nn import module, sharding
from headrace.nn.linear import project
from headrace.nn.stack import Execution

GREEDY = Sampling(temperature=0)
PROMPTS = {1: [7], 7: [1, 40, 9, 77, 40, 12, 200]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of transformers with random weights, and a tokenizer most of whose tokens are single bytes."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizer_train.train_tokenizer(
        ["the mill turns, the water falls"] * 3, kind="bpe", vocab=270
    )
    settings = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=tokenizer.special.bos,
        eos_token_id=None,  # so that its generate does not stop before ours
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.12) if weight.ndim > 1 else weight.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    tokenizer_io.save(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> LoadedRun:
    """The same model as a run on one device: programs for eight take three times as long to compile."""
    target = tmp_path_factory.mktemp("runs") / "run"
    from_huggingface.import_model(str(folder), str(target))
    run = open_run(load_run(target, ["compute.dtype=float32"]))
    devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    return dataclasses.replace(run, params=jax.device_get(run.params), mesh=devices)


@pytest.mark.parametrize("length", PROMPTS)
def test_greedy_decoding_takes_the_likeliest_token_of_the_full_forward_pass(length, run):
    cfg, exec_opts = run.recipe.model, Execution(run.recipe.attention, "float32")

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return project(params.unembed, params(cfg, tokens, exec_opts=exec_opts), "bsd,vd->bsv")[0]

    ids = list(PROMPTS[length])
    for token in generate.sample_tokens(run, PROMPTS[length], 12, GREEDY):
        # A decoder cannot see what follows the last token; with one length there is one compilation.
        logits = forward(run.params, jnp.asarray([ids + [0] * (19 - len(ids))]))
        best = np.sort(logits[len(ids) - 1])
        assert best[-1] - best[-2] > 1e-3  # no tie that rounding would decide
        assert token == int(logits[len(ids) - 1].argmax())
        ids.append(token)
    assert len(ids) == length + 12
    assert len(set(ids[length:])) > 3


def test_greedy_decoding_equals_transformers_on_any_number_of_devices(run, folder):
    eight = open_run(load_run(run.recipe.run_dir, ["compute.dtype=float32"]))
    assert eight.params.embedding.sharding.num_devices == 8
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for prompt in PROMPTS.values():
        ids = torch.tensor([prompt])
        output = hf_model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        expected = output[0, len(prompt) :].tolist()
        assert list(generate.sample_tokens(run, prompt, 12, GREEDY)) == expected
        assert list(generate.sample_tokens(eight, prompt, 12, GREEDY)) == expected


def test_the_seed_determines_the_sampled_text(run):
    def sample(**settings: Any) -> list[int]:
        return list(generate.sample_tokens(run, [7], 12, Sampling(**settings)))

    assert sample(temperature=1.5, seed=1) == sample(temperature=1.5, seed=1)
    assert sample(temperature=1.5, seed=1) != sample(temperature=1.5, seed=2)
    assert sample(temperature=0, seed=1) == sample(temperature=0, seed=2)
    assert sample(temperature=1.5, top_k=1) == sample(temperature=0)


def test_two_texts_can_be_sampled_in_turn(run):
    expected = [list(generate.sample_tokens(run, prompt, 5, GREEDY)) for prompt in PROMPTS.values()]
    pairs = []
    for pair in zip(
        *(generate.sample_tokens(run, prompt, 5, GREEDY) for prompt in PROMPTS.values()), strict=True
    ):
        assert jax.sharding.get_abstract_mesh().empty  # the mesh is set within the steps only
        pairs.append(pair)
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == expected


@pytest.fixture
def reciter(tmp_path) -> Callable[[str], LoadedRun]:
    """A model that recites one text: in its head, each token has the embedding of the one before it."""

    def make(text: str) -> LoadedRun:
        tokenizer = tokenizer_train.train_tokenizer(
            ["the mill turns, the water falls"] * 3, kind="bpe", vocab=270
        )
        special = tokenizer.special
        (tmp_path / "recipe.yaml").write_text(
            f"run_dir: {tmp_path}\n"
            "model: {use: llama, layers: 1, embed: 272, heads: 2, kv_heads: 2, mlp: 8, "
            f"vocab: {tokenizer.vocab_size}, tie_embeddings: false}}\n"
            "data: {path: x, sequence_length: 8}\n"
            "optimizer: {learning_rate: 1e-3}\nschedule: {steps: 1}\ncompute: {dtype: float32}\n"
        )
        cfg = recipe.load(tmp_path / "recipe.yaml")
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), module.shapes(llama.Model, cfg.model))
        embedding = jnp.eye(tokenizer.vocab_size, 272)
        ids = [special.bos, *tokenizer.encode(text), special.eos]
        assert len(set(ids)) == len(ids)
        head = jnp.zeros_like(embedding).at[jnp.array(ids[1:])].set(embedding[jnp.array(ids[:-1])])
        head = head.at[ids[1], special.eos].set(1.0)  # after its end, the text begins again
        params = dataclasses.replace(zeros, embedding=embedding, final_norm=jnp.ones(272), head=head)
        devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
        return LoadedRun(cfg, params, 0, devices, tokenizer, None)

    return make


def test_a_character_of_several_tokens_is_one_piece(reciter):
    run = reciter("x\U0001f642é yz")
    assert len(run.tokenizer.encode("\U0001f642é")) == 6
    pieces = list(generate.generate(run, "", 50, GREEDY))
    assert pieces == ["x", "\U0001f642", "é", " ", "y", "z"]
    # Cut off within a character, which is then omitted.
    assert list(generate.generate(run, "", 3, GREEDY)) == ["x"]


def test_a_text_ends_where_the_model_ends_it_and_does_not_repeat_the_prompt(reciter):
    run = reciter("the wolf")
    assert "".join(generate.generate(run, "the", 50, GREEDY)) == " wolf"


def test_a_run_or_prompt_that_cannot_be_continued_is_refused(run, tmp_path):
    def refused(message: str, run: LoadedRun = run, prompt: str = "the", tokens: int = 3) -> None:
        with pytest.raises(UserError, match=message):
            generate.generate(run, prompt, tokens, GREEDY)  # at once, not when the first piece is read

    parts = dict(params=None, step=0, mesh=run.mesh, tokenizer_sha256=None)
    encoder = tmp_path / "recipe.yaml"
    encoder.write_text(
        "run_dir: x\nmodel: {use: eurobert, layers: 1, embed: 32, heads: 2, kv_heads: 2, mlp: 32}\n"
        "data: {path: x, sequence_length: 8}\nobjective: {use: masked}\n"
        "optimizer: {learning_rate: 1e-3}\nschedule: {steps: 1}\n"
    )
    refused(
        "model.use: eurobert reads text in both directions and cannot continue it",
        LoadedRun(recipe=recipe.load(encoder), tokenizer=run.tokenizer, **parts),
    )
    refused("no tokenizer.json in the run folder", LoadedRun(recipe=run.recipe, tokenizer=None, **parts))
    refused("tokens: expected 1 or more", tokens=0)
    refused("prompt: found bytes that are not UTF-8", prompt=b"caf\xe9".decode(errors="surrogateescape"))
    special = tokenizer_io.SpecialTokenIds(bos=None, eos=2, pad=0, mask=3)
    without_bos = tokenizer_io.Tokenizer(run.tokenizer.inner, special)
    refused(
        "prompt: expected some text",
        LoadedRun(recipe=run.recipe, tokenizer=without_bos, **parts),
        prompt="",
    )
    with pytest.raises(UserError, match="exit_share: expected nothing: the run has no recurrent depth"):
        generate.generate(run, "the", 3, GREEDY, exit_share=0.1)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (
            "temperature",
            (-0.1, float("nan"), float("inf"), 10**400),
            "temperature: expected .* 0 to 100",
        ),
        ("top_k", (-1, 2**31), "top_k: expected .* from 0 to 2147483647"),
        ("top_p", (0.0, 1.1, float("nan")), "top_p: expected .* above 0 and at most 1"),
    ],
)
def test_invalid_sampling_is_refused(name, values, expected):
    for value in values:
        with pytest.raises(UserError, match=expected):
            Sampling(**{name: value})


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_an_invalid_seed_is_refused(seed):
    with pytest.raises(UserError, match="seed: expected a number from 0 to 4294967295"):
        Sampling(seed=seed)


def test_the_command_prints_an_error_without_the_prompt(run, capsys):
    assert main(["generate", run.recipe.run_dir, "--prompt", "the mill", "--tokens", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "headrace: --tokens: expected 1 or more\n")


PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])  # of tokens 0 to 4


def sample_shares(sampling: Sampling, draws: int = 20_000) -> np.ndarray:
    """The share of each token in many draws."""
    keys = jax.random.split(jax.random.key(5), draws)
    logits = jnp.log(jnp.asarray(PROBABILITIES)) + 3.0  # a constant does not change probabilities
    tokens = jax.jit(jax.vmap(lambda key: sample_token(logits, key, sampling)))(keys)
    return np.bincount(tokens, minlength=5) / draws


@pytest.mark.parametrize(
    ("settings", "candidates"),
    [
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 50}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 0, "top_p": 0.6}, [1, 3]),
        ({"top_k": 0, "top_p": 0.7}, [1, 3, 4]),
        ({"top_k": 0, "top_p": 0.01}, [1]),
        # The first two of three have 0.65 / 0.85 = 0.76 of their probability.
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3, 4]),
    ],
    ids=str,
)
def test_candidates_are_sampled_by_their_probabilities(settings, candidates):
    expected = np.where(np.isin(np.arange(5), candidates), PROBABILITIES, 0)
    expected /= expected.sum()
    shares = sample_shares(Sampling(temperature=1.0, **settings))
    assert (shares[expected == 0] == 0).all()
    assert np.abs(shares - expected).max() < 0.015  # four standard deviations


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 2.0):
        scaled = PROBABILITIES ** (1 / temperature)
        shares = sample_shares(Sampling(temperature=temperature, top_k=0))
        assert np.abs(shares - scaled / scaled.sum()).max() < 0.015
    assert sample_shares(Sampling(temperature=0), draws=50).tolist() == [0, 1, 0, 0, 0]


def test_top_k_keeps_k_of_equally_likely_tokens():
    logits = jnp.zeros(6)
    keys = jax.random.split(jax.random.key(0), 200)
    tokens = jax.vmap(lambda key: sample_token(logits, key, Sampling(top_k=2)))(keys)
    assert len(set(tokens.tolist())) == 2
