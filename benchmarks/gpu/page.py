"""docs/gpu.md from the entries of results.jsonl: every figure is computed here from what a case measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measures import CASES, OPTIONS, PEAK_TFLOPS
from proofs import EXACT, RESUMED, ROUNDED, SANDBOX_ON_CPU, measured
from training import SECONDS, STEPS, WARM_UP

Results = Mapping[str, dict[str, Any]]
HEAD = """# GPU

This page is written by `make gpu`, which measures kinject on one NVIDIA GPU. All of kinject is tested on CPUs; what
needs a GPU's kernels is tested with plain loops in their place, and by the figures here.

"""
HOW = """
## How is it measured?

```console
$ python benchmarks/gpu/packages.py runs/gpu-packages --have pip-list.txt --with lm_eval
$ python benchmarks/gpu/real.py split runs/gpu-model
$ make gpu
$ bash benchmarks/gpu/lease.sh 1    # then 2: calls of eight minutes, where a GPU is lent for a quarter of an hour
```

`make gpu` needs a Python that has torch with CUDA, and no network. Each case is a process with a time limit; figures
and failures are appended to `runs/gpu/results.jsonl` as they come. A run that is stopped, or whose minutes are up,
resumes when it is started again with the same `--results`; the most important cases come first. `--only training` runs
one part, `--only train/8B` some cases, `--retry` those that failed, `--page FILE` writes this page, and `--tiny` runs
all of it on a CPU in some minutes.

Call 1 proves and measures; call 2 runs recipes/studies/real.yaml. Where 64 MiB travel in a call, beside 18 of the
checkout:

| call | carry | MiB |
|---|---|---|
| `lease.sh 1` | runs/gpu-packages | 29 |
| two of `true` | runs/gpu-model/part-1-of-3, then part-2-of-3 | 41 each |
| `lease.sh 2` | runs/gpu-packages, part-3-of-3 | 40 |

A call continues from the files of $OUT, carried as runs/gpu; `real.py unpack` takes its stages into a study
elsewhere.

