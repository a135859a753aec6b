"""kinject as a model of lm-evaluation-harness: its own tasks, scored by the token tree.

lm_eval 0.4 finds models in its own table alone, so this module puts `kinject` into it when it is
imported, and as a program it is lm_eval's command line with that model: ``python -m
kinject.eval.harness run --model kinject --model_args path=FOLDER --tasks arc_easy``. Needs the
extra `harness`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from jinja2 import TemplateError
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from kinject.eval.prompts import Generation
from kinject.eval.scoring.encode import Encoded, cut_to_window
from kinject.eval.scoring.local import load_scorer
from kinject.models import window_of
from kinject.models.generate import shaping_settings
from kinject.recipe.sections import Attention, Dtype, LocalModelSection, Quantization

_LONGEST_WINDOW = 2048
"""The harness's own bound where a config sets none."""


@register_model("kinject")
class KinjectLM(LM):  # type: ignore[misc]
    """A model folder, GGUF file or name on the hub, with or without an adapter. One process."""

    def __init__(  # noqa: PLR0913 (the arguments that lm_eval passes by name)
        self,
        path: str,
        *,
        dtype: Dtype = "auto",
        attention: Attention = "auto",
        device: str | None = None,
        revision: str | None = None,
        quantization: Quantization = "none",
        adapter: str | None = None,
        batch_tokens: int = 16_384,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Load the model. `batch_tokens` bounds one pass; the harness's batch sizes are not needed.

        Raises `InputError` if the model cannot be used.
        """
        super().__init__()
        table = LocalModelSection(
            path=path,
            dtype=dtype,
            attention=attention,
            revision=revision,
            quantization=quantization,
            adapter=adapter,
        )
        self.model = load_scorer("kinject", table, batch_tokens, device=device or "auto")
        self.tokenizer: Any = self.model.loaded.tokenizer
        self.window = window_of(self.model.scorer.forward.config) or _LONGEST_WINDOW
        # As the harness's `prefix_token_id`.
        bos = self.tokenizer.bos_token_id
        self.prefix = int(self.tokenizer.eos_token_id if bos is None else bos)
        self._device = self.model.loaded.model.device

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness stores requests."""
        # As the harness's own model does: a slash would be a folder.
        return self.model.table.path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's template, None if none is asked for."""
        return str(self.tokenizer.chat_template) if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the turns as one text, without the system's where the template takes none."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:  # as the harness's own model does
            others = [turn for turn in chat_history if turn["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(others, **options))

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-prob, greedy) of each continuation; requests of one context are tokenised
        together."""
        prompts: list[Encoded] = []
        pairs = [request.args for request in requests]
        # In a row is enough: the harness lists the choices of a question one after the other.
        for context, group in groupby(pairs, key=itemgetter(0)):
            encoded = self._encode(context, [text for _, text in group])
            prompts.append(cut_to_window(encoded, self.window))
        scores = dict(self.model.scorer.score(prompts))
        found: list[tuple[float, bool]] = []
        for index in range(len(prompts)):
            found += zip(scores[index].log_probs, scores[index].greedy, strict=True)
        return found

    def _encode(self, context: str, continuations: Sequence[str]) -> Encoded:
        """Return the tokens of continuations of `context`, by the harness's rules."""
        bare = context.rstrip()
        spaces = context[len(bare) :]
        if context:
            start, *joined = self._ids([bare, *(f"{bare}{spaces}{text}" for text in continuations)])
        else:
            texts = self.tokenizer(list(continuations), add_special_tokens=False).input_ids
            start, joined = [self.prefix], list(map(self._with_prefix, texts))
        targets = tuple(np.asarray(ids[len(start) :], dtype=np.int32) for ids in joined)
        return Encoded((np.asarray(start, dtype=np.int32),) * len(targets), targets)

    def _with_prefix(self, ids: list[int]) -> list[int]:
        # As the harness has it: a continuation that begins with the prefix token is its own
        # context.
        return ids if ids[:1] == [self.prefix] else [self.prefix, *ids]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; one that begins with BOS, as a chat template writes it,
        gets no second one."""
        bos, n_start = self.tokenizer.bos_token, len(self.model.encoder.start)
        encoded = self.model.encoder.ids(texts)
        for index, text in enumerate(texts):
            if bos and text.startswith(bos):
                encoded[index] = encoded[index][n_start:]
        return encoded

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-prob of each text, in windows as long as the model's."""
        prompts, owners = [], []
        for owner, ids in enumerate(self._ids([request.args[0] for request in requests])):
            windows = list(self._windows([self.prefix, *ids]))
            prompts += windows
            owners += [owner] * len(windows)
        sums = [0.0] * len(requests)
        for index, score in self.model.scorer.score(prompts):
            sums[owners[index]] += score.log_probs[0]
        return sums

    def _windows(self, ids: list[int]) -> Iterator[Encoded]:
        """Yield windows that score each of `ids` but the first once; the last one reads as much
        context as it has room for."""
        for start in range(1, len(ids), self.window):
            end = min(start + self.window, len(ids))
            context = ids[max(0, end - self.window - 1) : start]
            yield Encoded(
                (np.asarray(context, dtype=np.int32),),
                (np.asarray(ids[start:end], dtype=np.int32),),
            )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy text after each context, up to the first of its stop texts. Raises
        `ValueError` for sampling, beams and penalties."""
        prompts = []
        for context, options in (request.args for request in requests):
            settings = normalize_gen_kwargs(options)
            # --gen_kwargs may set penalties too, which the harness's own model obeys.
            if shaping_settings(settings):
                raise ValueError(
                    f"kinject writes the likeliest tokens only, and the task asks for {options}."
                )
            stop = settings.get("until") or []
            if isinstance(stop, str):
                stop = [stop]
            # An empty stop text would be found at the start of every answer.
            generation = Generation(settings["max_gen_toks"], tuple(filter(None, stop)))
            (ids,) = self._ids([context])
            prompt = Encoded((np.asarray(ids, dtype=np.int32),), (), generation=generation)
            prompts.append(cut_to_window(prompt, self.window))
        scores = dict(self.model.generator.score(prompts))
        return [str(scores[index].text or "") for index in range(len(prompts))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    # Registers the model under the module's own name, not __main__'s.
    from kinject.eval import harness  # noqa: F401

    cli_evaluate()
