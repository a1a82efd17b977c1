r"""The families of models, distinguished by their chat templates.

Each has a response template for Transformers' streaming parser, which separates reasoning, text and
calls. The content of a call is parsed separately (`arguments`), for these reasons: the parser emits
nothing before a call has ended; it cannot parse LFM2's calls, which are Python; strings of GLM,
Qwen3 Coder, MiniMax and Hunyuan are unquoted, so that only the tool's schema distinguishes "5" from
5 (the parser's own casts know no enums); DeepSeek V3.2 and Kimi K3 have types in an attribute,
which `xml-inline` does not support; MiniMax M3 nests tags.

A pattern must not have an optional end, such as `(?:\s*</tool_call>)?`: the parser would accept the
shorter match before the rest has arrived. So the text around calls is skipped separately.
"""

import re
from collections.abc import Sequence

from tandem.dialects.arguments import NAMESPACE
from tandem.dialects.dialect import (
    CALL,
    END_CALL,
    THINK,
    Dialect,
    WrittenCall,
    marked_calls,
    named_calls,
)

_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_NAMESPACE = re.escape(NAMESPACE)
_HARMONY_NAME = r"to=(?:functions\.)?(?P<name>[\w.-]+)"
_HARMONY_TYPE = r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"

HERMES = Dialect(
    name="hermes",
    marks=((CALL,),),
    calls=marked_calls(rf"\s*{CALL}", END_CALL),
    opening=CALL,
    written=WrittenCall(opening=CALL, closing=END_CALL, is_object=True),
    special=frozenset({CALL, THINK}),
)

