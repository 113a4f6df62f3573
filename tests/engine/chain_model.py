"""A model whose right answers are known without it: hash chains over all tokens so far.

The KV of a token in a layer is the digest of the KV of the token before in that layer, read from
its block, and of the layer below. So a block with wrong content in any layer, wherever it came
from, gives wrong tokens. The next token follows from the last layer and the request's seed; in a
model with states also from the state in the request's slot, one more chain over its tokens.
"""

import hashlib

import msgspec
import numpy as np

from tandem.core.kv_identity import KvIdentity
from tandem.core.kv_layout import MlaLayout
from tandem.engine.stepping.messages import SampledToken, SequenceResult, StepInput, StepResult

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
STATE_BYTES = WIDTH


def make_identity(weights: str, *, has_states: bool = False) -> KvIdentity:
    model = '"chain with states"' if has_states else '"chain"'
    return KvIdentity(
        weights=weights, config={"model": model}, dtype="bfloat16", formats={}, layout=LAYOUT
    )


def advance(state: bytes, below: bytes) -> bytes:
    return hashlib.blake2b(state + below, digest_size=WIDTH).digest()


def pick(state: bytes, seed: int, position: int) -> int:
    """The next token; ``position`` is that in the output."""
    return (int.from_bytes(state[:4], "little") + seed * (2 * position + 1)) % VOCAB


def continue_prompt(
    weights: str, prompt: list[int], num_tokens: int, seed: int, *, has_states: bool = False
) -> list[int]:
    """What a request must be answered."""
    if has_states:
        return _continue_with_states(weights, prompt, num_tokens, seed)
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


def _continue_with_states(weights, prompt, num_tokens, seed):
    layers, state = [bytes(WIDTH)] * NUM_LAYERS, bytes(WIDTH)
    output: list[int] = []
    tokens = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        below = encode_token(weights, tokens[position])
        state = advance(state, below)
        for layer in range(NUM_LAYERS):
            below = layers[layer] = advance(layers[layer], below)
        if position >= len(prompt) - 1:
            output.append(pick(advance(below, state), seed, len(output)))
            tokens.append(output[-1])
    return output


def encode_token(weights: str, token: int) -> bytes:
    return b"%s%d" % (weights.encode(), token)


class ChainRunner:
    """Computes the chains from and into the memory of the blocks, layer by layer.

    Between two layers ``run`` yields, so that whoever drives it can let time pass.
    """

    def __init__(self, memory, weights: str, states=None) -> None:
        self._bytes = memoryview(memory)
        self._states = None if states is None else memoryview(states)
        self._weights = weights
        self._seeds: dict[int, int] = {}

    @property
    def num_started(self) -> int:
        """Sequences whose sampling state is kept."""
        return len(self._seeds)

    def run(self, step, on_layer):
        """Compute a step; a generator that yields after each layer and returns the result."""
        # What goes to a runner can always be sent to another process.
        step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepInput)
        for sequence_id in step.ends:
            del self._seeds[sequence_id]
        self._seeds |= {start.sequence_id: start.seed for start in step.starts}
        for copy in step.copies:
            for layer in range(NUM_LAYERS):
                source = copy.src_block_id * BLOCK_BYTES + layer * ROW_BYTES
                target = copy.dst_block_id * BLOCK_BYTES + layer * ROW_BYTES
                size = copy.num_tokens * WIDTH
                self._bytes[target : target + size] = self._bytes[source : source + size]
        for copy in step.state_loads:
            self._write_state(copy.target, self._read_state(copy.source))
        inputs = [
            [encode_token(self._weights, token) for token in sequence.token_ids]
            for sequence in step.sequences
        ]
        if self._states is not None:
            for sequence, tokens in zip(step.sequences, inputs, strict=True):
                state = self._read_state(sequence.state_slot) if sequence.start else bytes(WIDTH)
                for token in tokens:
                    state = advance(state, token)
                self._write_state(sequence.state_slot, state)
        for layer in range(NUM_LAYERS):
            for i, sequence in enumerate(step.sequences):
                inputs[i] = self._run_layer(layer, sequence, inputs[i])
            if on_layer is not None:
                on_layer(layer)
            yield
        results = []
        for sequence, states in zip(step.sequences, inputs, strict=True):
            result = SequenceResult(sequence.sequence_id)
            if sequence.sampling is not None:
                seed = self._seeds[sequence.sequence_id]
                last = states[-1]
                if self._states is not None:
                    last = advance(last, self._read_state(sequence.state_slot))
                token_id = pick(last, seed, sequence.sampling.position)
                result.tokens = [SampledToken(token_id)]
            results.append(result)
        for copy in step.state_saves:
            self._write_state(copy.target, self._read_state(copy.source))
        return StepResult(results)

    def _read_state(self, slot: int) -> bytes:
        return bytes(self._states[slot * STATE_BYTES : (slot + 1) * STATE_BYTES])

    def _write_state(self, slot: int, state: bytes) -> None:
        self._states[slot * STATE_BYTES : (slot + 1) * STATE_BYTES] = state

    def _run_layer(self, layer, sequence, inputs):
        table, states = np.frombuffer(sequence.block_table, np.int32).tolist(), []
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
