"""Model files of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf
from tests.e2e.serving import TINY

# Turns between the two control tokens of the vocabulary; tools and calls as JSON.
TEMPLATE = """
{%- for tool in tools or [] %}<s>tool
{{ tool | tojson }}</s>{% endfor %}
{%- for message in messages %}<s>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny-chat.gguf"
    with GGUFFile.open(TINY) as file:
        tensors = {name: StoredTensor(tensor.type, tensor.shape, tensor.data) for name, tensor in file.tensors.items()}
        write_gguf(path, {**file.metadata, "tokenizer.chat_template": TEMPLATE}, tensors)
    return path
