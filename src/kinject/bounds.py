"""Bounds of the programs that models and recipes bring: each is tried once in a process with little memory and time.

Those are Jinja templates, whose sandbox keeps them from the machine, but not from its memory and time, and the regular
expressions in which peft names modules. Those of tokenizers have a limit of their own in the library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kinject.errors import InputError

_LONGEST = 2**24
"""Most characters that a template may write."""
_MEMORY, _SECONDS = 2**30, 2
_REFUSED = 3
_LIMITS = """
import json, re, resource, sys
source, longest, memory, seconds, refused = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
"""
_MATCH = """
for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.7.down_proj", "input_layernorm", "embed_tokens", "lm_head"):
    try:
        re.fullmatch(source, f"base_model.model.model.layers.31.{name}")
    except Exception:
        pass
"""
_RENDER = """
from jinja2.sandbox import ImmutableSandboxedEnvironment
def refuse(text):
    raise ValueError(text)
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
turns = [dict(role=role, content="Hello.") for role in ("system", "user", "assistant", "user")]
values = dict(add_generation_prompt=True, bos_token="", eos_token="", question="Who?", choices=["a", "b"], letters=["A", "B"],
              subject="", shots=[], passages=["A text."], format="texts", answer="a")
try:
    template = environment.from_string(re.sub(r"{%-?\\s*(end)?generation\\s*-?%}", "", source))
    for messages in (turns, turns[1:]):
        n = 0
        for part in template.generate(messages=messages, **values):
            n += len(part)
            if n > longest:
                sys.exit(refused)
except MemoryError:
    sys.exit(refused)
except Exception:
    pass
"""


def check_cost(source: str) -> None:
    """Raise `InputError` if the Jinja template `source` needs too much time or memory, or writes too much, for a short chat.

    What else is wrong with it shows where it is rendered.
    """
    if not _ends_well(_RENDER, source):
        raise InputError(
            f"template: takes more than {_SECONDS} s, {_MEMORY >> 20:,} MiB or {_LONGEST:,} characters for a short chat. Shorten "
            f"it. Source: {source[:120]!r}"
        )


def check_patterns(adapter: Mapping[str, Any]) -> None:
    """Raise `ValueError`, as peft does for other faults, if a regular expression of its fields takes too long."""
    named = [adapter.get("target_modules"), adapter.get("exclude_modules")]
    for key in ("rank_pattern", "alpha_pattern"):
        named += adapter.get(key) or ()
    for pattern in named:
        if isinstance(pattern, str) and re.search(r"[*+{]", pattern) and not _ends_well(_MATCH, pattern):
            raise ValueError(f"the pattern {pattern[:120]!r} takes more than {_SECONDS} s to match a name")


@lru_cache(maxsize=64)
def _ends_well(program: str, source: str) -> bool:
    """Return whether a Python program that reads `source` stays within the limits."""
    job = json.dumps([source, _LONGEST, _MEMORY, _SECONDS, _REFUSED])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _LIMITS + program], input=job, text=True, capture_output=True, timeout=10 * _SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode != _REFUSED and done.returncode >= 0
