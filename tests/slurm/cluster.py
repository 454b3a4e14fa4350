"""A Slurm cluster of several nodes on one machine, made of the real daemons, for root and without systemd.

Every node is a slurmd in namespaces of its own (UTS: its host name; mount: its /etc/hosts; PID: killing it takes all
its processes along, as a power loss does). They share one network, so that each has an address of 127.0.0.0/8 and ports
differ. GPUs are character devices that nobody opens. By hand, from the repository's folder:

    python tests/slurm/cluster.py "$(mktemp -d)" --nodes 4      # runs until Ctrl-C; prints what to export
"""
from __future__ import annotations

import argparse
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

START_SECONDS = 60.0
CPUS, MEMORY_MB = 8, 8000
"""What a node pretends to have."""

_CONF = """\
ClusterName=sao-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=6
KillWait=3
UnkillableStepTimeout=10
MinJobAge=3600
GresTypes=gpu
PartitionName=learners Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=engines Nodes=ALL MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "the test cluster needs root (namespaces, character devices)"
    for program in ("slurmctld", "slurmd", "munged", "unshare"):
        if shutil.which(program, path=_PATH) is None:
            return f"{program} is not installed: apt-get install slurm-wlm munge"
    probe = subprocess.run(["unshare", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else "unshare is not allowed here (a container without the capability?)"


_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


class Cluster:
    """Context manager. `environment` is what Slurm's commands need to find it."""

    def __init__(self, root: Path, nodes: int = 4, gpus: int = 0):
        self.root, self.nodes, self.gpus = root, [f"node{i + 1}" for i in range(nodes)], gpus
        self.environment = os.environ | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _PATH}
        self._daemons: dict[str, subprocess.Popen] = {}
        self._odd: set[str] = set()
        """Nodes that lack a file system."""

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start("munged", ["munged", "--foreground", "--force", f"--key-file={self.root}/munge.key",
                                   f"--socket={self.root}/munge.socket", f"--pid-file={self.root}/munged.pid",
                                   f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/munged.seed"])
            _until(lambda: (self.root / "munge.socket").exists(), "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-f", f"{self.root}/slurm.conf"])
            for node in self.nodes:
                self.power_on(node)
            self.wait_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in [*self.nodes, "slurmctld", "munged"]:
            self._end(name)

    def _configure(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "state").mkdir(exist_ok=True)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.host, port = socket.gethostname().split(".")[0], _free_ports(len(self.nodes) + 1)
        hosts, lines = [f"127.0.0.1 localhost {self.host}"], []
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        for i, node in enumerate(self.nodes, start=1):
            hosts.append(f"127.0.0.{10 + i} {node}")
            lines.append(f"NodeName={node} NodeAddr=127.0.0.{10 + i} Port={port + i} CPUs={CPUS} "
                         f"RealMemory={MEMORY_MB}{gres}\n")
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        for i in range(self.gpus):
            with suppress(FileExistsError):
                os.mknod(self.root / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{self.gpus - 1}]\n" if self.gpus else "")
        conf = _CONF.format(root=self.root, host=self.host, port=port)
        (self.root / "slurm.conf").write_text(conf + "".join(lines))

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                                                   stderr=out, start_new_session=True, preexec_fn=_end_with_parent)

    def power_on(self, node: str, hidden: Path | None = None) -> None:
        """`hidden`: a folder that this node sees empty, as where a file system is not mounted."""
        self._odd = self._odd | {node} if hidden else self._odd - {node}
        script = ('hostname "$1" && mount --bind "$2/hosts" /etc/hosts && { [ -z "$3" ] || mount -t tmpfs none "$3"; }'
                  ' && exec slurmd -D -f "$2/slurm.conf" -N "$1"')
        self._start(node, ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                           "bash", "-c", script, "slurmd", node, str(self.root), str(hidden or "")])

    def power_off(self, node: str) -> None:
        """A power loss: slurmd and everything that runs on the node are gone at once. Slurm is told, as where the nodes
        are monitored; by itself it would notice after 25 s."""
        self._end(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def set_down(self, node: str) -> None:
        """As an operator or a health check does: slurmd lives, so that the node is back within a second
        (ReturnToService), but without its jobs."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def drain(self, *nodes: str) -> None:
        """They get no more jobs."""
        self.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", "reason=test")

    def undrain(self, node: str) -> None:
        self.run("scontrol", "update", f"nodename={node}", "state=undrain")

    def restore(self) -> None:
        """All nodes as they were at first, without the jobs that they have."""
        for node in self.nodes:
            if node in self._odd or node not in self._daemons or self._state(node) != "idle":
                self.power_off(node)
                self.power_on(node)
                self.undrain(node)
        self.wait_idle()

    def _state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-p", "learners", "-o", "%T").strip()

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.send_signal(signal.SIGKILL if name in self.nodes else signal.SIGTERM)
            daemon.wait(START_SECONDS)

    def run(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def wait_idle(self) -> None:
        """Until every node is ready for a job."""
        def ready() -> bool:
            with suppress(RuntimeError):
                return self.run("sinfo", "-h", "-N", "-p", "learners", "-o", "%T").split() == ["idle"] * len(self.nodes)
            return False
        _until(ready, "all nodes to be idle")

    def submit(self, *arguments: str, cwd: Path) -> str:
        """The id of a job that `sbatch` with these arguments made."""
        done = subprocess.run(["sbatch", "--parsable", *arguments], env=self.environment, capture_output=True,
                              text=True, timeout=60, cwd=cwd)
        if done.returncode:
            raise RuntimeError(f"sbatch failed: {done.stdout}{done.stderr}")
        return done.stdout.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it: JobState, Restarts, BatchHost …"""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]


def _end_with_parent() -> None:
    """In a new process: the kernel kills it when ours ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens on."""
    for first in range(17000 + os.getpid() % 97 * 50, 32000, 50):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports for the test cluster")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {START_SECONDS:.0f} s for {what}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=0)
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    with Cluster(arguments.root.absolute(), arguments.nodes, arguments.gpus) as cluster:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        wanted = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # only now: the daemons would inherit it
        signal.sigwait(wanted)


if __name__ == "__main__":
    main()
