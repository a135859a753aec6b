"""Recipes: what is accepted, and every fault with its line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kinject.errors import InputError, RecipeError
from kinject.recipe import read_recipe

Write = Callable[[str, str], Path]

GOOD = """\
run_dir: runs/x
seed: 7
model: {path: some/model}
corpus:
  path: corpus.jsonl
trainer:
  learning_rate: 1e-5
  max_steps: 10
"""


def _faults(path: Path, *overrides: str, verb: str | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides, verb)  # type: ignore[arg-type]
    return [str(fault).replace(str(path.parent) + "/", "") for fault in caught.value.problems]


def test_a_good_recipe_is_read_with_numbers_as_numbers(write: Write) -> None:
    recipe = read_recipe(write("r.yaml", GOOD))
    assert (recipe.seed, recipe.trainer) == (7, {"learning_rate": 1e-5, "max_steps": 10})
    assert recipe.corpus is not None
    assert recipe.corpus.bos is None


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("evel", "verb: found 'evel'. Did you mean eval?"),
        ("export", "verb: found 'export'. Allowed: augment, eval, plan, questions, study, train."),
    ],
)
def test_a_verb_that_reads_no_recipe_is_refused(verb: str, message: str, write: Write) -> None:
    with pytest.raises(InputError) as caught:
        read_recipe(write("r.yaml", GOOD), verb=verb)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_overrides_win_and_are_yaml(write: Write) -> None:
    recipe = read_recipe(
        write("r.yaml", GOOD),
        ["trainer.learning_rate=3e-4", "corpus.replay={path: b, fraction: 0.5}"],
    )
    assert recipe.trainer["learning_rate"] == 3e-4
    assert recipe.corpus is not None
    assert recipe.corpus.replay is not None
    assert recipe.corpus.replay.fraction == 0.5
    assert recipe.location("trainer.learning_rate") == "command line"
    assert recipe.location("trainer.max_steps").endswith("r.yaml:8")


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        (GOOD, 7),
        (GOOD + "  seed: 7\n", 7),
        (GOOD.replace("seed: 7\n", "") + "  seed: 9\n", 9),
        (GOOD.replace("seed: 7\n", ""), 42),
    ],
)
def test_a_run_has_one_seed_wherever_it_is_written(write: Write, text: str, seed: int) -> None:
    recipe = read_recipe(write("r.yaml", text), verb="train", check_inputs=False)
    assert (recipe.seed, recipe.trainer.get("seed", seed)) == (seed, seed)
    assert recipe.raw.get("seed", 42) == seed


@pytest.mark.parametrize(("seed", "other"), [("true", 1), ("5.0", 5), ("null", 3)])
def test_a_seed_that_is_none_is_no_seed_beside_that_of_the_trainer(
    write: Write, seed: str, other: int
) -> None:
    text = GOOD.replace("seed: 7\n", f"seed: {seed}\n") + f"  seed: {other}\n"
    (found,) = _faults(write("r.yaml", text))
    assert re.match(r"r\.yaml:\d: seed: found (True|5\.0|nothing)", found)


DOTTED = """run_dir: runs/r
model: {path: base}
corpus:
  path: c.jsonl
  mix:
    v2.1:
      path: d.jsonl
      fraction: 0.9
    general:
      path: e.jsonl
      fraction: 0.1
eval:
  models:
    base: base
    qwen2.5-1.5b:
      path: other
  questions:
    v2.1:
      path: q.jsonl
