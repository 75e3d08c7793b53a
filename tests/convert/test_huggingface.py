"""Export to Hugging Face folders and import: transformers reads the exports and writes the imports."""

import functools
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from headrace.checkpoint import open_hf
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.cli.main import main
from headrace.config import reader, recipe
from headrace.config.recipe import load_run
from headrace.convert import from_huggingface, to_huggingface
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.model_wrappers import load_family
from headrace.nn import module, sharding
from headrace.nn.linear import project
from headrace.nn.stack import Execution

# Compiling is most of the time of these tests, and most of that is making small programs fast.

SIZES: dict[str, Any] = dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=96)
LLAMA3 = dict(rope_scaling="llama3", rope_factor=4.0, rope_original_length=32, rope_theta=100.0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(use="llama", tie_embeddings=False, **LLAMA3),
    "tied": dict(use="llama", activation="geglu", rope_scaling="ntk", rope_factor=3.0, rope_theta=500.0),
    "qwen3": dict(
        use="llama",
        qk_norm=True,
        head_dim=32,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_length=16,
        rope_theta=1000.0,
    ),
    "eurobert": dict(use="eurobert"),
}


@pytest.fixture(scope="module")
def tokenizer() -> tokenizer_io.Tokenizer:
    return tokenizer_train.train_tokenizer(
        ["the mill turns, the water falls, the wheel, the stone"] * 3, kind="bpe", vocab=280
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> Callable[[str], LoadedRun]:
    """Run folders as training leaves them, with weights large enough for logits of several units."""

    def make(name: str) -> LoadedRun:
        section = SIZES | MODELS[name] | {"vocab": tokenizer.vocab_size}
        folder = tmp_path_factory.mktemp("run")
        tree = {
            "run_dir": str(folder),
            "model": section,
            "data": {"path": "data/none", "sequence_length": 64},
            "objective": {"use": "masked" if name == "eurobert" else "causal"},
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"steps": 10},
            "compute": {"dtype": "float32"},
        }
        (folder / "recipe.yaml").write_text(reader.dump(tree))
        tokenizer_io.save(tokenizer, folder)
        family = open_hf.find_family({"model_type": "eurobert" if name == "eurobert" else "llama"})
        shapes = module.shapes(
            family.Model, family.Config(**{k: v for k, v in section.items() if k != "use"})
        )
        rng = np.random.default_rng(0)
        checkpoints = Checkpoints(str(folder))

        def leaf(path: Any, spec: Any) -> np.ndarray:
            is_norm = module.path_name(path).endswith("_norm")
            return rng.normal(*((1.0, 0.2) if is_norm else (0.0, 0.12)), spec.shape).astype(np.float32)

        checkpoints.save_params(jax.tree_util.tree_map_with_path(leaf, shapes), {})
        checkpoints.close()
        return open_run(load_run(folder))

    return functools.cache(make)


def our_logits(run: LoadedRun, tokens: np.ndarray) -> np.ndarray:
    params = jax.tree.map(jnp.asarray, jax.device_get(run.params))
    exec_opts = Execution(run.recipe.attention, "float32")
    hidden = jax.jit(lambda params, tokens: params(run.recipe.model, tokens, exec_opts=exec_opts))(
        params, tokens
    )
    return np.asarray(project(params.unembed, hidden, "bsd,vd->bsv"))


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def load(folder: Path) -> Any:
    """Load a folder by its AutoModel class, as a user would. All weights of model and folder must match."""
    masked = "MaskedLM" in json.loads((folder / "config.json").read_text())["architectures"][0]
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def some_tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(1).integers(4, vocab, (2, 20)).astype(np.int32)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_export_and_computes_the_same(name, runs, tokenizer, tmp_path):
    run, target = runs(name), tmp_path / "out"
    files = to_huggingface.export(run, str(target), "float32")
    assert [path.name for path in files] == [
        "README.md",
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    hf_model = load(target)
    classes = {"qwen3": "Qwen3ForCausalLM", "eurobert": "EuroBertForMaskedLM"}
    assert type(hf_model).__name__ == classes.get(name, "LlamaForCausalLM")
    assert hf_model.dtype == torch.float32
    special = tokenizer.special
    assert hf_model.config.bos_token_id == special.bos
    assert hf_model.config.eos_token_id == special.eos
    assert hf_model.config.pad_token_id == special.pad
    tokens = some_tokens(tokenizer.vocab_size)
    expected = our_logits(run, tokens)
    assert np.abs(expected).max() > 3  # small logits would agree whatever the model
    assert np.abs(hf_logits(hf_model, tokens) - expected).max() <= 2e-5

    loaded = transformers.AutoTokenizer.from_pretrained(target)
    text = "the wheel falls, écluse"
    assert loaded(text)["input_ids"] == [special.bos, *tokenizer.encode(text)]
    assert loaded.decode(tokenizer.encode(text)) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.mask_token_id) == (
        special.bos,
        special.eos,
        special.mask,
    )


