// What the page does: asks the server every two seconds, shows the answer, and sends verbs.
import { NAMES, Tree, timeText, tokensText } from "/page/tree.js";
import { spark, hitCurve } from "/page/charts.js";

const EVERY_MS = 2000,
  KEPT = 90,
  WINDOW = 30;
const $ = (id) => document.getElementById(id);
const say = (id, text) => {
  const at = $(id);
  if (at.textContent !== text) at.textContent = text;
};
const caller = {
  key: sessionStorage.getItem("key") ?? "",
  salt: sessionStorage.getItem("salt") ?? "",
};
const history = [];
let paused = false,
  path = [],
  timer = 0,
  chosen = null,
  picture = null;

const tree = new Tree($("tree"), {
  tell: (box) =>
    say(
      "told",
      box
        ? tree.describe(box)
        : "Length is tokens, from the first of a prompt at the left; height is the share of what lies below.",
    ),
  choose: (box) => {
    chosen = box?.part.id ?? null;
    $("a-what").value = chosen ? `node ${chosen}` : (box?.programs[0]?.name ?? "");
  },
  enter: (box) => {
    path.push({
      id: box.part.id,
      name: `${NAMES[box.part.kind ?? "unknown"]} at ${tokensText((box.part.depth ?? 0) * tree.pageTokens)}`,
    });
    refresh();
  },
  leave: () => {
    if (path.pop()) refresh();
  },
});

async function ask(url, body) {
  const headers = {};
  if (caller.key) headers.authorization = `Bearer ${caller.key}`;
  if (caller.salt) headers["x-tenant-id"] = caller.salt;
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(url, {
    headers,
    method: body ? "POST" : "GET",
    body: body && JSON.stringify(body),
    cache: "no-store",
  });
  const text = await answer.text();
  let told = {};
  try {
    told = JSON.parse(text);
  } catch {
    told = { error: { message: text.slice(0, 200) } };
  }
  if (!answer.ok)
    throw Object.assign(new Error(told.error?.message ?? answer.statusText), {
      status: answer.status,
    });
  return { told, bytes: text.length };
}

