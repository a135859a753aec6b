"""Names and numbers as the pages, tables and figures write them, and lookups in a report. Computes
no statistics."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kinject.question_formats import FORMATS
from kinject.results import (
    ALPHA,
    ArmInfo,
    ArmResult,
    Perplexity,
    PromptFormat,
    Report,
    UnscoredResult,
)
from kinject.stats.perplexities import change_bounds
from kinject.terminal import format_count, rounded_p

# What `str.splitlines` takes for the end of a line.
_LINE_ENDS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
# They change the order in which a terminal or browser shows text (docs/security.md).
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
ROLES = {
    "learning": "to be learned",
    "retention": "to be kept",
    "unanswerable": "without an answer",
}
"""Role of a question set -> its words on the page."""

_SCORES = {
    "chars": "per character",
    "bytes": "per byte",
    "tokens": "per token",
    "pmi": "beyond the same without the question",
    "match": "by match",
    "exact": "by exact match",
    "contains": "by containment",
    "judge": "by the judge",
}


def format_name(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, control and direction characters replaced; past `longest`, cut in
    the middle."""
    clean = format_command(" ".join(text.split()))
    if longest is None or len(clean) <= longest:
        return clean
    head = longest // 2
    return f"{clean[:head]}…{clean[len(clean) - (longest - head - 1) :]}"


def format_command(text: str) -> str:
    """Return a command on one line, control and direction characters replaced; two spaces in a row
    stay, since a path may have them."""
    return "".join("\ufffd" if _is_hidden(character) else character for character in text)


def _is_hidden(character: str) -> bool:
    """Return whether a character is a control character, the end of a line, half a surrogate pair
    or a mark of direction."""
    return (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _DIRECTION_MARKS
    )


def quoted(name: str) -> str:
    """Return the name of a question set so that no sentence runs into it: ``“new”``."""
    return f"“{format_name(name)}”"


def format_percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal: 0.845 gives ``84.5%``."""
    return f"{100 * fraction:.1f}%"


def format_finite(value: float | None, digits: int, otherwise: str = "not finite") -> str:
    """Return a number with so many decimals, `otherwise` for None."""
    return otherwise if value is None else f"{value:.{digits}f}"


def format_nonzero(value: float, template: str) -> str:
    """Return a number by a template such as ``{:.1f} GiB``, "" for 0."""
    return template.format(value) if value else ""


def with_details(text: str, details: str) -> str:
    """Return ``text (details)``, or `text` alone without details."""
    return f"{text} ({details})" if details else text


def format_seed(seed: int | None) -> str:
    """Return ``, seed 2``, "" for None."""
    return "" if seed is None else f", seed {seed}"


def perplexity_change(item: Perplexity, base: Perplexity) -> str:
    """Return the change of a perplexity from the base's, with its 95% interval over texts and seeds
    where there is one: ``+12.0%, +8.1% to +16.0%``, from ten times on ``x 23``; "" for the base.

    Perplexities of different tokens cannot be compared; bits per byte can.
    """
    if item.n_tokens != base.n_tokens:
        return "other tokens"
    if item is base or item.per_token is None or base.per_token is None:
        return ""
    ratio = item.per_token / base.per_token
    low, high = change_bounds(item, base) or (ratio, ratio)
    # One form for all three: "+880%, +756% to x 11" is hard to read.
    in_times = high >= 10
    change = _ratio(ratio, in_times=in_times)
    if low == high:
        return change
    return f"{change}, {_ratio(low, in_times=in_times)} to {_ratio(high, in_times=in_times)}"


def _ratio(ratio: float, *, in_times: bool) -> str:
    if in_times and ratio >= 10:
        return f"x {ratio:,.0f}"
    if in_times:
        return f"x {ratio:.1f}"
    # A minus sign, as points have it.
    return f"{ratio - 1:+.1%}".replace("-", "−")


def format_points(difference: float) -> str:
    """Return a difference of fractions in percentage points, signed: 0.012 gives ``+1.2``, none
    gives ``0.0``."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    # No sign where nothing changed: rounding leaves +0.0 or -0.0.
    return "0.0" if text[1:] == "0.0" else text


def format_p(p: float) -> str:
    """Return ``p = 0.012``; below a thousandth ``p < 0.001``. Near 0.05: ``p < 0.05`` or ``p >
    0.05``."""
    if p >= 0.1:
        return f"p = {p:.2f}"
    text = rounded_p(p, ALPHA)
    if text.startswith(("<", ">")):
        return f"p {text}"
    return f"p = {text}"


def bare_p(p: float) -> str:
    """Return p as `format_p` does, without ``p =``, for a column with the heading p."""
    return format_p(p).removeprefix("p ").removeprefix("= ")


