"""Secrets are found in what is printed, logged and stored, and nothing else is."""

from __future__ import annotations

import os
import random
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from kinject.errors import InputError
from kinject.secrets import SecretFilter, known_secrets, without_secrets
from kinject.terminal import show

KEY = "sk-proj-7f3A9zQ-w0Xk5e1bD0_pLm2vR8tYc4"
PAGES = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "form", [str, str.lower, str.upper, quote, lambda key: f"https://x.org/?key={key}&a=1"]
)
def test_a_key_is_found_in_the_forms_that_errors_repeat(form: Callable[[str], str]) -> None:
    redact = SecretFilter([KEY, "a+b/c=d_e-f.g~h!i@j#k"]).redact
    for key in (KEY, "a+b/c=d_e-f.g~h!i@j#k"):
        shown = redact(f"Incorrect API key provided: {form(key)}. Or {form(key[:20])}...")
        assert "(key)" in shown
        assert key[12:].lower() not in shown.lower()
        assert key[12:20].lower() not in shown.lower()


def test_short_keys_and_texts_without_a_key_stay() -> None:
    redact = SecretFilter([KEY, "none", "EMPTY", "lm-studio"]).redact
    text = f"A part: {KEY[:8]}; none, EMPTY and lm-studio."
    assert redact(text) is text
    assert redact(f"a {KEY} b &amp; {KEY.lower()} c") == "a (key) b &amp; (key) c"


def _keys(seed: int) -> list[str]:
    draw = random.Random(seed)
    letters = string.ascii_letters + string.digits
    sizes = {"sk-proj-": 48, "hf_": 34, "gsk_": 52}
    return [prefix + "".join(draw.choices(letters, k=size)) for prefix, size in sizes.items()]


def test_no_honest_text_is_touched() -> None:
    filters = [SecretFilter(_keys(seed)) for seed in range(3)]
    texts = [path.read_text("utf-8") for path in sorted(PAGES.glob("*.md"))]
    texts += [
        "Die Größe der Flüsse 2019 überraschte 48,3 % der Müller. " * 40,
        "城市的发展与变化，1987年。" * 100,
    ]
    texts.append("".join(random.Random(0).choices(string.hexdigits + "+/=\n ", k=200_000)))
    assert all(one.redact(text) is text for one in filters for text in texts)


def test_what_counts_as_a_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a-path-that-exists"
    path.write_text("")
    values = {
        "K_API_KEY": KEY, "K_SECRET_ACCESS_KEY": KEY + "1", "K_TOKEN": str(path), "K_PASSWORD": "short", "K_NOTHING": KEY + "2",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert {name for name in known_secrets() if name.startswith("K_")} == {
        "K_API_KEY",
        "K_SECRET_ACCESS_KEY",
    }
    assert "K_NOTHING" in known_secrets(["K_NOTHING", "no variable"])
    assert "K_NOTHING" in known_secrets(), "named once, known to the end"


def test_errors_messages_and_the_log_hold_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K_API_KEY", KEY)
    assert str(InputError(f"found {KEY[:20]!r}")) == "found '(key)'"
    show(f"found {KEY[:20]}", file=sys.stderr)
    assert capsys.readouterr().err.strip() == "found (key)"
    assert without_secrets("nothing") == "nothing"


def test_a_program_prints_no_secret_whoever_prints() -> None:
    code = (
        "import logging, sys, warnings\n"
        "from kinject.terminal import protect_streams\n"
        "protect_streams()\n"
        f"part = {KEY[:20]!r}\n"
        "print('printed', part)\n"
        "warnings.warn('warned of ' + part)\n"
        "logging.getLogger('library').error('logged %s', part)\n"
        "raise ValueError('raised ' + part)\n"
    )
    environment = {**os.environ, "K_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    assert KEY[:20] not in printed
    for channel in ("printed", "warned of", "logged", "raised"):
        assert f"{channel} (key)" in printed
