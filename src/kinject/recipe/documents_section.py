"""The section of a recipe that decides how files become documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinject.recipe.sections import option


@dataclass(frozen=True)
class DocumentsSection:
    """How a heap of files (a folder, a pattern, a list) becomes documents: what is read, left out and flagged."""

    strict: bool = option(False, help="Stop at the first file that cannot be read, instead of leaving it out.")
    text_field: str | None = option(None, help="Column or key with the text; default: found by name.")
    title_field: str | None = option(None, help="Column or key with the title; default: found by name.")
    id_field: str | None = option(None, help="Column or key with the id; default: found by name.")
    ocr: bool = option(False, help="Read scanned pages by OCR (an extra).")
    largest_file: int = option(256, help="Largest file that is read, in MiB.", min=1, max=65_536)
    near_duplicates: float | None = option(
        0.85, help="A document that shares so large a part of its words with an earlier one is left out; null keeps it.",
        min=0.5, max=1.0,
    )  # fmt: skip
    boilerplate: float | None = option(
        0.02, help="A line that so large a part of the documents (and at least 10) share stays in the first only; null keeps it.",
        above=0.0, max=1.0,
    )  # fmt: skip
    personal_data: Literal["flag", "mask", "ignore"] = option(
        "flag", help="Mail addresses, phone numbers, keys, bank accounts and cards: count them, mask them, or neither."
    )
    phone_region: str | None = option(
        None, help="Country code (DE, US) whose phone numbers count without +; default: only those with +."
    )
    licence: str | None = option(None, help="Licence of the documents that name none; it goes to the corpus.")
    seconds: float = option(120.0, help="Processor seconds after which a file is given up.", min=0.1)
    memory: float = option(2.0, help="Memory in GiB beyond which a file is given up.", min=0.1)
    processes: int | None = option(None, help="Processes that read; default: one for each core.", min=1, max=256)
    executor: Literal["local", "ray"] = option("local", help="Where they run; ray: a cluster that shares the files.")
    cache_dir: str = option(
        "runs/parsed", help="Folder of what was read, by content; may be deleted at any time.", path="output"
    )
