"""The verdict in words on learning, forgetting, retrieval, and answers that no document gives.

Every number comes from the report, and each contrast's test decides its significance. A question set is judged in the
prompt format that the recipe lists first; a clause sums up the other formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kinject.report.formatting import (
    format_count,
    format_finite,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_prompt,
    format_relative,
    join_words,
    perplexity_change,
)
from kinject.report.limitations import range_text
from kinject.report.view import View, arm_label
from kinject.results import (
    FEWEST,
    ArmResult,
    Contrast,
    Scope,
    UnscoredResult,
    fewest_for,
    in_these_models,
)

_WIDEST_GAIN = 5.0  # interval of a useful gain: a base near chance gives any number
_MOST_NAMED = 4  # arms in one lead; more are counted
_MOST_PLACES = 4  # question sets by models with a sentence each
_LEARNED = ("learned", "no learning shown", "got worse")
_KEPT = ("gained", "no loss shown", "forgot")
_DECLINED = ("declines more", "no change in declining shown", "declines less")
_RETRIEVED = ("retrieval helps", "no help shown", "retrieval hurts")
_AGAINST = ("better than retrieval", "no difference shown", "retrieval better")
_ADDED = ("adds to retrieval", "no addition shown", "hurts retrieval")
_LEADS = {
    "learned": "{arms} learned",
    "not above chance": "{arms} gained, but cannot be distinguished from chance",
    "no learning shown": "no learning is shown for {arms}",
    "got worse": "{arms} got worse",
    "gained": "{arms} gained",
    "no loss shown": "no loss is shown for {arms}",
    "forgot": "{arms} forgot",
    "declines more": "{arms} declined more often",
    "no change in declining shown": "no change is shown for {arms}",
    "declines less": "{arms} declined less often, and answered questions that no document answers",
    "better than retrieval": "{arms} did better than retrieval alone",
    "retrieval better": "retrieval alone did better than {arms}",
    "no difference shown": "no difference to retrieval alone is shown for {arms}",
    "adds to retrieval": "{arms} did better than retrieval alone",
    "both help": "both help: {arms} did better than either alone",
    "no addition shown": "that training adds to retrieval is not shown for {arms}",
    "hurts retrieval": "training made retrieval worse in {arms}",
    "too few documents to tell": "{arms} cannot be judged: the documents are too few to tell",
    "too few questions to tell": "{arms} cannot be judged: the questions are too few to tell",
    "not tested": "{arms} cannot be compared with retrieval: there is no test of the difference",
}
"""Tag of a finding -> its words in the lead; the number behind each arm is its change in points."""

_TOO_FEW = "too few to tell from chance"
_NO_LEARNING = "it has no trained arm with a question set of the role “learning”"
_NO_RETENTION = "it has no trained arm with a question set of the role “retention”"
_NO_RETRIEVAL = "it has no trained arm beside the base with retrieved context (and a chosen K)"
_TESTS = {"McNemar": "McNemar", "sign flips": "sign flips by document", "t over documents and seeds": "t test"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about an arm on a set: a `tag` of a few words, its `tone` (good, bad, flat), and the sentence.

    `change` is the difference of accuracies that the tag judges, `scope` its scope.
    """

    arm: str
    question_set: str
    tag: str
    tone: str
    change: float
    text: str
    scope: Scope = "method"


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """One of the practitioner's questions, its answer in one line, and the findings behind it."""

    question: str
    lead: str
    findings: tuple[Finding, ...]


def render_verdict(view: View) -> tuple[AnsweredQuestion, ...]:
    """Return the practitioner's three questions with their answers, base model by base model; a fourth where it was asked."""
    learning = [_Judge(view, model, name) for model in view.report.models for name in view.sets("learning", model)]
    retention = [_Judge(view, model, name) for model in view.report.models for name in view.sets("retention", model)]
    nobody = [_Judge(view, model, name) for model in view.report.models for name in view.sets("unanswerable", model)]
    made_up = [judge.unanswerable() for judge in nobody] + list(_without_score(view, "unanswerable"))
    cannot = f"This {view.report.kind} cannot say: {{}}."
    return (
        _answer("Did it learn?", cannot.format(_NO_LEARNING),
                [*(judge.learning() for judge in learning), *_without_score(view, "learning")]),
        _answer("What did it forget?", cannot.format(_NO_RETENTION),
                [*(judge.retention() for judge in retention), *_without_score(view, "retention"), *_perplexities(view)]),
        _answer("Would retrieval have done better, or do both help?", cannot.format(_NO_RETRIEVAL),
                [judge.retrieval() for judge in learning]),
        *([_answer("Does it answer what no document says?", "No arm was compared.", made_up)] if made_up else ()),
    )  # fmt: skip


