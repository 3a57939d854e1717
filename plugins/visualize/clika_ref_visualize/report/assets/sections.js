// Fills each section with what there is, or with why there is nothing, and lets the navigation follow.

const whole = report.modules[0];

function tile(title, text, hint) {
  return make("div", { class: "tile", title: hint }, make("span", {}, title), make("b", {}, text));
}

function showOverview() {
  at("model").textContent = report.model;
  document.querySelector("#overview h1").append(report.model, make("small", {}, `for ${report.target}`));
  const given = report.example.length ? `; times and products are of a call on ${report.example.join(", ")}` : "";
  at("summary").textContent = `${report.summary ? `${report.summary[0].toUpperCase()}${report.summary.slice(1)}` : sentence(report.missing.sensitivity || "")}${given}.`;
  const own = report.targets[0];
  const tiles = [tile("Nodes", count(report.nodes.length)), tile("Parameters", products(report.parameters), count(report.parameters))];
  if (whole.integers) tiles.push(tile(`Layers ${SMALL}`, `${count(whole.integers)} of ${count(whole.layers)}`));
  tiles.push(tile("Weights and constants", report.bytes_after < report.bytes_before ? `${bytes(report.bytes_before)} → ${bytes(report.bytes_after)}` : bytes(report.bytes_before)));
  if (report.bytes_of_file !== null) tiles.push(tile("File", bytes(report.bytes_of_file)));
  if (whole.integers) tiles.push(tile(`Products ${SMALL}`, percent(whole.products_in_integers, whole.products), "Of the products of all layers"));
  if (report.chosen && report.chosen.sqnr !== null) tiles.push(tile("Predicted SQNR", decibels(report.chosen.sqnr), "Of the part of the outputs that varies with the input"));
  if (own && own.seconds !== null) tiles.push(tile("A call", seconds(own.seconds), "The median of calls on the example"));
  if (own && own.ratio !== null) tiles.push(tile("Of the time in float", `${significant(own.ratio, 3)} ×`));
  if (!(own && own.seconds !== null) && report.latency) tiles.push(tile("A call, profiled", seconds(report.latency.seconds), "As the runtime tells of its nodes; telling takes time as well"));
  at("tiles").append(...tiles);
  const parts = Object.keys(STATES).map((state) => {
    const nodes = report.nodes.filter((node) => node.state === state);
    return [state, nodes.length, `${STATES[state]}, ${plural(nodes.length, "node")}`];
  }).filter((part) => part[1]);
  at("split").append(stacked(parts, "Nodes"), legend(parts.map((part) => part[0])));
}

