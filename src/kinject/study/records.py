"""A study's answers, read once: the correct ones of each arm, by seed and setting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

from kinject.corpus.questions import question_content
from kinject.disk import Row
from kinject.errors import DiskError, InputError
from kinject.eval.flips import flip_row, most_common_outcome
from kinject.eval.results import (
    ControlAnswers,
    control_correctness,
    correctness,
)
from kinject.eval.scores import (
    PMI,
    WRITTEN_SCORES,
    Score,
    best_choice,
    is_scored,
    rescored,
    text_score,
)
from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers
from kinject.manifests import read_manifest
from kinject.question_formats import FORMATS
from kinject.report.files import read_report
from kinject.report.formatting import join_words
from kinject.results import Outcome, Perplexity, Recall, Shortcuts
from kinject.stats.intervals import family_variances
from kinject.stats.matrix import CorrectnessMatrix, beyond
from kinject.stats.perplexities import mean_losses
from kinject.study.arms import BASE, Arm
from kinject.study.stages import DONE
from kinject.types import Answer, ArmName, Question


class AskSetting(NamedTuple):
    """The setting of an evaluation: question set, format, few-shot examples, retrieved passages."""

    question_set: str
    format: str
    shots: int
    k: int


@contextlib.contextmanager
def _made_by_a_stage(folder: Path) -> Iterator[None]:
    """Add to the error of a file of an evaluation how the study makes it again: the stage in
    `folder` is done, so that the study alone would not run it."""
    try:
        yield
    except (InputError, DiskError) as error:
        raise type(error)(
            f"{error} For this stage of the study: delete {folder / DONE}, and run the study again."
        ) from error


@dataclass
class Records:
    """Answers of finished evaluations: (model, arm, seed) -> setting -> one scored answer a
    question, sorted by id.

    `scores` are the recipe's: the first of those that compare choices counts for them, the first of
    a text's for texts.
    """

    scores: Sequence[Score]
    by_run: dict[tuple[str, str, int], dict[AskSetting, list[Answer]]] = field(default_factory=dict)
    unscored: list[tuple[str, str, int, AskSetting, int]] = field(default_factory=list)
    """(model, arm, seed, setting, number of questions) where no question has a score: the model
    diverged."""
    recalls: dict[tuple[str, str, int], Recall] = field(default_factory=dict)
    """By name of the retrieval ("": the shared one), question set and K."""
    shortcuts: dict[str, Shortcuts] = field(default_factory=dict)
    """Question set -> what its choices give away."""
    prompt_tokens: dict[tuple[str, str, AskSetting], float | None] = field(default_factory=dict)
    """(model, arm, setting) -> tokens of the prompts of a question."""
    perplexities: list[tuple[str, str, Perplexity]] = field(default_factory=list)
    """(model, arm, perplexity of held-out texts) of each evaluation that measured it."""
    written: str = ""
    """When the last of the evaluations was written (ISO 8601)."""
    versions: dict[str, str] = field(default_factory=dict)
    """The versions that it was made with."""
    n_trainings: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, arm) -> how many trainings one after the other made it; without an entry one."""
    twins: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """Question set and id -> those of the same question in an earlier set."""
    _matrices: dict[tuple[str, str, AskSetting, str, Outcome, bool], CorrectnessMatrix] = field(
        default_factory=dict
    )
    _joined: dict[tuple[str, ...], Records] = field(default_factory=dict)

    def score(self, setting: AskSetting) -> str:
        """Return the name of the score by which answers in `setting` are right."""
        form = FORMATS[setting.format]
        if form.is_open:
            return text_score(self.scores)
        if form.letters or form.generates:
            return "sum"
        left_out: set[str] = {*WRITTEN_SCORES}
        if not form.control:
            left_out.add(PMI)
        return next((score for score in self.scores if score not in left_out), "sum")

    def read(self, model: str, arm: str, seed: int, folder: Path, retrieval: str = "") -> None:
        """Add the answers.jsonl of an evaluation; with `retrieval` (one of study.retrievals) those
        with passages.

        Raises `InputError` or `DiskError` if it is damaged.
        """
        settings: dict[AskSetting, list[Answer]] = {}
        controls: dict[tuple[str, str], list[Answer]] = {}
        with _made_by_a_stage(folder):
            every = read_answers(folder / "answers.jsonl")
            manifest = read_manifest(folder)
        for answer in every:
            if answer.format == PERPLEXITY_FORMAT:
                continue  # texts, which have no right answer
            if answer.format not in FORMATS:
                raise InputError(
                    f"{folder / 'answers.jsonl'}: found the format {answer.format!r:.40}, which "
                    "this kinject does not have. Delete the folder to ask these questions again."
                )
            if not FORMATS[answer.format].shows_question:
                controls.setdefault((answer.question_set, answer.format), []).append(answer)
            # Without passages the arm itself has answered, whose evaluation is read by itself.
            if answer.k or not retrieval:
                setting = AskSetting(answer.question_set, answer.format, answer.shots, answer.k)
                settings.setdefault(setting, []).append(answer)
        of_run: dict[AskSetting, list[Answer]] = {}
        # Arms of a setting inform each other's variance, so one more run changes all of them.
        self._matrices.clear()
        self._joined.clear()
        for setting, answers in settings.items():
            alone = controls.get((setting.question_set, FORMATS[setting.format].control), ())
            scored = rescored(answers, self.score(setting), alone)
            merged = sorted(scored, key=lambda answer: answer.question_id)
            if any(map(is_scored, merged)):
                of_run[setting] = merged
            else:
                self.unscored.append((model, arm, seed, setting, len(merged)))
        # A seed that diverged is no seed (tests/study/test_records.py).
        if of_run:
            self.by_run[model, arm, seed] = of_run
        self.versions = {}
        if manifest is not None:
            self.written = max(self.written, manifest.written)
            self.versions = dict(manifest.versions)

    def read_report(self, model: str, arm: str, folder: Path, retrieval: str = "") -> None:
        """Add what the report.json of an evaluation has beside its answers: recall, tokens of
        prompts, perplexity."""
        with _made_by_a_stage(folder):
            report = read_report(folder / "report.json")
        for recall in report.recalls:
            key = (retrieval, recall.question_set, recall.k)
            # Every arm gets the same passages, so the first one's recall is that of all.
            self.recalls.setdefault(key, replace(recall, retrieval=retrieval))
        for result in report.results:
            if result.subject:  # of a part of the questions
                continue
            asked = AskSetting(result.question_set, result.format, result.shots, result.k)
            self.prompt_tokens[model, arm, asked] = result.prompt_tokens
        self.perplexities += [(model, arm, item) for item in report.perplexities]
        for shortcuts in report.shortcuts:
            self.shortcuts.setdefault(shortcuts.question_set, shortcuts)

    def mean_perplexities(self) -> tuple[Perplexity, ...]:
        """Return the perplexity of each model, arm and file of texts: the geometric mean over the
        seeds."""
        groups: dict[tuple[str, str, str], list[Perplexity]] = {}
        for model, arm, item in self.perplexities:
            groups.setdefault((model, arm, item.name), []).append(item)
        means = []
        for (model, arm, name), items in groups.items():
            values = [item.per_token for item in items if item.per_token is not None]
            bits = [item.bits_per_byte for item in items if item.bits_per_byte is not None]
            per_token = bits_per_byte = None
            # One seed that is not finite diverged: the mean of the others would hide it.
            if len(values) == len(bits) == len(items):
                per_token, bits_per_byte = geometric_mean(values), fmean(bits)
            means.append(
                Perplexity(
                    arm,
                    name,
                    items[0].n_texts,
                    items[0].n_tokens,
                    per_token,
                    bits_per_byte,
                    model,
                    tuple(values),
                    mean_losses(items),
                    items[0].lengths,
                )
            )
        return tuple(means)

    def joined(self, names: tuple[str, ...]) -> Records:
        """Return the answers to several question sets as those to one, named by `joint_name`; of
        one set itself. A question that stands in two of them counts once.

        An arm has a setting of theirs if it was asked all of the sets in it.
        """
        if len(names) == 1:
            return self
        if names not in self._joined:
            one = Records(self.scores, n_trainings=self.n_trainings, twins=self.twins)
            for run, of_run in self.by_run.items():
                one.by_run[run] = _join_sets(of_run, names, self.twins)
            self._joined[names] = one
        return self._joined[names]

    def seeds(self, model: str, arm: str) -> list[int]:
        """Return the seeds with answers."""
        return [seed for of, name, seed in self.by_run if (of, name) == (model, arm)]

    def settings(self, model: str, arm: str) -> list[AskSetting]:
        """Return the settings in which every seed of the arm was evaluated and some question has a
        score from each."""
        seeds = self.seeds(model, arm)
        if not seeds:
            return []
        return [
            setting
            for setting in self.by_run[model, arm, seeds[0]]
            if self._has_all(model, arm, [setting])
            and self.matrix(model, arm, setting).question_ids
        ]

    def rate(
        self, model: str, arm: str, settings: Sequence[AskSetting]
    ) -> tuple[float, int] | None:
        """Return how often the arm is right in all `settings` together, and the number of their
        questions; one that stands in two of the sets counts once.

        None if a setting has no question with a score from each seed.
        """
        n_right, n_questions = 0.0, 0
        for setting in settings:
            if setting not in self.settings(model, arm):
                return None
            matrix = self.matrix(model, arm, setting)
            columns = [
                column
                for column, identity in enumerate(matrix.question_ids)
                if (setting.question_set, identity) not in self.twins
            ]
            n_right += float(matrix.correct[:, columns].mean(0).sum())
            n_questions += len(columns)
        return round(n_right / n_questions, 6), n_questions

    def headline_settings(
        self, model: str, arm: str, chosen_k: Mapping[tuple[str, str, str], int]
    ) -> Iterator[AskSetting]:
        """Yield each set's first format and shots, without context and with the chosen K (by model,
        arm and set)."""
        settings = self.settings(model, arm)
        heads: dict[str, AskSetting] = {}
        for setting in settings:
            heads.setdefault(setting.question_set, setting._replace(k=0))
        for head in heads.values():
            for k in dict.fromkeys((0, chosen_k.get((model, arm, head.question_set), 0))):
                if head._replace(k=k) in settings:
                    yield head._replace(k=k)

    def by_question(
        self, model: str, arm: str, setting: AskSetting
    ) -> dict[str, tuple[Answer, ...]]:
        """Return the answers of every seed to each question of the matrix, one that every seed has
        a score for."""
        scored = set(self.matrix(model, arm, setting).question_ids)
        runs = [self.by_run[model, arm, seed][setting] for seed in self.seeds(model, arm)]
        return {
            same[0].question_id: same
            for same in zip(*runs, strict=True)
            if same[0].question_id in scored
        }

    def every_answer(self, model: str, arm: str, setting: AskSetting) -> list[Answer]:
        """Return the answers of every seed to the questions of the matrix."""
        return [
            answer for same in self.by_question(model, arm, setting).values() for answer in same
        ]

    def n_asked(self, model: str, arm: str, setting: AskSetting, subject: str = "") -> int:
        """Return the number of questions asked, with a score or without; with `subject`, of that
        one."""
        return sum(
            not subject or answer.subject == subject for answer in self._first(model, arm, setting)
        )

    def answer_tokens(self, model: str, arm: str, setting: AskSetting) -> float:
        """Return the mean tokens of an answer, thinking included; of choices the chosen one's."""
        answers = self.every_answer(model, arm, setting)
        return fmean(
            answer.n_tokens[best_choice(answer.log_probs) or 0] + answer.n_thinking
            for answer in answers
        )

    def n_cut(self, model: str, arm: str, setting: AskSetting, subject: str = "") -> int:
        """Return the number of questions whose prompt was cut for some seed; with `subject`, of
        that one."""
        cut = set()
        for seed in self.seeds(model, arm):
            for answer in self.by_run[model, arm, seed][setting]:
                if answer.truncated and (not subject or answer.subject == subject):
                    cut.add(answer.question_id)
        return len(cut)

    def changed(
        self, model: str, arm: str, setting: AskSetting, base: str
    ) -> Iterator[tuple[Sequence[Answer], Sequence[Answer]]]:
        """Yield the answers of every seed of the arm, and of `base` without context, where most of
        them changed.

        That is where more than half of the seeds have one outcome, and another one before.
        """
        plain = setting._replace(k=0)
        before: dict[str, tuple[Answer, ...]] = {}
        if plain in self.settings(model, base):
            before = self.by_question(model, base, plain)
        for question_id, now in self.by_question(model, arm, setting).items():
            after, was = most_common_outcome(now), most_common_outcome(before.get(question_id, ()))
            if after and was and after != was:
                yield now, before[question_id]

    def _first(self, model: str, arm: str, setting: AskSetting) -> list[Answer]:
        return self.by_run[model, arm, self.seeds(model, arm)[0]][setting]

    def matrix(
        self,
        model: str,
        arm: str,
        setting: AskSetting,
        subject: str = "",
        outcome: Outcome = "right",
        *,
        net: bool = False,
    ) -> CorrectnessMatrix:
        """Return the correct answers of the arm over all its seeds; with `subject`, on one
        subject's questions.

        With another `outcome`, the answers that have it. With `net`, what they have beyond those
        without the question (`control_setting` has them). Questions that a seed has no score for
        are left out. The information of all arms of the setting on the variance between seeds is in
        `pooled`, but for one subject's.
        """
        key = (model, arm, setting, subject, outcome, net)
        if key not in self._matrices:
            if subject:
                all_subjects = self.matrix(model, arm, setting, "", outcome, net=net)
                self._matrices[key] = self._of_subject(all_subjects, model, arm, setting, subject)
            else:
                self._make_matrices(model, setting, outcome, net=net)
        return self._matrices[key]

    def _make_matrices(
        self, model: str, setting: AskSetting, outcome: Outcome, *, net: bool
    ) -> None:
        """Make the matrices of every arm in `setting`: their variances between seeds inform each
        other."""
        needed = [setting]
        if net:
            needed.append(control_setting(setting))
        arms = dict.fromkeys(arm for of, arm, _ in self.by_run if of == model)
        matrices = {
            arm: self._make_matrix(model, arm, setting, outcome, net=net)
            for arm in arms
            if self._has_all(model, arm, needed)
        }
        families: dict[int, list[str]] = {}
        for arm, matrix in matrices.items():
            # One seed has no variance between seeds, and without questions there is no accuracy.
            if matrix.n_seeds > 1 and matrix.question_ids:
                families.setdefault(self.n_trainings.get((model, arm), 1), []).append(arm)
        # Seeds part with each training: one variance for all steps of a sequence calls equal
        # methods different in 8.2% and shows a loss in 50%; one a step 4.5 and 84%
        # (docs/figures.md).
        for family in families.values():
            pooled = family_variances([matrices[arm].seed_variance for arm in family])
            for arm, variance in zip(family, pooled, strict=True):
                matrices[arm] = replace(matrices[arm], pooled=variance)
        for arm, matrix in matrices.items():
            self._matrices[model, arm, setting, "", outcome, net] = matrix

    def _of_subject(
        self, matrix: CorrectnessMatrix, model: str, arm: str, setting: AskSetting, subject: str
    ) -> CorrectnessMatrix:
        answers = self._first(model, arm, setting)
        ids = {answer.question_id for answer in answers if answer.subject == subject}
        return matrix.part([i for i, name in enumerate(matrix.question_ids) if name in ids])

    def has_control(self, model: str, arm: str, setting: AskSetting) -> bool:
        """Return whether every seed of the arm was asked in `setting` and answered the same choices
        without the question; False for pmi, which is beyond these already."""
        if self.score(setting) == PMI:
            return False
        return self._has_all(model, arm, [setting, control_setting(setting)])

    def control(
        self, model: str, arm: str, setting: AskSetting, subject: str = ""
    ) -> ControlAnswers | None:
        """Return the arm's answers without the question beside those in `setting`; None with
        passages, or without any."""
        if setting.k or not self.has_control(model, arm, setting):
            return None
        alone = control_setting(setting)
        seeds = self.seeds(model, arm)
        matrix = control_correctness([self.by_run[model, arm, seed][alone] for seed in seeds])
        net = self.matrix(model, arm, setting, subject, net=True)
        if not net.question_ids:
            return None
        in_both = set(net.question_ids)
        columns = [i for i, name in enumerate(matrix.question_ids) if name in in_both]
        return ControlAnswers(alone.format, matrix.part(columns), net)

    def _has_all(self, model: str, arm: str, settings: Sequence[AskSetting]) -> bool:
        seeds = self.seeds(model, arm)
        asked = [self.by_run[model, arm, seed].keys() for seed in seeds]
        return bool(seeds) and all(of_seed >= set(settings) for of_seed in asked)

    def _make_matrix(
        self, model: str, arm: str, setting: AskSetting, outcome: Outcome, *, net: bool
    ) -> CorrectnessMatrix:
        seeds = self.seeds(model, arm)
        runs = [self.by_run[model, arm, seed][setting] for seed in seeds]
        ids = [[answer.question_id for answer in run] for run in runs]
        for seed, asked in zip(seeds, ids, strict=True):
            if asked != ids[0]:
                raise InputError(
                    f"{arm}, seed {seed}: {setting.question_set}: other questions than seed "
                    f"{seeds[0]}. Run the study again."
                )
        matrix = correctness(runs, outcome)
        if not net:
            return matrix
        alone = control_setting(setting)
        controls = [self.by_run[model, arm, seed][alone] for seed in seeds]
        return beyond(matrix, control_correctness(controls))


