// The prefix tree on a canvas: length is tokens from the start of a prompt, height is the share of
// all that lies below. Laid out once a refresh; pointer and keys only move the mark.
const KINDS = ["system", "tools", "history", "tool_output", "thinking", "scratchpad", "unknown"];
const TIERS = ["device", "host", "moving"];
export const NAMES = {
  system: "System",
  tools: "Tools",
  history: "History",
  tool_output: "Tool output",
  thinking: "Thinking",
  scratchpad: "Scratchpad",
  unknown: "Not told",
  device: "Device",
  host: "Host",
  storage: "Storage",
  moving: "On its way",
};
const GAP = 1;

export function tokensText(tokens) {
  if (tokens < 10000) return tokens.toLocaleString("en");
  return tokens < 1e6
    ? `${(tokens / 1000).toFixed(tokens < 1e5 ? 1 : 0)} k`
    : `${(tokens / 1e6).toFixed(2)} M`;
}

export function timeText(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export class Tree {
  constructor(canvas, on) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.on = on;
    this.boxes = [];
    this.mark = null;
    this.by = "kind";
    this.pageTokens = 16;
    canvas.addEventListener("pointermove", (event) => this.hover(this.at(event)));
    canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.hover(null);
    });
    canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    canvas.addEventListener("dblclick", (event) => this.enter(this.at(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.paint());
    canvas.addEventListener("blur", () => this.paint());
    new ResizeObserver(() => {
      this.layout();
      this.paint();
    }).observe(canvas);
  }

  colors() {
    const style = getComputedStyle(this.canvas);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.palette = Object.fromEntries(
      [...KINDS, ...TIERS, "ink", "soft", "card", "line", "pin"].map((name) => [name, read(name)]),
    );
  }

  show(picture) {
    const chosen = this.chosen && key(this.chosen.part, this.boxes);
    this.parts = picture.parts;
    this.programs = picture.programs;
    this.pageTokens = picture.page_tokens;
    this.layout();
    this.chosen = chosen
      ? (this.boxes.find((box) => key(box.part, this.boxes) === chosen) ?? null)
      : null;
    this.mark = null;
    if (this.pointer) this.mark = this.under(this.pointer);
    this.paint();
    this.on.tell(this.mark ?? this.chosen);
  }

  layout() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    if (
      this.canvas.width !== Math.round(width * scale) ||
      this.canvas.height !== Math.round(height * scale)
    ) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    this.size = { width, height, scale };
    this.boxes = [];
    if (!this.parts?.length) return;
    const children = this.parts.map(() => []);
    const tops = [];
    this.parts.forEach((part, index) => {
      const box = { part, index, children: children[index], programs: [] };
      this.boxes.push(box);
      if (part.parent == null) tops.push(box);
      else {
        box.up = this.boxes[part.parent];
        children[part.parent].push(box);
      }
    });
    for (const program of this.programs)
      if (program.part != null) this.boxes[program.part].programs.push(program);
    const first = Math.min(...tops.map((box) => box.part.depth ?? 0));
    // What lies far beyond the others is cut: one long prompt would make all others thin.
    const end = Math.max(...this.boxes.map((box) => (box.part.depth ?? 0) + length(box.part)));
    const unit = (width - 2) / Math.max(1, end - first);
    this.span = { first, end };
    const put = (siblings, top, bottom) => {
      const all = siblings.reduce((sum, box) => sum + weight(box), 0);
      let at = top;
      siblings.sort(
        (a, b) =>
          (a.part.id == null) - (b.part.id == null) || weight(b) - weight(a) || a.index - b.index,
      );
      for (const [index, box] of siblings.entries()) {
        box.siblings = siblings;
        box.place = index;
        const share = ((bottom - top) * weight(box)) / all;
        box.x = 1 + ((box.part.depth ?? 0) - first) * unit;
        box.w = Math.max(1.5, length(box.part) * unit);
        box.y = at;
        box.h = share;
        if (box.children.length) put(box.children, at, at + share);
        at += share;
      }
    };
    put(tops, 1, height - 1);
    this.tops = tops;
  }

  fill(part) {
    if (this.by === "kind") return this.palette[part.kind ?? "unknown"];
    if ((part.moving ?? 0) > part.pages / 2) return this.palette.moving;
    return (part.host ?? 0) > part.pages / 2 ? this.palette.host : this.palette.device;
  }

  paint() {
    if (!this.palette) this.colors();
    const { context, palette } = this,
      { width, height, scale } = this.size ?? {};
    if (!width) return;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px ui-sans-serif, system-ui, 'Liberation Sans', sans-serif";
    context.textBaseline = "middle";
    for (const box of this.boxes) this.box(box);
    const ring = (box, color, line) => {
      context.strokeStyle = color;
      context.lineWidth = line;
      context.strokeRect(box.x - 0.5, box.y, box.w + 1, Math.max(2, box.h));
    };
    if (this.mark && this.mark !== this.chosen) ring(this.mark, palette.soft, 1.5);
    if (this.chosen)
      ring(this.chosen, palette.ink, document.activeElement === this.canvas ? 2.5 : 1.8);
  }

  box(box) {
    const { context, palette } = this,
      { part } = box;
    const gap = box.h > 4 ? GAP : 0;
    const x = box.x,
      y = box.y + gap / 2,
      w = Math.max(1, box.w - gap),
      h = Math.max(0.6, box.h - gap);
    const rest = part.id == null;
    context.fillStyle = this.fill(part);
    context.globalAlpha = rest ? 0.38 : 1;
    if (h > 5 && w > 5) {
      context.beginPath();
      context.roundRect(x, y, w, h, Math.min(3, h / 3));
      context.fill();
    } else context.fillRect(x, y, w, h);
    context.globalAlpha = 1;
    if (part.used && h > 2) {
      context.fillStyle = palette.card;
      context.globalAlpha = 0.55;
      context.fillRect(x + w - Math.min(4, w), y, Math.min(4, w), h);
      context.globalAlpha = 1;
    }
    if (part.pinned) {
      context.fillStyle = palette.pin;
      context.fillRect(x, y, Math.min(3, w), h);
    }
    if (h < 13 || w < 42) return;
    const tokens = part.pages * this.pageTokens;
    let text = rest
      ? `${part.nodes.toLocaleString("en")} more · ${tokensText(tokens)}`
      : tokensText(tokens);
    const named = box.programs.length;
    if (named === 1) text += ` · ${box.programs[0].name}`;
    else if (named > 1) text += ` · ${named} programs`;
    if (part.pin_left_s != null) text = `pinned ${timeText(part.pin_left_s)} · ${text}`;
    this.text(text, x + 8, y + h / 2, w - 12);
  }

  text(text, x, y, room) {
    const { context } = this;
    if (room < 24) return;
    let shown = text;
    if (context.measureText(shown).width > room) {
      const fits = Math.floor((shown.length * room) / context.measureText(shown).width) - 1;
      if (fits < 3) return;
      shown = `${shown.slice(0, fits)}…`;
    }
    context.fillStyle = "rgb(15 20 10 / 82%)";
    context.fillText(shown, x, y);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    this.pointer = { x: event.clientX - box.left, y: event.clientY - box.top };
    return this.under(this.pointer);
  }

  under({ x, y }) {
    return (
      this.boxes.find(
        (one) => x >= one.x && x <= one.x + one.w && y >= one.y && y <= one.y + Math.max(1, one.h),
      ) ?? null
    );
  }

  hover(box) {
    if (box === this.mark) return;
    this.mark = box;
    this.paint();
    this.on.tell(box ?? this.chosen);
  }

  choose(box) {
    this.chosen = box;
    this.paint();
    this.on.tell(box);
    this.on.choose(box);
  }

  enter(box) {
    if (box?.part.id != null) this.on.enter(box);
  }

  key(event) {
    const at = this.chosen ?? null;
    const moves = {
      ArrowRight: () => at?.children[0] ?? at ?? this.tops?.[0],
      ArrowLeft: () => at?.up ?? at,
      ArrowDown: () => at?.siblings[at.place + 1] ?? below(at) ?? at ?? this.tops?.[0],
      ArrowUp: () => at?.siblings[at.place - 1] ?? at,
      Home: () => this.tops?.[0],
    };
    if (moves[event.key]) this.choose(moves[event.key]() ?? null);
    else if (event.key === "Enter") this.enter(at);
    else if (event.key === "Escape" || event.key === "Backspace") this.on.leave();
    else return;
    event.preventDefault();
  }

  legend() {
    if (!this.palette) this.colors();
    const names = this.by === "kind" ? KINDS : TIERS;
    const found = new Set(
      (this.parts ?? []).map((part) =>
        names.find((name) => this.palette[name] === this.fill(part)),
      ),
    );
    const items = names
      .filter((name) => found.has(name))
      .map((name) => [NAMES[name], this.palette[name]]);
    if (this.parts?.some((part) => part.pinned)) items.push(["Pinned", this.palette.pin]);
    return items;
  }

  describe(box) {
    const { part } = box,
      tokens = (pages) => `${tokensText(pages * this.pageTokens)} tokens`;
    const words = [
      part.id == null
        ? `${part.nodes.toLocaleString("en")} smaller parts together: ${tokens(part.pages)}`
        : `${NAMES[part.kind ?? "unknown"]}, ${tokens(part.pages)} from token ${((part.depth ?? 0) * this.pageTokens).toLocaleString("en")} on`,
    ];
    if ((part.below ?? part.pages) > part.pages) words.push(`${tokens(part.below)} with all below`);
    words.push(
      (part.host ?? 0) > 0
        ? part.host < part.pages
          ? `${tokens(part.host)} of it on host only`
          : "on host"
        : (part.moving ?? 0) > 0
          ? "on its way"
          : "on the device",
    );
    if (part.hits) words.push(`found ${part.hits.toLocaleString("en")} times`);
    if (part.priority) words.push(`priority ${part.priority}`);
    if (part.pin_left_s != null) words.push(`pinned for ${timeText(part.pin_left_s)} more`);
    if (part.used) words.push("in use");
    const names = box.programs.map((program) => program.name);
    if (names.length)
      words.push(
        names.length > 3
          ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more`
          : names.join(", "),
      );
    return `${words.join("; ")}.`;
  }
}

function below(box) {
  for (let up = box?.up; up; up = up.up)
    if (up.siblings[up.place + 1]) return up.siblings[up.place + 1];
  return null;
}

// Several nodes side by side are as long as one of them.
function length(part) {
  return part.id == null ? Math.max(1, part.pages / part.nodes) : part.pages;
}
function weight(box) {
  return Math.max(1, box.part.below ?? box.part.pages);
}
function key(part, boxes) {
  return part.id ?? (part.parent == null ? "rest" : `rest of ${boxes[part.parent]?.part.id}`);
}
