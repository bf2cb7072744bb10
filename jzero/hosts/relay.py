"""Relays a host's traffic to the coordinator of process 0, in a separate process.

JAX's client aborts its process, with a native stack trace, as soon as its connection to the
coordinator closes. This happens when process 0 is killed, and JAX has no option to change it. So
the client of every other host connects to this relay. If the far end of a relayed connection
closes, the near end stays open: the client waits, and `peers.watch_peers` ends the host with one
line.

    python relay.py HOST PORT

prints the port at which it listens on this machine. The relay ends when its stdin closes, which
happens when the process that started it ends. It is a process, and not a thread, because the host
may wait for the coordinator without releasing Python's GIL. It imports no module of jzero, so that
it starts at once.
"""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

BLOCK = 1 << 16  # bytes per read


def start_relay(host: str, port: int) -> int:
    """Starts a relay to the coordinator at `host:port`; returns its port on this machine.

    The relay ends with this process, however this process ends.
    """
    # Of JAX's options, `missed_heartbeat_callback` ends in a C++ exception, and
    # `jax_enable_recoverability` has no effect (lab/log.md, 2026-11-22).
    process = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).resolve()), host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal reaches all processes of a session
    )
    assert process.stdout is not None
    RELAYS.append(process)
    return int(process.stdout.readline())


# Keeps the pipes to the relays open during the lifetime of this process.
RELAYS: list[subprocess.Popen[str]] = []


async def relay(host: str, port: int) -> None:
    """Serves until stdin closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:  # the coordinator is not ready yet, and the client retries
            writer.close()
            return
        # The two directions are copied at the same time. Only the end of the near side closes the
        # relay.
        from_far = asyncio.create_task(copy(far_reader, writer))
        await copy(reader, far_writer)
        # The near end has closed. The far end may have closed long before.
        from_far.cancel()
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until the reader's end closes, and leaves the writer open."""
    try:
        while block := await reader.read(BLOCK):
            writer.write(block)
            await writer.drain()
    except OSError:  # reset, or the writer's end has closed
        pass


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the host decides when it ends
    asyncio.run(relay(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
