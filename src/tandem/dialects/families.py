r"""The families of models, told from each other by their chat templates.

Each is a response template for Transformers' streaming parser. What that parser cannot say is done
after it (`arguments`): LFM2 calls are Python, which no content parser reads; strings of GLM, Qwen3
Coder, MiniMax and Hunyuan are written as they are, so that only the tool's schema tells "5" from 5
(the parser's own casts know no enums); DeepSeek V3.2 marks strings in an attribute, which
`xml-inline` has no group for.

An optional end, such as `(?:\s*</tool_call>)?`, cannot stand in a pattern: the parser takes the
match that is there before the rest has come. So what stands around calls is read over by itself.
"""

from collections.abc import Sequence

from tandem.dialects.dialect import CALL, END_CALL, THINK, Dialect, named_calls, tagged

_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_HARMONY_NAME = r"to=(?:functions\.)?(?P<name>[\w.-]+)"
_HARMONY_TYPE = r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"

HERMES = Dialect(
    name="hermes",
    marks=((CALL,),),
    calls={
        "open_pattern": rf"\s*{CALL}",
        "close": END_CALL,
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    opening=CALL,
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
        beside=r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)"
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
        opening="<|tool_call>",
        beside=r"<turn\|>|<\|tool_response>",
        special=frozenset({"<|tool_call>", "<|channel>"}),
    ),
    Dialect(
        name="deepseek-v3.2",  # and V4
        marks=(("｜DSML｜",),),
        calls=named_calls(
            r'\s*<｜DSML｜invoke name="(?P<name>[^"]+)">',
            r"</｜DSML｜invoke>",
            **tagged(
                r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="'
                r'(?P<value>(?:true|false)">.*?)</｜DSML｜parameter>'
            ),
        ),
        values="marked",
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
        special=frozenset({"<|tool_call_begin|>", THINK}),
    ),
    Dialect(
        name="minimax",
        marks=(("minimax:tool_call",),),
        calls=named_calls(
            r'\s*<invoke name="(?P<name>[^"]+)">',
            r"</invoke>",
            **tagged(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
        ),
        values="text",
        around=r"\s*</?minimax:tool_call>",
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
            **tagged(
                r"<arg_key(?::\w+)?>(?P<key>.*?)</arg_key(?::\w+)?>\s*"
                r"<arg_value(?::\w+)?>(?P<value>.*?)</arg_value(?::\w+)?>"
            ),
        ),
        values="text",
        around=r"\s*</?tool_calls(?::\w+)?>",
        special=frozenset({"<tool_call:opensource>", "<think:opensource>"}),
    ),
    Dialect(
        name="glm",
        marks=(("<arg_key>",),),
        calls=named_calls(
            r"\s*<tool_call>\s*(?P<name>[^\s<{]+)",
            r"</tool_call>",
            **tagged(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
        values="text",
        opening="<tool_call>",
        special=frozenset({"<tool_call>", "<arg_key>", THINK}),
    ),
    Dialect(
        name="tagged",  # Qwen3 Coder, Qwen3.5, Nemotron 3
        marks=(("<function=", "<parameter="),),
        calls=named_calls(
            r"\s*<function=(?P<name>[^>\n]+)>",
            r"</function>",
            **tagged(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
        ),
        values="text",
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
        opening="[TOOL_CALLS]",
        special=frozenset({"[TOOL_CALLS]", "[THINK]"}),
    ),
    Dialect(
        name="mistral-v3",  # Nemo, Mixtral
        marks=(("[TOOL_CALLS]",),),
        calls={"open_pattern": r"\s*\[TOOL_CALLS\]", "close": "</s>", "content": "json"},
        opening="[TOOL_CALLS]",
        special=frozenset({"[TOOL_CALLS]"}),
    ),
    Dialect(
        name="lfm2",
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        calls={
            "open_pattern": r"\s*<\|tool_call_start\|>",
            "close": "<|tool_call_end|>",
            "content": "text",
            "repeats": True,
        },
        values="python",
        opening="<|tool_call_start|>",
        special=frozenset({"<|tool_call_start|>", THINK}),
    ),
    Dialect(
        name="nemotron",  # Nano 2
        marks=(("<TOOLCALL>",),),
        calls={
            "open_pattern": r"\s*<TOOLCALL>",
            "close": "</TOOLCALL>",
            "content": "json",
            "repeats": True,
        },
        opening="<TOOLCALL>",
    ),
    Dialect(
        name="granite",  # 3.3; newer ones write as Hermes
        marks=(("<|tool_call|>",),),
        calls={
            "open_pattern": r"\s*<\|tool_call\|>",
            "close": "<|end_of_text|>",
            "content": "json",
        },
        opening="<|tool_call|>",
        beside=r"\s*</?response>",
        special=frozenset({"<|tool_call|>"}),
    ),
    HERMES,
)


def dialect_of(chat_template: str) -> Dialect:
    """Return the family that a chat template is of; what no other knows is written as Hermes."""
    return next(
        (
            dialect
            for dialect in FAMILIES
            for group in dialect.marks
            if all(mark in chat_template for mark in group)
        ),
        HERMES,
    )
