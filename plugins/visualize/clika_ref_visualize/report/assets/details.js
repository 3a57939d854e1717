// What stands beside the report once a node or a value is opened: all that is known of it, and its histograms.

const panel = at("details");
let opener = null;
let countsAreLogarithmic = true;

function openNode(place, from = null) {
  const node = report.nodes[place];
  const facts = [
    ["name", node.name],
    ["module", pathOf(node)],
    ["operator", node.operator],
    ["line", node.line],
    ["planned", node.planned],
    ["runs in", node.runs === null ? "not known" : node.runs],
    ["why", node.reason],
    ["QS", significant(node.sensitivity)],
    ["bits", node.bits ? `${node.bits[0]} of weights, ${node.bits[1]} of what it reads` : ""],
    ["weight", node.bits ? `${bytes(node.bytes_before)} before, ${bytes(node.bytes_after)} after` : ""],
    ["products", node.products ? `${count(node.products)} (${percent(node.products, report.modules[0].products)})` : ""],
    ["time", node.seconds === null ? "" : `${seconds(node.seconds)} (${percent(node.seconds, whole.seconds)} of all nodes)`],
  ];
  open(titleOf(node), badge(node.state), facts, [
    ["Reads", node.reads],
    ["Makes", node.makes],
  ], from, `node ${place}`);
}

function openValue(place, from = null) {
  const value = report.values[place];
  const maker = value.maker === null ? null : report.nodes[value.maker];
  const facts = [["made by", maker ? titleOf(maker) : "the caller"]];
  const readers = report.nodes.filter((node) => node.reads.includes(place));
  facts.push(["read by", readers.map(titleOf).join(", ")]);
  open(value.name, "", facts, [["", [place]]], from, `value ${place}`);
}

function open(title, mark, facts, groups, from, key) {
  const list = make("dl", {}, facts.filter(([, text]) => text).map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const parts = groups.filter(([, places]) => places.length).map(([name, places]) => [name ? make("h3", {}, name) : "", places.map(valueCard)]);
  const close = make("button", { class: "close", "aria-label": "Close", onclick: closeDetails }, "×");
  panel.replaceChildren(make("header", {}, make("h2", {}, title), mark, close), list, ...parts.flat(2));
  panel.hidden = false;
  panel.dataset.key = key;
  panel.scrollTop = 0;
  document.body.classList.add("detailed");
  document.querySelectorAll("tr.chosen").forEach((line) => line.classList.remove("chosen"));
  if (from) {
    opener = from;
    from.classList.add("chosen");
  }
  panel.querySelectorAll(".plot").forEach((frame) => paintHistogram(frame));
  panel.focus({ preventScroll: true });
}

function closeDetails() {
  panel.hidden = true;
  document.body.classList.remove("detailed");
  document.querySelectorAll("tr.chosen").forEach((line) => line.classList.remove("chosen"));
  if (opener && opener.isConnected) opener.focus({ preventScroll: true });
  opener = null;
}

function valueCard(place) {
  const value = report.values[place];
  const { seen, covered } = value;
  const facts = [];
  if (seen) facts.push(["held", `${significant(seen.low, 4)} to ${significant(seen.high, 4)}, in ${plural(seen.batches, "batch", "batches")}`]);
  if (seen && seen.source) facts.push(["seen of", seen.source]);
  if (covered) {
    facts.push(["integers cover", `${significant(covered.low, 4)} to ${significant(covered.high, 4)}, in ${count(covered.levels)} levels`],
      ["scale", significant(covered.scale, 6)], ["zero point", String(covered.zero_point)], ["chosen by", covered.observer],
      ["cut off", covered.outside === null ? "" : `${significant(100 * covered.outside, 2)} % of what was seen`]);
  }
  const body = seen ? [make("div", { class: "plot", "data-value": place })] : [note(whyUnseen(value))];
  return make("div", { class: "card" }, make("h4", {}, value.name, make("small", {}, value.type)), ...body,
    seen ? countsSwitch() : null,
    make("dl", {}, facts.filter(([, text]) => text).map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
}

function whyUnseen(value) {
  if (!value.type.startsWith("float") && !value.type.startsWith("bfloat")) return "It holds no floats, and is not looked at.";
  return report.missing.values ? "What it held is not known of this module." : "What it held was not looked at: nothing there becomes integers.";
}

function countsSwitch() {
  const box = make("input", { type: "checkbox" });
  box.checked = countsAreLogarithmic;
  box.addEventListener("change", () => {
    countsAreLogarithmic = box.checked;
    panel.querySelectorAll(".plot").forEach((frame) => paintHistogram(frame));
    panel.querySelectorAll(".switch input").forEach((other) => { other.checked = box.checked; });
  });
  return make("label", { class: "switch" }, box, "logarithm of counts");
}

function paintHistogram(frame) {
  const value = report.values[Number(frame.dataset.value)];
  frame.replaceChildren(histogram(value, Math.max(frame.clientWidth, 200), countsAreLogarithmic));
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !panel.hidden) closeDetails();
});
