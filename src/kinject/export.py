"""Make a finished run ready for use elsewhere: one plain model folder with its card, and the
commands that serve it.

`prove` asks whether copies of the model answer as the trained one: folded, quantised, in GGUF,
behind a server. All are asked the questions and texts of an evaluation. Rounding moves log-probs a
little, more with fewer bits of a weight; `BOUNDS` lie between that noise and what faults do
(benchmarks/eval/prove.py measures both).
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinject.disk import (
    file_name,
    lock_dir,
    verified_hashes,
    write_json,
    write_sha256sums,
    write_text,
)
from kinject.errors import EndpointError, InputError
from kinject.gguf import gguf_file, write_gguf
from kinject.manifests import EvalManifest, TrainManifest, manifest_beside, read_manifest
from kinject.recipe import EvalRecipe, GeneratorSection, read_recipe
from kinject.recipe.read import read_values
from kinject.types import Answer, Message, Question

BOUNDS = {16: (0.02, 0.02), 8: (0.05, 0.04), 4: (0.25, 0.15)}
"""Bits of a weight -> the largest mean difference of a token's log-prob (nats), and the largest
fraction of other answers."""
_TRAINED = "trained"
_FEW = 2
"""Other answers that are always allowed: some choices are all but equal."""
_KEPT = ("questions", "formats", "shots", "chat", "perplexity_corpus", "limit", "max_new_tokens", "stop",
         "batch_tokens", "model_defaults")  # fmt: skip
"""Keys of an evaluation that decide what is asked, and how."""
_TEXT = "It's 12,345.67; 2x  «é» 你好\n\tok"
_FIRST: Message = {"role": "user", "content": "What is the capital?"}
_CONVERSATIONS: tuple[list[Message], ...] = (
    [_FIRST],
    [{"role": "system", "content": "Answer in one word."}, _FIRST],
    [_FIRST, {"role": "assistant", "content": "Of what?"}, {"role": "user", "content": "Of Peru."}],
)


@dataclass
class ExportOptions:
    """Options of an export of `folder`: a run, a model or an adapter.

    The model goes into `out`/model (None: `folder`/export/model). `report` is an evaluation or
    study whose results the card shows, `dtype` that of the weights (None: as they are stored),
    `license` an id for the card. `gguf` (f16, bf16, q8_0) is the kind of a GGUF file that is
    written, too. `prove` is an evaluation, by which the model, that file and every one of `copies`
    (folders, GGUF files, addresses of servers) are compared with the trained model (`prove`).
    """

    folder: Path
    out: Path | None = None
    report: Path | None = None
    dtype: str | None = None
    license: str | None = None
    gguf: str | None = None
    prove: Path | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a copy with the trained model: `value` (in `unit`) may be at most `bound`."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether it is within the bound; a value that is not finite is not."""
        return self.value <= self.bound


