"""Whether copies of a model answer as the trained one: folded, quantised, in GGUF, behind a server.

All are asked the questions and texts of an evaluation. Rounding moves log-probs a little, more with
fewer bits of a weight; `BOUNDS` lie between that noise and what faults do
(benchmarks/eval/prove.py measures both).
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import (
    file_name,
    write_json,
)
from kinject.errors import EndpointError, InputError
from kinject.gguf_files import gguf_file
from kinject.manifests import read_manifest
from kinject.recipe import EvalRecipe, GeneratorSection, read_recipe
from kinject.recipe.read import read_values
from kinject.terminal import format_count, format_number
from kinject.types import Answer, Message, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kinject.llm.endpoint import Endpoint

# Sound copies of the sandbox's model: 0.003 and 0.5%, 0.010 and 0.5%, 0.135 and 6.5% (docs/
# training.md). A real model of 135M parameters moves more: in Q8_0, which is llama.cpp's own to the
# bit, by 0.058 on prose and 0.077 on choices, in Q5_0 by 0.4: fewer than 8 bits change so small a
# model (docs/LOG.md).
BOUNDS = {16: (0.02, 0.02), 8: (0.12, 0.04), 4: (0.25, 0.15)}
"""Bits of a weight -> the largest mean difference of a token's log-prob (nats), and the largest
fraction of other answers."""
PROOF = "prove"
"""Folder of a proof, beside the files that it is about."""
_TRAINED = "trained"
_FEW = 2
"""Other answers that are always allowed: some choices are all but equal."""
_KEPT = (
    "questions",
    "formats",
    "shots",
    "chat",
    "perplexity_corpus",
    "limit",
    "max_new_tokens",
    "stop",
    "batch_tokens",
    "model_defaults",
)
"""Keys of an evaluation that decide what is asked, and how."""
# Where tokenizers differ: digits, double spaces, accents, other scripts, line ends.
_TEXT = "It's 12,345.67; 2x  «é» 你好\n\tok"
_FIRST: Message = {"role": "user", "content": "What is the capital?"}
_CONVERSATIONS: tuple[list[Message], ...] = (
    [_FIRST],
    [{"role": "system", "content": "Answer in one word."}, _FIRST],
    [_FIRST, {"role": "assistant", "content": "Of what?"}, {"role": "user", "content": "Of Peru."}],
)


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of a copy with the trained model: `value` (in `unit`) may be at most `bound`."""

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
        verdict = "answers as" if self.holds else "DIFFERS from"
        yield f"{self.source}: {verdict} the trained model"
        if self.fault:
            yield f"  cannot be used: {self.fault}"
        for check in self.checks:
            word = "ok     " if check.holds else "DIFFERS"
            yield (
                f"  {word} {check.name}: {format_number(check.value, 4)} {check.unit} (at "
                f"most {check.bound:.4g})"
            )
        if self.holds:
            return
        for row in self.changed[:3]:
            yield f"  {row['question']!r:.80}: {row['copy']!r:.60}, trained {row['trained']!r:.60}"


def prove(trained: str, copies: Sequence[str], evaluation: Path, out: Path) -> list[Proof]:
    """Return the proof of each of `copies` of the model in `trained`, on the questions and texts of
    `evaluation`.

    That is a recipe, or a run of kinject eval or train (its probes). `out` gets prove.json and the
    answers; what an earlier proof left there is deleted. Raises `InputError` if the evaluation or
    the trained model cannot be used.
    """
    raw = read_evaluation(evaluation, trained)
    # Once the new one can be made.
    shutil.rmtree(out, ignore_errors=True)
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
    # A server is taken to serve the copy with the fewest bits.
    fewest_bits = min([proof.bits for proof in local], default=16)
    for proof in served:
        proof.bits = fewest_bits
        _ask_server(proof, trained, raw, out)
    summary = {
        "trained": trained,
        "evaluation": str(evaluation),
        "holds": all(proof.holds for proof in proofs),
        "copies": [_as_json(proof) for proof in proofs],
    }
    write_json(out / "prove.json", summary)
    return proofs