def _perplexities(view: View) -> Iterator[tuple[str, list[Finding]]]:
    """Yield a lead for each base model and file of held-out texts that trained arms were measured on."""
    for label, (base, *others) in view.perplexities():
        changes = [
            f"{format_finite(item.per_token, 1)} for {format_name(item.arm)} ({perplexity_change(item, base)})"
            for item in others
            if item.per_token is not None and item.n_tokens == base.n_tokens
        ]
        if changes:
            before = f"{format_finite(base.per_token, 1)} for {format_name(base.arm)}"
            yield f"Perplexity of {label}, without a test: {before}, {join_words(changes)}.", []


def _without_score(view: View, role: str) -> Iterator[tuple[str, list[Finding]]]:
    """Yield a lead for each set of `role` of which no arm has a score: no other text mentions it."""
    for name in dict.fromkeys(item.question_set for item in view.report.unscored if item.role == role):
        if name not in view.sets(role):
            arms = dict.fromkeys(_diverged(view, u) for u in view.report.unscored if u.question_set == name)
            yield f"On {format_name(name)}, {join_words(list(arms))} diverged: no question has a score.", []


def _diverged(view: View, item: UnscoredResult) -> str:
    """Return the name of an arm without a score, with its seed where the other seeds have one."""
    key = (item.model, item.arm, item.question_set)
    scored = any((r.model, r.arm, r.question_set) == key and r.k == item.k for r in view.set_results)
    return format_name(item.arm) + (f" (seed {item.seed})" if scored and item.seed is not None else "")


def _answer(question: str, otherwise: str, parts: Sequence[tuple[str, list[Finding]]]) -> AnsweredQuestion:
    leads = [lead for lead, _ in parts if lead]
    findings = [finding for _, of_part in parts for finding in of_part]
    if len(leads) <= _MOST_PLACES:
        return AnsweredQuestion(question, " ".join(leads) or otherwise, tuple(findings))
    # Too many for a sentence each: count them, and list significant findings first.
    return AnsweredQuestion(question, _counted(findings), tuple(sorted(findings, key=_is_minor)))


def _is_minor(finding: Finding) -> bool:
    """Return whether a finding shows nothing, or is about the base alone."""
    return finding.tone == "flat" or finding.tag not in _LEADS


def _counted(findings: Sequence[Finding]) -> str:
    """Return ``ft-par, on 18 sets: learned 3, no learning shown 15 (...).`` for each arm that was judged."""
    parts = []
    for arm in dict.fromkeys(finding.arm for finding in findings if finding.tag in _LEADS):
        of_arm = [finding for finding in findings if finding.arm == arm and finding.tag in _LEADS]
        tags = [f"{tag} {sum(f.tag == tag for f in of_arm)}" for tag in dict.fromkeys(f.tag for f in of_arm)]
        low, high = min(finding.change for finding in of_arm), max(finding.change for finding in of_arm)
        spread = f"{format_points(low)} to {format_points(high)} points"
        models = f",{in_these_models('these models')}" if any(finding.scope != "method" for finding in of_arm) else ""
        parts.append(f"{arm}, on {len(of_arm)} sets{models}: {', '.join(tags)} ({spread}).")
    return " ".join(parts)


