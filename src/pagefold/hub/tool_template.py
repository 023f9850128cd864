"""A chat template with tools for SmolLM2, whose own has none.

The model's authors document how to ask it for calls: a system prompt with the tools in it, calls as a JSON list between
``<tool_call>`` marks, results in ``<tool_response>`` marks. They trained the model of 1.7B parameters for it, not the
smaller ones.
"""

from __future__ import annotations

__all__ = ["SMOLLM2_TOOL_USE"]

SMOLLM2_TOOL_USE = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] -%}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{%- if tools or system %}
{{- '<|im_start|>system\n' }}
{%- if system %}{{ system }}{% if tools %}{{ '\n\n' }}{% endif %}{% endif %}
{%- if tools %}
{{- 'You are an expert in composing functions. You are given a question and a set of possible functions. \n' }}
{{- 'Based on the question, you will need to make one or more function/tool calls to achieve the purpose. \n' }}
{{- 'If none of the functions can be used, point it out and refuse to answer. \n' }}
{{- 'If the given question lacks the parameters required by the function, also point it out.\n\n' }}
{{- 'You have access to the following tools:\n<tools>' }}{{ tools | tojson }}{{ '</tools>\n\n' }}
{{- 'The output MUST strictly adhere to the following format, and NO other text MUST be included.\n' }}
{{- 'The example format is as follows. Please make sure the parameter type is correct. ' }}
{{- "If no function call is needed, please make the tool calls an empty list '[]'.\n" }}
{{- '<tool_call>[\n{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},\n' }}
{{- '... (more tool calls as required)\n]</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in rest %}
{%- if message['role'] == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- if message['tool_calls'] %}
{{- '<tool_call>[\n' }}
{%- for call in message['tool_calls'] %}
{{- '{"name": ' }}{{ call['function']['name'] | tojson }}{{ ', "arguments": ' }}
{{- call['function']['arguments'] | tojson }}{{ '}' }}{% if not loop.last %}{{ ',\n' }}{% endif %}
{%- endfor %}
{{- '\n]</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
