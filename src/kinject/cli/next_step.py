"""What bare `kinject` says: the verbs, and what to do next in this folder."""

from __future__ import annotations

from pathlib import Path

_STEPS = (
    ("runs/sandbox/base-corpus.jsonl", "kinject sandbox corpus", "write what the base model reads"),
    ("runs/sandbox/base/model", "kinject train recipes/sandbox/base.yaml", "train the base model (minutes)"),
    ("runs/augment/corpus.jsonl", "kinject augment", "paraphrase the documents"),
    ("runs/cpt/model", "kinject train recipes/cpt.yaml", "put the knowledge in"),
    ("runs/sandbox/repeat/model", "kinject train recipes/sandbox/repeat.yaml", "the control: the originals, repeated"),
    ("runs/eval/report.html", "kinject eval", "ask what was learned and what forgotten"),
)


def render_next_step(description: str) -> str:
    """Return the verbs and the steps of the main job, those done in this folder marked."""
    lines = [
        description,
        "",
        "verbs: kinject --help    one verb: kinject VERB --help    recipes that are there: kinject recipes",
        "",
    ]
    if not Path("recipes/augment.yaml").exists():
        lines.append(
            "Next: kinject recipes copy eval    puts recipes, documents and questions of the main job into this folder"
        )
        return "\n".join(lines)
    following = next((index for index, (made, _, _) in enumerate(_STEPS) if not Path(made).exists()), len(_STEPS))
    lines.append("The main job, on the embedded sandbox (in a checkout, make demo runs all of it):")
    width = max(len(command) for _, command, _ in _STEPS)
    for index, (_, command, purpose) in enumerate(_STEPS):
        mark = "done" if index < following else "next" if index == following else ""
        lines.append(f"  {mark:4}  {command:{width}}  {purpose}")
    if following == len(_STEPS):
        lines.append("\nAll done: open runs/eval/report.html. Then your own documents: docs/real-data.md shows how.")
    return "\n".join(lines)
