"""The child process that converts and compiles clients' grammars; run as a file of its own.

A grammar of a hundred kilobytes may take minutes and gigabytes. This process limits its memory;
its parent kills it at the deadline. The first frame is the model's ``Vocabulary`` in msgpack. Each
further frame is the kind of a grammar, as of ``write_grammar``, and its text: it is converted to
llguidance's form. A text of kind "" has that form and is compiled.
"""

import sys

import msgspec

from tandem.models.tokenizing.grammars import (
    TokenTable,
    Vocabulary,
    find_fault,
    make_matcher,
    make_token_table,
    write_grammar,
)
from tandem.server.text.worker_frames import answer, limit_memory, read_frame, write_answer

MAX_MEMORY_BYTES = 1 << 31
"""Limit of the address space in bytes. The table of a large vocabulary takes an eighth of it."""


def compile_grammar(table: TokenTable, text: str) -> str:
    """Return nothing if a grammar compiles.

    Its first mask is computed too, which may take longer than all else: an instance computes it
    before it begins, and cannot end that. What it is does not matter here.

    Raises: ValueError (it does not compile; with the reason).
    """
    if fault := find_fault(table, text):
        raise ValueError(fault)
    make_matcher(table, text).compute_bitmask()
    return ""


def main() -> None:
    """Make the table of the vocabulary, then answer one frame after the other."""
    limit_memory(MAX_MEMORY_BYTES)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tables: list[TokenTable] = []

    def make_table(first: bytes) -> str:
        tables.append(make_token_table(msgspec.msgpack.decode(first, type=Vocabulary)))
        return ""

    if (first := read_frame(source)) is None:
        return
    write_answer(target, answer(lambda: make_table(first)))
    while tables and (frame := read_frame(source)) is not None:
        kind, text = msgspec.msgpack.decode(frame, type=tuple[str, str])
        if kind:
            reply = answer(lambda k=kind, t=text: write_grammar(k, t))
        else:
            reply = answer(lambda t=text: compile_grammar(tables[0], t))
        write_answer(target, reply)


if __name__ == "__main__":
    main()