function showLayers() {
  const rows = report.nodes.map((node, place) => ({ ...node, place }));
  const largest = Math.max(...rows.map((row) => row.bytes_before), 1);
  const sensitive = rows.map((row) => row.sensitivity).filter((x) => x > 0);
  const [low, high] = [Math.min(...sensitive), Math.max(...sensitive)];
  const weighed = logarithmic(low / 2, high * 1.0001, 0.02, 1);
  const slowest = Math.max(...rows.map((row) => row.seconds || 0));
  const columns = [
    { title: "#", numeric: true, hint: "In the order in which they are computed", value: (row) => -row.place, cell: (row) => count(row.place + 1) },
    { title: "Module", value: pathOf, cell: (row) => pathSpan(row) },
    { title: "Operator", value: (row) => row.operator, cell: (row) => row.operator },
    { title: "Became", hint: "What was planned, and what the runtime does", value: (row) => Object.keys(STATES).indexOf(row.state), cell: (row) => badge(row.state) },
    { title: "Bits", numeric: true, hint: "Of weights, and of what the layer reads", value: (row) => (row.bits ? row.bits[0] : null), cell: (row) => (row.bits ? row.bits.join(" / ") : "") },
    { title: "QS", numeric: true, hint: "Quantization sensitivity", value: (row) => row.sensitivity,
      cell: (row) => (row.sensitivity === null ? "" : [significant(row.sensitivity), bar(row.sensitivity > 0 ? weighed(row.sensitivity) : 0, 0, row.state)]) },
    { title: "Before", numeric: true, hint: "Bytes of its weight in float", value: (row) => (row.bits ? row.bytes_before : null), cell: (row) => (row.bits ? bytes(row.bytes_before) : "") },
    { title: "After", numeric: true, hint: "Bytes of its weight as it is written", value: (row) => (row.bits ? row.bytes_after : null),
      cell: (row) => (row.bits ? [bytes(row.bytes_after), bar(row.bytes_after / largest, row.bytes_before / largest, row.state)] : "") },
    { title: "Products", numeric: true, value: (row) => row.products || null, cell: (row) => products(row.products) },
    { title: "Runs in", hint: "Read from the graph that the runtime really runs", value: (row) => row.runs, cell: (row) => row.runs || "" },
  ];
  if (slowest) columns.push({ title: "Time", numeric: true, value: (row) => row.seconds, cell: (row) => (row.seconds === null ? "" : [seconds(row.seconds), bar(row.seconds / slowest)]) });
  if (rows.some((row) => row.reason)) columns.push({ title: "Why", value: (row) => row.reason, cell: (row) => make("span", { class: "why", title: row.reason }, row.reason) });
  const told = columns.filter((column) => column.title !== "QS" || rows.some((row) => row.sensitivity !== null));
  const table = makeTable(at("layers-table"), "Layers and nodes", told, rows, { choose: (row, line) => openNode(row.place, line), keyOf: (row) => row.place });
  filterTools(at("layers-tools"), table, {
    label: "Filter by module, operator or reason",
    text: (row) => `${row.scope} ${row.name} ${row.operator} ${row.reason} ${STATES[row.state]}`,
    choices: [["Layers", (row) => row.bits !== null], ["All nodes", () => true],
      ...Object.entries(STATES).filter(([state]) => rows.some((row) => row.state === state)).map(([state, text]) => [`Only ${text}`, (row) => row.state === state])],
  });
}

function showValues() {
  if (report.missing.values) return at("values-table").replaceWith(note(report.missing.values));
  const rows = report.values.map((value, place) => ({ ...value, place })).filter((value) => value.seen);
  const columns = [
    { title: "Value", value: (row) => row.name, cell: (row) => row.name },
    { title: "Type", value: (row) => row.type, cell: (row) => make("span", { class: "why", title: row.type }, row.type) },
    { title: "Held from", numeric: true, value: (row) => row.seen.low, cell: (row) => significant(row.seen.low) },
    { title: "to", numeric: true, value: (row) => row.seen.high, cell: (row) => significant(row.seen.high) },
    { title: "Histogram", hint: "Logarithm of counts; sorts by the width of what was held", value: (row) => row.seen.high - row.seen.low, cell: sparkline },
    { title: "Covered from", numeric: true, value: (row) => row.covered?.low, cell: (row) => significant(row.covered?.low) },
    { title: "to", numeric: true, value: (row) => row.covered?.high, cell: (row) => significant(row.covered?.high) },
    { title: "Scale", numeric: true, value: (row) => row.covered?.scale, cell: (row) => significant(row.covered?.scale, 4) },
    { title: "Zero point", numeric: true, value: (row) => row.covered?.zero_point, cell: (row) => row.covered?.zero_point ?? "" },
    { title: "Cut off", numeric: true, hint: "The share of what was seen that lies outside", value: (row) => row.covered?.outside, cell: (row) => (row.covered && row.covered.outside !== null ? `${significant(100 * row.covered.outside, 2)} %` : "") },
    { title: "Chosen by", value: (row) => row.covered?.observer, cell: (row) => row.covered?.observer || "" },
  ];
  const table = makeTable(at("values-table"), "Ranges of values", columns, rows, { choose: (row, line) => openValue(row.place, line), keyOf: (row) => row.place });
  filterTools(at("values-tools"), table, {
    label: "Filter by name or type",
    text: (row) => `${row.name} ${row.type}`,
    choices: [...(rows.some((row) => row.covered) ? [["In integers", (row) => row.covered !== null]] : []), ["All values", () => true]],
  });
}