"""


def test_names_with_dots_are_found_in_overrides_and_in_the_places_of_faults(write: Write) -> None:
    path = write("r.yaml", DOTTED)
    recipe = read_recipe(
        path, ["eval.models.qwen2.5-1.5b.dtype=float16", "corpus.mix.v2.1.fraction=0.2"]
    )
    assert recipe.eval is not None
    table = recipe.eval.models["qwen2.5-1.5b"]
    assert (table.path, table.dtype) == ("other", "float16")
    assert recipe.corpus is not None
    assert recipe.corpus.parts()["v2.1"].fraction == 0.2
    places = {
        "eval.models.qwen2.5-1.5b.path": "16",
        "eval.models.qwen2.5-1.5b.revision": "15",
        "eval.questions.v2.1": "18",
        "corpus.mix.v2.1.answers": "6",
        "corpus.mix.general.fraction": "11",
    }
    for key, line in places.items():
        assert recipe.location(key) == f"{path}:{line}"
    assert recipe.location("corpus.mix.v2.1.fraction") == "command line"


def test_a_second_seed_of_the_trainer_is_refused_at_its_line(write: Write) -> None:
    assert _faults(write("r.yaml", GOOD + "  seed: 9\n")) == [
        "r.yaml:9: trainer.seed: found 9, but seed is 7: a run has one seed. Remove this line: seed, at the top of "
        "the recipe, holds for the trainer too."
    ]
    assert _faults(write("r.yaml", GOOD), "trainer.seed=3")[0].startswith(
        "command line: trainer.seed: found 3, but"
    )
    assert _faults(write("r.yaml", GOOD), "trainer.seed=-3") == [
        "command line: trainer.seed: found -3, allowed: 0 to 4,294,967,295."
    ]


def test_all_faults_come_at_once_each_with_its_line(write: Write) -> None:
    path = write(
        "r.yaml",
        "run_dir: 3\nsed: 7\nmodel: {path: no/such/model, dtype: float8}\ncorpus:\n  path: no.jsonl\n  replay: {path: no2.jsonl, "
        "fraction: 1.5}\ntrainer:\n  learning_rat: 1e-5\n  max_steps: many\n  optim: adamw_9bit\n",
    )
    assert _faults(path, "trainer.seed=x", "nothing", "foo.bar=1", verb="train") == [
        "command line: nothing: expected section.key=value, for example trainer.learning_rate=1e-5.",
        "command line: foo.bar: unknown key. Allowed: adapter, augment, corpus, distillation, documents, eval, "
        "guards, method, model, probes, questions, regularization, run_dir, seed, study, techniques, trainer.",
        "r.yaml:1: run_dir: found 3 (a whole number), expected text.",
        "r.yaml:2: sed: unknown key. Did you mean seed?",
        "r.yaml:3: model.path: found 'no/such/model', but nothing is there. The folder no/such does not exist. Check the path.",
        "r.yaml:3: model.dtype: found 'float8' (text). Did you mean float32?",
        "r.yaml:5: corpus.path: found 'no.jsonl', but nothing is there. Check the path.",
        "r.yaml:6: corpus.replay.path: found 'no2.jsonl', but nothing is there. Check the path.",
        "r.yaml:6: corpus.replay.fraction: found 1.5, allowed: 0.0 to 0.95.",
        "r.yaml:8: trainer.learning_rat: unknown key. Did you mean learning_rate?",
        "r.yaml:9: trainer.max_steps: found 'many' (text), expected a whole number, as 1000.",
        "r.yaml:10: trainer.optim: found 'adamw_9bit' (text). Did you mean adamw_8bit?",
        "command line: trainer.seed: found 'x' (text), expected a whole number, as 1000.",
    ]


def test_a_missing_input_is_found_before_the_libraries_load(write: Write) -> None:
    path = write("r.yaml", GOOD)
    program = f"""import sys
from kinject.recipe import read_recipe
from kinject.errors import InputError, RecipeError
try:
    read_recipe({str(path)!r}, ["corpus.path=no.jsonl", "model.path=m/b"], "train")
except RecipeError as error:
    print(error, "torch" in sys.modules)"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=path.parent, capture_output=True, text=True, check=True
    )
    assert (
        result.stdout
        == "command line: corpus.path: found 'no.jsonl', but nothing is there. Check the path. False\n"
    )


def test_a_key_without_its_section_is_suggested_with_it(write: Write) -> None:
    path = write("r.yaml", GOOD)
    assert _faults(path, "learning_rate=3e-4", "learnin_rate=1", "corpu.path=x") == [
        "command line: learning_rate: unknown key. Did you mean trainer.learning_rate?",
        "command line: learnin_rate: unknown key. Did you mean trainer.learning_rate?",
        "command line: corpu.path: unknown key. Did you mean corpus?",
    ]


