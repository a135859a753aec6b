"""The shards of kinject augment as tasks of datatrove: python with_datatrove.py recipes/augment.yaml 8."""

import subprocess
import sys

from datatrove.executor import LocalPipelineExecutor  # or SlurmPipelineExecutor


def shard(data: object, rank: int, world_size: int) -> None:
    subprocess.run(
        ["kinject", "augment", sys.argv[1], "--shard", f"{rank + 1}/{world_size}"], check=True
    )


if __name__ == "__main__":
    LocalPipelineExecutor([shard], tasks=int(sys.argv[2]), workers=4, logging_dir="logs").run()
    subprocess.run(["kinject", "augment", sys.argv[1], "--merge"], check=True)
