"""Reinforcement on closed-book answers (`method: recall`): the model answers, is graded, and
answers more like the best.

GRPO through TRL: of each question several answers are drawn, and those with more than their group's
mean reward become likelier (arXiv 2402.03300, 2605.07153). A question that is always, or never,
answered correctly teaches nothing, so it is left out; the others are practised from the hardest to
the easiest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from kinject.corpus.grading import abstains, matches
from kinject.corpus.tokenize import begins_with_bos
from kinject.errors import InputError
from kinject.llm import request_seed
from kinject.models import window_of
from kinject.models.generate import end_tokens, generate
from kinject.recipe import GeneratorSection, TrainRecipe
from kinject.terminal import Progress
from kinject.train.checkpoints import CheckpointMixin
from kinject.train.data import Practice
from kinject.train.own_answers import Writer
from kinject.train.trainer import OptimizerMixin, TrainingParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig

    from kinject.corpus.rows import CorpusRow

_BATCH = 32


def choose_practice(
    recipe: TrainRecipe, rows: Sequence[CorpusRow], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
) -> tuple[list[Practice], str]:  # fmt: skip
    """Return the questions of a corpus to practise, hardest first, and a note on them.

    The model answers each trainer.num_generations times before it is trained. A row whose answer
    declines ("I do not know") is a question without an answer. Raises `InputError` if no question
    is answered correctly now and then.
    """
    most, path = config.max_completion_length, recipe.model.path
    settings = GeneratorSection(
        kind="transformers", model=path, temperature=config.temperature, max_tokens=most
    )
    bos, kwargs = (
        begins_with_bos(tokenizer, recipe.corpus.bos),
        dict(recipe.corpus.chat_template_kwargs or {}),
    )
    writer = Writer(model, tokenizer, settings, window_of(model.config), bos, kwargs, "recall")
    requests = sorted(writer.requests(rows), key=lambda request: len(request.prompt))
    ends, n, known = (
        end_tokens(model, tokenizer),
        config.num_generations,
        list[tuple[int, Practice]](),
    )
    size = max(1, _BATCH // n)
    with Progress("questions before training", len(requests), "questions") as progress:
        for start in range(0, len(requests), size):
            some = requests[start : start + size]
            seeds = [
                request_seed("recall", recipe.seed, request.row_id, i)
                for request in some
                for i in range(n)
            ]
            tokens = generate(
                model, settings, [request.prompt for request in some for _ in range(n)], seeds, ends
            )
            texts = iter(tokenizer.batch_decode(tokens, skip_special_tokens=True))
            for request in some:
                accepted = [] if abstains(request.corpus_answer) else [request.corpus_answer]
                n_correct = sum(matches(next(texts), accepted) for _ in range(n))
                if 0 < n_correct < n:
                    known.append((n_correct, Practice(request.prompt, accepted)))
            progress.advance(len(some))
    note = (
        f"recall: {len(known):,} of {len(requests):,} questions are answered correctly by some of {n} answers and wrongly by "
        "others"
    )
    needed = config.generation_batch_size // n
    if len(known) < needed:
        raise InputError(
            f"{recipe.corpus.path}: {note}; an update practises {needed}. Train on their documents first, raise "
            "trainer.num_generations, or lower trainer.per_device_train_batch_size or gradient_accumulation_steps."
        )
    note += ": these are practised, the hardest first"
    return [practice for _, practice in sorted(known, key=lambda item: item[0])], note


class RecallTrainer(OptimizerMixin, CheckpointMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer on questions, with kinject's updates, guards and checkpoints."""

    def __init__(
        self,
        parts: TrainingParts,
        *,
        args: Any,
        run_dir: Path,
        callbacks: list[Any],
        **options: Any,
    ) -> None:
        self.take(parts)
        self.practice = parts.practice

        def correct(completions: list[str], accepted: list[list[str]], **_: Any) -> list[float]:
            return [
                float(matches(text, answers))
                for text, answers in zip(completions, accepted, strict=True)
            ]

        rows = [
            {"prompt": str(i), "accepted": item.accepted} for i, item in enumerate(parts.practice)
        ]
        callbacks, data = self.watchers(run_dir, callbacks), Dataset.from_list(rows)
        super().__init__(
            args=args, train_dataset=data, reward_funcs=[correct], callbacks=callbacks, **options
        )
        self.remove_callback(PrinterCallback)

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        """Return the tokens of each prompt, which is the number of a question."""
        # TRL 1.16 would begin a rendered chat with another BOS token
        return [self.practice[int(number)].prompt for number in prompts], None, {}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Return TRL's batch of graded answers; count their tokens."""
        # TRL 1.16 counts prompts and answers together
        batch = super()._generate_and_score_completions(inputs)
        self.learned_tokens = self.learned_tokens + int(batch["completion_mask"].sum())
        return batch
