"use strict";
// Numbers and words as people read them, and elements made of data: text only, whatever names hold.

const report = JSON.parse(document.getElementById("contents").textContent);

const STATES = {
  integers: "integers",
  weights: "few-bit weights",
  missed: "planned, but float",
  kept: "kept float",
  fused: "part of another",
  float: "float",
};

// What is smaller than float, in words: of a model whose weights alone are, nothing computes in integers.
const SMALL = (() => {
  const states = new Set(report.nodes.filter((node) => node.bits).map((node) => node.state));
  if (!states.has("weights")) return "in integers";
  return states.has("integers") || states.has("missed") ? "in integers or few bits" : "with few-bit weights";
})();

function count(x) {
  return x === null || x === undefined ? "" : Math.round(x).toLocaleString("en");
}

function bytes(x) {
  if (x === null || x === undefined) return "";
  const units = [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]];
  for (const [unit, size] of units) if (x >= size) return `${(x / size).toFixed(x / size < 100 ? 2 : 1)} ${unit}`;
  return `${x} B`;
}

function seconds(x) {
  if (x === null || x === undefined) return "";
  if (x >= 1) return `${x.toFixed(2)} s`;
  if (x >= 1e-3) return `${(x * 1e3).toFixed(2)} ms`;
  return `${(x * 1e6).toFixed(x < 1e-5 ? 1 : 0)} µs`;
}

function significant(x, digits = 3) {
  if (x === null || x === undefined) return "";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-4 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
}

function percent(part, whole) {
  if (!whole) return "";
  const share = (100 * part) / whole;
  return `${share.toFixed(share >= 99.95 || share === 0 ? 0 : 1)} %`;
}

function decibels(x) {
  return x === null || x === undefined ? "" : `${x.toFixed(1)} dB`;
}

function products(x) {
  if (!x) return "";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (x >= size) return `${significant(x / size)} ${unit}`;
  return String(x);
}

function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
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

function make(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function draw(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function at(id) {
  return document.getElementById(id);
}

function badge(state) {
  return make("span", { class: `badge ${state}` }, STATES[state]);
}

// A bar beside its number; `before` is drawn behind it where something had been larger.
function bar(share, before = 0, state = "accent") {
  const width = (x) => `width:${(100 * Math.min(Math.max(x, 0), 1)).toFixed(2)}%`;
  return make(
    "span",
    { class: "bar", "aria-hidden": "true" },
    before > share ? make("i", { class: "before", style: width(before) }) : null,
    make("i", { class: state, style: width(share) }),
  );
}

// Parts of a whole in one bar: [[state, amount, text], ...].
function stacked(parts, label) {
  const whole = parts.reduce((sum, part) => sum + part[1], 0);
  return make(
    "div",
    { class: "stacked", role: "img", "aria-label": `${label}: ${parts.map((p) => `${p[2]} ${percent(p[1], whole)}`).join(", ")}` },
    parts
      .filter((part) => part[1] > 0)
      .map(([state, amount, text]) =>
        make("span", { class: state, style: `flex:${amount / whole}`, title: `${text}: ${percent(amount, whole)}` }),
      ),
  );
}

function legend(states) {
  return make("p", { class: "legend" }, states.map((state) => make("span", {}, make("i", { class: state }), STATES[state])));
}

// A sentence that begins with a word of the language, and not with a name, whose letters must stay as they are.
function sentence(text) {
  return /^(the|it|its|no|nothing)\b/.test(text) ? `${text[0].toUpperCase()}${text.slice(1)}` : text;
}

function note(text) {
  return make("p", { class: "note" }, sentence(text));
}

function pathOf(node) {
  return node.scope || "(model)";
}

// The path of a node, of which the beginning is left out where it is too long: paths differ at their ends.
function pathSpan(node) {
  return make("span", { class: "path", title: `${pathOf(node)}\n${node.name}` }, make("bdi", { dir: "ltr" }, pathOf(node)));
}

function titleOf(node) {
  return node.scope ? `${node.scope} · ${node.operator}` : `${node.name} · ${node.operator}`;
}
