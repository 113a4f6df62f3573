"""llama.cpp's library by ctypes, as far as recordings need it.

It is that of the npm package ``@node-llama-cpp/linux-x64``. Structs that are passed by value are
larger here than in any release: a call reads the first bytes.
"""

import base64
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, VERSION = "@node-llama-cpp/linux-x64", "3.22.1"
SHA512 = "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg=="
BLOB_BYTES = 1024
VOCAB_ONLY = 72
"""Offset of the first flag in the parameters of a model."""


class Blob(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * (BLOB_BYTES // 4))]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def fetch_library() -> Path:
    """Return the folder of the library with its backends; npm fetches the package once.

    Raises: FileNotFoundError (no such library for this machine, or no npm);
    subprocess.SubprocessError (npm does not get the package).
    """
    folder = Path("~/.cache/tandem/llama-cpp").expanduser() / VERSION
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise FileNotFoundError(f"{PACKAGE} needs npm, and Linux on x86-64")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", scratch]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        (archive,) = Path(scratch).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert digest == SHA512, f"{archive.name} is another than that of the record: {digest}"
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (Path(scratch) / "package/bins/linux-x64").rename(folder)
    return folder


class Vocabulary:
    """The vocabulary of a GGUF file.

    Args:
        folder: folder of the library, with those of its backends.
        path: the file.

    Raises: ValueError (the library refuses the file).
    """

    is_vocabulary_only = True

    def __init__(self, folder: Path, path: Path) -> None:
        self._lib = lib = _load(folder)
        params = lib.llama_model_default_params()
        if self.is_vocabulary_only:
            flags = ctypes.cast(ctypes.byref(params), ctypes.POINTER(ctypes.c_uint8))
            # vocab_only, check_tensors and use_extra_bufts, by their defaults.
            assert flags[VOCAB_ONLY : VOCAB_ONLY + 3] == [0, 0, 1], "another layout of the struct"
            flags[VOCAB_ONLY] = 1
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(path)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        adds = lib.llama_vocab_get_add_bos(self._vocab)
        self.begin = [lib.llama_vocab_bos(self._vocab)] if adds else []
        """The token that begins each text, if the file says so."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with added tokens in it, and none of its own."""
        data = text.encode()
        found = (ctypes.c_int32 * (len(data) + 16))()
        count = self._lib.llama_tokenize(
            self._vocab, data, len(data), found, len(found), False, True
        )
        assert count >= 0
        return list(found[:count])

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_model_free(self._model)


class LlamaCpp(Vocabulary):
    """One GGUF file.

    Args:
        folder: folder of the library, with those of its backends.
        path: the file.
        context_len: tokens of the one sequence.
    """

    is_vocabulary_only = False

    def __init__(self, folder: Path, path: Path, context_len: int) -> None:
        super().__init__(folder, path)
        params = self._lib.llama_context_default_params()
        for word in range(3):  # n_ctx, n_batch, n_ubatch
            params.words[word] = context_len
        # n_threads and n_threads_batch, by their defaults; more of them spin on a busy machine.
        assert list(params.words[7:9]) == [4, 4], "another layout of the struct"
        params.words[7] = params.words[8] = 1
        self._context = self._lib.llama_init_from_model(self._model, params)
        assert self._context
        self._batch = self._lib.llama_batch_init(context_len, 0, 1)

    def score(self, ids: list[int]) -> np.ndarray:
        """Return the logits after each token, float32 [tokens, vocabulary]."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        batch = self._batch
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(ids)
        assert self._lib.llama_decode(self._context, batch) == 0
        rows = [self._lib.llama_get_logits_ith(self._context, i) for i in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)).copy() for row in rows])


@functools.cache
def _load(folder: Path) -> Any:
    for name in ("libggml-base.so*", "libggml.*so*", "libggml.so*"):
        for each in sorted(folder.glob(name)):
            ggml = ctypes.CDLL(str(each), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    (library,) = sorted(folder.glob("libllama.*so*"))
    lib = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("llama_backend_init", None, []),
        ("llama_model_default_params", Blob, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Blob]),
        ("llama_model_free", None, [pointer]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
        ("llama_vocab_get_add_bos", ctypes.c_bool, [pointer]),
        ("llama_vocab_bos", ctypes.c_int32, [pointer]),
        ("llama_context_default_params", Blob, []),
        ("llama_init_from_model", pointer, [pointer, Blob]),
        ("llama_batch_init", Batch, [ctypes.c_int32] * 3),
        ("llama_decode", ctypes.c_int32, [pointer, Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        (
            "llama_tokenize",
            ctypes.c_int32,
            [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32]
            + [ctypes.c_bool] * 2,
        ),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_backend_init()
    return lib
