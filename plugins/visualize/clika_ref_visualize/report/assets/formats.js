"use strict";
// Formats of numbers, and elements made from data. Names are inserted as text only.

const report = JSON.parse(document.getElementById("contents").textContent);

const STATES = {
  quantized: "INT8",
  weight_only: "low-bit weight",
  not_quantized: "planned INT8, runs in float",
  kept_in_float: "kept in float",
  fused: "fused",
  float: "float",
};

function formatCount(x) {
  return x === null || x === undefined ? "" : Math.round(x).toLocaleString("en");
}

function formatBytes(x) {
  if (x === null || x === undefined) return "";
  const units = [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]];
  for (const [unit, size] of units) if (x >= size) return `${(x / size).toFixed(x / size < 100 ? 2 : 1)} ${unit}`;
  return `${x} B`;
}

function formatSeconds(x) {
  if (x === null || x === undefined) return "";
  if (x >= 1) return `${x.toFixed(2)} s`;
  if (x >= 1e-3) return `${(x * 1e3).toFixed(2)} ms`;
  return `${(x * 1e6).toFixed(x < 1e-5 ? 1 : 0)} µs`;
}

function formatNumber(x, digits = 3) {
  if (x === null || x === undefined) return "";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-4 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
}

function formatPercent(part, total) {
  if (!total) return "";
  const share = (100 * part) / total;
  return `${share.toFixed(share >= 99.95 || share === 0 ? 0 : 1)} %`;
}

function formatDecibels(x) {
  return x === null || x === undefined ? "" : `${x.toFixed(1)} dB`;
}

function formatShortCount(x) {
  if (!x) return "";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (x >= size) return `${formatNumber(x / size)} ${unit}`;
  return String(x);
}

function formatPlural(n, one, many = `${one}s`) {
  return `${formatCount(n)} ${n === 1 ? one : many}`;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function createElement(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function createSvg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function getById(id) {
  return document.getElementById(id);
}

function createBadge(state) {
  return createElement("span", { class: `badge ${state}` }, STATES[state]);
}

// A bar for a number. A larger `before` is drawn below it.
function createBar(share, before = 0, state = "accent") {
  const width = (x) => `width:${(100 * Math.min(Math.max(x, 0), 1)).toFixed(2)}%`;
  return createElement(
    "span",
    { class: "bar", "aria-hidden": "true" },
    before > share ? createElement("i", { class: "before", style: width(before) }) : null,
    createElement("i", { class: state, style: width(share) }),
  );
}

// Shares of a total in one bar: [[state, amount, text], ...].
function createStackedBar(parts, label) {
  const total = parts.reduce((sum, part) => sum + part[1], 0);
  return createElement(
    "div",
    { class: "stacked", role: "img", "aria-label": `${label}: ${parts.map((p) => `${p[2]} ${formatPercent(p[1], total)}`).join(", ")}` },
    parts
      .filter((part) => part[1] > 0)
      .map(([state, amount, text]) =>
        createElement("span", { class: state, style: `flex:${amount / total}`, title: `${text}: ${formatPercent(amount, total)}` }),
      ),
  );
}

function createLegend(states) {
  return createElement("p", { class: "legend" }, states.map((state) => createElement("span", {}, createElement("i", { class: state }), STATES[state])));
}

// Capitalizes a text that begins with a common word. Names keep their letters.
function capitalize(text) {
  return /^(the|it|its|no|nothing|cannot|this)\b/.test(text) ? `${text[0].toUpperCase()}${text.slice(1)}` : text;
}

function createNote(text) {
  return createElement("p", { class: "note" }, capitalize(text));
}

function formatPath(node) {
  return node.scope || "(model)";
}

// The path of a node. If it is too long, its beginning is elided, since paths differ at their ends.
function createPathSpan(node) {
  return createElement("span", { class: "path", title: `${formatPath(node)}\n${node.name}` }, createElement("bdi", { dir: "ltr" }, formatPath(node)));
}

function formatTitle(node) {
  return node.scope ? `${node.scope} · ${node.operator}` : `${node.name} · ${node.operator}`;
}
