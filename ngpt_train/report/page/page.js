"use strict";
// Draws each <figure> from its chart in the JSON above (chart.py); its inputs say what is chosen. Nothing is fetched.
const { charts, arrays } = JSON.parse(document.getElementById("charts").textContent);

// An SVG element in `parent`.
function add(parent, tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// Symbols with their middle at 0 and a radius of 1, by matplotlib's names.
const regular = (n, start = 0) => Array.from({ length: n }, (_, k) => {
  const angle = start + 2 * Math.PI * k / n - Math.PI / 2;
  return [Math.cos(angle), Math.sin(angle)];
});
const w = 0.35;
const plus = [[-w, -1], [w, -1], [w, -w], [1, -w], [1, w], [w, w], [w, 1], [-w, 1], [-w, w], [-1, w], [-1, -w], [-w, -w]];
const symbols = {
  o: regular(24), s: regular(4, Math.PI / 4), D: regular(4), p: regular(5), h: regular(6), P: plus,
  X: plus.map(([x, y]) => [0.7 * (x - y), 0.7 * (x + y)]),
  "^": regular(3), ">": regular(3, Math.PI / 2), v: regular(3, Math.PI), "<": regular(3, -Math.PI / 2),
};

// 8388608 -> 8.39M, as rounded.py has it
function si(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  let power = size >= 1000 || size < 0.001 ? Math.min(Math.max(Math.floor(Math.log10(size) / 3), -4), 6) : 0;
  let scaled = Number((value / 1000 ** power).toPrecision(digits));
  if (Math.abs(scaled) >= 1000 && power < 6) [power, scaled] = [power + 1, scaled / 1000];
  return String(scaled).replace("-", "\u2212") + ["p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E"][power + 4];
}

// A number in a hover text: si, or so many digits, significant (g) or behind the point (f).
function written(value, format) {
  if (format === "si") return si(value);
  const digits = Number(format[0]);
  const text = format[1] === "f" ? value.toFixed(digits) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "\u2212");
}

// name -> the options that are chosen, of one figure
function chosenOf(figure) {
  const found = {};
  for (const input of figure.querySelectorAll("input")) {
    const options = (found[input.dataset.choice] ??= new Set());
    if (input.checked) options.add(input.value);
  }
  return found;
}

function agrees(when, chosen) {
  return Object.entries(when ?? {}).every(([name, options]) =>
    !chosen[name] || [options].flat().some((option) => chosen[name].has(option)));
}

// The range of an axis around its values, a little wider.
function around(axis, values) {
  const known = values.filter((v) => v !== null && !(axis.log && v <= 0));
  if (axis.least !== undefined) known.push(axis.least);
  if (!known.length) return axis.log ? [1, 10] : [0, 1];
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  if (axis.log) {
    const more = Math.max((high / low) ** 0.05, 1.02);
    return [low / more, high * more];
  }
  const more = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - more * (low === axis.least ? 0.4 : 1), high + more];
}