def test_an_override_that_is_not_utf_8_is_refused(write: Write) -> None:
    """A folder's name in Latin-1 comes from the shell as half a surrogate pair, and ended in a traceback."""
    (fault,) = _faults(write("r.yaml", GOOD), "run_dir=runs/M\udcfcller")
    assert fault.startswith("command line: run_dir: the value 'runs/M\\udcfcller' cannot be read")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [1\n", "r.yaml:2: bad YAML: expected ',' or ']', but got '<stream end>'."),
        (
            "a: 1\n---\nb: 2\n",
            "r.yaml:2: bad YAML: expected a single document in the stream, but found another document.",
        ),
        (
            "model:\n\tpath: m\n",
            "r.yaml:2: bad YAML: found character '\\t' that cannot start any token. Indent by spaces, not tabs.",
        ),
        (
            "run_dir: a\nrun_dir: b\n",
            "r.yaml:2: run_dir: is there twice (first in line 1). Keep one.",
        ),
        ("- a\n", "r.yaml:1: found list, a recipe is a mapping of sections."),
        (
            "run_dir: !!python/object/apply:os.system [ls]\n",
            "r.yaml:1: run_dir: the tag '!!python/object/apply:os.system' is not read. Remove it.",
        ),
        (
            "",
            "r.yaml:1: run_dir: missing. Folder for everything this run writes, for example runs/NAME.",
        ),
        ("run_dir: a\nseed: -1\n", "r.yaml:2: seed: found -1, allowed: 0 to 4,294,967,295."),
        (
            "run_dir: a\nseed: .inf\n",
            "r.yaml:2: seed: found inf (a number), expected a whole number, as 1000.",
        ),
        (
            "run_dir: a\nseed: true\n",
            "r.yaml:2: seed: found True (a switch), expected a whole number, as 1000.",
        ),
        (
            "run_dir: a\ncorpus: {path: x, bos: yes}\n",
            "r.yaml:2: corpus.bos: found 'yes' (text), expected true or false.",
        ),
        (
            "run_dir: a\ntrainer: {weight_decay: -.inf}\n",
            "r.yaml:2: trainer.weight_decay: found -inf, expected a finite number.",
        ),
        ("run_dir: a\nseed:\n", "r.yaml:2: seed: found nothing, expected a whole number, as 1000."),
        (
            "run_dir: a\ndocuments: {fields: {txt: body}}\n",
            "r.yaml:2: documents.fields.txt: found 'txt' (text). Did you mean text?",
        ),
    ],
)
def test_one_fault_is_one_line(write: Write, text: str, fault: str) -> None:
    assert _faults(write("r.yaml", text)) == [fault]


def test_what_people_write_is_known_by_its_meaning(write: Write) -> None:
    """By letters alone AdamW had no suggestion, adamw grokadamw, and gpu cpu."""
    text = "run_dir: a\nmodel: {path: m, device: GPU, dtype: half}\ntrainer: {optim: AdamW, lr_scheduler_type: wsd}\n"
    assert _faults(write("r.yaml", text), "epochs=3", "bs=16") == [
        "command line: epochs: unknown key. Did you mean trainer.num_train_epochs?",
        "command line: bs: unknown key. Did you mean trainer.per_device_train_batch_size?",
        "r.yaml:2: model.device: found 'GPU' (text). Did you mean cuda?",
        "r.yaml:2: model.dtype: found 'half' (text). Did you mean float16?",
        "r.yaml:3: trainer.optim: found 'AdamW' (text). Did you mean adamw_torch?",
        "r.yaml:3: trainer.lr_scheduler_type: found 'wsd' (text). Did you mean warmup_stable_decay?",
    ]


