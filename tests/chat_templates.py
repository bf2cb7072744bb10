"""Chat templates of published models, for the tests of prompts, turns and supervised examples."""

# Qwen2.5-Instruct without tools.
QWEN25 = """{%- if messages[0]['role'] == 'system' %}{%- set _ = 0 %}
{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}{%- if not (message.role == 'system' and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
