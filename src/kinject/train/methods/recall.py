"""Reinforcement on closed-book answers (`method: recall`): the model answers, is graded, and
answers more like the best.

GRPO through TRL: of each question several answers are drawn, and those with more than their group's
mean reward become likelier (arXiv 2402.03300, 2605.07153). A question that is always, or never,
answered correctly teaches nothing, so it is left out; the others are practised from the hardest to
the easiest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kinject.corpus.grading import abstains, matches
from kinject.corpus.tokenize import TokenAccount, begins_with_bos
from kinject.errors import InputError
from kinject.llm import request_seed
from kinject.models import window_of, without_flash
from kinject.models.generate import end_tokens, generate
from kinject.process import made_by_first_process
from kinject.recipe import GeneratorSection, TrainRecipe
from kinject.recipe.library_fields import fields_of
from kinject.terminal import Progress, format_count
from kinject.train.data import Practice
from kinject.train.methods.base import Method, MethodInputs, MethodParts, TrainerOptions
from kinject.train.own_answers import AnswerRequest, Writer
from kinject.train.parts import TrainingParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig

    from kinject.corpus.rows import CorpusRow
    from kinject.train.methods.recall_trainer import RecallTrainer

_BATCH = 32


_MOST_TOKENS = 32
"""Longest answer, unless the recipe has trainer.max_completion_length."""


class Recall(Method):
    """Practises the questions of rows; their answers are drawn, not read."""

    name = "recall"
    refused_shapes = ("text",)
    no_rate_test = "recall has no loss that shows a rate. Take a twentieth of the documents' rate."
    no_timing = (
        "which questions are practised, and how long answers are, shows once the model has answered"
    )

    def make_config(self, values: Mapping[str, Any]) -> GRPOConfig:
        """Return GRPO's config, without the fields that only SFTConfig has."""
        from trl import GRPOConfig

        known = fields_of(GRPOConfig).keys()
        # choose_practice has put the questions in order, the hardest first.
        given = {"shuffle_dataset": False, "max_completion_length": _MOST_TOKENS, **values}
        return GRPOConfig(**{key: value for key, value in given.items() if key in known})

    def trainer_with_defaults(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trainer section with GRPOConfig's learning rate, a twentieth of SFTConfig's."""
        from trl import GRPOConfig

        rate = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}[
            "learning_rate"
        ]
        return {"learning_rate": rate, **trainer}

    def prepare(self, inputs: MethodInputs) -> MethodParts:
        """Return its part, with the questions that the model answers now and then."""
        with without_flash(inputs.model):
            practice, note = made_by_first_process(
                lambda: choose_practice(
                    inputs.recipe,
                    inputs.corpora.rows,
                    inputs.model,
                    inputs.tokenizer,
                    inputs.config,
                )
            )
        tokenized, account = inputs.tokenized, inputs.tokenized.train.account
        unlearned = TokenAccount(source=account.source, masked=account.source)
        # A note or warning on the tokens of rows is on what this method does not learn.
        tokenized = dataclasses.replace(
            tokenized,
            train=dataclasses.replace(tokenized.train, account=unlearned),
            notes=[],
            warnings=[],
            chat=None,
        )
        # A batch of equal answers has no loss, which is no fault here.
        guards = dataclasses.replace(inputs.recipe.guards, nothing_learned="ignore")
        # TRL repeats each prompt so often, a row for each answer.
        n_rows = len(practice) * inputs.config.num_generations
        return MethodParts(tokenized, n_rows, guards, notes=[note], practice=practice)

    def make_trainer(self, parts: TrainingParts, options: TrainerOptions) -> RecallTrainer:
        """Return TRL's trainer of drawn answers."""
        # Here: TRL's module imports MLflow and W&B where they are installed, which took an eighth
        # of the time of a demo whose trainings draw no answers.
        from kinject.train.methods.recall_trainer import RecallTrainer

        return RecallTrainer(parts, **options.arguments)


def choose_practice(
    recipe: TrainRecipe,
    rows: Sequence[CorpusRow],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
) -> tuple[list[Practice], str]:
    """Return the questions of a corpus to practise, hardest first, and a note on them.

    The model answers each trainer.num_generations times before it is trained, with the sampling of
    the training. A row whose answer declines ("I do not know") is a question without an answer.
    Raises `InputError` if no question is answered correctly now and then.
    """
    settings = GeneratorSection(
        kind="transformers",
        model=recipe.model.path,
        temperature=config.temperature,
        max_tokens=config.max_completion_length,
        extra_body={"top_p": config.top_p},
    )
    writer = Writer(
        model,
        tokenizer,
        settings,
        window_of(model.config),
        bos=begins_with_bos(tokenizer, recipe.corpus.bos),
        kwargs=dict(recipe.corpus.chat_template_kwargs or {}),
        part="recall",
    )
    # Prompts of similar length share a batch, which is padded to the longest.
    requests = sorted(writer.requests(rows), key=lambda request: len(request.prompt))
    n_answers = config.num_generations
    known: list[tuple[int, Practice]] = []
    with Progress("questions before training", len(requests), "questions") as progress:
        size = max(1, _BATCH // n_answers)
        for start in range(0, len(requests), size):
            some = requests[start : start + size]
            answers = iter(_draw_answers(writer, some, n_answers, recipe.seed))
            for request in some:
                accepted = [] if abstains(request.corpus_answer) else [request.corpus_answer]
                n_correct = sum(matches(next(answers), accepted) for _ in range(n_answers))
                if 0 < n_correct < n_answers:
                    known.append((n_correct, Practice(request.prompt, accepted)))
            progress.advance(len(some))
    note = (
        f"recall: {len(known):,} of {format_count(len(requests), 'question')} are answered "
        f"correctly by some of {format_count(n_answers, 'answer')} and wrongly by others"
    )
    needed = config.generation_batch_size // n_answers
    if len(known) < needed:
        raise InputError(
            f"{recipe.corpus.path}: {note}; an update practises {needed}. Train on their documents "
            "first, raise trainer.num_generations, or lower trainer.per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )
    note += ": these are practised, the hardest first"
    known.sort(key=itemgetter(0))
    return [practice for _, practice in known], note


def _draw_answers(
    writer: Writer, requests: Sequence[AnswerRequest], n_answers: int, seed: int
) -> list[str]:
    """Return `n_answers` texts for each request, request after request."""
    prompts, seeds = [], []
    for request in requests:
        for number in range(n_answers):
            prompts.append(request.prompt)
            seeds.append(request_seed("recall", seed, request.row_id, number))
    ends = end_tokens(writer.model, writer.tokenizer)
    tokens = generate(writer.model, writer.generator, prompts, seeds, ends)
    return list(writer.tokenizer.batch_decode(tokens, skip_special_tokens=True))
