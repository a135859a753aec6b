"""lm-evaluation-harness's side of figures.py: run by a Python that has lm_eval, it answers with one JSON file.

    python harness_side.py JOB.json

The job: `engine` (hf, or kinject as a model of the harness), `model` (folder), `batch_size`, `threads`, `out`, and
`tasks`, each {name, config (of its task YAML), shots}.
The time taken is that of `loglikelihood` alone (tokenising and scoring), which favours the harness.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Run every task of the job and write seconds and log-probs of each."""
    job = json.loads(Path(sys.argv[1]).read_text())
    import torch
    from lm_eval import __version__, simple_evaluate

    torch.set_num_threads(job["threads"])
    if job["engine"] == "kinject":
        from kinject.eval.harness import KinjectLM

        model = KinjectLM(job["model"], dtype="float32", device="cpu")
    else:
        from lm_eval.models.huggingface import HFLM

        model = HFLM(
            pretrained=job["model"], dtype="float32", device="cpu", batch_size=job["batch_size"]
        )
    scored = model.loglikelihood
    seconds, cpu = [0.0], [0.0]

    def timed(requests: object, *args: object, **kwargs: object) -> object:
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            return scored(requests, *args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - began
            cpu[0] += time.process_time() - cpu_began

    model.loglikelihood = timed
    results = {}
    for task in job["tasks"]:
        seconds[0] = cpu[0] = 0.0
        result = simple_evaluate(
            model, tasks=[task["config"]], num_fewshot=task["shots"], bootstrap_iters=0
        )
        samples = next(iter(result["samples"].values()))
        scores = {s["doc_id"]: [float(r[0]) for r in s["filtered_resps"]] for s in samples}
        accuracy = next(iter(result["results"].values()))["acc,none"]
        times = {"seconds": seconds[0], "cpu": cpu[0]}
        results[task["name"]] = {
            **times,
            "log_probs": [scores[index] for index in sorted(scores)],
            "accuracy": accuracy,
        }
        print(
            f"  lm-evaluation-harness {task['name']}: {seconds[0]:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    Path(job["out"]).write_text(json.dumps({"version": __version__, "tasks": results}))


if __name__ == "__main__":
    main()
