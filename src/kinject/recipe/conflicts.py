"""The one table of keys that exclude or need each other, for every verb; `find_problems` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinject.disk import path_exists
from kinject.errors import Problem
from kinject.recipe.check import Conflict, suggestion
from kinject.recipe.eval_section import EvalSection, QuestionSetSection
from kinject.recipe.sections import GENERATOR_REQUIRES, MAX_SAMPLES, RESERVED_BODY, SAMPLING, GeneratorSection
from kinject.recipe.train_conflicts import MODEL_ROWS, TRAIN_ROWS


def find_problems(verb: str, recipe: Any, facts: Any = None, more: Iterable[Conflict] = ()) -> list[Problem]:
    """Return the problems of all rows for `verb` and of `more` rows; `facts` are those that the rows of the verb read."""
    problems = [problem for row in (*CONFLICTS[verb], *more) for problem in row.problems(recipe, facts)]
    for key, generator in _generators(recipe, verb):
        for row in CONFLICTS["generator"]:
            problems += [Problem(f"{key}{item.key}", item.message) for item in row.problems(generator)]
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
    names = {"openai": (), "transformers": ("stop",)}.get(g.kind, ("stop", "extra_body", "chat_template_kwargs"))
    return [(name, g.kind) for name in names if getattr(g, name)]


def _is_url(text: str) -> bool:
    """Return whether `text` is a web URL with a possible host name and port."""
    try:
        parts = urlsplit(text)
        host, _ = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and text.isprintable() and " " not in text


def _free(budget: float | None, *generators: GeneratorSection | None) -> bool:
    """Return whether there is a budget although nothing has a price."""
    return budget is not None and not any(g.price_in or g.price_out for g in generators if g is not None)


_GENERATOR = (
    Conflict("", lambda g, f: [GENERATOR_REQUIRES[g.kind]] if g.kind in GENERATOR_REQUIRES
             and not getattr(g, GENERATOR_REQUIRES[g.kind][0]) else [],
             "{0} is missing. Give {1}."),
    Conflict(".base_url", lambda g, f: isinstance(g.base_url, tuple) and len(g.parts()) < max(1, len(g.base_url)),
             "is empty, or names an endpoint twice. Give each once."),
    Conflict(".base_url", lambda g, f: [part.address for part in g.parts().values()
                                         if part.address and not _is_url(part.address)],
             "found {0!r}, expected a URL such as http://127.0.0.1:8000/v1."),
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
        other = names.setdefault(repr((replace(table.endpoint, base_url=None), table.api, table.revision)), name)
        if r.eval.endpoints()[other].address != table.address:
            found.append((name, other))
    return found


def _sets(r: Any) -> list[tuple[str, QuestionSetSection]]:
    return [
        (name, QuestionSetSection(item) if isinstance(item, str) else item) for name, item in r.eval.questions.items()
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
             lambda r, f: [name for name, table in r.eval.endpoints().items() if table.endpoint.kind != "openai"],
             "must be of kind: openai."),
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
                           if table.api == "completions" and table.tokenizer is None and table.chat],
             "missing. chat needs it: tokenizer: FOLDER."),
    Conflict("eval.models.{0}.revision", _same_answers,
             "missing. {1} has the same model and parameters at another address; answers would be taken for one another's. "
             "Give each a revision (any text)."),
    Conflict("eval.max_thinking_tokens",
             lambda r, f: r.eval.max_thinking_tokens and not any(table.chat for table in r.eval.tables().values()),
             "there is no chat, so nothing reads it. Set eval.chat: true."),
    Conflict("eval.questions.{0}", lambda r, f: [(name, max(r.eval.shots)) for name, item in _sets(r)
                                                 if max(r.eval.shots) and item.shots_from is None],
             "eval.shots asks for {1} examples, but shots_from is missing. Name the file that holds them."),
    Conflict("eval.questions.{0}.{1}", lambda r, f: [(name, key) for name, item in _sets(r) for key in ("validation", "contexts")
                                                     if getattr(item, key) and r.eval.retrieval is None],
             "is there, but eval.retrieval, which sets K, is missing."),
    Conflict("eval.questions.{0}", lambda r, f: [name for name, item in _sets(r) if r.eval.retrieval is not None
                                                 and not (r.eval.retrieval.documents or item.contexts) and item.gets_passages],
             "has no contexts, and eval.retrieval names no documents to find them in. Give one or the other."),
    Conflict("eval.questions.{0}", lambda r, f: [name for name, item in _sets(r) if item.validation and item.contexts],
             "validation cannot use contexts that were prepared for other questions."),
    Conflict("eval.judge", lambda r, f: ("judge" in r.eval.scores) != (r.eval.judge is not None),
             "eval.judge, the model, and judge in eval.scores, which reads its grades, need each other. Add or remove one."),
    Conflict("eval.judge", lambda r, f: r.eval.judge is not None and not f.writes,
             "grades written answers, but no format writes any. Add generate to eval.formats."),
    Conflict("eval.judge.kind", lambda r, f: [r.eval.judge.kind] if r.eval.judge is not None
             and r.eval.judge.kind in ("sandbox", "file") else [],
             "found {0}, which grades nothing. Allowed: openai (an endpoint) or transformers."),
    Conflict("eval.budget", lambda r, f: _free(r.eval.budget, r.eval.judge, *(m.endpoint for m in r.eval.endpoints().values())),
             "needs price_in and price_out of an endpoint or the judge: without prices all is free."),
    Conflict("eval.retrieval.overlap",
             lambda r, f: [(s.overlap, (s.passage_tokens - 1) // 2) for s in (r.eval.retrieval,)
                           if s is not None and s.overlap >= s.passage_tokens // 2],
             "found {0}, allowed: 0 to {1}, less than half of passage_tokens."),
    Conflict("eval.retrieval.reranker.candidates",
             lambda r, f: [(s.reranker.candidates, max(s.k)) for s in (r.eval.retrieval,)
                           if s is not None and s.reranker is not None and s.reranker.candidates < max(s.k)],
             "found {0}, allowed: at least the largest k ({1})."),
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
             "needs augment.generator.price_in and price_out: without prices all is free."),
)  # fmt: skip
_QUESTIONS = (
    Conflict("questions.generator.kind", lambda r, f: r.questions.generator.kind == "file",
             "questions need a model to ask; kind: file has none."),
    Conflict("questions.kinds", lambda r, f: {*r.questions.kinds} == {"unanswerable"},
             "found unanswerable alone; such questions are near others on the passage. Add choices or open."),
    Conflict("questions.budget", lambda r, f: _free(r.questions.budget, r.questions.generator),
             "needs questions.generator.price_in and price_out: without prices all is free."),
)  # fmt: skip

CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "train": TRAIN_ROWS, "plan": MODEL_ROWS, "eval": _EVAL, "augment": _AUGMENT, "questions": _QUESTIONS, "generator": _GENERATOR,
}  # fmt: skip
"""Verb -> its rows, and those of each generator. The facts: train, a `Launch`; augment, the styles; eval, an `Asking`."""
