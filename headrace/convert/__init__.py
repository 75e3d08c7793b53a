"""Models to and from other formats: Hugging Face folders, peft adapters, GGUF, model cards."""
