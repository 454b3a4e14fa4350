"""The errors a person reads: one sentence saying what, where, what was expected and what to do."""


class UserError(Exception):
    """Something the user can mend (config, checkpoint, prompt file, machine). The CLI prints it and exits with 2."""


class RunError(Exception):
    """A run that was valid failed (a process died, a deadline passed). The CLI prints it and exits with 1."""


class EngineGone(RunError):
    """An engine has died, or its server fails: others may live, and it may come back."""


class Unfinished(Exception):
    """A run that is well ended before its end: its time is up, or a node is gone. The CLI prints it and exits with 75,
    which asks for the run to be started again (slurm/train.sbatch puts the job back into the queue)."""
