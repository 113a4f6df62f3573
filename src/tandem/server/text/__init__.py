"""Between text and tokens: tokenizers, chat templates, detokenizing, stop strings."""
