"""Checkpoints: written whole, checked before a run resumes, read without running code; and the
trainer's part for them.

A folder is complete if the marker written after its last byte agrees with its files. The marker
holds sizes, which are checked often; SHA256SUMS beside it is checked before a run resumes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import rotate_checkpoints

from kinject.disk import (
    check_sha256sums,
    read_bytes,
    system_failure,
    write_json,
    write_sha256sums,
)
from kinject.errors import DiskError, KinjectError, TrainingError
from kinject.models import copy_weights, read_headers
from kinject.process import is_first_process, work_seconds
from kinject.train.decomposed import load_from_plain, save_as_plain
from kinject.train.guards import Guard, check_weights
from kinject.train.loss import MeanLoss

log = logging.getLogger(__name__)


class IncompatibleKeys(Protocol):
    """torch's result of loading weights."""

    missing_keys: list[str]


_MARKER = "complete.json"
_OPTIMIZER = "optimizer"
"""The folder of a sharded optimizer in a checkpoint."""
_STATE_KEY = "kinject"
_NAME = re.compile(r"^checkpoint-(\d+)$")


def mark_complete(checkpoint: Path) -> None:
    """Record the hash and size of every file of a checkpoint that has just been written."""
    # First: the marker of an earlier write would call files whole that are being written again.
    (checkpoint / _MARKER).unlink(missing_ok=True)
    write_sha256sums(checkpoint)
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in _files(checkpoint)
    }
    write_json(checkpoint / _MARKER, sizes)


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file that the marker lists is there with its size; False without a
    readable marker."""
    try:
        sizes = json.loads(read_bytes(checkpoint / _MARKER))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    # JSON that is no object raises AttributeError.
    except (OSError, ValueError, AttributeError, RecursionError, DiskError):
        return False


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every checkpoint folder, complete or not, newest first."""
    found = []
    for path in run_dir.glob("checkpoint-*"):
        match = _NAME.match(path.name)
        if match is not None:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest_complete(run_dir: Path) -> Path | None:
    """Return the newest checkpoint with every file in its size, or None."""
    return next((path for _, path in checkpoints(run_dir) if is_complete(path)), None)


