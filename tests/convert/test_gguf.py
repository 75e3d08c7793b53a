"""Export to GGUF: files are read back by the gguf package, and run by transformers, which has a reader of its
own, and by llama.cpp."""

import dataclasses
import json
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import jax
import jinja2
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
import xllamacpp
from safetensors.numpy import load_file

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.cli.main import main
from headrace.config import reader
from headrace.config.recipe import load_run
from headrace.convert import gguf as convert_gguf
from headrace.convert import to_huggingface
from headrace.data.chat import encode
from headrace.data.chat.template import extract_marked_spans
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.stack import Execution

SIZES: dict[str, Any] = dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=96)
LLAMA3 = dict(rope_scaling="llama3", rope_factor=4.0, rope_original_length=32, rope_theta=100.0)
YARN = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_length=16, rope_theta=1000.0)
GEMMA = SIZES | dict(head_dim=32, window=8, layers=3)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | dict(use="llama", tie_embeddings=False, **LLAMA3),
    "plain": SIZES | dict(use="llama", tie_embeddings=False, rope_theta=500.0),
    "tied": SIZES | dict(use="llama", rope_scaling="ntk", rope_factor=3.0, rope_theta=500.0),
    "linear": SIZES | dict(use="llama", rope_scaling="linear", rope_factor=3.0, rope_theta=500.0),
    "qwen3": SIZES | dict(use="llama", qk_norm=True, head_dim=32, **YARN),
    "olmo2": SIZES | dict(use="olmo2", tie_embeddings=True),
    "gemma2": GEMMA | dict(use="gemma2", query_scale=24, attention_soft_cap=5.0),
    "uncapped": GEMMA | dict(use="gemma2", attention_soft_cap=None),
    "gemma3": GEMMA | dict(use="gemma3", layers=7, query_scale=24, rope_factor=2.0, rope_local_theta=500.0),
}
CAPS = {"gemma2": 4.0, "gemma3": 4.0}
WORDS = (
    "the mill turns, the water falls, the wheel, the stone, It's 1234 o'clock: naïve  façade — 水车\n\n\tend "
)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizer_io.Tokenizer:
    return tokenizer_train.train_tokenizer([WORDS] * 3, kind="bpe", vocab=320)


@pytest.fixture(scope="module")
def make(tmp_path_factory, tokenizer):
    """Run folders as training leaves them, with weights large enough for logits of several units."""
    opened_runs: dict[str, LoadedRun] = {}

    def run(name: str, run_tokenizer: tokenizer_io.Tokenizer = tokenizer) -> LoadedRun:
        if name in opened_runs and run_tokenizer is tokenizer:
            return opened_runs[name]
        folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        cap = {"soft_cap": CAPS[name]} if name in CAPS else {}
        tree = {
            "run_dir": str(folder),
            "model": MODELS[name] | {"vocab": run_tokenizer.vocab_size + 3},
            "data": {"path": "data/none", "sequence_length": 64},
            "loss": {"use": "cross_entropy"} | cap,
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"steps": 10},
            "compute": {"dtype": "float32"},
        }
        (folder / "recipe.yaml").write_text(reader.dump(tree))
        tokenizer_io.save(run_tokenizer, folder)
        cfg = load_run(folder)
        rng = np.random.default_rng(0)
        norm_mean = 0.0 if "gemma" in cfg.model.use else 1.0

        def leaf(path: Any, spec: Any) -> np.ndarray:
            is_norm = module.path_name(path).endswith("_norm")
            return rng.normal(norm_mean if is_norm else 0.0, 0.12, spec.shape).astype(np.float32)

        params = jax.tree_util.tree_map_with_path(
            leaf, module.shapes(load_family(cfg.model).Model, cfg.model)
        )
        checkpoints = Checkpoints(str(folder))
        checkpoints.save_params(params, {"step": 0, "recipe": reader.to_dict(cfg), "tokenizer_sha256": None})
        checkpoints.close()
        opened = open_run(cfg)
        opened = dataclasses.replace(opened, params=jax.device_get(opened.params))
        if run_tokenizer is tokenizer:
            opened_runs[name] = opened
        return opened

    return run