async function refresh() {
  clearTimeout(timer);
  const under = path.length ? `&under=${path.at(-1).id}` : "";
  try {
    const [seen, stats] = await Promise.allSettled([
      ask(`/v1/kv/picture?nodes=400${under}`),
      ask("/v1/kv/stats"),
    ]);
    if (seen.status === "rejected") throw seen.reason;
    const start = performance.now();
    show(seen.value.told, stats.value?.told, stats.reason);
    const script = performance.now() - start;
    const bytes = seen.value.bytes + (stats.value?.bytes ?? 0);
    window.rootstockCost = {
      script,
      bytes,
      parts: picture.parts.length,
      programs: picture.programs.length,
    };
    say("cost", `${(bytes / 1000).toFixed(0)} kB and ${script.toFixed(1)} ms a refresh`);
  } catch (error) {
    $("dot").className = "bad";
    say("state", error.status ? error.message : "no answer from the server");
    if (error.status === 401) {
      $("k-wrong").textContent = caller.key ? error.message : "";
      if (!$("ask").open) $("ask").showModal();
      return;
    }
  }
  if (!paused && !document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

function show(seen, stats, refused) {
  picture = seen;
  if (path.length && !seen.parts.length) {
    path.pop();
    return;
  }
  tree.show(seen);
  $("empty").hidden = seen.parts.length > 0;
  const tokens = tokensText(seen.pages * seen.page_tokens);
  const trail = path.length ? `${path.map((step) => step.name).join(" › ")}: ` : "";
  say(
    "where",
    `${trail}${tokens} tokens in ${seen.nodes.toLocaleString("en")} nodes${seen.partial ? ", the largest part of them" : ""}${path.length ? " (Escape goes out)" : ""}`,
  );
  legend();
  programs(seen);
  $("dot").className = "ok";
  say("state", paused ? "paused" : "live");
  if (stats) numbers(stats);
  else if (refused) withoutNumbers(refused);
}

function legend() {
  const items = tree.legend(),
    text = JSON.stringify(items);
  if (legend.was === text) return;
  legend.was = text;
  $("legend").replaceChildren(
    ...items.map(([name, color]) => {
      const item = document.createElement("li"),
        box = document.createElement("i");
      box.style.background = color;
      item.append(box, name);
      return item;
    }),
  );
}

function withoutNumbers(refused) {
  for (const id of ["f-ttft-2", "f-hit-2", "f-run-2", "f-gen-2", "f-step-2"]) say(id, "");
  const note = document.createElement("p");
  note.className = "far";
  note.textContent =
    refused.status === 403
      ? "Numbers about everybody are told on the server's own machine only."
      : refused.message;
  $("pools").replaceChildren(note);
  pools.rows = null;
}

// The difference over the last minute, so that old times do not outweigh new ones.
function since(of) {
  const now = history.at(-1),
    then = history.at(-1 - Math.min(WINDOW, history.length - 1));
  return of(now) - of(then);
}

function median(name, share = 0.5) {
  const now = history.at(-1).times,
    then = history.at(-1 - Math.min(WINDOW, history.length - 1)).times;
  const pick = (fresh) =>
    now[name].counts.map((count, index) => count - (fresh ? then[name].counts[index] : 0));
  let counts = pick(history.length > 1),
    all = counts.reduce((a, b) => a + b, 0),
    lately = true;
  if (!all) {
    counts = pick(false);
    all = counts.reduce((a, b) => a + b, 0);
    lately = false;
  }
  if (!all) return null;
  let left = all * share;
  for (const [index, count] of counts.entries()) {
    if (left <= count) {
      const low = now.bounds_s[index - 1] ?? 0,
        high = now.bounds_s[index] ?? low * 2;
      return { seconds: low + ((high - low) * left) / count, all, lately };
    }
    left -= count;
  }
  return null;
}

const duration = (s) =>
  s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;

function numbers(stats) {
  const sample = { ...stats, at: performance.now() };
  history.push(sample);
  if (history.length > KEPT) history.shift();
  const ttft = median("ttft"),
    slow = median("ttft", 0.95);
  say("f-ttft", ttft ? duration(ttft.seconds) : "–");
  say(
    "f-ttft-2",
    ttft
      ? `95 % within ${duration(slow.seconds)}${ttft.lately ? "" : ", since the start"}`
      : "no answers yet",
  );
  const found = (s) => Object.values(s.requests.cached_tokens).reduce((a, b) => a + b, 0);
  const lately = since((s) => s.requests.prompt_tokens) > 0 && history.length > 1;
  const prompts = lately ? since((s) => s.requests.prompt_tokens) : sample.requests.prompt_tokens;
  const hit = prompts ? (lately ? since(found) : found(sample)) / prompts : null;
  say("f-hit", hit == null ? "–" : percent(hit));
  say(
    "f-hit-2",
    hit == null
      ? "no prompts yet"
      : `of ${tokensText(prompts)} prompt tokens${lately ? "" : ", since the start"}`,
  );
  const { waiting, running, held_for_programs: held } = stats.requests;
  say("f-run", running.toLocaleString("en"));
  say(
    "f-run-2",
    waiting ? `${waiting} wait${held ? `, ${held} for their program` : ""}` : "nobody waits",
  );
  const before = history.at(-2),
    span = before ? (sample.at - before.at) / 1000 : 0;
  const rate = span
    ? (stats.requests.generated_tokens - before.requests.generated_tokens) / span
    : 0;
  say("f-gen", rate.toFixed(rate < 10 ? 1 : 0));
  say("f-gen-2", `tokens a second, ${tokensText(stats.requests.generated_tokens)} so far`);
  const step = (s) =>
    Object.entries(s.steps.by_class)
      .filter(([name]) => name !== "copies")
      .reduce((sum, [, one]) => ({ n: sum.n + one.count, s: sum.s + one.sum_s }), { n: 0, s: 0 });
  const steps = since((s) => step(s).n),
    base = steps
      ? since((s) => step(s).s) / steps
      : step(sample).n
        ? step(sample).s / step(sample).n
        : null;
  say("f-step", base == null ? "–" : duration(base));
  say(
    "f-step-2",
    base == null
      ? "no steps yet"
      : `${tokensText(stats.steps.computed)} steps, ${stats.steps.failed} failed`,
  );
  Object.assign(sample, { ttft: ttft?.seconds ?? null, hit, rate, step: base });
  spark(
    $("s-ttft"),
    history.map((s) => s.ttft),
  );
  spark(
    $("s-hit"),
    history.map((s) => s.hit),
    1,
  );
  spark(
    $("s-run"),
    history.map((s) => s.requests.running + s.requests.waiting),
  );
  spark(
    $("s-gen"),
    history.map((s) => s.rate),
  );
  spark(
    $("s-step"),
    history.map((s) => s.step),
  );
  pools(stats);
  hitCurve($("curve"), $("curve-said"), stats);
  gone(stats.evicted_lately);
}

const STATES = [
  ["leased", "in use", 1],
  ["held", "being filled", 0.75],
  ["evictable", "cached", 0.5],
  ["in_transit", "on its way", 0.3],
];

function pools(stats) {
  if (!pools.rows || pools.rows.length !== stats.tiers.length) {
    pools.rows = stats.tiers.map((tier) => {
      const row = document.createElement("div"),
        head = document.createElement("p"),
        pile = document.createElement("div");
      row.className = "pool";
      pile.className = "pile";
      const name = document.createElement("span"),
        amount = document.createElement("span"),
        told = document.createElement("small");
      head.append(name, amount);
      pile.append(
        ...STATES.map(([, , alpha]) => {
          const bar = document.createElement("i");
          bar.style.background = `var(--${tier.tier})`;
          bar.style.opacity = alpha;
          return bar;
        }),
      );
      row.append(head, pile, told);
      return { row, name, amount, told, bars: [...pile.children] };
    });
    $("pools").replaceChildren(...pools.rows.map((one) => one.row));
  }
  stats.tiers.forEach((tier, index) => {
    const one = pools.rows[index],
      { total, free } = tier.pages,
      tokens = (pages) => tokensText(pages * stats.page_tokens);
    const set = (at, text) => {
      if (at.textContent !== text) at.textContent = text;
    };
    set(one.name, NAMES[tier.tier] + (tier.replica ? ` ${tier.replica}` : ""));
    set(one.amount, `${tokens(total - free)} of ${tokens(total)} tokens`);
    STATES.forEach(([state], at) => {
      one.bars[at].style.width = `${(100 * tier.pages[state]) / Math.max(1, total)}%`;
    });
    const parts = STATES.filter(([state]) => tier.pages[state]).map(
      ([state, name]) => `${tokens(tier.pages[state])} ${name}`,
    );
    const pins =
      (tier.tier === "host" || stats.tiers.length === 1) && stats.pins.pages
        ? [`${tokens(stats.pins.pages)} pinned`]
        : [];
    set(one.told, [...parts, ...pins].join(", ") || "empty");
  });
}

const WHY = {
  room: "for room",
  ephemeral: "with a request that ended as ephemeral",
  flush: "the cache was flushed",
};

function gone(list) {
  const rows = list.slice(0, 16).map((one) => {
    const tokens = tokensText(one.pages * tree.pageTokens);
    const who = one.by?.own
      ? one.by.session
        ? `, for ${one.by.session}`
        : one.by.prompt_tokens
          ? `, for a prompt of ${tokensText(one.by.prompt_tokens)}`
          : ""
      : "";
    const down = one.moved_down
      ? one.moved_down === one.pages
        ? ", all still on host"
        : `, ${tokensText(one.moved_down * tree.pageTokens)} still on host`
      : "";
    return [
      `${timeText(one.ago_s)} ago`,
      one.reason === "flush"
        ? WHY.flush
        : `${tokens} tokens from ${one.tier} ${WHY[one.reason]}${who}${down}`,
    ];
  });
  if (!rows.length) rows.push(["", "Nothing had to go."]);
  const list_ = $("gone");
  while (list_.children.length > rows.length) list_.lastChild.remove();
  rows.forEach(([time, text], index) => {
    let row = list_.children[index];
    if (!row) {
      row = document.createElement("li");
      row.append(document.createElement("time"), document.createElement("span"));
      list_.append(row);
    }
    if (row.firstChild.textContent !== time) row.firstChild.textContent = time;
    if (row.lastChild.textContent !== text) row.lastChild.textContent = text;
  });
}

function programs(seen) {
  const body = $("programs"),
    rows = seen.programs;
  const running = rows.filter((one) => one.running).length;
  say(
    "programs-said",
    rows.length
      ? `${rows.length} known, ${running} running`
      : "none yet: they come with a session or program in a request",
  );
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((one, index) => {
    let row = body.children[index];
    if (!row) {
      row = document.createElement("tr");
      for (let cell = 0; cell < 5; cell++)
        row.append(Object.assign(document.createElement("td"), { className: cell ? "n" : "" }));
      row.firstChild.append(document.createElement("i"), document.createTextNode(""));
      row.tabIndex = -1;
      body.append(row);
    }
    const state = one.running ? "running" : one.done ? "done" : "";
    if (row.className !== state) row.className = state;
    const late = one.expected_in_s,
      next = late == null ? "" : late < 0 ? `${timeText(-late)} late` : `in ${timeText(late)}`;
    const texts = [
      one.name,
      one.pages ? tokensText(one.pages * seen.page_tokens) : "–",
      String(one.turns),
      one.running ? "now" : `${timeText(one.seen_s_ago)} ago`,
      one.done ? "done" : next,
    ];
    texts.forEach((text, cell) => {
      const at = cell ? row.children[cell] : row.firstChild.lastChild;
      if (at.nodeValue === text || (cell && at.textContent === text)) return;
      if (cell) at.textContent = text;
      else at.nodeValue = text;
    });
  });
  const names = rows
    .slice(0, 50)
    .map((one) => one.name)
    .join("\n");
  if (programs.names !== names) {
    programs.names = names;
    $("names").replaceChildren(
      ...names
        .split("\n")
        .filter(Boolean)
        .map((name) => Object.assign(document.createElement("option"), { value: name })),
    );
  }
}

$("programs").addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  const one = row && picture?.programs[[...row.parentNode.children].indexOf(row)];
  if (!one) return;
  if (one.part != null) tree.choose(tree.boxes[one.part]);
  $("a-what").value = one.name;
});