def format_label(name: str) -> str:
    """Return the label of a format; its name, if it is one that another program added."""
    if name in FORMATS:
        return FORMATS[name].label
    return format_name(name)


def format_prompt(form: PromptFormat) -> str:
    """Return a prompt format in words: ``option texts per byte, 5 shots``."""
    name = format_label(form.format)
    if form.score != "sum":
        name += f" {_SCORES.get(form.score, form.score)}"
    return f"{name}, {format_count(form.shots, 'shot')}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, or ``a, b and c``; ``a, x; b; and c`` where a word has a comma."""
    if len(words) < 2:
        return "".join(words)
    # Arms of a sweep have one in their names: "ft-par, ft-par, paraphrase 1" would read as three.
    if len(words) > 2 and any(", " in word for word in words):
        return f"{'; '.join(words[:-1])}; and {words[-1]}"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def escape_markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, on one line: no tags, links, emphasis,
    headings or table borders."""
    escaped = (
        _LINE_ENDS.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    # Some readers of Markdown make a link of a bare address.
    return re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", escaped).replace("://", ":&#47;/")


@dataclass(frozen=True, slots=True)
class Training:
    """The training of one arm, from its manifest: `reading` in words what it read, `epochs` how
    often (None: not counted); `warnings` are what it warned of."""

    reading: str
    steps: int
    epochs: float | None
    finished: bool
    warnings: tuple[str, ...] = ()


class View:
    """A report's results by model, arm, question set and prompt format.

    `set_results` are the results on whole question sets: neither those without the question nor
    those of one subject. `trainings` are known by (model, arm) where their run folders still exist.
    """

    def __init__(
        self, report: Report, trainings: Mapping[tuple[str, str], Training] | None = None
    ) -> None:
        self.report = report
        self.trainings = dict(trainings or {})
        self.set_results = [
            result for result in report.results if result.role != "baseline" and not result.subject
        ]
        self.arms = {(arm.model, arm.name): arm for arm in report.arms}
        # By key: looking up scores took a seventh of the 59 s of a report over 150 runs.
        self._by_k: dict[tuple[str, str, str, PromptFormat], list[ArmResult]] = {}
        self._formats: dict[str, list[PromptFormat]] = {}
        # `shown` and `retrieval` list the results of an arm by K.
        for result in sorted(self.set_results, key=lambda result: result.k):
            key = (result.model, result.arm, result.question_set, result.prompt_format)
            self._by_k.setdefault(key, []).append(result)
        for result in self.set_results:
            formats = self._formats.setdefault(result.question_set, [])
            if result.prompt_format not in formats:
                formats.append(result.prompt_format)

    @property
    def is_study(self) -> bool:
        """Whether the report is a study's; else it is an evaluation's."""
        return self.report.kind == "study"

    @property
    def several_models(self) -> bool:
        """Whether there is more than one base model."""
        return len(self.report.models) > 1

    def with_model(self, text: str, model: str) -> str:
        """Return `text` with the base model behind it, where there are several."""
        if self.several_models and model:
            return f"{text}, {format_name(model)}"
        return text

    def reading(self, model: str, arm: str) -> str:
        """Return in words what a trained arm read, "" where neither its manifest nor the study
        describes it."""
        training = self.trainings.get((model, arm))
        if training is not None and training.reading:
            return training.reading
        return self.about(model, arm)

    def about(self, model: str, arm: str) -> str:
        """Return the study's own words for an arm, "" where it has none but its name."""
        if not self.is_study:
            return ""
        about = format_name(self.arms[model, arm].description)
        return "" if about == format_name(arm) else about

    def headline_results(self) -> Iterator[ArmResult]:
        """Yield the results of the report's own arms that are judged: each set's first format, with
        the chosen K if any."""
        for _, _, _, results in self.groups(n_formats=1):
            yield from results

    def own_arms(self, model: str) -> list[ArmInfo]:
        """Return the arms of `model` that are not points of a sweep, the untrained first."""
        arms = [arm for arm in self.report.arms if arm.model == model and not arm.sweep]
        return sorted(arms, key=lambda arm: arm.trained)

    def sets(self, role: str = "", model: str = "") -> list[str]:
        """Return the names of the question sets (of `role`, asked of `model`), in order."""
        results = self.set_results
        if role:
            results = [result for result in results if result.role == role]
        if model:
            results = [result for result in results if result.model == model]
        return list(dict.fromkeys(result.question_set for result in results))

    def first(self, question_set: str) -> ArmResult:
        """Return the first result on a question set."""
        return next(result for result in self.set_results if result.question_set == question_set)

    def perplexities(self) -> Iterator[tuple[str, list[Perplexity]]]:
        """Yield each base model's file of held-out texts, in words, and its perplexities, that of
        the base first, if it has one: it may be behind an endpoint."""
        by_file: dict[tuple[str, str], list[Perplexity]] = {}
        for item in self.report.perplexities:
            by_file.setdefault((item.model, item.name), []).append(item)
        for (model, name), items in by_file.items():
            yield self.with_model(format_name(name), model), items

    def has_base(self, items: Sequence[Perplexity]) -> bool:
        """Return whether the first of some perplexities is that of the base."""
        return items[0].arm == self.base(items[0].model or self.report.models[0])

    def formats(self, question_set: str) -> list[PromptFormat]:
        """Return the prompt formats of `question_set`; the first is the headline."""
        return self._formats.get(question_set, [])

    def _every_k(
        self, model: str, arm: str, question_set: str, form: PromptFormat | None
    ) -> list[ArmResult]:
        """Return an arm's results in one format, by K; in the headline without `form`."""
        formats = self.formats(question_set)
        if form is None and not formats:
            return []
        return self._by_k.get((model, arm, question_set, form or formats[0]), [])

    def result(
        self, model: str, arm: str, question_set: str, k: int = 0, form: PromptFormat | None = None
    ) -> ArmResult | None:
        """Return an arm's result with `k` passages, None if there is none."""
        return next((r for r in self._every_k(model, arm, question_set, form) if r.k == k), None)

    def retrieval(self, model: str, question_set: str) -> ArmResult | None:
        """Return the base with retrieval that trained arms are compared with: its chosen K, in an
        evaluation else the first."""
        base = self.base(model)
        results = [r for r in self._every_k(model, base, question_set, None) if r.k]
        chosen = next((r for r in results if r.chosen_k), None)
        if chosen is not None or self.is_study or not results:
            return chosen
        # The first in the recipe's order: `results` are in the order of K.
        return next(r for r in self.set_results if r in results)

    def base(self, model: str) -> str:
        """Return the name of the arm that is the untrained model, "" if there is none."""
        return next((arm.name for arm in self.own_arms(model) if not arm.trained), "")

    def shown(
        self, model: str, question_set: str, form: PromptFormat | None = None
    ) -> list[ArmResult]:
        """Return the results of the report's own arms: without context, then with the chosen K
        (each K if none was chosen)."""
        plain: list[ArmResult] = []
        with_context: list[ArmResult] = []
        for arm in self.own_arms(model):
            every_k = self._every_k(model, arm.name, question_set, form)
            plain += [result for result in every_k if not result.k]
            chosen = [result for result in every_k if result.chosen_k][:1]
            with_context += chosen or [result for result in every_k if result.k]
        return plain + with_context

    def groups(
        self, n_formats: int | None = None
    ) -> Iterator[tuple[str, str, PromptFormat, list[ArmResult]]]:
        """Yield (model, question set, prompt format, `shown` results) of all sets, in their first
        `n_formats`."""
        for model in self.report.models:
            for name in self.sets("", model):
                for form in self.formats(name)[:n_formats]:
                    results = self.shown(model, name, form)
                    if results:
                        yield model, name, form, results