def logits_of(run: LoadedRun, ids: list[int]) -> np.ndarray:
    cfg, exec_opts = run.recipe.model, Execution(run.recipe.attention, "float32")
    forward = jax.jit(
        lambda params, x: project(params.unembed, params(cfg, x, exec_opts=exec_opts), "bsd,vd->bsv")[0]
    )
    logits = np.asarray(forward(run.params, np.asarray([ids], np.int32)))
    cap = run.recipe.loss.soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def keys_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
def test_tensors_equal_those_for_transformers_bit_for_bit(name, make, tmp_path):
    run = make(name)
    path = convert_gguf.export(run, str(tmp_path / "model.gguf"), "float32")
    to_huggingface.export(run, str(tmp_path / "folder"), "float32")
    hf_tensors = load_file(tmp_path / "folder" / "model.safetensors")
    cfg, reader = run.recipe.model, gguf.GGUFReader(path)
    kind = dict(llama="llama", qwen3="qwen3", gemma2="gemma2", olmo2="olmo2")[name]
    arch = next(arch for arch, arch_name in gguf.MODEL_ARCH_NAMES.items() if arch_name == kind)
    names = gguf.get_tensor_name_map(arch, cfg.layers)
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    for hf_name, expected in hf_tensors.items():
        tensor = tensors.pop(names.get_name(hf_name, try_suffixes=(".weight",)))
        if name == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = cfg.heads if "q_proj" in hf_name else cfg.kv_heads
            # Row 2i of a head is row i of the first half there, row 2i + 1 row i of the second.
            by_head = tensor.reshape(heads, cfg.head_dim, -1)
            tensor = np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(expected.shape)
        if name == "gemma2" and hf_name.endswith("norm.weight"):
            expected = expected + np.float32(1)
        if name == "gemma2" and "q_proj" in hf_name:
            expected = expected * np.float32((32 / 24) ** 0.5)
        np.testing.assert_array_equal(tensor, expected, err_msg=hf_name)
    extra = {"llama": {"rope_freqs.weight"}, "olmo2": {"output.weight"}}
    assert set(tensors) == extra.get(name, set())


def test_metadata_has_sizes_positions_caps_and_windows(make, tmp_path):
    read = lambda name: keys_of(
        gguf.GGUFReader(convert_gguf.export(make(name), str(tmp_path / f"{name}.gguf"), "float32"))
    )
    llama = read("llama")
    assert llama["general.architecture"] == "llama" and llama["general.name"] == "llama"
    expected = dict(block_count=2, embedding_length=64, feed_forward_length=96, context_length=128)
    assert {key: llama[f"llama.{key}"] for key in expected} == expected
    assert llama["llama.attention.head_count"] == 4 and llama["llama.attention.head_count_kv"] == 2
    assert llama["llama.attention.key_length"] == 16 and llama["llama.rope.freq_base"] == 100.0
    assert llama["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    qwen3 = read("qwen3")
    assert qwen3["qwen3.rope.scaling.type"] == "yarn" and qwen3["qwen3.rope.scaling.factor"] == 4.0
    assert qwen3["qwen3.rope.scaling.original_context_length"] == 16
    gemma2 = read("gemma2")
    assert gemma2["gemma2.attn_logit_softcapping"] == 5.0 and gemma2["gemma2.final_logit_softcapping"] == 4.0
    assert gemma2["gemma2.attention.sliding_window"] == 8
    assert gemma2["gemma2.attention.sliding_window_pattern"] == 2
    gemma3 = read("gemma3")
    assert gemma3["gemma3.rope.freq_base_swa"] == 500.0 and gemma3["gemma3.rope.freq_base"] == 1e6
    assert gemma3["gemma3.rope.scaling.type"] == "linear" and gemma3["gemma3.rope.scaling.factor"] == 2.0
    assert gemma3["gemma3.final_logit_softcapping"] == 4.0


def test_llama3_factors_are_those_of_transformers(make, tmp_path):
    path = convert_gguf.export(make("llama"), str(tmp_path / "model.gguf"), "float32")
    factors = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    to_huggingface.export(make("llama"), str(tmp_path / "folder"), "float32")
    settings = transformers.AutoConfig.from_pretrained(tmp_path / "folder")
    stretched, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](settings, "cpu")
    plain = 100.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors, stretched.numpy(), rtol=1e-6)


