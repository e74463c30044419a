"""The tokenizers package can fetch vocabularies; Strata never lets it: nothing of the network is imported or opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import socket, sys
def refuse(*args, **kwargs):
    raise SystemExit("a socket was opened")
socket.socket.connect = refuse
socket.create_connection = socket.getaddrinfo = refuse
from tests.text.vocabularies import smollm2_metadata
from strata.text.detokenize import Detokenizer
from strata.text.template import ChatTemplate
from strata.text.tokenizer import Tokenizer
tokenizer = Tokenizer.from_metadata(smollm2_metadata())
chat = ChatTemplate.from_metadata(smollm2_metadata()).encode(tokenizer, [{"role": "user", "content": "hi"}])
out = Detokenizer(tokenizer)
assert "".join(map(out.push, chat.tokens)) + out.flush()
print([name for name in ("huggingface_hub", "httpx", "requests", "urllib3", "http.client", "transformers") if name in sys.modules])
"""


def test_nothing_of_the_network_is_imported() -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