def _as_json(proof: Proof) -> dict[str, Any]:
    """Return a proof as its file has it: null for a value that is not finite, which JSON lacks."""
    row = asdict(proof)
    for check in row["checks"]:
        if not math.isfinite(check["value"]):
            check["value"] = None
    return {**row, "holds": proof.holds}


def read_evaluation(source: Path, trained: str) -> dict[str, Any]:
    """Return the recipe, with the trained model alone, that asks what the recipe or run in `source`
    asks. Raises `InputError` if that has no questions."""
    raw = _recipe_of_run(source) if source.is_dir() else read_values(source)
    section = raw.get("eval") or raw.get("probes") or {}
    if not isinstance(section, Mapping) or not section.get("questions"):
        raise InputError(f"{source}: no questions. Give --prove a recipe or run of kinject eval.")
    table = {"path": trained}
    # The copies are asked as the evaluation asked the trained model.
    models = section.get("models")
    if not isinstance(models, Mapping):
        models = {}  # of probes, or of a recipe that its own check refuses
    for own in models.values():
        if isinstance(own, dict) and trained in (own.get("adapter"), own.get("path")):
            kept = ("chat", "attention", "device_map")
            table = {key: own[key] for key in kept if key in own} | table
            break
    kept_keys = {key: section[key] for key in _KEPT if key in section}
    return {"seed": raw.get("seed", 0), "eval": {**kept_keys, "models": {_TRAINED: table}}}


def _recipe_of_run(run_dir: Path) -> Mapping[str, Any]:
    """Return the recipe of a finished run as its manifest has it, {} without one."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        return {}
    recipe: Mapping[str, Any] = manifest.as_written.get("recipe", {})
    if not isinstance(recipe, Mapping):
        raise InputError(f"{run_dir}: its manifest.json has no recipe. Give one of kinject eval.")
    return recipe


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
    from kinject.models import check_finite_in, check_model, load_tokenizer

    try:
        folder = find_source(proof.source, "model")
        check_model(folder)
        check_finite_in(Path(folder))
        proof.bits = _bits(proof.source, folder)
        ours, theirs = load_tokenizer(trained), load_tokenizer(folder)
    except InputError as error:
        proof.fault = str(error)
        return
    texts = [_TEXT]
    for question in questions:
        texts += [question.question, *question.choices, *question.accepted]
    n = sum(ours(text).input_ids != theirs(text).input_ids for text in texts)
    # The texts hold no end of text, so it is compared by itself.
    if ours.eos_token != theirs.eos_token:
        n += 1
    proof.checks.append(Check("other tokens", n, 0, f"of {format_count(len(texts), 'text')}"))
    if ours.chat_template:
        n = sum(
            _conversation(ours, turns) != _conversation(theirs, turns) for turns in _CONVERSATIONS
        )
        unit = f"of {len(_CONVERSATIONS)} conversations"
        proof.checks.append(Check("other chat template", n, 0, unit))


def _conversation(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message]) -> list[int] | str:
    """Return the tokens of a conversation up to where the answer begins, or what the template
    raises."""
    messages = [dict(turn) for turn in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001  (a template is a program that raises anything)
        return type(error).__name__
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _bits(source: str, folder: str) -> int:
    """Return 16, 8 or 4: the bits of a copy's weights that name its `BOUNDS`."""
    from kinject.models import load_config

    file = gguf_file(source)
    if file:
        return _gguf_bits(file)
    settings = getattr(load_config(folder), "quantization_config", None)
    if settings is None:
        return 16
    if not isinstance(settings, Mapping):
        settings = settings.to_dict()
    return quantized_bits(settings)


def quantized_bits(settings: Mapping[str, Any]) -> int:
    """Return 8 or 4: the bits of quantised weights by the `quantization_config` of their model, 4
    where it names none."""
    named = [settings.get("bits"), settings.get("w_bit")]
    groups = settings.get("config_groups")  # of compressed-tensors, each with its own bits
    if isinstance(groups, Mapping):
        named += [group["weights"]["num_bits"] for group in groups.values() if group.get("weights")]
    found = [bits for bits in named if isinstance(bits, int)]
    if settings.get("load_in_8bit") or "fp8" in str(settings.get("quant_method")):
        found.append(8)
    if min(found, default=4) >= 8:
        return 8
    return 4


