"""What bare `kinject` says: the verbs, and what to do next in this folder."""

from __future__ import annotations

from pathlib import Path

_STEPS = (
    ("runs/sandbox/base-corpus.jsonl", "kinject sandbox corpus", "write what the base model reads"),
    ("runs/sandbox/base/model", "kinject train recipes/sandbox/base.yaml", "train the base model (minutes)"),
    ("runs/augment/corpus.jsonl", "kinject augment", "paraphrase the documents"),
    ("runs/cpt/model", "kinject train recipes/cpt.yaml", "put the knowledge in"),
    ("runs/eval/report.html", "kinject eval", "ask what was learned and what forgotten"),
)


def render_next_step(description: str) -> str:
    """Return the verbs and the steps of the main job, those done in this folder marked."""
    lines = [
        description,
        "",
        "verbs: augment, questions, train, merge, eval, compare, study, report, sandbox, check   (kinject VERB --help)",
        "",
    ]
    if not Path("recipes/augment.yaml").exists():
        lines.append("Next: go to a checkout of kinject (recipes/ is not here), or write a recipe: see the README.")
        return "\n".join(lines)
    following = next((index for index, (made, _, _) in enumerate(_STEPS) if not Path(made).exists()), len(_STEPS))
    lines.append("The main job, on the embedded sandbox (make demo runs all of it):")
    width = max(len(command) for _, command, _ in _STEPS)
    for index, (_, command, purpose) in enumerate(_STEPS):
        mark = "done" if index < following else "next" if index == following else ""
        lines.append(f"  {mark:4}  {command:{width}}  {purpose}")
    if following == len(_STEPS):
        lines.append("\nAll done: open runs/eval/report.html. Then your own documents: docs/real-data.md shows how.")
    return "\n".join(lines)
