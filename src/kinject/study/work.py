"""One stage done: what a worker runs, on this machine or another that sees the same folders."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinject.corpus import CorpusFile
from kinject.disk import check_output, read_manifest, write_jsonl, write_manifest, write_sealed
from kinject.errors import InputError, KinjectError
from kinject.process import peak_memory, reset_peak_memory
from kinject.recipe import TrainRecipe, read_recipe
from kinject.study.stages import SANDBOX_CORPUS, SANDBOX_CORPUS_PATH, Stage

_CURE = "Delete the folder that it is in: the study makes it again."


def job_of(stage: Stage) -> dict[str, Any]:
    """Return `stage` as JSON values, for a worker."""
    return {**asdict(stage), "folder": str(stage.folder), "marker": str(stage.marker)}


def do_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one stage and return what it counted: seconds, tokens, peak resident bytes (0: not measured), money.

    Writes the same to done.json in the stage's folder, last. Raises `KinjectError` for what a user can mend.
    """
    folder = Path(job["folder"])
    reset_peak_memory()
    started = time.monotonic()
    counts = _DO[job["kind"]](job, folder)
    done = {
        "id": job["id"], "kind": job["kind"], "seconds": round(time.monotonic() - started, 3),
        "tokens": counts.get("tokens", 0), "money": counts.get("money", 0.0),
        "peak_bytes": peak_memory() if sys.platform == "linux" else 0,
    }  # fmt: skip
    write_sealed(Path(job["marker"]), done)
    return done


def _prepare(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if job["recipe"] == SANDBOX_CORPUS:
        from kinject.sandbox import write_base_corpus

        if not SANDBOX_CORPUS_PATH.exists():
            write_base_corpus(SANDBOX_CORPUS_PATH)
        return {}
    return _train_recipe(read_recipe(Path(job["recipe"]), job["overrides"], "train"))


def _train(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    overrides = list(job["overrides"])
    recipe = read_recipe(Path(job["recipe"]), overrides, "train")
    extra = job["extra"]
    if "match_steps_of" in extra:
        overrides.append(f"trainer.max_steps={_counts(Path(extra['match_steps_of']))['steps']}")
    if "match_tokens_of" in extra:
        overrides += ["trainer.max_steps=-1", f"trainer.num_train_epochs={_epochs_of_equal_tokens(recipe, extra)!r}"]
    return _train_recipe(read_recipe(Path(job["recipe"]), overrides, "train"))


def _train_recipe(recipe: TrainRecipe) -> dict[str, Any]:
    from kinject.train import train

    result = train(recipe, resume=True)
    return {"tokens": round(result.n_epochs * result.account["source"])}


def _counts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputError(f"{folder}: no manifest of the run that this arm is matched to. Run the study again.")
    return dict(manifest["counts"])


def _epochs_of_equal_tokens(recipe: TrainRecipe, extra: Mapping[str, Any]) -> float:
    """Return the epochs over the recipe's corpus that read as many corpus tokens as the run in ``match_tokens_of`` did."""
    from kinject.corpus import Tokenization, tokenize_rows
    from kinject.models import load_tokenizer

    other = Path(extra["match_tokens_of"])
    manifest = read_manifest(other / "manifest.json")
    epochs = float(_counts(other)["epochs"])
    assert manifest is not None
    tokenizer = load_tokenizer(recipe.model.path or str(recipe.model.tokenizer))
    how = Tokenization(recipe.corpus.bos, recipe.corpus.eos, None, False)
    own, theirs = (
        sum(len(row.input_ids) for row in tokenize_rows(CorpusFile(Path(path)), tokenizer, how))
        for path in (recipe.corpus.path, manifest["recipe"]["corpus"]["path"])
    )
    return round(epochs * theirs / own, 4)


def _augment(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.augment import augment

    result = augment(read_recipe(Path(job["recipe"]), job["overrides"], "augment"))
    if result.got < result.asked:
        raise InputError(
            f"{folder}: {result.asked - result.got} of {result.asked} rewritings are missing "
            f"({'the budget is spent' if result.out_of_budget else 'see rejected.jsonl and failures.jsonl there'}). "
            "Run the study again, or lower augment.styles."
        )
    return {"tokens": result.tokens_in + result.tokens_out, "money": result.cost}


def _random_corpus(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the source corpus with its words drawn anew, each row as long as before: text without its facts."""
    source = Path(job["extra"]["source"])
    rows = CorpusFile(source)
    words = [word for row in rows for word in row.text.split()]
    if not words:
        raise InputError(f"{source}: holds no text rows to shuffle. Use corpus: random with an augmented text corpus.")
    draw = random.Random(f"{job['extra']['seed']} random text")
    write_jsonl(
        folder / "corpus.jsonl",
        (
            {
                "id": f"random-{row.id}",
                "origin": "random",
                "text": " ".join(draw.choice(words) for _ in row.text.split()),
            }
            for row in rows
            if row.text
        ),
    )
    inputs = {"source": check_output(source, _CURE)}
    path = folder / "manifest.json"
    write_manifest(path, stage="corpus", inputs=inputs, recipe={}, counts={}, outputs=["corpus.jsonl"])
    return {}


def _merge(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.train.merge import merge

    extra = job["extra"]
    merge(extra["base"], extra["tuned"], [extra["alpha"]], folder)
    return {}


def _evaluate(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.eval import evaluate
    from kinject.eval.scoring.answers import read_answers

    evaluate(read_recipe(Path(job["recipe"]), job["overrides"], "eval"))
    return {"tokens": sum(sum(answer.n_tokens) for answer in read_answers(folder / "answers.jsonl"))}


_DO = {
    "prepare": _prepare, "train": _train, "augment": _augment, "corpus": _random_corpus, "merge": _merge,
    "eval": _evaluate,
}  # fmt: skip


def one_line(error: BaseException) -> str:
    """Return what went wrong in one line, for a table."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0][:300]
    return first if isinstance(error, KinjectError) else f"{type(error).__name__}: {first}"