def _gguf_bits(file: Path) -> int:
    """Return the mean bits of the weights of a GGUF file's matrices, rounded down to 16, 8 or 4."""
    from gguf import GGUFReader

    # llama.cpp keeps vectors (norms, biases) in 32 bits, whatever the file's type.
    matrices = [tensor for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1]
    n_bytes = sum(int(tensor.n_bytes) for tensor in matrices)
    n_weights = sum(int(tensor.n_elements) for tensor in matrices)
    mean = 8 * n_bytes / n_weights
    return next((bits for bits in (16, 8) if mean >= bits), 4)


def _compare_answers(recipe: EvalRecipe, proofs: Sequence[Proof]) -> None:
    """Ask all models of `recipe`; add the checks of those that `proofs` are about."""
    from kinject.eval import evaluate
    from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers

    report = evaluate(recipe)
    by_arm: dict[str, dict[object, Answer]] = {}
    for a in read_answers(recipe.run_dir / "answers.jsonl"):
        if a.format != PERPLEXITY_FORMAT:
            prompt = (a.question_set, a.question_id, a.format, a.shots, a.rotation)
            by_arm.setdefault(a.arm, {})[prompt] = a
    questions = _questions(recipe)
    # NaN is within no bound.
    perplexities = {item.arm: item.per_token or math.nan for item in report.perplexities}
    losses = {arm: math.log(perplexity) for arm, perplexity in perplexities.items()}
    for proof in proofs:
        if proof.name in by_arm:
            pairs = [(mine, by_arm[proof.name][key]) for key, mine in by_arm[_TRAINED].items()]
            check_answers(proof, pairs, questions)
        if proof.name in losses:
            difference = abs(losses[proof.name] - losses[_TRAINED])
            perplexity = format_number(perplexities[proof.name], 4)
            unit = f"nats a token apart on texts, perplexity {perplexity}"
            proof.checks.append(Check("loss", difference, BOUNDS[proof.bits][0], unit))


def check_answers(
    proof: Proof, pairs: Sequence[tuple[Answer, Answer]], questions: Mapping[str, Question]
) -> None:
    """Add the checks of a copy's answers, each beside the trained model's, and list the changed
    ones."""
    from kinject.eval.scoring.answers import finite_or_none

    for mine, other in pairs:
        question = questions[mine.question_id]
        trained, copy = _answer(mine, question), _answer(other, question)
        if trained != copy:
            proof.changed.append(
                {
                    "question_set": mine.question_set,
                    "id": mine.question_id,
                    "format": mine.format,
                    "question": question.question,
                    "trained": trained,
                    "copy": copy,
                    "trained_log_probs": finite_or_none(mine.log_probs),
                    "copy_log_probs": finite_or_none(other.log_probs),
                }
            )
    most, fraction = BOUNDS[proof.bits]
    scored = [(mine, other) for mine, other in pairs if mine.text is None]
    unit = (
        f"of {format_count(len(pairs), 'answer')}"
        if scored
        else f"of {format_count(len(pairs), 'written answer')}"
    )
    allowed = max(_FEW, int(fraction * len(pairs)))
    proof.checks.append(Check("other answers", len(proof.changed), allowed, unit))
    if scored:
        total = math.fsum(_differences(scored))
        n_tokens = sum(sum(mine.n_tokens) for mine, _ in scored)
        mean = total / max(1, n_tokens)
        proof.checks.append(Check("log-probs", mean, most, "nats a token apart on choices"))


def _differences(pairs: Sequence[tuple[Answer, Answer]]) -> Iterator[float]:
    """Yield by how much the log-prob of each choice differs, in nats."""
    for mine, other in pairs:
        for a, b in zip(mine.log_probs, other.log_probs, strict=True):
            yield abs(a - b)