def joint_name(names: Sequence[str]) -> str:
    """Return the name of question sets that count as one: ``words, reworded and inferred``."""
    return join_words(names)


def find_twins(
    questions: Mapping[str, Sequence[Question]],
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the set and id of each question that an earlier set has too -> those that it has
    there."""
    first: dict[bytes, tuple[str, str]] = {}
    twins = {}
    for name, of_set in questions.items():
        for question in of_set:
            key = (name, question.id)
            earlier = first.setdefault(question_content(question), key)
            if earlier != key:
                twins[key] = earlier
    return twins


def _join_sets(
    of_run: Mapping[AskSetting, list[Answer]],
    names: Sequence[str],
    twins: Mapping[tuple[str, str], tuple[str, str]],
) -> dict[AskSetting, list[Answer]]:
    joined: dict[AskSetting, list[Answer]] = {}
    for setting in of_run:
        parts = [setting._replace(question_set=name) for name in names]
        if setting != parts[0] or not of_run.keys() >= set(parts):
            continue
        by_key: dict[tuple[str, str], Answer] = {}
        for part in parts:
            for answer in of_run[part]:
                key = (answer.question_set, answer.question_id)
                by_key.setdefault(twins.get(key, key), answer)
        # Two sets may have questions of one id.
        joined[setting._replace(question_set=joint_name(names))] = [
            replace(answer, question_id=f"{name}: {identity}")
            for (name, identity), answer in by_key.items()
        ]
    return joined


def control_setting(setting: AskSetting) -> AskSetting:
    """Return the setting of the control of `setting`: the same choices without the question,
    examples and passages."""
    return AskSetting(setting.question_set, FORMATS[setting.format].control, 0, 0)


def changed_answers(
    records: Records,
    arms: Sequence[Arm],
    questions: Mapping[str, Sequence[Question]],
    chosen_k: Mapping[tuple[str, str, str], int],
) -> Iterator[Row]:
    """Yield a row of flips.jsonl for each test question that most seeds of an arm (none of a sweep)
    answer otherwise than base.

    As `kinject.eval.results.find_flips`, without log-probs and passages: the choice is that of most
    seeds.
    """
    by_id: dict[tuple[str, str], Question] = {}
    for name, set_questions in questions.items():
        for question in set_questions:
            by_id[name, question.id] = question
    for arm in arms:
        if arm.sweep:
            continue
        for setting in records.headline_settings(arm.model, arm.name, chosen_k):
            if not arm.trained and not setting.k:
                continue  # the base compared with itself
            name = arm.name
            # An arm of study.retrievals has the retrieval in its name already.
            if not arm.retrieval:
                name = ArmName.asked(arm.name, setting.k)
            for now, before in records.changed(arm.model, arm.name, setting, BASE):
                found = by_id.get((setting.question_set, now[0].question_id))
                if found is not None:  # the questions of a task are not among them
                    yield {"model": arm.model, "arm": name, **flip_row(found, now, before)}
