"""Tiny models and tokenizers, made on the spot; nothing here needs a network or a GPU."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch
    import transformers

ROOT = Path(__file__).parents[1]
for room in (
    ".",
    "cli",
    "disk",
    "eval",
    "hostile",
    "report",
    "soak",
    "study",
):  # helper modules: pytest's importlib mode leaves sys.path alone
    sys.path.insert(0, str(Path(__file__).parent / room))
SHARED = ROOT.parent / "shared"
# Started in the background of a script, or by nohup, the tests and what they start would ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)

os.environ["HF_HUB_DISABLE_TELEMETRY"] = (
    "1"  # before pytest_configure imports the libraries, as kinject sets it
)

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(
    "any machine"
)  # a loaded machine is slow to draw examples; that says nothing of the code

import forked as forks  # noqa: E402 (they stand beside this file)
from small import TINY, draw_blank_figures, save_tiny_model  # noqa: E402
from spare import ONE_THREAD, spare_libraries  # noqa: E402

pytest_plugins = ["parallel"]
STARTED_WITH: dict[str, str] = {}
"""The environment before the first test."""


def pytest_configure() -> None:
    """Import the libraries once, before any test."""
    with (
        warnings.catch_warnings()
    ):  # what other people's modules say while they are imported is not ours to fail on
        warnings.simplefilter("ignore")
        import kinject  # noqa: F401, I001 (first: it leaves out what bitsandbytes logs while it is imported)
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
        import trl  # noqa: F401
    gc.collect()
    gc.freeze()  # a full collection, of which each training makes several, would walk the million objects of these modules
    STARTED_WITH.update(os.environ)
    spare_libraries()


LONG_FILES = (
    "test_first_run", "test_distributed", "test_pages", "test_view", "test_board", "test_prove", "test_demo", "test_ways",
    "test_package",
)  # fmt: skip
"""Files with a test of 10 s and more on two cores, much of it waiting."""
LONG_FOLDERS = ("train", "study")
"""Folders of which many files take 10 s."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: begun last, one would be waited for by all other workers."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    name = item.path.stem
    if name in LONG_FILES:
        return LONG_FILES.index(name)
    return len(LONG_FILES) + (item.path.parent.name not in LONG_FOLDERS)


def pytest_collection_finish() -> None:
    """Leave out of every full collection what pytest itself holds of some 4,500 tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave out of every full collection what a file has left: modules that its tests imported.

    Each training collects garbage several times. Behind the libraries of documents, evaluation and figures a training took
    half as long again (eight tests of tests/train/test_guards.py: 4.6 s of a core, and 3.0 so).
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Compute with as many threads after a test as before: more than there are cores spin and slow the others."""
    from torch import get_num_threads, set_num_threads

    before = get_num_threads()
    yield
    if get_num_threads() != before:
        set_num_threads(before)


KEY = "sk-canary/7f3A9zQ+w0Xk5e1bD0pLm2vR8tYc"
"""The key of every test that has `canary_key`: with marks that a URL must quote."""


def places_of_key(texts: Mapping[str, bytes]) -> list[str]:
    """Return the names of `texts` that hold `KEY`: as it is, or as a URL or JSON writes it."""
    forms = [KEY, quote(KEY, safe=""), quote(KEY), json.dumps(KEY)[1:-1]]
    wanted = [form.encode() for form in dict.fromkeys(forms)]
    return [name for name, text in texts.items() if any(form in text for form in wanted)]


@pytest.fixture
def canary_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Iterator[str]:
    """Put `KEY` into OPENAI_API_KEY; after the test, no file below tmp_path and nothing that was printed or logged holds it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    read = pytest.CaptureFixture.readouterr
    printed: list[str] = []

    def readouterr(self: Any) -> Any:
        captured = read(self)
        printed.extend(map(str, captured))
        return captured

    monkeypatch.setattr(pytest.CaptureFixture, "readouterr", readouterr)
    yield KEY
    texts = {
        "what was printed": "".join(printed).encode("utf-8", "replace"),
        "the log": caplog.text.encode("utf-8", "replace"),
    }
    for parent, _, names in os.walk(tmp_path):
        texts |= {
            str(path): path.read_bytes() for name in names if (path := Path(parent, name)).is_file()
        }
    names = {path: os.fsencode(path) for path in texts}
    assert places_of_key(texts) == places_of_key(names) == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a test with `canary_key` whose output or error holds the key."""
    report: Any = yield
    if "canary_key" in getattr(item, "fixturenames", ()):
        texts = {name: text.encode("utf-8", "replace") for name, text in report.sections}
        if call.excinfo is not None:
            texts["the error"] = str(call.excinfo.value).encode("utf-8", "replace")
        locations = places_of_key(texts)
        if locations:
            report.outcome, report.longrepr = "failed", f"{', '.join(locations)}: holds the key"
    return report


WORDS = (
    "Arden was born in Lowmere. Bryn works for the mill at Stonegate. Question: where does she live? Answer: in the "
    "town of Farrow, 1987. The school of Kelm taught her. 0123456789 A. B. C. D."
)


@pytest.fixture(scope="session")
def trained_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """A byte-level BPE of about 300 pieces that puts BOS before a text; shared by all tests, so none may change it."""
    from kinject.models import train_tokenizer

    return train_tokenizer([WORDS] * 4, 320)


@pytest.fixture
def tiny_tokenizer(
    trained_tokenizer: transformers.PreTrainedTokenizerBase,
) -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of the test's own."""
    return copy.deepcopy(trained_tokenizer)


@pytest.fixture
def tiny_config() -> dict[str, object]:
    """The config of a two-layer Llama, as a recipe's model.new holds it."""
    return dict(TINY)


@pytest.fixture(scope="session")
def saved_tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
    trained_tokenizer: transformers.PreTrainedTokenizerBase,
) -> tuple[Path, torch.Tensor]:
    """The folder that `tiny_model` copies, and the state of torch's random numbers once it is made."""
    import torch

    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-model", trained_tokenizer)
    return folder, torch.get_rng_state()


@pytest.fixture
def tiny_model(tmp_path: Path, saved_tiny_model: tuple[Path, torch.Tensor]) -> Path:
    """A folder of the test's own with a random two-layer Llama and its tokenizer."""
    import torch

    folder, state = saved_tiny_model
    torch.set_rng_state(state)
    return shutil.copytree(folder, tmp_path / "tiny-model")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process that has imported the libraries, shared by all workers of this run."""
    forks.use(tmp_path_factory.getbasetemp() / "forks", STARTED_WITH)


@pytest.fixture
def forked(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a test, and theirs, instead of importing the libraries in each: see tests/forked.py."""
    monkeypatch.delenv(ONE_THREAD)  # they load models as they do for a user
    forks.inherit(os.environ)
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `draw_blank_figures`."""
    draw_blank_figures(monkeypatch)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a text below tmp_path and return its path."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Sequence[Mapping[str, Any]]], Path]:
    """Write rows as JSONL below tmp_path and return the path."""

    def _write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return _write


@pytest.fixture
def shared() -> Path:
    """Real material beside the checkout; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return SHARED