def more_unscored(n_unscored: int) -> str:
    """Return ``; 3 more have no score``, "" where all have one."""
    if n_unscored == 0:
        return ""
    if n_unscored == 1:
        return "; 1 more has no score"
    return f"; {n_unscored:,} more have no score"


def unscored_text(item: UnscoredResult) -> str:
    """Return the sentence on an arm of which no question has a score."""
    arm = f"{arm_name(item.arm, item.k)}{format_seed(item.seed)}"
    prompt = format_prompt(PromptFormat(item.format, item.shots, item.score))
    label = f"{arm} on {format_name(item.question_set)} ({prompt})"
    return (
        f"{label}: none of {format_count(item.n, 'question')} has a score: their log-probs are not "
        "finite, or all equal, or their choices exceed the model's window"
    )


def arm_label(result: ArmResult) -> str:
    """Return ``cpt`` or ``cpt with passages``, with K if it was not chosen."""
    name = arm_name(result.arm, result.k)
    if result.k and not result.chosen_k:
        return f"{name}, K = {result.k}"
    return name


def arm_key(result: ArmResult) -> tuple[str, int | None]:
    """Return what tells an arm's results from those of others: its name, and its K; None for a
    chosen one, which may be another on each question set.

    By their labels the arm “ft with passages” and the arm ft with passages would be one.
    """
    if result.chosen_k and result.k:
        return result.arm, None
    return result.arm, result.k


def arm_name(arm: str, k: int = 0) -> str:
    """Return ``cpt``, or ``cpt with passages``."""
    return f"{format_name(arm)} with passages" if k else format_name(arm)
