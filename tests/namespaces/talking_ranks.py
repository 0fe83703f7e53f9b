"""One rank: transfers between hosts through plain TCP sockets, in turn, and how long each took from first to last byte back.

Arguments: an output file, transfers `from-to:bytes` with commas (those joined by + at once), then the places.
"""

import json
import socket
import sys
import threading
import time
from pathlib import Path

from benchmarks.testbed.ranks import start

FIRST_PORT = 21000
TIMEOUT_S = 15.0
LONGEST_CONNECT_S = 3.0


def address(host: int) -> str:
    return f"10.9.0.{host + 1}"


def serve(port: int, host: int) -> None:
    """Receive one message of a size that the first eight bytes say, and answer with one byte."""
    with socket.create_server((address(host), port)) as server:
        server.settimeout(TIMEOUT_S)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            wanted = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            while wanted:
                wanted -= len(connection.recv(min(wanted, 1 << 20)))
            connection.sendall(b"!")


def send(port: int, host: int, to: int, size: int, seconds: dict[str, float], key: str) -> None:
    deadline = time.monotonic() + LONGEST_CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address(to), port), 1.0, source_address=(address(host), 0))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started = time.monotonic()
        connection.sendall(size.to_bytes(8, "big") + bytes(size))
        assert connection.recv(1) == b"!"
        seconds[key] = time.monotonic() - started


def rank(own: int, out: Path, groups: list[str]) -> None:
    begin = float(out.with_suffix(".begin").read_text())
    found: dict[str, float] = {}
    for turn, group in enumerate(groups):
        time.sleep(max(0.0, begin - time.monotonic()))
        begin += 0.3
        seconds: dict[str, float] = {}
        threads = []
        for place, transfer in enumerate(group.split("+")):
            ends, size = transfer.split(":")
            sender, receiver = map(int, ends.split("-"))
            port = FIRST_PORT + 10 * turn + place
            if own == receiver:
                threads.append(threading.Thread(target=serve, args=(port, own)))
            if own == sender:
                threads.append(
                    threading.Thread(target=send, args=(port, own, receiver, int(size), seconds, f"{place}"))
                )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sends = sum(transfer.startswith(f"{own}-") for transfer in group.split("+"))
        assert len(seconds) == sends, f"{group} failed"
        begin = max(begin, time.monotonic() + 0.1)
        if seconds:
            found[group] = max(seconds.values())
        # whoever had no part waits for as long as the slowest transfer of these tests takes
        begin += 1.0
    out.with_suffix(f".{own}").write_text(json.dumps(found))


def main() -> None:
    out = Path(sys.argv[1])
    groups = sys.argv[2].split(",")
    out.with_suffix(".begin").write_text(str(time.monotonic() + 0.2))
    start(lambda own: rank(own, out, groups), sys.argv[3:], 50.0)
    merged: dict[str, float] = {}
    for own in range(4):
        for key, value in json.loads(out.with_suffix(f".{own}").read_text()).items():
            merged[key] = max(value, merged.get(key, 0.0))
    out.write_text(json.dumps(merged))


if __name__ == "__main__":
    main()
