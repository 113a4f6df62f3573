"""The proof that an architecture runs right here: a tiny random model of it, compared with eager.

``prove.prove_config`` makes one, ``require.require_proof`` asks for one before a model is loaded.
"""
