"""A loopback server with a completions and a chat route: plain passes of transformers, the answers in other servers' formats.

The fields follow vLLM's (completion/serving.py: offsets that count special tokens, null before the first token, the
written token at the end) and SGLang's (openai/utils.py: offsets of -1). `llama-server` refuses echo, as
llama.cpp's server does; `ignores-echo` answers with the log-prob of the written token alone, as some of its versions do;
`absurd` with numbers whose sum is beyond a float; `transformers` refuses token ids, as `transformers serve` does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from kinject.augment.sandbox import Connection, SandboxServer

Style = Literal["vllm", "sglang", "llama-server", "ignores-echo", "absurd", "transformers"]


@dataclass
class Served:
    """A running server: its address, the bodies that it was sent, and how it answers."""

    url: str
    style: Style
    model: Any
    tokenizer: Any
    bodies: list[dict[str, Any]] = field(default_factory=list)
    chat: str = "The answer is Lowmere."
    fails_after: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def scored(self) -> list[dict[str, Any]]:
        """Return the bodies that asked for log-probs."""
        return [body for body in self.bodies if body.get("echo")]

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer."""
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return 401, {"error": {"message": "the key has expired"}}
        if path.endswith("/chat/completions"):
            text, usage = self.chat, {"prompt_tokens": 11, "completion_tokens": 5}
            if self.tokenizer.chat_template:
                turns = self.tokenizer.apply_chat_template(
                    body["messages"], tokenize=False, add_generation_prompt=True
                )
                written = self._complete(
                    body, self.tokenizer(turns, add_special_tokens=False).input_ids
                )
                text, usage = written["choices"][0]["text"], written["usage"]
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
            return 200, {
                "object": "chat.completion",
                "model": body["model"],
                "choices": [choice],
                "usage": usage,
            }
        if self.style == "llama-server" and body.get("echo"):
            return 400, {
                "error": {
                    "code": 400,
                    "message": "Only no echo is supported",
                    "type": "invalid_request_error",
                }
            }
        prompt = body["prompt"]
        if self.style == "transformers" and not isinstance(prompt, str):
            return 400, {"detail": "prompt must be a string."}
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        return 200, self._complete(body, ids)

    def _complete(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        written: list[int] = []
        with self.lock, torch.no_grad():
            for _ in range(body["max_tokens"]):
                logits = self.model(torch.tensor([[*ids, *written]])).logits[0]
                written.append(int(logits[-1].argmax()))
                if written[-1] == self.tokenizer.eos_token_id:
                    break
            whole = [*ids, *written]
            log_probs = self.model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        ends = written[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        for stop in body.get("stop") or ():
            text = text.split(stop)[0]
        values = [None, *(float(log_probs[i - 1, whole[i]]) for i in range(1, len(whole)))]
        if self.style == "absurd":
            values[-3:] = [-1e308] * 3
        tops = [None, *(self._top(log_probs[i - 1], whole[i]) for i in range(1, len(whole)))]
        tokens = [self.tokenizer.decode([token]) for token in whole]
        if self.style == "ignores-echo" or not body.get("echo"):
            values, tops, tokens = values[len(ids) :], tops[len(ids) :], tokens[len(ids) :]
        n_written = len(written)
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        if self.style == "sglang":
            offsets = [-1] * len(tokens)
        reply_log_probs = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        choice = {
            "index": 0, "text": text, "finish_reason": "stop" if ends else "length",
            "logprobs": reply_log_probs if body.get("logprobs") else None,
        }  # fmt: skip
        usage = {"prompt_tokens": len(ids), "completion_tokens": n_written}
        return {
            "object": "text_completion",
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }

    def _top(self, row: Any, token: int) -> dict[str, float]:
        """Return the likeliest token, and the one that is there."""
        return {self.tokenizer.decode([i]): float(row[i]) for i in (token, int(row.argmax()))}


@contextmanager
def serve(folder: Path, style: Style = "vllm") -> Iterator[Served]:
    """Serve the model in `folder`, in float32, from a thread of this process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    class Handler(Connection):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.bodies.append(body)
            self.say(*served.reply(self.path, body))

    class Server(SandboxServer):
        connection_class = Handler

    server = Server()
    served = Served(server.url, style, model, transformers.AutoTokenizer.from_pretrained(folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
