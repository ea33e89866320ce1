"""Inference engines, one file each: how to start one, when it is ready, what its metrics are called, how it dies.

Pure: `Launch` in, `Command` out; a log line in, a phase or a fact out; an exit and the last lines in, a `Verdict` out.
Tasks, processes and sockets are the agent's (`llmgw.agent`). A file more in this package is an engine more.
"""

from __future__ import annotations

import sys

from llmgw.engines.base import Engine
from llmgw.plugins import Registry

ENGINES: Registry[Engine] = Registry("engine", sys.modules[__name__])
