"""Bounds of the chat templates that models bring: each is tried once in a process with little memory and time.

Their sandbox keeps them from the machine, but not from its memory and time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from kinject.errors import InputError

_LONGEST = 2**24
"""Most characters that a template may write."""
_MEMORY, _SECONDS = 2**30, 2
_REFUSED = 3
_RENDER = """
import json, re, resource, sys
source, longest, memory, seconds, refused = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from jinja2.sandbox import ImmutableSandboxedEnvironment
def refuse(text):
    raise ValueError(text)
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
turns = [dict(role=role, content="Hello.") for role in ("system", "user", "assistant", "user")]
values = dict(add_generation_prompt=True, bos_token="", eos_token="")
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
    if not _ends_well(source):
        raise InputError(
            f"template: takes more than {_SECONDS} s, {_MEMORY >> 20:,} MiB or {_LONGEST:,} characters for a short chat. Shorten "
            f"it. Source: {source[:120]!r}"
        )


@lru_cache(maxsize=64)
def _ends_well(source: str) -> bool:
    """Return whether rendering `source` stays within the limits."""
    job = json.dumps([source, _LONGEST, _MEMORY, _SECONDS, _REFUSED])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _RENDER], input=job, text=True, capture_output=True, timeout=10 * _SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode != _REFUSED and done.returncode >= 0
