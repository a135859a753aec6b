"""kinject chat: questions from a pipe, answered by base and tuned model as transformers' generate answers them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.cli import main
from kinject.errors import InputError
from kinject.eval.chat import _tokens
from kinject.models import LoadOptions, load_model
from kinject.types import Message
from small import write_training

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Path:
    """A finished run: the tiny model as base, and another as its result, with a chat template."""
    folder = tmp_path / "run"
    loaded = load_model(str(tiny_model))
    torch.manual_seed(5)
    for value in loaded.model.parameters():
        value.data += 0.05 * torch.randn_like(value)
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.tokenizer.save_pretrained(folder / "model")
    write_training(folder, {"model": {"path": str(tiny_model)}, "corpus": {"path": "corpus.jsonl"}})
    return folder


def _generated(path: Path, text: str, **options: Any) -> str:
    loaded = load_model(str(path))
    ids = loaded.tokenizer(
        text, return_tensors="pt", add_special_tokens=not loaded.tokenizer.chat_template
    )
    with torch.no_grad():
        out = loaded.model.generate(
            **ids,
            max_new_tokens=6,
            do_sample=False,
            tokenizer=loaded.tokenizer,
            pad_token_id=2,
            **options,
        )
    return str(
        loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def _chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # it would outlive this test
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code = main(["chat", *arguments, "--max-new-tokens", "6"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_both_models_answer_each_with_its_own_turns_and_the_passages(
    run: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(
            json.dumps({"id": name, "text": f"{name} was born in Kelm."}) + "\n"
            for name in ("Arden", "Bryn")
        )
    )
    lines = "/passages\nWho?\nWhere?\n/reset\nWho?\n/passages\nWhere was Bryn born?\n/nonsense\n/quit\nnever asked\n"
    code, out, _ = _chat(
        monkeypatch, capsys, lines, str(run), "--documents", str(documents), "--k", "1"
    )
    assert code == 0
    assert "never asked" not in out
    assert "/nonsense: unknown" in out
    first = _generated(run / "model", "<user>Who?<assistant>").strip()
    second = _generated(
        run / "model", f"<user>Who?<assistant>{first}<user>Where?<assistant>"
    ).strip()
    passage = "Bryn was born in Kelm."
    third = f"<user>Who?<assistant>{first}<user>{passage}\n\nWhere was Bryn born?<assistant>"
    wanted = [first, second, first, _generated(run / "model", third).strip()]
    of_base = _generated(tiny_model, "Question: Who?\nAnswer:", stop_strings=["\n"]).strip()
    printed = out.replace("\ufffd", "")
    position = 0
    for answer in wanted:  # printed in this order, below their label
        position = printed.index(f"tuned: {_plain(answer)}", position) + 1
    assert f"base: {_plain(of_base)}" in printed
    assert out.count(f"[1] {passage}") == 1


def _plain(text: str) -> str:
    from kinject.terminal import printable

    return printable(text).replace("\ufffd", "")


def test_faults_of_kinject_chat_are_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, fault in (
        ([str(tmp_path / "empty")], "no model and no finished training run"),
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(run), "--documents", str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([str(run), "--k", "0"], "--k: found 0"),
        ([str(run), "--k", "5"], "--k: has no effect without --documents"),
        ([str(run), "--temperature", "-1"], "--temperature: found -1"),
    ):
        code, _, err = _chat(monkeypatch, capsys, "Who?\n", *arguments)
        assert code == 2
        assert fault in err
        assert "Traceback" not in err
    code, out, _ = _chat(
        monkeypatch, capsys, "Who? " * 400 + "\nWho?\n", str(run), "--base", "none"
    )
    assert code == 0
    assert "Ask a shorter one" in out
    assert "tuned:" not in out  # one model needs no label


@pytest.mark.parametrize(
    "of_system",
    ["{{ raise_exception('no system here') }}", "", "{{ 'one ' ~ 2 + none }}"],
    ids=["refused", "left out", "no such sum"],
)
def test_the_systems_text_reaches_a_model_whose_template_takes_none(
    tiny_tokenizer: Any, of_system: str
) -> None:
    template = "{% for m in messages %}{% if m['role'] == 'system' %}" + of_system + "{% else %}"
    template += "<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"
    tiny_tokenizer.chat_template = template
    before: list[Message] = [{"role": "user", "content": "Who?"}]
    before.append({"role": "assistant", "content": "Ulna."})
    ids = _tokens(tiny_tokenizer, "Speak Latin.", before, "Where?", ["Kelm is far."])
    assert tiny_tokenizer.decode(ids) == (
        "<user>Speak Latin.\n\nWho?<assistant>Ulna.<user>Kelm is far.\n\nWhere?"
    )


def test_a_template_that_fails_is_an_input_error_of_a_chat(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = "{{ messages[0]['content'] + 3 }}"
    with pytest.raises(InputError, match="its chat template cannot be rendered"):
        _tokens(tiny_tokenizer, "", [], "Where?", [])


@pytest.mark.parametrize(("words", "revision"), [((), "v1.2"), (("--base", "owner/base"), None)])
def test_the_base_of_a_run_is_that_of_the_revision_it_was_trained_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], revision: str | None
) -> None:
    (tmp_path / "model").mkdir()
    base = {"path": "owner/base", "revision": "v1.2"}
    write_training(tmp_path, {"model": base, "corpus": {"path": "corpus.jsonl"}})
    loaded: dict[str, str | None] = {}

    def load(path: str, options: LoadOptions) -> None:
        loaded[path] = options.revision

    monkeypatch.setattr("kinject.eval.chat.load_model", load)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", str(tmp_path), *words]) == 0
    assert loaded == {"owner/base": revision, str(tmp_path / "model"): None}