function showPlacement() {
  const layers = report.nodes.filter((node) => node.products);
  const sums = (of) => Object.keys(STATES).map((state) => [state, layers.filter((node) => of(node) === state).reduce((sum, node) => sum + node.products, 0), STATES[state]]);
  const planned = (node) => (node.state === "missed" ? "integers" : node.state);
  const bars = at("placement-bars");
  if (layers.length) {
    bars.append(make("p", { class: "caption" }, "Planned"), stacked(sums(planned), "Planned"), make("p", { class: "caption" }, "Run"), stacked(sums((node) => node.state), "Run"),
      legend([...new Set(layers.flatMap((node) => [planned(node), node.state]))]));
  }
  if (report.missing.runtime) bars.append(note(report.missing.runtime));
  const reasons = new Map();
  for (const node of report.nodes) {
    if (!node.reason) continue;
    const found = reasons.get(node.reason) || { reason: node.reason, state: node.state, nodes: 0, products: 0, kinds: new Set() };
    found.nodes += 1;
    found.products += node.products;
    found.kinds.add(node.operator);
    reasons.set(node.reason, found);
  }
  if (!reasons.size) return at("placement-table").replaceWith(note("No node says why it is float."));
  makeTable(at("placement-table"), "Why nodes are float", [
    { title: "Why it is not in integers", value: (row) => row.reason, cell: (row) => row.reason },
    { title: "Became", value: (row) => row.state, cell: (row) => badge(row.state) },
    { title: "Operators", value: (row) => [...row.kinds].join(), cell: (row) => [...row.kinds].slice(0, 4).join(", ") },
    { title: "Nodes", numeric: true, value: (row) => row.nodes, cell: (row) => count(row.nodes) },
    { title: "Products", numeric: true, value: (row) => row.products, cell: (row) => (row.products ? [percent(row.products, whole.products), bar(row.products / whole.products, 0, row.state)] : "") },
  ], [...reasons.values()], { sorted: 4 });
}

function showLatency() {
  if (!report.latency) {
    at("latency-lead").remove();
    return at("latency-bars").append(note(report.missing.latency || "The runtime told no times."));
  }
  const total = report.latency.seconds;
  at("latency-lead").textContent = `As ${report.target} tells of its own nodes: ${seconds(total)} for a call on ${report.example.join(", ")}, of which ${percent(report.latency.unnamed, total) || "0 %"} are changes of layout, or from floats to integers and back, which belong to no node. What is computed along with another node has no time of its own. Telling takes time as well, so that a call is shorter.`;
  const kinds = new Map();
  for (const node of report.nodes) {
    if (node.seconds === null) continue;
    const found = kinds.get(node.operator) || { operator: node.operator, nodes: 0, seconds: 0 };
    found.nodes += 1;
    found.seconds += node.seconds;
    kinds.set(node.operator, found);
  }
  const most = [...kinds.values()].sort((one, other) => other.seconds - one.seconds).slice(0, 8);
  at("latency-bars").append(make("div", { class: "bars" }, most.map((kind) => [make("span", {}, kind.operator), bar(kind.seconds / most[0].seconds), make("span", { class: "number" }, seconds(kind.seconds)), make("span", { class: "number" }, percent(kind.seconds, total))])));
  const rows = report.nodes.map((node, place) => ({ ...node, place })).filter((node) => node.seconds !== null);
  const slowest = Math.max(...rows.map((row) => row.seconds));
  makeTable(at("latency-table"), "Time of nodes", [
    { title: "Module", value: pathOf, cell: (row) => pathSpan(row) },
    { title: "Operator", value: (row) => row.operator, cell: (row) => row.operator },
    { title: "Runs in", value: (row) => row.runs, cell: (row) => row.runs || "" },
    { title: "Time", numeric: true, value: (row) => row.seconds, cell: (row) => seconds(row.seconds) },
    { title: "Of the call", numeric: true, value: (row) => row.seconds, cell: (row) => percent(row.seconds, total) },
    { title: "", value: (row) => row.seconds, cell: (row) => bar(row.seconds / slowest, 0, row.state) },
  ], rows, { sorted: 3, choose: (row, line) => openNode(row.place, line), keyOf: (row) => row.place });
}

