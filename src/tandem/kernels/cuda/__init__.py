"""A CUDA GPU behind the ``Device`` protocol; has run on no hardware yet."""
