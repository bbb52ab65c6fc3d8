"""Short chat templates that take tools each in the way of a model family, for ChatML's tokens."""

_TURN = "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

# Arguments are objects; several calls in a turn.
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n' }}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}"
    "{{- '<tool_call>\\n{}\\n</tool_call><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{%- set f = call.function %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{- f.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}"
    "{{- '\\n</tool_response><|im_end|>\\n' }}"
    f"{{%- elif not (m.role == 'system' and loop.first) %}}{_TURN}{{%- endif %}}"
    f"{{%- endfor %}}{_ASK}"
)

# One call in a turn; tools are indented; no turn of its own for the system; it wants the day.
LLAMA = (
    "{%- set day = strftime_now('%d %b %Y') %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{- raise_exception('no system') }}"
    "{%- elif 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}"
    '{{- \'<|im_start|>assistant\\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{- f.arguments | tojson }}{{- '}<|im_end|>\\n' }}"
    "{%- elif m.role == 'user' and loop.first and tools is not none %}"
    "{{- '<|im_start|>user\\n' + day + '\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}"
    "{{- m.content + '<|im_end|>\\n' }}"
    f"{{%- else %}}{_TURN}{{%- endif %}}{{%- endfor %}}{_ASK}"
)

# Turns alternate but for calls and results, and calls have ids of nine characters and more.
MISTRAL = (
    "{%- for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' and tools is not none and loop.first %}"
    "{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if m.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in m.tool_calls %}{{- (call.function | tojson)[:-1] }}"
    "{%- if call.id | length < 9 %}{{- raise_exception('ids') }}{%- endif %}"
    "{{- ', \"id\": \"' + call.id[-9:] + '\"}' }}{%- endfor %}{{- ']' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + m.content }}"
    "{{- ', \"call_id\": \"' + m.tool_call_id + '\"}' }}"
    f"{{%- else %}}{_TURN}{{%- endif %}}{{%- endfor %}}{_ASK}"
)

# A turn with calls has no content at all, and arguments are text.
DEEPSEEK = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.content is none %}"
    "{{- '<\uff5ctool▁calls▁begin\uff5c>' }}{%- for call in m.tool_calls %}"
    "{{- call.type + call.function.name }}"
    "{{- '\\n```json\\n' + call.function.arguments + '\\n```' }}"
    "{%- endfor %}"
    f"{{%- else %}}{_TURN}{{%- endif %}}{{%- endfor %}}{_ASK}"
)

FAMILIES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "deepseek": DEEPSEEK}
