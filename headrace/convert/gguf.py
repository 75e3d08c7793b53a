"""Export to GGUF, the file format of llama.cpp: weights, sizes, tokenizer and chat template in one file.

The `gguf` package writes the file. What llama.cpp's architecture needs of a family's weights is declared in
the family's file (`to_gguf`)."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.convert import gguf_tokenizer
from headrace.convert.output import new_file
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_formats.gguf_architecture import Architecture, refuse_export
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import classification_head, load_family
from headrace.models import load_base_family
from headrace.nn.rope import Rope, Scaling, inverse_frequencies

if TYPE_CHECKING:
    from gguf import GGUFWriter


class TypeNames(NamedTuple):
    """gguf's names of a type: of a tensor, and of a file whose tensors mostly have it (llama.h)."""

    tensor: str
    file: str


TYPES = {
    "float32": TypeNames("F32", "ALL_F32"),
    "float16": TypeNames("F16", "MOSTLY_F16"),
    "bfloat16": TypeNames("BF16", "MOSTLY_BF16"),
    "q8_0": TypeNames("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": TypeNames("Q4_0", "MOSTLY_Q4_0"),
}
BLOCK_SIZE = 32  # weights that share a scale in q8_0 and q4_0


class DecoderConfig(Protocol):
    """The config of a family with `to_gguf`: the keys that are written to the file."""

    @property
    def use(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> Scaling: ...
    @property
    def rope_factor(self) -> float: ...
    @property
    def rope_original_length(self) -> int: ...


def export(run: LoadedRun, target: str, dtype: str) -> Path:
    """Write a run's model to a new .gguf file, which llama.cpp reads. Returns its path.

    `dtype` is a key of TYPES. Vectors, such as the weights of norms, stay in float32 whatever it is."""
    tokenizer = check_exportable(run)
    with new_file(target) as path:
        run = run.merged()
        family = load_family(run.recipe.model)
        if family.to_gguf is None:
            raise UserError(
                f"model.use: found {run.recipe.model.use}, and .gguf files are written for "
                f"{', '.join(supported_families())}; export a folder instead"
            )
        architecture = family.to_gguf(run.recipe.model, run.recipe.loss.soft_cap)
        write_gguf(run, architecture, tokenizer, path, dtype)
    return Path(target).absolute()


def check_exportable(run: LoadedRun) -> Tokenizer:
    """Raise UserError if a run cannot be exported, whatever its model family. Returns its tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("export: .gguf files need the gguf package: pip install 'headrace[gguf]'")
    run_dir = run.recipe.run_dir
    if quantized_folder.read_quant_config(run_dir) is not None:
        raise UserError(
            f"{run_dir}: a quantized model, whose weights GGUF cannot represent; export the run that it was "
            "quantized from, with --dtype q8_0 or q4_0 for few bits"
        )
    classification_head.refuse_classifier(run.recipe, "export a folder instead, which transformers reads")
    if run.tokenizer is None:
        raise UserError(f"{run_dir}: no tokenizer.json in it, without which llama.cpp cannot read a model")
    return run.tokenizer


def supported_families() -> list[str]:
    """List the model families that have `to_gguf`."""
    return [name for name in reader.part_names("models") if load_base_family(name).to_gguf is not None]


def write_gguf(
    run: LoadedRun, architecture: Architecture, tokenizer: Tokenizer, path: Path, dtype: str
) -> None:
    """Write metadata, tokenizer and tensors to `path`."""
    import gguf

    # Tensors go to a temporary file, not to memory: the header with all their sizes precedes them.
    writer = gguf.GGUFWriter(path, architecture.name, use_temp_file=True)
    try:
        writer.add_type("model")
        writer.add_name(Path(run.recipe.run_dir).name)
        writer.add_file_type(gguf.LlamaFileType[TYPES[dtype].file])
        if dtype.startswith("q"):
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_hyperparameters(writer, run, architecture)
        gguf_tokenizer.add_tokenizer(writer, tokenizer, run.recipe.model.vocab)
        for name, tensor in iter_tensors(run, architecture):
            tensor_type = gguf.GGMLQuantizationType[choose_type(name, tensor, dtype)]
            writer.add_tensor(name, gguf.quants.quantize(tensor, tensor_type), raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def add_hyperparameters(writer: "GGUFWriter", run: LoadedRun, architecture: Architecture) -> None:
    """Add the model's sizes, norms and rotary positions to the metadata."""
    cfg: DecoderConfig = run.recipe.model
    to_hf_config = load_family(run.recipe.model).hf_naming.to_config
    settings = to_hf_config(run.recipe.model, run.recipe.data.sequence_length)
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
    writer.add_rope_freq_base(settings["rope_theta"])  # includes the larger base of NTK scaling
    if cfg.rope_scaling in ("linear", "yarn"):
        writer.add_string(f"{architecture.name}.rope.scaling.type", cfg.rope_scaling)
        writer.add_rope_scaling_factor(cfg.rope_factor)
    if cfg.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(cfg.rope_original_length)
    if cfg.rope_scaling == "llama3" and not architecture.interleaved:
        refuse_export("model.rope_scaling", "llama3", architecture.name, "linear, ntk and yarn")
    for key, value in architecture.keys.items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture.name}.{key}", value)
        else:
            writer.add_float32(f"{architecture.name}.{key}", value)


def iter_tensors(run: LoadedRun, architecture: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and values of every tensor of the file, in float32."""
    import gguf

    cfg = run.recipe.model
    family = load_family(cfg)
    architecture_ids = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architecture_ids[architecture.name], cfg.layers)
    if cfg.rope_scaling == "llama3":
        yield "rope_freqs.weight", rope_divisors(cfg)
    for hf_name, tensor in to_tensors(family.tensor_table(cfg), run.params, "float32"):
        name = names.get_name(hf_name, try_suffixes=(".weight",))
        assert name is not None, hf_name
        yield name, to_gguf_layout(name, tensor, architecture, cfg)
    if architecture.head and run.params.head is None:
        yield "output.weight", np.asarray(jax.device_get(run.params.embedding), np.float32)


def to_gguf_layout(
    name: str, tensor: np.ndarray, architecture: Architecture, cfg: DecoderConfig
) -> np.ndarray:
    """Convert a tensor from transformers' conventions to those of llama.cpp's architecture."""
    kind = name.split(".")[-2]
    if kind.endswith("norm"):
        tensor = tensor + np.float32(architecture.norm_offset)
    # With a norm of queries, the scale of what is normalized has no effect.
    if architecture.query_factor != 1 and kind == ("attn_q_norm" if cfg.qk_norm else "attn_q"):
        tensor = tensor * np.float32(architecture.query_factor)
    if kind in ("attn_q", "attn_k") and architecture.interleaved:
        heads = cfg.heads if kind == "attn_q" else cfg.kv_heads
        halves = tensor.reshape(heads, 2, cfg.head_dim // 2, -1)
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return np.ascontiguousarray(tensor)


def rope_divisors(cfg: DecoderConfig) -> np.ndarray:
    """Compute by how much rotary scaling divides each frequency [h/2]."""
    rope = Rope(cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor, cfg.rope_original_length)
    unscaled, _ = inverse_frequencies(cfg.head_dim, Rope(cfg.rope_theta))
    scaled, _ = inverse_frequencies(cfg.head_dim, rope)
    return (unscaled.astype(np.float64) / scaled).astype(np.float32)


def choose_type(name: str, tensor: np.ndarray, dtype: str) -> str:
    """Choose gguf's type for a tensor of a file in `dtype`.

    Vectors stay in float32, which llama.cpp requires. Matrices whose rows cannot be divided into blocks stay
    in 16 bits. Embedding and head lose most in 4 bits, and get 8."""
    if tensor.ndim == 1:
        return "F32"
    if dtype.startswith("q") and tensor.shape[-1] % BLOCK_SIZE:
        return "F16"
    if dtype == "q4_0" and name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return TYPES[dtype].tensor
