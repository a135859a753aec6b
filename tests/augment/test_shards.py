"""Documents divided among processes: the corpus is that of one process, and a kill costs nothing twice."""

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Talk

from kinject.augment import augment
from kinject.augment.shards import Shard, augment_in_shards, shard_executor
from kinject.disk import read_journal, read_manifest
from kinject.errors import EndpointError, InputError
from kinject.executors import Outcome, error_line
from kinject.recipe import AugmentRecipe

Make = Callable[..., AugmentRecipe]
pytestmark = pytest.mark.usefixtures("exact_copies_only")
STYLES = {"paraphrase": 3, "reversed": 1, "permuted": 1}


class InProcess:
    """Runs shards at once, in this process; those with the numbers in `lost` never start, as if their process died."""

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.shards: list[Shard] = []
        self.outcomes: list[Outcome] = []
        self.lost = lost

    def has_room(self, task: Any) -> bool:
        return not self.outcomes

    def submit(self, task: Any) -> None:
        self.shards.append(task)
        if len(self.shards) - 1 in self.lost:
            self.outcomes.append(Outcome(task, None, "its worker process was killed by signal 9 (out of memory?)"))
            return
        try:
            self.outcomes.append(Outcome(task, task.run()))
        except EndpointError as error:
            self.outcomes.append(Outcome(task, None, error_line(error)))

    def wait(self) -> list[Outcome]:
        finished, self.outcomes = self.outcomes, []
        return finished

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def files(folder: Path) -> Mapping[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("corpus.jsonl", "failures.jsonl")}


def rows(path: Path) -> list[str]:
    return sorted(json.dumps(row) for _, row in read_journal(path))


@pytest.mark.parametrize("remote", [True, False])
def test_the_files_are_those_of_one_process(make_recipe: Make, serving: Callable[..., Any], remote: bool) -> None:
    url = serving(faults={"echo": 0.2}, by_request=True).url if remote else None
    alone = augment(make_recipe(url, styles=STYLES))
    wanted = files(alone.run_dir), rows(alone.variants_path), rows(alone.rejected_path)
    shutil.rmtree(alone.run_dir)
    executor = InProcess()
    shared = augment_in_shards(make_recipe(url, styles=STYLES), lambda n: executor, 3)
    assert len(executor.shards) == 3
    assert (files(shared.run_dir), rows(shared.variants_path), rows(shared.rejected_path)) == wanted
    assert (shared.got, shared.refused, shared.n_sent) == (alone.got, alone.refused, alone.n_sent)
    counts = read_manifest(shared.manifest_path)["counts"]
    assert sum(shard["sent"] for shard in counts["shards"]) == alone.n_sent
    assert counts["this_run"]["sent"] == 0
    assert not (shared.run_dir / "shards").exists()
    again = augment_in_shards(make_recipe(url, styles=STYLES), lambda n: executor, 3)
    assert (len(executor.shards), again.n_sent, files(again.run_dir)) == (3, 0, wanted[0])


def test_a_shard_that_dies_costs_nothing_twice_and_another_number_of_processes_resumes(
    make_recipe: Make, hostile: Callable[..., Any]
) -> None:
    server = hostile(lambda talk, number: talk.say(401, b"{}") if number == 14 else None)
    recipe = make_recipe(server.url, generator__concurrency=4)
    with pytest.raises(
        EndpointError, match=r"shard 2 of 4: .*killed by signal 9.* So did 1 more.*the same command resumes"
    ):
        augment_in_shards(recipe, lambda n: InProcess(lost=(1,)), 4)
    assert 0 < len(server.good) < 36
    n_stored = len(server.good)
    result = augment_in_shards(recipe, lambda n: InProcess(), 2)
    assert (result.got, result.n_sent) == (36, 36 - n_stored)
    assert set(Counter(server.good).values()) == {1}


def test_what_one_process_has_done_counts_for_shards_and_the_other_way_round(
    make_recipe: Make, hostile: Callable[..., Any]
) -> None:
    server = hostile(lambda talk, number: talk.say(401, b"{}") if number == 10 else None)
    recipe = make_recipe(server.url, generator__concurrency=4)
    with pytest.raises(EndpointError, match="key"):
        augment(recipe)
    (recipe.run_dir / "variants.jsonl").unlink()  # as after a power cut: the answers are in the cache alone
    with pytest.raises(EndpointError, match="killed"):
        augment_in_shards(recipe, lambda n: InProcess(lost=(0,)), 3)
    result = augment(recipe)
    assert result.got == 36
    assert set(Counter(server.good).values()) == {1}


