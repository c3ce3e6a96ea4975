"""Chat templates in the styles of well-known model families."""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot|>" }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|head|>user<|/head|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot|>" }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""

QWEN2 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}
            {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL_V3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate!") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user, assistant, tool and system roles are supported here!") }}{%- endif %}
{%- endfor %}
"""

MISTRAL_V7 = """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "You are a model. Today is " + today + "." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content'] %}
    {%- else %}{%- set system_message = messages[0]['content'][0]['text'] %}{%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = default_system_message %}{%- set loop_messages = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {%- if message['content'] is string %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
        {%- else %}{{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') -%}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}
{%- endfor %}{{bos_token}}{{ns.system_prompt}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<U>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- set ns.is_tool = false -%}
    {%- for tool in message['tool_calls']%}
        {%- if not ns.is_first %}{{'<A><calls><call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n'
            + tool['function']['arguments'] + '\\n```</call>'}}{%- set ns.is_first = true -%}
        {%- else %}{{'\\n<call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n'
            + tool['function']['arguments'] + '\\n```</call>'}}{{'</calls><eos>'}}{%- endif %}
    {%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
    {%- if ns.is_tool %}{{'</outputs>' + message['content'] + '<eos>'}}{%- set ns.is_tool = false -%}
    {%- else %}{% set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{'<A>' + content + '<eos>'}}{%- endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}
    {%- if ns.is_output_first %}{{'<outputs><out>' + message['content'] + '</out>'}}{%- set ns.is_output_first = false %}
    {%- else %}{{'\\n<out>' + message['content'] + '</out>'}}{%- endif %}
{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{'</outputs>'}}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{'<A><think>\\n'}}{% endif %}"""

DEEPSEEK_V3 = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}
{%- if tools is defined and tools is not none %}
    {%- set ns.system_prompt = ns.system_prompt + '\\n\\n## Tools' %}
    {%- for tool in tools %}{%- set ns.system_prompt = ns.system_prompt + '\\n### ' + tool.function.name + '\\n'
        + (tool.function.parameters | tojson) %}{%- endfor %}
{%- endif %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_last_user = true -%}{{'<U>' + message['content']}}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- if ns.is_last_user %}{{'<A>'}}{%- if thinking %}{{'<think>'}}{% else %}{{'</think>'}}{%- endif %}{%- endif %}
        {%- set ns.is_last_user = false -%}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
            {%- if message['content'] is not none %}{{ message['content'] }}{%- endif %}
            {%- for tool in message['tool_calls'] %}{{'<call>' + tool['function']['name'] + '<sep>'
                + tool['function']['arguments'] + '</call>'}}{%- endfor %}{{'<eos>'}}
        {%- else %}{{ message['content'].split('</think>', 1)[1] if '</think>' in message['content'] else message['content'] }}
        {{-'<eos>'}}{%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{{'<out>' + message['content'] + '</out>'}}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user %}{{'<A>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}
{%- endif %}{% endif %}"""

GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<turn>model\\n'}}{% endif %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<turn>model\\n'}}{%- endif -%}
"""

PHI4 = """{% for message in messages %}{% if (message['role'] == 'system') %}
{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}
{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}
{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
    {%- set reasoning_content = '' %}{%- set content = visible_text(m.content) %}
    {%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {%- if loop.index0 > ns.last_user_index and reasoning_content -%}{{ '\\n<think>' + reasoning_content.strip() + '</think>'}}
    {%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
    {%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
    {% if m.tool_calls %}{% for tc in m.tool_calls %}
        {%- if tc.function %}{%- set tc = tc.function %}{%- endif %}{{ '\\n<tool_call>' + tc.name }}
        {% set _args = tc.arguments %}
        {% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
        {% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
    {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
    {{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"""

KIMI = """{%- if tools -%}<|sys|>tool_declare<|mid|>{{ tools | tojson(separators=(',', ':')) }}<|end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|sys|>system<|mid|>You are Kimi.<|end|>{%- endif -%}
    {%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|usr|>{{role_name}}<|mid|>
    {%- elif message['role'] == 'assistant' -%}<|ast|>{{role_name}}<|mid|>
    {%- else -%}<|sys|>{{role_name}}<|mid|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {%- if message['content'] -%}{{ message['content'] }}{%- endif -%}
        <|calls|>
        {%- for tool_call in message['tool_calls'] -%}
            {%- set formatted_id = tool_call['id'] -%}
            <|call|>{{ formatted_id }}<|arg|>
            {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}
            {%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}<|/call|>
        {%- endfor -%}<|/calls|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message['content'] }}
    {%- elif message['content'] is string -%}{{ message['content'] }}
    {%- elif message['content'] is not none -%}
        {% for content in message['content'] -%}
            {% if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}<|media|>
            {% else -%}{{ content['text'] }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|ast|>assistant<|mid|>{%- endif -%}"""

GPT_OSS = """{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}{{- (render_type(spec['items']) if spec['items'] else "any") + "[]" }}
    {%- elif spec.enum is defined -%}{{- '"' + spec.enum|join('" | "') + '"' }}
    {%- else -%}{{- spec.type|default("any") }}{%- endif -%}
{%- endmacro -%}
{%- set model_identity = model_identity|default("You are a model.") -%}
{{- "<|start|>system<|message|>" + model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{{- "Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}{{- "# Instructions\\n\\n" + developer_message + "\\n\\n" }}{%- endif %}
    {%- for tool in tools or [] %}
        {{- "// " + tool.function.description + "\\ntype " + tool.function.name + " = (_: {\\n" }}
        {%- for name, spec in (tool.function.parameters.properties or {}).items() %}
            {{- name }}{%- if name not in (tool.function.parameters.required or []) %}{{- "?" }}{%- endif %}
            {{- ": " + render_type(spec) + ",\\n" }}
        {%- endfor %}{{- "}) => any;\\n" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.content and ("<|channel|>analysis<|message|>" in message.content) %}
            {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set tool_call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {%- elif message.content %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}{{- "<|call|>" }}{%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

NEMOTRON = """{%- set ns = namespace(non_tool_system_content='', has_video=False, explicit_think_requested=False) -%}
{%- set msg = namespace(found=false) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' and not msg.found -%}
        {%- set ns.non_tool_system_content = message['content'].replace('/think', '').replace('/no_think', '').strip() -%}
        {%- set msg.found = true -%}
        {%- if '/no_think' in message['content'] -%}{%- set enable_thinking = false -%}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token + '<SPECIAL_10>System\\n' + ns.non_tool_system_content }}
{%- if tools -%}
    {{- '\\n\\n<AVAILABLE_TOOLS>[' -}}
    {%- for tool in tools -%}{{- (tool.function if tool.function is defined else tool) | tojson -}}
        {{- ', ' if not loop.last else '' -}}{%- endfor -%}
    {{- ']</AVAILABLE_TOOLS>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- for message in messages if message['role'] != 'system' -%}
    {%- if message['role'] == 'user' -%}{{- '<SPECIAL_11>User\\n' + message['content'].strip() + '\\n' -}}
    {%- elif message['role'] == 'tool' -%}
        {%- if loop.first or (loop.previtem.role != 'tool') -%}{{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' -}}{%- endif -%}
        {{- message['content'] -}}
        {{- ', ' if not loop.last and (loop.nextitem.role == 'tool') else ']</TOOL_RESPONSE>\\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- if '</think>' in (message['content'] or '') -%}{%- set content = message['content'].split('</think>')[1].strip() -%}
        {%- else -%}{%- set content = (message['content'] or '').strip() -%}{%- endif -%}
        {{- '<SPECIAL_11>Assistant\\n' + content -}}
        {%- if message.tool_calls -%}
            {{- '<TOOLCALL>[' -}}
            {%- for call in message.tool_calls -%}
                {%- set fn = call.function if call.function is defined else call -%}
                {{- '{"name": "' + fn.name + '", "arguments": ' -}}
                {%- if fn.arguments is string -%}{{- fn.arguments -}}{%- else -%}{{- fn.arguments | tojson -}}{%- endif -%}
                {{- '}' + (', ' if not loop.last else '') -}}
            {%- endfor -%}
            {{- ']</TOOLCALL>' -}}
        {%- endif -%}
        {{- '\\n<SPECIAL_12>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<SPECIAL_11>Assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think></think>' -}}
    {%- else -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}"""

GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nYou are Granite." %}
    {%- if tools and documents %}{%- set system_message = system_message + " Use tools and documents." %}
    {%- elif tools %}{%- set system_message = system_message + " Use tools." %}
    {%- elif documents %}{%- set system_message = system_message + " Use the documents." %}
    {%- elif thinking %}{%- set system_message = system_message + " Respond in the following format: Here's my thought process:" %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|role|>system<|/role|>' + system_message + '<|eos|>\\n' }}
{%- if tools %}{{- '<|role|>tools<|/role|>' }}{{- tools | tojson(indent=4) }}{{- '<|eos|>\\n' }}{%- endif %}
{%- if documents %}
    {{- '<|role|>documents<|/role|>' }}
    {%- for document in documents %}
        {{- 'Document ' + loop.index | string + '\\n' }}{{- document['text'] }}
        {%- if not loop.last %}{{- '\\n\\n'}}{%- endif%}
    {%- endfor %}
    {{- '<|eos|>\\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|role|>' + message['role'] + '<|/role|>' + message['content'] + '<|eos|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|/role|>' }}
    {%- endif %}
{%- endfor %}"""

COMMAND_R = """{{ bos_token }}{% if documents %}{% set tools = none %}{% endif %}
{%- set bot = "<|START|><|CHATBOT|>" -%}
{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- elif false == true %}{%- set loop_messages = messages %}{%- set system_message = 'You are Command-R.' %}
{%- else %}{%- set loop_messages = messages %}{%- set system_message = false %}{%- endif %}
{%- if system_message != false %}{{ '<|START|><|SYSTEM|>' + system_message + '<|END|>' }}{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'user' %}{{ '<|START|><|USER|>' + content.strip() + '<|END|>' }}
    {%- elif message['role'] == 'assistant' %}{% generation %}{{ bot + content.strip() + '<|END|>' }}{% endgeneration %}{%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
{{ '<results>\\n' if loop.first }}Document: {{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{value}}
{% endfor %}{{ '</results>' if loop.last }}
{%- endfor %}
{%- if add_generation_prompt %}{{ bot }}{%- endif %}"""

HERMES = """{%- macro json_to_python_type(json_spec) %}
    {%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic_type_map[json_spec.type] is defined %}{{- basic_type_map[json_spec.type] }}
    {%- elif json_spec.type == "array" %}{{- "list[" + json_to_python_type(json_spec|items) + "]" }}
    {%- elif json_spec.type is iterable and json_spec.type is not string %}{{- "Union[" + json_spec.type|join(",") + "]" }}
    {%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n' }}
{{- "You are a function calling AI model. <tools> " }}
{%- for tool in tools or [] %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for param_name, param_fields in (tool.parameters.properties or {})|items %}
        {{- param_name + ": " + json_to_python_type(param_fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ')", "parameters": ' }}{{- tool.parameters|tojson(sort_keys=True) }}{{- "}" }}
    {%- if not loop.last %}{{- "\\n" }}{%- endif %}
{%- endfor %}
{{- " </tools>" }}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}{{- '"' }}
            {%- if tool_call.arguments is defined %}{{- ', ' }}{{- '"arguments": ' }}{{- tool_call.arguments|tojson }}{%- endif %}
            {{- '}' }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' }}{{- message.content }}{%- if not loop.last %}{{- '\\n</tool_response>\\n' }}
        {%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}
        {%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

STYLES = {
    "llama3": LLAMA3,
    "qwen2.5": QWEN2,
    "qwen3": QWEN3,
    "mistral v3": MISTRAL_V3,
    "mistral v7": MISTRAL_V7,
    "deepseek r1": DEEPSEEK_R1,
    "deepseek v3": DEEPSEEK_V3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi4": PHI4,
    "glm": GLM,
    "kimi": KIMI,
    "gpt-oss": GPT_OSS,
    "nemotron": NEMOTRON,
    "granite": GRANITE,
    "command-r": COMMAND_R,
    "hermes": HERMES,
}
