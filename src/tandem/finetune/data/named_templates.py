"""Texts of LLaMA-Factory's named templates.

A recipe that names a template must learn the same tokens here as in LLaMA-Factory. Texts are those
of LLaMA-Factory at commit 00577a85775a; ``LATER_NAMES`` are templates without a text here, which
are refused.
"""

from dataclasses import dataclass

__all__ = ["BOS", "CONTENT", "EOS", "LATER_NAMES", "NAMED_TEXTS", "NamedText", "Part"]

CONTENT = "{}"
"""Placeholder of the message in a part of a template."""


@dataclass(frozen=True, slots=True)
class EndToken:
    """A part of a template that stands for the tokenizer's own token for the beginning or the end
    of a text.
    """

    is_end: bool


BOS, EOS = EndToken(is_end=False), EndToken(is_end=True)
Part = str | EndToken
"""A part of a template, tokenized separately from its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedText:
    """The text that a named template of LLaMA-Factory writes around questions, answers and the
    system message.
    """

    user: tuple[Part, ...]
    """Parts around a question, up to the beginning of the answer."""
    assistant: tuple[Part, ...] = (CONTENT, EOS)
    system: tuple[Part, ...] = (CONTENT,)
    prefix: tuple[Part, ...] = ()
    default_system: str = ""
    tokens: tuple[str, ...] = ()
    """Strings in the template that the tokenizer must have as single tokens."""
    has_late_end: bool = False
    """True if the end token is written only after the whole conversation; the end of an earlier
    answer is learned from the beginning of the next question.
    """
    is_system_asked: bool = False
    """True if the system message is put at the beginning of the first question."""
    thought: tuple[str, str] | None = None
    """Strings that begin and end reasoning, written around an empty text if an answer has none;
    None for a template without reasoning.
    """


THOUGHT = ("<think>\n", "\n</think>\n\n")
HELPFUL = "You are a helpful assistant."
TALK = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def _make_chatml(
    *, system: str = "", thought: tuple[str, str] | None = None, prefix: tuple[Part, ...] = ()
) -> NamedText:
    return NamedText(
        prefix=prefix,
        system=("<|im_start|>system\n{}<|im_end|>\n",),
        user=("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",),
        assistant=("{}<|im_end|>\n",),
        default_system=system,
        tokens=("<|im_start|>", "<|im_end|>"),
        thought=thought,
    )


def _make_gemma(*, has_late_end: bool = False) -> NamedText:
    return NamedText(
        prefix=(BOS,),
        system=("{}\n\n",),
        user=("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",),
        assistant=("{}<end_of_turn>\n",),
        tokens=("<start_of_turn>", "<end_of_turn>"),
        has_late_end=has_late_end,
        is_system_asked=True,
    )


def _make_glm(thought: tuple[str, str] | None = None) -> NamedText:
    return NamedText(
        prefix=("[gMASK]<sop>",),
        system=("<|system|>\n{}",),
        user=("<|user|>\n{}<|assistant|>",),
        assistant=("\n{}",),
        tokens=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        has_late_end=True,
        thought=thought,
    )


def _make_mistral(system: str, *, is_system_asked: bool) -> NamedText:
    return NamedText(
        prefix=(BOS,), system=(system,), user=("[INST]{}[/INST]",), is_system_asked=is_system_asked
    )


def _make_granite(system: str = "") -> NamedText:
    return NamedText(
        system=("<|start_of_role|>system<|end_of_role|>{}<|end_of_text|>\n",),
        user=(
            "<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n"
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        assistant=("{}<|end_of_text|>\n",),
        default_system=system,
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    )


def _make_llama(begin: str, end: str, stop: str) -> NamedText:
    return NamedText(
        prefix=(BOS,),
        system=(f"{begin}system{end}\n\n{{}}{stop}",),
        user=(f"{begin}user{end}\n\n{{}}{stop}{begin}assistant{end}\n\n",),
        assistant=(f"{{}}{stop}",),
        tokens=(begin, end, stop),
    )


NAMED_TEXTS = {
    "alpaca": NamedText(
        user=("### Instruction:\n{}\n\n### Response:\n",),
        assistant=(CONTENT, EOS, "\n\n"),
        default_system=(
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.\n\n"
        ),
    ),
    "baichuan2": NamedText(
        user=("<reserved_106>{}<reserved_107>",),
        tokens=("<reserved_106>", "<reserved_107>"),
        assistant=(CONTENT,),
        has_late_end=True,
    ),
    "chatml": _make_chatml(),
    "deepseek": NamedText(prefix=(BOS,), system=("{}\n\n",), user=("User: {}\n\nAssistant:",)),
    "deepseek3": NamedText(
        prefix=(BOS,),
        user=("<｜User｜>{}<｜Assistant｜>",),
        tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    "deepseekr1": NamedText(
        prefix=(BOS,),
        user=("<｜User｜>{}<｜Assistant｜>",),
        tokens=("<｜User｜>", "<｜Assistant｜>"),
        thought=THOUGHT,
    ),
    "default": NamedText(
        system=("System: {}", EOS, "\n"),
        user=("Human: {}", EOS, "\nAssistant:"),
        assistant=(CONTENT, EOS, "\n"),
    ),
    "empty": NamedText(user=(CONTENT,), assistant=(CONTENT,)),
    "falcon": NamedText(user=("User: {}\nFalcon:",), assistant=("{}\n",), has_late_end=True),
    "gemma": _make_gemma(),
    "gemma2": _make_gemma(has_late_end=True),
    "gemma3": _make_gemma(),
    "glm4": _make_glm(),
    "glm4_moe": _make_glm(THOUGHT),
    "granite3": _make_granite(),
    "granite4": _make_granite("You are Granite, developed by IBM. You are a helpful AI assistant."),
    "llama2": NamedText(
        system=("<<SYS>>\n{}\n<</SYS>>\n\n",),
        user=(BOS, "[INST] {} [/INST]"),
        is_system_asked=True,
    ),
    "llama3": _make_llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama4": _make_llama("<|header_start|>", "<|header_end|>", "<|eot|>"),
    "ministral": _make_mistral("{}\n\n", is_system_asked=True),
    "mistral": NamedText(
        prefix=(BOS,),
        system=("{}\n\n",),
        user=("[INST] {}[/INST]",),
        assistant=(" {}", EOS),
        is_system_asked=True,
    ),
    "mistral_small": _make_mistral("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", is_system_asked=False),
    "moonlight": NamedText(
        system=("<|im_system|>system<|im_middle|>{}<|im_end|>",),
        user=("<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>",),
        assistant=("{}<|im_end|>",),
        default_system="You are a helpful assistant provided by Moonshot-AI.",
        tokens=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    ),
    "olmo": NamedText(prefix=(EOS,), user=("<|user|>\n{}<|assistant|>\n",)),
    "orion": NamedText(prefix=(BOS,), user=("Human: {}\n\nAssistant: ", EOS)),
    "phi": NamedText(
        system=("<|system|>\n{}<|end|>\n",),
        user=("<|user|>\n{}<|end|>\n<|assistant|>\n",),
        assistant=("{}<|end|>\n",),
        tokens=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "phi4": NamedText(
        system=("<|im_start|>system<|im_sep|>{}<|im_end|>",),
        user=("<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",),
        assistant=("{}<|im_end|>",),
        tokens=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    ),
    "qwen": _make_chatml(
        system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    ),
    "qwen2_vl": _make_chatml(system=HELPFUL),
    "qwen3": _make_chatml(thought=THOUGHT),
    "qwen3_nothink": _make_chatml(),
    "smollm": _make_chatml(),
    "smollm2": _make_chatml(
        system="You are a helpful AI assistant named SmolLM, trained by Hugging Face."
    ),
    "solar": NamedText(
        system=("### System:\n{}\n\n",),
        user=("### User:\n{}\n\n### Assistant:\n",),
        assistant=(CONTENT,),
        has_late_end=True,
    ),
    "vicuna": NamedText(user=("USER: {} ASSISTANT:",), default_system=TALK),
    "yi": _make_chatml(),
    "zephyr": NamedText(
        system=("<|system|>\n{}", EOS),
        user=("<|user|>\n{}", EOS, "<|assistant|>\n"),
        default_system="You are Zephyr, a helpful assistant.",
    ),
}
"""Formats of messages, by LLaMA-Factory's names of the templates."""

