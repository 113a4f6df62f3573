"""The proof that an architecture runs correctly here: a tiny random model compared with eager code.

``prove.prove_config`` makes a proof; ``require.require_proof`` requires one before a model is
loaded.
"""
