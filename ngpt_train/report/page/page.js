"use strict";
// Each <figure> names its chart in the JSON above; its inputs say what is chosen. Nothing is fetched.
const charts = JSON.parse(document.getElementById("charts").textContent);
const coarse = matchMedia("(pointer: coarse)").matches;
const darkScheme = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: coarse ? true : "hover",
  // Named one by one: what plotly offers by itself may lead to its servers.
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  plotlyServerURL: "",
  toImageButtonOptions: { format: "svg" },
};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// b laid over a, objects within objects; arrays and values of b replace those of a.
function merged(a, b) {
  const plain = (x) => x !== null && typeof x === "object" && !Array.isArray(x);
  if (!plain(a) || !plain(b)) return b;
  const out = { ...a };
  for (const [key, value] of Object.entries(b)) out[key] = key in a ? merged(a[key], value) : value;
  return out;
}

function themed(layout) {
  const ink = colour("--ink"), muted = colour("--muted"), rule = colour("--rule");
  const axis = {
    gridcolor: rule, linecolor: muted, zerolinecolor: muted, tickcolor: muted, ticks: "outside", showline: true,
    zeroline: false, title: { font: { size: 13 } },
  };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("--sans"), size: 12, color: ink },
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: muted, font: { color: ink }, align: "left" },
    margin: { l: 56, r: 18, t: 30, b: 48 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    dragmode: coarse ? false : "zoom", // so that a finger on the figure still scrolls the page
    xaxis: axis, yaxis: axis,
  };
  const out = merged(base, layout);
  if (out.shapes) out.shapes = out.shapes.map((shape) => merged(shape, { line: { color: ink } }));
  return out;
}

// name -> the chosen values, of one figure
function chosen(figure) {
  const found = {};
  for (const input of figure.querySelectorAll("input")) {
    const values = (found[input.dataset.choice] ??= new Set());
    if (input.checked) values.add(input.value);
  }
  return found;
}

function drawn(plot, choice) {
  const data = plot.traces.map((trace) => {
    const meta = trace.meta;
    const agrees = Object.entries(choice).every(([name, values]) => !(name in meta) || values.has(meta[name]));
    const over = meta.x && choice.axis ? meta.x[[...choice.axis][0]] : undefined;
    const shown = agrees && !(meta.x && over === undefined);
    return { ...trace, visible: shown, x: over ?? trace.x };
  });
  let layout = plot.layout;
  for (const [name, values] of Object.entries(choice))
    for (const value of values) layout = merged(layout, plot.layouts[`${name}=${value}`] ?? {});
  return [data, { ...themed(layout), height: plot.height, autosize: true }];
}

function draw(figure, keepZoom) {
  const chart = charts[figure.dataset.chart];
  const choice = chosen(figure);
  figure.querySelectorAll(".plot").forEach((div, k) => {
    const [data, layout] = drawn(chart.plots[k], choice);
    // A zoom is kept while curves are switched, and left where an axis changes.
    layout.uirevision = keepZoom ? div.dataset.revision : (div.dataset.revision = String(performance.now()));
    Plotly.react(div, data, layout, config);
  });
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
for (const figure of figures) {
  draw(figure, false);
  figure.addEventListener("change", (event) => draw(figure, event.target.type === "checkbox"));
  for (const button of figure.querySelectorAll("button[data-all]"))
    button.addEventListener("click", () => {
      const inputs = button.closest("fieldset").querySelectorAll("input");
      for (const input of inputs) input.checked = button.dataset.all === "yes";
      draw(figure, true);
    });
}

function redraw() {
  for (const figure of figures) draw(figure, true);
}

const themes = ["auto", "light", "dark"];
const button = document.getElementById("theme");
button.hidden = false;
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(button.dataset.theme) + 1) % 3];
  button.dataset.theme = next;
  button.textContent = `Theme: ${next}`;
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  redraw();
});
darkScheme.addEventListener("change", redraw);

// On paper: light, all of it unfolded, and the figures as wide as the sheet.
let folded = [];
addEventListener("beforeprint", () => {
  if (printing) return;
  printing = true;
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = true;
  button.dataset.before = document.documentElement.dataset.theme ?? "";
  document.documentElement.dataset.theme = "light";
  redraw();
  for (const div of document.querySelectorAll(".plot"))
    Plotly.relayout(div, { width: div.closest(".plots").classList.contains("many") ? 320 : 660, autosize: false });
});
addEventListener("afterprint", () => {
  printing = false;
  for (const part of folded) part.open = false;
  if (button.dataset.before) document.documentElement.dataset.theme = button.dataset.before;
  else delete document.documentElement.dataset.theme;
  for (const div of document.querySelectorAll(".plot")) Plotly.relayout(div, { width: null, autosize: true });
  redraw();
});
document.documentElement.dataset.ready = "yes";