def test_the_judge_is_scored_once_in_a_run_of_several_processes(make_recipe: Make, serving: Callable[..., Any]) -> None:
    writer, judge = serving(), serving()
    section = {"kind": "openai", "model": "sandbox", "base_url": judge.url}
    alone = augment(make_recipe(writer.url, judge=section))
    n_alone = judge.state.n_requests
    shutil.rmtree(alone.run_dir)
    shared = augment_in_shards(make_recipe(writer.url, judge=section), lambda n: InProcess(), 3)
    assert judge.state.n_requests == 2 * n_alone
    assert shared.judge == alone.judge
    assert shared.judge.n_good > 0


def test_limits_and_the_budget_are_shared_out(make_recipe: Make, hostile: Callable[..., Any]) -> None:
    server = hostile(lambda talk, number: None)
    settings = {"price_out": 10.0, "max_tokens": 60, "concurrency": 7, "requests_per_minute": 1000}
    executor = InProcess()
    recipe = make_recipe(server.url, budget=0.012, **{f"generator__{key}": value for key, value in settings.items()})
    result = augment_in_shards(recipe, lambda n: executor, 3)
    parts = [
        dict(override.split("=", 1) for override in shard.overrides[len(recipe.overrides) :])
        for shard in executor.shards
    ]
    assert [json.loads(part["augment.budget"]) for part in parts] == [pytest.approx(0.004)] * 3
    generators = [json.loads(part["augment.generator"]) for part in parts]
    assert {(one["concurrency"], one["requests_per_minute"]) for one in generators} == {(2, 333)}
    assert (result.out_of_budget, result.short) == (True, True)
    assert 0.01 < result.cost <= 0.012  # what the shards left over is used in the end


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generator__concurrency": 2}, r"augment\.generator\.concurrency: found 2, .* 3 processes\. Raise it, or .*at most 2"),
        ({"generator__tokens_per_minute": 3000}, r"tokens_per_minute: found 3,000, .*--jobs to at most 2"),
        ({"generator__batch": True}, "--jobs: batches cannot be divided"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_told(make_recipe: Make, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        augment_in_shards(make_recipe("http://127.0.0.1:9/v1", **fields), lambda n: InProcess(), 3)
    with pytest.raises(InputError, match="--jobs: found 0, allowed: 1 to 256"):
        shard_executor("local", 0)


def test_a_fatal_error_of_a_shard_is_the_runs(make_recipe: Make, hostile: Callable[..., Any]) -> None:
    def refuse(talk: Talk, number: int) -> bool:
        return talk.say(402, b'{"error": {"message": "pay"}}')

    with pytest.raises(EndpointError, match=r"shard 1 of 2: .*out of credit.* So did 1 more\."):
        augment_in_shards(make_recipe(hostile(refuse).url), lambda n: InProcess(), 2)


@pytest.mark.soak
def test_a_process_that_is_killed_loses_only_what_is_in_flight(make_recipe: Make, hostile: Callable[..., Any]) -> None:
    def act(talk: Talk, number: int) -> None:
        if number == 12:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    server = hostile(act)
    recipe = make_recipe(server.url, generator__concurrency=4)
    with pytest.raises(EndpointError, match=r"its worker process was killed by signal 9"):
        augment_in_shards(recipe, shard_executor("local", 2), 2)
    assert len(list((recipe.run_dir / "shards").iterdir())) == 2
    result = augment(recipe)
    assert (result.got, result.failed) == (36, {})
    twice = [n for n in Counter(server.good).values() if n > 1]
    assert len(twice) <= 2  # in flight in the killed process
    assert result.n_sent + result.n_cached < 36  # most of both is merged


@pytest.mark.soak
def test_a_ray_cluster_does_the_same(make_recipe: Make, serving: Callable[..., Any]) -> None:
    pytest.importorskip("ray")
    server = serving()
    result = augment_in_shards(make_recipe(server.url), shard_executor("ray", 2), 2)
    assert (result.got, result.failed, server.state.n_requests) == (36, {}, 36)