class _Judge:
    """Judges the arms of one base model on one question set."""

    def __init__(self, view: View, model: str, question_set: str) -> None:
        self.view, self.model, self.question_set = view, model, question_set
        self.format = view.headline(question_set)
        self.label = format_name(question_set) + (f" ({format_name(model)})" if view.several_models else "")
        self.base = view.result(model, view.base(model), question_set)
        self.context = view.retrieval(model, question_set)
        trained = [result for result in view.shown(model, question_set) if view.arms[model, result.arm].trained]
        self.plain = [result for result in trained if not result.k]
        self.diverged = list(dict.fromkeys(
            _diverged(view, item) for item in view.report.unscored
            if (item.model, item.question_set, item.format, item.shots, item.score) == (model, question_set, *self.format)
            and not item.k
        ))  # fmt: skip
        self.both = [result for result in trained if self.context is not None and _with_context(result, self.context)]

    def learning(self) -> tuple[str, list[Finding]]:
        """Return the lead and the findings on learning."""
        findings = [self._learned(result, contrast) for result, contrast in _compared(self.plain)]
        at_chance, above = "nothing shows that it knew these facts", "some of this it could answer already"
        return self._lead(findings, self.diverged), [*self._start(at_chance, above), *findings]

    def retention(self) -> tuple[str, list[Finding]]:
        """Return the lead and the findings on forgetting."""
        findings = [
            self._finding(
                result, *_judged(contrast, _KEPT), contrast.delta, self._change(result, contrast), contrast.scope
            )
            for result, contrast in _compared(self.plain)
        ]
        start = self._start("a loss could not show here", "there is something to lose")
        return self._lead(findings, self.diverged), [*start, *findings]

    def unanswerable(self) -> tuple[str, list[Finding]]:
        """Return the lead and the findings on questions that have no answer: declined before and after training."""
        findings = []
        for result, contrast in _compared(self.plain):
            text = f"To decline is correct here: {self._change(result, contrast)}{self._declined(result)}"
            findings.append(self._finding(result, *_judged(contrast, _DECLINED), contrast.delta, text, contrast.scope))
        return self._lead(findings, self.diverged), findings

    def _declined(self, result: ArmResult) -> str:
        """Return how often an arm declined questions that have an answer, and the change to base; "" if none was written."""
        parts = []
        for name in self.view.sets("learning", self.model):
            learning_result = next(
                (r for r in self.view.shown(self.model, name) if (r.arm, r.k) == (result.arm, 0)), None
            )
            declined = learning_result.abstained if learning_result is not None else None
            if declined is not None and declined.to_base is not None:
                change = f"{_difference(declined.to_base)}"
                parts.append(f"{format_percent(declined.rate)} of {format_name(name)}, {change}")
        return f" Of the questions that have an answer, it declined {join_words(parts)}." if parts else ""

    def retrieval(self) -> tuple[str, list[Finding]]:
        """Return the lead and the findings on retrieval against training."""
        if self.context is None or (self.view.is_study and not (self.plain or self.both)):
            return "", []
        start = []
        if self.context.to_base is not None:
            contrast, k = self.context.to_base, self.context.k
            text = f"with {format_count(k, 'passage')} before the question: {self._change(self.context, contrast)}"
            judged = _judged(contrast, _RETRIEVED)
            start = [self._finding(self.context, *judged, contrast.delta, text, contrast.scope)]
        findings = [self._beside(result, self.context, _AGAINST) for result in self.plain]
        findings += [self._beside(result, self.context, _ADDED) for result in self.both]
        return self._lead(findings), [*start, *findings]

    def _beside(self, result: ArmResult, context: ArmResult, tags: tuple[str, str, str]) -> Finding:
        accuracies = f"{format_percent(result.accuracy)} against {format_percent(context.accuracy)}"
        levels = f"{accuracies} for {arm_label(context)}"
        contrast, plain = result.to_rag, result.to_plain
        if contrast is None:
            change = result.accuracy - context.accuracy
            text = f"{levels}: {format_points(change)} points, without a test of the difference."
            return self._finding(result, "not tested", "flat", change, text)
        tag, tone = _judged(contrast, tags)
        text = f"{levels}: {_difference(contrast)}."
        if plain is not None:
            text += f" Against {format_name(result.arm)} without context: {_difference(plain)}."
            if tag == "adds to retrieval" and plain.is_significant and plain.delta > 0:
                tag = "both help"
        return self._finding(result, tag, tone, contrast.delta, text, contrast.scope)

    def _start(self, at_chance: str, above: str) -> list[Finding]:
        """Return the finding on the base, which comes first."""
        base = self.base
        if base is None:
            return []
        tag, tone = _relation_to_chance(base)
        chance = f"chance ({format_percent(base.chance)})"
        meaning = {
            "at chance": f"not distinguishable from {chance}: {at_chance}.",
            "above chance": f"above {chance}: {above}.",
            "below chance": f"below {chance}: it prefers wrong answers, so look at the format.",
            _TOO_FEW: f"too few to tell it from {chance}; {FEWEST} documents or single questions are needed.",
        }[tag]
        text = (
            f"answers {format_percent(base.accuracy)} of {base.n:,} questions ({format_prompt(self.format)}; 95% interval "
            f"{_interval(base)}), {meaning}"
        )
        if base.n_unscored:
            text += f" {_unscored(base)}"
        return [self._finding(base, tag, tone, 0.0, text)]

    def _finding(
        self, result: ArmResult, tag: str, tone: str, change: float, text: str, scope: Scope = "method"
    ) -> Finding:
        return Finding(arm_label(result), self.label, tag, tone, change, text, scope)

    def _learned(self, result: ArmResult, contrast: Contrast) -> Finding:
        tag, tone = _judged(contrast, _LEARNED)
        to_chance = _relation_to_chance(result)[0]
        if tag == "learned" and to_chance != "above chance":
            tag, tone = "not above chance", "flat"
        verbs = {
            "above chance": "lies above",
            "at chance": "cannot be distinguished from",
            "below chance": "lies below",
            _TOO_FEW: "has too few questions or documents to be distinguished from",
        }
        text = f"{self._change(result, contrast)} It {verbs[to_chance]} chance ({format_percent(result.chance)})."
        if result.to_closest is not None:
            beside = f"{_difference(result.to_closest)}"
            text += f" Against {format_name(result.to_closest.other)}, the closest trained arm: {beside}."
        return self._finding(result, tag, tone, contrast.delta, text, contrast.scope)

    def _change(self, result: ArmResult, contrast: Contrast) -> str:
        seeds, possible = "", ""
        if len(result.by_seed) > 1:
            low, high = min(result.by_seed), max(result.by_seed)
            seeds = f"; {len(result.by_seed)} seeds, {format_percent(low)} to {format_percent(high)}"
        gained = f"{format_count(contrast.wrong_to_right, 'question')} became right"
        if contrast.too_few:
            among = f" among {contrast.family:,} comparisons" if contrast.n_clusters >= FEWEST else ""
            needed = fewest_for(contrast.family if among else 1)
            possible = f" {contrast.n_clusters} {contrast.unit} are too few to tell{among}; {needed} are needed."
        elif contrast.low is not None and contrast.high is not None and not contrast.is_significant:
            low, high = contrast.low, contrast.high
            possible = (
                f" Not significant; changes of {format_points(low)} to {format_points(high)} points remain possible."
            )
        relative = "" if result.role == "unanswerable" else _relative(contrast)
        changed = f"{_difference(contrast)}{relative}. {gained}, {contrast.right_to_wrong:,} wrong"
        changed += f".{possible}{' ' + _unscored(result) if result.n_unscored else ''}"
        return (
            f"from {format_percent(contrast.accuracy - contrast.delta)} to {format_percent(contrast.accuracy)} (95% interval "
            f"{_interval(result)}{seeds}): {changed}{self._other_formats(result)}"
        )

    def _other_formats(self, result: ArmResult) -> str:
        """Return the changes in the other formats for the same arm and set, "" if there is no other format."""
        key = (result.model, result.arm, result.question_set, result.k)
        contrasts = [
            other.to_base for other in self.view.set_results
            if (other.model, other.arm, other.question_set, other.k) == key
            and other.prompt_format != self.format and other.to_base is not None
        ] if len(self.view.formats(result.question_set)) > 1 else []  # fmt: skip
        if not contrasts:
            return ""
        deltas = [contrast.delta for contrast in contrasts]
        formats = "format" if len(contrasts) == 1 else f"{len(contrasts)} formats"
        significant = f"significant in {sum(c.is_significant for c in contrasts)} of {len(contrasts)}"
        return f" In the other {formats}: {range_text(deltas, format_points)} points, {significant}."

    def _lead(self, findings: Sequence[Finding], diverged: Sequence[str] = ()) -> str:
        """Return ``On new, ft-par (+61.8 points) learned; no learning is shown for ft-reg (+1.0 points).``

        Where arms have one seed each, ``On new, in these models, ...``; where only some have, these are marked.
        """
        parts = []
        alone = {finding.scope for finding in findings} == {"these models"}
        for tag in dict.fromkeys(finding.tag for finding in findings):
            same = [finding for finding in findings if finding.tag == tag]
            arms = join_words([f"{finding.arm} ({_lead_points(finding, alone)})" for finding in same])
            if len(same) > _MOST_NAMED:
                low, high = min(finding.change for finding in same), max(finding.change for finding in same)
                arms = f"{len(same)} arms ({format_points(low)} to {format_points(high)} points)"
            parts.append(_LEADS[tag].replace("{arms}", arms))
        if diverged:
            parts.append(f"{join_words(diverged)} diverged: no question has a score")
        models = f"{in_these_models('these models')}," if alone else ""
        return f"On {self.label},{models} {'; '.join(parts)}." if parts else ""