@dataclass(slots=True)
class Proof:
    """A copy (`source`: a folder, a GGUF file, an address), its checks, its other answers; `fault`:
    why it cannot be used."""

    name: str
    source: str
    bits: int = 16
    fault: str = ""
    checks: list[Check] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the copy answers as the trained model does."""
        return not self.fault and all(check.holds for check in self.checks)

    def lines(self) -> Iterator[str]:
        """Yield the proof as lines for a terminal."""
        yield f"{self.source}: {'answers as' if self.holds else 'DIFFERS from'} the trained model"
        yield from [f"  cannot be used: {self.fault}"] if self.fault else []
        for check in self.checks:
            word = "ok     " if check.holds else "DIFFERS"
            yield f"  {word} {check.name}: {check.value:.4g} {check.unit} (at most {check.bound:.4g})"
        for row in () if self.holds else self.changed[:3]:
            yield f"  {row['question']!r:.80}: {row['copy']!r:.60}, trained {row['trained']!r:.60}"


@dataclass(frozen=True)
class ExportResult:
    """The model folder that was written, the commands that serve or publish it, the proof of each
    copy, the GGUF file."""

    folder: Path
    commands: tuple[str, ...]
    proofs: tuple[Proof, ...] = ()
    gguf: Path | None = None


def export(options: ExportOptions) -> ExportResult:
    """Write the model folder that `options` describe, whole or not at all; one that is there is
    replaced.

    Raises `InputError` for a run that is not finished and for weights out of the dtype's range,
    `DiskError` if the folder cannot be written.
    """
    source = _read_source(options.folder)
    out = options.out or options.folder / "export"
    name = options.folder.resolve().name
    card = _model_card(name, source, options)
    folder, part = out / "model", out / ".model.part"
    with lock_dir(out):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_model(source, part, options.dtype or "auto")
        write_text(part / "README.md", card)
        write_sha256sums(part)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
    file = out / f"model-{options.gguf}.gguf" if options.gguf else None
    if file:
        write_gguf(folder, file, str(options.gguf))
    proofs: list[Proof] = []
    if options.prove:
        copies = [str(folder), *([str(file)] if file else []), *options.copies]
        proofs = prove(str(source.model), copies, options.prove, out / "prove")
    return ExportResult(folder, tuple(_commands(folder, name, source, file)), tuple(proofs), file)


@dataclass(frozen=True)
class _Source:
    """The source: the folder of its weights, its base ("" if unknown), and the manifest of its run,
    if there is one."""

    model: Path
    base: str
    is_adapter: bool
    manifest: TrainManifest | None


def _read_source(folder: Path) -> _Source:
    """Return the source in `folder`, of a run or a model. Raises `InputError` if that is no
    finished model."""
    from kinject.models import ADAPTER_CONFIG, base_of_adapter, check_model

    manifest = read_manifest(folder)
    if manifest is not None and not isinstance(manifest, TrainManifest):
        raise InputError(
            f"{folder}: the run of kinject {manifest.stage}, which makes no model. Give one of train."
        )
    if manifest is not None and manifest.finished() is None:
        raise InputError(
            f"{folder}: this run is not finished. Finish it: kinject train RECIPE --resume"
        )
    model = folder / "model" if manifest is not None or (folder / "model").is_dir() else folder
    if not model.is_dir():
        raise InputError(
            f"{model}: no such folder. Give the run_dir of a finished kinject train, or a model folder."
        )
    check_model(model)
    adapter = model / ADAPTER_CONFIG
    base = ""
    if adapter.is_file():
        base = base_of_adapter(adapter)
    elif manifest is not None:
        base = manifest.recipe.model.path or ""
    return _Source(model, base, adapter.is_file(), manifest)


def _write_model(source: _Source, part: Path, dtype: str) -> None:
    """Write the model, an adapter folded in. Raises `InputError` if a weight is not finite in
    `dtype`."""
    from kinject.models import model_files, not_finite_in
    from kinject.train.merge import merge_adapter, save_as

    if source.is_adapter:
        merge_adapter(source.model, part, dtype)
    else:
        verified_hashes(source.model)
        for path in model_files(source.model):
            shutil.copyfile(path, part / path.name)
        if dtype != "auto":
            save_as(part, dtype, None)
    fault = not_finite_in(part).rpartition(": ")[2]
    if fault:
        shutil.rmtree(part)
        raise InputError(
            f"--dtype: {fault} of {source.model} is out of the range of {dtype}. Leave --dtype out."
        )


def _model_card(name: str, source: _Source, options: ExportOptions) -> str:
    """Return the model's README.md: the hub's front matter, results, training, use. No path of this
    machine is in it."""
    import yaml

    from kinject import __version__
    from kinject.report.files import read_report, render_card_tables

    base = (
        "" if not source.base or os.path.exists(source.base) else source.base
    )  # a folder means nothing to others
    front = {
        "license": options.license, "base_model": base, "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["kinject", "knowledge-injection"],
    }  # fmt: skip
    start = base or ("a model in a local folder" if source.base else "random weights")
    trained = "a LoRA adapter, folded in" if source.is_adapter else "all weights"
    lines = [
        f"---\n{yaml.safe_dump({k: v for k, v in front.items() if v}, sort_keys=False)}---\n", f"# {name}", "",
        f"Trained from {start} with kinject {__version__} ({trained}).", "", "## Results", "",
    ]  # fmt: skip
    if options.report is None:
        lines += [
            "This model has not been evaluated, or its evaluation was not given (`kinject export --report`).",
            "",
        ]
    else:
        path = options.report if options.report.is_file() else options.report / "report.json"
        arm = _own_arm(path, source.model)
        lines += [f"This model is the arm **{arm}**.", ""] if arm else []
        lines += [render_card_tables(path.parent, read_report(path)), ""]
    facts = _training_facts(source.manifest)
    if facts:
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in facts.items()]
        lines += [""]
    lines += [
        "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")', "```", "",
        "It learned the statements of its corpus; it may state wrong facts fluently. Accuracies hold for the question sets "
        "above, asked as written there.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _own_arm(report: Path, model: Path) -> str:
    """Return the name that the evaluation of `report` gave to `model`; "" if its manifest does not
    name it."""
    manifest = manifest_beside(report)
    if not isinstance(manifest, EvalManifest):
        return ""
    for name, path in manifest.recipe.eval.model_paths().items():
        if Path(path).resolve() == model.resolve():
            return name
    return ""


def _training_facts(manifest: TrainManifest | None) -> dict[str, str]:
    """Return label -> value of a run: how long, how much, and the settings of its trainer that the
    recipe names; {} for a model without a run."""
    counts = None if manifest is None else manifest.finished()
    if manifest is None or counts is None:
        return {}
    facts = {"steps": f"{counts.steps:,}", "epochs": f"{counts.epochs:.2f}"}
    if counts.learned_tokens is not None:
        facts["tokens learned"] = f"{counts.learned_tokens:,}"
    facts["mean training loss"] = f"{counts.loss:.3f}"
    facts["rows of an update"] = f"{counts.effective_batch.rows:,}"
    for key in ("learning_rate", "lr_scheduler_type", "optim", "max_length", "weight_decay"):
        if key in manifest.recipe.trainer:
            facts[key] = str(manifest.recipe.trainer[key])
    return facts


def _commands(model: Path, name: str, source: _Source, file: Path | None) -> list[str]:
    """Return the commands that serve the exported model, or the adapter without folding it in, and
    that publish it."""
    folder = shlex.quote(str(model))
    lines = [
        f"vllm serve {folder} --served-model-name {shlex.quote(name)}",
        f"transformers serve {folder}",
    ]
    if not any(
        (model / template).is_file() for template in ("chat_template.jinja", "chat_template.json")
    ):
        lines.append(
            "# its tokenizer has no chat template: ask /v1/completions of vLLM; transformers serve needs one"
        )
    if source.is_adapter:
        adapter = shlex.quote(f"{name}={source.model}")
        lines.append(
            f"vllm serve {shlex.quote(source.base)} --enable-lora --lora-modules {adapter}  # rank up to 16, no DoRA"
        )
    lines += [f"llama-server -m {shlex.quote(str(file))}"] if file else []
    return [*lines, f"hf upload OWNER/NAME {folder}"]


def prove(trained: str, copies: Sequence[str], evaluation: Path, out: Path) -> list[Proof]:
    """Return the proof of each of `copies` of the model in `trained`, on the questions and texts of
    `evaluation`.

    That is a recipe, or a run of kinject eval or train (its probes). `out` gets prove.json and the
    answers; what an earlier proof left there is deleted. Raises `InputError` if the evaluation or
    the trained model cannot be used.
    """
    shutil.rmtree(out, ignore_errors=True)
    raw = _read_evaluation(evaluation, trained)
    questions = _questions(_recipe(raw, {}, out / "questions")).values()
    proofs = [
        Proof(file_name(f"{n}-{Path(copy).name}"), copy) for n, copy in enumerate(copies, start=1)
    ]
    served = [proof for proof in proofs if proof.source.startswith(("http://", "https://"))]
    local = [proof for proof in proofs if proof not in served]
    for proof in local:
        _compare_tokens(proof, trained, questions)
    table = raw["eval"]["models"][_TRAINED]
    models = {proof.name: {**table, "path": proof.source} for proof in local if not proof.fault}
    if models:
        _compare_answers(_recipe(raw, models, out / "copies"), proofs)
    for proof in served:
        proof.bits = min(
            [other.bits for other in local], default=16
        )  # it is taken to serve the smallest of them
        _ask_server(proof, trained, raw, out)
    write_json(out / "prove.json", {
        "trained": trained, "evaluation": str(evaluation), "holds": all(proof.holds for proof in proofs),
        "copies": [{**asdict(proof), "holds": proof.holds} for proof in proofs],
    })  # fmt: skip
    return proofs


def _read_evaluation(source: Path, trained: str) -> dict[str, Any]:
    """Return the recipe, with the trained model alone, that asks what the recipe or run in `source`
    asks."""
    raw: Mapping[str, Any] = {}
    if not source.is_dir():
        raw = read_values(source)
    elif (manifest := read_manifest(source)) is not None:
        raw = manifest.as_written["recipe"]
    section = raw.get("eval") or raw.get("probes") or {}
    if not section.get("questions"):
        raise InputError(f"{source}: no questions. Give --prove a recipe or run of kinject eval.")
    tables = [table for table in (section.get("models") or {}).values() if isinstance(table, dict)]
    own = next(
        (table for table in tables if trained in (table.get("adapter"), table.get("path"))), {}
    )
    table = {key: own[key] for key in ("chat", "attention", "device_map") if key in own} | {
        "path": trained
    }
    kept = {key: section[key] for key in _KEPT if key in section}
    return {"seed": raw.get("seed", 0), "eval": {**kept, "models": {_TRAINED: table}}}


def _recipe(
    raw: Mapping[str, Any], models: Mapping[str, Any], run_dir: Path, **changes: Any
) -> EvalRecipe:
    """Return the recipe `raw` with `models` beside the trained one."""
    section = {**raw["eval"], **changes, "models": {**raw["eval"]["models"], **models}}
    run_dir.mkdir(parents=True)
    write_json(run_dir / "recipe.yaml", {**raw, "run_dir": str(run_dir), "eval": section})
    recipe: EvalRecipe = read_recipe(run_dir / "recipe.yaml", (), "eval")
    return recipe


def _questions(recipe: EvalRecipe) -> dict[str, Question]:
    """Return the questions that are asked, by id."""
    from kinject.eval.plan import read_plan

    return {question.id: question for item in read_plan(recipe).sets for question in item.questions}


def _compare_tokens(proof: Proof, trained: str, questions: Iterable[Question]) -> None:
    """Set bits and fault of a copy that is loaded here; compare its tokenizer and chat template."""
    from kinject.hub import find_source
    from kinject.models import check_finite_in, check_model, load_config, load_tokenizer

    try:
        folder = find_source(proof.source, "model")
        check_model(folder)
        check_finite_in(Path(folder))
        file = gguf_file(proof.source)
        quantized = getattr(load_config(folder), "quantization_config", None) is not None
        proof.bits = _bits(file) if file else 4 if quantized else 16
        ours, theirs = load_tokenizer(trained), load_tokenizer(folder)
    except InputError as error:
        proof.fault = str(error)
        return
    texts = [_TEXT, *(text for q in questions for text in (q.question, *q.choices, *q.accepted))]
    n = sum(ours(text).input_ids != theirs(text).input_ids for text in texts) + (
        ours.eos_token != theirs.eos_token
    )
    proof.checks.append(Check("other tokens", n, 0, f"of {len(texts)} texts"))
    if ours.chat_template:
        n = sum(
            _conversation(ours, turns) != _conversation(theirs, turns) for turns in _CONVERSATIONS
        )
        proof.checks.append(
            Check("other chat template", n, 0, f"of {len(_CONVERSATIONS)} conversations")
        )


def _conversation(tokenizer: Any, turns: Sequence[Message]) -> list[int] | str:
    """Return the tokens of a conversation up to where the answer begins, or what the template
    raises."""
    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # noqa: BLE001  (a template is a program: its expressions raise anything)
        return type(error).__name__
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _bits(file: Path) -> int:
    """Return 16, 8 or 4, which names the bounds of a GGUF file: the mean bits of its matrices'
    weights, rounded down."""
    from gguf import GGUFReader

    matrices = [tensor for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1]
    mean = (
        8
        * sum(int(tensor.n_bytes) for tensor in matrices)
        / sum(int(tensor.n_elements) for tensor in matrices)
    )
    return next((bits for bits in (16, 8) if mean >= bits), 4)


def _compare_answers(recipe: EvalRecipe, proofs: Sequence[Proof]) -> None:
    """Ask all models of `recipe`; add the checks of those that `proofs` are about."""
    from kinject.eval import evaluate
    from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers

    report = evaluate(recipe)
    by_arm: dict[str, dict[object, Answer]] = {}
    for a in read_answers(recipe.run_dir / "answers.jsonl"):
        if a.format != PERPLEXITY_FORMAT:
            by_arm.setdefault(a.arm, {})[
                a.question_set, a.question_id, a.format, a.shots, a.rotation
            ] = a
    questions = _questions(recipe)
    losses = {item.arm: math.log(item.per_token or math.nan) for item in report.perplexities}
    for proof in proofs:
        if proof.name in by_arm:
            pairs = [(mine, by_arm[proof.name][key]) for key, mine in by_arm[_TRAINED].items()]
            _check_answers(proof, pairs, questions)
        if proof.name in losses:
            difference = abs(losses[proof.name] - losses[_TRAINED])
            unit = f"nats a token apart on texts, perplexity {math.exp(losses[proof.name]):.4g}"
            proof.checks.append(Check("loss", difference, BOUNDS[proof.bits][0], unit))


def _check_answers(
    proof: Proof, pairs: Sequence[tuple[Answer, Answer]], questions: Mapping[str, Question]
) -> None:
    """Add the checks of a copy's answers, each beside the trained model's, and list the changed
    ones."""
    for mine, other in pairs:
        question = questions[mine.question_id]
        if _answer(mine, question) != _answer(other, question):
            proof.changed.append({
                "question_set": mine.question_set, "id": mine.question_id, "format": mine.format, "question": question.question,
                "trained": _answer(mine, question), "copy": _answer(other, question),
                "trained_log_probs": mine.log_probs, "copy_log_probs": other.log_probs,
            })  # fmt: skip
    most, fraction = BOUNDS[proof.bits]
    scored = [(mine, other) for mine, other in pairs if mine.text is None]
    kind = "" if scored else "written "
    allowed = max(_FEW, int(fraction * len(pairs)))
    proof.checks.append(
        Check("other answers", len(proof.changed), allowed, f"of {len(pairs)} {kind}answers")
    )
    if scored:
        total = math.fsum(
            abs(a - b) for m, o in scored for a, b in zip(m.log_probs, o.log_probs, strict=True)
        )
        n_tokens = sum(sum(mine.n_tokens) for mine, _ in scored)
        proof.checks.append(
            Check("log-probs", total / max(1, n_tokens), most, "nats a token apart on choices")
        )


def _answer(answer: Answer, question: Question) -> str:
    """Return the chosen answer, or the written one."""
    if answer.text is not None:
        return " ".join(answer.text.split())
    best = max(range(len(answer.log_probs)), key=answer.log_probs.__getitem__)
    return question.choices[(best + answer.rotation) % len(question.choices)]


def _ask_server(proof: Proof, trained: str, raw: Mapping[str, Any], out: Path) -> None:
    """Compare what a server answers: log-probs where it returns them, else written answers; and its
    chat template."""
    from kinject.models import load_tokenizer

    tokenizer = load_tokenizer(trained)
    url, _, model = proof.source.partition("#")
    try:
        section = asyncio.run(
            _meet(proof, GeneratorSection(base_url=url, model=model, max_tokens=1), tokenizer)
        )
    except EndpointError as error:
        proof.fault = str(error)
        return
    chat = raw["eval"]["models"][_TRAINED].get("chat", raw["eval"].get("chat"))
    sets = {name: {key: value for key, value in ({"path": item} if isinstance(item, str) else item).items() if key != "formats"}
            for name, item in raw["eval"]["questions"].items()}  # fmt: skip
    written = {"questions": sets, "formats": ["generate"]}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"api": "completions", "tokenizer": trained}, {})
    ]
    ways += [] if chat else [({"api": "completions"}, written)]
    ways += (
        [({"api": "chat"}, {**written, "chat": chat or True})] if tokenizer.chat_template else []
    )
    for number, (table, changes) in enumerate(ways):
        models = {proof.name: {"endpoint": {"base_url": url, "model": section.model}, **table}}
        try:
            _compare_answers(
                _recipe(raw, models, out / f"{proof.name}-{number}", **changes), [proof]
            )
        except EndpointError as error:  # it returns no log-probs, or has no such route
            proof.fault = str(error)
        else:
            proof.fault = ""
            return


async def _meet(proof: Proof, section: GeneratorSection, tokenizer: Any) -> GeneratorSection:
    """Return the section with the endpoint's model, the only one that it lists; check the tokens
    that it counts in chats.

    Raises `EndpointError` if it lists several.
    """
    from kinject.llm import Transient
    from kinject.llm.endpoint import Endpoint

    async with Endpoint(section) as endpoint:
        names = [section.model] if section.model else await endpoint.models()
    if len(names) != 1:
        raise EndpointError(
            f"{proof.source}: it lists {len(names)} models. Name one: --copy '{proof.source}#MODEL'."
        )
    section = replace(section, model=names[0])
    rendered = [
        (turns, _conversation(tokenizer, turns))
        for turns in _CONVERSATIONS
        if tokenizer.chat_template
    ]
    counts = []
    async with Endpoint(section) as endpoint:
        for turns, tokens in rendered:
            try:
                counts.append((await endpoint.complete(turns, 0)).usage.tokens_in == len(tokens))
            except (EndpointError, Transient):
                counts.append(isinstance(tokens, str))  # both refuse it
    if counts:
        unit = f"of {len(counts)} conversations, by the tokens that it counts"
        proof.checks.append(Check("other chat template", counts.count(False), 0, unit))
    return section
