"""The documented examples of LangChain and Instructor: tools, streaming and structured output.

Method: a real server over the fake engine, which answers with texts as models write them. The
packages come with the extra `dev` and `make`; what is not installed is skipped by its name.
"""

import openai
import pytest
from pydantic import BaseModel, Field
from serving import KEYS


class User(BaseModel):
    """What Instructor's first example extracts."""

    name: str
    age: int


class GetWeather(BaseModel):
    """Get the current weather in a given location."""

    location: str = Field(description="The city and state, e.g. San Francisco, CA")


def get_grammar(live) -> str:
    return live.engine.requests[-1].sampling.grammar


@pytest.fixture
def llm(live):
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{live.url}/v1", api_key=KEYS[0], max_retries=0, timeout=20
    )


def test_langchain_invokes_and_streams(llm, say):
    say("J'adore la programmation.")
    messages = [
        ("system", "You are a helpful translator. Translate the user sentence to French."),
        ("human", "I love programming."),
    ]
    reply = llm.invoke(messages)
    assert reply.content == "J'adore la programmation."
    assert reply.usage_metadata["output_tokens"] > 5
    chunks = list(llm.stream(messages))
    assert len(chunks) > 5
    assert "".join(chunk.content for chunk in chunks) == reply.content


def test_langchain_binds_tools(llm, say):
    say(name="GetWeather", arguments={"location": "San Francisco, CA"})
    bound = llm.bind_tools([GetWeather])
    reply = bound.invoke("what is the weather like in San Francisco")
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("GetWeather", {"location": "San Francisco, CA"})
    streamed = None
    for chunk in bound.stream("what is the weather like in San Francisco"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]


def test_langchain_structures_output(llm, say, live):
    for method in ("json_schema", "function_calling"):
        if method == "json_schema":
            say('{"name": "Ann", "age": 30}')
        else:
            say(name="User", arguments={"name": "Ann", "age": 30})
        found = llm.with_structured_output(User, method=method).invoke("Ann is 30 years old.")
        assert found == User(name="Ann", age=30)
        assert "age" in get_grammar(live)


def test_langchain_speaks_the_responses_api(llm, say):
    say(name="GetWeather", arguments={"location": "Bern"})
    told = type(llm)(
        model="tiny", base_url=str(llm.openai_api_base), api_key=KEYS[0], use_responses_api=True
    )
    reply = told.bind_tools([GetWeather]).invoke("weather in Bern?")
    assert [call["args"] for call in reply.tool_calls] == [{"location": "Bern"}]
    say("It rains.")
    chunks = list(told.stream("weather in Bern?"))
    assert "".join(str(chunk.text) for chunk in chunks) == "It rains."


def test_instructor_extracts(say, live):
    instructor = pytest.importorskip("instructor")
    ask = {
        "model": "tiny",
        "response_model": User,
        "messages": [{"role": "user", "content": "Extract: John is 25 years old."}],
        "max_retries": 0,
    }
    # Instructor returns classes of its own made of the model.
    expected = {"name": "John", "age": 25}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS[0], max_retries=0) as opened:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            if mode == instructor.Mode.TOOLS:
                say(name="User", arguments={"name": "John", "age": 25})
            else:
                say('{"name": "John", "age": 25}')
            client = instructor.from_openai(opened, mode=mode)
            assert client.chat.completions.create(**ask).model_dump() == expected
            assert "age" in get_grammar(live)
        client = instructor.from_openai(opened, mode=instructor.Mode.TOOLS)
        say(name="User", arguments={"name": "John", "age": 25})
        partial = list(client.chat.completions.create_partial(**ask))
        assert partial[-1].model_dump() == expected
