"""The one table of keys that exclude or need each other, for every verb; `find_problems` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinject.disk import is_file, path_exists
from kinject.errors import Problem
from kinject.recipe.check import Conflict, KeyPath, suggestion
from kinject.recipe.sections import (
    GENERATOR_REQUIRES,
    MAX_SAMPLES,
    RESERVED_BODY,
    SAMPLING,
    EvalSection,
    GeneratorSection,
    QuestionSetSection,
)
from kinject.recipe.train_conflicts import MODEL_ROWS, TRAIN_ROWS
from kinject.types import RAG, ArmName


def find_problems(
    verb: str, recipe: Any, facts: Any = None, more: Iterable[Conflict] = ()
) -> list[Problem]:
    """Return the problems of all rows for `verb` and of `more` rows; `facts` are those that the
    rows of the verb read."""
    problems = [
        problem for row in (*CONFLICTS[verb], *more) for problem in row.problems(recipe, facts)
    ]
    for key, generator in _generators(recipe, verb):
        for row in CONFLICTS["generator"]:
            problems += [
                Problem(f"{key}{item.key}", item.message) for item in row.problems(generator)
            ]
    return problems


def _generators(recipe: Any, verb: str) -> Iterator[tuple[str, GeneratorSection]]:
    """Yield the generators of the section of a verb by their keys."""
    section = getattr(recipe, verb, None)
    for name in ("generator", "judge"):
        if getattr(section, name, None) is not None:
            yield f"{verb}.{name}", getattr(section, name)
    if isinstance(section, EvalSection):
        for name, table in section.endpoints().items():
            yield f"eval.models.{name}.endpoint", table.generator(1)


def _reserved(g: GeneratorSection, f: None) -> list[tuple[str, str]]:
    own = {item.name for item in fields(GeneratorSection)}
    return [
        (name, f"Use the generator's own key {name}" if name in own else "kinject sets it")
        for name in g.extra_body or {} if name in RESERVED_BODY
    ]  # fmt: skip


def _not_sent(g: GeneratorSection, f: None) -> list[tuple[str, str]]:
    names = {"openai": (), "vllm": (), "transformers": ("stop",)}.get(
        g.kind, ("stop", "extra_body", "chat_template_kwargs")
    )
    return [(name, g.kind) for name in names if getattr(g, name)]


def _is_url(text: str) -> bool:
    """Return whether `text` is a web URL with a possible host name and port."""
    try:
        parts = urlsplit(text)
        host, _ = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https") and bool(host) and text.isprintable() and " " not in text
    )


def _free(budget: float | None, *generators: GeneratorSection | None) -> bool:
    """Return whether there is a budget although nothing has a price."""
    return budget is not None and not any(g.has_prices for g in generators if g is not None)


_GENERATOR = (
    Conflict("", lambda g, f: [GENERATOR_REQUIRES[g.kind]] if g.kind in GENERATOR_REQUIRES
             and not getattr(g, GENERATOR_REQUIRES[g.kind][0]) else [],
             "{0} is missing. Give {1}."),
    Conflict(".base_url", lambda g, f: isinstance(g.base_url, tuple) and len(g.parts()) < max(1, len(g.base_url)),
             "is empty, or names an endpoint twice. Give each once."),
    Conflict(".base_url", lambda g, f: [part.address for part in g.parts().values()
                                         if part.address and not _is_url(part.address)],
             "found {0!r}, expected a URL such as http://127.0.0.1:8000/v1."),
    Conflict(".price", lambda g, f: len(g.price) not in (0, 2),
             "expected two numbers: of a million prompt tokens, and of a million answer tokens."),
    Conflict(".{0}", _not_sent, "is not for kind: {1}. Remove it."),
    Conflict(".extra_body.{0}", lambda g, f: [(name, ", ".join(SAMPLING)) for name, value in (g.extra_body or {}).items()
                                              if g.kind == "transformers" and not (name in SAMPLING
                                                                                   and isinstance(value, int | float))],
             "kind: transformers reads numbers: {1}. Remove it."),
    Conflict(".extra_body.{0}", _reserved, "is not read here. {1}."),
)  # fmt: skip
"""Rows of one generator; keys are below its own."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What the formats of an evaluation need, and whether several processes share the machine."""

    writes: bool = False
    """Some answers are written in words."""
    scores: bool = True
    """Some answers are chosen by log-probs."""
    is_shared: bool = False


