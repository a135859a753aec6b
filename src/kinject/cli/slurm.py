"""kinject slurm."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.errors import InputError
from kinject.terminal import show

_SLURM = """\
Print an sbatch script for a training recipe. Slurm warns the job before its time is over: training
writes a checkpoint at the end of its step, the job goes back into the queue, and resumes there.
The same happens when Slurm preempts or requeues it by itself. One process is started for each GPU,
by accelerate launch, on one node or several. Run it in the folder in which the job is to run, with
the Python of the job. The partition's own rules (QOS, constraints) go into --sbatch.

examples:
  kinject slurm recipes/cpt.yaml > cpt.sbatch && sbatch cpt.sbatch
  kinject slurm recipes/cpt.yaml --out cpt.sbatch --partition gpu --account lab --time 8:00:00
  kinject slurm recipes/llama-3.1-8b/cpt.yaml --gpus 8 --nodes 2 --sbatch qos=long \\
    --setup "module load cuda"

Slurm's --signal may come up to a minute early. --warning must cover a step and a checkpoint."""

_NAME = re.compile(r"[\w.:/@%+,=\[\]-]+")
_LIMIT = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_SET_BY_SCRIPT = frozenset(("requeue", "signal", "nodes", "ntasks-per-node", "open-mode", "chdir", "array"))
_BODY = """\
set -u
warned='' step=''
{setup}export PYTHONUNBUFFERED=1
{launch}
# shellcheck disable=SC2329 # the traps call it
stop() { # srun sends the signal to every process of its step
  warned=$1
  kill -USR1 "$step" 2> /dev/null || true
}
trap 'stop USR1' USR1 # Slurm's warning: see --signal
trap 'stop TERM' TERM # preemption, or scancel: Slurm itself decides whether the job comes back

srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task={cpus} bash -c task & # srun does not inherit the cores
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do # a signal has ended wait, not the step
  code=0
  wait "$step" || code=$?
done

if [ "$warned" = USR1 ] && [ "$code" -ne 0 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt {requeues} ]; then
    echo "The time is over: job $SLURM_JOB_ID goes back into the queue and resumes there."
    scontrol requeue "$SLURM_JOB_ID" # ends this script
    exit 0
  fi
  echo "The time is over for the {requeues}th time: not queued again (--requeues)." >&2
fi
exit "$code"
"""
_ALONE = """
# shellcheck disable=SC2329 # srun calls it
task() {
  exec {python} -m kinject.cli train {words} --resume
}
export -f task
"""
_LAUNCHED = """
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export head port
# The launcher leaves SIGTERM and SIGUSR1 to the processes that it starts, and gives them time to write a checkpoint.
export PET_SIGNALS_TO_HANDLE=SIGINT TORCH_ELASTIC_SHUTDOWN_TIMEOUT={warning}
# shellcheck disable=SC2329 # srun calls it
task() { # on each node
  trap '' TERM USR1 # inherited; kinject train receives both in spite of it
  exec {python} -m accelerate.commands.launch {config} \\
    --num_machines {nodes} --machine_rank "$SLURM_NODEID" --num_processes {processes} \\
    --main_process_ip "$head" --main_process_port "$port"{more} \\
    -m kinject.cli train {words} --resume
}
export -f task
"""


def add_slurm(verbs: Any) -> None:
    """Add `kinject slurm`."""
    parser = add_verb(verbs, "slurm", "print an sbatch script that trains, resumes and requeues", _SLURM, None)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the script there instead of printing it")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each node (default: %(default)s)")
    parser.add_argument("--processes", type=int, metavar="N", help="processes on each node (default: one for each GPU)")
    parser.add_argument("--cpus", type=int, metavar="N", help="cores of each node (default: 4 for each process)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each node, as 200G (default: the partition's)")
    parser.add_argument(
        "--time", default="24:00:00", help="time limit of the job, as Slurm writes it (default: %(default)s)"
    )
    parser.add_argument("--partition", help="the partition")
    parser.add_argument("--account", help="the account")
    parser.add_argument("--config", type=Path, metavar="FILE", help="accelerate's configuration (default: DDP)")
    parser.add_argument(
        "--warning", type=int, default=300, metavar="S",
        help="seconds before the limit at which the checkpoint begins (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--requeues",
        type=int,
        default=100,
        metavar="N",
        help="times that the job requeues itself (default: %(default)s)",
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="a further option of sbatch, as qos=long"
    )
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="a shell line before the start")
    parser.add_argument(
        "--launch", default="", metavar="OPTIONS", help="further options of accelerate launch, as --launch=--debug"
    )
    parser.set_defaults(run=_slurm)


