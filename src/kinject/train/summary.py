"""The few lines that a person reads after training."""

from __future__ import annotations

from kinject.types import TrainResult


def render(result: TrainResult) -> str:
    """Return the result of a run as text: what was trained, how far, where the model is."""
    if result.already_done:
        return f"{result.run_dir}: this run is finished; nothing to do. Model: {result.model_dir}"
    account = result.account
    loss = "" if result.final_loss is None else f", loss {result.final_loss:.3f}"
    rate = result.n_steps / result.seconds if result.seconds else 0.0
    return "\n".join(
        [
            f"{result.n_steps} steps ({result.n_epochs:.2f} epochs) in {result.seconds:.0f} s, {rate:.1f} steps/s{loss}",
            f"tokens in an epoch: {account['source']:,} source = {account['trained']:,} trained + {account['masked']:,} "
            f"read only + {account['truncated']:,} truncated + {account['dropped']:,} dropped",
            f"model: {result.model_dir}   log: {result.run_dir}/log.jsonl   manifest: {result.run_dir}/manifest.json",
        ]
    )
