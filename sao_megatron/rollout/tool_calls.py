"""Tool calls in sampled text, read by SGLang's own parsers, so that a model's calls mean here what they mean served."""
from __future__ import annotations

import json
import logging
from functools import cached_property
from typing import Any

from sao_megatron.errors import UserError

log = logging.getLogger("tools")

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

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises ValueError for tools that are not in OpenAI's form. Imports what `parse` needs: seconds, once."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        FunctionCallParser(_tools(tools), self.name)

    def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """(text without its calls, [{"name", "arguments": dict}]) of calls to `tools` (OpenAI's form).

        Text whose calls cannot be read, name no such tool, or have arguments that are no JSON object, is what it is.
        """
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        parser = FunctionCallParser(_tools(tools), self.name)
        if not parser.has_tool_call(text):
            return text, []
        try:
            content, calls = parser.parse_non_stream(text)
            read = [{"name": call.name, "arguments": json.loads(call.parameters or "{}")} for call in calls]
        except Exception as error:  # SGLang's server reads on over whatever its parsers raise, too
            log.debug("unreadable tool call (%s): %.200r", error, text)
            return text, []
        if not read or not all(isinstance(call["arguments"], dict) for call in read):
            return text, []
        return content, read


def _tools(tools: list[dict[str, Any]]) -> list:
    from sglang.srt.entrypoints.openai.protocol import Tool
    return [Tool(**tool) for tool in tools]
