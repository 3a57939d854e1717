// Fills each section with its data, or with the reason for its absence, and updates the navigation.

const total = report.modules[0];

function createTile(title, text, hint) {
  return createElement("div", { class: "tile", title: hint }, createElement("span", {}, title), createElement("b", {}, text));
}

function showOverview() {
  getById("model").textContent = report.model;
  document.querySelector("#overview h1").append(report.model, createElement("small", {}, `for ${report.target}`));
  const summary = report.summary ? `${report.summary[0].toUpperCase()}${report.summary.slice(1)}.` : capitalize(report.unavailable.sensitivity || "");
  const example = report.example.length ? `Times and MACs are for a call on ${report.example.join(", ")}.` : "";
  getById("summary").textContent = [summary, example].filter(Boolean).join(" ");
  const own = report.targets[0];
  const tiles = [createTile("Nodes", formatCount(report.nodes.length)), createTile("Parameters", formatShortCount(report.parameters), formatCount(report.parameters))];
  if (total.quantized_layers) tiles.push(createTile("Quantized layers", `${formatCount(total.quantized_layers)} of ${formatCount(total.layers)}`));
  tiles.push(createTile("Weights and constants", report.bytes_after < report.bytes_before ? `${formatBytes(report.bytes_before)} → ${formatBytes(report.bytes_after)}` : formatBytes(report.bytes_before)));
  if (report.bytes_of_file !== null) tiles.push(createTile("File", formatBytes(report.bytes_of_file)));
  if (total.quantized_layers) tiles.push(createTile("Quantized MACs", formatPercent(total.quantized_macs, total.macs), "Share of the MACs of all layers"));
  if (report.chosen && report.chosen.sqnr !== null) tiles.push(createTile("Predicted SQNR", formatDecibels(report.chosen.sqnr), "Computed for the part of the outputs that varies with the input"));
  if (own && own.seconds !== null) tiles.push(createTile("Latency", formatSeconds(own.seconds), "Median of calls on the example"));
  if (own && own.ratio !== null) tiles.push(createTile("Latency relative to float", `${formatNumber(own.ratio, 3)} ×`));
  if (!(own && own.seconds !== null) && report.latency) tiles.push(createTile("Latency, profiled", formatSeconds(report.latency.seconds), "From the runtime's profile; profiling takes time, too"));
  getById("tiles").append(...tiles);
  const parts = Object.keys(STATES).map((state) => {
    const nodes = report.nodes.filter((node) => node.state === state);
    return [state, nodes.length, `${STATES[state]}, ${formatPlural(nodes.length, "node")}`];
  }).filter((part) => part[1]);
  getById("split").append(createStackedBar(parts, "Nodes"), createLegend(parts.map((part) => part[0])));
}

