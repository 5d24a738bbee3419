"""A Slurm that is made of small scripts, whose jobs are processes of this machine."""

import os
import stat
from pathlib import Path

# The queue is a directory of files NUMBER, with the name of the job. `hold` in the state directory lets jobs wait.
FAKES = {
    "sbatch": """\
if [[ -f $FAKES/refuse ]]; then echo "sbatch: error: invalid partition specified: x" >&2; exit 1; fi
number=$(( $(cat "$FAKES/last" 2> /dev/null || echo 100) + 1 )); echo $number > "$FAKES/last"
cp "$1" "$FAKES/script-$number"
sed -n "s/^#SBATCH --job-name='*\\([^']*\\)'*$/\\1/p" "$1" > "$FAKES/queue/$number"
(
  while true; do
    while [[ -f $FAKES/hold ]]; do sleep 0.05; done
    SLURM_JOB_ID=$number SLURM_PROCID=0 bash "$FAKES/script-$number"
    [[ -f $FAKES/requeue-$number ]] || break
    rm "$FAKES/requeue-$number"
  done
  rm "$FAKES/queue/$number"
) > "$FAKES/output-$number" 2>&1 < /dev/null &
echo "Submitted batch job $number"
""",
    "srun": """\
while [[ $1 == --* ]]; do if [[ $1 == --output || $1 == --error ]]; then shift; fi; shift; done
echo $$ > "$FAKES/process-$SLURM_JOB_ID"
exec "$@"
""",
    "squeue": """\
if [[ -f $FAKES/no_answer ]]; then exit 1; fi
for file in "$FAKES"/queue/*; do [[ -f $file ]] && echo "$(basename "$file")|$(cat "$file")"; done; exit 0
""",
    "scontrol": 'touch "$FAKES/requeue-$2"\n',
}


def install(directory: Path) -> dict[str, str]:
    """Writes the commands, and returns the environment in which they are found. `directory` is their state, too."""
    (directory / "queue").mkdir(parents=True)
    for name, body in FAKES.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}")
        (directory / name).chmod(stat.S_IRWXU)
    path = f"{directory}:{os.environ['PATH']}"
    return {"FAKES": str(directory), "PATH": path, "PYTHONPATH": str(Path(__file__).parents[1])}
