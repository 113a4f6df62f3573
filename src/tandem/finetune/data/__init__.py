"""Training data: reads files of records and converts them into tokenized examples."""
