"""What a SLURM cluster does with a batch script, on this machine: a process per task, with SLURM's variables.

    result = sbatch(script, submitted_from=tmp_path, programs=empty_directory)

A job that requests a requeue is terminated, and its script starts again.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import LIMIT_S, free_port, run_command

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


def variables_of_job(
    num_nodes: int, per_node: int, nodes: str = "127.0.0.1", job_id: int = 4711, name: str = "train"
) -> dict[str, str]:
    """What each task finds in its environment, of so many tasks per node."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": str(num_nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
    }


def variables_of_task(task: int, per_node: int) -> dict[str, str]:
    """What one finds there besides."""
    places = {"PROCID": task, "NODEID": task // per_node, "LOCALID": task % per_node}
    return {f"SLURM_{name}": str(place) for name, place in places.items()}


def put_scontrol(programs: Path) -> Path:
    """Puts what asks SLURM for something into a directory; returns the file with what was asked for, a line each."""
    scontrol = programs / "scontrol"
    scontrol.write_text(_SCONTROL)
    scontrol.chmod(0o755)
    return programs / "requests"


def sbatch(
    script: Path,
    *arguments: str | Path,
    submitted_from: Path,
    programs: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a batch script to its end.

    Args:
        script: With lines ``#SBATCH --name=value``.
        *arguments: What follows the script's name.
        submitted_from: The directory that it runs in.
        programs: An empty directory; ``srun`` and ``scontrol`` go there.
        env: Variables besides SLURM's.
        timeout_s: Seconds until the run is given up.
    """
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), flags=re.MULTILINE))
    num_nodes, per_node = int(asked["nodes"]), int(asked["ntasks-per-node"])
    srun = programs / "srun"
    srun.write_text(_SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would not find the packages of its target
    python.chmod(0o755)
    variables = {**variables_of_job(num_nodes, per_node, name=asked["job-name"]), "SLURM_CPUS_PER_TASK": "1"}
    # Two of these may run at once, so the port is not that of the job's number.
    here = {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "160"}
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    requests = put_scontrol(programs)
    num_restarts, restarted = 0, dict[str, str]()
    while True:
        num_requests = num_lines(requests)
        environment = {**variables, **here, **path, **restarted, **(env or {})}
        result = run_command("bash", script, *arguments, env=environment, cwd=submitted_from, timeout_s=timeout_s)
        if num_lines(requests) == num_requests:
            return result
        num_restarts += 1
        restarted = {"SLURM_RESTART_COUNT": str(num_restarts)}


def num_lines(file: Path) -> int:
    """Of a file that need not be there."""
    return len(file.read_text().splitlines()) if file.exists() else 0
