"""Goal: ``tandem serve model.gguf`` is all that a user types, and answers as the original does.

Method: the greedy answer to a chat must be, token by token, that of the folder of safetensors,
computed here in the same dtype. Slow: ``tests/cli/test_llm.py`` asks the same of ``LLM``, which
puts the same parts together.
"""

import pytest

from demo_file import MESSAGES, NUM_TOKENS, answer, make_folder, write_file


@pytest.mark.slow
def test_a_gguf_file_alone_is_served(tmp_path, monkeypatch, serve_demo):
    """Template, tokens, weights and end of text come from the one file."""
    folder = make_folder(tmp_path)
    prompt_tokens, wanted = answer(folder)
    monkeypatch.setenv("TANDEM_TEST_MODEL", str(write_file(folder)))
    with serve_demo("--model.dtype", "bfloat16") as server:
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
        given = server.client.post("/v1/chat/completions", json={"model": "demo", **body}).json()
    assert given["usage"]["prompt_tokens"] == prompt_tokens
    assert given["choices"][0]["message"]["content"] == wanted != ""
