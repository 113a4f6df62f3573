"""Types that the official clients' requests nest: parts of contents, items, tools and choices.

``tools/page/api.py`` writes the page of them, and a test sends an example of each to a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NESTED_TYPES", "NestedTypes"]

_PROVIDER = "runs at the provider; it is left out of the list of tools, so that nothing calls it"
_PROVIDERS_CALL = "of a tool that runs at the provider; it is left out of the conversation"
_TEXT = "only text is supported"
_OWN_TOOL = "its schema is the provider's own; it is left out: declare it with an input_schema"
_OWN_TYPES = (
    *("bash_20250124", "memory_20250818", "text_editor_20250124", "text_editor_20250429"),
    "text_editor_20250728",
)
_TOOL_TYPES = (
    *("code_execution_20250522", "code_execution_20250825"),
    *("code_execution_20260120", "code_execution_20260521"),
    *("web_search_20250305", "web_fetch_20250910", "web_search_20260209"),
    *("web_fetch_20260209", "web_fetch_20260309", "web_search_20260318", "web_fetch_20260318"),
    *("tool_search_tool_bm25_20251119", "tool_search_tool_regex_20251119"),
    *("tool_search_tool_bm25", "tool_search_tool_regex"),
)


@dataclass(frozen=True, slots=True)
class NestedTypes:
    """The types that may stand at one place of a request."""

    place: str
    """Field, with its endpoint."""
    sdk_type: str
    """Name of the client's union, as module and name."""
    served: frozenset[str]
    """Types, by what their field ``key`` says."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Reason by type."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reason by type."""
    key: str = "type"

    def find_answer(self, name: str) -> str:
        """Return what becomes of a type; empty if nobody has decided."""
        if name in self.served:
            return "served"
        if name in self.ignored:
            return f"ignored: {self.ignored[name]}"
        return f"refused: {self.refused[name]}" if name in self.refused else ""


NESTED_TYPES = (
    NestedTypes(
        "messages of POST /v1/chat/completions",
        "openai.types.chat:ChatCompletionMessageParam",
        frozenset({"developer", "system", "user", "assistant", "tool"}),
        refused={"function": "functions have become tools"},
        key="role",
    ),
    NestedTypes(
        "contents of messages of POST /v1/chat/completions",
        "openai.types.chat:ChatCompletionContentPartParam",
        frozenset({"text"}),
        refused=dict.fromkeys(("image_url", "input_audio", "file"), _TEXT),
    ),
    NestedTypes(
        "tools of POST /v1/chat/completions",
        "openai.types.chat:ChatCompletionToolUnionParam",
        frozenset({"function"}),
        refused={"custom": "its input is a text: declare a function, or use /v1/responses"},
    ),
    NestedTypes(
        "tool_choice of POST /v1/chat/completions",
        "openai.types.chat:ChatCompletionToolChoiceOptionParam",
        frozenset({"none", "auto", "required", "function"}),
        refused={
            "custom": "no custom tool is served",
            "allowed_tools": "list under tools those that may be called",
        },
    ),
    NestedTypes(
        "response_format of POST /v1/chat/completions",
        "openai.types.chat.completion_create_params:ResponseFormat",
        frozenset({"text", "json_object", "json_schema"}),
    ),
    NestedTypes(
        "input of POST /v1/responses",
        "openai.types.responses.response_input_item_param:ResponseInputItemParam",
        frozenset(
            {
                *("message", "reasoning", "function_call", "function_call_output"),
                *("custom_tool_call", "custom_tool_call_output"),
            }
        ),
        ignored=dict.fromkeys(
            (
                *("code_interpreter_call", "file_search_call", "image_generation_call"),
                *("computer_call", "local_shell_call", "local_shell_call_output", "mcp_call"),
                *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools"),
                "web_search_call",
            ),
            _PROVIDERS_CALL,
        ),
        refused={
            "additional_tools": "list the tools under tools",
            "item_reference": "use previous_response_id",
            "computer_call_output": "its output is an image",
            **dict.fromkeys(
                (
                    *("apply_patch_call", "apply_patch_call_output", "compaction"),
                    *("compaction_trigger", "configuration_update", "program", "program_output"),
                    *("shell_call", "shell_call_output", "tool_search_call", "tool_search_output"),
                ),
                "messages, reasoning and tools alone are known",
            ),
        },
    ),
    NestedTypes(
        "contents of messages of POST /v1/responses",
        "openai.types.responses:ResponseInputContentParam",
        frozenset({"input_text"}),
        refused=dict.fromkeys(("input_image", "input_file"), _TEXT),
    ),
    NestedTypes(
        "tools of POST /v1/responses",
        "openai.types.responses.tool_param:ToolParam",
        frozenset({"function", "custom"}),
        ignored=dict.fromkeys(
            (
                *("file_search", "computer", "computer_use_preview", "web_search", "mcp"),
                *("code_interpreter", "programmatic_tool_calling", "image_generation"),
                *("local_shell", "shell", "namespace", "tool_search", "web_search_preview"),
                *("web_search_2025_08_26", "web_search_preview_2025_03_11", "apply_patch"),
            ),
            _PROVIDER,
        ),
    ),
    NestedTypes(
        "tool_choice of POST /v1/responses",
        "openai.types.responses.response_create_params:ToolChoice",
        frozenset({"none", "auto", "required", "function", "custom", "allowed_tools"}),
        refused=dict.fromkeys(
            (
                *("file_search", "web_search_preview", "computer", "computer_use_preview"),
                *("computer_use", "web_search_preview_2025_03_11", "image_generation"),
                *("code_interpreter", "mcp", "programmatic_tool_calling", "apply_patch", "shell"),
            ),
            "function, custom and allowed_tools are known",
        ),
    ),
    NestedTypes(
        "text.format of POST /v1/responses",
        "openai.types.responses.response_format_text_config_param:ResponseFormatTextConfigParam",
        frozenset({"text", "json_object", "json_schema"}),
    ),
    NestedTypes(
        "contents of messages of POST /v1/messages",
        "anthropic.types:ContentBlockParam",
        frozenset({"text", "thinking", "tool_use", "tool_result"}),
        ignored={"redacted_thinking": "only the provider can read it"},
        refused=dict.fromkeys(
            (
                *("image", "document", "search_result", "server_tool_use", "container_upload"),
                *("web_search_tool_result", "web_fetch_tool_result"),
                *("code_execution_tool_result", "bash_code_execution_tool_result"),
                *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
            ),
            "text and tools alone are supported",
        ),
    ),
    NestedTypes(
        "tools of POST /v1/messages",
        "anthropic.types:ToolUnionParam",
        frozenset({"custom"}),
        ignored=dict.fromkeys(_TOOL_TYPES, _PROVIDER) | dict.fromkeys(_OWN_TYPES, _OWN_TOOL),
        refused=dict.fromkeys(
            ("browser_toolset_20260801", "computer_toolset_20260801"),
            "a tool has a name; these stand for many that run at the provider",
        ),
    ),
    NestedTypes(
        "tool_choice of POST /v1/messages",
        "anthropic.types:ToolChoiceParam",
        frozenset({"auto", "any", "tool", "none"}),
    ),
    NestedTypes(
        "thinking of POST /v1/messages",
        "anthropic.types:ThinkingConfigParam",
        frozenset({"enabled", "disabled", "adaptive", "between_tools"}),
    ),
)
