"""Where the processes of a run start: on this machine (local.py) or on the nodes of a Slurm job (slurm.py)."""
