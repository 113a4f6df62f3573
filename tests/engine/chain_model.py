"""A model whose right answers are known without it: hash chains over all tokens so far.

The KV of a token in a layer is the digest of the KV of the token before in that layer, read from
its block, and of the layer below. So a block with wrong content in any layer, wherever it came
from, gives wrong tokens. The next token follows from the last layer and the request's seed.
"""

import hashlib

from tandem.core.kv_identity import KvIdentity
from tandem.core.kv_layout import MlaLayout
from tandem.engine.runner import SequenceResult
from tandem.engine.sampler_state import SampledToken

BLOCK = 4
NUM_LAYERS = 2
WIDTH = 16
"""Bytes of a token's KV in a layer: too much to be right by chance."""
ROW_BYTES = BLOCK * WIDTH
BLOCK_BYTES = NUM_LAYERS * ROW_BYTES
VOCAB = 50
LAYOUT = MlaLayout(
    num_layers=NUM_LAYERS, block_size=BLOCK, kv_lora_rank=WIDTH // 2, rope_dim=0, dtype="bfloat16"
)
assert LAYOUT.bytes_per_block == BLOCK_BYTES


def make_identity(weights: str) -> KvIdentity:
    return KvIdentity(
        weights=weights, config={"model": '"chain"'}, dtype="bfloat16", formats={}, layout=LAYOUT
    )


def advance(state: bytes, below: bytes) -> bytes:
    return hashlib.blake2b(state + below, digest_size=WIDTH).digest()


def pick(state: bytes, seed: int, position: int) -> int:
    """The next token; ``position`` is that in the output."""
    return (int.from_bytes(state[:4], "little") + seed * (2 * position + 1)) % VOCAB


def continue_prompt(weights: str, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """What a request must be answered."""
    states = [bytes(WIDTH)] * NUM_LAYERS
    output: list[int] = []
    for position, token in enumerate(prompt):
        below = encode_token(weights, token)
        for layer in range(NUM_LAYERS):
            below = states[layer] = advance(states[layer], below)
        if position == len(prompt) - 1 and len(output) < num_tokens:
            output.append(pick(below, seed, len(output)))
    while len(output) < num_tokens:
        below = encode_token(weights, output[-1])
        for layer in range(NUM_LAYERS):
            below = states[layer] = advance(states[layer], below)
        output.append(pick(below, seed, len(output)))
    return output


def encode_token(weights: str, token: int) -> bytes:
    return b"%s%d" % (weights.encode(), token)


class ChainRunner:
    """Computes the chains from and into the memory of the blocks, layer by layer.

    Between two layers ``run`` yields, so that whoever drives it can let time pass.
    """

    def __init__(self, memory, weights: str) -> None:
        self._bytes = memoryview(memory)
        self._weights = weights

    def run(self, step):
        """Compute a step; a generator that yields after each layer and returns the results."""
        for copy in step.plan.copies:
            for layer in range(NUM_LAYERS):
                source = copy.src_block_id * BLOCK_BYTES + layer * ROW_BYTES
                target = copy.dst_block_id * BLOCK_BYTES + layer * ROW_BYTES
                size = copy.num_tokens * WIDTH
                self._bytes[target : target + size] = self._bytes[source : source + size]
        inputs = []
        for sequence in step.plan.sequences:
            end = sequence.start + sequence.num_tokens
            tokens = sequence.request.get_tokens(sequence.start, end)
            inputs.append([encode_token(self._weights, token) for token in tokens])
        for layer in range(NUM_LAYERS):
            for i, sequence in enumerate(step.plan.sequences):
                inputs[i] = self._run_layer(layer, sequence, inputs[i])
            if step.on_layer is not None:
                step.on_layer(layer)
            yield
        results = {}
        for sequence, states in zip(step.plan.sequences, inputs, strict=True):
            request_id = sequence.request.request_id
            sampled = None
            if sequence.wants_sample:
                position = len(sequence.request.output_ids)
                seed = step.states[request_id].seed
                sampled = SampledToken(pick(states[-1], seed, position), None)
            results[request_id] = SequenceResult(sampled=sampled)
        return results

    def _run_layer(self, layer, sequence, inputs):
        table, states = sequence.block_table, []
        at = _find_row(table, layer, sequence.start - 1)
        state = bytes(self._bytes[at : at + WIDTH]) if sequence.start else bytes(WIDTH)
        for position, below in enumerate(inputs, sequence.start):
            state = advance(state, below)
            at = _find_row(table, layer, position)
            self._bytes[at : at + WIDTH] = state
            states.append(state)
        return states


def _find_row(table, layer: int, position: int) -> int:
    block = table[position // BLOCK] if position >= 0 else 0
    return block * BLOCK_BYTES + layer * ROW_BYTES + position % BLOCK * WIDTH
