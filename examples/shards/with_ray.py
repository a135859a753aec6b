"""The shards of kinject augment as tasks of Ray: python with_ray.py recipes/augment.yaml 8."""
import subprocess
import sys

import ray

recipe, n = sys.argv[1], int(sys.argv[2])


@ray.remote(max_retries=3)
def run(*words: str) -> None:
    subprocess.run(["kinject", "augment", recipe, *words], check=True)


ray.get([run.remote("--shard", f"{number}/{n}") for number in range(1, n + 1)])
ray.get(run.remote("--merge"))
