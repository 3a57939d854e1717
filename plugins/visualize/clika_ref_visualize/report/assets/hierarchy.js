// The modules of the model as a foldable tree. The rows of a module are created when it is first unfolded.

const MAX_INITIAL_ROWS = 40;

function showHierarchy() {
  const children = report.modules.map(() => []);
  report.modules.forEach((module, index) => {
    if (module.parent !== null) children[module.parent].push(index);
  });
  const largest = report.modules[0];
  const firsts = report.modules.map((module) => Math.min(...module.nodes, Infinity));
  for (let index = firsts.length - 1; index > 0; index -= 1) {
    const { parent } = report.modules[index];
    firsts[parent] = Math.min(firsts[parent], firsts[index]);
  }
  const body = createElement("tbody");
  const titles = [["Module", ""], ["Nodes", "number"], ["Quantized layers", "number"], ["Bytes before", "number"], ["Bytes after", "number"],
    ["MACs", "number"]];
  const hasSensitivity = largest.sensitivity !== null;
  if (hasSensitivity) titles.push(["Max QS", "number"]);
  const hasTimes = largest.seconds !== null;
  if (hasTimes) titles.push(["Time", "number"]);
  const head = createElement("thead", {}, createElement("tr", {}, titles.map(([title, kind]) => createElement("th", { scope: "col", class: kind || null }, title))));
  getById("hierarchy-table").replaceChildren(createElement("table", { role: "treegrid", "aria-label": "Modules" }, head, body));

  const rows = new Map();

  function createNameCell(name, depth, folds, onFold) {
    const arrow = folds ? createElement("button", { class: "fold", "aria-label": "Fold or unfold", tabindex: -1, onclick: onFold }, "▸") : createElement("i", { class: "fold" });
    return createElement("td", { style: `padding-left:${8 + depth * 18}px` }, arrow, createElement("span", { class: folds ? "module" : "leaf" }, name));
  }

  function createNumberCell(...content) {
    return createElement("td", { class: "number" }, ...content);
  }

  function createModuleRow(index, depth) {
    const module = report.modules[index];
    const shares = [createNumberCell(formatCount(module.count)), createNumberCell(module.layers ? `${formatCount(module.quantized_layers)} of ${formatCount(module.layers)}` : ""),
      createNumberCell(module.bytes_before ? formatBytes(module.bytes_before) : ""), createNumberCell(module.bytes_before ? [formatBytes(module.bytes_after), createSizeBar(module)] : ""),
      createNumberCell(formatPercent(module.macs, largest.macs), createBar(module.macs / (largest.macs || 1)))];
    if (hasSensitivity) shares.push(createNumberCell(formatNumber(module.sensitivity, 2)));
    if (hasTimes) shares.push(createNumberCell(formatSeconds(module.seconds), createBar(module.seconds / largest.seconds)));
    const line = createElement("tr", { tabindex: 0, "aria-level": depth + 1, "aria-expanded": "false", class: "module-row" },
      createNameCell(lastName(module), depth, true, (event) => { event.stopPropagation(); toggle(line); }), shares);
    rows.set(line, { index, depth, inside: null });
    line.addEventListener("click", () => toggle(line));
    line.addEventListener("keydown", (event) => handleKey(event, line));
    return line;
  }

  function createSizeBar(module) {
    return createBar(module.bytes_after / (largest.bytes_before || 1), module.bytes_before / (largest.bytes_before || 1));
  }

  // A node. The only node of a module replaces the row of the module, and gets its name.
  function createNodeRow(index, depth, alone = "") {
    const node = report.nodes[index];
    const shares = [createNumberCell(), createNumberCell(createBadge(node.state)), createNumberCell(node.bits ? formatBytes(node.bytes_before) : ""), createNumberCell(node.bits ? [formatBytes(node.bytes_after), createSizeBar(node)] : ""),
      createNumberCell(node.macs ? formatPercent(node.macs, largest.macs) : "", node.macs ? createBar(node.macs / largest.macs, 0, node.state) : "")];
    if (hasSensitivity) shares.push(createNumberCell(formatNumber(node.sensitivity, 2)));
    if (hasTimes) shares.push(createNumberCell(formatSeconds(node.seconds), node.seconds === null ? "" : createBar(node.seconds / largest.seconds)));
    const line = createElement("tr", { tabindex: 0, "aria-level": depth + 1, class: "choosable" }, createNameCell(alone ? [alone, createElement("small", {}, node.operator)] : [node.operator, createElement("small", {}, node.name)], depth, false), shares);
    line.dataset.key = index;
    rows.set(line, { index: null, depth });
    line.addEventListener("click", () => openNode(index, line));
    line.addEventListener("keydown", (event) => handleKey(event, line, index));
    return line;
  }

  function createChildRow(index, depth) {
    const module = report.modules[index];
    const isAlone = module.nodes.length === 1 && !children[index].length;
    return isAlone ? createNodeRow(module.nodes[0], depth, lastName(module)) : createModuleRow(index, depth);
  }

  // Modules and nodes in execution order.
  function createInnerRows(index, depth) {
    const inner = children[index].map((child) => [firsts[child], () => createChildRow(child, depth)]);
    const own = report.modules[index].nodes.map((node) => [node, () => createNodeRow(node, depth)]);
    return [...inner, ...own].sort((one, other) => one[0] - other[0]).map(([, row]) => row());
  }

  function lastName(module) {
    return module.scope ? module.scope.split(".").pop() : report.model;
  }

  function isOpen(line) {
    return line.getAttribute("aria-expanded") === "true";
  }

  function toggle(line, opens = !isOpen(line)) {
    const row = rows.get(line);
    if (row.index === null || opens === isOpen(line)) return;
    line.setAttribute("aria-expanded", String(opens));
    if (opens) {
      row.inside ||= createInnerRows(row.index, row.depth + 1);
      line.after(...row.inside);
    } else {
      for (const inner of row.inside) {
        if (rows.get(inner).index !== null) toggle(inner, false);
        inner.remove();
      }
    }
  }

  function unfoldAll(line) {
    toggle(line, true);
    for (const inner of rows.get(line).inside) if (rows.get(inner).index !== null) unfoldAll(inner);
  }

  function handleKey(event, line, node = null) {
    const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (next) next.focus();
    else if (event.key === "ArrowRight") toggle(line, true);
    else if (event.key === "ArrowLeft" && isOpen(line)) toggle(line, false);
    else if (event.key === "ArrowLeft") findOuterRow(line)?.focus();
    else if (event.key === "Enter" || event.key === " ") node === null ? toggle(line) : openNode(node, line);
    else return;
    event.preventDefault();
  }

  function findOuterRow(line) {
    let before = line.previousElementSibling;
    while (before && rows.get(before).depth >= rows.get(line).depth) before = before.previousElementSibling;
    return before;
  }

  const root = createModuleRow(0, 0);
  body.append(root);
  toggle(root, true);
  // Unfold level by level, up to the initial number of rows.
  for (let depth = 1; depth < 12; depth += 1) {
    const level = [...body.children].filter((line) => rows.get(line).index !== null && rows.get(line).depth === depth);
    const added = level.reduce((sum, line) => sum + children[rows.get(line).index].length + report.modules[rows.get(line).index].nodes.length, 0);
    if (!level.length || body.children.length + added > MAX_INITIAL_ROWS) break;
    level.forEach((line) => toggle(line, true));
  }
  getById("hierarchy-tools").append(
    createElement("button", { onclick: () => unfoldAll(root) }, "Unfold all"),
    createElement("button", { onclick: () => { toggle(root, false); toggle(root, true); } }, "Fold all"),
  );
}