def test_a_key_of_the_trainer_or_adapter_in_another_section_is_sent_there(write: Write) -> None:
    text = (
        "run_dir: a\nlora_dropout: 0.1\nmodel: {path: m, max_grad_norm: 1}\n"
        "trainer: {target_modules: all-linear}\nadapter: {weight_decay: 0}\n"
        # Not the trainer's own: a key of recall's, and one that a recipe must not set.
        "guards: {top_p: 0.9, output_dir: x}\n"
    )
    faults = _faults(write("r.yaml", text), "corpus.max_length=512")
    assert [fault for fault in faults if "r.yaml:6" not in fault and "missing" not in fault] == [
        "r.yaml:2: lora_dropout: unknown key. It is a key of adapter: adapter.lora_dropout.",
        "r.yaml:3: model.max_grad_norm: unknown key. It is a key of trainer: trainer.max_grad_norm.",
        "command line: corpus.max_length: unknown key. It is a key of trainer: trainer.max_length.",
        "r.yaml:4: trainer.target_modules: unknown key. It is a key of adapter: "
        "adapter.target_modules.",
        "r.yaml:5: adapter.weight_decay: unknown key of peft's LoraConfig. It is a key of trainer: "
        "trainer.weight_decay.",
    ]
    assert len([fault for fault in faults if "r.yaml:6: guards." in fault]) == 2
    assert not any("trainer.top_p" in fault or "trainer.output_dir" in fault for fault in faults)


def test_a_verb_says_which_section_it_misses(write: Write) -> None:
    assert "r.yaml:1: eval: missing. kinject eval needs this section." in _faults(
        write("r.yaml", GOOD), verb="eval"
    )


def test_a_question_set_is_a_path_or_a_mapping_and_its_faults_have_lines(write: Write) -> None:
    text = "run_dir: a\neval:\n  models: {base: m}\n  questions:\n    new: n.jsonl\n    known: {path: k.jsonl, role: retension}\n"
    assert _faults(write("r.yaml", text)) == [
        "r.yaml:6: eval.questions.known.role: found 'retension' (text). Did you mean retention?"
    ]
    text = text.replace("retension", "retention")
    recipe = read_recipe(write("r.yaml", text))
    assert recipe.eval is not None
    assert recipe.eval.questions["new"] == "n.jsonl"


def test_documents_may_be_a_name_on_the_hub_but_not_a_misspelt_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "docs.jsonl").write_text("")
    recipe = tmp_path / "r.yaml"
    for name, there in (
        ("data", True), ("data/docs.jsonl", True), ("org/name", True), ("org/name-1.5:config:test", True), ("squad", False),
        ("data/dcos", False), ("docs.jsonl", False), ("other/docs.pdf", False), ("a/b/c", False),
    ):  # fmt: skip
        recipe.write_text(
            f"run_dir: x\nquestions:\n  documents: {name}\n  generator: {{kind: sandbox}}\n"
        )
        if there:
            section = read_recipe(recipe, verb="questions").questions
            assert section is not None
            assert section.documents == name
        else:
            with pytest.raises(
                RecipeError, match=r"r\.yaml:3: questions\.documents: found .*nothing is there"
            ):
                read_recipe(recipe, verb="questions")


def test_without_general_text_a_recipe_is_the_one_without_its_lines_and_a_warning(
    tmp_path: Path,
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "a"}\n')
    general = (
        "  replay: {path: none.jsonl, fraction: 0.1}\n  validation_corpus: none-held-out.jsonl\n"
    )
    text = f"run_dir: a\nmodel: {{path: x/y}}\ncorpus:\n  path: {corpus}\n{general}trainer:\n  max_steps: 2\n"
    path, plain = tmp_path / "r.yaml", tmp_path / "plain.yaml"
    path.write_text(text + "  eval_strategy: epoch\n  eval_on_start: true\n")
    plain.write_text(text.replace(general, "") + "  eval_strategy: no\n  eval_on_start: false\n")
    with pytest.raises(RecipeError, match=r"none\.jsonl"):
        read_recipe(path, verb="train")
    recipe, other = (
        read_recipe(str(path), ["corpus.general_text=false"], "train"),
        read_recipe(plain, verb="train"),
    )
    assert recipe.corpus == replace(other.corpus, general_text=False)
    assert dict(recipe.trainer) == dict(other.trainer)
    (note,) = recipe.notes
    assert note.startswith(
        "warning: corpus.general_text: false leaves out corpus.replay and corpus.validation_corpus."
    )
    assert other.notes == ()
