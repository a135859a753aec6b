"""The shape of what changes the updates of a run; what the optimizer and its changes exclude."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from kinject.corpus.packing import TrainingRow

if TYPE_CHECKING:
    from trl import SFTConfig

    from kinject.recipe import TrainRecipe

_ONE_BY_ONE = re.compile(
    r"(paged_)?(adamw|lion|ademamix)(_bnb)?(_8bit|_32bit)|ademamix|adamw_torch(_fused)?|sgd|adagrad|rmsprop(_bnb)?(_8bit|_32bit)?|adafactor"
)
"""Names of trainer.optim that read nothing but a parameter, its gradient and its own state."""


Faults = list[tuple[str, str]]
"""(key of the recipe, fault)."""


def optimizer_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    """Return the faults of the optimizer and of what changes its update."""
    return [*_schedule_free_faults(config), *_one_by_one_faults(recipe, config), *_muon_faults(recipe, config)]


def optim_name(config: SFTConfig) -> str:
    """Return trainer.optim as its name."""
    return str(getattr(config.optim, "value", config.optim))


def _schedule_free_faults(config: SFTConfig) -> Faults:
    """Return the faults of a schedule-free optimizer (arXiv 2405.15682), of the package schedulefree."""
    optim = optim_name(config)
    if not optim.startswith("schedule_free"):
        return []
    faults: Faults = []
    if find_spec("schedulefree") is None:
        fault = f"{optim} needs the package schedulefree. Install it: pip install 'kinject[schedule-free]'."
        faults.append(("trainer.optim", fault))
    schedule = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if schedule not in ("constant", "constant_with_warmup"):
        fault = f"found {schedule}, but {optim} averages weights instead of following a schedule. Set constant, with or"
        faults.append(("trainer.lr_scheduler_type", f"{fault} without trainer.warmup_steps."))
    return faults


def _one_by_one_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    """Return the faults of stochastic_rounding, which updates one parameter at a time."""
    key, optim = "techniques.stochastic_rounding", optim_name(config)
    faults: Faults = []
    if not recipe.techniques.stochastic_rounding:
        return faults
    if _ONE_BY_ONE.fullmatch(optim) is None:
        fault = (
            f"{optim} does not treat weights one by one. Take adamw_8bit, adamw_torch or adafactor, or remove the line."
        )
        faults.append((key, fault))
    if config.fp16:
        faults.append((key, "needs unscaled gradients. Set trainer.bf16: true instead of fp16."))
    if recipe.model.dtype != "bfloat16":
        fault = f"rounds bfloat16 weights, found model.dtype: {recipe.model.dtype}. Set model.dtype: bfloat16."
        faults.append((key, fault))
    return faults


def _muon_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    """Return the faults of techniques.muon, which takes the place of torch's AdamW."""
    techniques, optim, key = recipe.techniques, optim_name(config), "techniques.muon"
    if techniques.muon is None:
        return []
    faults: Faults = []
    if optim not in ("adamw_torch", "adamw_torch_fused"):
        faults.append(
            (key, f"the other weights take AdamW, found trainer.optim: {optim}. Set adamw_torch, or remove the line.")
        )
    if config.fp16:
        faults.append((key, "needs unscaled gradients. Set trainer.bf16: true instead of fp16, or remove the line."))
    if config.deepspeed_plugin is not None:  # by trainer.deepspeed, or by the launch
        faults.append((key, "DeepSpeed flattens the matrices. Use DDP, or remove the line."))
    faults += [
        (key, f"techniques.{name} updates by trainer.optim alone. Keep one of the two.")
        for name in ("stochastic_rounding",) if getattr(techniques, name)
    ]  # fmt: skip
    return faults


def leave_warmup_to_schedule(optimizer: Any) -> None:
    """Take the warm-up of a new schedule-free optimizer away: transformers gives the same warm-up to the schedule."""
    if {"train_mode", "warmup_steps"} <= getattr(optimizer, "defaults", {}).keys():  # DeepSpeed's placeholder has none
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0


@dataclass(frozen=True)
class UpdateInputs:
    """What rules are made from: the recipe, and the model before a trainer wraps it.

    `load_base` makes a copy of a sharded model. `reinitialized` are the names of parameters with new weights, `kept` the rows
    on which a projection keeps the outputs.
    """

    recipe: TrainRecipe
    model: Any
    load_base: Callable[[], Any] | None = None
    reinitialized: Sequence[str] = ()
    kept: Sequence[TrainingRow] = field(default=())


class UpdateRule:
    """Changes the updates of a run; each kind is one file, and one line of `kinject.train.updates.UPDATE_RULES`.

    A rule of your own is a dataclass whose fields, made by `kinject.recipe.sections.option`, are its settings: a recipe sets
    them under techniques.custom.NAME. Of the hooks below a rule overrides those that it needs; they are called in the order
    of the table. Randomness must follow from the seed and the step, and state from the optimizer's: then `--resume` is exact.
    """

    copies: ClassVar[int] = 0
    """Copies of the trained weights that it keeps in float32, for the estimate of memory."""

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe asks for the rule that the table calls `name`: by a key of techniques, or of custom."""
        return name in recipe.techniques.custom or bool(getattr(recipe.techniques, name, None))

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Self:
        """Return the rule with the recipe's settings."""
        techniques, made = inputs.recipe.techniques, cast("Any", cls)
        rule: Self = made(**techniques.custom[name]) if name in techniques.custom else made(getattr(techniques, name))
        return rule

    def start(self, trainer: Any) -> None:
        """Measure what is needed; the model is wrapped, has its adapter, and has not been trained."""

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer to use in place of a new one, often itself."""
        return optimizer

    def change_gradient(self, model: Any, step: int) -> None:
        """Change the accumulated gradients of a (0-based) update before they are clipped."""

    def before_update(self) -> None:
        """Read the weights before the optimizer's step."""

    def after_update(self) -> None:
        """Change the weights after the optimizer's step."""

    @classmethod
    def conflicts(cls, name: str, recipe: TrainRecipe, config: SFTConfig) -> list[tuple[str, str]]:
        """Return (key, fault) for each key of the recipe that it excludes."""
        return []

    def note(self) -> str:
        """Return a line for the log, "" for none."""
        return ""
