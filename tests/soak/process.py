"""The server's process: its start, its memory, its counters."""

import http.client
import json
import re
import subprocess
import sys
import threading
import time

TOTALS = ("prompt_tokens", "reused_tokens", "computed_tokens", "completion_tokens", "preemptions",
          "evicted_pages", "speculative_cached_already", "storage_reads", "storage_written_pages")


class Server:
    def __init__(self, binary, *flags):
        command = [binary, "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://([^:/\s]+):(\d+)", line):
                self.address = (found[1], int(found[2]))
                threading.Thread(target=self.read, daemon=True).start()
                return
        print("skipped: the server did not start (is the model to be had?)")
        print("".join(self.lines))
        sys.exit(77)

    def read(self):
        for line in self.process.stdout:
            self.lines = self.lines[-200:] + [line]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        status = self.process.wait(60)
        assert status == 0, f"the server ended with {status}: {self.lines[-5:]}"

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def resident_mib(self):
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024

    def metrics(self, name):
        page = self.ask("GET", "/metrics")[1]
        rows = re.findall(rf"^rootstock_{name}(?:{{.*}})? ([0-9.e+-]+)$", page, re.M)
        return [float(row) for row in rows]

    def metric(self, name):
        rows = self.metrics(name)
        assert rows, f"there is no metric {name}"
        return sum(rows)

    def totals(self):
        return {name: int(sum(self.metrics(f"{name}_total"))) for name in TOTALS}

    def until_idle(self, limit_s=60):
        """The statistics once nothing runs, is copied or pinned."""
        end = time.monotonic() + limit_s
        while True:
            stats = json.loads(self.ask("GET", "/v1/kv/stats")[1])
            pages = [tier["pages"] for tier in stats["tiers"]]
            rests = all(not one["leased"] and not one["in_transit"] for one in pages)
            if rests and not stats["pins"]["pages"] or time.monotonic() > end:
                return stats
            time.sleep(0.5)
