"""Tool calls in sampled text, read by SGLang's own parsers, so that a model's calls mean here what they mean served."""
from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from sao_megatron.errors import UserError

_MARKS = {"<arg_key>": "glm45", "<function=": "qwen3_coder", "<tool_call>": "qwen25", "[TOOL_CALLS]": "mistral",
          "<|tool_calls_section_begin|>": "kimi_k2", "<|start_header_id|>": "llama3"}
"""What a chat template shows of a format, and SGLang's name of its parser. (SGLang's own detection, which knows more,
needs packages that a CPU installation lacks.)"""


class ToolParser:
    """Reads the calls of one model's format. SGLang is imported at the first use: seconds."""

    def __init__(self, template: str, name: str | None = None):
        """`name` is one of SGLang's --tool-call-parser; None finds it by the chat template."""
        self._template, self._name = template, name

    @cached_property
    def name(self) -> str:
        """Raises UserError for one that SGLang does not have, and where none is given and the template is unknown."""
        from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
        found = self._name or next((name for mark, name in _MARKS.items() if mark in self._template), None)
        if found not in TOOL_CALL_PARSER_NAMES:
            raise UserError(f"tool_parser={found!r} reads no tool calls of this chat template: set the task's option "
                            f"tool_parser to one of SGLang's {', '.join(sorted(TOOL_CALL_PARSER_NAMES))}")
        return found

    def load(self) -> None:
        """Import what `parse` needs, so that this can happen in a thread."""
        from sglang.srt.function_call import function_call_parser  # noqa: F401

    def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """(text without its calls, [{"name", "arguments": dict}]) of calls to `tools` (OpenAI's form).

        Text whose calls cannot be read, or name no such tool, is what it is.
        """
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        parser = FunctionCallParser([Tool(**tool) for tool in tools], self.name)
        if not parser.has_tool_call(text):
            return text, []
        content, calls = parser.parse_non_stream(text)
        read = [{"name": call.name, "arguments": _arguments(call.parameters)} for call in calls]
        return (content, read) if read else (text, [])


def _arguments(text: str) -> dict[str, Any]:
    """Arguments that are no JSON object cannot be rendered by templates: {} then."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
