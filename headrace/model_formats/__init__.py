"""How others name and store weights: Hugging Face, GPTQ, VPTQ, GGUF."""
