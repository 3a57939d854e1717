// The modules of the model as a tree that folds. Rows of a module are made when it is first unfolded.

const SHOWN_AT_FIRST = 40;

function showHierarchy() {
  const children = report.modules.map(() => []);
  report.modules.forEach((module, place) => {
    if (module.parent !== null) children[module.parent].push(place);
  });
  const largest = report.modules[0];
  const firsts = report.modules.map((module) => Math.min(...module.nodes, Infinity));
  for (let place = firsts.length - 1; place > 0; place -= 1) {
    const { parent } = report.modules[place];
    firsts[parent] = Math.min(firsts[parent], firsts[place]);
  }
  const body = make("tbody");
  const titles = [["Module", ""], ["Nodes", "number"], [`Layers ${SMALL}`, "number"], ["Bytes before", "number"], ["Bytes after", "number"],
    ["Products", "number"]];
  const weighed = largest.sensitivity !== null;
  if (weighed) titles.push(["Largest QS", "number"]);
  const timed = largest.seconds !== null;
  if (timed) titles.push(["Time", "number"]);
  const head = make("thead", {}, make("tr", {}, titles.map(([title, kind]) => make("th", { scope: "col", class: kind || null }, title))));
  at("hierarchy-table").replaceChildren(make("table", { role: "treegrid", "aria-label": "Modules" }, head, body));

  const rows = new Map();

  function nameCell(name, depth, folds, onFold) {
    const arrow = folds ? make("button", { class: "fold", "aria-label": "Fold or unfold", tabindex: -1, onclick: onFold }, "▸") : make("i", { class: "fold" });
    return make("td", { style: `padding-left:${8 + depth * 18}px` }, arrow, make("span", { class: folds ? "module" : "leaf" }, name));
  }

  function number(...content) {
    return make("td", { class: "number" }, ...content);
  }

  function moduleRow(place, depth) {
    const module = report.modules[place];
    const shares = [number(count(module.count)), number(module.layers ? `${count(module.integers)} of ${count(module.layers)}` : ""),
      number(module.bytes_before ? bytes(module.bytes_before) : ""), number(module.bytes_before ? [bytes(module.bytes_after), sizeBar(module)] : ""),
      number(percent(module.products, largest.products), bar(module.products / (largest.products || 1)))];
    if (weighed) shares.push(number(significant(module.sensitivity, 2)));
    if (timed) shares.push(number(seconds(module.seconds), bar(module.seconds / largest.seconds)));
    const line = make("tr", { tabindex: 0, "aria-level": depth + 1, "aria-expanded": "false", class: "module-row" },
      nameCell(lastName(module), depth, true, (event) => { event.stopPropagation(); toggle(line); }), shares);
    rows.set(line, { place, depth, inside: null });
    line.addEventListener("click", () => toggle(line));
    line.addEventListener("keydown", (event) => walk(event, line));
    return line;
  }

  function sizeBar(module) {
    return bar(module.bytes_after / (largest.bytes_before || 1), module.bytes_before / (largest.bytes_before || 1));
  }

  // A node; one that a module holds alone stands in its place, under its name.
  function nodeRow(place, depth, alone = "") {
    const node = report.nodes[place];
    const shares = [number(), number(badge(node.state)), number(node.bits ? bytes(node.bytes_before) : ""), number(node.bits ? [bytes(node.bytes_after), sizeBar(node)] : ""),
      number(node.products ? percent(node.products, largest.products) : "", node.products ? bar(node.products / largest.products, 0, node.state) : "")];
    if (weighed) shares.push(number(significant(node.sensitivity, 2)));
    if (timed) shares.push(number(seconds(node.seconds), node.seconds === null ? "" : bar(node.seconds / largest.seconds)));
    const line = make("tr", { tabindex: 0, "aria-level": depth + 1, class: "choosable" }, nameCell(alone ? [alone, make("small", {}, node.operator)] : [node.operator, make("small", {}, node.name)], depth, false), shares);
    line.dataset.key = place;
    rows.set(line, { place: null, depth });
    line.addEventListener("click", () => openNode(place, line));
    line.addEventListener("keydown", (event) => walk(event, line, place));
    return line;
  }

  function childRow(place, depth) {
    const module = report.modules[place];
    const isAlone = module.nodes.length === 1 && !children[place].length;
    return isAlone ? nodeRow(module.nodes[0], depth, lastName(module)) : moduleRow(place, depth);
  }

  // Modules and nodes in the order in which they are computed.
  function insideOf(place, depth) {
    const inner = children[place].map((child) => [firsts[child], () => childRow(child, depth)]);
    const own = report.modules[place].nodes.map((node) => [node, () => nodeRow(node, depth)]);
    return [...inner, ...own].sort((one, other) => one[0] - other[0]).map(([, row]) => row());
  }

  function lastName(module) {
    return module.scope ? module.scope.split(".").pop() : report.model;
  }

  function isOpen(line) {
    return line.getAttribute("aria-expanded") === "true";
  }

  function toggle(line, opens = !isOpen(line)) {
    const held = rows.get(line);
    if (held.place === null || opens === isOpen(line)) return;
    line.setAttribute("aria-expanded", String(opens));
    if (opens) {
      held.inside ||= insideOf(held.place, held.depth + 1);
      line.after(...held.inside);
    } else {
      for (const inner of held.inside) {
        if (rows.get(inner).place !== null) toggle(inner, false);
        inner.remove();
      }
    }
  }

  function unfoldAll(line) {
    toggle(line, true);
    for (const inner of rows.get(line).inside) if (rows.get(inner).place !== null) unfoldAll(inner);
  }

  function walk(event, line, node = null) {
    const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (next) next.focus();
    else if (event.key === "ArrowRight") toggle(line, true);
    else if (event.key === "ArrowLeft" && isOpen(line)) toggle(line, false);
    else if (event.key === "ArrowLeft") outer(line)?.focus();
    else if (event.key === "Enter" || event.key === " ") node === null ? toggle(line) : openNode(node, line);
    else return;
    event.preventDefault();
  }

  function outer(line) {
    let before = line.previousElementSibling;
    while (before && rows.get(before).depth >= rows.get(line).depth) before = before.previousElementSibling;
    return before;
  }

  const root = moduleRow(0, 0);
  body.append(root);
  toggle(root, true);
  // Unfold level by level as long as all of it can be seen at once.
  for (let depth = 1; depth < 12; depth += 1) {
    const level = [...body.children].filter((line) => rows.get(line).place !== null && rows.get(line).depth === depth);
    const added = level.reduce((sum, line) => sum + children[rows.get(line).place].length + report.modules[rows.get(line).place].nodes.length, 0);
    if (!level.length || body.children.length + added > SHOWN_AT_FIRST) break;
    level.forEach((line) => toggle(line, true));
  }
  at("hierarchy-tools").append(
    make("button", { onclick: () => unfoldAll(root) }, "Unfold all"),
    make("button", { onclick: () => { toggle(root, false); toggle(root, true); } }, "Fold all"),
  );
}
