"""Run by the server environment's Python: becomes `python -m sglang.launch_server ARGUMENTS`, which the kernel kills
when the process that started it is gone, however that ended.

Usage: detached_server.py PARENT_PID ARGUMENTS. Imports nothing of ours: that environment holds SGLang only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above took effect
        sys.exit("the process that asked for this server is gone")
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])


if __name__ == "__main__":
    main()
