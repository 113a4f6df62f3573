"""Goal: who names no sampling values gets those of the model, then those that its kind of file is
made for; a limit of tokens that does not fit is cut.

Method: folders and a GGUF file of one tensor; a server over the fake engine, which keeps the values
that requests reached it with.
"""

import gguf
import numpy as np
import pytest
import requests

from tandem.core.errors import ConfigError
from tandem.server.defaults import (
    LLAMA_CPP,
    OLLAMA,
    DefaultSampling,
    SamplingDefaults,
    load_sampling_defaults,
)

USER = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/api/chat": {"model": "tiny", "messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "hi", "options": {"num_predict": 2}},
}
LIMITS = {
    "/v1/chat/completions": {"max_completion_tokens": 32000},
    "/v1/completions": {"max_tokens": 32000},
    "/v1/messages": {"max_tokens": 32000},
    "/v1/responses": {"max_output_tokens": 32000},
    "/generate": {"sampling_params": {"max_new_tokens": 32000}},
    "/api/chat": {"options": {"num_predict": 32000}},
    "/api/generate": {"options": {"num_predict": 32000}},
}


def write_gguf(path, **values):
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        writer.add_float32(f"general.sampling.{name}", value)
    writer.add_int32("general.sampling.top_k", 7) if values else None
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_recommends_by_its_file(tmp_path):
    nothing = SamplingDefaults()
    (tmp_path / "config.json").write_text("{}")
    assert load_sampling_defaults(tmp_path) == DefaultSampling(nothing, nothing, nothing)
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}')
    own = SamplingDefaults(temperature=0.6, top_k=20)
    assert load_sampling_defaults(tmp_path) == DefaultSampling(own, own, own)
    for wrong in ('{"temperature": -1}', "{", "[1]"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            load_sampling_defaults(tmp_path)


def test_a_gguf_file_without_values_gets_those_of_its_programs(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    expected = DefaultSampling(SamplingDefaults(), LLAMA_CPP, OLLAMA)
    assert load_sampling_defaults(path) == load_sampling_defaults(tmp_path) == expected
    other = tmp_path / "other.gguf"
    write_gguf(other, temp=0.25, penalty_repeat=1.5)
    own = SamplingDefaults(temperature=0.25, top_k=7, repetition_penalty=1.5)
    chat = SamplingDefaults(
        temperature=0.25, top_k=7, top_p=0.95, min_p=0.05, repetition_penalty=1.5
    )
    ollama = SamplingDefaults(temperature=0.25, top_k=7, top_p=0.9, repetition_penalty=1.5)
    assert load_sampling_defaults(other) == DefaultSampling(own, chat, ollama)
    write_gguf(other, temp=-1.0)
    with pytest.raises(ConfigError, match=r"other\.gguf.*temperature"):
        load_sampling_defaults(other)


def test_each_kind_of_request_has_its_values(shared):
    kinds = DefaultSampling(
        *(SamplingDefaults(temperature=value, top_p=0.5) for value in (0.25, 0.5, 0.75))
    )
    context = shared.app.state.context
    before, context.defaults = context.defaults, kinds
    try:
        found = {}
        for path, body in PATHS.items():
            assert shared.post(path, body).status_code == 200, path
            sampling = shared.engine.requests[-1].sampling
            assert (sampling.top_p, sampling.min_p) == (0.5, 0.0)
            found[path] = sampling.temperature
        assert found == dict.fromkeys(PATHS, 0.5) | {
            "/generate": 0.25,
            "/api/chat": 0.75,
            "/api/generate": 0.75,
        }
        for more in ({"logprobs": 1}, {"prompt_logprobs": 0}, {"temperature": 0}):
            shared.post("/v1/completions", PATHS["/v1/completions"] | more)
            expected = more.get("temperature", 0.25)
            assert shared.engine.requests[-1].sampling.temperature == expected
        (card,) = requests.get(f"{shared.url}/v1/models", timeout=60).json()["data"]
        assert card["default_sampling"] == {"temperature": 0.5, "top_p": 0.5}
        shown = shared.post("/api/show", {"model": "tiny"}).json()
        assert "temperature 0.75" in shown["parameters"]
    finally:
        context.defaults = before


def test_a_limit_beyond_the_context_is_cut(shared):
    for path, more in LIMITS.items():
        body = {**PATHS[path], **more}
        body.pop("max_tokens", None) if path == "/v1/chat/completions" else None
        assert shared.post(path, body).status_code == 200, path
        asked = shared.engine.requests[-1]
        assert len(asked.prompt_ids) + asked.sampling.max_tokens == 256, path


def test_a_setting_refuses_what_does_not_fit_except_in_ollama_s_own_api(serve):
    live = serve(cut_max_tokens=False)
    for path, more in LIMITS.items():
        if path.startswith("/api/"):
            assert live.post(path, {**PATHS[path], **more}).status_code == 200
            continue
        body = {**PATHS[path], **more}
        body.pop("max_tokens", None) if path == "/v1/chat/completions" else None
        reply = live.post(path, body)
        assert reply.status_code == 400, path
        assert "32000" in reply.text, path
        assert "256" in reply.text, path