// [value, text] of some n ticks between low and high.
function ticksOf(axis, low, high, n) {
  const within = ([value]) => value >= Math.min(low, high) && value <= Math.max(low, high);
  if (axis.ticks) return axis.ticks.filter(within);
  if (axis.log) {
    const powers = Array.from({ length: 45 }, (_, k) => 10 ** (k - 22));
    const all = (steps) => powers.flatMap((p) => steps.map((s) => [s * p, si(s * p)])).filter(within);
    const found = all(all([1]).length > 3 ? [1] : [1, 2, 5]);
    if (found.length > 2) return found.filter((_, k) => k % Math.ceil(found.length / n) === 0);
  }
  const rough = Math.max((high - low) / n, axis.whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((s) => s * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) {
    const value = k * step;
    found.push([value, Math.abs(value) >= 1000 ? si(value, 4) : written(value, `${Math.min(digits, 9)}f`)]);
  }
  return found;
}

// A scale: from a value of the axis to a pixel and back.
function scaleOf(axis, range, from, to) {
  const inner = axis.log ? Math.log10 : (v) => v;
  const [a, b] = range.map(inner);
  return {
    range,
    at: (v) => (v === null || (axis.log && v <= 0) ? null : from + (to - from) * (inner(v) - a) / (b - a)),
    back: (px) => { const v = a + (b - a) * (px - from) / (to - from); return axis.log ? 10 ** v : v; },
  };
}

// As many letters of a text as fit.
function cut(words, room) {
  const letters = Math.floor(room / 6.6);
  return words.length <= letters ? words : `${words.slice(0, letters - 1)}…`;
}

// labels: the letters of the longest label at the right of a row.
function drawAxes(svg, box, x, y, [xAxis, yAxis], labels) {
  const wide = box.right - box.left;
  const text = (at, words, more) => add(svg, "text", { x: at[0], y: at[1], ...more }, words);
  const grid = (x1, y1, x2, y2, name) => add(svg, "line", { x1, y1, x2, y2, class: name });
  let end = -Infinity;
  for (const [value, words] of ticksOf(xAxis, ...x.range, Math.max(2, wide / 70))) {
    const at = x.at(value), half = 3.5 * words.length;
    if (at - half < end) continue; // its words would lie over those of the last one
    end = at + half + 6;
    grid(at, box.top, at, box.bottom, "grid");
    text([at, box.bottom + 16], words, { class: "x-tick", "text-anchor": "middle" });
  }
  for (const [value, words] of yAxis.rows ? [] : ticksOf(yAxis, ...y.range, (box.bottom - box.top) / 55)) {
    grid(box.left, y.at(value), box.right, y.at(value), "grid");
    text([box.left - 6, y.at(value) + 4], words, { class: "y-tick", "text-anchor": "end" });
  }
  (yAxis.rows ?? []).forEach((name, k) => text([box.left, y.at(k) - 11], cut(name, wide - 6.6 * labels - 8), { class: "row" }));
  grid(box.left, box.bottom, box.right, box.bottom, "axis");
  if (!yAxis.rows) grid(box.left, box.top, box.left, box.bottom, "axis");
  if (xAxis.rule !== undefined) grid(x.at(xAxis.rule), box.top, x.at(xAxis.rule), box.bottom, "rule");
  if (yAxis.rule !== undefined) grid(box.left, y.at(yAxis.rule), box.right, y.at(yAxis.rule), "rule");
  text([(box.left + box.right) / 2, box.bottom + 36], cut(xAxis.title, wide + box.left), { class: "x-title", "text-anchor": "middle" });
  text([Math.max(2, box.left - 46), box.top - 12], cut(yAxis.title, wide + box.left), { class: "y-title" });
}

// Draws a mark; returns its points, for the pointer.
function drawMark(parent, mark, [colour, symbol, name], x, y) {
  const group = add(parent, "g", { class: "mark", "data-arm": mark.arm, opacity: mark.opacity ?? 1 });
  const xs = arrays[mark.x], ys = arrays[mark.y];
  const points = xs.map((v, k) => [x.at(v), y.at(ys[k])]);
  const known = ([px, py]) => px !== null && py !== null;
  if (mark.line || mark.area) {
    let path = "", before = false;
    for (const point of points) {
      if (known(point)) path += `${before ? "L" : "M"}${point[0].toFixed(1)},${point[1].toFixed(1)}`;
      before = known(point);
    }
    const look = mark.area ? { fill: colour, d: `${path}Z` } : { fill: "none", stroke: colour, "stroke-width": mark.line, d: path };
    add(group, "path", mark.dotted ? { ...look, "stroke-dasharray": "2 3" } : look);
  }
  points.forEach((point, k) => {
    if (!known(point)) return;
    const [px, py] = point, radius = (mark.size ?? 0) / 2;
    if (mark.bar) add(group, "rect", { x: x.at(0), y: py - 6, width: Math.max(0, px - x.at(0)), height: 12, fill: colour });
    if (!radius || (mark.only_last && k < points.length - 1)) return;
    const corners = symbols[mark.symbol ?? symbol].map(([a, b]) => `${(px + radius * a).toFixed(1)},${(py + radius * b).toFixed(1)}`);
    const hollow = mark.hollow?.[k] ? { class: "hollow" } : { fill: colour };
    add(group, "path", { d: `M${corners.join("L")}Z`, stroke: colour, "stroke-width": 1.5, ...hollow });
  });
  const values = { arm: name };
  const textOf = (k) => mark.hover
    .replace(/\{(\w+)(?::(\w+))?\}/g, (_, key, format) =>
      format ? written((key === "x" ? xs : ys)[k], format) : key === "text" ? mark.texts[k] : values[key]);
  return mark.hover ? points.map((at, k) => ({ at, group, text: () => textOf(k) })).filter(({ at }) => known(at)) : [];
}

let plots = 0;

// Draws a plot into its <div>, as wide as it is.
function draw(div, chart, plot, chosen) {
  const width = div.clientWidth, height = plot.height;
  const axes = ["x", "y"].map((which) => plot[which].find((axis) => agrees(axis.when, chosen)));
  const shown = plot.marks.filter((mark) => agrees({ arm: mark.arm, ...mark.when }, chosen));
  const box = axes[1].rows
    ? { left: 12, right: width - 12, top: 24, bottom: height - 46 }
    : { left: 58, right: width - (shown.some(({ label }) => label && label.length <= 6) ? 50 : 14), top: 30, bottom: height - 46 };
  const ranges = axes.map((axis, k) =>
    div.zoom?.[k] ?? axis.range ?? around(axis, shown.flatMap((mark) => arrays[k ? mark.y : mark.x])));
  const x = scaleOf(axes[0], ranges[0], box.left, box.right), y = scaleOf(axes[1], ranges[1], box.bottom, box.top);
  div.replaceChildren();
  const svg = add(div, "svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  const inside = { x: box.left, y: box.top - 6, width: box.right - box.left, height: box.bottom - box.top + 6 };
  div.clip ??= `clip-${plots++}`;
  add(add(svg, "clipPath", { id: div.clip }), "rect", inside);
  drawAxes(svg, box, x, y, axes, Math.max(0, ...shown.map((mark) => mark.label?.length ?? 0)));
  const marks = add(svg, "g", { "clip-path": `url(#${div.clip})` });
  div.points = shown.flatMap((mark) => drawMark(marks, mark, chart.arms[mark.arm], x, y));
  for (const mark of shown.filter((mark) => mark.label)) {
    const px = x.at(arrays[mark.x].at(-1)), py = y.at(arrays[mark.y].at(-1));
    if (axes[1].rows) add(svg, "text", { x: box.right, y: py - 11, class: "row", "text-anchor": "end" }, mark.label);
    else if (px !== null && py !== null) {
      const place = mark.label.length <= 6 ? { x: px + 6, y: py + 4 } : { x: px, y: py - 5, "text-anchor": "end" };
      add(svg, "text", place, mark.label);
    }
  }
  div.frame = { svg, box, x, y };
}

// The nearest point of a plot to a place on the screen; its text stands beside it.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function point(div, event) {
  const { svg } = div.frame, place = svg.getBoundingClientRect();
  const [px, py] = [event.clientX - place.left, event.clientY - place.top];
  let nearest = null, least = 30 ** 2;
  for (const found of div.points) {
    const away = (found.at[0] - px) ** 2 + (found.at[1] - py) ** 2;
    if (away < least) [nearest, least] = [found, away];
  }
  svg.querySelector(".pointed")?.remove();
  tip.hidden = !nearest;
  if (!nearest) return;
  add(svg, "circle", { cx: nearest.at[0], cy: nearest.at[1], r: 7, class: "pointed" });
  tip.textContent = nearest.text();
  const left = Math.min(place.left + nearest.at[0] + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left) + scrollX}px`;
  tip.style.top = `${place.top + nearest.at[1] + 14 + scrollY}px`;
}

// A mouse that is dragged over a plot zooms into the rectangle; a double click shows all again.
function dragged(div, start, event) {
  const { svg, box, x, y } = div.frame, place = svg.getBoundingClientRect();
  const held = (value, low, high) => Math.min(Math.max(value, low), high);
  const ends = [start, event].map((e) =>
    [held(e.clientX - place.left, box.left, box.right), held(e.clientY - place.top, box.top, box.bottom)]);
  const [[x0, y0], [x1, y1]] = ends;
  svg.querySelector(".zoom")?.remove();
  const size = { x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
  if (event.type === "pointermove") add(svg, "rect", { ...size, class: "zoom" });
  else if (size.width > 8 && size.height > 8)
    return [[x.back(size.x), x.back(size.x + size.width)], [y.back(size.y + size.height), y.back(size.y)]];
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = charts[figure.dataset.chart], divs = [...figure.querySelectorAll(".plot")];
  const redraw = (div) => draw(div, chart, chart.plots[divs.indexOf(div)], chosenOf(figure));
  for (const div of divs) {
    let start = null, wide = 0;
    new ResizeObserver(() => { if (div.clientWidth !== wide) { wide = div.clientWidth; redraw(div); } }).observe(div);
    redraw(div);
    wide = div.clientWidth;
    div.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse") return point(div, event); // a finger scrolls the page
      start = event;
      div.setPointerCapture(event.pointerId);
    });
    div.addEventListener("pointermove", (event) => (start ? dragged(div, start, event) : point(div, event)));
    div.addEventListener("pointerup", (event) => {
      const zoom = start && dragged(div, start, event);
      start = null;
      if (zoom) { div.zoom = zoom; redraw(div); }
    });
    div.addEventListener("pointerleave", () => { tip.hidden = true; });
    div.addEventListener("dblclick", () => { delete div.zoom; redraw(div); });
  }
  figure.addEventListener("change", (event) => {
    // A zoom is kept while curves are switched, and left where an axis changes.
    for (const div of divs) { if (event.target.type !== "checkbox") delete div.zoom; redraw(div); }
  });
  for (const button of figure.querySelectorAll("button[data-all]"))
    button.addEventListener("click", () => {
      for (const input of button.closest("fieldset").querySelectorAll("input")) input.checked = button.dataset.all === "yes";
      divs.forEach(redraw);
    });
}

const button = document.getElementById("theme"), themes = ["auto", "light", "dark"];
button.hidden = false;
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(button.dataset.theme) + 1) % 3];
  button.dataset.theme = next;
  button.textContent = `Theme: ${next}`;
  document.documentElement.dataset.theme = next;
});

// On paper all is unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = true;
});
addEventListener("afterprint", () => { for (const part of folded) part.open = false; });
document.documentElement.dataset.ready = "yes";