The first line is for a machine without network, and runs where there is one. It packs the wheels of constraints.txt
for Python 3.12 on Linux (`--python` for another), less torch, what `pip list --format=freeze` prints on that machine,
tests, headers and other versions of CUDA (`--cuda`).
"""


def render(results: Results) -> str:
    """Return the page."""
    real = {name: entry for name, entry in results.items() if not entry.get("tiny")}
    dry = {name: entry for name, entry in results.items() if entry.get("tiny")}
    if not real and not dry:
        waiting = (
            "**No GPU has run it yet: the tables await their first run.** They will answer:\n\n"
        )
        parts = "".join(f"- {title}\n" for title, _ in _PARTS.values())
        return HEAD + waiting + parts + HOW
    note = "" if real else "**A dry run on a CPU at tiny size: these figures mean nothing.**\n\n"
    entries = real or dry
    sections = [
        text for title, write in _PARTS.values() if (text := _section(title, write(entries)))
    ]
    n_done = sum(entry["status"] == "done" for entry in entries.values())
    state = _text(f"{n_done} of {len(CASES)} cases are measured. {_missing(entries)}") + "\n"
    return (
        HEAD
        + note
        + _machine(entries)
        + "\n"
        + state
        + "".join(sections)
        + _failures(entries)
        + HOW
    )


def _text(*sentences: str) -> str:
    """Return a paragraph in lines of at most 119 characters."""
    return "\n".join(
        textwrap.wrap(" ".join(sentences), 119, break_long_words=False, break_on_hyphens=False)
    )


def _section(title: str, lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"\n## {title}\n\n{text}\n" if text else ""


def _missing(results: Results) -> str:
    waiting = [case.part for name, case in CASES.items() if name not in results]
    parts = [f"{waiting.count(part)} of {part}" for part in dict.fromkeys(waiting)]
    return f"Not run yet: {', '.join(parts)}." if waiting else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *body] if body else []


def _done(results: Results, prefix: str) -> dict[str, dict[str, Any]]:
    """Return the figures of the cases whose name begins with `prefix`, by the rest of the name."""
    return {
        name.removeprefix(prefix): entry["values"]
        for name, entry in results.items()
        if name.startswith(prefix) and entry["status"] == "done"
    }


def _number(value: Any, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "–"


def _machine(results: Results) -> str:
    values = _done(results, "machine").get("", {})
    if not values:
        return "The machine was not described.\n"
    versions = ", ".join(
        f"{name} {version}" for name, version in values["versions"].items() if version
    )
    if "gpu" not in values:
        return _text(f"CPU, {values['cores']} cores, Python {values['python']}, {versions}.") + "\n"
    paragraph = _text(
        f"{values['gpu']} ({values['memory_gib']:.0f} GiB, compute capability {values['capability']}, CUDA {values['cuda']}), "
        f"{values['cores']} CPU cores, Python {values['python']}.",
        f"Packages: {versions}. It multiplies matrices of 8,192 at "
        f"{values['matmul_tflops']:.0f} TFLOP/s in 16 bits and copies {values['copy_tb_s']:.2f} TB/s (read and written). "
        f"`model.attention: auto` tries {', '.join((*values['auto'], 'sdpa'))}.",
    )
    return paragraph + "\n"


def _proofs(results: Results) -> list[str]:
    rows = [(name, measured(entry)) for name, entry in _done(results, "proof/").items()]
    text = _text(
        "One model's loss on the CPU, on the GPU and there in bfloat16; the held-out loss of the same texts in packed rows and "
        "one a row, through kinject's own rows, and the leak: the difference if the texts of a row saw each other; the losses "
        "of a run that went on from a checkpoint; `kinject train` and `kinject eval` on the sandbox, of which a CPU says: "
        f"{SANDBOX_ON_CPU}. Differences are roots of mean squares over tokens. A case fails where they are above {EXACT:g} in "
        f"float32 or {ROUNDED:g} in bfloat16 (resumed: {RESUMED:g} of a step's loss)."
    )
    return [text, "", *_table(("proof", "figures"), rows)] if rows else []


def _real(results: Results) -> list[str]:
    values = _done(results, "real").get("")
    if values is None:
        return []
    state = "all of it" if values["finished"] else "the rest waits for the next call"
    done = f"recipes/studies/real.yaml on the company's documents: {values['stages']} stages are finished, {state}."
    if "seeds" not in values:
        return [_text(done, "No seed has all arms yet, so there is no report.")]
    seeds = "1 seed" if values["seeds"] == 1 else f"{values['seeds']} seeds"
    shares = f"The share of right answers over {seeds}, to be compared with [findings](findings.md), which are a CPU's."
    arms = values["accuracies"]
    sets = list(dict.fromkeys(name for accuracies in arms.values() for name in accuracies))
    rows = [
        (arm, *(_number(accuracies.get(name), 3) for name in sets))
        for arm, accuracies in arms.items()
    ]
    failed = [f"- {failure}" for failure in values["failures"]]
    if failed:
        failed = ["", "Failed:", "", *failed]
    return [_text(done, shares), "", *_table(("arm", *sets), rows), *failed]


def _attention(results: Results) -> list[str]:
    rows = [
        (f"`{name}`", f"{entry['loss_difference']:.1e}", f"{entry['gradient_difference']:.1e}", f"{entry['isolation']:.1e}",
         _number(entry["step_ms"], 1), _number(entry.get("peak_gib"), 1))
        for name, entry in _done(results, "attention/").items()
    ]  # fmt: skip
    columns = ("attention", "loss", "gradient", "isolation", "ms", "GiB")
    text = _text(
        "One batch of packed documents through a model of the 0.5B shape with random weights, forward and backward, "
        "in bfloat16. "
        "Loss: difference from sdpa's. Gradient: length of the difference from sdpa's, of the first layer's query weights, over "
        "its length. Isolation: how far the logits of a row's second document move without the first, over the largest logit."
    )
    return [text, "", *_table(columns, rows)] if rows else []


def _peak_flops(results: Results) -> float | None:
    name = _done(results, "machine").get("", {}).get("gpu", "")
    return next((1e12 * rate for key, rate in PEAK_TFLOPS.items() if key in name), None)


def _training(results: Results) -> list[str]:
    done = _done(results, "train/")
    for name, entry in _done(results, "shipped/").items():
        done[f"Qwen3-{name} as it ships/kinject"] = entry
    limit = _peak_flops(results)
    rows = []
    for name, entry in done.items():
        shape, _, program = name.partition("/")
        ours = done.get(f"{shape}/kinject", {}).get("tokens_per_second")
        flops = done.get(f"{shape}/kinject", {}).get("flops_per_token") or entry.get(
            "flops_per_token"
        )
        rate = entry["tokens_per_second"]
        mfu = f"{100 * rate * flops / limit:.0f}%" if limit and flops else "–"
        first = _number(entry.get("warm_up_seconds"), 1)
        rows.append((shape, program, entry["attention"], str(entry["rows"]), _number(rate), mfu,
                     _number(entry.get("peak_gib"), 1), first, _ratio(ours, rate)))  # fmt: skip
    text = _text(
        "Shapes of Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.1-8B, random weights, rows of 2,048 tokens, fused AdamW, "
        "arithmetic in "
        "bfloat16, no gradient checkpointing but at 8B in full on a GPU under 100 GiB. All weights: in float32, at 8B in "
        "bfloat16. The recipe that ships has its own settings: recipes/qwen3/8b-cpt.yaml. LoRA: rank 16 on all linear layers, "
        f"weights in bfloat16; QLoRA: in 4 bits. The median of {STEPS} steps (or those within {SECONDS:.0f} s) after {WARM_UP}, "
        "in which kernels are compiled (first steps). "
        "MFU counts products with weights (no attention, no look-up), over the datasheet's dense rate. "
        "The bare loop has the same "
        "shapes of rows and the attention that kinject chooses; SFTTrainer packs its own way (bfd_split) with flash attention "
        "where it is installed, else sdpa."
    )
    columns = (
        "model",
        "program",
        "attention",
        "rows",
        "tokens/s",
        "MFU",
        "GiB",
        "first steps, s",
        "kinject / it",
    )
    return [text, "", *_table(columns, rows)] if rows else []


def _plan(results: Results) -> list[str]:
    rows = []
    for prefix in ("train/", "shipped/", "option/"):
        for name, entry in _done(results, prefix).items():
            if (prefix == "train/" and not name.endswith("/kinject")) or not (
                "planned_gib" in entry or "plan_fault" in entry
            ):
                continue
            planned, peak = entry.get("planned_gib"), entry.get("peak_gib")
            label = name.removesuffix("/kinject")
            rows.append((label, _number(planned, 1) if planned else entry["plan_fault"].replace("|", "/"), _number(peak, 1),
                         _ratio(planned, peak)))  # fmt: skip
    text = "GiB of tensors in a training step: `kinject plan`'s estimate, and torch's peak."
    return (
        [text, "", *_table(("run", "planned", "measured", "planned / measured"), rows)]
        if rows
        else []
    )


def _options(results: Results) -> list[str]:
    done = _done(results, "option/")
    base = done.get(next(iter(OPTIONS)), {}).get("tokens_per_second")
    rows = [
        (name, entry["attention"], _number(entry["tokens_per_second"]), _number(entry.get("peak_gib"), 1),
         "–" if name.startswith("8B") else _ratio(entry["tokens_per_second"], base))
        for name, entry in done.items()
    ]  # fmt: skip
    text = "All weights of the 1B shape are trained by kinject; each row sets one option."
    columns = ("option", "attention", "tokens/s", "GiB", "of the first row")
    return [text, "", *_table(columns, rows)] if rows else []


def _eval(results: Results) -> list[str]:
    done = _done(results, "eval/")
    rows = [
        (
            name,
            str(entry["questions"]),
            _number(entry["seconds"], 1),
            _number(entry["questions"] / entry["seconds"], 1),
        )
        for name, entry in done.items()
    ]
    lines = [
        "Questions of the sandbox with four letters and 5 shots, the 1B shape with random weights in bfloat16.", "",
        *_table(("program", "questions", "seconds", "questions a second"), rows),
    ]  # fmt: skip
    if len(done) == 2:
        ours, theirs = (entry["log_probs"] for entry in done.values())
        pairs = [
            (a, b)
            for row, other in zip(ours, theirs, strict=True)
            for a, b in zip(row, other, strict=True)
        ]
        same = sum(a.index(max(a)) == b.index(max(b)) for a, b in zip(ours, theirs, strict=True))
        gap = max(abs(a - b) for a, b in pairs)
        lines += [
            "",
            f"Largest difference of a log-prob: {gap:.1e}; the same choice in {same} of {len(ours)}.",
        ]
    return lines if rows else []


def _failures(results: Results) -> str:
    rows = [
        (name, str(entry["reason"]).replace("|", "/").replace("\n", " "))
        for name, entry in results.items()
        if entry["status"] == "failed"
    ]
    return _section("What failed?", _table(("case", "reason"), rows))


_PARTS = {
    "proofs": ("Is it right?", _proofs),
    "attention": ("Do the kernels agree, and do documents stay apart?", _attention),
    "training": ("How fast does it train?", _training),
    "plan": ("Is the planned memory the measured one?", _plan),
    "options": ("What does each option cost?", _options),
    "eval": ("How fast does it score?", _eval),
    "real": ("What does a real model learn?", _real),
}
