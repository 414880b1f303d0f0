#!/usr/bin/env python3
"""Runs a command while the server of the release build serves; `{base}` in it becomes the server's address; $ENGINE_HOST names
another program."""
import os
import subprocess
import sys

from served import Served

server = Served(os.environ.get("ENGINE_HOST"))
done = subprocess.run([part.replace("{base}", server.base) for part in sys.argv[1:]])
server.stop()
sys.exit(done.returncode)