function showLayers() {
  const rows = report.nodes.map((node, index) => ({ ...node, index }));
  const largest = Math.max(...rows.map((row) => row.bytes_before), 1);
  const sensitive = rows.map((row) => row.sensitivity).filter((x) => x > 0);
  const [low, high] = [Math.min(...sensitive), Math.max(...sensitive)];
  const sensitivityScale = logarithmic(low / 2, high * 1.0001, 0.02, 1);
  const slowest = Math.max(...rows.map((row) => row.seconds || 0));
  const columns = [
    { title: "#", numeric: true, hint: "Execution order", value: (row) => -row.index, cell: (row) => formatCount(row.index + 1) },
    { title: "Module", value: formatPath, cell: (row) => createPathSpan(row) },
    { title: "Operator", value: (row) => row.operator, cell: (row) => row.operator },
    { title: "Result", hint: "From the plan and the runtime's report", value: (row) => Object.keys(STATES).indexOf(row.state), cell: (row) => createBadge(row.state) },
    { title: "Bits", numeric: true, hint: "Of weights / of inputs", value: (row) => (row.bits ? row.bits[0] : null), cell: (row) => (row.bits ? row.bits.join(" / ") : "") },
    { title: "QS", numeric: true, hint: "Quantization sensitivity", value: (row) => row.sensitivity,
      cell: (row) => (row.sensitivity === null ? "" : [formatNumber(row.sensitivity), createBar(row.sensitivity > 0 ? sensitivityScale(row.sensitivity) : 0, 0, row.state)]) },
    { title: "Before", numeric: true, hint: "Size of the weight in float", value: (row) => (row.bits ? row.bytes_before : null), cell: (row) => (row.bits ? formatBytes(row.bytes_before) : "") },
    { title: "After", numeric: true, hint: "Size of the weight in the file", value: (row) => (row.bits ? row.bytes_after : null),
      cell: (row) => (row.bits ? [formatBytes(row.bytes_after), createBar(row.bytes_after / largest, row.bytes_before / largest, row.state)] : "") },
    { title: "MACs", numeric: true, value: (row) => row.macs || null, cell: (row) => formatShortCount(row.macs) },
    { title: "Runs in", hint: "Precision in the runtime's own graph", value: (row) => row.runs, cell: (row) => row.runs || "" },
  ];
  if (slowest) columns.push({ title: "Time", numeric: true, value: (row) => row.seconds, cell: (row) => (row.seconds === null ? "" : [formatSeconds(row.seconds), createBar(row.seconds / slowest)]) });
  if (rows.some((row) => row.reason)) columns.push({ title: "Reason", value: (row) => row.reason, cell: (row) => createElement("span", { class: "why", title: row.reason }, row.reason) });
  const shown = columns.filter((column) => column.title !== "QS" || rows.some((row) => row.sensitivity !== null));
  const table = makeTable(getById("layers-table"), "Layers and nodes", shown, rows, { choose: (row, line) => openNode(row.index, line), keyOf: (row) => row.index });
  addFilterTools(getById("layers-tools"), table, {
    label: "Filter by module, operator or reason",
    text: (row) => `${row.scope} ${row.name} ${row.operator} ${row.reason} ${STATES[row.state]}`,
    choices: [["Layers", (row) => row.bits !== null], ["All nodes", () => true],
      ...Object.entries(STATES).filter(([state]) => rows.some((row) => row.state === state)).map(([state, text]) => [`Only ${text}`, (row) => row.state === state])],
  });
}

function showActivations() {
  if (report.unavailable.values) return getById("activations-table").replaceWith(createNote(report.unavailable.values));
  const rows = report.values.map((value, index) => ({ ...value, index })).filter((value) => value.observed);
  const columns = [
    { title: "Activation", value: (row) => row.name, cell: (row) => row.name },
    { title: "Type", value: (row) => row.type, cell: (row) => createElement("span", { class: "why", title: row.type }, row.type) },
    { title: "Observed from", numeric: true, value: (row) => row.observed.low, cell: (row) => formatNumber(row.observed.low) },
    { title: "to", numeric: true, value: (row) => row.observed.high, cell: (row) => formatNumber(row.observed.high) },
    { title: "Histogram", hint: "Logarithmic counts; sorted by the width of the observed range", value: (row) => row.observed.high - row.observed.low, cell: drawSparkline },
    { title: "Quantized from", numeric: true, value: (row) => row.quantized?.low, cell: (row) => formatNumber(row.quantized?.low) },
    { title: "to", numeric: true, value: (row) => row.quantized?.high, cell: (row) => formatNumber(row.quantized?.high) },
    { title: "Scale", numeric: true, value: (row) => row.quantized?.scale, cell: (row) => formatNumber(row.quantized?.scale, 4) },
    { title: "Zero point", numeric: true, value: (row) => row.quantized?.zero_point, cell: (row) => row.quantized?.zero_point ?? "" },
    { title: "Clipped", numeric: true, hint: "Share of the observed elements outside the quantized range", value: (row) => row.quantized?.clipped_share, cell: (row) => (row.quantized && row.quantized.clipped_share !== null ? `${formatNumber(100 * row.quantized.clipped_share, 2)} %` : "") },
    { title: "Observer", value: (row) => row.quantized?.observer, cell: (row) => row.quantized?.observer || "" },
  ];
  const table = makeTable(getById("activations-table"), "Ranges of activations", columns, rows, { choose: (row, line) => openValue(row.index, line), keyOf: (row) => row.index });
  addFilterTools(getById("activations-tools"), table, {
    label: "Filter by name or type",
    text: (row) => `${row.name} ${row.type}`,
    choices: [...(rows.some((row) => row.quantized) ? [["Quantized", (row) => row.quantized !== null]] : []), ["All activations", () => true]],
  });
}

