"""llama.cpp or its fork ik_llama.cpp (by argument) as a peer; imports no module of Tandem.

Run by the peer's own interpreter (see ``processes``). Writes a checkpoint as GGUF (``gguf_rival``)
and runs it through the C interface that both libraries have: greedy decoding of several sequences.
The fork repacks the weights when it loads them.
"""

import ctypes
import sys
import time

import numpy as np
from gguf_rival import write_gguf
from rival_loop import answer_calls

IS_FORK = sys.argv[1] == "ik_llama.cpp"
if IS_FORK:
    from ik_llama_cpp import _ctypes_api as llama_cpp

    # The fork's Python binding lacks this function, which its library has.
    llama_cpp.llama_print_system_info = llama_cpp._lib.llama_print_system_info
else:
    import llama_cpp

DECODE_STEPS = 8
ISAS = {
    "AMX_INT8": "amx",
    "AVX512_BF16": "avx512_bf16",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512": "avx512_bw",
    "AVX2": "avx2",
}
"""Instruction sets as llama.cpp reports them, widest first, with our names for them."""


def find_isa():
    """Return the widest instruction set that the library was built for."""
    describe = llama_cpp.llama_print_system_info
    if IS_FORK:
        describe.restype = ctypes.c_char_p
    text = describe().decode()
    return next((isa for name, isa in ISAS.items() if f"{name} = 1" in text), "plain")


class Model:
    """A loaded GGUF file with one context for all measurements."""

    def __init__(self, path, threads, context_len, num_sequences):
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        if IS_FORK:
            params.repack_tensors, params.use_mmap = True, False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, path
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context_len * num_sequences
        params.n_batch = context_len * num_sequences
        params.n_ubatch = 512
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        if IS_FORK:
            # ik_llama.cpp's documentation advises these settings for latent attention on a CPU;
            # models without latent attention ignore mla_attn.
            params.mla_attn, params.flash_attn = 3, True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "no context"
        self.batch = llama_cpp.llama_batch_init(context_len * num_sequences, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def clear(self):
        if IS_FORK:
            llama_cpp.llama_kv_cache_clear(self.context)
        else:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def run(self, rows):
        """Run one batch of rows (token, position, sequence, whether logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        code = llama_cpp.llama_decode(self.context, batch)
        assert code == 0, code
        # Reading the logits waits until llama.cpp has finished the batch.
        self.logits(next(i for i, row in enumerate(rows) if row[3]))

    def logits(self, row):
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.vocab_size,))

    def prefill(self, prompts):
        """Return the milliseconds of a prefill, and the first token of each prompt."""
        self.clear()
        rows = [
            (token, i, sequence, i == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        begin = time.perf_counter()
        self.run(rows)
        elapsed = time.perf_counter() - begin
        last = [i for i, row in enumerate(rows) if row[3]]
        return elapsed * 1e3, [int(self.logits(i).argmax()) for i in last]

    def decode(self, prompts):
        """Return the milliseconds of a decode step, averaged over a few."""
        _, tokens = self.prefill(prompts)
        length = len(prompts[0])
        begin = time.perf_counter()
        for step in range(DECODE_STEPS):
            self.run([(t, length + step, sequence, True) for sequence, t in enumerate(tokens)])
            tokens = [int(self.logits(i).argmax()) for i in range(len(tokens))]
        return (time.perf_counter() - begin) / DECODE_STEPS * 1e3

    def turn(self, history, message):
        """Return the milliseconds to the first token after a message, with the history already
        computed.
        """
        self.clear()
        self.run([(token, i, 0, i == len(history) - 1) for i, token in enumerate(history)])
        answer = int(self.logits(len(history) - 1).argmax())
        tokens, first = [answer, *message], len(history)
        begin = time.perf_counter()
        self.run([(t, first + i, 0, i == len(tokens) - 1) for i, t in enumerate(tokens)])
        return (time.perf_counter() - begin) * 1e3

    def score(self, prompt):
        """Return the logits of every token of a prompt."""
        self.clear()
        self.run([(token, i, 0, True) for i, token in enumerate(prompt)])
        return [self.logits(i).tolist() for i in range(len(prompt))]


class Rival:
    """A child process driven over pipes: it writes a model, loads one, and measures."""

    def __init__(self):
        self.model = None

    def write_gguf(self, folder, path, kind):
        return write_gguf(folder, path, kind)

    def quantize(self, path, out, file_type):
        """Quantize a file with the library's own recipe; return the library's result code, 0 for
        success.
        """
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = file_type, 2
        return llama_cpp.llama_model_quantize(
            str(path).encode(), str(out).encode(), ctypes.byref(params)
        )

    def load(self, **arguments):
        """Load a model; return the instruction set that the library was built for."""
        self.model = Model(**arguments)
        return find_isa()

    def ping(self):
        """Answer a call, which shows that all imports are done."""

    def prefill(self, prompts):
        return self.model.prefill(prompts)[0]

    def decode(self, prompts):
        return self.model.decode(prompts)

    def turn(self, history, message):
        return self.model.turn(history, message)

    def score(self, prompt):
        return self.model.score(prompt)

    def first_token(self, path, threads, prompt):
        """Load a model and run a prompt; return the seconds this took, and the logits of the last
        token.
        """
        begin = time.perf_counter()
        self.model = Model(path, threads, context_len=128, num_sequences=1)
        self.model.clear()
        last = len(prompt) - 1
        self.model.run([(token, i, 0, i == last) for i, token in enumerate(prompt)])
        return time.perf_counter() - begin, self.model.logits(last).tolist()


if __name__ == "__main__":
    answer_calls(Rival)
