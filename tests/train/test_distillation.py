"""Context distillation moves the weights as a hand-written loop in float64 says, whatever packs, caches or resumes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization, tokenize_rows
from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.models import load_model, load_tokenizer
from kinject.recipe import DistillationSection, Recipe
from kinject.train import train
from kinject.train.loss import divergence, log_probs_of
from kinject.train.objectives import distillation as teacher
from kinject.train.setup import make_trainer
from kinject.train.trainer import KnowledgeTrainer
from small import have_flash_on_cpu, quick

MakeRecipe = Callable[..., Recipe]
RATE, STEPS, BATCH = 0.2, 3, 4
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": 0.0, "max_steps": STEPS,
       "train_sampling_strategy": "sequential", "per_device_train_batch_size": 2,
       "gradient_accumulation_steps": BATCH // 2, "max_length": 128}  # fmt: skip


@pytest.fixture
def sharp_model(tiny_model: Path) -> Path:
    """The tiny model with weights so large that its predictions depend on what it reads."""
    loaded = load_model(str(tiny_model))
    with torch.no_grad():
        for weight in loaded.model.parameters():
            if weight.ndim > 1:
                weight.mul_(6)
    loaded.model.save_pretrained(tiny_model)
    return tiny_model


@pytest.fixture
def paraphrases(tmp_path: Path) -> dict[str, Any]:
    """Twelve documents of three sentences with two paraphrases each, and replay."""
    rows: list[dict[str, str]] = []
    for i in range(12):
        facts = (
            f"Person {i} was born in {1900 + i}. ",
            f"Kelm {i + 30} taught her. ",
            f"She works at mill {i}.",
        )
        for number, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
            text = "".join(facts[n] for n in order).strip()
            origin = "variant" if number else "original"
            rows.append(
                {"id": f"{i}.{number}", "document_id": f"d{i}", "origin": origin, "text": text}
            )
    replay = [{"text": f"The mill at Farrow {i} is old."} for i in range(20)]
    for name, items in (("corpus", rows), ("replay", replay)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    return {
        "path": str(tmp_path / "corpus.jsonl"),
        "replay": {"path": str(tmp_path / "replay.jsonl"), "fraction": 0.2},
        "cache_dir": str(tmp_path / "tokens"),
    }


def _naive(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The divergence of whole distributions, as the textbook sum."""
    q, p = logits.softmax(-1), target.exp()
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("k", [1, 5, 11, None])
def test_a_divergence_and_its_gradient_are_those_of_the_textbook_sum(k: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    of_teacher = 3 * torch.randn(7, 11, generator=generator, dtype=torch.float64)
    ids = of_teacher.topk(k).indices if k is not None else None
    actual = divergence(logits, log_probs_of(of_teacher, ids), ids)

    def grouped(values: torch.Tensor) -> torch.Tensor:
        """Log-probs of the k best of the teacher, and of all others as one."""
        probabilities = values.softmax(-1)
        if ids is None:
            return probabilities.log()
        best = probabilities.gather(-1, ids)
        rest = 1 - best.sum(-1, keepdim=True)
        return torch.cat([best, rest], -1).log() if k != 11 else best.log()

    other = logits.detach().clone().requires_grad_(True)
    wanted = _naive(grouped(other), grouped(of_teacher))
    assert torch.allclose(actual, wanted, atol=1e-10)
    actual.sum().backward()
    wanted.sum().backward()
    assert logits.grad is not None
    assert other.grad is not None
    assert torch.allclose(logits.grad, other.grad, atol=1e-10)
    if k == 11:
        assert torch.allclose(actual, _naive(other, of_teacher.log_softmax(-1)))


def _read(
    row: dict[str, str], rows: list[dict[str, str]], context: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """(What the teacher reads before, what both read) of a text, the first token of which is not learned."""
    same = [other for other in rows if other["document_id"] == row["document_id"]]
    document = same[0]["text"] if row["origin"] != "original" else same[1]["text"]
    ids = tokenizer(row["text"], add_special_tokens=False).input_ids
    head = [tokenizer.bos_token_id]
    if context == "document":
        head += tokenizer(document + "\n\n", add_special_tokens=False).input_ids
    if context == "beginning":
        ends = [n for n, _ in enumerate(ids) if tokenizer.decode(ids[:n]).endswith((".", "!"))]
        cut = next(n for n in ends if _student_of[row["id"]] == ids[n:])
        head, ids = [*head, *ids[:cut]], ids[cut:]
    return head, [*ids, tokenizer.eos_token_id]


_student_of: dict[str, list[int]] = {}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few, mixed": ({"top_k": 4, "cross_entropy": 0.3}, {}),
    "beginning": ({"context": "beginning"}, {"max_length": 32}),
    "another model": ({"context": "none", "top_k": 9999}, {}),
    "unpacked": (
        {},
        {"packing": False, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1},
    ),
}


@pytest.mark.parametrize("case", quick(CASES, "few, mixed", "another model"))
def test_an_update_is_that_of_the_loop_written_out(
    make_recipe: MakeRecipe,
    paraphrases: dict[str, Any],
    sharp_model: Path,
    tmp_path: Path,
    case: str,
) -> None:
    section, options = CASES[case]
    if section.get("context") == "none":
        section = {**section, "teacher": str(_another(sharp_model, tmp_path / "teacher"))}
    trainer = {**SGD, **options}
    recipe = make_recipe(
        method="distill", distillation=section, corpus=paraphrases, trainer=trainer
    )
    base = {
        name: w.detach().clone()
        for name, w in load_model(str(sharp_model)).model.double().named_parameters()
    }
    wanted, losses = _by_hand(recipe, sharp_model)
    result = train(recipe)
    actual = dict(load_model(result.model_dir).model.named_parameters())
    logged = [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]
    assert logged == pytest.approx(losses, rel=1e-4)
    moved = sum(((wanted[n] - base[n]) ** 2).sum().item() for n in base) ** 0.5
    error = sum(((actual[n].double() - wanted[n]) ** 2).sum().item() for n in base) ** 0.5
    assert error < 1e-3 * moved


def _another(folder: Path, other: Path) -> Path:
    """A model of the same vocabulary with weights of its own."""
    loaded = load_model(str(folder))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    loaded.model.save_pretrained(other)
    loaded.tokenizer.save_pretrained(other)
    return other


def _by_hand(recipe: Recipe, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """SGD on each text alone in float64; the teacher, a second model, reads its context and the text in one pass."""
    assert recipe.corpus is not None
    section = recipe.distillation
    assert section is not None
    loaded, tokenizer = load_model(str(folder)), load_model(str(folder)).tokenizer
    model, frozen = loaded.model.double(), load_model(section.teacher or str(folder)).model.double()
    rows = [row for _, row in read_jsonl(Path(recipe.corpus.path))]
    packed = make_trainer(recipe).train_dataset.rows
    by_tail: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        _student_of[row["id"]] = packed.source[index].input_ids[1:-1].tolist()
        head, tail = _read(row, rows, section.context, tokenizer)
        by_tail[tuple(tail)] = head
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in packed[step * BATCH : step * BATCH + BATCH]:
            starts = [n for n, position in enumerate(row.position_ids) if position == 0]
            for a, b in zip(starts, [*starts[1:], len(row.input_ids)], strict=True):
                ids = row.input_ids[a:b]
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
                cross = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
                count += len(ids) - 1
                head = by_tail.get(tuple(ids[1:]))
                if head is None:  # replay
                    total = total + cross.sum()
                    continue
                with torch.no_grad():
                    of_teacher = frozen(torch.tensor([[*head, *ids[1:]]]), use_cache=False).logits[
                        0, len(head) - 1 : -1
                    ]
                p, q = of_teacher.softmax(-1), logits.softmax(-1)
                if section.top_k < p.shape[-1]:
                    best = p.topk(section.top_k).indices
                    p, q = (
                        torch.cat(
                            [x.gather(-1, best), 1 - x.gather(-1, best).sum(-1, keepdim=True)], -1
                        )
                        for x in (p, q)
                    )
                away = _naive(q.log(), p.log())
                loss = (1 - section.cross_entropy) * away + section.cross_entropy * cross
                total = total + loss.sum()
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return {name: weight.detach() for name, weight in model.named_parameters()}, losses


def test_a_second_run_makes_no_prediction_and_reads_the_same_bits(
    make_recipe: MakeRecipe,
    paraphrases: dict[str, Any],
    sharp_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(method="distill", corpus=paraphrases)
    first = make_trainer(recipe)
    read = first.train_dataset.teacher
    n_read = sum(
        len(read.head(index)) + len(read.tail(index))
        for index in range(len(read))
        if read.has_teacher(index)
    )
    assert first.preparation_cost["teacher_tokens"] == n_read
    assert first.preparation_cost["teacher_seconds"] > 0
    files = {
        path: path.read_bytes() for path in Path(paraphrases["cache_dir"]).rglob("log_probs.bin")
    }
    assert len(files) == 1
    monkeypatch.setattr(teacher, "read_rows", None)  # whoever calls it fails
    again = make_trainer(recipe)
    numbers = torch.arange(int(first.teacher.starts[-1]))
    one, two = (made.teacher.predictions(numbers) for made in (first, again))
    assert torch.equal(one.log_probs, two.log_probs)
    assert all(path.read_bytes() == content for path, content in files.items())
    assert again.preparation_cost == first.preparation_cost  # what it cost then
    assert any("predictions of the teacher made in" in note for note in first.notes)
    assert any("predictions of the teacher read from the cache" in note for note in again.notes)
    for changed in ({"context": "beginning"}, {"top_k": 5}):
        with pytest.raises(TypeError):
            make_trainer(make_recipe(method="distill", corpus=paraphrases, distillation=changed))


def test_a_teacher_outside_of_autocast_reads_beside_flash_attention(
    make_recipe: MakeRecipe, paraphrases: dict[str, Any], sharp_model: Path, monkeypatch
) -> None:
    """As in a training with fp16, whose teacher reads in the dtype of the weights."""
    recipe = make_recipe(method="distill", corpus=paraphrases, trainer={"bf16": False})
    trainer = make_trainer(recipe)
    have_flash_on_cpu(monkeypatch)
    model = load_model(str(sharp_model)).model
    model.set_attn_implementation("flash_on_cpu")
    read = trainer.train_dataset.teacher
    made = teacher.make_teacher(recipe, read, model, "other weights", bf16=False)[0]
    numbers = torch.arange(int(made.starts[-1]))
    expected = trainer.teacher.predictions(numbers)
    torch.testing.assert_close(made.predictions(numbers).log_probs, expected.log_probs)
    assert model.config._attn_implementation == "flash_on_cpu"


def test_with_an_adapter_the_teacher_is_the_base_without_it(
    make_recipe: MakeRecipe, paraphrases: dict[str, Any], sharp_model: Path
) -> None:
    losses = []
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    for adapter in (None, lora):
        trainer = {"max_steps": 12, "learning_rate": 3e-3}
        recipe = make_recipe(
            method="distill",
            distillation={"top_k": 9999},
            corpus=paraphrases,
            adapter=adapter,
            trainer=trainer,
        )
        train(recipe, overwrite=True)
        losses.append(
            [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]
        )
    assert losses[1][0] == pytest.approx(
        losses[0][0], rel=1e-5
    )  # a new adapter changes nothing yet
    assert min(losses[1][-3:]) < 0.95 * losses[1][0]
    assert len(list(Path(paraphrases["cache_dir"]).rglob("log_probs.bin"))) == 1


@pytest.mark.soak
def test_a_resumed_run_logs_the_losses_of_an_uninterrupted_one(
    make_recipe: MakeRecipe,
    paraphrases: dict[str, Any],
    sharp_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses(run_dir: Path) -> list[float]:
        return [row["loss"] for _, row in read_jsonl(run_dir / "log.jsonl") if "loss" in row]

    trainer = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    uninterrupted = make_recipe(
        method="distill", corpus=paraphrases, run_dir=str(tmp_path / "straight"), trainer=trainer
    )
    train(uninterrupted)
    stopped = make_recipe(method="distill", corpus=paraphrases, trainer=trainer)

    class StopAfterCheckpoint(RuntimeError):
        """A kill between two steps."""

    def stop(self: KnowledgeTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 4:
            raise StopAfterCheckpoint
        return step(self, *args, **kwargs)

    step = KnowledgeTrainer.training_step
    with monkeypatch.context() as patch:
        patch.setattr(KnowledgeTrainer, "training_step", stop)
        with pytest.raises(StopAfterCheckpoint):
            train(stopped)
    assert train(stopped, resume=True).n_steps == 6
    assert losses(stopped.run_dir) == losses(uninterrupted.run_dir)


def test_a_prompt_and_a_conversation_are_read_behind_the_document(
    make_recipe: MakeRecipe,
    paraphrases: dict[str, Any],
    sharp_model: Path,
    write: Callable[[str, str], Path],
) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    path = str(write("chat.jinja", template))
    rows = [row for _, row in read_jsonl(Path(paraphrases["path"]))][:2]
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Kelm."}]
    rows += [
        {"document_id": "d0", "prompt": "Question: Where?\nAnswer:", "completion": " Kelm"},
        {"document_id": "d0", "messages": turns},
        {"document_id": "unknown", "text": "Nobody wrote of this."},
        {"document_id": "d0", "origin": "variant", "text": "Bryn works at the mill. " * 60},
    ]
    corpus = {
        **paraphrases,
        "path": str(write("mixed.jsonl", "".join(json.dumps(row) + "\n" for row in rows))),
    }
    del corpus["replay"]
    chat = {"chat_template_path": path, "assistant_only_loss": True, "max_length": 256}
    made = make_trainer(make_recipe(method="distill", corpus=corpus, trainer=chat))
    read, tokenizer = made.train_dataset.teacher, made.processing_class
    document = rows[0]["text"]
    texts = [
        (tokenizer.decode(read.heads[n].input_ids), tokenizer.decode(read.tail(n)))
        for n in range(len(read))
    ]
    begin = tokenizer.bos_token
    assert texts[0] == (f"{begin}{rows[1]['text']}\n\n", f"{document}{tokenizer.eos_token}")
    assert texts[2] == (
        f"{begin}{document}\n\n",
        f"Question: Where?\nAnswer: Kelm{tokenizer.eos_token}",
    )
    assert texts[3][0].startswith(f"[user] {document}\n\n")
    assert "".join(texts[3]) == f"[user] {document}\n\nWhere?\n[assistant] In Kelm.\n"
    assert [read.has_teacher(n) for n in range(len(read))] == [True] * 4 + [False] * 2
    numbers = read.numbers(2)
    assert (numbers >= 0).tolist() == np.asarray(read.rows[2].learned).tolist()
    assert any(
        "reads 4 of 6 rows; the others are learned by cross-entropy" in note for note in made.notes
    )


@pytest.mark.parametrize("names_documents", [False, True])
def test_the_teacher_reads_all_passages_of_a_document_but_none_behind_itself(
    make_recipe: MakeRecipe,
    tiny_model: Path,
    write_rows: Callable[[str, list[dict[str, str]]], Path],
    names_documents: bool,
) -> None:
    """kinject augment writes each passage of a long document, and behind it its rewritings."""
    passages = ("Bryn was born in 1911.", "Kelm taught her.", "She left the mill in 1950.")
    variants = ("1911 is when Bryn was born.", "Her teacher was Kelm.", "In 1950 she left it.")
    rows = []
    for passage, variant in zip(passages, variants, strict=True):
        rows.append({"document_id": "d7", "origin": "original", "text": passage})
        rows.append({"document_id": "d7", "origin": "variant", "text": variant})
    document, section = "\n\n".join(passages), DistillationSection()
    if names_documents:
        document = " ".join(passages)
        path = write_rows("documents.jsonl", [{"id": "d7", "text": document}])
        section = DistillationSection(documents=str(path))
    # No rewriting of this document was accepted; a row that asks about it has all its passages.
    unwritten = ("The quarry opened in 1874.", "It closed in 1921.")
    rows += [{"document_id": "d8", "origin": "original", "text": text} for text in unwritten]
    if not names_documents:
        rows.append({"document_id": "d8", "prompt": "When did it close?", "completion": " 1921"})
    corpus = CorpusFile(write_rows("rows.jsonl", rows))
    tokenizer, tokenization = load_tokenizer(str(tiny_model)), Tokenization()
    tokens = list(tokenize_rows(corpus, tokenizer, tokenization))
    recipe = make_recipe(method="distill")
    read = teacher.teacher_rows(recipe, section, corpus, tokens, tokenizer, tokenization)
    heads = [tokenizer.decode(read.head(n), skip_special_tokens=True) for n in range(len(rows))]
    assert heads[1:6:2] == [f"{document}\n\n"] * 3
    assert heads[0:6:2] == [f"{variant}\n\n" for variant in variants]
    assert heads[6:8] == ["", ""]
    if not names_documents:
        assert heads[8] == "The quarry opened in 1874.\n\nIt closed in 1921.\n\n"


def test_of_a_long_document_the_teacher_reads_the_passages_nearest_to_the_row(
    make_recipe: MakeRecipe, sharp_model: Path, write: Callable[[str, str], Path]
) -> None:
    sentences = [
        f"Mill {i} at Farrow was built in {1700 + i} by {name}."
        for i, name in enumerate("ABCDEFGHIJKLMNOP")
    ]
    document = {"id": "d", "text": " ".join(sentences)}
    rows = [
        {
            "document_id": "d",
            "prompt": "Question: When was mill 11 built?\nAnswer:",
            "completion": " 1711",
        },
        {"document_id": "d", "text": "In 1702 the mill 2 was built by C."},
    ]
    corpus = str(write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    documents = str(write("documents.jsonl", json.dumps(document) + "\n"))
    heads = {}
    for most in (64, 100):
        section = {"documents": documents, "context_tokens": most}
        made = make_trainer(
            make_recipe(method="distill", distillation=section, corpus={"path": corpus})
        )
        read = made.train_dataset.teacher
        heads[most] = [made.processing_class.decode(read.heads[n].input_ids) for n in range(2)]
        assert all(len(read.heads[n].input_ids) <= most + 1 for n in range(2))  # and BOS
    assert "built in 1711" in heads[64][0]
    assert "built in 1702" in heads[64][1]
    assert "1711" not in heads[64][1]
    positions = [
        document["text"].find(passage)
        for passage in heads[100][0].removeprefix("<|bos|>").split("\n\n")[:-1]
    ]
    assert positions == sorted(positions)  # in the order of the document
    assert -1 not in positions
    assert len(heads[100][0]) > len(heads[64][0])


def test_documents_held_out_keep_each_row_with_its_own_predictions(
    make_recipe: MakeRecipe, paraphrases: dict[str, Any], sharp_model: Path
) -> None:
    corpus = {**paraphrases, "validation_fraction": 0.3}
    trainer = {"eval_strategy": "steps", "eval_steps": 3}
    made = make_trainer(make_recipe(method="distill", corpus=corpus, trainer=trainer))
    read, rows = made.train_dataset.teacher, made.train_dataset.rows
    assert len(read) < len(CorpusFile(Path(paraphrases["path"])))
    for number in range(len(read)):
        assert read.rows[number].input_ids.tolist() == rows.source[number].input_ids.tolist()
        assert read.heads[number].n_left_out == len(read.rows[number].input_ids) - 1
    evaluated = made.evaluate()
    assert evaluated["eval_loss"] > math.log(10)  # of plain cross-entropy on a random model


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"method": "distill", "distillation": {"context": "documents"}}, "Did you mean document"),
        ({"method": "distill", "distillation": {"documents": "nowhere.jsonl"}}, "nothing is there"),
        ({"method": "distill"}, "no row of .* has a context that fits .* Rows need a document_id"),
    ],
)
def test_what_cannot_be_distilled_is_refused(
    make_recipe: MakeRecipe, sections: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RecipeError, match=fault):
        train(make_recipe(**sections))