def _same_answers(r: Any, f: Any) -> list[tuple[str, str]]:
    """Return the endpoints that no stored answer tells apart."""
    names: dict[object, str] = {}
    found = []
    for name, table in r.eval.endpoints().items():
        other = names.setdefault(
            repr((replace(table.endpoint, base_url=None), table.api, table.revision)), name
        )
        if r.eval.endpoints()[other].address != table.address:
            found.append((name, other))
    return found


def _sets(r: Any) -> list[tuple[str, QuestionSetSection]]:
    return [
        (name, QuestionSetSection(item) if isinstance(item, str) else item)
        for name, item in r.eval.questions.items()
    ]


_EVAL = (
    Conflict("model", lambda r, f: r.model is not None and r.corpus is None and not r.trainer,
             "an evaluation does not read this section. Put a model into eval.models, as NAME: {{path: ..., quantization: "
             "4bit}}, and what holds for all of them into eval.model_defaults."),
    Conflict("eval.models.{0}.device_map",
             lambda r, f: [name for name, table in r.eval.local().items()
                           if f.is_shared and table.device_map not in (None, "none")],
             "is for one process: each of several would take every GPU. Start one."),
    Conflict("eval.models.{0}.revision",
             lambda r, f: [name for name, table in r.eval.local().items() if table.revision and path_exists(Path(table.path))],
             "is for a name on the hub, but path is a folder. Take it out."),
    Conflict("eval.models.{0}.endpoint",
             lambda r, f: [name for name, table in r.eval.endpoints().items() if table.endpoint.kind not in ("openai", "vllm")],
             "must be of kind: openai or vllm."),
    Conflict("eval.models.{0}.endpoint",
             lambda r, f: [name for name, table in r.eval.endpoints().items() if table.endpoint.kind == "vllm" and f.scores],
             "kind: vllm writes answers only. Set eval.formats: [generate], or give the model as a path."),
    Conflict("eval.models.{0}.api",
             lambda r, f: [name for name, table in r.eval.endpoints().items()
                           if table.api == "chat" and f.scores],
             "a chat returns no log-probs of given choices. Set eval.formats: [generate], or ask its completions "
             "(api: completions)."),
    Conflict("eval.models.{0}.tokenizer",
             lambda r, f: [name for name, table in r.eval.endpoints().items() if table.api == "chat" and table.tokenizer],
             "is for api: completions. Remove it."),
    Conflict("eval.models.{0}.tokenizer",
             lambda r, f: [name for name, table in r.eval.endpoints().items()
                           if table.api == "completions" and table.tokenizer is None and (table.chat or f.scores)],
             "missing. chat and log-probs of choices need it: tokenizer: FOLDER."),
    Conflict("eval.models.{0}.revision", _same_answers,
             "missing. {1} has the same model and parameters at another address; answers would be taken for one another's. "
             "Give each a revision (any text)."),
    Conflict("eval.questions.{0}", lambda r, f: [(name, max(r.eval.shots)) for name, item in _sets(r)
                                                 if max(r.eval.shots) and item.shots_from is None],
             "eval.shots asks for {1} examples, but shots_from is missing. Name the file that holds them."),
    Conflict("eval.scores", lambda r, f: "pmi" in r.eval.scores and not r.eval.control,
             "pmi compares with the choices without the question. Set eval.control: true."),
    Conflict("eval.judge", lambda r, f: ("judge" in r.eval.scores) != (r.eval.judge is not None),
             "eval.judge, the model, and judge in eval.scores, which reads its grades, need each other. Add or remove one."),
    Conflict("eval.judge", lambda r, f: r.eval.judge is not None and not f.writes,
             "grades written answers, but no format writes any. Add generate to eval.formats."),
    Conflict("eval.retrieval.min_score", lambda r, f: r.eval.retrieval is not None and r.eval.retrieval.kind == "oracle"
             and r.eval.retrieval.min_score is not None,
             "kind: oracle takes the document that a question names, whatever it scores. Remove it."),
    Conflict("eval.judge.kind", lambda r, f: [r.eval.judge.kind] if r.eval.judge is not None
             and r.eval.judge.kind in ("sandbox", "file") else [],
             "found {0}, which grades nothing. Allowed: openai (an endpoint) or transformers."),
    Conflict("eval.budget", lambda r, f: _free(r.eval.budget, r.eval.judge, *(m.endpoint for m in r.eval.endpoints().values())),
             "needs the price of an endpoint or of the judge: without prices all is free."),
)  # fmt: skip


def _chosen(r: Any, styles: Any) -> list[Any]:
    return [styles[name] for name in r.augment.styles if name in styles]


