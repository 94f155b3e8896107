"""Runs a batch script as SLURM does, on this machine: one process per task, with SLURM's variables.

    result = sbatch(script, submitted_from=tmp_path, programs=empty_directory)

A job that requests a requeue is terminated, and its script starts again.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import free_port, run_command

_SRUN = """\
#!{python}
import os
import subprocess
import sys
from pathlib import Path

num_tasks, per_node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for task in range(num_tasks):
    which = {{"SLURM_PROCID": task, "SLURM_NODEID": task // per_node, "SLURM_LOCALID": task % per_node}}
    environment = {{**os.environ, **{{name: str(value) for name, value in which.items()}}}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=environment))
Path(__file__).with_name("tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
_SCONTROL = """\
#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> requests
if [ -e tasks ]; then kill -TERM $(cat tasks); fi
"""


def variables_of_job(num_nodes: int, per_node: int, nodes: str = "127.0.0.1", job_id: int = 4711) -> dict[str, str]:
    """Returns the variables that all tasks of a job have in their environment."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": str(num_nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
    }


def variables_of_task(task: int, per_node: int) -> dict[str, str]:
    """Returns the variables that only one task has."""
    variables = {"PROCID": task, "NODEID": task // per_node, "LOCALID": task % per_node}
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


def put_scontrol(programs: Path) -> Path:
    """Writes ``scontrol`` into a directory; returns the file in which it records requests, one per line."""
    scontrol = programs / "scontrol"
    scontrol.write_text(_SCONTROL)
    scontrol.chmod(0o755)
    return programs / "requests"


def sbatch(
    script: Path, *arguments: str | Path, submitted_from: Path, programs: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a batch script to its end.

    Args:
        script: Batch script with lines ``#SBATCH --name=value``.
        *arguments: Arguments of the script.
        submitted_from: Working directory.
        programs: Empty directory for ``srun`` and ``scontrol``.
        env: Further variables of the environment.
    """
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), flags=re.MULTILINE))
    num_nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    srun = programs / "srun"
    srun.write_text(_SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    python = programs / "python"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    )  # a symbolic link would not find the packages of its target
    python.chmod(0o755)
    variables = {**variables_of_job(num_nodes, per_node), "SLURM_JOB_NAME": options["job-name"]}
    # Two jobs may run at once, so the port does not follow from the job's number.
    variables |= {"SLURM_CPUS_PER_TASK": "1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"COLUMNS": "160", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **(env or {})}
    requests = put_scontrol(programs)
    while True:
        num_requests = num_lines(requests)
        result = run_command("bash", script, *arguments, env=variables, cwd=submitted_from)
        if num_lines(requests) == num_requests:
            return result
        variables["SLURM_RESTART_COUNT"] = str(int(variables.get("SLURM_RESTART_COUNT", "0")) + 1)


def num_lines(file: Path) -> int:
    """Returns the number of lines of a file, which may be missing."""
    return len(file.read_text().splitlines()) if file.exists() else 0