function showPrecision() {
  const layers = report.nodes.filter((node) => node.macs);
  const sums = (of) => Object.keys(STATES).map((state) => [state, layers.filter((node) => of(node) === state).reduce((sum, node) => sum + node.macs, 0), STATES[state]]);
  const planned = (node) => (node.state === "not_quantized" ? "quantized" : node.state);
  const bars = getById("precision-bars");
  if (layers.length) {
    bars.append(createElement("p", { class: "caption" }, "Planned"), createStackedBar(sums(planned), "Planned"), createElement("p", { class: "caption" }, "In the runtime"), createStackedBar(sums((node) => node.state), "In the runtime"),
      createLegend([...new Set(layers.flatMap((node) => [planned(node), node.state]))]));
  }
  if (report.unavailable.runtime) bars.append(createNote(report.unavailable.runtime));
  const reasons = new Map();
  for (const node of report.nodes) {
    if (!node.reason) continue;
    const entry = reasons.get(node.reason) || { reason: node.reason, state: node.state, nodes: 0, macs: 0, operators: new Set() };
    entry.nodes += 1;
    entry.macs += node.macs;
    entry.operators.add(node.operator);
    reasons.set(node.reason, entry);
  }
  if (!reasons.size) return getById("precision-table").replaceWith(createNote("No reason for float is known."));
  makeTable(getById("precision-table"), "Reasons for float", [
    { title: "Reason", value: (row) => row.reason, cell: (row) => row.reason },
    { title: "Result", value: (row) => row.state, cell: (row) => createBadge(row.state) },
    { title: "Operators", value: (row) => [...row.operators].join(), cell: (row) => [...row.operators].slice(0, 4).join(", ") },
    { title: "Nodes", numeric: true, value: (row) => row.nodes, cell: (row) => formatCount(row.nodes) },
    { title: "MACs", numeric: true, value: (row) => row.macs, cell: (row) => (row.macs ? [formatPercent(row.macs, total.macs), createBar(row.macs / total.macs, 0, row.state)] : "") },
  ], [...reasons.values()], { sorted: 4 });
}

function showLatency() {
  if (!report.latency) {
    getById("latency-lead").remove();
    return getById("latency-bars").append(createNote(report.unavailable.latency || "The runtime reported no times."));
  }
  const total = report.latency.seconds;
  getById("latency-lead").textContent = `${report.target} reports ${formatSeconds(total)} for a call on ${report.example.join(", ")}. ${formatPercent(report.latency.unassigned, total) || "0 %"} of this time belongs to no node: layout changes, and conversions between float and INT8. Fused nodes have no time of their own. Profiling takes time, so a call without it is faster.`;
  const operators = new Map();
  for (const node of report.nodes) {
    if (node.seconds === null) continue;
    const entry = operators.get(node.operator) || { operator: node.operator, nodes: 0, seconds: 0 };
    entry.nodes += 1;
    entry.seconds += node.seconds;
    operators.set(node.operator, entry);
  }
  const slowestOperators = [...operators.values()].sort((one, other) => other.seconds - one.seconds).slice(0, 8);
  getById("latency-bars").append(createElement("div", { class: "bars" }, slowestOperators.map((operator) => [createElement("span", {}, operator.operator), createBar(operator.seconds / slowestOperators[0].seconds), createElement("span", { class: "number" }, formatSeconds(operator.seconds)), createElement("span", { class: "number" }, formatPercent(operator.seconds, total))])));
  const rows = report.nodes.map((node, index) => ({ ...node, index })).filter((node) => node.seconds !== null);
  const slowest = Math.max(...rows.map((row) => row.seconds));
  makeTable(getById("latency-table"), "Time of nodes", [
    { title: "Module", value: formatPath, cell: (row) => createPathSpan(row) },
    { title: "Operator", value: (row) => row.operator, cell: (row) => row.operator },
    { title: "Runs in", value: (row) => row.runs, cell: (row) => row.runs || "" },
    { title: "Time", numeric: true, value: (row) => row.seconds, cell: (row) => formatSeconds(row.seconds) },
    { title: "Share", numeric: true, value: (row) => row.seconds, cell: (row) => formatPercent(row.seconds, total) },
    { title: "", value: (row) => row.seconds, cell: (row) => createBar(row.seconds / slowest, 0, row.state) },
  ], rows, { sorted: 3, choose: (row, line) => openNode(row.index, line), keyOf: (row) => row.index });
}