$("act").addEventListener("submit", async (event) => {
  event.preventDefault();
  const verb = event.submitter?.value ?? "kv.pin",
    what = $("a-what").value.trim(),
    said = $("a-said");
  said.className = "";
  if (!what) {
    said.className = "wrong";
    said.textContent = "Name a program, or pick a part of the tree.";
    return;
  }
  const payload = what.startsWith("node ") ? { node: what.slice(5) } : { program: what };
  if (verb === "kv.pin") payload.ttl = $("a-ttl").value;
  try {
    const { told } = await ask("/v1/kv/actions", {
      protocol_version: "0.1",
      message_id: "page",
      actions: [{ action_id: "1", action_type: verb, action_version: "1.0", payload }],
    });
    const { status, pages, reason } = told.outcomes[0];
    const amount = pages ? `, ${tokensText(pages * tree.pageTokens)} tokens` : "";
    said.className = ["rejected", "missing"].includes(status) ? "wrong" : "";
    said.textContent = `${status[0].toUpperCase()}${status.slice(1)}${amount}${reason ? `: ${reason}` : "."}`;
    refresh();
  } catch (error) {
    said.className = "wrong";
    said.textContent = error.message;
  }
});

function color(by) {
  tree.by = by;
  $("by-kind").setAttribute("aria-pressed", by === "kind");
  $("by-tier").setAttribute("aria-pressed", by === "tier");
  tree.paint();
  legend();
}
function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  tree.colors();
  tree.paint();
  legend.was = "";
  legend();
}
function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  say("pause", paused ? "Resume" : "Pause");
  say("state", paused ? "paused" : "live");
  if (paused) clearTimeout(timer);
  else refresh();
}
function who() {
  $("k-key").value = caller.key;
  $("k-salt").value = caller.salt;
  $("k-wrong").textContent = "";
  $("ask").showModal();
}

$("by-kind").onclick = () => color("kind");
$("by-tier").onclick = () => color("tier");
$("theme").onclick = () =>
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
$("pause").onclick = pause;
$("who").onclick = who;
$("ask").addEventListener("close", () => {
  if ($("ask").returnValue !== "set") return;
  caller.key = $("k-key").value.trim();
  caller.salt = $("k-salt").value.trim();
  sessionStorage.setItem("key", caller.key);
  sessionStorage.setItem("salt", caller.salt);
  path = [];
  history.length = 0;
  refresh();
});
document.addEventListener("keydown", (event) => {
  if (
    event.target.closest("input, select, dialog, button") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey
  )
    return;
  const keys = {
    " ": pause,
    d: () => $("theme").click(),
    k: who,
    t: () => color(tree.by === "kind" ? "tier" : "kind"),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) refresh();
});

theme(
  localStorage.getItem("theme") ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"),
);
fetch("/", { headers: { accept: "application/json" } })
  .then((answer) => answer.json())
  .then((told) => {
    say("model", told.model);
    say("version", told.version);
  })
  .catch(() => say("model", ""));
refresh();
