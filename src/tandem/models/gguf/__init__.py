"""What a GGUF file says about its model: configuration, names of tensors, tokenizer."""
