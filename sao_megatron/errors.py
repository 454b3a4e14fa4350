"""The errors a person reads: one sentence saying what, where, what was expected and what to do."""


class UserError(Exception):
    """Something the user can mend (config, checkpoint, prompt file, machine). The CLI prints it and exits with 2."""


class RunError(Exception):
    """A run that was valid failed (a process died, a deadline passed). The CLI prints it and exits with 1."""


class EngineGone(RunError):
    """An engine has died, or its server fails: others may live, and it may come back."""