def _lead_points(finding: Finding, alone: bool) -> str:
    """Return ``+61.8 points``, of an arm with one seed beside others with several ``+61.8 points, this model only``."""
    single = ", this model only" if finding.scope != "method" and not alone else ""
    return f"{format_points(finding.change)} points{single}"


def _with_context(result: ArmResult, context: ArmResult) -> bool:
    """Return whether `result` has retrieval with its chosen K, or else with the K of `context`."""
    return result.k > 0 and (result.chosen_k or result.k == context.k)


def _compared(results: Sequence[ArmResult]) -> list[tuple[ArmResult, Contrast]]:
    return [(result, result.to_base) for result in results if result.to_base is not None]


def _relation_to_chance(result: ArmResult) -> tuple[str, str]:
    if result.n_documents is not None and result.n_documents < FEWEST:
        return _TOO_FEW, "flat"
    if result.low > result.chance:
        return "above chance", "good"
    return ("below chance", "bad") if result.high < result.chance else ("at chance", "flat")


def _judged(contrast: Contrast, tags: tuple[str, str, str]) -> tuple[str, str]:
    """Return the tag for a difference (`tags`: gain, nothing shown, loss; or too few to tell) and its tone."""
    better, neither, worse = tags
    if contrast.too_few:
        return f"too few {contrast.unit} to tell", "flat"
    if not contrast.is_significant:
        return neither, "flat"
    return (better, "good") if contrast.delta > 0 else (worse, "bad")


