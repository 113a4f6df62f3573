"""Token counts and log-probabilities of generations, in OpenAI's forms."""

from collections.abc import Sequence

from tandem.core.errors import UnsupportedError
from tandem.core.wire import PromptLogprobs, TokenLogprob
from tandem.models.tokenizing.detokenizer import Detokenizer
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.generation import Generation, Piece
from tandem.server.protocol.openai import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)

__all__ = [
    "TextOffsets",
    "add_completion_logprobs",
    "check_prompt_logprobs",
    "count_piece_usage",
    "count_usage",
    "make_chat_logprobs",
    "make_prompt_logprobs",
]


def count_usage(generations: Sequence[Generation], n: int = 1) -> Usage:
    """Return the token counts of generations that have ended; a prompt with ``n`` answers counts
    once.
    """
    return _make_usage(generations[::n], sum(generation.num_tokens for generation in generations))


def count_piece_usage(generation: Generation, piece: Piece) -> Usage:
    """Return the token counts of one generation up to a piece (new output) of it."""
    return _make_usage([generation], piece.num_tokens)


def _make_usage(firsts: Sequence[Generation], completion: int) -> Usage:
    prompt = sum(generation.prompt_len for generation in firsts)
    cached = sum(generation.cached_len for generation in firsts)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def make_chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return log-probabilities in the form of a chat choice or chunk."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(raw.decode("utf-8", "replace"), logprob, tuple(raw))

    content: list[ChatLogprob] = []
    for entry in logprobs:
        own = top(entry.token_id, entry.logprob)
        likeliest = [top(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, likeliest))
    return ChatLogprobs(content)


class TextOffsets:
    """Counts the characters of a choice's text before each of its tokens.

    The lengths of the tokens' own texts do not add up: several tokens may form one character, a
    decoder may drop a space, and a special token may have no text.

    Args:
        tokenizer: the model's tokenizer.
        detokenizer: new detokenizer, as the one that makes the text; owned.
        text: text that the tokens were made of, which has some of the special tokens; None: the
            tokens are new, and only the detokenizer tells.
        begin: number of characters before the first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, detokenizer: Detokenizer, text: str | None, begin: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._text = text
        self._num_chars = begin

    def advance(self, token_id: int) -> int:
        """Return the number of characters before the next token."""
        begin = self._num_chars
        if self._text is not None and token_id in self._tokenizer.special_ids:
            name = self._tokenizer.token_name(token_id)
            self._num_chars += len(name) * self._text.startswith(name, begin)
        else:
            self._num_chars += len(self._detokenizer.feed([token_id]))
        return begin


def add_completion_logprobs(
    target: CompletionLogprobs,
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: TextOffsets,
    num_top: int,
) -> None:
    """Append tokens with log-probabilities to the parallel lists of a completion.

    Args:
        target: lists to append to.
        tokenizer: spells the tokens.
        logprobs: log-probabilities; None for a token without one, the first of a prompt.
        token_ids: ids of the tokens, as many as ``logprobs``.
        offsets: count of the characters before each of them.
        num_top: number of likeliest tokens that were asked for; ``logprobs`` may have more.
    """
    for entry, token_id in zip(logprobs, token_ids, strict=True):
        text = tokenizer.token_text(token_id)
        target.tokens.append(text)
        target.text_offset.append(offsets.advance(token_id))
        if entry is None:
            target.token_logprobs.append(None)
            target.top_logprobs.append(None)
            continue
        target.token_logprobs.append(entry.logprob)
        # The chosen token is always among the alternatives, as in OpenAI's answers. Several tokens
        # may have the same text (pieces of a character); the likeliest of them keeps the text,
        # since clients recognise greedy tokens by the highest log-probability.
        likeliest = {
            tokenizer.token_text(i): logprob for i, logprob in reversed(entry.top[:num_top])
        }
        likeliest[text] = max(entry.logprob, likeliest.get(text, entry.logprob))
        target.top_logprobs.append(likeliest)


def check_prompt_logprobs(num_top: int | None, *, is_stream: bool) -> None:
    """Check that vLLM's log-probabilities of a prompt are not asked for in a stream.

    Raises: UnsupportedError (they are; vLLM refuses this too).
    """
    if num_top is not None and is_stream:
        what = "prompt_logprobs come with a whole answer, not with a stream: set stream to false"
        raise UnsupportedError("server.prompt_logprobs", what, field="prompt_logprobs")


def make_prompt_logprobs(
    tokenizer: Tokenizer, packed: PromptLogprobs, num_top: int
) -> PromptLogprobList:
    """Return the log-probabilities of a prompt in vLLM's form.

    Args:
        tokenizer: spells the tokens.
        packed: log-probabilities; may have more likeliest tokens than were asked for.
        num_top: number of likeliest tokens that were asked for.
    """
    told: PromptLogprobList = []
    for entry in packed.unpack():
        if entry is None:
            told.append(None)
            continue
        ranks = {entry.token_id: entry.rank}
        ranks |= {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        asked = {entry.token_id: entry.logprob} | dict(entry.top[:num_top])
        told.append(
            {
                str(i): PromptLogprob(logprob, ranks[i], tokenizer.token_text(i))
                for i, logprob in asked.items()
            }
        )
    return told
