"""The arguments of the commands for trained models: eval, generate, serve, export, import and quantize."""

from typing import TYPE_CHECKING

from headrace.cli.arguments import add_command, add_overrides, add_run

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands, Parser

GENERATE_EPILOG = """\
examples:
  headrace generate runs/demo --prompt "def main("
  headrace generate runs/demo --prompt "import " --temperature 0 --tokens 40"""

EXPORT_EPILOG = """\
examples:
  headrace export runs/demo exported                       a folder that transformers loads
  headrace export runs/demo demo.gguf --dtype q8_0         a file for llama.cpp
  headrace export runs/lora adapter --adapter              LoRA adapters only, for peft"""

IMPORT_EPILOG = """\
example:
  headrace import models/Llama-3.2-1B runs/llama      read the weights, and write a recipe to train from
  headrace generate runs/llama --prompt "Once upon"
  headrace train runs/llama/recipe.yaml data.path=data/mine"""

QUANTIZE_EPILOG = """\
examples:
  headrace quantize runs/demo                               GPTQ in 4 bits, to runs/demo-gptq-4
  headrace quantize runs/demo --bits 3 group_size=64        settings of the method are KEY=VALUE
  headrace eval runs/demo-gptq-4                            what it costs in loss"""


def add_model_commands(commands: "Commands") -> None:
    """Add the commands that use a model: eval, generate and serve."""
    add_eval(commands)
    add_generate(commands)
    summary = "serve a model over an OpenAI-compatible API, with a page to try it"
    parser = add_command(
        commands, "serve", summary, "model", details="For trying out a model, not for production."
    )
    add_run(parser)
    text = "address to listen on (default: 127.0.0.1, reachable from this machine only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "port, or 0 for any free one (default: 8000)"
    parser.add_argument("--port", type=int, default=8000, metavar="N", help=text)
    text = "requests that are generated in parallel (default: 8)"
    parser.add_argument("--slots", type=int, default=8, metavar="N", help=text)
    text = "maximum number of tokens of a prompt and its answer (default: data.sequence_length of the run)"
    parser.add_argument("--length", type=int, metavar="N", help=text)


def add_eval(commands: "Commands") -> None:
    """Add `eval`."""
    summary = "compute loss, perplexity and bits per byte on the evaluation data"
    parser = add_command(commands, "eval", summary, "model", "evaluate")
    add_run(parser)
    add_overrides(parser, "setting of the run's recipe", "data.path=data/other")
    text = "run tasks of lm-evaluation-harness instead: their names or .yaml files, separated by commas"
    parser.add_argument("--tasks", metavar="NAMES", help=text)
    text = "with --tasks: examples of each task (default: all)"
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    text = "with --tasks: texts per batch (default: 8)"
    parser.add_argument("--batch", type=int, metavar="N", help=text)


def add_generate(commands: "Commands") -> None:
    """Add `generate`."""
    summary = "generate text that continues a prompt"
    parser = add_command(commands, "generate", summary, "model", epilog=GENERATE_EPILOG)
    add_run(parser)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: empty)")
    text = "maximum number of tokens to generate (default: 128)"
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help=text)
    text = "0 always takes the most likely token (default: 0.8)"
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "sample from the K most likely tokens; 0: from all (default: 50)"
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help=text)
    text = "sample from the most likely tokens whose probabilities add up to P (default: 1)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
    text = "seed of the sampling (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    text = "pause tokens after the prompt, for models trained with them (pack.pause_tokens)"
    parser.add_argument("--pause-tokens", type=int, default=0, metavar="N", help=text)
    add_diffusion_options(parser)
    add_recurrence_options(parser)


def add_diffusion_options(parser: "Parser") -> None:
    """Add the options of `generate` for diffusion models."""
    group = parser.add_argument_group("diffusion models")
    text = "number of denoising steps (default: 0, one per token)"
    group.add_argument("--steps", type=int, default=0, metavar="N", help=text)
    text = "finish N tokens before the next N are started (default: 0, all at once)"
    group.add_argument("--block", type=int, default=0, metavar="N", help=text)
    text = "which tokens to unmask first: the most certain, random ones, or each at a random step "
    text += "(default: confident)"
    orders = ["confident", "random", "ancestral"]
    group.add_argument("--order", choices=orders, default="confident", help=text)


def add_recurrence_options(parser: "Parser") -> None:
    """Add the options of `generate` for models with recurrent depth."""
    group = parser.add_argument_group("models with recurrent depth")
    text = "rounds of the middle layers (default: recurrence.rounds of the run)"
    group.add_argument("--recurrence", type=int, metavar="N", help=text)
    text = "stop after a round that changes the states by less than this share, e.g. 0.03"
    group.add_argument("--exit-share", type=float, default=0.0, metavar="SHARE", help=text)


def add_conversion_commands(commands: "Commands") -> None:
    """Add the commands that convert a model: export, import and quantize."""
    summary = "write a model for transformers, peft or llama.cpp"
    parser = add_command(commands, "export", summary, "model", epilog=EXPORT_EPILOG)
    add_run(parser)
    text = "folder to write, or NAME.gguf for llama.cpp; it must not exist"
    parser.add_argument("target", metavar="TARGET", help=text)
    text = "of the weights; q8_0 and q4_0 are for .gguf files (default: float32)"
    dtypes = ["float32", "bfloat16", "float16", "q8_0", "q4_0"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help=text)
    text = "store ternary weights in 2 bits each"
    parser.add_argument("--packed", action="store_true", help=text)
    text = "write only the LoRA adapters, for peft (default: merge them into the model)"
    parser.add_argument("--adapter", action="store_true", help=text)

    summary = "make a run folder from a Hugging Face model folder"
    parser = add_command(commands, "import", summary, "model", "import_model", epilog=IMPORT_EPILOG)
    text = "folder with config.json, *.safetensors and tokenizer.json"
    parser.add_argument("folder", metavar="FOLDER", help=text)
    parser.add_argument("run", metavar="RUN", help="run folder to write; it must not exist")
    add_quantize(commands)


def add_quantize(commands: "Commands") -> None:
    """Add `quantize`."""
    summary = "compress the weight matrices of a model to a few bits each"
    parser = add_command(commands, "quantize", summary, "model", epilog=QUANTIZE_EPILOG)
    add_run(parser)
    add_overrides(parser, "setting of the method", "group_size=64")
    parser.add_argument("--method", metavar="NAME", help="rtn, gptq or vptq (default: gptq)")
    text = "bits per weight (default: the method's)"
    parser.add_argument("--bits", type=int, metavar="N", help=text)
    text = "folder to write (default: RUN-METHOD-BITS)"
    parser.add_argument("--to", metavar="FOLDER", help=text)
    text = "packed data to calibrate on (default: the data of the run)"
    parser.add_argument("--data", metavar="FOLDER", help=text)
    text = "sequences to calibrate on (default: 128)"
    parser.add_argument("--samples", type=int, default=128, metavar="N", help=text)
    text = "of the weights that are not quantized (default: float16)"
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16", help=text)
