"""Names and layouts in which others store weights: Hugging Face, GPTQ, VPTQ, GGUF."""
