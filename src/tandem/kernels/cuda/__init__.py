"""A CUDA GPU behind the ``Device`` protocol."""
