"""Listens."""

import socket
import sys

at = socket.create_server((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    at.accept()[0].close()