_AUGMENT = (
    Conflict("augment.styles.{0}", lambda r, f: [(name, suggestion(name, f)) for name in r.augment.styles if name not in f],
             "unknown style.{1}"),
    Conflict("augment.styles.{0}", lambda r, f: [(name, n, f"{MAX_SAMPLES:,}") for name, n in r.augment.styles.items()
                                                 if isinstance(n, int) and not 0 <= n <= MAX_SAMPLES],
             "found {1}, allowed: 0 to {2}."),
    Conflict("augment.styles.{0}", lambda r, f: [style.name for style in _chosen(r, f)
                                                 if not isinstance(r.augment.styles[style.name], int)
                                                 and (style.mechanical or r.augment.generator.kind == "file")],
             "needs a number: a target of tokens is for styles that a model writes."),
    Conflict("augment.messages", lambda r, f: r.augment.messages and not any(style.writes_chat for style in _chosen(r, f)),
             "none of the styles writes conversations. Add questions, dialogue, atomic_facts or instructions."),
    Conflict("augment.one_corpus", lambda r, f: r.augment.one_corpus and not any(
             s.makes_instructions or (r.augment.messages and s.writes_chat) for s in _chosen(r, f)),
             "none of the styles writes other rows than text. Remove the line."),
    Conflict("augment.raft", lambda r, f: r.augment.raft is not None and all(s.rows != "quoted" for s in _chosen(r, f)),
             "is for the style raft, which augment.styles lacks. Add it, or remove the section."),
    Conflict("augment.styles", lambda r, f: r.augment.generator.kind == "file"
             and sum(not style.mechanical for style in _chosen(r, f)) > 1,
             "the texts of kind: file are all of one style. Name one."),
    Conflict("augment.styles.{0}", lambda r, f: [s.name for s in _chosen(r, f) if r.augment.generator.kind == "file"
                                                 and (s.prepare or s.verify or s.scope != "passage")],
             "needs a model to ask; kind: file has none."),
    Conflict("augment.judge.kind", lambda r, f: r.augment.judge is not None and r.augment.judge.kind == "file",
             "must answer: kind: file does not."),
    Conflict("augment.budget", lambda r, f: _free(r.augment.budget, r.augment.generator),
             "needs augment.generator.price: without prices all is free."),
)  # fmt: skip
_QUESTIONS = (
    Conflict("questions.generator.kind", lambda r, f: r.questions.generator.kind == "file",
             "questions need a model to ask; kind: file has none."),
    Conflict("questions.retention", lambda r, f: r.questions.retention and not r.questions.closed_book,
             "questions on neighbours are kept where the model answers them without the passage; closed_book: 0 asks none."),
    Conflict("questions.retention", lambda r, f: r.questions.retention and r.questions.generator.kind == "sandbox",
             "the sandbox's writer knows no neighbours: it has no knowledge beside the passage."),
    Conflict("questions.budget", lambda r, f: _free(r.questions.budget, r.questions.generator),
             "needs questions.generator.price: without prices all is free."),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the rows of a study read beside it; `sets` are the question sets of its eval recipe,
    None if that is not read."""

    augment_keys: tuple[str, ...] = ()
    train_keys: tuple[str, ...] = ()
    checks_inputs: bool = True
    sets: Mapping[str, str | QuestionSetSection] | None = None
    writes: frozenset[str] = frozenset()
    """The question sets on which the answers that decide claims are written, letters or words."""
    writes_words: frozenset[str] = frozenset()
    adapters: Mapping[KeyPath, str] = field(default_factory=dict)
    """Arm or sweep -> the arm of the recipe behind it, where training leaves an adapter that is not
    folded in."""


_BASE = "base"


def _unknown_names(r: Any, f: Shared) -> list[tuple[KeyPath, str, str]]:
    """Return (key, name, suggestion) of names of arms, sweeps and question sets that do not exist."""
    s, found = r.study, list[tuple[KeyPath, str | None, Iterable[str]]]()
    arms, sweeps = s.arms.keys() - {_BASE}, s.sweeps or {}
    for name, arm in s.arms.items():
        found += [
            (("arms", name, "match", key), other, arms - {name})
            for key, other in (arm.match or {}).items()
        ]
        above = [*s.arms][: [*s.arms].index(name)]
        found += [(("arms", name, "after"), arm.after, above)]
    for name, item in (s.tune or {}).items():
        found += [(("tune", name, "arm"), item.arm, arms)]
        found += [
            (("tune", name, "arms", index), arm, arms) for index, arm in enumerate(item.arms or ())
        ]
    for name, item in sweeps.items():
        found += [(("sweeps", name, "arm"), item.arm, arms)]
    for name, item in (s.claims or {}).items():
        found += [(("claims", name, "sweep"), item.sweep, sweeps)]
        for key in ("arm", "baseline"):
            arm = getattr(item, key)
            if isinstance(arm, str):
                bare, retrieval = ArmName.parse(arm)
                found += [(("claims", name, key), bare, {_BASE, *s.arms})]
                found += [(("claims", name, key), retrieval, {"", RAG, *(s.retrievals or {})})]
            elif arm is not None:
                found += [(("claims", name, key), sweep, sweeps) for sweep in arm]
        if f.sets is not None:
            found += [(("claims", name, "question_set"), item.question_set, f.sets)]
    if f.sets is not None:
        found += [(("validation", name), name, f.sets) for name in s.validation or {}]
    return [
        (("study", *key), name, suggestion(name, allowed) or " There is none.")
        for key, name, allowed in found if name is not None and name not in allowed
    ]  # fmt: skip


def _points(r: Any, f: Shared) -> list[tuple[KeyPath, str, str]]:
    """Return the points of sweeps that claims name, but no sweep has."""
    found: list[tuple[KeyPath, str, str]] = []
    for name, claim in (r.study.claims or {}).items():
        for key in ("arm", "baseline"):
            point = getattr(claim, key)
            for sweep, value in point.items() if isinstance(point, Mapping) else ():
                values = (
                    (r.study.sweeps or {})[sweep].values
                    if sweep in (r.study.sweeps or {})
                    else None
                )
                if values is not None and (len(point) > 1 or value not in values):
                    shown = ", ".join(map(str, values))
                    found.append(
                        (
                            ("study", "claims", name, key),
                            str(value),
                            f"the values of the sweep {sweep} are {shown}",
                        )
                    )
    return found


def _override_keys(r: Any) -> list[tuple[KeyPath, str]]:
    """Return each override, sweep and tuned key."""
    s = r.study
    keys: list[tuple[KeyPath, str]] = [
        (("study", "overrides", key), key) for key in s.overrides or {}
        if not key.startswith("eval.") or key.startswith("eval.models")
    ]  # fmt: skip
    for name, arm in s.arms.items():
        keys += [(("study", "arms", name, "overrides", key), key) for key in arm.overrides or {}]
    keys += [(("study", "tune", name, "key"), item.key) for name, item in (s.tune or {}).items()]
    sweeps = (
        (name, item.key)
        for name, item in (s.sweeps or {}).items()
        if item.key not in ("alpha", "corpus")
    )
    return keys + [(("study", "sweeps", name, "key"), key) for name, key in sweeps]


def _unread_keys(r: Any, f: Shared) -> list[tuple[KeyPath, str, str]]:
    allowed = {*f.augment_keys, *f.train_keys}
    return [
        (at, key, ", ".join(sorted(allowed))) for at, key in _override_keys(r)
        if key.split(".")[0] not in allowed or key in ("corpus", "model")
    ]  # fmt: skip


def _missing_of_claims(r: Any, f: Shared) -> list[tuple[KeyPath, str, str]]:
    needs = {
        "difference": ("arm", "baseline"),
        "equivalence": ("arm", "baseline"),
        "trend": ("sweep",),
    }
    return [
        (("study", "claims", name), key, claim.test) for name, claim in (r.study.claims or {}).items()
        for key in needs.get(claim.test, ("arm",)) if getattr(claim, key) is None
    ]  # fmt: skip


def _untuned_sets(r: Any, f: Shared) -> list[tuple[KeyPath, str]]:
    if f.sets is None:
        return []
    has_file = {
        name for name, item in f.sets.items() if not isinstance(item, str) and item.validation
    }
    return [
        (("study", "tune", name, "question_sets"), question_set) for name, tune in (r.study.tune or {}).items()
        for question_set in tune.sets() if question_set not in {*has_file, *(r.study.validation or {})}
    ]  # fmt: skip


def _claims(r: Any) -> list[tuple[KeyPath, Any]]:
    return [(("study", "claims", name), claim) for name, claim in (r.study.claims or {}).items()]


_STUDY = (
    Conflict("", _unknown_names, "found {1!r}.{2}"),
    Conflict("", _points, "found {1}, expected one point of a sweep as {{SWEEP: VALUE}}; {2}."),
    Conflict("study.arms.base", lambda r, f: _BASE in r.study.arms, "this name is the untouched model's. Choose another."),
    Conflict("", lambda r, f: [(("study", key, name),) for key in ("arms", "retrievals") for name in getattr(r.study, key) or {}
                               if "+" in name or "," in name or (key, name) == ("retrievals", RAG)],
             "a name with '+' or a comma, and the retrieval rag, would be taken for another arm. Choose another."),
    Conflict("", lambda r, f: [(("study", "retrievals", name, "k"),) for name, keys in (r.study.retrievals or {}).items()
                               if "k" in keys],
             "all arms of a study have the numbers of passages of its eval recipe. Remove it."),
    Conflict("study.price", lambda r, f: len(r.study.price) not in (0, 3),
             "expected three numbers: of a million prompt tokens, of a million answer tokens, of a million tokens of training."),
    Conflict("", lambda r, f: [(("study", "arms", name), " and ".join(arm.match)) for name, arm in r.study.arms.items()
                               if len(arm.match or {}) > 1],
             "{1} exclude each other. Keep one."),
    Conflict("", lambda r, f: [(("study", "arms", name),) for name, arm in r.study.arms.items() if arm.after and arm.through],
             "after and through name two models to begin with. Keep one."),
    Conflict("", lambda r, f: [(key,) for key, name in f.adapters.items() if r.study.arms[name].alpha is None and (
             r.study.arms[name].through or any(arm.after == name for arm in r.study.arms.values()))],
             "leaves an adapter, but through adds whole weights, and after trains them. Set adapter.merge: true."),
    Conflict("", lambda r, f: [(("study", "arms", name), other) for name, arm in r.study.arms.items()
                               for other in (arm.match or {}).values() if other in r.study.arms and r.study.arms[other].match],
             "{1} is itself matched to another arm. Name that one."),
    Conflict("", lambda r, f: [(("study", "arms", name), arm.corpus) for name, arm in r.study.arms.items()
                               if arm.corpus in ("augmented", "random") and r.study.augment is None],
             "corpus {1} needs study.augment, the recipe that writes it."),
    Conflict("", lambda r, f: [(("study", "arms", name, "corpus"), arm.corpus) for name, arm in r.study.arms.items()
                               if arm.corpus not in ("augmented", "random") and not is_file(arm.corpus)
                               and ((f.checks_inputs and not r.study.setup) or not Path(arm.corpus).suffix)],
             "found {1!r}: neither augmented nor random, and as a file nothing is there. Check the path."),
    Conflict("", lambda r, f: [(("study", "models", name),) for name, item in r.study.models.items() if not isinstance(item, str)
                               and ((item.path is None and item.recipe is None) or (item.overrides and item.recipe is None))],
             "has neither path nor recipe, or overrides without the recipe that they change. Give a recipe."),
    Conflict("", _missing_of_claims, "{1}: missing; test {2} needs it."),
    Conflict("", _unread_keys, "found {1!r}; it must begin with one of {2}."),
    Conflict("", lambda r, f: [item for item in _override_keys(r) if item[1].startswith(("corpus.path", "model.path"))],
             "{1} is set by the study. Use the arm's corpus, or study.models."),
    Conflict("", lambda r, f: [item for item in _override_keys(r) if item[1].split(".")[0] in f.augment_keys
                               and r.study.augment is None],
             "{1} changes study.augment, which is missing."),
    Conflict("", _untuned_sets,
             "{1!r} has no validation questions. Name a set in study.validation, or its validation file in eval."),
    Conflict("", lambda r, f: [((*key, "test"), claim.test) for key, claim in _claims(r)
                               if claim.question_set in f.writes_words and claim.test in ("above_chance", "near_chance")],
             "{1}: the answers are written, which has no chance of guessing. Compare with a baseline (difference, equivalence)."),
    Conflict("", lambda r, f: [((*key, "outcome"), claim.outcome) for key, claim in _claims(r)
                               if f.sets is not None and claim.question_set not in f.writes and claim.outcome != "right"],
             "found {1}, but the answers are choices: right or wrong. Put generate first in eval.formats, or take it out."),
    Conflict("", lambda r, f: [((*key, "net"), claim.test) for key, claim in _claims(r)
                               if claim.net and claim.test in ("above_chance", "near_chance")],
             "has no effect on {1}, which compares with guessing. Take it out, or compare with a baseline (difference)."),
)  # fmt: skip

CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "train": TRAIN_ROWS, "plan": MODEL_ROWS, "eval": _EVAL, "augment": _AUGMENT, "questions": _QUESTIONS, "generator": _GENERATOR,
    "study": _STUDY,
}  # fmt: skip
"""Verb -> its rows, and those of each generator. Facts: a `Launch`, `Asking` or `Shared`; for
augment, the styles."""