def _difference(contrast: Contrast) -> str:
    """Return ``+61.8 points (+57.0 to +66.1; t test p < 0.001 after Holm)``."""
    parts = []
    if contrast.low is not None and contrast.high is not None:
        parts.append(f"{format_points(contrast.low)} to {format_points(contrast.high)}")
    if contrast.deciding_p is not None:
        corrected = "" if contrast.p_holm is None else " after Holm"
        parts.append(f"{_TESTS[contrast.test]} {format_p(contrast.deciding_p)}{corrected}")
    models = in_these_models(contrast.scope) if contrast.is_significant else ""
    return f"{format_points(contrast.delta)} points{models}" + (f" ({'; '.join(parts)})" if parts else "")


def _relative(contrast: Contrast) -> str:
    """Return ``, −16% of what base knew above chance (−21% to −11%)``; "" where base is not, or hardly, above chance."""
    low, high = contrast.relative_low or 0.0, contrast.relative_high or 0.0
    if contrast.relative is None or high - low > _WIDEST_GAIN:
        return ""
    text = f", {format_relative(contrast.relative)} of what {format_name(contrast.other)} knew above chance"
    if contrast.relative_low is None or contrast.relative_high is None:
        return text
    return f"{text} ({format_relative(contrast.relative_low)} to {format_relative(contrast.relative_high)})"


def _unscored(result: ArmResult) -> str:
    return f"{result.n_unscored:,} of its questions have no score and are left out."


def _interval(result: ArmResult) -> str:
    return f"{format_percent(result.low)} to {format_percent(result.high)}"