LATER_NAMES = frozenset(
    [
        "aquila",
        "atom",
        "baichuan",
        "bailing",
        "bailing_v2",
        "belle",
        "bluelm",
        "breeze",
        "chatglm2",
        "chatglm3",
        "chatml_de",
        "codegeex2",
        "codegeex4",
        "cohere",
        "cpm",
        "cpm3",
        "cpm4",
        "dbrx",
        "deepseekcoder",
        "dots_ocr",
        "ernie",
        "ernie_nothink",
        "ernie_vl",
        "exaone",
        "falcon_h1",
        "fewshot",
        "gemma3n",
        "gemma4",
        "glm4_5v",
        "glm4v",
        "glmz1",
        "gpt_oss",
        "granite3_vision",
        "hunyuan",
        "index",
        "intern",
        "intern2",
        "intern_s1",
        "intern_vl",
        "keye_vl",
        "kimi_vl",
        "llama2_zh",
        "llava",
        "llava_next",
        "marco",
        "mimo",
        "mimo_v2",
        "mimo_vl",
        "minicpm_o",
        "minicpm_v",
        "minimax1",
        "minimax2",
        "ministral3",
        "mllama",
        "openchat",
        "openchat-3.6",
        "opencoder",
        "paligemma",
        "paligemma_chat",
        "phi_small",
        "pixtral",
        "qwen2_audio",
        "qwen2_omni",
        "qwen3_omni",
        "qwen3_omni_nothink",
        "qwen3_5",
        "qwen3_5_nothink",
        "qwen3_vl",
        "qwen3_vl_nothink",
        "sailor",
        "seed_coder",
        "seed_oss",
        "skywork_o1",
        "starchat",
        "telechat",
        "telechat2",
        "video_llava",
        "xuanyuan",
        "xverse",
        "yayi",
        "yi_vl",
        "yuan",
        "ziya",
    ]
)
"""Names of LLaMA-Factory's templates whose texts are not included here."""
