"""The provider's batch API, against the local endpoint."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.disk import read_jsonl
from kinject.errors import EndpointError, RecipeError
from kinject.llm.batch import BatchLog
from kinject.recipe import Recipe

Make = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("exact_copies_only")


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are handed in and looked at within milliseconds."""
    for name in ("SECONDS_TO_FILL", "FIRST_POLL", "LONGEST_POLL"):
        monkeypatch.setattr(f"kinject.llm.batch.{name}", 0.02)


def texts(result: Any) -> list[str]:
    return [row["text"] for _, row in read_jsonl(result.corpus_path)]


def test_a_batch_gives_the_same_corpus_as_single_requests(make_recipe: Make, serving: Callable[..., Any]) -> None:
    alone = augment(make_recipe(serving().url))
    single = texts(alone)
    shutil.rmtree(alone.run_dir)
    server = serving()
    result = augment(make_recipe(server.url, generator__batch=True))
    assert texts(result) == single
    assert len(server.state.batches.batches) == 1
    assert server.state.n_requests == 0
    assert augment(make_recipe(server.url, generator__batch=True)).n_sent == 0


def test_what_fails_in_a_batch_or_is_refused_goes_into_the_next(make_recipe: Make, serving: Callable[..., Any]) -> None:
    server = serving(faults={"500": 0.2, "refusal": 0.05, "malformed": 0.1, "reset": 0.1})
    result = augment(make_recipe(server.url, generator__batch=True, max_attempts=20))
    assert (result.got, result.refused) == (36, {"refusal": server.state.met["refusal"]})
    assert len(server.state.batches.batches) > 1


SCRIPT = """
import sys
from pathlib import Path
from kinject.augment import augment
from kinject.augment.checks import checker
from kinject.llm import batch
from kinject.recipe import read_recipe
checker.MAX_OVERLAP = 0.99
batch.SECONDS_TO_FILL = batch.FIRST_POLL = batch.LONGEST_POLL = 0.02
try:
    augment(read_recipe(Path(sys.argv[1]), ["augment.generator.batch=true"], verb="augment"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_batch_handed_in_before_the_end_of_a_run_is_taken_up_and_never_paid_twice(
    make_recipe: Make, serving: Callable[..., Any], sent: signal.Signals, code: int
) -> None:
    server = serving(latency=3.0)
    recipe = make_recipe(server.url, generator__batch=True)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(recipe.path)])
    deadline = time.monotonic() + 120
    while not server.state.batches.batches and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(sent)
    assert process.wait(60) == code
    assert augment(recipe).got == 36
    assert len(server.state.batches.batches) == 1
    assert server.state.answered.total() == len(server.state.answered) == 36


def test_a_batch_whose_name_was_never_noted_is_found_by_its_metadata(
    make_recipe: Make, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving()
    recipe = make_recipe(server.url, generator__batch=True)

    def die(*_: object) -> None:
        raise EndpointError("the power went", fatal=True)

    with monkeypatch.context() as patch:
        patch.setattr(BatchLog, "name", die)
        with pytest.raises(EndpointError, match="the power went"):
            augment(recipe)
    assert augment(recipe).got == 36
    assert len(server.state.batches.batches) == 1


def test_a_batch_that_was_never_made_is_made_again(
    make_recipe: Make, serving: Callable[..., Any], tmp_path: Path
) -> None:
    server = serving()
    log = BatchLog(tmp_path / "run" / "batches.sqlite")
    log.begin("lost", server.url, ["00" * 16])
    log.close()
    assert augment(make_recipe(server.url, generator__batch=True)).got == 36
    assert BatchLog(tmp_path / "run" / "batches.sqlite").unfinished(server.url) == []


def test_a_refused_key_stops_a_batch_run_and_names_its_variable(make_recipe: Make, serving: Callable[..., Any]) -> None:
    with pytest.raises(EndpointError, match="variable OPENAI_API_KEY"):
        augment(make_recipe(serving(key="right").url, generator__batch=True))


def test_only_an_endpoint_has_batches(make_recipe: Make) -> None:
    with pytest.raises(RecipeError, match="is only for kind: openai"):
        augment(make_recipe(generator__batch=True))