function showTargets() {
  if (!report.targets.length) return getById("targets-table").replaceWith(createNote(report.unavailable.targets));
  const showIfSupported = (row, text) => (row.unsupported_reason ? "" : text);
  makeTable(getById("targets-table"), "Targets", [
    { title: "Target", value: (row) => row.target, cell: (row) => row.target },
    { title: "Quantized layers", numeric: true, value: (row) => row.layers, cell: (row) => showIfSupported(row, `${formatCount(row.layers)} of ${formatCount(row.total_layers)}`) },
    { title: "Quantized MACs", hint: "Share of all MACs that the runtime runs in INT8 or with low-bit weights", numeric: true, value: (row) => row.share, cell: (row) => (row.share === null ? "" : formatPercent(row.share, 1)) },
    { title: "File", numeric: true, value: (row) => row.bytes, cell: (row) => showIfSupported(row, formatBytes(row.bytes)) },
    { title: "Predicted SQNR", numeric: true, value: (row) => row.sqnr, cell: (row) => formatDecibels(row.sqnr) },
    { title: "Latency", numeric: true, value: (row) => row.seconds, cell: (row) => (row.is_emulated ? "not measured: emulated" : formatSeconds(row.seconds)) },
    { title: "Relative to float", numeric: true, value: (row) => row.ratio, cell: (row) => (row.ratio === null ? "" : `${formatNumber(row.ratio)} ×`) },
    { title: "Reason for missing facts", value: (row) => row.unsupported_reason || row.unavailable_reason, cell: (row) => row.unsupported_reason || row.unavailable_reason },
  ], report.targets);
}

function showWarnings() {
  const list = report.warnings.map((text) => createElement("li", {}, text));
  getById("warnings-list").append(list.length ? createElement("ul", { class: "warnings" }, list) : createNote("No warnings."));
}

function showReproduction() {
  const { settings, code, versions, machine, seconds: stages } = report.reproduction;
  const packages = Object.entries(versions).filter(([name, version]) => name !== "Python" && /^\d/.test(version));
  const blocks = [["settings.yaml", settings], ["Python", code], ["requirements.txt", packages.map(([name, version]) => `${name}==${version.split("+")[0]}\n`).join("")]];
  const pairs = (title, entries) => createElement("div", {}, createElement("h3", {}, title), createElement("dl", {}, entries.map(([name, text]) => [createElement("dt", {}, name), createElement("dd", {}, text)])));
  if (report.unavailable.reproduction) getById("reproduction-blocks").append(createNote(report.unavailable.reproduction));
  getById("reproduction-blocks").append(
    createElement("div", { class: "blocks" }, blocks.map(([title, text]) => createBlock(title, text))),
    createElement("div", { class: "facts" }, pairs("Versions", Object.entries(versions)), pairs("Machine", [["created", report.created], ...Object.entries(machine)]),
      pairs("Inputs and outputs", [...report.inputs.map((text) => ["input", text]), ...report.outputs.map((text) => ["output", text])]),
      pairs("Time of stages", Object.entries(stages).map(([name, duration]) => [name, formatSeconds(duration)]))));
}

function createBlock(title, text) {
  const shown = createElement("pre", { tabindex: 0 }, text);
  const copy = createElement("button", { onclick: () => copyText(copy, shown) }, "Copy");
  return createElement("figure", {}, createElement("figcaption", {}, title, copy), shown);
}

function copyText(button, shown) {
  const selection = window.getSelection();
  selection.selectAllChildren(shown);
  const isCopied = document.execCommand("copy"); // pages from a file have no navigator.clipboard
  if (isCopied) selection.removeAllRanges();
  button.textContent = isCopied ? "Copied" : "Selected";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function showNavigation() {
  const list = document.querySelector("#navigation ol");
  const links = new Map();
  for (const section of document.querySelectorAll("section")) {
    const amount = section.id === "warnings" && report.warnings.length ? createElement("b", { class: "amount" }, formatCount(report.warnings.length)) : "";
    const link = createElement("a", { href: `#${section.id}` }, section.dataset.title, amount);
    links.set(section, link);
    list.append(createElement("li", {}, link));
  }
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) links.get(target).classList.toggle("visible", isIntersecting);
    const current = [...links.values()].find((link) => link.classList.contains("visible"));
    links.forEach((link) => (link === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-20% 0px -55% 0px" });
  links.forEach((_, section) => observer.observe(section));
}

showOverview();
showHierarchy();
showLayers();
showSensitivity(getById("sensitivity-plot"));
showThresholds(getById("thresholds-plot"));
if (!report.what_if.length) getById("thresholds-all").remove();
showActivations();
showPrecision();
showLatency();
showTargets();
showWarnings();
showReproduction();
showNavigation();
