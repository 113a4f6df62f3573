"""The model of a GGUF file: configuration, names of tensors, tokenizer."""