FAMILIES: Sequence[Dialect] = (
    Dialect(
        name="harmony",  # gpt-oss
        marks=(("<|channel|>analysis",),),
        thoughts={
            "open_pattern": r"<\|channel\|>analysis\s*<\|message\|>",
            "close": "<|end|>",
            "content": "text",
            "repeats": True,
        },
        think="<|channel|>analysis<|message|>",
        calls=named_calls(
            rf"\s*{_HARMONY_NAME}\s*<\|channel\|>\w+{_HARMONY_TYPE}"
            rf"|<\|channel\|>\w+\s+{_HARMONY_NAME}{_HARMONY_TYPE}",
            r"<\|call\|>|<\|end\|>|<\|return\|>",
        ),
        skipped=r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)"
        + _HARMONY_TYPE
        + r"|<\|(?:end|return|call)\|>",
        answers_after="<|channel|>final<|message|>",
        special=frozenset({"<|channel|>"}),
    ),
    Dialect(
        name="gemma4",
        marks=(("<|tool_call>call:",),),
        think="<|channel>thought\n",
        end_think="<channel|>",
        calls=named_calls(
            r"\s*<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
            r"<tool_call\|>",
            content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        values="parsed",
        opening="<|tool_call>",
        skipped=r"<turn\|>|<\|tool_response>",
        special=frozenset({"<|tool_call>", "<|channel>"}),
    ),
    Dialect(
        name="deepseek-v3.2",  # and V4
        marks=(("｜DSML｜",),),
        calls=named_calls(
            r'\s*<｜DSML｜invoke name="(?P<name>[^"]+)">',
            r"</｜DSML｜invoke>",
        ),
        values="tagged",
        tag=r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<type>true|false)">'
        r"(?P<value>.*?)</｜DSML｜parameter>",
        around=r"\s*</?｜DSML｜(?:function_calls|tool_calls)>",
        special=frozenset({"｜DSML｜", THINK}),
    ),
    Dialect(
        name="deepseek-v3",  # R1, V3, V3.1
        marks=((_BEGIN,), ("<｜tool▁calls▁begin｜>",)),
        calls=named_calls(
            rf"\s*{_BEGIN}(?:function{_SEP}(?P<name>[^\n<]+)\n```json\n"
            rf"|(?!function{_SEP})(?P<name>[^\n<]+){_SEP})",
            rf"(?:\s*```)?\s*{_END}",
        ),
        opening=_BEGIN,
        tools_text="## Tools\nYou have access to the following tools:\n\n{tools}\n\n"
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n<｜tool▁calls▁begin｜>"
        f"{_BEGIN}tool_call_name{_SEP}tool_call_arguments{_END}"
        "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n- `tool_call_name` must be an "
        "exact match to one of the available tools\n- `tool_call_arguments` must be valid JSON "
        "that strictly follows the tool's Parameters JSON Schema",
        around=r"\s*<｜tool▁calls▁(?:begin|end)｜>",
        written=WrittenCall(
            opening=_BEGIN,
            after_name=_SEP,
            closing=_END,
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            unless=("```json",),
        ),
        special=frozenset({_BEGIN, THINK}),
    ),
    Dialect(
        name="kimi",
        marks=(("<|tool_call_begin|>",),),
        calls=named_calls(
            r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>",
            r"\s*<\|tool_call_end\|>",
        ),
        opening="<|tool_call_begin|>",
        around=r"\s*<\|tool_calls_section_(?:begin|end)\|>",
        written=WrittenCall(
            opening="<|tool_call_begin|>",
            before_name="functions.",
            is_numbered=True,
            after_name="<|tool_call_argument_begin|>",
            closing="<|tool_call_end|>",
            around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        special=frozenset({"<|tool_call_begin|>", THINK}),
    ),
    Dialect(
        name="kimi-k3",
        marks=(("<|open|>", "<|close|>", "<|sep|>"),),
        think="<|open|>think<|sep|>",
        end_think="<|close|>think<|sep|>",
        after_thought="<|open|>response<|sep|>",
        thinks_by="open_tag('think'",
        calls=named_calls(
            r'\s*<\|open\|>call tool="(?P<name>[^"]+)"[^<]*<\|sep\|>',
            r"<\|close\|>call<\|sep\|>",
        ),
        values="tagged",
        tag=r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<type>\w+)"<\|sep\|>'
        r"(?P<value>.*?)<\|close\|>argument<\|sep\|>",
        around=r"\s*<\|(?:open|close)\|>tools<\|sep\|>",
        skipped=r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>|<\|end_of_msg\|>",
        special=frozenset({"<|open|>", "<|close|>", "<|sep|>"}),
    ),
    Dialect(
        name="minimax-m3",
        marks=((NAMESPACE,),),
        think="<mm:think>",
        end_think="</mm:think>",
        calls=named_calls(
            rf'\s*{_NAMESPACE}<invoke name="(?P<name>[^"]+)">', rf"{_NAMESPACE}</invoke>"
        ),
        values="nested",
        around=rf"\s*{_NAMESPACE}</?tool_call>",
        special=frozenset({NAMESPACE, "<mm:think>"}),
    ),
    Dialect(
        name="minimax",  # M2
        marks=(("minimax:tool_call",),),
        calls=named_calls(
            r'\s*<invoke name="(?P<name>[^"]+)">',
            r"</invoke>",
        ),
        values="tagged",
        tag=r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
        around=r"\s*</?minimax:tool_call>",
        written=WrittenCall(
            opening='<invoke name="',
            after_name='">\n',
            closing="</invoke>",
            argument=('<parameter name="', '">', "</parameter>"),
            around=("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        special=frozenset({"<minimax:tool_call>", THINK}),
    ),
    Dialect(
        name="hunyuan",
        thinks_by="'<think{}>'",
        marks=(("<tool_sep",),),
        think="<think:opensource>",
        end_think="</think:opensource>",
        calls=named_calls(
            r"\s*<tool_call(?::\w+)?>(?P<name>[^\s<]+)<tool_sep(?::\w+)?>",
            r"</tool_call(?::\w+)?>",
        ),
        values="tagged",
        tag=r"<arg_key(?::\w+)?>(?P<key>.*?)</arg_key(?::\w+)?>\s*"
        r"<arg_value(?::\w+)?>(?P<value>.*?)</arg_value(?::\w+)?>",
        around=r"\s*</?tool_calls(?::\w+)?>",
        special=frozenset({"<tool_call:opensource>", "<think:opensource>"}),
    ),
    Dialect(
        name="glm",
        marks=(("<arg_key>",),),
        calls=named_calls(
            r"\s*<tool_call>\s*(?P<name>[^\s<{]+)",
            r"</tool_call>",
        ),
        values="tagged",
        tag=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        written=WrittenCall(
            opening="<tool_call>",
            after_name="\n",
            closing="</tool_call>",
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        ),
        opening="<tool_call>",
        special=frozenset({"<tool_call>", "<arg_key>", THINK}),
    ),
    Dialect(
        name="tagged",  # Qwen3 Coder, Qwen3.5, Nemotron 3
        marks=(("<function=", "<parameter="),),
        calls=named_calls(
            r"\s*<function=(?P<name>[^>\n]+)>",
            r"</function>",
        ),
        values="tagged",
        tag=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        written=WrittenCall(
            opening="<function=",
            after_name=">\n",
            closing="</function>",
            argument=("<parameter=", ">\n", "</parameter>"),
            around=(CALL, END_CALL),
        ),
        around=r"\s*</?tool_call>",
        special=frozenset({"<tool_call>", THINK}),
    ),
    Dialect(
        name="mistral",
        marks=(("[TOOL_CALLS]", "[ARGS]"),),
        think="[THINK]",
        end_think="[/THINK]",
        calls=named_calls(
            r"\s*\[TOOL_CALLS\](?P<name>[^\[\s{]+)(?:\[CALL_ID\]\w*)?\[ARGS\]",
            r"(?=\[TOOL_CALLS\])|</s>",
        ),
        written=WrittenCall(
            opening="[TOOL_CALLS]",
            after_name="[ARGS]",
            unless=("[CALL_ID]",),
        ),
        opening="[TOOL_CALLS]",
        special=frozenset({"[TOOL_CALLS]", "[THINK]"}),
    ),
    Dialect(
        name="minimax-m1",
        marks=(("<tool_calls>", "<beginning_of_sentence>ai"),),
        thinks_by="<tool_calls>",
        calls=marked_calls(r"\s*<tool_calls>", "</tool_calls>"),
        opening="<tool_calls>",
        special=frozenset({"<tool_calls>", THINK}),
    ),
    Dialect(
        name="mistral-v3",  # Nemo, Mixtral
        marks=(("[TOOL_CALLS]",),),
        calls=marked_calls(r"\s*\[TOOL_CALLS\]", "</s>"),
        opening="[TOOL_CALLS]",
        special=frozenset({"[TOOL_CALLS]"}),
    ),
    Dialect(
        name="lfm2",
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        calls=marked_calls(r"\s*<\|tool_call_start\|>", "<|tool_call_end|>"),
        values="python",
        opening="<|tool_call_start|>",
        special=frozenset({"<|tool_call_start|>", THINK}),
    ),
    Dialect(
        name="nemotron",  # Nano 2
        marks=(("<TOOLCALL>",),),
        calls=marked_calls(r"\s*<TOOLCALL>", "</TOOLCALL>"),
        opening="<TOOLCALL>",
    ),
    Dialect(
        name="granite",  # 3.3; newer ones write as Hermes
        marks=(("<|tool_call|>",),),
        calls=marked_calls(r"\s*<\|tool_call\|>", "<|end_of_text|>"),
        opening="<|tool_call|>",
        skipped=r"\s*</?response>",
        special=frozenset({"<|tool_call|>"}),
    ),
    HERMES,
)


def dialect_of(chat_template: str) -> Dialect:
    """Return the dialect whose marks a chat template has; Hermes if it has no dialect's marks."""
    return next(
        (
            dialect
            for dialect in FAMILIES
            for group in dialect.marks
            if all(mark in chat_template for mark in group)
        ),
        HERMES,
    )
