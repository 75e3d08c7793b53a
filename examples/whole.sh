#!/usr/bin/env bash
# From text to a model that other libraries load: pre-train, fine-tune, quantize, evaluate, export, reload.
#   bash examples/whole.sh FOLDER [STEPS]
# With 60 steps it took 1m48s on 2 busy cores; 500 are the default. Run it again to resume an interrupted training;
# everything after training is repeated. The last part needs transformers and gguf:
#   pip install -c constraints.txt -e '.[torch,gguf]'
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?the folder for all results} steps=${2:-500}
export PATH="$PWD/.venv/bin:$PATH"
say() { printf '\n== %s\n' "$1"; }

say "Text to tokens"
headrace data prepare recipes/data/demo.yaml path="$folder/data"

say "Pre-training"
headrace train recipes/demo.yaml run_dir="$folder/base" data.path="$folder/data" schedule.steps="$steps" schedule.warmup=10

say "Instructions, with the tokenizer of that model"
python -c 'import json
for a in range(40):
    for b in range(40):
        print(json.dumps({"prompt": f"What is {a} plus {b}?", "completion": f"{a + b}."}))' >"$folder/instructions.jsonl"
headrace data prepare recipes/data/instructions.yaml path="$folder/instructions" \
    sources.instructions.path="$folder/instructions.jsonl" tokenizer.path="$folder/data"

say "Loss on the instructions before fine-tuning"
headrace eval "$folder/base" data.path="$folder/instructions"

say "Fine-tuning with LoRA"
headrace train recipes/lora-demo.yaml run_dir="$folder/tuned" init_from="$folder/base" data.path="$folder/instructions" \
    schedule.steps="$((steps / 5 + 10))" schedule.warmup=5

say "Loss after fine-tuning"
headrace eval "$folder/tuned"

say "Quantizing to 4 bits per weight"
rm -rf "$folder"/four "$folder"/four.unfinished "$folder"/{base-hf,merged-hf,adapter,merged.gguf}
headrace quantize "$folder/tuned" --method gptq --bits 4 --samples 32 --to "$folder/four" group_size=64
headrace eval "$folder/four"
headrace generate "$folder/four" --prompt "def " --tokens 20 --temperature 0

say "Exporting for transformers, peft and llama.cpp"
headrace export "$folder/base" "$folder/base-hf"
headrace export "$folder/tuned" "$folder/merged-hf"
headrace export "$folder/tuned" "$folder/adapter" --adapter
headrace export "$folder/tuned" "$folder/merged.gguf"

say "Reloading"
python examples/reload.py "$folder"
