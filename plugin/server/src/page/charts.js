// Small charts as SVG paths.
import { tokensText } from "/page/tree.js";

const NS = "http://www.w3.org/2000/svg";
const make = (name, attributes, text) => {
  const at = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) at.setAttribute(key, value);
  if (text != null) at.textContent = text;
  return at;
};

export function spark(svg, values, top) {
  const known = values.filter((value) => value != null);
  const most = top ?? Math.max(...known, 1e-9),
    width = 100,
    height = 26;
  let path = "";
  values.forEach((value, index) => {
    if (value == null) return;
    const x = values.length < 2 ? width : (index * width) / (values.length - 1),
      y = height - 1.5 - (value / most) * (height - 4);
    path += `${path ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(make("path", {}));
  }
  svg.firstChild.setAttribute("d", known.length > 1 ? path : "");
}

// What more or less device memory would have found, by policy; counters since the start.
export function hitCurve(svg, said, stats) {
  const curve = stats.hit_curve,
    asked = curve?.lookup_tokens ?? 0;
  const text = !curve
    ? "Hit curves come with the policy agent."
    : !asked
      ? "Nothing was asked for yet."
      : "";
  if (text || curve.points.length < 2) {
    svg.replaceChildren();
    say(said, text || "Not enough was asked for yet.");
    return;
  }
  const { width, height } = { width: 320, height: 168 },
    left = 34,
    bottom = height - 20;
  const points = curve.points,
    least = Math.log2(Math.max(1, points[0].pages)),
    most = Math.log2(Math.max(2, points.at(-1).pages));
  const x = (pages) =>
    left +
    ((Math.log2(Math.max(1, pages)) - least) / Math.max(1e-9, most - least)) * (width - left - 6);
  const top = Math.max(
    0.05,
    ...points.map((point) => Math.max(point.hit_tokens, point.lru_hit_tokens) / asked),
  );
  const y = (tokens) => bottom - (tokens / asked / top) * (bottom - 12);
  const line = (of) =>
    points
      .map(
        (point, index) =>
          `${index ? "L" : "M"}${x(point.pages).toFixed(1)} ${y(of(point)).toFixed(1)}`,
      )
      .join("");
  const have = stats.tiers
    .filter((tier) => tier.tier === "device")
    .reduce((sum, tier) => sum + tier.pages.total, 0);
  const tokens = (pages) => tokensText(pages * stats.page_tokens);
  const parts = [
    ...[0, 0.5, 1].map((share) =>
      make("path", {
        d: `M${left} ${y(share * top * asked)}H${width - 6}`,
        stroke: "var(--line)",
        "stroke-width": 1,
      }),
    ),
    ...[0, 0.5, 1].map((share) =>
      make(
        "text",
        { x: left - 6, y: y(share * top * asked) + 4, "text-anchor": "end" },
        `${(100 * share * top).toFixed(0)} %`,
      ),
    ),
    make("path", {
      d: line((point) => point.lru_hit_tokens),
      stroke: "var(--soft)",
      "stroke-dasharray": "3 3",
    }),
    make("path", { d: line((point) => point.hit_tokens), stroke: "var(--leaf)" }),
    make("text", { x: left, y: height - 4 }, tokens(points[0].pages)),
    make(
      "text",
      { x: width - 6, y: height - 4, "text-anchor": "end" },
      `${tokens(points.at(-1).pages)} tokens`,
    ),
  ];
  if (have >= points[0].pages && have <= points.at(-1).pages)
    parts.push(
      make("path", { d: `M${x(have)} 8V${bottom}`, stroke: "var(--gold)", "stroke-width": 1.2 }),
      make("text", { x: x(have), y: height - 4, "text-anchor": "middle" }, "now"),
    );
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
  svg.setAttribute(
    "aria-label",
    `Predicted hits by memory, from ${tokens(points[0].pages)} to ${tokens(points.at(-1).pages)} tokens`,
  );
  say(said, "Solid: expected hits of what was asked for; dashed: with least recently used.");
}

function say(at, text) {
  if (at.textContent !== text) at.textContent = text;
}