def test_the_tokenizer_and_its_template_are_in_the_file(make, tokenizer, tmp_path):
    template = encode.PLAIN_TEMPLATE.read_text()
    with_template = tokenizer_io.Tokenizer(tokenizer.inner, tokenizer.special, chat_template=template)
    keys = keys_of(
        gguf.GGUFReader(convert_gguf.export(make("tied", with_template), str(tmp_path / "m.gguf"), "float32"))
    )
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "gpt-2"
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == tokenizer.vocab_size + 3 == len(kinds)
    assert [tokenizer.inner.id_to_token(id) for id in range(tokenizer.vocab_size)] == tokens[
        : tokenizer.vocab_size
    ]
    assert kinds[-3:] == [5, 5, 5] and kinds[tokenizer.special.bos] == 3 and kinds[100] == 1
    assert keys["tokenizer.ggml.bos_token_id"] == tokenizer.special.bos
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.special.eos
    assert keys["tokenizer.ggml.padding_token_id"] == tokenizer.special.pad
    assert keys["tokenizer.ggml.add_bos_token"] is True
    messages = [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant", "user")]
    variables = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_generation_prompt": True}
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        keys["tokenizer.chat_template"]
    )
    expected = encode.make_encoder(with_template).template.render_text(messages, None, True)
    assert plain.render(messages=messages, **variables) == extract_marked_spans(expected).text


@pytest.mark.parametrize(
    ("dtype", "kinds", "most"),
    [
        ("bfloat16", {"BF16", "F32"}, 2**-8),
        ("float16", {"F16", "F32"}, 2**-11),
        ("q8_0", {"Q8_0", "F32"}, 1 / 220),
        ("q4_0", {"Q4_0", "Q8_0", "F32"}, 1 / 8),
    ],
)
def test_quantized_weights_are_close(dtype, kinds, most, make, tmp_path):
    run = make("tied")
    reader = gguf.GGUFReader(convert_gguf.export(run, str(tmp_path / "model.gguf"), dtype))
    float32 = gguf.GGUFReader(convert_gguf.export(run, str(tmp_path / "float32.gguf"), "float32"))
    assert {tensor.tensor_type.name for tensor in reader.tensors} == kinds
    for rounded, exact in zip(reader.tensors, float32.tensors, strict=True):
        assert rounded.name == exact.name
        values = gguf.quants.dequantize(rounded.data, rounded.tensor_type)
        assert np.abs(values - exact.data).max() <= most * np.abs(exact.data).max()


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_transformers_reads_the_file_and_computes_the_same(name, make, tmp_path):
    """It ignores the soft caps, scaled positions or head sizes of the other models."""
    run = make(name)
    convert_gguf.export(run, str(tmp_path / "model.gguf"), "float32")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ids = [1, *range(20, 50)]
    with torch.no_grad():
        logits = hf_model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(run, ids), logits, atol=2e-4)


