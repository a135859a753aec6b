"""What a study would do, before it costs anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from kinject.augment.preview import preview
from kinject.disk import read_sealed
from kinject.recipe import StudyRecipe, read_recipe
from kinject.study.phases import Study, ask_test, choose, choose_k, open_study, plan_runs
from kinject.study.stages import DONE, Stage
from kinject.terminal import aligned, duration

_KINDS = ("prepare", "augment", "corpus", "train", "merge", "eval")


def render_plan(recipe: StudyRecipe) -> str:
    """Return what `study` would run and what it would find done: arms, stages, tokens, time, money, as text.

    Runs nothing and asks nothing; only the split question files are written. Time is that of finished stages of the
    same kind, money that of `kinject augment --dry-run`. Raises as `study` does for recipes.
    """
    with ExitStack() as stack:
        found = open_study(recipe, None, stack)
        first = [stage for stages in found.planner.prepare_stages() for stage in stages]
        found.do(first, "")
        ready = found.ledger.has(first)
        for phase in (choose, plan_runs, choose_k, ask_test):
            phase(found)
    stages = list(found.ledger.stages.values())
    lines = [
        recipe.study.title,
        recipe.study.description.strip(),
        "",
        _arm_table(found),
        "",
        _kind_table(found, stages),
    ]
    missing = [stage for stage in stages if stage.id not in found.ledger.done]
    lines += ["", _estimate(found, missing)]
    if not ready:
        lines.append("study.setup comes first; stages that read what it writes are counted as not done")
    unchosen = [name for name in recipe.study.tune or {} if not any(of == name for _, of in found.chosen)]
    if unchosen:
        lines.append(
            f"chosen on validation questions first: {', '.join(unchosen)}; arms then train with the chosen value"
        )
    return "\n".join(line for line in lines if line is not None)


def _arm_table(found: Study) -> str:
    rows: list[tuple[str, ...]] = [("arm", "model", "seeds", "stages", "done", "differs in")]
    for arm in found.arms:
        own = {stage.id for run in found.runs if run.stages.arm == arm for stage in run.all}
        n_done = sum(identity in found.ledger.done for identity in own)
        differs = ", ".join(f"{key}={json.dumps(value)}" for key, value in arm.overrides.items())
        corpus = f"corpus={arm.corpus} " if arm.corpus not in ("", "augmented") else ""
        seeds = ",".join(map(str, arm.seeds)) if arm.trained else ""
        rows.append((arm.name, arm.model, seeds, str(len(own)), str(n_done), (corpus + differs)[:70]))
    return aligned(rows, frozenset({3, 4}))


def _kind_table(found: Study, stages: Sequence[Stage]) -> str:
    rows: list[tuple[str, ...]] = [("stage", "in all", "done", "to run")]
    for kind in _KINDS:
        own = [stage for stage in stages if stage.kind == kind]
        n_done = sum(stage.id in found.ledger.done for stage in own)
        if own:
            rows.append((kind, str(len(own)), str(n_done), str(len(own) - n_done)))
    return aligned(rows, frozenset({1, 2, 3}))


def _estimate(found: Study, missing: Sequence[Stage]) -> str:
    if not missing:
        return "everything is done: the study would only write its report"
    seconds, tokens, unknown = 0.0, 0, set[str]()
    for kind in {stage.kind for stage in missing}:
        n = sum(stage.kind == kind for stage in missing)
        folder, cure = found.planner.cache_dir / kind, "Delete its folder to do this stage again."
        known = [read_sealed(path, cure) for path in folder.glob(f"*/{DONE}")]
        if known:
            seconds += n * fmean(float(done["seconds"]) for done in known)
            tokens += round(n * fmean(int(done["tokens"]) for done in known))
        else:
            unknown.add(kind)
    cost = sum(
        preview(read_recipe(Path(stage.recipe), stage.overrides, "augment")).cost
        for stage in missing if stage.kind == "augment"
    )  # fmt: skip
    told = (
        f"about {tokens:,} tokens and {duration(seconds)} of work, by stages of the same kind that are done"
        if seconds
        else ""
    )
    untold = f"no finished stage tells the time of: {', '.join(sorted(unknown))}" if unknown else ""
    money = f"rewritings: at most {cost:.2f} in the currency of the prices" if cost else ""
    return "; ".join(part for part in (told, untold, money) if part)