def _slurm(arguments: argparse.Namespace) -> int:
    _check(arguments)
    recipe_of(arguments, "train")
    script = render_script(arguments)
    if arguments.out is None:
        show(script, end="")
        return 0
    from kinject.disk import write_text

    write_text(arguments.out, script)
    show(f"{arguments.out} is written. Submit it: sbatch {shlex.quote(str(arguments.out))}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for an option that no job can have."""
    least = {"nodes": 1, "gpus": 0, "processes": 1, "cpus": 1, "warning": 1, "requeues": 0}
    for option, smallest in least.items():
        value = getattr(arguments, option)
        if value is not None and value < smallest:
            raise InputError(f"--{option}: found {value}, allowed: {smallest} or more.")
    if not _LIMIT.fullmatch(arguments.time):
        raise InputError(f"--time: found {arguments.time!r}, allowed: minutes, H:M:S or D-H:M:S, as 24:00:00.")
    words = {name: getattr(arguments, name) for name in ("partition", "account", "memory")}
    for option in arguments.sbatch:
        key, _, value = option.partition("=")
        if key.lstrip("-") in _SET_BY_SCRIPT:
            raise InputError(f"--sbatch {option}: the script sets {key.lstrip('-')} itself. Leave it out.")
        words[f"sbatch {option}"] = f"{key}{value}"
    for name, value in words.items():
        if value is not None and not _NAME.fullmatch(value):
            raise InputError(f"--{name}: found {value!r}, allowed: letters, digits and _ . : / @ % + , = [ ] -")
    if arguments.config is not None and not arguments.config.is_file():
        raise InputError(f"--config: {arguments.config}: no such file. kinject recipes copy distributed writes some.")
    if arguments.config is None and arguments.gpus == 0 and _processes(arguments) > 1:
        raise InputError("--config: missing. Several processes without GPUs need recipes/distributed/ddp-cpu.yaml.")


def _processes(arguments: argparse.Namespace) -> int:
    """Return the number of processes of the whole job."""
    return int(arguments.nodes * (arguments.processes or max(1, arguments.gpus)))


def render_script(arguments: argparse.Namespace) -> str:
    """Return the sbatch script for the options of the verb."""
    recipe = next(word for word in arguments.arguments if "=" not in word)
    overrides = [word for word in arguments.arguments if "=" in word]
    n_processes = _processes(arguments)
    per_node = n_processes // arguments.nodes
    options = {
        "job-name": Path(recipe).stem, "nodes": arguments.nodes, "ntasks-per-node": 1,
        "gpus-per-node": arguments.gpus or None, "cpus-per-task": arguments.cpus or 4 * per_node,
        "mem": arguments.memory, "time": arguments.time, "partition": arguments.partition,
        "account": arguments.account, "chdir": shlex.quote(str(Path.cwd())), "output": "slurm-%x-%j.out",
        "open-mode": "append", "signal": f"B:USR1@{arguments.warning}",
    }  # fmt: skip
    options |= {key.lstrip("-"): value for key, _, value in (option.partition("=") for option in arguments.sbatch)}
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value not in (None, "")]
    lines += [f"#SBATCH --{key}" for key, value in options.items() if value == ""]
    config = "--multi_gpu --same_network --mixed_precision no --dynamo_backend no"
    if arguments.config is not None:
        config = f"--config_file {shlex.quote(str(arguments.config))}"
    more = " --deepspeed_multinode_launcher standard" if arguments.nodes > 1 else ""
    more += f" {arguments.launch}" if arguments.launch else ""
    values = {
        "python": shlex.quote(sys.executable), "words": shlex.join([recipe, *overrides]), "config": config,
        "nodes": arguments.nodes, "processes": n_processes, "more": more, "warning": arguments.warning,
        "requeues": arguments.requeues, "cpus": options["cpus-per-task"],
        "setup": "".join(f"{line}\n" for line in arguments.setup),
    }  # fmt: skip
    launch = _filled(_LAUNCHED if n_processes > 1 or arguments.config is not None else _ALONE, values)
    head = ["#!/bin/bash", *lines, "#SBATCH --requeue", ""]
    return "\n".join(head) + _filled(_BODY, {**values, "launch": launch})


def _filled(template: str, values: dict[str, Any]) -> str:
    """Return `template` with {name} replaced; other braces are the shell's."""
    return re.sub(r"(?<!\$)\{(\w+)\}", lambda match: str(values[match[1]]), template)