def test_models_and_tokenizers_that_llama_cpp_lacks_are_refused(make, tokenizer, tmp_path, capsys):
    target = str(tmp_path / "model.gguf")
    run = make("tied")
    change = lambda run, **keys: dataclasses.replace(
        run, recipe=dataclasses.replace(run.recipe, model=dataclasses.replace(run.recipe.model, **keys))
    )
    with pytest.raises(UserError, match=r"model.activation: found geglu, .* has only swiglu"):
        convert_gguf.export(change(run, activation="geglu"), target, "float32")
    with pytest.raises(UserError, match=r"model.rope_scaling: found llama3"):
        convert_gguf.export(change(make("qwen3"), rope_scaling="llama3"), target, "float32")
    unigram = tokenizer_train.train_tokenizer([WORDS] * 3, kind="unigram", vocab=300)
    with pytest.raises(UserError, match="tokenizer: found Unigram"):
        convert_gguf.export(make("tied", unigram), target, "float32")
    other = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(UserError, match="no name for"):
        convert_gguf.export(make("tied", tokenizer_io.Tokenizer(other, tokenizer.special)), target, "float32")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.gguf").write_bytes(b"notes")
    assert main(["export", run.recipe.run_dir, target]) == 2
    assert main(["export", run.recipe.run_dir, str(tmp_path / "folder"), "--dtype", "q8_0"]) == 2
    assert main(["export", run.recipe.run_dir, target, "--packed"]) == 2
    errors = capsys.readouterr().err
    assert "already exists" in errors and "only .gguf files" in errors and "--packed" in errors
    assert (tmp_path / "model.gguf").read_bytes() == b"notes"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> tokenizer_io.Tokenizer:
    """A tokenizer of sentencepiece, as in Llama 2 and Gemma."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text(f"{WORDS}\n" * 3)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return tokenizer_io.load(folder / "tokenizer.model")


def test_pieces_of_sentencepiece_are_scored_in_the_order_of_merges(make, pieces, tmp_path):
    keys = keys_of(
        gguf.GGUFReader(convert_gguf.export(make("tied", pieces), str(tmp_path / "m.gguf"), "float32"))
    )
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is True
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    kinds = keys["tokenizer.ggml.token_type"]
    assert kinds[tokens.index("<0x41>")] == 6 and kinds[tokens.index("<unk>")] == 2
    assert kinds[tokens.index("<s>")] == 3
    assert scores[tokens.index("▁t")] > scores[tokens.index("▁the")]
    assert scores[tokens.index("▁t")] < 0


class LlamaCpp:
    """A server of llama.cpp, over HTTP."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 128, 1, False
        self.server = xllamacpp.Server(params)

    def request(self, endpoint: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.server.listening_address}/{endpoint}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def tokens(self, text: str) -> list[int]:
        return self.request("tokenize", content=text, add_special=False, parse_special=False)["tokens"]

    def next_log_probs(self, ids: list[int], vocab: int, letter: int) -> np.ndarray:
        """The log-probabilities of the next token.

        A bias forces the token `letter`, since the server returns nothing for half a character. The
        probabilities are those without the bias."""
        options = dict(n_predict=1, n_probs=vocab, temperature=0.0, logit_bias=[[letter, 1000.0]])
        response = self.request("completion", prompt=ids, cache_prompt=False, **options)
        (completion,) = response["completion_probabilities"]
        log_probs = {entry["id"]: entry["logprob"] for entry in completion["top_logprobs"]}
        return np.array([log_probs.get(token, -np.inf) for token in range(vocab)])


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_and_tokenizes_the_same(name, make, tokenizer, tmp_path):
    run = make(name)
    llama_cpp = LlamaCpp(convert_gguf.export(run, str(tmp_path / "model.gguf"), "float32"))
    for text in (WORDS, "a", "  two  spaces\n\n\nthree", "don't WON'T 12345 <|eos|> é"):
        assert llama_cpp.tokens(text) == tokenizer.encode(text)
    ids = [tokenizer.special.bos, *tokenizer.encode("the mill turns, the stone falls, It's 12 o'clock")]
    logits = logits_of(run, ids)
    assert np.ptp(logits) > 2  # small logits would agree whatever the model
    for count in (3, len(ids)):
        expected = logits[count - 1] - np.logaddexp.reduce(logits[count - 1])
        log_probs = llama_cpp.next_log_probs(ids[:count], run.recipe.model.vocab, tokenizer.encode("a")[0])
        np.testing.assert_allclose(log_probs, expected, atol=5e-3)


def test_llama_cpp_splits_texts_into_the_same_pieces(make, pieces, tmp_path):
    llama_cpp = LlamaCpp(convert_gguf.export(make("tied", pieces), str(tmp_path / "m.gguf"), "float32"))
    for text in (WORDS, "a", "  two  spaces\n\n\nthree", "don't WON'T 12345 é"):
        assert llama_cpp.tokens(text) == pieces.encode(text)