def _answer(answer: Answer, question: Question) -> str:
    """Return the chosen answer, or the written one."""
    if answer.text is not None:
        # White space alone is no other answer.
        return " ".join(answer.text.split())
    best = max(range(len(answer.log_probs)), key=answer.log_probs.__getitem__)
    return question.choices[(best + answer.rotation) % len(question.choices)]


def _ask_server(proof: Proof, trained: str, raw: Mapping[str, Any], out: Path) -> None:
    """Compare what a server answers: log-probs where it returns them, else written answers; and its
    chat template."""
    from kinject.models import load_tokenizer

    tokenizer = load_tokenizer(trained)
    url, _, model = proof.source.partition("#")
    # One token: what counts is how many tokens the server reads in a chat.
    section = GeneratorSection(base_url=url, model=model, max_tokens=1)
    try:
        section = asyncio.run(_meet(proof, section, tokenizer))
    # A Transient too: a server that cannot be asked proves nothing.
    except EndpointError as error:
        proof.fault = str(error)
        return
    has_template = bool(tokenizer.chat_template)
    for number, (table, changes) in enumerate(_server_requests(raw, trained, has_template)):
        models = {proof.name: {"endpoint": {"base_url": url, "model": section.model}, **table}}
        recipe = _recipe(raw, models, out / f"{proof.name}-{number}", **changes)
        try:
            _compare_answers(recipe, [proof])
        except EndpointError as error:  # it returns no log-probs, or has no such route
            proof.fault = str(error)
        else:
            proof.fault = ""
            return


def _server_requests(
    raw: Mapping[str, Any], trained: str, has_template: bool
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the ways to ask a server, the one that compares most first: keys of the model, and of
    the evaluation."""
    yield {"api": "completions", "tokenizer": trained}, {}
    chat = raw["eval"]["models"][_TRAINED].get("chat", raw["eval"].get("chat"))
    written = {"questions": _without_formats(raw["eval"]["questions"]), "formats": ["generate"]}
    # Of chats there are no plain prompts to complete.
    if not chat:
        yield {"api": "completions"}, written
    if has_template:
        yield {"api": "chat"}, {**written, "chat": chat or True}


def _without_formats(sets: Mapping[str, str | dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the question sets without formats of their own: each is answered in writing."""
    tables = {
        name: {"path": item} if isinstance(item, str) else dict(item) for name, item in sets.items()
    }
    for table in tables.values():
        table.pop("formats", None)
    return tables


async def _meet(
    proof: Proof, section: GeneratorSection, tokenizer: PreTrainedTokenizerBase
) -> GeneratorSection:
    """Return the section with the endpoint's model, the only one that it lists; check the tokens
    that it counts in chats.

    Raises `EndpointError` if it lists several.
    """
    from kinject.llm.endpoint import Endpoint

    async with Endpoint(section) as endpoint:
        names = [section.model] if section.model else await endpoint.models()
    if len(names) != 1:
        raise EndpointError(
            f"{proof.source}: it lists {len(names)} models. Name one: --copy "
            f"'{proof.source}#MODEL'."
        )
    section = replace(section, model=names[0])
    if tokenizer.chat_template:
        async with Endpoint(section) as endpoint:
            same = [
                await _counts_the_same(endpoint, turns, _conversation(tokenizer, turns))
                for turns in _CONVERSATIONS
            ]
        unit = f"of {format_count(len(same), 'conversation')}, by the tokens that it counts"
        proof.checks.append(Check("other chat template", same.count(False), 0, unit))
    return section


async def _counts_the_same(
    endpoint: Endpoint, turns: list[Message], tokens: list[int] | str
) -> bool:
    """Return whether a server counts as many tokens in a conversation, or refuses it as well."""
    from kinject.llm import Transient

    try:
        completion = await endpoint.complete(turns, 0)
    except (EndpointError, Transient):
        return isinstance(tokens, str)
    return completion.usage.tokens_in == len(tokens)
