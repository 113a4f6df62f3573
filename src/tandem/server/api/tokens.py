"""The endpoints POST /tokenize and /detokenize."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError
from tandem.server.api.prompts import read_prompts
from tandem.server.context import ServerContext
from tandem.server.protocol.openai import DetokenizeRequest, TokenizeRequest
from tandem.server.protocol.status import DetokenizeReply, TokenizeReply

__all__ = ["detokenize", "tokenize"]

T = TypeVar("T")
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode


async def tokenize(context: ServerContext, http: Request) -> Response:
    """Return the token ids of one text, of several texts, or of a conversation."""
    return await _answer(context, http, _tokenize_decoder, _tokenize)


async def detokenize(context: ServerContext, http: Request) -> Response:
    """Return the text of token ids, or the texts of several lists of them."""
    return await _answer(context, http, _detokenize_decoder, _detokenize)


async def _answer(
    context: ServerContext,
    http: Request,
    decoder: msgspec.json.Decoder[T],
    work: Callable[[ServerContext, T], msgspec.Struct],
) -> Response:
    origin = context.note_arrival(http)
    request = await context.read_request(http, decoder)
    document = await context.prepare(http, origin, None, lambda: _encode(work(context, request)))
    return Response(document, media_type="application/json")


def _tokenize(context: ServerContext, request: TokenizeRequest) -> TokenizeReply:
    context.find_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ConfigError(
            "server.tokenize", "send either prompt or messages, not both or none", field="prompt"
        )
    adds_special = request.add_special_tokens is not False
    if request.messages is not None:
        text = context.encoder.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            arguments=request.chat_template_kwargs,
            tools=request.tools if request.tools is not None else (),
        )
        # Chat templates write the special tokens into their text, so the tokenizer adds none unless
        # the request asks for it.
        prompts, is_list, adds_special = [text], False, request.add_special_tokens is True
    else:
        is_list = isinstance(request.prompt, list)
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        assert prompts is not None
    ids = context.encoder.encode(
        prompts, field="prompt", add_special_tokens=adds_special, max_model_len=None
    )
    counts = [len(each) for each in ids]
    info = context.engine.info
    names = context.encoder.tokenizer.token_name
    strings = [[names(i) for i in each] for each in ids] if request.return_token_strs else None
    return TokenizeReply(
        tokens=ids if is_list else ids[0],
        count=counts if is_list else counts[0],
        max_model_len=info.max_model_len if info is not None else None,
        token_strs=strings if is_list or strings is None else strings[0],
    )


def _detokenize(context: ServerContext, request: DetokenizeRequest) -> DetokenizeReply:
    context.find_model(request.model)
    tokenizer = context.encoder.tokenizer
    if not request.tokens:
        return DetokenizeReply("", "")
    sequences, is_list = read_prompts(request.tokens, tokenizer.vocab_size, "tokens")
    texts: list[str] = []
    for sequence in sequences:
        if isinstance(sequence, str):
            raise ConfigError("server.detokenize", "tokens holds text", field="tokens")
        skip = request.skip_special_tokens is True
        texts.append(tokenizer.decode(sequence, skip_special_tokens=skip))
    text = texts if is_list else texts[0]
    return DetokenizeReply(text, text)
