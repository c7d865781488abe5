"""Reads KV events with pyzmq and msgpack: python subscriber.py EVENTS REPLAY COUNT.

Subscribes, waits for COUNT messages, asks for all of them again, and prints what it found as JSON.
"""
import json
import struct
import sys

import msgpack
import zmq

events, replay, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.connect(events)
sub.setsockopt(zmq.SUBSCRIBE, b"")
sub.setsockopt(zmq.RCVTIMEO, 30_000)
print("ready", flush=True)
live = {}
while len(live) < count:
    topic, number, payload = sub.recv_multipart()
    live[struct.unpack(">Q", number)[0]] = payload
first = min(live)

again = {}
dealer = context.socket(zmq.DEALER)
dealer.connect(replay)
dealer.setsockopt(zmq.RCVTIMEO, 30_000)
dealer.send_multipart([b"", struct.pack(">Q", first)])
while True:
    empty, number, payload = dealer.recv_multipart()
    if not payload:
        break
    again[struct.unpack(">Q", number)[0]] = payload

kinds = {}
for payload in live.values():
    seconds, batch, rank = msgpack.unpackb(payload)
    assert isinstance(seconds, float) and rank in (0, 1), (seconds, rank)
    assert len(batch) <= 64, len(batch)
    for event in batch:
        kinds[event[0]] = kinds.get(event[0], 0) + 1
        if event[0] == "BlockStored":
            assert len(event[3]) == len(event[1]) * event[4], event
print(json.dumps({
    "end": number == b"\xff" * 8,
    "contiguous": sorted(live) == list(range(first, first + len(live))),
    "same": all(again.get(at) == payload for at, payload in live.items()),
    "kinds": kinds,
}))
