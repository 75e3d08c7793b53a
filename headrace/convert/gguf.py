"""GGUF, the file of llama.cpp: one file with the weights, the sizes, the tokenizer and the chat template. Its
layout is the `gguf` package's; what an architecture wants is in each model file (`to_gguf`)."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.convert import gguf_tokenizer
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_formats.gguf_architecture import Architecture, refuse_export
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import classification_head, load_family
from headrace.models import load_base_family
from headrace.nn.rope import Rope, inverse_frequencies
from headrace.storage import files

# Our names of types, those of gguf, and what the file says that most of its weights are (llama.h).
TYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
BLOCK = 32  # weights that share a scale in q8_0 and q4_0


def export(run: LoadedRun, target: str, dtype: str) -> Path:
    """Writes one file that llama.cpp reads. Returns it."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("export: .gguf files need the gguf package: pip install 'headrace[gguf]'")
    if quantized_folder.read_quant_config(run.recipe.run_dir) is not None:
        raise UserError(
            f"{run.recipe.run_dir}: a quantised model, whose numbers GGUF cannot hold; export the run it was "
            "made of, with --dtype q8_0 or q4_0 for few bits"
        )
    classification_head.refuse_classifier(run.recipe, "export a folder instead, which transformers reads")
    final = check_target(target)
    if run.tokenizer is None:
        raise UserError(
            f"{run.recipe.run_dir}: no tokenizer.json in it, without which llama.cpp reads no model"
        )
    run = run.merged()
    family = load_family(run.recipe.model)
    if family.to_gguf is None:
        raise UserError(
            f"model.use: found {run.recipe.model.use}, and .gguf files are written for "
            f"{', '.join(supported())}; export a folder instead"
        )
    architecture = family.to_gguf(run.recipe.model, run.recipe.loss.soft_cap)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        made = Path(scratch) / final.name
        write(run, architecture, made, dtype)
        made.rename(final)
    return final


def check_target(target: str) -> Path:
    if files.is_url(target):
        raise UserError(
            f"found {files.redacted(target)}, expected a file on this machine; copy it there after"
        )
    final = Path(target).absolute()
    if final.exists():
        raise UserError(f"{target}: there is something already; name a new file, or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    return final


def supported() -> list[str]:
    return [name for name in reader.part_names("models") if load_base_family(name).to_gguf is not None]


def write(run: LoadedRun, architecture: Architecture, path: Path, dtype: str) -> None:
    import gguf

    # In a temporary file, not in memory: the header has the sizes of all tensors and comes before them.
    writer = gguf.GGUFWriter(path, architecture.name, use_temp_file=True)
    try:
        writer.add_type("model")
        writer.add_name(Path(run.recipe.run_dir).name)
        writer.add_file_type(gguf.LlamaFileType[TYPES[dtype][1]])
        if dtype.startswith("q"):
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_sizes(writer, run, architecture)
        gguf_tokenizer.add_tokens(writer, run)
        for name, tensor in tensors(run, architecture):
            kind = gguf.GGMLQuantizationType[type_of(name, tensor, dtype)]
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def add_sizes(writer: Any, run: LoadedRun, architecture: Architecture) -> None:
    cfg, sequence = run.recipe.model, run.recipe.data.sequence_length
    settings = load_family(cfg).hf_naming.to_config(cfg, sequence)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(cfg.embed)
    writer.add_block_count(cfg.layers)
    writer.add_feed_forward_length(cfg.mlp)
    writer.add_head_count(cfg.heads)
    writer.add_head_count_kv(cfg.kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_vocab_size(cfg.vocab)
    writer.add_rope_freq_base(settings["rope_theta"])  # NTK's larger base included
    if cfg.rope_scaling in ("linear", "yarn"):
        writer.add_string(f"{architecture.name}.rope.scaling.type", cfg.rope_scaling)
        writer.add_rope_scaling_factor(cfg.rope_factor)
    if cfg.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(cfg.rope_original_length)
    if cfg.rope_scaling == "llama3" and not architecture.interleaved:
        refuse_export("model.rope_scaling", "llama3", architecture.name, "linear, ntk and yarn")
    for key, value in architecture.keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture.name}.{key}", value)


def tensors(run: LoadedRun, architecture: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and tensors, in float32."""
    import gguf

    cfg = run.recipe.model
    family, number = load_family(cfg), {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(number[architecture.name], cfg.layers)
    if cfg.rope_scaling == "llama3":
        yield "rope_freqs.weight", rope_factors(cfg)
    for theirs, tensor in to_tensors(family.tensor_table(cfg), run.params, "float32"):
        name = names.get_name(theirs, try_suffixes=(".weight",))
        assert name is not None, theirs
        yield name, to_gguf_layout(name, tensor, architecture, cfg)
    if architecture.head and run.params.head is None:
        yield "output.weight", np.asarray(jax.device_get(run.params.embedding), np.float32)


def to_gguf_layout(name: str, tensor: np.ndarray, architecture: Architecture, cfg: Any) -> np.ndarray:
    kind = name.split(".")[-2]
    if kind.endswith("norm"):
        tensor = tensor + np.float32(architecture.norm_offset)
    # Where queries have a norm, what comes before it has no size.
    if architecture.query_factor != 1 and kind == ("attn_q_norm" if cfg.qk_norm else "attn_q"):
        tensor = tensor * np.float32(architecture.query_factor)
    if kind in ("attn_q", "attn_k") and architecture.interleaved:
        heads = cfg.heads if kind == "attn_q" else cfg.kv_heads
        halves = tensor.reshape(heads, 2, cfg.head_dim // 2, -1)
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return np.ascontiguousarray(tensor)


def rope_factors(cfg: Any) -> np.ndarray:
    """By how much each frequency is divided [h/2]."""
    rope = Rope(cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor, cfg.rope_original_length)
    plain, _ = inverse_frequencies(cfg.head_dim, Rope(cfg.rope_theta))
    stretched, _ = inverse_frequencies(cfg.head_dim, rope)
    return (plain.astype(np.float64) / stretched).astype(np.float32)


def type_of(name: str, tensor: np.ndarray, dtype: str) -> str:
    """Vectors stay whole, as llama.cpp wants them. Rows that are no whole blocks are kept in 16 bits, and the
    embedding and the head lose most by 4 bits, so that they get 8."""
    if tensor.ndim == 1:
        return "F32"
    if dtype.startswith("q") and tensor.shape[-1] % BLOCK:
        return "F16"
    if dtype == "q4_0" and name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return TYPES[dtype][0]
