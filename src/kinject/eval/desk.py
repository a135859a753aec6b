"""Where prompts are put to a model: what is stored already, what is this process's own, and what goes on after a kill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kinject.disk import read_sealed, remove, write_sealed
from kinject.eval.answers import AnswerBook
from kinject.eval.encode import Encoded
from kinject.eval.processes import Share
from kinject.eval.scorer import Reading, Scorer


@dataclass(frozen=True)
class Desk:
    """The answers of a run folder and this process's share of its prompts."""

    book: AnswerBook
    share: Share

    def stored(self, keys: Collection[str]) -> frozenset[str]:
        """Return those of `keys` that need no model, as the first process knows them."""
        return self.share.from_first(frozenset(key for key in keys if self.book.find(key) is not None))

    def own(self, together: Mapping[str, str]) -> list[str]:
        """Return this process's keys; those of one value of `together` (a question, say) stay with one process."""
        return self.share.own(list(together), key=together.__getitem__)

    def ask(
        self,
        scorer: Scorer,
        prompts: Mapping[str, Encoded],
        stored: Collection[str],
        keep: Callable[[str, Reading], None],
    ) -> dict[str, Reading]:
        """Return what the model says to each of `prompts` (by key) that is not `stored`; `keep` stores each as it comes.

        Prompts are read in passes over many. Which ones a pass holds is on disk (pending.json) until it is done, so that
        a run that was killed reads what is left as it would have been read, and comes to the same last digit.
        """
        path = self.share.folder / "pending.json"
        said: dict[str, Reading] = {}
        for keys in _passes(path, prompts, stored):
            write_sealed(path, {"keys": keys})
            known = {index for index, key in enumerate(keys) if key in stored}
            for index, reading in scorer.read([prompts[key] for key in keys], known):
                said[keys[index]] = reading
                keep(keys[index], reading)
            remove(path)
        return said


def _passes(path: Path, prompts: Mapping[str, Encoded], stored: Collection[str]) -> Iterator[list[str]]:
    """Yield the keys to read together: those of a pass that was cut short, then what else is not stored."""
    left = [key for key in prompts if key not in stored]
    begun = _begun(path)
    together = set(begun)
    if prompts.keys() >= together and not together.isdisjoint(left):
        yield begun
        left = [key for key in left if key not in together]
    if left:
        yield left


def _begun(path: Path) -> list[str]:
    """Return the keys in `path`; none where it is absent or not ours, for then all that is left is read anew."""
    if not path.exists():
        return []
    keys = read_sealed(path, "Delete it: what was being asked is asked anew, and may differ in the last digit.").get(
        "keys"
    )
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else []