def checkpoint_to_resume(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files have the bytes that were written, or None; logs
    those it skips, and that there is none."""
    for _, path in checkpoints(run_dir):
        fault = f"{path}: was not written whole"
        if is_complete(path):
            fault = check_sha256sums(path)[1]
        if not fault:
            return path
        log.warning(
            f"{fault}. This checkpoint is skipped; the run resumes from an older one, or from the "
            "start."
        )
    # The folder may be misspelled, or its checkpoints deleted.
    log.info(f"{run_dir}: no checkpoint to resume from. Training begins at its first step.")
    return None


def fingerprint_of(checkpoint: Path) -> str:
    """Return the fingerprint of the run that wrote a checkpoint; "" where it has none to read."""
    try:
        state = json.loads(read_bytes(checkpoint / TRAINER_STATE_NAME))
        return str(state["stateful_callbacks"][_STATE_KEY]["fingerprint"])
    # A damaged one is skipped when the run resumes.
    except (DiskError, ValueError, LookupError, TypeError, RecursionError):
        return ""


@contextlib.contextmanager
def disk_faults(run_dir: Path) -> Iterator[None]:
    """Turn the libraries' errors about a full or missing disk into a `DiskError` that names the
    newest complete checkpoint.

    Half-written checkpoints are deleted to free their room.
    """
    try:
        yield
    except KinjectError:
        raise  # it names its file
    # tokenizers (0.22) raises Exception itself.
    except Exception as error:
        failure = system_failure(error)
        if failure is None:
            raise
        if is_first_process():
            for _, path in checkpoints(run_dir):
                if not is_complete(path):
                    shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(run_dir / ".model.part", ignore_errors=True)
        newest = newest_complete(run_dir)
        raise DiskError(
            f"{run_dir}: the disk refuses a file of training ({failure.strerror}). The newest "
            f"complete checkpoint is {newest.name if newest else 'none'}. Fix that, then run again "
            "with --resume; trainer.save_total_limit keeps fewer checkpoints."
        ) from error


def _files(checkpoint: Path) -> list[Path]:
    return [
        path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != _MARKER
    ]


@contextlib.contextmanager
def numbers_only(checkpoint: Path | None) -> Iterator[None]:
    """Raise `TrainingError` for a file of `checkpoint` that holds more than numbers while the block
    resumes from it.

    transformers reads optimizer, scheduler, scaler and random states with ``weights_only``, so none
    of their code runs. torch and DeepSpeed read the files of sharded checkpoints without.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next(
            (line.strip() for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0]
        )
        raise TrainingError(
            f"{checkpoint}: a state holds more than numbers, or is damaged ({reason[:200]}). "
            "Loading it could run code, so it is not loaded. Delete this checkpoint and resume "
            "from an older one with --resume, or start over with --overwrite."
        ) from error


def without_tied(
    model: PreTrainedModel, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """Return the weights to save, each once: a tied one under the name of its source. None if the
    model gives them."""
    tied = getattr(model, "all_tied_weights_keys", {})
    kept = {name: weight for name, weight in (state_dict or {}).items() if name not in tied}
    return kept or None


@contextlib.contextmanager
def _kept_dtypes(model: nn.Module) -> Iterator[None]:
    """Give what trains its dtype back after the block, in which a checkpoint is loaded.

    TRL 1.16 trains adapters on packed weights in bfloat16, and peft 0.21 loads an adapter in
    float32: a resumed run went on in another arithmetic, and in twice the memory.
    """
    before = {name: w.dtype for name, w in model.named_parameters() if w.requires_grad}
    yield
    for name, weight in model.named_parameters():
        if name in before and weight.dtype != before[name]:
            weight.data = weight.data.to(before[name])


def over_processes(loss: torch.Tensor, args: TrainingArguments) -> torch.Tensor:
    """Return the mean of a loss over processes, as Trainer logs it: each has that of its own
    rows."""
    mean: torch.Tensor = nested_gather(loss, args.parallel_mode).mean()
    return mean


class CheckpointMixin(Trainer):  # type: ignore[misc]
    """Checkpoints that are marked when whole, of sharded models too, with the state that Trainer
    loses with its process."""

    guard: Guard
    losses: MeanLoss
    learned_tokens: int | torch.Tensor
    learned_before: int
    load_weights: Callable[[str], PreTrainedModel]
    spent_before: tuple[float, float]
    fingerprint: str = ""
    """The id of the run, by which its checkpoints are known without its manifest."""
    initial_adapter: Mapping[str, torch.Tensor] = {}
    """What an adapter that is a part of the base began as (`kinject.train.decomposed`)."""

    def start_clock(self) -> None:
        """Count the seconds of training from here on."""
        self.started = monotonic(), work_seconds(self.args.device.type)

    def spent(self) -> tuple[float, float]:
        """Return the seconds of training and those of work (`work_seconds`) of this run, those
        before a resume included."""
        began, work_before = self.started
        seconds_earlier, work_earlier = self.spent_before
        seconds = monotonic() - began
        work = work_seconds(self.args.device.type) - work_before
        return seconds_earlier + seconds, work_earlier + work

    def _save_state(self) -> None:
        """Add the extra state to that of the next checkpoint. All processes call it."""
        loss = over_processes(self._tr_loss, self.args).item()
        metrics = {
            name: list(map(float, values)) for name, values in self._metrics["train"].items()
        }
        self.state.stateful_callbacks[_STATE_KEY] = {
            "fingerprint": self.fingerprint,
            "loss": loss,
            "tokens": int(self._total_train_tokens),
            "metrics": metrics,
            "guard": self.guard.state(),
            "losses": asdict(self.losses),
            "learned_tokens": self.learned_before + int(self.learned_tokens),
            "spent": self.spent(),
        }

    def restore_state(self) -> None:
        """Restore what `_save_state` added to the checkpoint from which training resumes, if it
        does."""
        saved = self.state.stateful_callbacks.get(_STATE_KEY)
        if saved is None:
            return
        self._tr_loss += saved["loss"]
        self.losses = MeanLoss(**saved["losses"])
        # Trainer (5.23) sets this to the step of the checkpoint, and would divide by too few steps.
        self._globalstep_last_logged = max(
            (row["step"] for row in self.state.log_history if "loss" in row), default=0
        )
        self._total_train_tokens = saved["tokens"]
        self.learned_before = saved["learned_tokens"]
        self.spent_before = saved["spent"]
        for name, values in saved["metrics"].items():
            self._metrics["train"][name] = list(values)
        self.guard.restore(saved["guard"])

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Save tokenizer and model, a tied weight once (DeepSpeed gives two), an adapter as one on
        the whole base, and no pickle of the arguments."""
        # transformers 5.23 pickles TrainingArguments beside the model, and saves a tied weight of
        # ZeRO-3 twice
        super()._save(
            output_dir, without_tied(self.accelerator.unwrap_model(self.model), state_dict)
        )
        # All processes come here, and the first one has written: the others find no file yet.
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        if self.initial_adapter:
            save_as_plain(folder, self.initial_adapter)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_checkpoint(self, model: nn.Module, trial: None) -> None:
        """Save a checkpoint, mark it complete, and only then delete older ones (Trainer deletes
        first).

        Raises `TrainingError` instead if a weight is not finite: nothing could resume from it.
        """
        # transformers 5.23 deletes old checkpoints inside of this hook, before a callback could
        # mark the new one complete
        self._use_final_weights()
        check_weights(self)
        self._save_state()
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        # A damaged one may hold a folder under the name of a file, which would stop the run.
        if self.args.should_save and checkpoint.exists() and not is_complete(checkpoint):
            shutil.rmtree(checkpoint)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(checkpoint)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                self.args.output_dir,
                save_total_limit=limit,
                best_model_checkpoint=best,
                # As Trainer has it (5.23).
                use_mtime=True,
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both; each process its part of the optimizer of a model that transformers has
        sharded."""
        # transformers 5.23 saves no optimizer of a model that it has sharded itself
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer_distributed(
            self.model, self._plain_optimizer(), str(Path(output_dir) / _OPTIMIZER)
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from a checkpoint folder, if there is one."""
        # the other half of _save_optimizer_and_scheduler (transformers 5.23)
        if checkpoint is None or not self.is_distributed_loading_by_transformers:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer_distributed(
            self.model, self._plain_optimizer(), str(Path(checkpoint) / _OPTIMIZER)
        )
        self.lr_scheduler.load_state_dict(
            torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        )

    def _plain_optimizer(self) -> Optimizer:
        """Return the optimizer inside of accelerate's."""
        wrapped: Any = self.optimizer
        plain: Optimizer = getattr(wrapped, "optimizer", wrapped)
        return plain

    def _issue_warnings_after_load(self, load_result: IncompatibleKeys) -> None:
        """Warn of weights that a checkpoint lacks, but not of tied ones."""
        # transformers 5.23 saves a tied weight once, and then misses its other name
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [
            name for name in load_result.missing_keys if name not in tied
        ]
        super()._issue_warnings_after_load(load_result)

    def _is_loaded_as_a_model(self, checkpoint: str) -> bool:
        """Return whether a checkpoint's weights are loaded as those of any model folder, not by
        Trainer."""
        if isinstance(self.model, PeftModel):
            return False
        # transformers 5.23 would load whole weights into a model that it has sharded itself
        if self.is_distributed_loading_by_transformers:
            return True
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False  # their checkpoints hold no safetensors
        # transformers 5.23 saves weights under the hub's names, and Trainer skips a name that the
        # model in memory lacks: a mixture's joined experts went on as those of the base. Not for
        # all models, since for a moment two are on the device.
        return not read_headers(Path(checkpoint)).keys() <= self.model.state_dict().keys()

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        """Load a checkpoint's weights; each process its part of a model that transformers has
        sharded."""
        if self.initial_adapter:
            self.initial_adapter = load_from_plain(
                Path(resume_from_checkpoint), self.model, self.initial_adapter
            )
        elif self._is_loaded_as_a_model(resume_from_checkpoint):
            copy_weights(self.load_weights(resume_from_checkpoint), self.model)
        else:
            with _kept_dtypes(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        # transformers 5.23 does so here too, past _load_from_checkpoint
        best = self.state.best_model_checkpoint
        if self.initial_adapter or self._is_loaded_as_a_model(best):
            self._load_from_checkpoint(best)
        else:
            with _kept_dtypes(self.model):
                super()._load_best_model()

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository on the hub, and its branch `hub_revision`.

        Raises `TrainingError` if the hub refuses it.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            super().init_hf_repo(*args, **kwargs)
            branch = self.args.hub_revision
            # Trainer makes no branch: an upload to a new one would fail after the whole training.
            if branch and not branch.startswith("refs/") and self.is_world_process_zero():
                HfApi().create_branch(self.hub_model_id, branch=branch, exist_ok=True)
        except (HfHubHTTPError, OSError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TrainingError(
                f"trainer.push_to_hub: {why} Check HF_TOKEN and trainer.hub_model_id."
            ) from error

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card only if the model is published; the manifest of a run holds
        more."""
        if self.args.push_to_hub:
            super().create_model_card(*args, **kwargs)
