// The details panel of a node or an activation: all known facts, and histograms.

const panel = getById("details");
let opener = null;
let countsAreLogarithmic = true;

function openNode(index, from = null) {
  const node = report.nodes[index];
  const facts = [
    ["name", node.name],
    ["module", formatPath(node)],
    ["operator", node.operator],
    ["line", node.line],
    ["planned", node.planned],
    ["runs in", node.runs === null ? "unknown" : node.runs],
    ["reason", node.reason],
    ["QS", formatNumber(node.sensitivity)],
    ["bits", node.bits ? `${node.bits[0]} for weights, ${node.bits[1]} for inputs` : ""],
    ["weight", node.bits ? `${formatBytes(node.bytes_before)} before, ${formatBytes(node.bytes_after)} after` : ""],
    ["MACs", node.macs ? `${formatCount(node.macs)} (${formatPercent(node.macs, report.modules[0].macs)})` : ""],
    ["time", node.seconds === null ? "" : `${formatSeconds(node.seconds)} (${formatPercent(node.seconds, total.seconds)} of all nodes)`],
  ];
  openPanel(formatTitle(node), createBadge(node.state), facts, [
    ["Inputs", node.inputs],
    ["Outputs", node.outputs],
  ], from, `node ${index}`);
}

function openValue(index, from = null) {
  const value = report.values[index];
  const producer = value.producer === null ? null : report.nodes[value.producer];
  const facts = [["computed by", producer ? formatTitle(producer) : "the caller (model input)"]];
  const readers = report.nodes.filter((node) => node.inputs.includes(index));
  facts.push(["read by", readers.map(formatTitle).join(", ")]);
  openPanel(value.name, "", facts, [["", [index]]], from, `value ${index}`);
}

function openPanel(title, mark, facts, groups, from, key) {
  const list = createElement("dl", {}, facts.filter(([, text]) => text).map(([name, text]) => [createElement("dt", {}, name), createElement("dd", {}, text)]));
  const parts = groups.filter(([, indices]) => indices.length).map(([name, indices]) => [name ? createElement("h3", {}, name) : "", indices.map(createValueCard)]);
  const close = createElement("button", { class: "close", "aria-label": "Close", onclick: closeDetails }, "×");
  panel.replaceChildren(createElement("header", {}, createElement("h2", {}, title), mark, close), list, ...parts.flat(2));
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

function createValueCard(index) {
  const value = report.values[index];
  const { observed, quantized } = value;
  const facts = [];
  if (observed) facts.push(["observed range", `${formatNumber(observed.low, 4)} to ${formatNumber(observed.high, 4)}, in ${formatPlural(observed.batches, "batch", "batches")}`]);
  if (observed && observed.source) facts.push(["observed at", observed.source]);
  if (quantized) {
    facts.push(["quantized range", `${formatNumber(quantized.low, 4)} to ${formatNumber(quantized.high, 4)}, ${formatCount(quantized.levels)} levels`],
      ["scale", formatNumber(quantized.scale, 6)], ["zero point", String(quantized.zero_point)], ["observer", quantized.observer],
      ["clipped", quantized.clipped_share === null ? "" : `${formatNumber(100 * quantized.clipped_share, 2)} % of the elements`]);
  }
  const body = observed ? [createElement("div", { class: "plot", "data-value": index })] : [createNote(explainMissingRange(value))];
  return createElement("div", { class: "card" }, createElement("h4", {}, value.name, createElement("small", {}, value.type)), ...body,
    observed ? createScaleSwitch() : null,
    createElement("dl", {}, facts.filter(([, text]) => text).map(([name, text]) => [createElement("dt", {}, name), createElement("dd", {}, text)])));
}

function explainMissingRange(value) {
  if (!value.type.startsWith("float") && !value.type.startsWith("bfloat")) return "It is not a float tensor, and has no observed range.";
  return report.unavailable.values ? "Its observed range is unknown for this module." : "It was not observed, because no quantized layer reads it.";
}

function createScaleSwitch() {
  const box = createElement("input", { type: "checkbox" });
  box.checked = countsAreLogarithmic;
  box.addEventListener("change", () => {
    countsAreLogarithmic = box.checked;
    panel.querySelectorAll(".plot").forEach((frame) => paintHistogram(frame));
    panel.querySelectorAll(".switch input").forEach((other) => { other.checked = box.checked; });
  });
  return createElement("label", { class: "switch" }, box, "logarithmic counts");
}

function paintHistogram(frame) {
  const value = report.values[Number(frame.dataset.value)];
  frame.replaceChildren(drawHistogram(value, Math.max(frame.clientWidth, 200), countsAreLogarithmic));
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !panel.hidden) closeDetails();
});
