"""What the shipped recipes' comments and docs/plan.md say of memory is what the planner says of their models' public shapes.

python tests/plan/test_recipes.py    # writes the numbers anew
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kinject.cli import main
from kinject.errors import InputError
from kinject.plan import estimate as plan_model
from kinject.plan.run import step_of
from kinject.plan.ways import choose, find_devices
from kinject.recipe import read_recipe
from small import quick

ROOT = Path(__file__).parents[2]
CLAIM = re.compile(r"(?:(\d+) x )?([\w-]+) ([\d.]+) GiB(?: with ([^;(]+?))?(?=;| \()")
"""`H100 55.1 GiB` or `8 x H100 70.0 GiB with KEY=VALUE`, as the line Memory of a recipe has them."""
QUICK = ("llama-3.1-8b/cpt", "studies/paper/train-qlora")
"""Recipes that every run of the tests plans; `make soak` plans all."""
SIZES = {
    "Qwen/Qwen3-0.6B-Base": 0.596, "Qwen/Qwen3-1.7B-Base": 1.721, "Qwen/Qwen3-4B-Base": 4.022, "Qwen/Qwen3-8B-Base": 8.191,
    "Qwen/Qwen3-1.7B": 1.721, "Qwen/Qwen3-4B": 4.022, "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-14B-Base": 14.768, "Qwen/Qwen3-32B": 32.762, "mistralai/Mistral-7B-v0.1": 7.242,
    "meta-llama/Llama-2-7b-hf": 6.738, "meta-llama/Llama-3.1-8B": 8.030, "meta-llama/Llama-3.1-70B": 70.554,
}  # fmt: skip
"""Billions of parameters as their makers give them."""
RECIPES = sorted(
    path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
    for path in (ROOT / "recipes").rglob("*.yaml")
    if "\n# Memory:" in path.read_text("utf-8")
)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model of the hub its public shape, without asking."""

    def refuse(path: str, revision: str | None) -> None:
        raise InputError("no hub")

    monkeypatch.setattr(plan_model, "load_config", refuse)


def _planned(
    recipe: Path, count: str | None, card: str, overrides: str | None
) -> tuple[float, list[str]]:
    """Return the GiB of a device, and the changes that the planner asks for."""
    devices = find_devices("cuda", None, int(count or 1), gpu=card)
    way, changes = choose(
        step_of(read_recipe(recipe, (overrides or "").split(), verb="plan"), devices), devices
    )
    return devices.need(way.memory.peak) / 2**30, [
        text for change in changes for text in change.overrides
    ]


@pytest.mark.parametrize("name", quick(RECIPES, *QUICK))
def test_the_memory_in_the_comment_of_a_recipe_is_planned_and_fits(
    name: str, no_hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = Path("recipes") / f"{name}.yaml"
    claims = CLAIM.findall(_memory_line(path))
    assert claims
    for count, card, claimed, overrides in claims:
        found, changes = _planned(path, count, card, overrides)
        assert (f"{found:.1f}", changes) == (claimed, []), (
            f"{card}: python tests/plan/test_recipes.py"
        )


WAY_OF_ROW = {
    "3.20": "one device",
    "5.4": "offload",
    "5.8": "FSDP",
    "5.11": "FSDP",
    "5.12": "ZeRO-2",
    "5.14": "HSDP",
}
"""Row of docs/techniques.md -> the way to train that its subject names, or needs to be seen."""
PLANNED = dict(
    re.findall(
        r"^\| (\d\.\d+) \|[^`\n]*`kinject plan (recipes/[^/ ]+/[^`]+)`",
        (ROOT / "docs" / "techniques.md").read_text("utf-8"),
        re.MULTILINE,
    )
)
"""Row -> the words behind `kinject plan`, of models that no GPU of this machine holds."""


def test_every_planned_row_of_a_large_model_has_its_way() -> None:
    assert WAY_OF_ROW.keys() == PLANNED.keys()


@pytest.mark.parametrize(
    "row",
    [
        # Adapters of a model that is only a shape take seconds to place: 6 s of 70B, 3 s of 8B.
        pytest.param(row, marks=pytest.mark.soak if "/lora" in PLANNED.get(row, "") else ())
        for row in WAY_OF_ROW
    ],
)
def test_a_row_of_the_guides_names_the_way_that_its_command_plans(
    row: str, no_hub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", *shlex.split(PLANNED[row])]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^parallelism  ([\w -]+):", out, re.MULTILINE) == [WAY_OF_ROW[row]]
    assert "\nchange " not in out, "the recipe as it stands, not an adapter in its place"


@pytest.mark.parametrize("path", SIZES)
def test_a_public_shape_has_the_parameters_of_its_model(path: str, no_hub: None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan_model.read_config(path, None))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        SIZES[path], abs=6e-4
    )


def _memory_line(path: Path) -> str:
    return next(
        line for line in path.read_text("utf-8").splitlines() if line.startswith("# Memory:")
    )


def write(names: list[str]) -> None:
    """Write the planned numbers into the recipes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_model, "load_config", lambda *_: (_ for _ in ()).throw(InputError("no hub")))
    for name in names or RECIPES:
        path = ROOT / "recipes" / f"{name}.yaml"
        line = new = _memory_line(path)
        for match in reversed(list(CLAIM.finditer(line))):
            found, changes = _planned(path, match[1], match[2], match[4])
            new = new[: match.start(3)] + f"{found:.1f}" + new[match.end(3) :]
            print(name, match[0], f"-> {found:.1f}", changes, flush=True)
        path.write_text(path.read_text("utf-8").replace(line, new), "utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