function showTargets() {
  if (!report.targets.length) return at("targets-table").replaceWith(note(report.missing.targets));
  const none = (row, text) => (row.refusal ? "" : text);
  makeTable(at("targets-table"), "Targets", [
    { title: "Target", value: (row) => row.target, cell: (row) => row.target },
    { title: "Layers in integers or few bits", numeric: true, value: (row) => row.layers, cell: (row) => none(row, `${count(row.layers)} of ${count(row.of_layers)}`) },
    { title: "Products", hint: "The share of all layers that the runtime runs in integers, or with weights in few bits", numeric: true, value: (row) => row.share, cell: (row) => (row.share === null ? "" : percent(row.share, 1)) },
    { title: "File", numeric: true, value: (row) => row.bytes, cell: (row) => none(row, bytes(row.bytes)) },
    { title: "Predicted SQNR", numeric: true, value: (row) => row.sqnr, cell: (row) => decibels(row.sqnr) },
    { title: "A call", numeric: true, value: (row) => row.seconds, cell: (row) => (row.is_emulated ? "not measured: emulated" : seconds(row.seconds)) },
    { title: "Of float", numeric: true, value: (row) => row.ratio, cell: (row) => (row.ratio === null ? "" : `${significant(row.ratio)} ×`) },
    { title: "What is missing", value: (row) => row.refusal || row.missing, cell: (row) => row.refusal || row.missing },
  ], report.targets);
}

function showWarnings() {
  const list = report.warnings.map((text) => make("li", {}, text));
  at("warnings-list").append(list.length ? make("ul", { class: "warnings" }, list) : note("There were none."));
}

function showRepeat() {
  const { settings, code, versions, machine, seconds: stages } = report.repeat;
  const packages = Object.entries(versions).filter(([name, version]) => name !== "Python" && /^\d/.test(version));
  const blocks = [["settings.yaml", settings], ["Python", code], ["requirements.txt", packages.map(([name, version]) => `${name}==${version.split("+")[0]}\n`).join("")]];
  const pairs = (title, entries) => make("div", {}, make("h3", {}, title), make("dl", {}, entries.map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  if (report.missing.repeat) at("repeat-blocks").append(note(sentence(report.missing.repeat) + "."));
  at("repeat-blocks").append(
    make("div", { class: "blocks" }, blocks.map(([title, text]) => block(title, text))),
    make("div", { class: "facts" }, pairs("Versions", Object.entries(versions)), pairs("Machine", [["made", report.made], ...Object.entries(machine)]),
      pairs("Inputs and outputs", [...report.inputs.map((text) => ["takes", text]), ...report.outputs.map((text) => ["returns", text])]),
      pairs("Time of stages", Object.entries(stages).map(([name, taken]) => [name, seconds(taken)]))));
}

function block(title, text) {
  const shown = make("pre", { tabindex: 0 }, text);
  const copy = make("button", { onclick: () => copied(copy, shown) }, "Copy");
  return make("figure", {}, make("figcaption", {}, title, copy), shown);
}

function copied(button, shown) {
  const selection = window.getSelection();
  selection.selectAllChildren(shown);
  const isDone = document.execCommand("copy"); // the clipboard of pages from a file, which have no other one
  if (isDone) selection.removeAllRanges();
  button.textContent = isDone ? "Copied" : "Selected";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function showNavigation() {
  const list = document.querySelector("#navigation ol");
  const links = new Map();
  for (const section of document.querySelectorAll("section")) {
    const amount = section.id === "warnings" && report.warnings.length ? make("b", { class: "amount" }, count(report.warnings.length)) : "";
    const link = make("a", { href: `#${section.id}` }, section.dataset.title, amount);
    links.set(section, link);
    list.append(make("li", {}, link));
  }
  const observer = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) links.get(target).classList.toggle("seen", isIntersecting);
    const current = [...links.values()].find((link) => link.classList.contains("seen"));
    links.forEach((link) => (link === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-20% 0px -55% 0px" });
  links.forEach((_, section) => observer.observe(section));
}

showOverview();
showHierarchy();
showLayers();
showSensitivity(at("sensitivity-plot"));
showThresholds(at("thresholds-plot"));
if (!report.what_if.length) at("thresholds-all").remove();
showValues();
showPlacement();
showLatency();
showTargets();
showWarnings();
showRepeat();
showNavigation();
