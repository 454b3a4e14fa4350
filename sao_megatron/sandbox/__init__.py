"""Python code that a model wrote, run where it can do no harm.

One `template` process imports what cells may want (warm start) and forks a *session* per trajectory: a `warden`, which
watches, and inside new namespaces (`jail`) an init and a `worker`, which runs one cell after another and keeps its
variables. `pool` holds the sessions of this machine (`local`); `server` and `client` are the same over HTTP.
template, warden, accounting, output, jail, linux and worker run in the forked processes and import nothing but the
standard library.
"""
