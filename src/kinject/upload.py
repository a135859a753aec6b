"""Upload to the Hugging Face hub: an exported model, or the corpus of a finished augmentation as a
data set that `datasets` loads, and `corpus.path` of a recipe names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kinject.disk import check_output, read_lines
from kinject.errors import EndpointError, InputError
from kinject.hub import upload_fault
from kinject.manifests import AugmentManifest, read_manifest

_CORPORA = {"corpus.jsonl": "corpus", "sft.jsonl": "sft"}
"""File of an augmentation -> the configuration of the data set that holds it."""
_FIX = "Run kinject augment again: nothing is requested twice."


@dataclass(frozen=True)
class Target:
    """A repository on the hub, `repo_id` OWNER/NAME; it is private unless it is made `public`."""

    repo_id: str
    public: bool = False

    def check(self) -> None:
        """Raise `InputError` if nothing can be uploaded to it: before an export does its work."""
        from huggingface_hub.utils._validators import validate_repo_id

        try:
            validate_repo_id(self.repo_id)
        except ValueError as error:
            raise InputError(f"--upload: {str(error).splitlines()[0]} Give OWNER/NAME.") from error
        fault = upload_fault()
        if fault:
            raise InputError(f"--upload: {fault}.")


def is_corpus(folder: Path) -> bool:
    """Return whether `folder` is the run of an augmentation."""
    return isinstance(read_manifest(folder), AugmentManifest)


def upload_model(folder: Path, target: Target) -> str:
    """Upload every file of an exported model folder and return the address of the repository.

    Raises `EndpointError` if the hub refuses it.
    """
    # Chat templates beside the default one are in a folder of their own.
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return _upload({path.relative_to(folder).as_posix(): path for path in paths}, target, "model")


def upload_corpus(run_dir: Path, target: Target, licence: str | None = None) -> str:
    """Upload the corpus of the augmentation in `run_dir`, with a card, and return the address.

    Its rows for SFT, if there are any, are a configuration of their own. `licence` is the id for
    the card. Raises `InputError` for a corpus that is not finished or has been changed since,
    `EndpointError` if the hub refuses it.
    """
    manifest = read_manifest(run_dir)
    corpora: list[Path] = []
    if manifest is not None:
        corpora = [run_dir / name for name in _CORPORA if name in manifest.outputs]
    if not corpora:
        raise InputError(f"{run_dir}: no finished corpus there. {_FIX}")
    for path in corpora:
        check_output(path, _FIX)
    card = _corpus_card(target.repo_id, corpora, licence)
    files: dict[str, Path | bytes] = {path.name: path for path in corpora}
    return _upload({**files, "README.md": card.encode()}, target, "dataset")


def _upload(
    files: Mapping[str, Path | bytes], target: Target, kind: Literal["model", "dataset"]
) -> str:
    """Upload `files` (name -> file or content) in one commit to a repository, which is made if it
    is missing."""
    from huggingface_hub import CommitOperationAdd, HfApi

    target.check()
    api = HfApi()
    try:
        # A repository that exists keeps its own visibility.
        api.create_repo(target.repo_id, repo_type=kind, private=not target.public, exist_ok=True)
        commit = api.create_commit(
            repo_id=target.repo_id,
            operations=[CommitOperationAdd(name, content) for name, content in files.items()],
            commit_message=f"Upload {kind} with kinject",
            repo_type=kind,
        )
    except Exception as error:  # the client raises its own errors and those of its network library
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EndpointError(
            f"{target.repo_id}: not uploaded: {reason} Check HF_TOKEN and the name; nothing here "
            "has changed."
        ) from error
    return str(commit.repo_url)


def _corpus_card(repo_id: str, corpora: list[Path], licence: str | None) -> str:
    """Return the card of the data set: its configurations, the sources of its rows, its use. No
    path of this machine is in it."""
    import yaml

    from kinject import __version__

    configs = [
        # `datasets` loads this one where no configuration is named.
        {"config_name": _CORPORA[path.name], "data_files": path.name, "default": index == 0}
        for index, path in enumerate(corpora)
    ]
    front: dict[str, object] = {"license": licence} if licence else {}
    front |= {"tags": ["kinject", "knowledge-injection", "synthetic"], "configs": configs}
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {repo_id.rpartition('/')[2]}",
        "",
        "Documents and paraphrases of them, written by a language model with kinject "
        f"{__version__}.",
        "",
        "| file | origin | rows |",
        "|---|---|---|",
    ]
    licences: set[str] = set()
    for path in corpora:
        origins = Counter[str]()
        for _, line in read_lines(path):
            row = json.loads(line)
            origins[str(row.get("origin", "original"))] += 1
            if row.get("licence"):
                licences.add(str(row["licence"]))
        lines += [f"| {path.name} | {origin} | {n:,} |" for origin, n in sorted(origins.items())]
    if licences:
        lines += ["", f"Licences of the documents: {'; '.join(sorted(licences))}."]
    lines += [
        "",
        "## Use",
        "",
        "```yaml",
        "corpus:",
        f"  path: {repo_id}:corpus",
        "```",
        "",
        "A paraphrase may state wrong facts fluently.",
        "",
    ]
    return "\n".join(lines)