def test_an_export_in_bfloat16_holds_the_rounded_weights(runs, tmp_path):
    run, target = runs("llama"), tmp_path / "out"
    to_huggingface.export(run, str(target), "bfloat16")
    hf_model = load(target)
    assert hf_model.dtype == torch.bfloat16
    expected = np.asarray(jax.device_get(run.params.blocks.w_gate))[1].T.astype(ml_dtypes.bfloat16)
    exported = hf_model.model.layers[1].mlp.gate_proj.weight.detach().float().numpy()
    assert (exported == expected.astype(np.float32)).all()


def test_a_large_export_is_split_over_files(runs, tmp_path, monkeypatch):
    run, target = runs("qwen3"), tmp_path / "out"
    monkeypatch.setattr(to_huggingface, "SHARD_BYTES", 100_000)
    to_huggingface.export(run, str(target), "float32")
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = {path.name: path.stat().st_size for path in target.glob("*.safetensors")}
    assert max(sizes.values()) < 110_000  # a header more; no tensor here is larger than a file
    tokens = some_tokens(run.recipe.model.vocab)
    assert np.abs(hf_logits(load(target), tokens) - our_logits(run, tokens)).max() <= 2e-5
    # And back: an import reads all of the files.
    from_huggingface.import_model(str(target), str(tmp_path / "back"))
    assert_same_weights(run.params, open_run(load_run(tmp_path / "back")).params)


def test_rope_settings_agree_in_both_spellings(runs, tmp_path):
    for name in ("llama", "qwen3", "eurobert"):
        to_huggingface.export(runs(name), str(tmp_path / name), "float32")
        settings = json.loads((tmp_path / name / "config.json").read_text())
        new, old = settings.pop("rope_parameters"), settings.pop("rope_scaling") or {}
        assert settings["rope_theta"] == new["rope_theta"]
        assert {"rope_type": "default"} | old == {key: new[key] for key in new if key != "rope_theta"}


