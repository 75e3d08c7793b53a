"""Keys and values of other trainers, and what they are called here.

From HF Trainer, peft, axolotl, LLaMA-Factory, MaxText, torchtitan, levanter and nanochat. None of them is
accepted: they only make the message about an unknown key more helpful."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Synonym:
    """The key to use instead: in training recipes, or else in data recipes. `note` says what differs."""

    keys: tuple[str, ...]
    note: str = ""


def _called(names: str, keys: str, note: str = "") -> dict[str, Synonym]:
    return {name: Synonym(tuple(keys.split()), note) for name in names.split()}


GLOBAL_BATCH = "it counts the sequences of all devices and microbatches together"
PACKED_DATA = "a folder that `headrace data prepare` has written"
LOCAL_FOLDER = "a run folder, or a Hugging Face folder on this machine"
WEIGHT_NAMES = 'weights are named as in a checkpoint, e.g. "blocks.w_q,blocks.w_v"'

KEYS: dict[str, Synonym] = {
    **_called("hidden_size n_embd d_model emb_dim base_emb_dim", "model.embed"),
    **_called("num_hidden_layers num_layers n_layer n_layers depth", "model.layers"),
    **_called("num_attention_heads num_heads n_head n_heads", "model.heads"),
    **_called("num_key_value_heads num_kv_heads n_kv_head n_kv_heads", "model.kv_heads"),
    **_called("intermediate_size ffn_dim mlp_dim base_mlp_dim", "model.mlp"),
    **_called("vocab_size", "model.vocab tokenizer.vocab"),
    **_called("tie_word_embeddings", "model.tie_embeddings"),
    **_called("rms_norm_eps layer_norm_eps", "model.norm_eps"),
    **_called("hidden_act hidden_activation", "model.activation"),
    **_called("sliding_window", "model.window"),
    **_called("num_experts num_local_experts n_routed_experts", "model.experts"),
    **_called("num_experts_per_tok", "model.top_k"),
    **_called("lr", "optimizer.learning_rate"),
    **_called("optim", "optimizer.use"),
    **_called("adam_beta1 beta1", "optimizer.b1"),
    **_called("adam_beta2 beta2", "optimizer.b2"),
    **_called("adam_epsilon", "optimizer.eps"),
    **_called("grad_clip gradient_clipping gradient_clipping_threshold", "optimizer.max_grad_norm"),
    **_called("max_steps num_train_steps total_steps", "schedule.steps"),
    **_called("lr_scheduler_type lr_scheduler", "schedule.use"),
    **_called("warmup_steps", "schedule.warmup"),
    **_called("warmup_ratio", "schedule.warmup", 'a share of the run is written as "3 %"'),
    **_called("min_lr", "schedule.min_lr_ratio", "a share of optimizer.learning_rate"),
    **_called("output_dir dump_folder base_output_directory", "run_dir path"),
    **_called("save_steps", "checkpoint.every"),
    **_called("save_total_limit max_to_keep", "checkpoint.keep"),
    **_called("eval_steps eval_interval", "eval.every"),
    **_called("logging_steps log_freq", "log.every"),
    **_called("report_to", "log.wandb", "true or false; log.tensorboard likewise"),
    **_called("per_device_train_batch_size per_device_batch_size", "batch.sequences", GLOBAL_BATCH),
    **_called("micro_batch_size train_batch_size batch_size", "batch.sequences", GLOBAL_BATCH),
    **_called("global_batch_size", "batch.sequences"),
    **_called(
        "gradient_accumulation_steps", "batch.microbatches", "it divides batch.sequences, others multiply it"
    ),
    **_called("gradient_checkpointing activation_checkpoint remat_policy", "compute.remat", "e.g. full"),
    **_called("bf16 mixed_precision precision", "compute.dtype", "bfloat16, the default, or float32"),
    **_called("fp16", "compute.dtype", "bfloat16, the default, or float32; there is no float16"),
    **_called("attn_implementation flash_attention", "attention.use", "auto, the default, takes the fastest"),
    **_called("label_smoothing_factor", "loss.label_smoothing"),
    **_called("mlm_probability", "objective.mask_rate"),
    **_called("max_seq_length max_seq_len sequence_len seq_len", "data.sequence_length pack.sequence_length"),
    **_called("max_length block_size cutoff_len", "data.sequence_length pack.sequence_length"),
    **_called("max_target_length max_position_embeddings", "data.sequence_length pack.sequence_length"),
    **_called("lora_r lora_rank r", "lora.rank"),
    **_called("lora_alpha", "lora.alpha"),
    **_called("target_modules lora_target_modules lora_target", "lora.targets", WEIGHT_NAMES),
    **_called("use_dora peft_use_dora", "lora.dora"),
    **_called("load_in_4bit", "lora.base_bits", "write `lora: {base_bits: 4}`"),
    **_called("load_in_8bit", "lora.base_bits", "write `lora: {base_bits: 8}`"),
    **_called("num_labels", "classifier.labels"),
    **_called("base_model model_name_or_path initialize_from", "init_from", LOCAL_FOLDER),
    **_called("tensor_parallel_size tensor_parallel_degree", "mesh.tensor"),
    **_called("context_parallel_degree context_parallel_size", "mesh.context"),
    **_called("expert_parallel_degree", "mesh.expert"),
    **_called("dataset datasets train_file dataset_name", "data.path sources", PACKED_DATA),
    **_called("text_field text_column_name", "sources.NAME.text_column"),
    **_called("num_proc preprocessing_num_workers", "workers"),
}
ABSENT = {  # what others have as a key and what is done here instead
    "num_train_epochs": 'there are no epochs to set; set schedule.steps, e.g. to "2B tokens"',
    "num_epochs": 'there are no epochs to set; set schedule.steps, e.g. to "2B tokens"',
    "streaming": "there is nothing to set: training reads prepared data from disk or from a bucket",
    "packing": "data is always packed; pack.mode in the data recipe chooses how",
    "sample_packing": "data is always packed; pack.mode in the data recipe chooses how",
    "tokenizer_name": "the tokenizer belongs to the data; choose it in the data recipe",
    "resume_from_checkpoint": "there is nothing to set: the same command resumes the run in run_dir",
    "lora_dropout": "there is no dropout",
    "dropout": "there is no dropout",
}
VALUES: dict[str, dict[str, str]] = {  # key -> value of others -> what to use instead
    "model.use": {
        "bert": "modernbert or eurobert",
        "roberta": "modernbert or eurobert",
        "gpt2": "llama",
        "mistral": "llama",
        "qwen2": "llama",
        "qwen3": "llama with qk_norm: true",
        "mixtral": "moe",
        "olmo": "olmo2",
        "gemma": "gemma2 or gemma3",
    },
    "objective.use": {"mlm": "masked", "clm": "causal", "lm": "causal", "electra": "rtd", "sft": "causal"},
    "optimizer.use": {"adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "schedule.use": {"constant_with_warmup": "constant", "wsd_schedule": "wsd"},
    "compute.dtype": {"bf16": "bfloat16", "fp32": "float32", "fp16": "bfloat16", "float16": "bfloat16"},
    "compute.matmul": {"bf16": "compute", "bfloat16": "compute", "none": "compute"},
    "compute.remat": {"true": "full", "false": "none", "minimal": "dots"},
    "attention.use": {"flash": "auto", "flash_attention_2": "auto", "sdpa": "auto", "eager": "xla"},
}


def suggestion(key: str, declared: Collection[str]) -> str | None:
    """Suggest what to use instead of an unknown key, or None. `declared` are the keys of this recipe."""
    name = key.rpartition(".")[2]
    if name in ABSENT:
        return ABSENT[name]
    synonym = KEYS.get(name, Synonym(()))
    for target in synonym.keys:
        if any(other == target or other.startswith(target + ".") for other in declared):
            return f"it is called {target} here" + (f": {synonym.note}" if synonym.note else "")
    return None


def value_suggestion(key: str, value: str) -> str:
    """Suggest what to use instead of a value that other trainers have; empty if there is nothing."""
    suggested = VALUES.get(key, {}).get(value.lower())
    return f"did you mean {suggested}?" if suggested else ""


def names_of(key: str) -> list[str]:
    """List the names that other trainers have for a key."""
    return [name for name, synonym in KEYS.items() if key in synonym.keys]
