"""What goes wrong with the store, and who else meddles."""

import collections
import glob
import json
import os
import shutil


class Chaos:
    def __init__(self, server, store, agents, rng, stop):
        self.server, self.store, self.agents = server, store, agents
        self.rng, self.stop = rng, stop
        self.counts = collections.Counter()
        self.failure = None

    def run(self):
        try:
            self.meddle()
        except (AssertionError, OSError, KeyError) as error:
            self.failure = repr(error)

    def meddle(self):
        deeds = [self.damage, self.damage, self.damage, self.detach, self.vanish, self.pin,
                 self.pin, self.flush]
        while not self.stop.wait(self.rng.random()):
            self.rng.choice(deeds)()
        self.attach()

    def pages(self):
        return [path for path in glob.glob(f"{self.store}/**/*", recursive=True)
                if os.path.isfile(path)]

    def damage(self):
        """Some pages are cut, changed, removed, lengthened, or another's."""
        pages = self.pages()
        for path in self.rng.sample(pages, min(len(pages), 8)):
            try:
                self.damage_one(path, pages)
            except OSError:
                continue

    def damage_one(self, path, pages):
        kind, size = self.rng.randrange(5), os.path.getsize(path)
        if kind == 0:
            os.remove(path)
        elif kind == 1:
            os.truncate(path, self.rng.randrange(size + 1))
        elif kind == 2:
            shutil.copyfile(self.rng.choice(pages), path)
        else:
            with open(path, "r+b") as file:
                file.seek(self.rng.randrange(size + 1) if kind == 3 else size)
                file.write(bytes([self.rng.randrange(256)]))
        self.counts["damaged"] += 1

    def vanish(self):
        shutil.rmtree(self.store, ignore_errors=True)
        self.counts["vanished"] += 1

    def detach(self):
        status, _ = self.server.ask("DELETE", "/v1/kv/storage")
        assert status in (200, 409), status
        self.stop.wait(self.rng.random() * 2)
        self.counts["detached"] += 1
        self.attach()

    def attach(self):
        body = {"uri": f"fs://{self.store}", "quota_mib": 64}
        status, answer = self.server.ask("POST", "/v1/kv/storage", body)
        assert status in (200, 409), answer

    def pin(self):
        """What a session has cached is pinned, fetched, copied down or given up."""
        payload = {"session": self.rng.choice(self.agents).program}
        verb = self.rng.choice(["kv.pin", "kv.prefetch", "kv.demote", "kv.release"])
        if verb == "kv.pin":
            payload["ttl"] = f"{self.rng.randrange(1, 20)}s"
        action = {"action_id": "1", "action_type": verb, "action_version": "1.0",
                  "payload": payload}
        body = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        status, answer = self.server.ask("POST", "/v1/kv/actions", body)
        assert status == 200, answer
        said = json.loads(answer)["outcomes"][0]["status"]
        self.counts[f"{verb} {said}"] += 1

    def flush(self):
        if self.rng.random() < 0.3:
            status, answer = self.server.ask("POST", "/flush_cache")
            assert status in (200, 409), answer
            self.counts[f"flush {status}"] += 1
