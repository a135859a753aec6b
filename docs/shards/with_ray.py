"""The shards of kinject augment as tasks of Ray: python with_ray.py recipes/augment.yaml 8."""

import subprocess
import sys

import ray


@ray.remote(max_retries=3)
def run(*words: str) -> None:
    subprocess.run(["kinject", "augment", sys.argv[1], *words], check=True)


n = int(sys.argv[2])
ray.get([run.remote("--shard", f"{number}/{n}") for number in range(1, n + 1)])
ray.get(run.remote("--merge"))
