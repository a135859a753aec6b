"""The section of a recipe that decides which texts training reads when, and which it reads again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.recipe.check import suggestion
from kinject.recipe.sections import ProbesSection, option

_READ_AGAIN = ("questions", "margin", "rest", "most", "patience")
"""Keys that read_again: unknown reads."""


@dataclass(frozen=True)
class ExposureSection:
    """The order of the texts in training, and which documents are read again."""

    order: Literal["interleaved", "shuffled", "massed", "spaced"] = option(
        "interleaved",
        help="interleaved: the texts of a document far apart, no packed row holds two of them; shuffled: at random; massed: "
        "together; spaced: at growing gaps.",
    )
    first_gap: int | None = option(
        None, help="spaced: steps between the first two readings of a document (default: 4).", min=1
    )
    growth: float | None = option(
        None, help="spaced: each gap over the one before (default: 2).", min=1.0, max=100.0
    )  # fmt: skip
    read_again: Literal["all", "unknown"] = option(
        "all", help="unknown: documents of which a probe question is answered wrongly are read more than the others."
    )
    questions: tuple[str, ...] = option(
        (), help="unknown: names of the probe sets that decide, none of them test questions (default: all sets)."
    )
    margin: float | None = option(
        None, help="unknown: nats by which the answer must lead the other choices to count as known (default: 0).",
        min=0.0, max=100.0,
    )  # fmt: skip
    rest: float | None = option(
        None, help="Readings of a document that is known over those of one that is not (default: 0.2).",
        min=0.0, max=1.0,
    )  # fmt: skip
    most: float | None = option(
        None, help="Most readings of a document over those without read_again; replay takes the rest (default: 3).",
        min=1.0, max=100.0,
    )  # fmt: skip
    patience: int | None = option(
        None,
        help="unknown: a document is not read while its questions were right in so many probes in a row; the run ends when "
        "all are.",
        min=1,
    )

    @property
    def is_planned(self) -> bool:
        """Whether the rows of a part of the run are chosen when it begins, instead of an epoch's at the start."""
        return self.order == "spaced" or self.read_again != "all"

    def faults(self, trainer: Mapping[str, Any], probes: ProbesSection | None) -> list[tuple[str, str]]:
        """Return (key, fault) for each fault of the section, beside the sections `trainer` and `probes`."""
        given = {key for key, value in vars(self).items() if value not in (None, ())}
        is_spaced, is_chosen = self.order == "spaced", self.read_again == "unknown"
        faults = []
        for keys, needed, is_on in (
            (("first_gap", "growth"), "order: spaced", is_spaced), (_READ_AGAIN, "read_again: unknown", is_chosen),
        ):  # fmt: skip
            fault = f"needs {needed}. Set it, or remove the line."
            faults += [(f"exposure.{key}", fault) for key in keys if key in given and not is_on]
        if is_spaced and "rest" in given:
            faults.append(("exposure.rest", "with order: spaced the gaps decide it. Remove the line."))
        if self.order == "massed" or self.is_planned:
            if trainer.get("packing") and trainer.get("packing_strategy") == "wrapped":
                faults.append(("exposure", "needs separated documents. Set trainer.packing_strategy: bfd_split."))
            if trainer.get("train_sampling_strategy", "random") != "random":
                fault = "exposure sets the order of the rows. Remove the line."
                faults.append(("trainer.train_sampling_strategy", fault))
        if self.is_planned and trainer.get("dataloader_persistent_workers"):
            fault = "exposure chooses rows as the run goes. Remove the line."
            faults.append(("trainer.dataloader_persistent_workers", fault))
        return [*faults, *(self._decision_faults(trainer, probes) if is_chosen else ())]

    def _decision_faults(self, trainer: Mapping[str, Any], probes: ProbesSection | None) -> list[tuple[str, str]]:
        faults = []
        if self.order in ("shuffled", "massed"):
            fault = f"read_again: unknown chooses the rows; found {self.order}. Allowed: interleaved, spaced."
            faults.append(("exposure.order", fault))
        sets = probes.sets() if probes is not None else {}
        if probes is None:
            faults.append(("exposure.read_again", "unknown is decided by probe questions. Add a probes section."))
        elif trainer.get("eval_strategy", "no") != "steps":
            fault = "exposure.read_again: unknown decides every eval_steps. Set steps."
            faults.append(("trainer.eval_strategy", fault))
        for index, name in enumerate(self.questions if sets else ()):
            if name not in sets:
                faults.append((f"exposure.questions.{index}", f"found {name!r}.{suggestion(name, sets)}"))
        return faults