def test_an_export_without_a_tokenizer_names_no_special_tokens(runs, tmp_path):
    run = runs("eurobert")
    bare = LoadedRun(run.recipe, run.params, run.step, run.mesh, tokenizer=None, tokenizer_sha256=None)
    to_huggingface.export(bare, str(tmp_path / "out"), "float32")
    hf_model = load(tmp_path / "out")
    assert (
        hf_model.config.bos_token_id is hf_model.config.eos_token_id is hf_model.config.pad_token_id is None
    )
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("use", ["modernbert", "modernbert_decoder"])
def test_special_tokens_are_within_the_vocabulary(use, tokenizer, tmp_path):
    """The default ids of transformers' special tokens are above 50,000."""
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": dict(use=use, layers=2, embed=32, heads=2, mlp=32, window=8, vocab=tokenizer.vocab_size),
        "data": {"path": "data/none", "sequence_length": 64},
        "objective": {"use": "masked" if use == "modernbert" else "causal"},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 10},
    }
    (tmp_path / "recipe.yaml").write_text(reader.dump(tree))
    cfg = recipe.load(tmp_path / "recipe.yaml")
    shapes = module.shapes(load_family(cfg.model).Model, cfg.model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    run = LoadedRun(cfg, params, 0, devices, tokenizer, None)
    to_huggingface.export(run, str(tmp_path / "out"), "float32")
    hf_model = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    ids = {name: id for name, id in hf_model.to_dict().items() if name.endswith("_token_id")}
    assert all(id < tokenizer.vocab_size for id in ids.values())
    assert (ids["cls_token_id"], ids["sep_token_id"]) == (tokenizer.special.bos, tokenizer.special.eos)


def test_a_run_folder_that_was_moved_is_exported_with_its_tokenizer(runs, tokenizer, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(runs("eurobert").recipe.run_dir, moved)
    recipe_file = moved / "recipe.yaml"
    for number, place in enumerate([tmp_path / "gone", tmp_path]):  # nothing there, or another tokenizer
        tokenizer_io.save(tokenizer_train.train_tokenizer(["other words"], kind="bpe", vocab=262), tmp_path)
        text = recipe_file.read_text().splitlines()
        recipe_file.write_text("\n".join([f"run_dir: {place}", *text[1:]]))
        to_huggingface.export(open_run(load_run(moved)), str(tmp_path / f"out{number}"), "float32")
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / f"out{number}")
        assert loaded("the wheel")["input_ids"][1:] == tokenizer.encode("the wheel")
        assert loaded.mask_token_id == tokenizer.special.mask


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_exported_files_have_the_usual_permissions(mask, runs, tmp_path):
    before = os.umask(mask)
    try:
        files = to_huggingface.export(runs("eurobert"), str(tmp_path / "out"), "float32")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


def test_an_export_overwrites_nothing(runs, tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(UserError, match="already exists; name a new folder"):
        to_huggingface.export(runs("llama"), str(tmp_path), "float32")
    with pytest.raises(UserError, match="already exists"):
        to_huggingface.export(runs("llama"), str(tmp_path / "notes.txt"), "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_models_that_transformers_cannot_compute_are_not_exported(runs, tmp_path):
    run = runs("llama")
    capped = open_run(load_run(run.recipe.run_dir, ["loss.soft_cap=30.0"]))
    with pytest.raises(UserError, match=r"loss.soft_cap: found 30.0, which transformers does not support"):
        to_huggingface.export(capped, str(tmp_path / "out"), "float32")
    odd = open_hf.find_family({"model_type": "llama"})
    cfg = odd.Config(layers=1, embed=64, heads=6, kv_heads=2, mlp=96, vocab=300, head_dim=16)
    with pytest.raises(UserError, match=r"model.heads: found .* transformers loads no other Llama"):
        odd.hf_naming.to_config(cfg, 64)
    assert not (tmp_path / "out").exists()


LLAMA = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save_llama(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Save a random Llama of transformers. Returns it as it is read back in float32."""
    saving = {"max_shard_size": settings.pop("max_shard_size", "1GB")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.12) if weight.ndim > 1 else weight.normal_(1.0, 0.2)
    model.to(dtype).save_pretrained(folder, **saving)
    # Read again: `to` has rounded the rotary frequencies as well.
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_llama(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    settings = json.loads((folder / "config.json").read_text())
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings))


def copy(saved: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((saved / name).read_bytes())
    return folder


def assert_same_weights(weights: Any, other_weights: Any) -> None:
    weights, other_weights = dict(module.named_leaves(weights)), dict(module.named_leaves(other_weights))
    assert weights.keys() == other_weights.keys()
    for path, weight in weights.items():
        assert (np.asarray(weight) == np.asarray(other_weights[path])).all(), path


def as_in_transformers_4(settings: dict[str, Any]) -> None:
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope.pop("rope_theta")
    settings["rope_scaling"] = rope


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, None),
        ({"max_shard_size": "40KB"}, None),
        ({"dtype": torch.bfloat16}, None),
        ({"tie_word_embeddings": True, "rope_parameters": SCALED}, as_in_transformers_4),
    ],
    ids=["one file", "in shards", "bfloat16", "tied, transformers 4"],
)
def test_an_imported_model_computes_the_same(settings, change, tmp_path):
    source, target = tmp_path / "source", tmp_path / "run"
    hf_model = save_llama(source, **settings)
    if change:
        rewrite(source, change)
    assert len(list(source.glob("*.safetensors"))) == (12 if "max_shard_size" in settings else 1)
    cfg = from_huggingface.import_model(str(source), str(target))
    assert (cfg.objective.use, cfg.data.sequence_length, cfg.run_dir) == ("causal", 128, str(target))
    run = open_run(load_run(target))
    assert (run.step, run.recipe, run.tokenizer) == (0, cfg, None)
    tokens = some_tokens(96)
    expected = hf_logits(hf_model, tokens)
    assert np.abs(expected).max() > 3
    assert np.abs(our_logits(run, tokens) - expected).max() <= 2e-5


def test_import_export_import_loses_nothing(tmp_path, tokenizer):
    source = tmp_path / "source"
    save_llama(source, vocab_size=tokenizer.vocab_size)
    tokenizer_io.save(tokenizer, source)
    (tmp_path / "first").mkdir()  # an empty folder may exist
    from_huggingface.import_model(str(source), str(tmp_path / "first"))
    first = open_run(load_run(tmp_path / "first"))
    to_huggingface.export(first, str(tmp_path / "out"), "float32")
    from_huggingface.import_model(str(tmp_path / "out"), str(tmp_path / "second"))
    second = open_run(load_run(tmp_path / "second"))
    assert_same_weights(first.params, second.params)
    assert first.recipe.model == second.recipe.model
    assert first.tokenizer_sha256 == second.tokenizer_sha256 == tokenizer_io.file_sha256(source)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_an_encoder_is_imported_with_its_objective(runs, tmp_path):
    to_huggingface.export(runs("eurobert"), str(tmp_path / "out"), "float32")
    cfg = from_huggingface.import_model(str(tmp_path / "out"), str(tmp_path / "run"))
    assert (cfg.model, cfg.objective.use) == (runs("eurobert").recipe.model, "masked")
    assert_same_weights(runs("eurobert").params, open_run(load_run(tmp_path / "run")).params)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": SCALED | values}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, 'model_type: found "gpt2", expected one of .*eurobert, .*llama, .*qwen3'),
        ({"model_type": None}, "model_type: found null"),
        ({"attention_bias": True}, "attention_bias: found true, but weights with biases cannot be imported"),
        ({"mlp_bias": True}, "mlp_bias: found true"),
        (
            {"hidden_act": "gelu"},
            'hidden_act: found "gelu", expected one of silu, gelu_pytorch_tanh, relu, relu2',
        ),
        ({"hidden_size": None}, "hidden_size: found nothing"),
        ({"num_hidden_layers": "x"}, 'num_hidden_layers: found "x", expected a whole number'),
        ({"num_hidden_layers": [2]}, r"num_hidden_layers: found \[2\], expected a whole number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: found 2.0, expected a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers: found true, expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: found 0, expected a whole number of 1 or more"),
        ({"num_key_value_heads": {}}, "num_key_value_heads: found {}, expected a whole number"),
        ({"head_dim": "16"}, 'head_dim: found "16", expected a whole number'),
        ({"max_position_embeddings": "x"}, 'max_position_embeddings: found "x", expected a whole number'),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps: found "small", expected a number'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: found NaN, expected a number"),
        ({"tie_word_embeddings": "x"}, 'tie_word_embeddings: found "x", expected true or false'),
        ({"attention_bias": []}, r"attention_bias: found \[\], expected true or false"),
        ({"hidden_act": ["silu"]}, r'hidden_act: found \["silu"\], expected one of silu'),
        ({"model_type": ["llama"]}, r'model_type: found \["llama"\], expected one of'),
        ({"layer_types": 5, "use_sliding_window": True}, "a sliding window"),
        ({"rope_parameters": "linear"}, 'rope_scaling: found "linear", expected values in braces'),
        (rope(rope_type=["yarn"]), r'rope_type: found \["yarn"\], expected one of default'),
        (rope(rope_theta="x"), 'rope_theta: found "x", expected a number'),
        (rope(factor=[8]), r"factor: found \[8\], expected a number"),
        (rope(original_max_position_embeddings="x"), 'original_max_position_embeddings: found "x", expected'),
        ({"num_key_value_heads": 3}, "kv_heads: expected a divisor of heads, 4"),
        (
            rope(rope_type="dynamic"),
            'rope_type: found "dynamic", expected one of default, linear,',
        ),
        (rope(high_freq_factor=8.0), "high_freq_factor: found 8.0, only 4.0 can be imported"),
        (rope(rope_type="yarn"), "low_freq_factor: found 1.0, no yarn scaling with it can be imported"),
        (rope(factor=None), "factor: found nothing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0 can be imported"),
        ({"use_sliding_window": True}, "a sliding window, which cannot be imported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be imported"),
        (
            {"model_type": "eurobert", "tie_word_embeddings": True},
            "eurobert with tie_embeddings True: only False",
        ),
        ({"model_type": "eurobert", "head_dim": 32}, "eurobert with head_dim 32: only 16"),
        ({"model_type": "eurobert"} | rope(), "eurobert with rope_scaling llama3: only none"),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"no place .* the tensor model.layers.1.\S+ and 8 more"),
        ({"model_type": "qwen3"}, r"no tensor model.layers.1.self_attn.q_norm.weight"),
        ({"intermediate_size": 80}, r"mlp.gate_proj.weight is of shape \(96, 64\), and by config.json"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_imported_is_refused(changes, message, saved, tmp_path):
    source = copy(saved, tmp_path / "source")
    rewrite(source, lambda settings: settings.update(changes))
    with pytest.raises(UserError, match=message):
        from_huggingface.import_model(str(source), str(tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]  # nothing unfinished is left


def test_yarn_with_another_magnitude_is_refused(saved, tmp_path):
    source = copy(saved, tmp_path / "source")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for odd in ({"mscale": 0.7}, {"attention_factor": 1.5}, {"beta_fast": 16}, {"truncate": False}):
        rewrite(source, lambda settings, odd=odd: settings.update(rope_parameters=yarn | odd))
        with pytest.raises(UserError, match=f"rope: {next(iter(odd))}: found"):
            from_huggingface.import_model(str(source), str(tmp_path / "run"))
    usual = {"attention_factor": 0.1 * float(np.log(4.0)) + 1.0, "beta_fast": 32, "mscale": None}
    rewrite(source, lambda settings: settings.update(rope_parameters=yarn | usual))
    assert from_huggingface.import_model(str(source), str(tmp_path / "run")).model.rope_scaling == "yarn"


def test_a_folder_without_a_model_is_refused(saved, tmp_path):
    source, target = tmp_path / "source", str(tmp_path / "run")
    source.mkdir()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            from_huggingface.import_model(str(source), target)

    refused("not a Hugging Face model folder: no config.json in it")
    (source / "config.json").write_text("{")
    refused("config.json: not valid JSON")
    (source / "config.json").write_text("[]")
    refused("config.json: expected names and values in braces")
    (source / "config.json").write_bytes((saved / "config.json").read_bytes())
    refused("no .safetensors file in it")
    (source / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:5000])
    refused("model.safetensors: not a complete safetensors file")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_model_folder_instead_of_a_run_folder_is_refused_with_the_import_command(saved, tmp_path, capsys):
    assert main(["eval", str(saved)]) == 2
    assert f"`headrace import {saved} RUN` makes one from this Hugging Face folder" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 2
    assert "`headrace train RECIPE` makes one" in capsys.readouterr().err


def test_an_unknown_tensor_is_refused(saved, tmp_path):
    source = copy(saved, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"score.weight": np.zeros((2, 64), np.float32)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"no place in this model for the tensor score.weight$"):
        from_huggingface.import_model(str(source), str(tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_import_overwrites_nothing(saved, tmp_path):
    (tmp_path / "recipe.yaml").write_text("notes")
    with pytest.raises(UserError, match="already exists; name a new folder"):
        from_huggingface.import_model(str(saved), str(tmp_path))
    assert (tmp_path / "recipe.yaml").read_text() == "notes"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_name_of_the_hub_is_answered_with_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "`hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B`"
    with pytest.raises(UserError, match=command):
        from_huggingface.import_model("meta-llama/Llama-3.2-1B", "run")
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match=r"no config\.json in it$"):  # a folder of this machine
        from_huggingface.import_model("models/Llama-3.2-1B", "run")
